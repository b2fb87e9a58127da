// The machine that interpreter.c runs a program on: registers, operands, and what is written down of each instruction.
#include <fenv.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

enum { NOTHING, REGISTER, UNIFORM, IMMEDIATE, CONSTANT, PREDICATE, UNIFORM_PREDICATE }; // as in decode.py
enum { NEGATED = 1, ABSOLUTE = 2, INVERTED = 4, NOT = 8 };
enum { RZ = 255, URZ = 63, PT = 7 };

// The fields, and their order, are those of decode.py.
typedef struct {
    i32 kind, index, value, flags, part;
} Source;

typedef struct {
    i32 op, form, ftz, sat, round, is_unsigned, extended, high, relu, logic, size;
    i32 predicate, predicate_not, predicate_uniform;
    i32 into, destination, out0, out1, out_uniform;
    i32 base, base64, ureg, offset, base2, ureg2, offset2, target;
    Source source[5];
} Instruction;

typedef struct {
    i32 pc;
    int16_t wavefronts; // -1: no shared memory
    u8 active, count;
    i64 first; // of its sectors; -1: no memory
} Record;

typedef struct {
    Record* records;
    i64 length, room;
    i64* sectors;
    i64 sector_length, sector_room;
} Trace;

// Lanes of a warp that are at the same place.
enum { READY, AT_BSYNC, AT_WARPSYNC, AT_BARRIER };
typedef struct {
    u32 mask;
    i32 pc, state, argument;
    u32 need; // lanes that a BSYNC or WARPSYNC waits for
} Group;

typedef struct {
    u32 R[256][32], UR[64], P[8], UP[8], B[16][32], live;
    Group groups[64];
    i32 group_count, current, id;
    u8* local;
} Warp;

typedef struct {
    const Instruction* program;
    i32 length;
    const u8* constants;
    i32 constant_bytes;
    u8* shared;
    i32 shared_bytes, threads, block_x, block_y;
    const u64* regions; // begin, end and the begin that traces show
    i32 region_count, local_bytes, tracing;
    i64 limit, steps; // of instructions
    Trace* traces;
    char* error;
    i32 error_pc;
} Block;

// One instruction of one warp, and the lanes that run it.
typedef struct {
    Block* block;
    Warp* warp;
    const Instruction* i;
    i32 pc;
    u32 mask;
    Record* record; // 0 if none are kept
} Step;

#define ALL for (int l = 0; l < 32; l++)
#define EACH ALL if (t->mask >> l & 1)
#define READ(how, n, values) \
    if (how(t, n, values)) \
        return fail(t, "operand %d is of no known kind, or outside of the constants", n)

static int fail(Step* t, const char* format, ...)
{
    va_list rest;
    va_start(rest, format);
    vsnprintf(t->block->error, 400, format, rest);
    va_end(rest);
    t->block->error_pc = t->pc;
    return -1;
}

static inline float as_float(u32 x)
{
    float f;
    memcpy(&f, &x, 4);
    return f;
}
static inline u32 as_bits(float f)
{
    u32 x;
    memcpy(&x, &f, 4);
    return x;
}
static inline u32 flush(u32 x) { return x & 0x7f800000u ? x : x & 0x80000000u; }
static inline int first_lane(u32 mask) { return __builtin_ctz(mask); }

static int constant(const Block* block, i32 offset, u32* value)
{
    if (offset < 0 || offset + 4 > block->constant_bytes)
        return 1;
    memcpy(value, block->constants + offset, 4);
    return 0;
}

// The bits of a word of a source; what is said of each lane is the same in all of them but of registers.
static int word(Step* t, int n, int which, u32* o)
{
    const Source* s = &t->i->source[n];
    u32 value = 0;
    switch (s->kind) {
    case REGISTER: memcpy(o, t->warp->R[s->index == RZ ? RZ : s->index + which], 128); return 0;
    case UNIFORM: value = t->warp->UR[s->index == URZ ? URZ : s->index + which]; break;
    case IMMEDIATE: value = which ? 0 : (u32)s->value; break;
    case CONSTANT:
        if (constant(t->block, s->value + 4 * which, &value))
            return 1;
        break;
    default: return 1;
    }
    ALL o[l] = value;
    return 0;
}
static int bits(Step* t, int n, u32* o) { return word(t, n, 0, o); }

static int integers(Step* t, int n, u32* o)
{
    if (bits(t, n, o))
        return 1;
    int flags = t->i->source[n].flags;
    if (flags & NEGATED)
        ALL o[l] = -o[l];
    if (flags & INVERTED)
        ALL o[l] = ~o[l];
    return 0;
}

static int floats(Step* t, int n, u32* o)
{
    if (bits(t, n, o))
        return 1;
    int flags = t->i->source[n].flags;
    if (flags & ABSOLUTE)
        ALL o[l] &= 0x7fffffffu;
    if (flags & NEGATED)
        ALL o[l] ^= 0x80000000u;
    if (t->i->ftz)
        ALL o[l] = flush(o[l]);
    return 0;
}

static int pairs(Step* t, int n, u64* o)
{
    u32 low[32], high[32];
    if (word(t, n, 0, low) || word(t, n, 1, high))
        return 1;
    ALL o[l] = (u64)high[l] << 32 | low[l];
    return 0;
}

// A bit a lane; none of a source that is not there.
static u32 predicate(const Step* t, int n)
{
    const Source* s = &t->i->source[n];
    u32 v = s->kind == PREDICATE ? t->warp->P[s->index] : 0;
    if (s->kind == UNIFORM_PREDICATE && t->warp->UP[s->index])
        v = ~0u;
    return s->flags & NOT ? ~v : v;
}

static void set_predicate(Step* t, int which, u32 value)
{
    int d = which ? t->i->out1 : t->i->out0;
    if (d == PT)
        return;
    if (t->i->out_uniform)
        t->warp->UP[d] = value >> first_lane(t->mask) & 1;
    else
        t->warp->P[d] = (t->warp->P[d] & ~t->mask) | (value & t->mask);
}

static void set_word(Step* t, int which, const u32* o)
{
    int d = t->i->destination;
    if (t->i->into == REGISTER && d != RZ)
        EACH t->warp->R[d + which][l] = o[l];
    if (t->i->into == UNIFORM && d != URZ)
        t->warp->UR[d + which] = o[first_lane(t->mask)];
}
static int set(Step* t, const u32* o)
{
    set_word(t, 0, o);
    return 1;
}
static void set_pairs(Step* t, const u64* o)
{
    u32 low[32], high[32];
    ALL low[l] = (u32)o[l], high[l] = (u32)(o[l] >> 32);
    set_word(t, 0, low);
    set_word(t, 1, high);
}

static Record* keep(Block* block, const Warp* warp, i32 pc, u32 mask)
{
    Trace* trace = &block->traces[warp->id];
    if (trace->length == trace->room) {
        trace->room = trace->room ? 2 * trace->room : 4096;
        trace->records = realloc(trace->records, trace->room * sizeof(Record));
    }
    Record* r = &trace->records[trace->length++];
    *r = (Record){pc, -1, (u8)__builtin_popcount(mask), 0, -1};
    return r;
}
