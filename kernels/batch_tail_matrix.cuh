// The matrix of the blur, Toeplitz plus Hankel: A[i, j] = h[|i - j|] + h[i + j + 1].
//
// Every block computes the h it needs, and takes A_H and A_W from tables of it, in pairs, a word or two for a pair of
// elements. h includes the Nyquist term g_N (-1)^m / 2N, which cancels between
// the two parts but makes h decay like 1/m^2 at worst; it is cut at |m| > R and divided by its sum, so that rows of A
// still sum to 1 and the products only visit a band. Rows that sum to 1 are also why b - 128 can be blurred instead of
// pixels, and standardised after. For a float32 result, h is cut only where a Gaussian has nothing left.

__device__ __forceinline__ int round_up(int value, int to) { return (value + to - 1) / to * to; }

// Where h is cut. Half precision: beyond 4σ, but at small σ, where its spectrum has not died out at Nyquist, beyond up to
// 32 pixels: at worst, near σ = 0.5, what a row of 224 loses has norm 3.5e-4, that much of white noise. make_kernel scales
// the rest to sum to 1 again, so that constant images stay as they are. (The Triton kernels make h in many programs, and
// do without: their rows lose 7e-5 of their sum.) Float32: nothing is cut for σ < 2.
__device__ __forceinline__ int find_reach(float sigma, int size)
{
    float half = fmaxf(4.0f * sigma, fminf(32.0f, 80.0f - 72.0f * sigma));
    float reach = HALVES == 1 ? half : sigma < 2.0f ? 1e9f : 5.5f * sigma + 1.0f;
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

// h: what `h` has for m <= R, each times `norm`, and `rest` more in its last.
struct Kernel {
    const float* h;
    float norm, rest;
    int size, reach, last;
};

// Make h. `work` has room for 4N + 2 floats. Every thread of the block takes part, and may use h at return.
__device__ __forceinline__ Kernel make_kernel(float* h, float sigma, int size, int reach)
{
    float* cosine = h + size + 1;        // cos(πj/N), j < 2N
    float* spectrum = cosine + 2 * size; // ε_k exp(-(σπk/N)²/2) / 2N, k <= N
    float inverse = 1.0f / (float)size;
    int period = 2 * size;
    if (HALVES == 1 && sigma >= 1.7f && sigma <= (float)size) {
        // Of the spectrum 6e-7 is left at Nyquist, so h is a Gaussian, and those whole periods away. (Below, a sum of
        // cosines; for σ far above N it has hardly a term.)
        int images = (int)(0.5f + 2.75f * sigma * inverse);
        float scale = 1.0f / sigma;
        for (int m = threadIdx.x; m <= reach; m += THREADS) {
            float sum = 0.0f;
            for (int i = -images; i <= images; i++) {
                float x = scale * (float)(m + i * period);
                sum += expf(-0.5f * x * x);
            }
            h[m] = sum;
        }
    } else {
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
        int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
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
    }
    __syncthreads();
    // The period 2N holds h[0] and h[N] once, all others twice.
    float total = 0.0f;
    for (int m = threadIdx.x % 32; m <= reach; m += 32)
        total += m == 0 || m == size ? h[m] : 2.0f * h[m];
    float norm = 1.0f / add_lanes<32>(total), rest = 0.0f;
    int last = reach < size ? reach : size - 1;
    if (HALVES == 1 && last > 0) {
        // What rounding takes from the sum goes to the last of h, whose digits are the finest: bytes are far from 0 mean.
        for (int m = threadIdx.x % 32; m <= reach; m += 32) {
            float rounded = half_to_float((u16)pack_half(norm * h[m], 0.0f));
            rest -= m == 0 || m == size ? rounded : 2.0f * rounded;
        }
        rest = 0.5f * (1.0f + add_lanes<32>(rest));
    }
    return {h, norm, rest, size, reach, last};
}

// h[x] for any x: h is even and has period 2N.
__device__ __forceinline__ float find_h(const Kernel& kernel, int x)
{
    int period = 2 * kernel.size, m = x < 0 ? -x : x;
    m = m >= period ? (m - period) % period : m;
    m = m > kernel.size ? period - m : m;
    return m <= kernel.reach ? kernel.norm * kernel.h[m] + (m == kernel.last ? kernel.rest : 0.0f) : 0.0f;
}

// What is left of two floats after rounding to the float16 pair `high`.
__device__ __forceinline__ u32 pack_rest(float x, float y, u32 high)
{
    return pack_half(x - half_to_float((u16)high), y - half_to_float((u16)(high >> 16)));
}

// Pairs of h, h[i] and h[i + APART], for i = -P ... 2P - 1, P being N rounded up to 32, times `unit`: as float16, or the
// first as it is. Places that no fragment within R takes are left out: one is 16 wide, and a block 32.
template <int APART> __device__ __forceinline__ void make_table(u32* table, const Kernel& kernel, float unit)
{
    int padded = round_up(kernel.size, 32), reach = kernel.reach + 96;
    for (int i = (int)threadIdx.x - padded; i < 2 * padded; i += THREADS) {
        if (HALVES == 1 && (i < -reach || (i > reach && i < 2 * kernel.size - reach)))
            continue;
        float x = find_h(kernel, i);
        table[padded + i]
            = HALVES == 1 ? pack_half(unit * x, unit * find_h(kernel, i + APART)) : __float_as_uint(x);
    }
}

// Number n of some pairs of float16, all of it or the high and the low halves, from its place in the table.
template <int APART, int COUNT>
__device__ __forceinline__ void table_pair(u32 (&pairs)[HALVES][COUNT], int n, const u32* place)
{
    pairs[0][n] = *place;
#if HALVES == 2
    float x = bits_to_float(place[0]), y = bits_to_float(place[APART]);
    pairs[0][n] = pack_half(x, y);
    pairs[1][n] = pack_rest(x, y, pairs[0][n]);
#endif
}

// The same, of the sums of two parts of A, the first of which is in its place.
template <int APART, int COUNT>
__device__ __forceinline__ void add_mirrored(
    u32 (&pairs)[HALVES][COUNT], int n, const u32* place, const u32* mirrored)
{
#if HALVES == 1
    pairs[0][n] = add_halves(pairs[0][n], *mirrored);
#else
    float x = bits_to_float(place[0]) + bits_to_float(mirrored[0]);
    float y = bits_to_float(place[APART]) + bits_to_float(mirrored[APART]);
    pairs[0][n] = pack_half(x, y);
    pairs[1][n] = pack_rest(x, y, pairs[0][n]);
#endif
}

// The Toeplitz part of a fragment of 16 x 16.
__device__ __forceinline__ void load_toeplitz(u32 (&a)[HALVES][4], const u32* place)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        table_pair<1>(a, i, place + 8 * (i / 2 - i % 2));
}

// A matrix instruction takes the columns of T in the order in which ldmatrix has them in a thread: the pairs of float16
// in it are pixels q and q + 4, q + 8 and q + 12.
#define PAIR 4

// FAST: T is in units of 512 grey levels, as bytes are taken 2^-24 times and A_H 2^15 times, so that small elements of
// A_H keep all their digits.
#define A_UNIT (FAST ? 32768.0f : 1.0f)
#define T_UNIT (FAST ? 512.0f : 1.0f)
