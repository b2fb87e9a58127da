// One multiprocessor of sm_90 on which blocks run whose traces are known; timing.py says what is modelled.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef int32_t i32;
typedef int64_t i64;

enum { SCHEDULERS = 4, WAYS = 4, BARRIERS = 6, QUEUE = 64, GROUPS = 32 };
enum { FREE, FMA, FMA_HALF, ALU, SPECIAL, MATRIX, MEMORY, PIPES }; // as in timing.py
enum { PLAIN, LOAD, STORE, COPY, SHARED, BARRIER, COPIES_END, COPIES_DONE, BRANCH, PRODUCT, PRODUCTS_DONE };

// Cycles of the way through the load/store unit, and of a barrier: plausible, not fitted.
static const double TO_SHARED = 4, TO_GLOBAL = 6, TO_L2 = 20, SOURCES_READ = 8, COPIED = 10, STORED = 30, MEET = 20;
static const double STORES_AHEAD = 400; // of what the second-level cache takes

typedef struct {
    i32 pipe, kind, stall, write_barrier, read_barrier, wait;
    i32 groups; // of copies or products that need not be done; 1 where a product ends a group
    i32 bytes; // that a lane stores
    double cycles, latency;
} Timed;

// What a warp started and will wait for later: groups end in their order.
typedef struct {
    double done, ends[GROUPS];
    i64 count;
} Groups;

typedef struct {
    double memory_bytes, l2_bytes; // a cycle, the multiprocessor's share
    double l1_latency, l2_latency, memory_latency, branch, between, block_start, idle_block, dirty_bytes;
    i32 l1_lines, queue;
} Card;

typedef struct {
    i64 length;
    const i32* pc;
    const uint8_t* active;
    const int16_t* wavefronts;
    const i64* first;
    const uint8_t* count;
    const i64* sectors;
} Trace;

typedef struct {
    const Trace* trace; // 0: none runs here
    i64 at;
    double ready, barriers[BARRIERS];
    Groups copies, products;
    i32 at_barrier;
} Warp;

typedef struct {
    i32 block, alive, arrived; // warps that still run, and those that wait at a barrier
} Slot;

typedef struct {
    i64 line;
    double used, arrival[4]; // 0: the sector is not there
} Line;

// What timing.py reads: cycles, cycles in which each pipe of a scheduler and the load/store unit were taken, bytes.
typedef struct {
    double cycles, issued, pipes[PIPES], unit, from_l2, to_l2, from_memory, stored;
} Result;

typedef struct {
    const Timed* program;
    const Card* card;
    Warp* warps;
    Slot* slots;
    Line* lines;
    i32 slot_count, block_warps, sets;
    double t;
    double pipe_free[SCHEDULERS][PIPES], queue[SCHEDULERS][QUEUE];
    i64 queued[SCHEDULERS], last[SCHEDULERS];
    double unit_free, l2_free, memory_free, unwritten, owed;
    Result result;
} Multiprocessor;

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

static void start_block(Multiprocessor* m, i32 s, i32 block, const Trace* traces, double idle)
{
    m->slots[s] = (Slot){block, m->block_warps, 0};
    double ready = m->t + m->card->block_start + idle * m->card->idle_block;
    for (int w = 0; w < m->block_warps; w++)
        m->warps[s * m->block_warps + w] = (Warp){.trace = &traces[w], .ready = ready};
}

static const Timed* next_of(const Multiprocessor* m, const Warp* w) { return &m->program[w->trace->pc[w->at]]; }

static void end_group(Groups* groups) { groups->ends[groups->count++ % GROUPS] = groups->done; }

// When all groups but the last few have ended.
static double ended(const Groups* groups, i32 but)
{
    return groups->count > but ? groups->ends[(groups->count - 1 - but) % GROUPS] : 0;
}

// When a warp can issue its next instruction on a scheduler.
static double earliest(const Multiprocessor* m, const Warp* w, int scheduler)
{
    const Timed* i = next_of(m, w);
    double when = w->ready;
    for (int k = 0; k < BARRIERS; k++)
        if (i->wait >> k & 1)
            when = larger(when, w->barriers[k]);
    if (i->kind == COPIES_DONE)
        when = larger(when, ended(&w->copies, i->groups));
    if (i->kind == PRODUCTS_DONE)
        when = larger(when, ended(&w->products, i->groups));
    if (i->pipe != FREE)
        when = larger(when, m->pipe_free[scheduler][i->pipe]);
    if (i->pipe == MEMORY)
        when = larger(when, m->queue[scheduler][(m->queued[scheduler] + QUEUE - m->card->queue) % QUEUE]);
    return when;
}

// Memory writes what stores left while it has nothing to read.
static void write_until(Multiprocessor* m, double when)
{
    double can = larger(0, when - m->memory_free) * m->card->memory_bytes;
    double done = smaller(m->unwritten, can);
    m->unwritten -= done;
    m->memory_free += done / m->card->memory_bytes;
}

// The arrival of a sector that is not in the first-level cache.
static double fetch(Multiprocessor* m, double when, double from_memory)
{
    const Card* card = m->card;
    double begin = larger(when + TO_L2, m->l2_free);
    m->l2_free = begin + 32 / card->l2_bytes;
    m->result.from_l2 += 32;
    double arrival = begin + card->l2_latency;
    m->owed += from_memory;
    if (m->owed < 1)
        return arrival;
    m->owed -= 1;
    m->result.from_memory += 32;
    write_until(m, begin);
    begin = larger(begin, m->memory_free);
    if (m->unwritten > card->dirty_bytes) { // the cache holds no more
        begin += (m->unwritten - card->dirty_bytes) / card->memory_bytes;
        m->unwritten = card->dirty_bytes;
    }
    m->memory_free = begin + 32 / card->memory_bytes;
    return larger(arrival, m->memory_free + card->memory_latency);
}

static Line* find_line(Multiprocessor* m, i64 number)
{
    Line* set = &m->lines[(number ^ number >> 7) % m->sets * WAYS];
    Line* oldest = set;
    for (int k = 0; k < WAYS; k++) {
        if (set[k].line == number)
            return &set[k];
        if (set[k].used < oldest->used)
            oldest = &set[k];
    }
    *oldest = (Line){number, 0, {0}};
    return oldest;
}

// When all that a load reads is there; it takes the unit a cycle a line, or four sectors.
static double load(Multiprocessor* m, const i64* sectors, int count, double from_memory)
{
    double begin = larger(m->t + TO_GLOBAL, m->unit_free), arrival = begin + m->card->l1_latency;
    int lines = 0;
    for (int k = 0; k < count; k++) {
        lines += !k || sectors[k] / 4 != sectors[k - 1] / 4;
        Line* line = find_line(m, sectors[k] / 4);
        line->used = begin;
        double* sector = &line->arrival[sectors[k] % 4];
        if (*sector == 0)
            *sector = fetch(m, begin, from_memory);
        arrival = larger(arrival, *sector);
    }
    m->unit_free = begin + larger(lines, (count + 3) / 4);
    m->result.unit += larger(lines, (count + 3) / 4);
    return arrival;
}

// The second-level cache takes whole sectors, memory what is in them in the end.
static double store(Multiprocessor* m, int count, double bytes)
{
    const Card* card = m->card;
    double begin = larger(m->t + TO_GLOBAL, m->unit_free), cycles = larger(1, (count + 3) / 4);
    double taken = larger(begin, m->l2_free);
    m->unit_free = begin + cycles;
    m->result.unit += cycles;
    m->l2_free = taken + 32 * count / card->l2_bytes;
    write_until(m, m->t);
    m->unwritten += bytes;
    m->result.stored += bytes;
    m->result.to_l2 += 32 * count;
    if (m->unwritten > 2 * card->dirty_bytes)
        m->unit_free = larger(m->unit_free, begin + (m->unwritten - 2 * card->dirty_bytes) / card->memory_bytes);
    if (m->l2_free - begin > STORES_AHEAD)
        m->unit_free = larger(m->unit_free, m->l2_free - STORES_AHEAD);
    return taken + STORED;
}

// What goes through the load/store unit; gives when its result is there, and when its sources have been read.
static void access(Multiprocessor* m, Warp* w, const Timed* i, double from_memory, double* complete, double* read)
{
    const Trace* trace = w->trace;
    int count = trace->count[w->at];
    const i64* sectors = trace->sectors + (count ? trace->first[w->at] : 0);
    if (i->kind == LOAD || i->kind == COPY) {
        *complete = load(m, sectors, count, from_memory);
        if (i->kind == COPY) {
            m->unit_free += 1;
            m->result.unit += 1;
            w->copies.done = larger(w->copies.done, *complete + COPIED);
        }
        *read = m->unit_free;
    } else if (i->kind == STORE) {
        *complete = store(m, count, trace->active[w->at] * i->bytes);
        *read = m->unit_free + 4;
    } else {
        double begin = larger(m->t + TO_SHARED, m->unit_free), cycles = larger(1, trace->wavefronts[w->at]);
        m->unit_free = *read = begin + cycles;
        m->result.unit += cycles;
        *complete = begin + cycles - 1 + i->latency;
    }
}

static void meet(Multiprocessor* m, i32 s)
{
    Slot* slot = &m->slots[s];
    if (slot->arrived < slot->alive)
        return;
    slot->arrived = 0;
    for (Warp* w = &m->warps[s * m->block_warps]; w < &m->warps[(s + 1) * m->block_warps]; w++)
        if (w->at_barrier) {
            w->at_barrier = 0;
            w->ready = m->t + MEET;
        }
}

// Issue the next instruction of a warp; whether its block has ended.
static int issue(Multiprocessor* m, i32 number, int scheduler, double from_memory)
{
    Warp* w = &m->warps[number];
    const Timed* i = next_of(m, w);
    i32 s = number / m->block_warps;
    double complete = m->t + i->latency, read = m->t + SOURCES_READ;
    m->result.issued += 1;
    if (i->pipe != FREE) {
        double* pipes = m->pipe_free[scheduler];
        pipes[i->pipe] = m->t + i->cycles;
        m->result.pipes[i->pipe] += i->cycles;
        if (i->pipe == FMA_HALF) // of the pipe of all float32
            pipes[FMA] = larger(pipes[FMA], m->t + 1);
    }
    if (i->kind == PRODUCT) { // of four warps: each takes its quarter of shared memory
        double begin = larger(m->t, m->unit_free), cycles = larger(0, w->trace->wavefronts[w->at]);
        m->unit_free = begin + cycles;
        m->result.unit += cycles;
        w->products.done = larger(w->products.done, larger(m->unit_free, m->t + i->cycles) + i->latency);
        if (i->groups)
            end_group(&w->products);
    }
    if (i->kind == COPIES_END)
        end_group(&w->copies);
    if (i->pipe == MEMORY) {
        access(m, w, i, from_memory, &complete, &read);
        m->queue[scheduler][m->queued[scheduler]++ % QUEUE] = m->unit_free;
    }
    if (i->write_barrier < BARRIERS)
        w->barriers[i->write_barrier] = larger(w->barriers[i->write_barrier], complete);
    if (i->read_barrier < BARRIERS)
        w->barriers[i->read_barrier] = larger(w->barriers[i->read_barrier], read);
    i32 here = w->trace->pc[w->at++];
    if (w->at == w->trace->length) {
        w->trace = 0;
        m->slots[s].alive--;
        meet(m, s);
        return !m->slots[s].alive;
    }
    if (i->kind == BRANCH && w->trace->pc[w->at] != here + 1)
        w->ready = m->t + larger(i->stall, m->card->branch);
    else
        w->ready = m->t + larger(1, i->stall) + m->card->between;
    if (i->kind == BARRIER) {
        w->at_barrier = 1;
        m->slots[s].arrived++;
        meet(m, s);
    }
    return 0;
}

// The warp that a scheduler takes: the one it took last, else of the oldest block; -1: none can, the first from `next`.
static i32 choose(const Multiprocessor* m, int scheduler, double* next)
{
    i32 chosen = -1;
    for (i32 k = scheduler; k < m->slot_count * m->block_warps; k += SCHEDULERS) {
        const Warp* w = &m->warps[k];
        if (!w->trace || w->at_barrier)
            continue;
        double when = earliest(m, w, scheduler);
        if (when > m->t)
            *next = smaller(*next, when);
        else if (k == m->last[scheduler])
            return k;
        else if (chosen < 0 || m->slots[k / m->block_warps].block < m->slots[chosen / m->block_warps].block)
            chosen = k;
    }
    return chosen;
}

// Run `count` blocks, of `block_warps` traces each, on a multiprocessor that has room for `slot_count` of them; before
// each, `idle` blocks came and went that have no work. Of what a block loads first, a part comes from memory.
void time_blocks(const Timed* program, const Card* card, const Trace* traces, i32 count, i32 block_warps,
    i32 slot_count, double idle, const double* from_memory, Result* result)
{
    Multiprocessor* m = calloc(1, sizeof *m);
    m->program = program;
    m->card = card;
    m->slot_count = slot_count;
    m->block_warps = block_warps;
    m->sets = card->l1_lines / WAYS;
    m->warps = calloc(slot_count * block_warps, sizeof(Warp));
    m->slots = calloc(slot_count, sizeof(Slot));
    m->lines = calloc(m->sets * WAYS, sizeof(Line));
    for (int k = 0; k < m->sets * WAYS; k++)
        m->lines[k].line = -1;
    for (int k = 0; k < SCHEDULERS; k++)
        m->last[k] = -1;
    i32 started = 0, ended = 0;
    while (ended < count) {
        for (i32 s = 0; s < slot_count; s++)
            if (!m->slots[s].alive && started < count) {
                start_block(m, s, started, traces + (i64)started * block_warps, idle);
                started++;
            }
        int issued = 0;
        double next = INFINITY;
        for (int k = 0; k < SCHEDULERS; k++) {
            i32 chosen = choose(m, k, &next);
            if (chosen < 0)
                continue;
            issued = 1;
            m->last[k] = chosen;
            ended += issue(m, chosen, k, from_memory[m->slots[chosen / block_warps].block]);
        }
        m->t = issued || next == INFINITY ? m->t + 1 : ceil(next);
    }
    // What the second-level cache can't keep is written before the launch is over.
    write_until(m, m->t);
    m->result.cycles = m->t + larger(0, m->unwritten - card->dirty_bytes) / card->memory_bytes;
    *result = m->result;
    free(m->warps);
    free(m->slots);
    free(m->lines);
    free(m);
}
