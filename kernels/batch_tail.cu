// The batch tail in one pass over memory: flip, standardise, MixUp or CutMix, then nothing, noise or blur, then cast.
//
// One block computes ROWS rows of one image, whatever its role, so a batch of mixed roles is one launch. Clean and
// noised rows are copied to shared memory, all at once and without registers, and go out from there. Blurred rows are
// Y = A_H X A_W (see heat_blur.py) by matrix instructions, in two products:
//
//   1. T = A_H[rows, :] X. X comes straight from device memory in the layout of the instruction, without shared memory
//      or a barrier: a warp owns 32 pixel columns, a thread four adjacent pixels of them, and bytes become float16 by
//      permutes (0x6400 | b is 1024 + b; less 1152: b - 128, exactly). T stays in shared memory, a plane a channel.
//   2. Y = T A_W, again 32 columns a warp. A thread ends up with eight adjacent pixels of all channels and stores them
//      as 16-byte words: no tile of the output is staged.
//
// A is Toeplitz plus Hankel, A[i, j] = h[|i - j|] + h[i + j + 1]. Every block computes the h it needs (at most R + 1
// sums of a few hundred terms), stores its rows of A_H, and takes A_W from a table of h, two words a pair of elements.
// h includes the Nyquist term g_N (-1)^m / 2N, which cancels between the two parts but makes h decay like 1/m^2 at
// worst; it is cut at |m| > R and divided by its sum, so that rows of A still sum to 1 and the products only visit a
// band. Rows that sum to 1 are also why b - 128 can be blurred instead of pixels, and standardised after.
//
// Compiled for one combination of
//   PIXELS 1: uint8 NHWC input, 0: floating-point input, of magnitude below 65504 where it is blurred
//   OUTPUT 0: float32, 1: float16, 2: bfloat16
//   FAST   1: PIXELS, OUTPUT in half precision, no gaps between pixels and rows of the input, images that start at
//             multiples of 8 bytes, a width that is a multiple of 8; 0: any strides, one channel a block where it blurs
//   MIX    0: no partners, 1: MixUp, 2: CutMix, 3: decided by the arguments
//   ROWS   16 or 32 rows a block: what shared memory has room for
//   THREADS, RESIDENT   threads a block, and blocks that shall fit the registers of a multiprocessor
//   HEIGHT, WIDTH       of the images, if FAST, else 0: most instructions of a fast kernel would compute addresses
// A float32 result takes both operands in two float16 halves (22 bits), sums all but the product of the low halves, and
// cuts h only where a Gaussian has nothing left.
//
// No header is included: the few instructions that C++ cannot say are below, and a host that defines them (and the CUDA
// keywords) can run this file.

#define HALVES (OUTPUT == 0 ? 2 : 1)
#if FAST
#define CHANNELS 3
#else
#define CHANNELS 1 // blockIdx.y
#endif

typedef unsigned char byte;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { CLEAN, NOISE, BLUR, PURE_NOISE };
enum { FLOAT32, FLOAT16, BFLOAT16 };

#define PI 3.14159265358979f

#ifdef __CUDACC__

// d += a b for a (16 x 16, float16), b (16 x 8, float16), d (16 x 8, float32). With g = lane / 4 and q = lane % 4, a
// thread holds a[g | g + 8][2q, 2q + 1 | 2q + 8, 2q + 9], b[2q, 2q + 1 | 2q + 8, 2q + 9][g], d[g | g + 8][2q, 2q + 1].
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of float16 from shared memory; lane l gives the address of row l % 8 of matrix l / 8. Between the
// writing and the reading is always a barrier, so "memory" is not declared: loads of pixels may move across.
__device__ __forceinline__ void load_matrices(u32 (&a)[4], const u16* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"((u32)__cvta_generic_to_shared(row)));
}

__device__ __forceinline__ u32 pack_half(float low, float high)
{
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ u32 pack_bfloat(float low, float high)
{
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ __forceinline__ float half_to_float(u16 half)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

__device__ __forceinline__ u32 add_halves(u32 a, u32 b)
{
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// Eight bytes to shared memory, without waiting for them.
__device__ __forceinline__ void copy_async(byte* to, const byte* from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float fast_sqrt(float x)
{
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

#endif

__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }

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

// ------------------------------------------------------------------------------------------------------ random numbers

__device__ __forceinline__ void philox(u32 (&c)[4], u32 k0, u32 k1)
{
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xD2511F53u * c[0], b = (u64)0xCD9E8D57u * c[2];
        u32 c0 = (u32)(b >> 32) ^ c[1] ^ k0, c2 = (u32)(a >> 32) ^ c[3] ^ k1;
        c[1] = (u32)b;
        c[3] = (u32)a;
        c[0] = c0;
        c[2] = c2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// -2 ln u for u in (0, 1]. The fast logarithm has an absolute error of 2^-22 near 1, where the square root would
// magnify it, to 2e-6 at d = 0.003: below that the series of ln(1 - d), whose fourth term is 4e-11 there, takes over.
__device__ __forceinline__ float minus_two_log(float u)
{
    float d = 1.0f - u;
    float near = d * (2.0f + d * (1.0f + d * (2.0f / 3.0f)));
    return d < 0.003f ? near : -1.38629436f * __log2f(u);
}

struct Noise {
    float alpha, sigma; // of the image and of the noise
    u32 counter[3], key[2];
};

// Add to x the normals 4 * block ... 4 * block + 3 of the sample's stream, times sigma: by Box and Muller, as philox.py
// defines them. The fast sine and cosine are good to 2^-21 on [-π, π], so the turn is shifted by a half and the sign
// put right.
__device__ __forceinline__ void add_noise(float* x, const Noise& noise, u32 block)
{
    u32 words[4] = {block, noise.counter[0], noise.counter[1], noise.counter[2]};
    philox(words, noise.key[0], noise.key[1]);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        float u = fmaf((float)words[i], 2.3283064365386963e-10f, 1.1641532182693481e-10f);
        float angle = fmaf((float)words[i + 1], 2.3283064365386963e-10f * (2.0f * PI), -PI);
        float radius = -noise.sigma * fast_sqrt(minus_two_log(u));
        x[i] = fmaf(radius, __cosf(angle), x[i]);
        x[i + 1] = fmaf(radius, __sinf(angle), x[i + 1]);
    }
}

// -------------------------------------------------------------------------------------------------------------- output

__device__ __forceinline__ u32 pack_output(float low, float high)
{
    return OUTPUT == FLOAT16 ? pack_half(low, high) : pack_bfloat(low, high);
}

__device__ __forceinline__ void store_value(void* out, i64 offset, float value)
{
#if OUTPUT == 0
    ((float*)out)[offset] = value;
#else
    ((u16*)out)[offset] = (u16)pack_output(value, 0.0f);
#endif
}

// ---------------------------------------------------------------------------------------- clean and noised images

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

// ------------------------------------------------------------------------------------------------------ blurred images

__device__ __forceinline__ int round_up(int value, int to) { return (value + to - 1) / to * to; }

// Where h is cut. Half precision: beyond max(32, 4σ) pixels. At worst, near σ = 0.5, what a row of 224 loses has norm
// 3e-4: that much of white noise. make_kernel scales the rest to sum to 1 again, so that constant images stay as they
// are; the block has all of h in shared memory, and the sum is one short pass. (The Triton kernels make h in many
// programs, and do without: their rows lose 7e-5 of their sum.) Float32: nothing is cut for σ < 2, where the spectrum
// has not died out at Nyquist.
__device__ __forceinline__ int find_reach(float sigma, int size)
{
    float reach = HALVES == 1 ? fmaxf(32.0f, 4.0f * sigma) : sigma < 2.0f ? 1e9f : 5.5f * sigma + 1.0f;
    return reach >= (float)size ? size : (int)ceilf(reach);
}

// The columns of A, in whole steps, that are not zero in rows [first, first + span).
__device__ __forceinline__ void find_band(int& from, int& to, int first, int span, int reach, int size, int step)
{
    int begin = first - reach, end = round_up(size, step);
    from = begin < 0 ? 0 : begin / step * step;
    to = round_up(first + span + reach, step);
    to = to < end ? to : end;
}

template <int LANES> __device__ __forceinline__ float add_lanes(float value)
{
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
    return value;
}

// Fill h[-P ... 2P + 1], P being N rounded up to 32. `work` has room for 4N + 2 floats. Every thread of the block takes
// part, and may use h at return.
__device__ __forceinline__ void make_kernel(float* whole, float* work, float sigma, int size, int reach)
{
    float* h = work;                     // h[m], m <= N, without the norm
    float* cosine = h + size + 1;        // cos(πj/N), j < 2N
    float* spectrum = cosine + 2 * size; // ε_k exp(-(σπk/N)²/2) / 2N, k <= N
    float inverse = 1.0f / (float)size;
    for (int j = threadIdx.x; j < 2 * size; j += THREADS)
        cosine[j] = cospif(HALVES == 2 ? (float)j / (float)size : (float)j * inverse); // float32 shows the difference
    for (int k = threadIdx.x; k <= size; k += THREADS) {
        float x = sigma * (PI * inverse) * (float)k;
        spectrum[k] = expf(-0.5f * x * x) * (k == 0 || k == size ? 0.5f * inverse : inverse);
    }
    __syncthreads();
    // exp(-21) = 8e-10: what follows is nothing in float32.
    float cut = ceilf(6.5f * (float)size / (sigma * PI));
    int terms = cut < (float)size ? (int)cut : size;
    // Eight lanes a sum: with more, there would be more to add up at the end; with fewer, less at the same time.
    // k m modulo 2N, by additions: from one m of the lanes to the next, and from one k of a lane to the next.
    const int lanes = 8, groups = THREADS / lanes;
    int period = 2 * size, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
    int start = lane * group % period, start_step = lane * groups % period;
    int step = lanes * group % period, step_step = lanes * groups % period;
    for (int m = group; m - group <= reach; m += groups) {
        float sum = 0.0f;
        if (m <= reach)
#pragma unroll 4
            for (int k = lane, place = start; k <= terms; k += lanes) {
                sum = fmaf(spectrum[k], cosine[place], sum);
                place += step;
                place -= place >= period ? period : 0;
            }
        sum = add_lanes<lanes>(sum);
        if (lane == 0 && m <= reach)
            h[m] = sum;
        start += start_step;
        start -= start >= period ? period : 0;
        step += step_step;
        step -= step >= period ? period : 0;
    }
    __syncthreads();
    // The period 2N holds h[0] and h[N] once, all others twice.
    float total = 0.0f;
    for (int m = threadIdx.x % 32; m <= reach; m += 32)
        total += m == 0 || m == size ? h[m] : 2.0f * h[m];
    float norm = 1.0f / add_lanes<32>(total);
    // h is even and has period 2N.
    int padded = round_up(size, 32);
    for (int i = threadIdx.x; i <= 3 * padded + 1; i += THREADS) {
        int m = i < padded ? padded - i : i - padded;
        m = m >= period ? (m - period) % period : m;
        m = m > size ? period - m : m;
        whole[i] = m <= reach ? norm * h[m] : 0.0f;
    }
    __syncthreads();
}

// What is left of two floats after rounding to the float16 pair `high`.
__device__ __forceinline__ u32 pack_rest(float x, float y, u32 high)
{
    return pack_half(x - half_to_float((u16)high), y - half_to_float((u16)(high >> 16)));
}

// T holds the columns of 32 pixels in the order in which product 1 leaves them: place 8p + n is pixel 4n + p. Product 2
// sums over them, so its matrix takes the same order: the pair of float16 at places 8p + 2q, 8p + 2q + 1 is pixels
// 8q + p, 8q + p + 4.
#define PAIR 4

// A[i, j] and A[i, j + PAIR] as float16, all of it or the high and the low halves, from the places of h[j - i] and of
// h[i + j + 1] in the table.
__device__ __forceinline__ void matrix_pair(u32 (&pair)[HALVES], const u32* apart, const u32* mirrored)
{
#if HALVES == 1
    pair[0] = add_halves(*apart, *mirrored);
#else
    float x = bits_to_float(*apart) + bits_to_float(*mirrored);
    float y = bits_to_float(apart[PAIR]) + bits_to_float(mirrored[PAIR]);
    pair[0] = pack_half(x, y);
    pair[1] = pack_rest(x, y, pair[0]);
#endif
}

#if FAST

// Where the 12 bytes of the four pixels that are shown from `column` on begin in a row. In a mirrored image they lie as
// pixels 3, 2, 1, 0. The column is a multiple of 4; past the end of the row, the last four pixels stand in.
__device__ __forceinline__ int find_chunk(int width, bool flip, int column)
{
    int from = column < width ? column : width - 4;
    return 3 * (flip ? width - 4 - from : from);
}

// Word w of four pixels, in the order of a mirrored image or not, with the partner's pixels where the box is.
__device__ __forceinline__ u32 patch_word(
    u32 word, const Batch& in, const Source& s, bool flip, int w, int row, int column)
{
    if (row < s.y0 || row >= s.y1 || column + 4 <= s.x0 || column >= s.x1 || column >= in.width)
        return word;
    const byte* patch = in.images + s.other + row * (int)in.row_stride + find_chunk(in.width, s.other_flip, column);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        int p = (4 * w + i) / 3, c = (4 * w + i) % 3, place = column + (flip ? 3 - p : p);
        if (place >= s.x0 && place < s.x1) {
            u32 value = patch[3 * (flip == s.other_flip ? p : 3 - p) + c];
            word = (word & ~(0xFFu << (8 * i))) | value << (8 * i);
        }
    }
    return word;
}

// Two bytes b0, b1 of a word become float16 b0 - 128, b1 - 128; `select` puts 0x64 above each.
__device__ __forceinline__ u32 bytes_to_halves(u32 pair, u32 select)
{
    return add_halves(__byte_perm(pair, 0x64646464u, select), 0xE480E480u);
}

#endif

// Fragments of 16 rows and 32 pixel columns of X, as four tiles of eight columns: rows k ... k + 15, columns
// column + 4n + p for column n of a tile. FAST: tile i is byte 4 w + i of the four pixels, p and channel mixed, from
// the thread's `chunk` of row 0, and rows past the end repeat the last; else it is p of blockIdx.y's channel, and they
// are 0.
__device__ __forceinline__ void load_pixels(u32 (&b)[HALVES][4][2], const Batch& in, const Source& s,
    const byte* chunk, bool flip, int w, int k, int column)
{
    int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#if FAST
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = k + 2 * q + i % 2 + 8 * (i / 2);
        if (HEIGHT % 16 != 0)
            row = min(row, HEIGHT - 1);
        words[i] = *(const u32*)(chunk + (u32)row * (3 * WIDTH));
        if (MIX != 0 && s.boxed)
            words[i] = patch_word(words[i], in, s, flip, w, row, column + 4 * g);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 low = __byte_perm(words[2 * i], words[2 * i + 1], 0x5140);
        u32 high = __byte_perm(words[2 * i], words[2 * i + 1], 0x7362);
        b[0][0][i] = bytes_to_halves(low, 0x4140);
        b[0][1][i] = bytes_to_halves(low, 0x4342);
        b[0][2][i] = bytes_to_halves(high, 0x4140);
        b[0][3][i] = bytes_to_halves(high, 0x4342);
    }
#else
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = k + 2 * q + 8 * i, place = column + 4 * g + p;
            float x = 0.0f, y = 0.0f;
            if (place < in.width && row < in.height)
                x = load_mixed(in, s, row, place, blockIdx.y);
            if (place < in.width && row + 1 < in.height)
                y = load_mixed(in, s, row + 1, place, blockIdx.y);
            b[0][p][i] = pack_half(x, y);
            if (HALVES == 2)
                b[HALVES - 1][p][i] = pack_rest(x, y, b[0][p][i]);
        }
#endif
}

__device__ __forceinline__ void blur_rows(const Batch& in, const Source& s, void* out, i64 out_image, i64 out_row,
    i64 out_column, i64 out_channel, int first, float sigma, const float* scale, const float* bias, byte* shared,
    int matrix_offset, int table_offset, bool channels_last)
{
    int height = in.height, width = in.width;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = THREADS / 32, g = lane / 4, q = lane % 4;
    // Rows are 16 bytes (modulo 32) apart, so that the eight rows of a matrix lie in different banks.
    int pitch = round_up(width, 32) + 8, depth = round_up(height, 16) + 8;
    u16* t = (u16*)shared;                         // T[half][channel][row][column]
    u16* matrix = (u16*)(shared + matrix_offset);  // A_H[half][row][column], its band only
    u32* table = (u32*)(shared + table_offset);    // of h for A_W, see matrix_pair

    int reach = find_reach(sigma, height), from, to;
    find_band(from, to, first, ROWS, reach, height, 16);
    float* whole = (float*)shared;
    float* work = whole + 3 * round_up(height > width ? height : width, 32) + 2;
    make_kernel(whole, work, sigma, height, reach);
    const float* h = whole + round_up(height, 32);
    for (int row = warp; row < ROWS; row += warps)
        for (int k = from + 2 * lane, i = first + row; k < to; k += 64) {
            // Rows of X past the end must not count.
            float x = k < height ? h[k - i] + h[i + k + 1] : 0.0f;
            float y = k + 1 < height ? h[k + 1 - i] + h[i + k + 2] : 0.0f;
            u32 high = pack_half(x, y);
            *(u32*)(matrix + row * depth + (k - from)) = high;
            if (HALVES == 2)
                *(u32*)(matrix + (ROWS + row) * depth + (k - from)) = pack_rest(x, y, high);
        }
    if (width != height) {
        __syncthreads();
        reach = find_reach(sigma, width);
        make_kernel(whole, work, sigma, width, reach);
    }
    int before = round_up(width, 32);
    for (int i = threadIdx.x; i < 3 * before; i += THREADS) {
        float next = i + PAIR < 3 * before ? whole[i + PAIR] : 0.0f;
        table[i] = HALVES == 1 ? pack_half(whole[i], next) : __float_as_uint(whole[i]);
    }
    table += before;
    __syncthreads();

    // Product 1.
    for (int column = 32 * warp; column < width; column += 32 * warps)
#pragma unroll 1
        for (int pass = 0; pass < (FAST && MIX != 0 && s.mixed ? 2 : 1); pass++) {
            bool second = pass == 1, flip = FAST && (second ? s.other_flip : s.own_flip);
            float weight = !FAST || MIX == 0 ? 1.0f : second ? 1.0f - s.weight : s.weight;
            // What stands in for pixels past the end of the row must not count.
            weight = FAST && WIDTH % 32 != 0 && column + 8 * q >= width ? 0.0f : weight;
#pragma unroll
            for (int w = 0; w < CHANNELS; w++) {
#if FAST
                const byte* chunk = in.images + (second ? s.other : s.own)
                    + (find_chunk(width, flip, column + 4 * g) + 4 * w);
#else
                const byte* chunk = nullptr;
#endif
                const u16* a_rows = matrix + lane % 16 * depth + lane / 16 * 8 - from;
                float sum[ROWS / 16][4][4];
#pragma unroll
                for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
                    for (int n = 0; n < 4; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            sum[m][n][i] = 0.0f;
#pragma unroll(FAST ? 2 : 1)
                for (int k = from; k < to; k += 16) {
                    u32 b[HALVES][4][2];
                    load_pixels(b, in, s, chunk, flip, w, k, column);
#pragma unroll
                    for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
                        for (int half = 0; half < HALVES; half++) {
                            u32 a[4];
                            load_matrices(a, a_rows + (half * ROWS + 16 * m) * depth + k);
#pragma unroll
                            for (int n = 0; n < 4; n++) {
                                multiply_add(sum[m][n], a, b[0][n]);
                                if (HALVES == 2 && half == 0)
                                    multiply_add(sum[m][n], a, b[HALVES - 1][n]);
                            }
                        }
                }
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    int p = FAST ? (4 * w + n) / 3 : n, c = FAST ? (4 * w + n) % 3 : 0;
                    p = flip ? 3 - p : p;
#pragma unroll
                    for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
                        for (int i = 0; i < 4; i += 2) {
                            u32* pair = (u32*)(t + (c * ROWS + 16 * m + g + 4 * i) * pitch + column + 8 * p + 2 * q);
                            float x = weight * sum[m][n][i], y = weight * sum[m][n][i + 1];
                            if (second) {
                                x += half_to_float((u16)*pair);
                                y += half_to_float((u16)(*pair >> 16));
                            }
                            *pair = pack_half(x, y);
                            if (HALVES == 2)
                                pair[CHANNELS * ROWS * pitch / 2] = pack_rest(x, y, *pair);
                        }
                }
            }
        }
    __syncthreads();

    // Product 2, 16 rows at a time: sums of all would take twice the registers.
    int channel = FAST ? 0 : (int)blockIdx.y;
    for (int column = 32 * warp; column < width; column += 32 * warps)
#pragma unroll 1
        for (int top = 0; top < ROWS; top += 16) {
            float sum[CHANNELS][4][4];
#pragma unroll
            for (int c = 0; c < CHANNELS; c++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sum[c][n][i] = 0.0f;
            find_band(from, to, column, 32, reach, width, 32);
            const u16* rows = t + (top + lane % 16) * pitch + lane / 16 * 8;
            int pixel = column + 4 * (g & ~1) + (g & 1);
#pragma unroll 1
            for (int k = from, place = from + 8 * q; k < to; k += 16, place += k & 16 ? 2 : 30) {
                // Tile n of columns 2q, 2q + 1 is pixels 8q + 2n, 8q + 2n + 1: over n, eight adjacent pixels.
                const u32* apart = table + (place - pixel);
                const u32* mirrored = table + (place + pixel + 1);
                u32 b[HALVES][4][2];
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 pair[HALVES];
                        matrix_pair(pair, apart + (i - 2 * n), mirrored + (i + 2 * n));
#pragma unroll
                        for (int half = 0; half < HALVES; half++)
                            b[half][n][i] = pair[half];
                    }
#pragma unroll
                for (int c = 0; c < CHANNELS; c++)
#pragma unroll
                    for (int half = 0; half < HALVES; half++) {
                        u32 a[4];
                        load_matrices(a, rows + (half * CHANNELS + c) * ROWS * pitch + k);
#pragma unroll
                        for (int n = 0; n < 4; n++) {
                            multiply_add(sum[c][n], a, b[0][n]);
                            if (HALVES == 2 && half == 0)
                                multiply_add(sum[c][n], a, b[HALVES - 1][n]);
                        }
                    }
            }
            // Only now: in the loop their registers are needed.
            float scales[CHANNELS], biases[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                scales[c] = scale[channel + c];
                biases[c] = bias[channel + c];
            }
            int left = column + 8 * q;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int row = first + top + g + 4 * i;
                if (row >= height || left >= width)
                    continue;
                float value[8][CHANNELS];
#pragma unroll
                for (int p = 0; p < 8; p++)
#pragma unroll
                    for (int c = 0; c < CHANNELS; c++)
                        value[p][c] = fmaf(sum[c][p / 2][i + p % 2], scales[c], biases[c]);
#if FAST
                u16* half = (u16*)out + out_image + (row * (int)out_row + left * (int)out_column);
                if (channels_last) {
#pragma unroll
                    for (int w = 0; w < 3; w++) {
                        u32 pair[4];
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            int at = 8 * w + 2 * j;
                            pair[j] = pack_output(value[at / 3][at % 3], value[(at + 1) / 3][(at + 1) % 3]);
                        }
                        ((uint4*)half)[w] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < 3; c++)
                        *(uint4*)(half + c * (int)out_channel) = make_uint4(pack_output(value[0][c], value[1][c]),
                            pack_output(value[2][c], value[3][c]), pack_output(value[4][c], value[5][c]),
                            pack_output(value[6][c], value[7][c]));
                }
#else
#pragma unroll
                for (int p = 0; p < 8; p++)
                    if (left + p < width)
                        store_value(out,
                            out_image + row * out_row + (left + p) * out_column + channel * out_channel,
                            value[p][0]);
#endif
            }
        }
}

// Grid: (batch * ceil(height / ROWS), channels), or, if FAST, (..., 2): first the blocks of blurred images, which take
// longest, so that the others fill the gaps they leave at the end; without roles (..., 1). Block: whole warps.
// Dynamic shared memory: T (or what make_kernel or stream_flat needs, if that is larger), A_H, the table of A_W.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) batch_tail(const byte* images, void* out,
    const float* scale_bias, const byte* flip, const i64* partner, const float* lam, const int* box,
    const signed char* role, const float* temperature, const i64* index, int batch, int channels, int height, int width,
    int type, i64 image_stride, i64 row_stride, i64 column_stride, i64 channel_stride, i64 out_image_stride,
    i64 out_row_stride, i64 out_column_stride, i64 out_channel_stride, u32 seed_low, u32 seed_high, u32 epoch_purpose,
    float log_sigma_min, float log_sigma_max, int matrix_offset, int table_offset, int channels_last)
{
    extern __shared__ uint4 shared[];
#if FAST
    height = HEIGHT;
    width = WIDTH;
    channels = 3;
    row_stride = 3 * WIDTH;
    column_stride = 3;
    channel_stride = 1;
    if (channels_last) {
        out_row_stride = 3 * WIDTH;
        out_column_stride = 3;
        out_channel_stride = 1;
    }
#endif
    int tiles = (height + ROWS - 1) / ROWS;
    i64 image = blockIdx.x / tiles;
    int what = role ? role[image] : CLEAN;
    if (FAST && role && (what == BLUR) != (blockIdx.y == 0))
        return;
    int first = (int)(blockIdx.x % tiles) * ROWS;
    Batch in = {images, image_stride, row_stride, column_stride, channel_stride, type, batch, channels, height, width,
        flip, partner, lam, box};
    Source s = find_source(in, image);
    const float* bias = scale_bias + channels;
    i64 out_image = image * out_image_stride;
    if (what == BLUR) {
        float t = temperature[image];
        float sigma = expf((1.0f - t) * log_sigma_min + t * log_sigma_max);
        blur_rows(in, s, out, out_image, out_row_stride, out_column_stride, out_channel_stride, first, sigma,
            scale_bias, bias, (byte*)shared, matrix_offset, table_offset, channels_last);
        return;
    }
    Noise noise = {1.0f, 0.0f, {0, epoch_purpose, 0}, {seed_low, seed_high}};
    if (what != CLEAN) {
        float t = what == PURE_NOISE ? 1.0f : temperature[image];
        noise.alpha = sinpif(0.5f * (1.0f - t));
        noise.sigma = sinpif(0.5f * t);
        noise.counter[0] = (u32)index[image];
        noise.counter[2] = (u32)((u64)index[image] >> 32);
    }
    int last = first + ROWS < height ? first + ROWS : height;
#if FAST
    if (channels_last) {
        stream_flat(in, s, (u16*)out + out_image, first, last, scale_bias, bias, noise, (byte*)shared);
        return;
    }
#endif
    stream_rows(in, s, out, out_image, out_row_stride, out_column_stride, out_channel_stride, first, last, scale_bias,
        bias, noise);
}
