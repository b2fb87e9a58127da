// Rows of a blurred image, Y = A_H X A_W (see heat_blur.py), by matrix instructions, in two products:
//
//   1. T = A_H[rows, :] X. X comes straight from device memory in the layout of the instruction, without shared memory
//      or a barrier: a warp owns 32 pixel columns, a thread four adjacent pixels of them, and bytes become float16 by
//      permutes (0x6400 | b is 1024 + b; less 1152: b - 128, exactly). T stays in shared memory, a plane a channel.
//   2. Y = T A_W, again 32 columns a warp. A thread ends up with eight adjacent pixels of all channels and stores them
//      as 16-byte words: no tile of the output is staged.
//
// A float32 result takes both operands in two float16 halves (22 bits), and sums all but the product of the low halves.

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
