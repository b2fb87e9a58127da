// Runs a block of a program of sm_90, a warp after the other between barriers, and writes down what each warp did.
//
// Lanes that part at a branch are groups, of which one runs until it ends or waits for others. What a program does
// must not depend on the order of warps: there are no atomic operations and no cycles here. decode.py makes the
// program; operations OP_* are numbered by the command that compiles this file.

#include "machine.h"
#include "integer.h"
#include "floating.h"
#include "memory.h"

static void drop_empty(Warp* w)
{
    int kept = 0;
    for (int k = 0; k < w->group_count; k++)
        if (w->groups[k].mask)
            w->groups[kept++] = w->groups[k];
    w->group_count = kept;
}

static int waits_with(const Group* a, const Group* b, u32 need)
{
    return a->state == b->state && a->pc == b->pc && a->argument == b->argument && a->mask & need;
}

// Groups that wait for each other, and have all come, go on as one.
static void merge(Warp* w)
{
    for (int k = 0; k < w->group_count; k++) {
        Group* g = &w->groups[k];
        if (g->state != AT_BSYNC && g->state != AT_WARPSYNC)
            continue;
        u32 come = 0, need = g->need & w->live;
        for (int n = 0; n < w->group_count; n++)
            if (waits_with(&w->groups[n], g, need))
                come |= w->groups[n].mask;
        if (need & ~come)
            continue;
        for (int n = 0; n < w->group_count; n++)
            if (n != k && waits_with(&w->groups[n], g, need)) {
                g->mask |= w->groups[n].mask;
                w->groups[n].mask = 0;
            }
        g->state = READY;
        g->pc++;
        drop_empty(w);
        k = -1;
    }
}

static void wait(Step* t, Group* g, int state, int argument, u32 need)
{
    g->state = state;
    g->pc = t->pc;
    g->argument = argument;
    g->need = need;
}

static int branch(Step* t, Group* g) // BRA, CALL, EXIT
{
    Warp* w = t->warp;
    const Instruction* i = t->i;
    u32 active = g->mask, m = t->mask;
    if (i->source[0].kind)
        m &= predicate(t, 0);
    if (t->record)
        t->record->active = (u8)__builtin_popcount(m);
    if (!m)
        return 1;
    if (i->op == OP_EXIT) {
        w->live &= ~m;
        g->mask &= ~m;
        for (int k = 0; k < 16; k++)
            ALL w->B[k][l] &= ~m;
        drop_empty(w);
        w->current = -1;
        return 1;
    }
    if (m == active) {
        g->pc = i->target;
        return 1;
    }
    if (w->group_count == 64)
        return fail(t, "too many groups of lanes");
    g->mask &= ~m;
    w->groups[w->group_count++] = (Group){m, i->target, READY, 0, 0};
    return 1;
}

static int leave(Step* t) // BREAK: these lanes will not come to a BSYNC
{
    Warp* w = t->warp;
    u32 m = t->mask;
    if (t->i->source[0].kind)
        m &= predicate(t, 0);
    if (t->record)
        t->record->active = (u8)__builtin_popcount(m);
    u32* masks = w->B[t->i->form];
    ALL masks[l] = m >> l & 1 ? 0 : masks[l] & ~m;
    for (int k = 0; k < w->group_count; k++)
        if (w->groups[k].state == AT_BSYNC && w->groups[k].argument == t->i->form)
            w->groups[k].need &= ~m;
    return 1;
}

// For all lanes of the group, with a predicate that holds for none, too.
static int control_step(Step* t, Group* g)
{
    const Instruction* i = t->i;
    u32 a[32], active = g->mask, need = 0;
    switch (i->op) {
    case OP_NOP: return 1;
    case OP_BSSY:
        EACH t->warp->B[i->form][l] = active;
        return 1;
    case OP_BREAK: return leave(t);
    case OP_BSYNC:
        if (t->mask != active)
            return fail(t, "BSYNC for a part of the lanes that are there");
        EACH need |= t->warp->B[i->form][l];
        wait(t, g, AT_BSYNC, i->form, need | active);
        return 1;
    case OP_WARPSYNC: wait(t, g, AT_WARPSYNC, 0, ~0u); return 1;
    case OP_BAR:
        if (!t->mask)
            return 1;
        if (t->mask != active)
            return fail(t, "BAR for a part of the lanes that are there");
        wait(t, g, AT_BARRIER, 0, 0);
        return 1;
    case OP_BRADIV: // where not all lanes of the mask are there
        READ(bits, 0, a);
        if (t->mask && a[0] & ~active & t->warp->live)
            g->pc = i->target;
        return 1;
    case OP_BRA:
    case OP_CALL:
    case OP_EXIT: return branch(t, g);
    case OP_RET:
        READ(bits, 0, a);
        if (t->mask != active)
            return fail(t, "RET for a part of the lanes that are there");
        EACH if (a[l] != a[first_lane(t->mask)])
            return fail(t, "RET to several places");
        g->pc = (i32)(a[first_lane(t->mask)] + i->target) / 16;
        return 1;
    case OP_UNKNOWN: return fail(t, "unknown instruction");
    default: return 0;
    }
}

// Until the warp ends (0), waits at a barrier (1), or fails (-1).
static int run_warp(Block* block, Warp* w)
{
    for (;;) {
        Step t = {block, w, 0, -1, 0, 0};
        if (w->current < 0 || w->groups[w->current].state != READY) {
            merge(w);
            w->current = -1;
            u32 at_barrier = 0;
            for (int k = 0; k < w->group_count; k++) {
                if (w->groups[k].state == READY)
                    w->current = k;
                if (w->groups[k].state == AT_BARRIER)
                    at_barrier |= w->groups[k].mask;
            }
            if (!w->live)
                return 0;
            if (w->current < 0) {
                t.pc = w->groups[0].pc;
                return at_barrier == w->live ? 1 : fail(&t, "lanes of a warp wait for each other");
            }
        }
        Group* g = &w->groups[w->current];
        t.pc = g->pc;
        if (t.pc < 0 || t.pc >= block->length)
            return fail(&t, "a jump out of the program");
        if (++block->steps > block->limit)
            return fail(&t, "more than %lld instructions", (long long)block->limit);
        const Instruction* i = t.i = &block->program[t.pc];
        u32 holds = !i->predicate_uniform ? w->P[i->predicate] : w->UP[i->predicate] ? ~0u : 0;
        t.mask = g->mask & (i->predicate_not ? ~holds : holds);
        if (block->tracing)
            t.record = keep(block, w, t.pc, t.mask);
        g->pc++;
        int done = control_step(&t, g);
        if (!done && !t.mask)
            continue;
        if (!done)
            done = integer_step(&t);
        if (!done)
            done = floating_step(&t);
        if (!done)
            done = memory_step(&t);
        if (done != 1)
            return done ? done : fail(&t, "an operation without code");
    }
}

i32 instruction_bytes(void) { return sizeof(Instruction); }

// 0, or -1 - the warp that failed.
i32 run_block(Block* block)
{
    int count = block->threads / 32, status = 0;
    Warp* w = calloc(count, sizeof(Warp));
    for (int k = 0; k < count; k++) {
        w[k].live = w[k].P[PT] = ~0u;
        w[k].UP[PT] = 1;
        w[k].id = k;
        w[k].group_count = 1;
        w[k].groups[0] = (Group){~0u, 0, READY, 0, 0};
        w[k].local = calloc(32, block->local_bytes);
    }
    for (int running = 1; running && !status;) {
        running = 0;
        for (int k = 0; k < count && !status; k++) {
            // All that still run have come to the barrier, and go on.
            for (int n = 0; n < w[k].group_count; n++)
                if (w[k].groups[n].state == AT_BARRIER)
                    w[k].groups[n].state = READY, w[k].groups[n].pc++;
            int state = w[k].live ? run_warp(block, &w[k]) : 0;
            if (state < 0)
                status = -1 - k;
            running |= state;
        }
    }
    for (int k = 0; k < count; k++)
        free(w[k].local);
    free(w);
    return status;
}

void free_traces(Trace* traces, i32 count)
{
    for (int k = 0; k < count; k++) {
        free(traces[k].records);
        free(traces[k].sectors);
    }
}
