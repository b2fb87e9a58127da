// Where a value comes from: an image of any strides, flipped or not, mixed with a partner, or with a box of it inside.

struct Batch {
    const byte* images;
    i64 image_stride, row_stride, column_stride, channel_stride; // in elements
    int type;                                                    // of floating-point input
    int batch, channels, height, width;
    const byte* flip;
    const i64* partner;
    const float* lam;
    const int* box;
};

// What one output image is made of: its own pixels, and a partner's by weight or inside a box.
struct Source {
    i64 own, other; // offsets of the two images, in elements
    bool own_flip, other_flip, mixed, boxed;
    float weight; // of its own pixels, if mixed
    int y0, y1, x0, x1;
};

__device__ __forceinline__ Source find_source(const Batch& in, i64 image)
{
    Source s;
    s.own = s.other = image * in.image_stride;
    s.own_flip = s.other_flip = in.flip && in.flip[image];
    s.mixed = s.boxed = false;
    s.weight = 1.0f;
    s.y0 = s.y1 = s.x0 = s.x1 = 0;
    if (MIX == 0 || !in.partner)
        return s;
    i64 partner = in.partner[image];
    partner = partner < 0 ? 0 : partner >= in.batch ? in.batch - 1 : partner;
    s.other = partner * in.image_stride;
    s.other_flip = in.flip && in.flip[partner];
    if (MIX == 1 || (MIX == 3 && in.lam)) {
        s.weight = in.lam[image];
        s.mixed = s.weight != 1.0f;
    } else {
        s.y0 = in.box[4 * image];
        s.y1 = in.box[4 * image + 1];
        s.x0 = in.box[4 * image + 2];
        s.x1 = in.box[4 * image + 3];
        s.boxed = s.y0 < s.y1 && s.x0 < s.x1;
    }
    return s;
}

// Byte i of a word, less 128: 0x4B000000 | b is 2^23 + b. Conversions of integers have a sixteenth of the rate.
__device__ __forceinline__ float byte_to_float(u32 word, int i)
{
    return bits_to_float(__byte_perm(word, 0x4B000000u, 0x7540 | i)) - 8388736.0f;
}

// One value of one image, uint8 as b - 128.
__device__ __forceinline__ float load_value(const Batch& in, i64 offset)
{
#if PIXELS
    return byte_to_float(in.images[offset], 0);
#else
    if (in.type == FLOAT32)
        return ((const float*)in.images)[offset];
    u16 bits = ((const u16*)in.images)[offset];
    return in.type == FLOAT16 ? half_to_float(bits) : bits_to_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ float load_mixed(const Batch& in, const Source& s, int row, int column, int channel)
{
    i64 offset = row * in.row_stride + channel * in.channel_stride;
    i64 plain = offset + column * in.column_stride, mirrored = offset + (in.width - 1 - column) * in.column_stride;
    i64 own = s.own + (s.own_flip ? mirrored : plain), other = s.other + (s.other_flip ? mirrored : plain);
    if (s.boxed && row >= s.y0 && row < s.y1 && column >= s.x0 && column < s.x1)
        return load_value(in, other);
    float value = load_value(in, own);
    if (s.mixed)
        value = s.weight * value + (1.0f - s.weight) * load_value(in, other);
    return value;
}
