// Rows of a blurred image, Y = A_H X A_W (see heat_blur.py), by matrix instructions, in two products:
//
//   1. T = A_H[rows, :] X. X comes straight from device memory in the layout of the instruction, without shared memory
//      or a barrier: a warp owns 32 pixel columns, and takes 32 bytes of a row at a time, a sector, four a thread. Bytes
//      become float16 by permutes. T stays in shared memory, a plane a channel.
//   2. Y = T A_W, again 32 columns a warp. A thread ends up with eight adjacent pixels of all channels, and two threads
//      store 32 bytes beside each other: no tile of the output is staged.
//
// What bounds them is the pipe to shared memory and the first-level cache, so no access touches more lines or sectors
// than its bytes need. The fragments of A come from tables of h; in half precision, its Hankel part only where it is
// not 0.
//
// A float32 result takes both operands in two float16 halves (22 bits), and sums all but the product of the low halves.

#if FAST

// Bytes `flat` ... `flat` + 3 of a row, as it lies in memory, of an image that is shown mirrored or not, with the
// partner's pixels where the box is.
__device__ __forceinline__ u32 patch_word(u32 word, const Batch& in, const Source& s, bool flip, int row, int flat)
{
    if (row < s.y0 || row >= min(s.y1, HEIGHT))
        return word;
    const byte* patch = in.images + s.other + row * (3 * WIDTH);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        int p = (flat + i) / 3, c = (flat + i) % 3, place = flip ? WIDTH - 1 - p : p;
        if (place >= s.x0 && place < s.x1 && (u32)(flat + i) < 3 * WIDTH) {
            u32 value = patch[3 * (s.other_flip ? WIDTH - 1 - place : place) + c];
            word = (word & ~(0xFFu << (8 * i))) | value << (8 * i);
        }
    }
    return word;
}

#endif

// A fragment of X: rows k ... k + 15, and four tiles of eight columns. FAST: column n of tile i is byte 4n + i of 32 of a
// row, and `own` the thread's four of them in the row k + 2q, at place `flat`; a byte b becomes the float16 2^-24 b,
// which is exact, if denormal (matrix units keep those: Fasi et al., PeerJ Computer Science 7:e330, 2021). Else column n
// of tile i is pixel column + 4n + i of blockIdx.y's channel. Rows past the end are 0.
__device__ __forceinline__ void load_pixels(
    u32 (&b)[HALVES][4][2], const Batch& in, const Source& s, const byte* own, bool flip, int flat, int k, int column)
{
    int q = threadIdx.x % 4;
#if FAST
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int below = i % 2 + 8 * (i / 2), row = k + 2 * q + below;
        words[i] = HEIGHT % 16 == 0 || row < HEIGHT ? *(const u32*)(own + below * (3 * WIDTH)) : 0u;
        if (MIX != 0 && s.boxed)
            words[i] = patch_word(words[i], in, s, flip, row, flat);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 low = __byte_perm(words[2 * i], words[2 * i + 1], 0x5140);
        u32 high = __byte_perm(words[2 * i], words[2 * i + 1], 0x7362);
        b[0][0][i] = __byte_perm(low, 0u, 0x4140);
        b[0][1][i] = __byte_perm(low, 0u, 0x4342);
        b[0][2][i] = __byte_perm(high, 0u, 0x4140);
        b[0][3][i] = __byte_perm(high, 0u, 0x4342);
    }
#else
    int g = threadIdx.x % 32 / 4;
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

// Add the product of 16 x 16 of A_H and 16 rows of X.
__device__ __forceinline__ void multiply_rows(
    float (&sum)[4][4], const u32 (&a)[HALVES][4], const u32 (&b)[HALVES][4][2])
{
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            multiply_add(sum[n], a[half], b[0][n]);
            if (HALVES == 2 && half == 0)
                multiply_add(sum[n], a[half], b[HALVES - 1][n]);
        }
}

// Bring sums of product 1 to T, or add them to what is there; `t` is the thread's first row at the warp's first column,
// of which the image has `left`. STEP is -1 for a mirrored image, whose columns come in opposite order.
template <int STEP>
__device__ __forceinline__ void store_product(
    u32* t, const float (&sum)[ROWS / 16][4][4], int w, float weight, bool second, int pitch, int left)
{
    int q = threadIdx.x % 4;
    // Byte r + 8q of the columns is channel (r - q) % 3 of pixel r / 3 + 3q, or of the one before if r % 3 < q.
    u32* start[3];
#pragma unroll
    for (int r = 0; r < 3; r++) {
        int before = r < q ? 1 : 0, c = r - q + 3 * before, p = 3 * q - before;
        start[r] = t + c * (ROWS / 2) * pitch + (STEP < 0 ? 31 - p : p);
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int r = 32 * w + 4 * j + n;
            u32* at = FAST ? start[r % 3] + STEP * (r / 3) : t + (8 * q + 4 * j + n);
#pragma unroll
            for (int m = 0; m < ROWS / 16; m++) {
                u32* pair = at + 8 * m * pitch;
                float x = weight * sum[m][n][j], y = weight * sum[m][n][j + 2];
                // What stands in for pixels past the end of the row must not count.
                if (FAST && WIDTH % 32 != 0 && (int)(at - t) % ((ROWS / 2) * pitch) >= left)
                    x = y = 0.0f;
                if (second) {
                    x += half_to_float((u16)*pair);
                    y += half_to_float((u16)(*pair >> 16));
                }
                *pair = pack_half(x, y);
                if (HALVES == 2)
                    pair[CHANNELS * ROWS / 2 * pitch] = pack_rest(x, y, *pair);
            }
        }
}

// The Toeplitz part of A_W, for 16 rows and the 32 columns of a warp: tile n of columns 2q, 2q + 1 is pixels
// 8q + 2n, 8q + 2n + 1, over n eight adjacent ones.
__device__ __forceinline__ void load_pairs(u32 (&b)[HALVES][8], const u32* place)
{
#pragma unroll
    for (int n = 0; n < 8; n++)
        table_pair<PAIR>(b, n, place + (8 * (n % 2) - n / 2 * 2));
}

// Add the product of 16 columns of T, from `rows` on, and 16 rows of A_W.
__device__ __forceinline__ void multiply_columns(
    float (&sum)[CHANNELS][4][4], const u32* rows, int pitch, const u32 (&b)[HALVES][8])
{
#pragma unroll
    for (int c = 0; c < CHANNELS; c++)
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            u32 words[4], a[4];
            load_matrices(words, (const u16*)(rows + (half * CHANNELS + c) * ROWS / 2 * pitch));
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = __byte_perm(words[i & 2], words[i | 1], i % 2 ? 0x7632 : 0x5410);
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int other = 0; other < HALVES - half; other++) {
                    const u32 tile[2] = {b[other][2 * n], b[other][2 * n + 1]};
                    multiply_add(sum[c][n], a, tile);
                }
        }
}

__device__ __forceinline__ void blur_rows(const Batch& in, const Source& s, void* out, i64 out_image, i64 out_row,
    i64 out_column, i64 out_channel, int first, float sigma, const float* scale, const float* bias, byte* shared,
    int table_offset, bool channels_last)
{
    const int tops = ROWS / 16;
    int height = in.height, width = in.width;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = THREADS / 32, g = lane / 4, q = lane % 4;
    // Rows are 16 bytes (modulo 32) apart, so that the eight rows of a matrix lie in different banks.
    int pitch = round_up(width, 32) + 4;
    u32* t = (u32*)shared; // T[half][channel][16 rows][row][column], rows r and r + 8 in a word

    u32* down = (u32*)(shared + table_offset);     // of h for A_H
    u32* across = down + 3 * round_up(height, 32); // and for A_W
    int reach = find_reach(sigma, height), from, to;
    find_band(from, to, first, ROWS, reach, height, 16);
#if FAST
    // What product 1 will read comes closer while h is made.
    for (int i = 128 * threadIdx.x, size = (min(to, height) - from) * 3 * WIDTH; i < size; i += 128 * THREADS) {
        prefetch_line(in.images + s.own + from * (3 * WIDTH) + i);
        if (MIX != 0 && (s.mixed || s.boxed))
            prefetch_line(in.images + s.other + from * (3 * WIDTH) + i);
    }
#endif
    Kernel kernel = make_kernel((float*)shared, sigma, height, reach);
    make_table<1>(down, kernel, A_UNIT);
    int upper = reach - first, lower = 2 * height - reach - first - ROWS - 16; // no border between
    if (width != height) {
        __syncthreads();
        reach = find_reach(sigma, width);
        kernel = make_kernel((float*)shared, sigma, width, reach);
    }
    make_table<PAIR>(across, kernel, 1.0f);
    down += round_up(height, 32);
    across += round_up(width, 32);
    __syncthreads();

    // Product 1.
    for (int column = 32 * warp; column < width; column += 32 * warps)
#pragma unroll 1
        for (int pass = 0; pass < (FAST && MIX != 0 && s.mixed ? 2 : 1); pass++) {
            bool second = pass == 1, flip = FAST && (second ? s.other_flip : s.own_flip);
            float weight = !FAST || MIX == 0 ? 1.0f : second ? 1.0f - s.weight : s.weight;
            // Of the columns that are shown from `column` on, the first in memory, as a byte of its row.
            int start = FAST ? 3 * (flip ? width - 32 - column : column) : 0;
            if (second)
                __syncwarp(); // other lanes have written what is added to
#pragma unroll
            for (int w = 0; w < CHANNELS; w++) {
                int flat = start + 32 * w + 4 * g;
                // Words past an end of the row stand in for nothing.
                int inside = WIDTH % 32 == 0 ? flat : max(0, min(flat, 3 * WIDTH - 4));
                const byte* own = in.images + (second ? s.other : s.own) + (from + 2 * q) * (3 * WIDTH) + inside;
                // Sums of b - 128, by rows of A that sum to 1.
                float sum[tops][4][4];
#pragma unroll
                for (int m = 0; m < tops; m++)
#pragma unroll
                    for (int n = 0; n < 4; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            sum[m][n][i] = FAST ? -128.0f / T_UNIT : 0.0f;
                // The Toeplitz part of A's fragments, of the rows 16 m + g and 16 m + g + 8: that of m is that of m - 1
                // in the step before.
                const u32* place = down + (from + 2 * q - first - g);
                u32 a[tops][HALVES][4];
#pragma unroll 1
                for (int k = from; k < to;) {
                    if (HALVES == 2 || k < upper || k > lower) {
                        // Two steps' loads ahead of their products: these blocks end a launch, at large scales.
                        int end = k < upper ? min(to, upper) : to;
#pragma unroll(FAST ? 2 : 1)
                        do {
                            u32 b[HALVES][4][2];
                            load_pixels(b, in, s, own, flip, flat, k, column);
                            const u32* mirrored = down + (k + 2 * q + first + g + 1);
#pragma unroll
                            for (int m = 0; m < tops; m++) {
                                u32 both[HALVES][4];
                                load_toeplitz(both, place - 16 * m);
#pragma unroll
                                for (int i = 0; i < 4; i++)
                                    add_mirrored<1>(both, i, place + 8 * (i / 2 - i % 2 - 2 * m),
                                        mirrored + 8 * (i / 2 + i % 2 + 2 * m));
                                multiply_rows(sum[m], both, b);
                            }
                            k += 16;
                            own += 16 * 3 * WIDTH;
                            place += 16;
                        } while (FAST && k < end);
                    } else {
                        int end = min(to, lower + 1);
#pragma unroll
                        for (int m = 1; m < tops; m++)
                            load_toeplitz(a[m - 1], place - 16 * m);
#pragma unroll(FAST ? 2 : 1)
                        for (; k < end; k += 16, own += 16 * 3 * WIDTH, place += 16) {
                            u32 b[HALVES][4][2];
                            load_pixels(b, in, s, own, flip, flat, k, column);
#pragma unroll
                            for (int m = tops - 1; m > 0; m--)
#pragma unroll
                                for (int i = 0; i < 4; i++)
                                    a[m][0][i] = a[m - 1][0][i];
                            load_toeplitz(a[0], place);
#pragma unroll
                            for (int m = 0; m < tops; m++)
                                multiply_rows(sum[m], a[m], b);
                        }
                    }
                }
                u32* target = t + g * pitch + column;
                if (FAST && flip)
                    store_product<-1>(target, sum, w, weight, second, pitch, width - column);
                else
                    store_product<1>(target, sum, w, weight, second, pitch, width - column);
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
            find_band(from, to, column, 32, reach, width, 16);
            const u32* rows = t + (top / 2 + lane % 8) * pitch + lane / 8 * 4;
            int pixel = column + 4 * (g & ~1) + (g & 1);
            int left_border = reach - column, right_border = 2 * width - reach - column - 48;
            const u32* apart = across + (from + q - pixel);
            rows += from;
            // Away from the left and the right border the Hankel part is 0.
#pragma unroll 1
            for (int k = from; k < to;) {
                u32 b[HALVES][8];
                if (HALVES == 2 || k < left_border || k > right_border) {
                    load_pairs(b, apart);
#pragma unroll
                    for (int n = 0; n < 8; n++)
                        add_mirrored<PAIR>(b, n, apart + (8 * (n % 2) - n / 2 * 2),
                            apart + (2 * pixel + 1) + (8 * (n % 2) + n / 2 * 2));
                    multiply_columns(sum, rows, pitch, b);
                    k += 16;
                    apart += 16;
                    rows += 16;
                } else {
                    int end = min(to, right_border + 1);
#pragma unroll 1
                    for (; k < end; k += 16, apart += 16, rows += 16) {
                        load_pairs(b, apart);
                        multiply_columns(sum, rows, pitch, b);
                    }
                }
            }
            // Only now: in the loop their registers are needed.
            float scales[CHANNELS], biases[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                scales[c] = T_UNIT * scale[channel + c];
                biases[c] = bias[channel + c];
            }
            int left = column + 8 * q;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int row = first + top + g + 4 * i;
                float value[8][CHANNELS];
#pragma unroll
                for (int p = 0; p < 8; p++)
#pragma unroll
                    for (int c = 0; c < CHANNELS; c++)
                        value[p][c] = fmaf(sum[c][p / 2][i + p % 2], scales[c], biases[c]);
#if FAST
                u16* line = (u16*)out + out_image + row * (int)out_row;
                if (channels_last) {
                    u32 pieces[3][4];
#pragma unroll
                    for (int w = 0; w < 3; w++)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            int at = 8 * w + 2 * j;
                            pieces[w][j] = pack_output(value[at / 3][at % 3], value[(at + 1) / 3][(at + 1) % 3]);
                        }
                    // Two lanes store 32 bytes next to each other, for which they exchange what is in the middle of
                    // each: single 16 bytes would be half a sector.
                    bool odd = q % 2;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 mine = pieces[1][j], other = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
                        u32 low = pieces[0][j], high = pieces[2][j];
                        pieces[0][j] = odd ? other : low;
                        pieces[1][j] = odd ? low : high;
                        pieces[2][j] = odd ? high : other;
                    }
                    int place = 3 * (left - 8 * odd) + 8 * odd;
#pragma unroll
                    for (int w = 0; w < 3; w++)
                        if (row < height && place + 16 * w < 3 * width)
                            *(uint4*)(line + (place + 16 * w))
                                = make_uint4(pieces[w][0], pieces[w][1], pieces[w][2], pieces[w][3]);
                } else if (row < height && left < width) {
                    u16* half = line + left * (int)out_column;
#pragma unroll
                    for (int c = 0; c < 3; c++)
                        *(uint4*)(half + c * (int)out_channel) = make_uint4(pack_output(value[0][c], value[1][c]),
                            pack_output(value[2][c], value[3][c]), pack_output(value[4][c], value[5][c]),
                            pack_output(value[6][c], value[7][c]));
                }
#else
#pragma unroll
                for (int p = 0; p < 8; p++)
                    if (row < height && left + p < width)
                        store_value(out,
                            out_image + row * out_row + (left + p) * out_column + channel * out_channel,
                            value[p][0]);
#endif
            }
        }
}
