// The batch tail in one pass over memory: flip, standardise, MixUp or CutMix, then nothing, noise or blur, then cast.
//
// One block computes ROWS rows of one image, whatever its role, so a batch of mixed roles is one launch. Clean and
// noised rows are copied to shared memory, all at once and without registers, and go out from there; blurred rows are
// two products by matrix instructions.
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
//
// No header from elsewhere is included; those below are put in their place before the compiler sees the text.

#include "batch_tail_instructions.cuh"
#include "batch_tail_source.cuh"
#include "batch_tail_noise.cuh"
#include "batch_tail_stream.cuh"
#include "batch_tail_matrix.cuh"
#include "batch_tail_blur.cuh"

// Grid: (batch * ceil(height / ROWS), channels), or, if FAST, (..., 2): first the blocks of blurred images, which take
// longest, so that the others fill the gaps they leave at the end; without roles (..., 1). Block: whole warps.
// Dynamic shared memory: T (or what make_kernel or stream_flat needs, if that is larger), the tables of A_H and A_W.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) batch_tail(const byte* images, void* out,
    const float* scale_bias, const byte* flip, const i64* partner, const float* lam, const int* box,
    const signed char* role, const float* temperature, const i64* index, int batch, int channels, int height, int width,
    int type, i64 image_stride, i64 row_stride, i64 column_stride, i64 channel_stride, i64 out_image_stride,
    i64 out_row_stride, i64 out_column_stride, i64 out_channel_stride, u32 seed_low, u32 seed_high, u32 epoch_purpose,
    float log_sigma_min, float log_sigma_max, int table_offset, int channels_last)
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
    // All that is known of an image at once: one after the other, each would be waited for.
    int what = role ? role[image] : CLEAN;
    float t = role ? temperature[image] : 0.0f;
    i64 number = role ? index[image] : 0;
    Batch in = {images, image_stride, row_stride, column_stride, channel_stride, type, batch, channels, height, width,
        flip, partner, lam, box};
    Source s = find_source(in, image);
    if (FAST && role && (what == BLUR) != (blockIdx.y == 0))
        return;
    int first = (int)(blockIdx.x % tiles) * ROWS;
    const float* bias = scale_bias + channels;
    i64 out_image = image * out_image_stride;
    if (what == BLUR) {
        float sigma = expf((1.0f - t) * log_sigma_min + t * log_sigma_max);
        blur_rows(in, s, out, out_image, out_row_stride, out_column_stride, out_channel_stride, first, sigma,
            scale_bias, bias, (byte*)shared, table_offset, channels_last);
        return;
    }
    Noise noise = {1.0f, 0.0f, {0, epoch_purpose, 0}, {seed_low, seed_high}};
    if (what != CLEAN) {
        t = what == PURE_NOISE ? 1.0f : t;
        noise.alpha = sinpif(0.5f * (1.0f - t));
        noise.sigma = sinpif(0.5f * t);
        noise.counter[0] = (u32)number;
        noise.counter[2] = (u32)((u64)number >> 32);
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
