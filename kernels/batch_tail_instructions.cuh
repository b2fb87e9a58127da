// Types, and the few instructions that C++ cannot say: a host that defines those (and the CUDA keywords) can run the
// rest.

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

// Ask for a line of 128 bytes to come to the second-level cache.
__device__ __forceinline__ void prefetch_line(const byte* line)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
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
