// Loads and stores, and the two ways by which lanes of a warp see each other's registers.

// What one instruction takes of shared memory, in cycles: words of the same bank one after the other, 64 bits a half
// warp and 128 bits a quarter at a time, unless all of it is in different banks.
static int wavefronts_of(const u64* address, u32 mask, int bytes, int from, int to)
{
    u64 seen[32][128];
    int count[32] = {0}, most = 0;
    for (int l = from; l < to; l++)
        for (int k = 0; k < (bytes + 3) / 4; k++) {
            u64 x = address[l] / 4 + k;
            int bank = x & 31, j = 0;
            if (!(mask >> l & 1))
                continue;
            while (j < count[bank] && seen[bank][j] != x)
                j++;
            if (j == count[bank])
                seen[bank][count[bank]++] = x;
            most = count[bank] > most ? count[bank] : most;
        }
    return most;
}
static int wavefronts(const u64* address, u32 mask, int bytes)
{
    int whole = wavefronts_of(address, mask, bytes, 0, 32), parts = bytes <= 4 ? 1 : bytes / 4, total = 0;
    if (whole <= 1)
        return whole;
    for (int p = 0; p < parts; p++)
        total += wavefronts_of(address, mask, bytes, p * 32 / parts, (p + 1) * 32 / parts);
    return total;
}

static int ascending(const void* a, const void* b)
{
    i64 x = *(const i64*)a, y = *(const i64*)b;
    return (x > y) - (x < y);
}
// Write down the distinct 32-byte sectors of an instruction, after those of it that already are.
static void keep_sectors(Step* t, const u64* address, int bytes)
{
    Trace* trace = &t->block->traces[t->warp->id];
    i64 found[64];
    int n = 0;
    EACH {
        i64 first = (i64)(address[l] >> 5), last = (i64)((address[l] + bytes - 1) >> 5);
        found[n++] = first;
        if (last != first)
            found[n++] = last;
    }
    qsort(found, n, sizeof *found, ascending);
    if (trace->sector_length + 64 > trace->sector_room) {
        trace->sector_room = trace->sector_room ? 2 * trace->sector_room : 8192;
        trace->sectors = realloc(trace->sectors, trace->sector_room * sizeof(i64));
    }
    if (t->record->first < 0)
        t->record->first = trace->sector_length;
    for (int k = 0; k < n; k++)
        if (!k || found[k] != found[k - 1])
            trace->sectors[trace->sector_length++] = found[k];
    t->record->count = (u8)(trace->sector_length - t->record->first);
}

static void addresses(const Step* t, int second, int global, u64* o)
{
    const Instruction* i = t->i;
    const Warp* w = t->warp;
    int base = second ? i->base2 : i->base, ureg = second ? i->ureg2 : i->ureg;
    i64 offset = second ? i->offset2 : i->offset;
    u64 uniform = 0;
    if (ureg >= 0 && ureg != URZ)
        uniform = w->UR[ureg] | (global ? (u64)w->UR[ureg + 1] << 32 : 0);
    ALL {
        u64 x = 0;
        if (base >= 0 && base != RZ)
            x = w->R[base][l] | (i->base64 && !second ? (u64)w->R[base + 1][l] << 32 : 0);
        x += uniform + (u64)offset;
        o[l] = global ? x : (u32)x;
    }
}

// Global addresses must be in a tensor and aligned; they go on as they are, and to the trace as if tensors lay where
// the regions say.
static int check_global(Step* t, const u64* address)
{
    const Block* block = t->block;
    int bytes = t->i->size;
    u64 shown[32] = {0};
    EACH {
        int k = 0;
        for (; k < block->region_count; k++)
            if (address[l] >= block->regions[3 * k] && address[l] + bytes <= block->regions[3 * k + 1])
                break;
        if (k == block->region_count || address[l] % bytes)
            return fail(t, "no tensor has an element of %d bytes at 0x%llx, lane %d", bytes, (long long)address[l], l);
        shown[l] = address[l] - block->regions[3 * k] + block->regions[3 * k + 2];
    }
    if (t->record)
        keep_sectors(t, shown, bytes);
    return 0;
}
static int check_shared(Step* t, const u64* address, int bytes)
{
    EACH if (address[l] + bytes > (u64)t->block->shared_bytes || address[l] % bytes)
        return fail(t, "no %d bytes of shared memory at 0x%llx, lane %d", bytes, (long long)address[l], l);
    return 0;
}

static int load(Step* t, const u64* address)
{
    const Instruction* i = t->i;
    u32 o[32] = {0};
    if (i->size < 4) {
        EACH {
            memcpy(&o[l], (const void*)address[l], i->size);
            if (!i->is_unsigned)
                o[l] = i->size == 1 ? (u32)(int8_t)o[l] : (u32)(int16_t)o[l];
        }
        return set(t, o);
    }
    for (int k = 0; k < i->size / 4; k++) {
        EACH memcpy(&o[l], (const void*)(address[l] + 4 * k), 4);
        set_word(t, k, o);
    }
    return 1;
}
static int store(Step* t, const u64* address)
{
    int size = t->i->size;
    u32 o[32];
    for (int k = 0; k < (size + 3) / 4; k++) {
        if (word(t, 0, k, o))
            return fail(t, "nothing to store");
        EACH memcpy((void*)(address[l] + 4 * k), &o[l], size < 4 ? size : 4);
    }
    return 1;
}

// Local memory is traced as the card has it: word by word, 32 lanes side by side.
static int local(Step* t, u64* address)
{
    const Block* block = t->block;
    EACH if (address[l] + t->i->size > (u64)block->local_bytes)
        return fail(t, "no local memory at 0x%llx, lane %d", (long long)address[l], l);
    for (int k = 0; t->record && k < (t->i->size + 3) / 4; k++) {
        u64 shown[32];
        ALL shown[l] = ((u64)t->warp->id * block->local_bytes + (address[l] & ~3ull) + 4 * k) * 32 + 4 * l;
        keep_sectors(t, shown, 4);
    }
    ALL address[l] += (u64)(t->warp->local + (size_t)l * block->local_bytes);
    return t->i->op == OP_LDL ? load(t, address) : store(t, address);
}

// One, two or four matrices of 8 x 8 halves, or of transposed ones; each quarter of the warp has the addresses of the
// rows of one.
static int move_matrices(Step* t) // LDSM, STSM
{
    if (t->mask != ~0u)
        return fail(t, "LDSM or STSM without all lanes");
    int count = t->i->size / 4, storing = t->i->op == OP_STSM;
    u64 rows[32];
    addresses(t, 0, 0, rows);
    for (int l = 8 * count; l < 32; l++)
        rows[l] = rows[l % 8]; // not looked at
    if (check_shared(t, rows, 16))
        return -1;
    if (t->record)
        t->record->wavefronts = 0;
    for (int k = 0; k < count; k++) {
        u32 o[32] = {0};
        if (storing && word(t, 0, k, o))
            return fail(t, "nothing to store");
        ALL for (int half = 0; half < 2; half++) {
            int row = l / 4, column = 2 * (l % 4) + half;
            int outer = t->i->form ? column : row, inner = t->i->form ? row : column;
            u8* place = t->block->shared + rows[8 * k + outer] + 2 * inner;
            if (storing)
                memcpy(place, (u8*)&o[l] + 2 * half, 2);
            else
                memcpy((u8*)&o[l] + 2 * half, place, 2);
        }
        if (t->record)
            t->record->wavefronts += wavefronts_of(rows, ~0u, 16, 8 * k, 8 * k + 8);
        if (!storing)
            set_word(t, k, o);
    }
    return 1;
}

// A copy from global to shared memory; zeros to lanes for which the predicate behind the addresses does not hold.
static int copy(Step* t)
{
    u64 address[32], into[32];
    u32 lanes = t->mask, filled = 0;
    addresses(t, 0, 1, address);
    addresses(t, 1, 0, into);
    if (t->i->source[0].kind)
        filled = t->mask & ~predicate(t, 0);
    if (check_shared(t, into, t->i->size))
        return -1;
    if (t->record)
        t->record->wavefronts = (int16_t)wavefronts(into, t->mask, t->i->size);
    EACH if (filled >> l & 1)
        memset(t->block->shared + into[l], 0, t->i->size);
    t->mask &= ~filled;
    int failed = t->mask && check_global(t, address);
    EACH if (!failed)
        memcpy(t->block->shared + into[l], (const void*)address[l], t->i->size);
    t->mask = lanes;
    return failed ? -1 : 1;
}

static int shuffle(Step* t) // from the lane whose number differs in the given bits (BFLY), or is given (IDX)
{
    u32 a[32], b[32], width[32], o[32], lanes = 0;
    READ(bits, 0, a);
    READ(bits, 1, b);
    READ(bits, 2, width);
    EACH {
        if (width[l] != 31)
            return fail(t, "SHFL within parts of a warp");
        int from = t->i->form ? (int)(b[l] & 31) : l ^ (int)(b[l] & 31);
        if (!(t->mask >> from & 1))
            return fail(t, "SHFL from lane %d, which does not take part, to %d", from, l);
        o[l] = a[from];
        lanes |= 1u << l;
    }
    set_predicate(t, 0, lanes);
    return set(t, o);
}

static int memory_step(Step* t)
{
    u64 address[32];
    u32 o[32];
    switch (t->i->op) {
    case OP_LDG:
    case OP_STG:
        addresses(t, 0, 1, address);
        if (check_global(t, address))
            return -1;
        return t->i->op == OP_LDG ? load(t, address) : store(t, address);
    case OP_LDS:
    case OP_STS:
        addresses(t, 0, 0, address);
        if (check_shared(t, address, t->i->size))
            return -1;
        if (t->record)
            t->record->wavefronts = (int16_t)wavefronts(address, t->mask, t->i->size);
        ALL address[l] += (u64)t->block->shared;
        return t->i->op == OP_LDS ? load(t, address) : store(t, address);
    case OP_LDL:
    case OP_STL: addresses(t, 0, 0, address); return local(t, address);
    case OP_LDGSTS: return copy(t);
    case OP_LDSM:
    case OP_STSM: return move_matrices(t);
    case OP_LDC:
        for (int k = 0; k < t->i->size / 4; k++) {
            EACH {
                u32 from = t->i->base >= 0 ? t->warp->R[t->i->base][l] : 0;
                if (constant(t->block, (i32)from + t->i->source[0].value + 4 * k, &o[l]))
                    return fail(t, "outside of the constants");
            }
            set_word(t, k, o);
        }
        return 1;
    case OP_SHFL: return shuffle(t);
    case OP_VOTE: {
        u32 lanes = predicate(t, 0) & t->mask;
        set_predicate(t, 0, lanes ? ~0u : 0);
        return 1;
    }
    default: return 0;
    }
}
