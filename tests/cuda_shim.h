// Runs CUDA C++ on the CPU: defines the keywords and the device functions that kernels/batch_tail*.cu use, and plays a
// grid, one block after another, every thread a fiber.
//
// Warp-wide instructions (shuffles, ldmatrix, mma) are exact in layout: lanes leave their operands in a slot and take
// turns; the last one to come computes for all. A lane that comes with another instruction, or not at all, ends the
// process with a message. Between two barriers warps run one after another, in every other block the last one first, so
// that a missing barrier shows. Shared memory is full of NaN when a block starts, and a write past its end is noticed.
// The fast device functions are *worse* here than on a card: each is off by the largest error that its documentation
// allows, up or down as the argument's bits have it.
//
// It goes before what cuda_toolchain.read_source gives, and CUDA_SHIM(kernel) behind: extern "C" launch takes what
// cuLaunchKernel takes.

#include <ucontext.h>

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

constexpr int kSharedBytes = 227 * 1024, kGuard = 1024, kLanes = 32, kStack = 256 * 1024;
uint4 shared[(kSharedBytes + kGuard) / 16];

struct Dim { unsigned x, y, z; };
Dim threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

struct Slot {
    int kind;
    unsigned count;
    uint32_t in[12], out[4];
};

struct Fiber {
    ucontext_t start;
    jmp_buf state;
    std::vector<char> stack;
    bool started, done, waiting;
    unsigned count;
    std::vector<std::pair<unsigned char*, const unsigned char*>> copies;
};

std::vector<Fiber> fibers;
Slot slots[2][kLanes];
jmp_buf scheduler;
int current;
void (*body)(void*);
void* body_arguments;

inline void fail(const char* what)
{
    std::fprintf(stderr, "cuda_shim: %s (block %u, %u, thread %d)\n", what, blockIdx.x, blockIdx.y, current);
    std::abort();
}

inline void yield()
{
    int self = current;
    if (!_setjmp(fibers[self].state))
        _longjmp(scheduler, 1);
    threadIdx.x = self;
}

inline void fiber_main()
{
    body(body_arguments);
    fibers[current].done = true;
    _longjmp(scheduler, 1);
}

inline void resume(int thread)
{
    Fiber& fiber = fibers[thread];
    current = thread;
    threadIdx = {(unsigned)thread, 0, 0};
    if (_setjmp(scheduler))
        return;
    if (fiber.started)
        _longjmp(fiber.state, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// All lanes of the warp bring their operands; `all` turns the inputs of 32 slots into their outputs.
template <class Function>
inline void together(int kind, const uint32_t* in, int inputs, uint32_t* out, int outputs, Function all)
{
    Fiber& fiber = fibers[current];
    unsigned count = fiber.count++ | (unsigned)(current / kLanes) << 26; // no lane of another warp can stand in
    int lane = current % kLanes;
    Slot* row = slots[count % 2];
    row[lane].kind = kind;
    row[lane].count = count;
    if (inputs)
        std::memcpy(row[lane].in, in, 4 * inputs);
    if (lane == kLanes - 1) {
        for (int other = 0; other < kLanes; other++)
            if (row[other].kind != kind || row[other].count != count)
                fail("lanes of a warp are not at the same instruction");
        all(row);
    }
    yield();
    if (row[lane].count != count)
        fail("a lane was overtaken");
    if (outputs)
        std::memcpy(out, row[lane].out, 4 * outputs);
}

inline void run_block(unsigned threads, unsigned bytes)
{
    fibers.resize(threads);
    for (auto& slot : slots)
        for (auto& one : slot)
            one.kind = -1;
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.stack.resize(kStack);
        fiber.started = fiber.done = fiber.waiting = false;
        fiber.count = 0;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = kStack;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
    }
    std::memset(shared, 0xFF, sizeof shared);
    for (bool alive = true; alive;) {
        alive = false;
        for (unsigned turn = 0; turn < threads; turn += kLanes) {
            unsigned warp = blockIdx.x % 2 ? threads - kLanes - turn : turn;
            for (bool moved = true; moved;) {
                moved = false;
                for (unsigned i = warp; i < warp + kLanes; i++)
                    if (!fibers[i].done && !fibers[i].waiting) {
                        resume((int)i);
                        moved = true;
                    }
            }
        }
        unsigned waiting = 0;
        for (auto& fiber : fibers) {
            waiting += fiber.waiting;
            fiber.waiting = false;
        }
        if (waiting && waiting != threads)
            fail("some threads ended before a barrier");
        alive = waiting > 0;
    }
    for (unsigned i = bytes; i < sizeof shared; i++)
        if (((unsigned char*)shared)[i] != 0xFF)
            fail("a write past the end of shared memory");
}

inline float half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
        : exponent ? std::ldexp((float)(1024 + fraction), exponent - 25) : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -value : value;
}

inline const float* half_table()
{
    static const std::vector<float> table = [] {
        std::vector<float> values(65536);
        for (int i = 0; i < 65536; i++)
            values[i] = half_value((uint16_t)i);
        return values;
    }();
    return table.data();
}

// Round to nearest, ties to even.
inline uint16_t half_bits(float value)
{
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value))
        return 0x7FFF;
    float size = std::fabs(value);
    if (size >= 65520.0f)
        return sign | 0x7C00;
    if (size < 6.103515625e-05f)
        return sign | (uint16_t)std::nearbyint(std::ldexp(size, 24));
    int exponent;
    float fraction = std::frexp(size, &exponent);
    return sign | (uint16_t)(((exponent + 14) << 10) + (int)std::nearbyint(std::ldexp(fraction, 11)) - 1024);
}

inline uint16_t bfloat_bits(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value))
        return 0x7FFF;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Up for one argument, down for another, and always the same for the same.
inline double error(float argument, double size)
{
    uint32_t bits;
    std::memcpy(&bits, &argument, 4);
    return bits * 2654435761u >> 31 ? size : -size;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>)
{
    kernel(*(A*)arguments[I]...);
}

} // namespace shim

inline void __syncthreads()
{
    shim::fibers[shim::current].waiting = true;
    shim::yield();
}

inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float cospif(float x) { return (float)std::cos(M_PI * (double)x); }
inline float sinpif(float x) { return (float)std::sin(M_PI * (double)x); }

// CUDA programming guide, table of intrinsic functions.
inline float __sinf(float x) { return (float)(std::sin((double)x) + shim::error(x, std::exp2(-21.41))); }
inline float __cosf(float x) { return (float)(std::cos((double)x) + shim::error(x, std::exp2(-21.19))); }
inline float __log2f(float x)
{
    double log = std::log2((double)x);
    return (float)(log + shim::error(x, x > 0.5f && x < 2.0f ? std::exp2(-22) : std::exp2(-22) * std::fabs(log)));
}
inline float fast_sqrt(float x) { return (float)(std::sqrt((double)x) * (1.0 + shim::error(x, std::exp2(-23)))); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select)
{
    uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned word = 0;
    for (int i = 0; i < 4; i++)
        word |= (unsigned)(bytes >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
    return word;
}

inline float half_to_float(uint16_t bits) { return shim::half_table()[bits]; }
inline unsigned pack_half(float low, float high)
{
    return shim::half_bits(low) | (unsigned)shim::half_bits(high) << 16;
}
inline unsigned pack_bfloat(float low, float high)
{
    return shim::bfloat_bits(low) | (unsigned)shim::bfloat_bits(high) << 16;
}
inline unsigned add_halves(unsigned a, unsigned b)
{
    return pack_half(half_to_float((uint16_t)a) + half_to_float((uint16_t)b),
        half_to_float((uint16_t)(a >> 16)) + half_to_float((uint16_t)(b >> 16)));
}

// Lands only when it is waited for: until then the place keeps its NaN.
inline void copy_async(unsigned char* to, const unsigned char* from)
{
    if ((uintptr_t)to % 8 || (uintptr_t)from % 8)
        shim::fail("cp.async at a bad address");
    shim::fibers[shim::current].copies.push_back({to, from});
}

// Reads what it is asked for, so that an address outside of the images shows.
inline void prefetch_line(const unsigned char* line)
{
    volatile unsigned char byte = *line;
    (void)byte;
}

inline void wait_for_copies()
{
    for (auto [to, from] : shim::fibers[shim::current].copies)
        std::memcpy(to, from, 8);
    shim::fibers[shim::current].copies.clear();
}

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes)
{
    if (mask != 0xFFFFFFFFu)
        shim::fail("a shuffle without all lanes");
    uint32_t in[2] = {value, (uint32_t)lanes}, out;
    shim::together(0, in, 2, &out, 1, [](shim::Slot* row) {
        for (int lane = 0; lane < kLanes; lane++)
            row[lane].out[0] = row[lane ^ row[lane].in[1]].in[0];
    });
    return out;
}

inline float __shfl_xor_sync(unsigned mask, float value, int lanes)
{
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(value), lanes));
}

inline void __syncwarp() { shim::together(3, nullptr, 0, nullptr, 0, [](shim::Slot*) {}); }

inline void load_matrices(uint32_t (&a)[4], const uint16_t* address)
{
    size_t offset = (const char*)address - (const char*)shared;
    if (offset % 16 || offset > (size_t)kSharedBytes - 16)
        shim::fail("ldmatrix at a bad address");
    uint32_t in = (uint32_t)offset;
    shim::together(1, &in, 1, a, 4, [](shim::Slot* row) {
        for (int lane = 0; lane < kLanes; lane++)
            for (int matrix = 0; matrix < 4; matrix++)
                std::memcpy(&row[lane].out[matrix],
                    (const char*)shared + row[8 * matrix + lane / 4].in[0] + 4 * (lane % 4), 4);
    });
}

inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
    uint32_t in[10], out[4];
    std::memcpy(in, a, 16);
    std::memcpy(in + 4, b, 8);
    std::memcpy(in + 6, d, 16);
    shim::together(2, in, 10, out, 4, [](shim::Slot* row) {
        const float* value = shim::half_table();
        float left[16][16], right[16][8];
        for (int lane = 0; lane < kLanes; lane++)
            for (int part = 0; part < 2; part++) {
                int g = lane / 4, k = 2 * (lane % 4) + part;
                for (int i = 0; i < 4; i++)
                    left[g + 8 * (i % 2)][k + 8 * (i / 2)] = value[row[lane].in[i] >> 16 * part & 0xFFFF];
                for (int i = 0; i < 2; i++)
                    right[k + 8 * i][g] = value[row[lane].in[4 + i] >> 16 * part & 0xFFFF];
            }
        for (int lane = 0; lane < kLanes; lane++)
            for (int i = 0; i < 4; i++) {
                int m = lane / 4 + 8 * (i / 2), n = 2 * (lane % 4) + i % 2;
                float sum = __uint_as_float(row[lane].in[6 + i]);
                for (int k = 0; k < 16; k++)
                    sum += left[m][k] * right[k][n];
                row[lane].out[i] = __float_as_uint(sum);
            }
    });
    std::memcpy(d, out, 16);
}

#define CUDA_SHIM(kernel)                                                                                            \
    extern "C" int launch(unsigned grid_x, unsigned grid_y, unsigned threads, unsigned bytes, void** arguments)        \
    {                                                                                                                \
        if (threads % kLanes || bytes > (unsigned)kSharedBytes)                                                      \
            return 1;                                                                                                \
        gridDim = {grid_x, grid_y, 1};                                                                               \
        blockDim = {threads, 1, 1};                                                                                  \
        shim::body_arguments = arguments;                                                                            \
        shim::body = [](void* packed) { shim::unpack(kernel, (void**)packed); };                                     \
        for (unsigned y = 0; y < grid_y; y++)                                                                        \
            for (unsigned x = 0; x < grid_x; x++) {                                                                  \
                blockIdx = {x, y, 0};                                                                                \
                shim::run_block(threads, bytes);                                                                     \
            }                                                                                                        \
        return 0;                                                                                                    \
    }

namespace shim {
template <class... A>
void unpack(void (*kernel)(A...), void** arguments)
{
    call(kernel, arguments, std::index_sequence_for<A...>{});
}
} // namespace shim
