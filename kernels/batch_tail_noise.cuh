// The generator of normals that philox.py defines: Philox 4x32-10, then Box and Muller.

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
// magnify it, to 2e-6 at d = 0.003: below that the series of -2 ln(1 - d), whose third term is 2e-8 there, takes over.
__device__ __forceinline__ float minus_two_log(float u)
{
    float d = 1.0f - u;
    float near = fmaf(d, d, d + d);
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
