// Rows of clean and noised images, value by value, in the order in which they lie in memory.

// Any strides, any number of channels. Four pixels a thread: their C * 4 values are C whole blocks of the generator.
__device__ __forceinline__ void stream_rows(const Batch& in, const Source& s, void* out, i64 out_image, i64 out_row,
    i64 out_column, i64 out_channel, int first, int last, const float* scale, const float* bias, const Noise& noise)
{
    int width = in.width, channels = in.channels, end = last * width;
    int parts = FAST ? 1 : gridDim.y, part = FAST ? 0 : blockIdx.y, step = 4 * THREADS * parts;
    for (int pixel = first * width + 4 * (part * THREADS + threadIdx.x); pixel < end; pixel += step) {
        int row = pixel / width, column = pixel - row * width, channel = 0;
        for (int block = 0; block < channels; block++) {
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            i64 place[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                place[i] = -1;
                if (row < last) {
                    x[i] = fmaf(load_mixed(in, s, row, column, channel), noise.alpha * scale[channel],
                        noise.alpha * bias[channel]);
                    place[i] = out_image + row * out_row + column * out_column + channel * out_channel;
                }
                if (++channel == channels) {
                    channel = 0;
                    if (++column == width) {
                        column = 0;
                        row++;
                    }
                }
            }
            if (noise.sigma != 0.0f)
                add_noise(x, noise, (u32)(pixel / 4) * channels + block);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (place[i] >= 0)
                    store_value(out, place[i], x[i]);
        }
    }
}

#if FAST

// Loads eight bytes of a row of interleaved pixels, from `flat` on, counted from the start of the image. Mirrored,
// value 3w + c comes from 3(W - 1 - w) + c: around the mirrored place, a multiple of 8, nine bytes are needed if
// channel = flat % 3 is 0 (9 before it) or 1 (8 before, 1 after), and twelve if it is 2 (10 before, 2 after).
__device__ __forceinline__ void fetch_bytes(
    u32 (&word)[4], const byte* image, bool flip, int flat, int rest, int channel, int row_bytes)
{
    word[0] = word[3] = 0;
    if (flip) {
        flat += row_bytes - 2 * rest;
        if (channel != 1)
            word[0] = *(const u32*)(image + flat - 12);
        if (channel != 0)
            word[3] = *(const u32*)(image + flat);
        flat -= 8;
    }
    uint2 pair = *(const uint2*)(image + flat);
    word[1] = pair.x;
    word[2] = pair.y;
}

// The eight bytes in order, from what fetch_bytes loaded; channel is flat % 3.
__device__ __forceinline__ uint2 sort_bytes(const u32 (&word)[4], bool flip, int channel)
{
    if (!flip)
        return make_uint2(word[1], word[2]);
    u32 low = __byte_perm(word[1], word[2], channel == 0 ? 0x2765 : channel == 1 ? 0x4307 : 0x6540);
    u32 high = __byte_perm(word[1], word[2], channel == 0 ? 0x0043 : channel == 1 ? 0x2105 : 0x0321);
    return make_uint2(__byte_perm(low, word[3], channel == 0 ? 0x3210 : channel == 1 ? 0x3240 : 0x3215),
        __byte_perm(high, word[0], channel == 0 ? 0x3710 : channel == 1 ? 0x3210 : 0x6210));
}

// Interleaved bytes to channels-last half precision, both without gaps: eight values a thread, 16 bytes a store.
// W is a multiple of 8, so that eight values never cross a row. Shared memory has room for the rows of both images.
__device__ __forceinline__ void stream_flat(const Batch& in, const Source& s, u16* out, int first, int last,
    const float* scale, const float* bias, const Noise& noise, byte* shared)
{
    // A multiple of three threads: a thread then meets its channels in the same order each time.
    const int threads = THREADS / 3 * 3, step = 8 * threads;
    int row_bytes = 3 * in.width, begin = first * row_bytes, size = (last - first) * row_bytes;
    bool both = MIX != 0 && (s.mixed || s.boxed);
    for (int i = 8 * threadIdx.x; i < size; i += 8 * THREADS) {
        copy_async(shared + i, in.images + s.own + begin + i);
        if (both)
            copy_async(shared + size + i, in.images + s.other + begin + i);
    }
    const byte* own = shared - begin;
    const byte* other = own + size;
    int flat = begin + 8 * threadIdx.x, end = begin + size, channel = 2 * threadIdx.x % 3;
    int row = flat / row_bytes, rest = flat - row * row_bytes, rows = step / row_bytes, rest_step = step % row_bytes;
    float a[3], b[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        a[i] = noise.alpha * scale[(channel + i) % 3];
        b[i] = noise.alpha * bias[(channel + i) % 3];
    }
    wait_for_copies();
    __syncthreads();
    if ((int)threadIdx.x >= threads)
        return;
#pragma unroll 2
    for (; flat < end; flat += step) {
        u32 loaded[4];
        fetch_bytes(loaded, own, s.own_flip, flat, rest, channel, row_bytes);
        uint2 pixels = sort_bytes(loaded, s.own_flip, channel);
        u32 word[2] = {pixels.x, pixels.y};
        if (MIX != 0 && s.boxed && row >= s.y0 && row < s.y1 && rest + 8 > 3 * s.x0 && rest < 3 * s.x1) {
            fetch_bytes(loaded, other, s.other_flip, flat, rest, channel, row_bytes);
            uint2 inside = sort_bytes(loaded, s.other_flip, channel);
            u32 patch[2] = {inside.x, inside.y};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u32 mask = rest + i >= 3 * s.x0 && rest + i < 3 * s.x1 ? 0xFFu << (8 * (i % 4)) : 0u;
                word[i / 4] = (word[i / 4] & ~mask) | (patch[i / 4] & mask);
            }
        }
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = byte_to_float(word[i / 4], i % 4);
        if (MIX != 0 && s.mixed) {
            fetch_bytes(loaded, other, s.other_flip, flat, rest, channel, row_bytes);
            uint2 second = sort_bytes(loaded, s.other_flip, channel);
            u32 mix[2] = {second.x, second.y};
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = s.weight * x[i] + (1.0f - s.weight) * byte_to_float(mix[i / 4], i % 4);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = fmaf(x[i], a[i % 3], b[i % 3]);
        if (noise.sigma != 0.0f) {
            add_noise(x, noise, (u32)flat / 4);
            add_noise(x + 4, noise, (u32)flat / 4 + 1);
        }
        *(uint4*)(out + flat) = make_uint4(pack_output(x[0], x[1]), pack_output(x[2], x[3]), pack_output(x[4], x[5]),
            pack_output(x[6], x[7]));
        row += rows;
        rest += rest_step;
        if (rest >= row_bytes) {
            rest -= row_bytes;
            row++;
        }
    }
}

#endif
