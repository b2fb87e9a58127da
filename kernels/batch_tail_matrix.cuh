// The matrix of the blur, Toeplitz plus Hankel: A[i, j] = h[|i - j|] + h[i + j + 1].
//
// Every block computes the h it needs (at most R + 1 sums of a few hundred terms), stores its rows of A_H, and takes A_W
// from a table of h, two words a pair of elements. h includes the Nyquist term g_N (-1)^m / 2N, which cancels between
// the two parts but makes h decay like 1/m^2 at worst; it is cut at |m| > R and divided by its sum, so that rows of A
// still sum to 1 and the products only visit a band. Rows that sum to 1 are also why b - 128 can be blurred instead of
// pixels, and standardised after. For a float32 result, h is cut only where a Gaussian has nothing left.

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
