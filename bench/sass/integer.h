// Integers, bits, predicates, and what moves them.

static int compare(int form, int less, int equal) // 1 to 6: LT EQ LE GT NE GE
{
    return ((form & 1) && less) || ((form & 2) && equal) || ((form & 4) && !less && !equal);
}
static u32 combine(int how, u32 a, u32 b) { return how == 0 ? a & b : how == 1 ? a | b : a ^ b; }

// Bitwise, by a table of what to give for each of eight cases.
static u32 look_up(int table, u32 a, u32 b, u32 c)
{
    u32 result = 0;
    for (int k = 0; k < 8; k++)
        if (table >> k & 1)
            result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return result;
}

static int is_less(const Instruction* i, u32 a, u32 b) { return i->is_unsigned ? a < b : (i32)a < (i32)b; }
static u32 lesser(const Instruction* i, u32 a, u32 b, int least) { return is_less(i, a, b) == least ? a : b; }
static u32 relu(const Instruction* i, u32 x) { return i->relu && (i32)x < 0 ? 0 : x; }

// A term of a sum, as wide as its carry: -x is ~x + 1, which carries if x is 0.
static u64 term(const Source* s, u32 x)
{
    return s->flags & NEGATED ? (u64)(u32)~x + 1 : s->flags & INVERTED ? (u32)~x : x;
}

static int multiply_add(Step* t)
{
    enum { LOW, WIDE, HIGH };
    const Instruction* i = t->i;
    u32 a[32], b[32], c[32], o[32], carry = i->extended ? predicate(t, 3) : 0, p = 0;
    u64 d[32], wide[32];
    if (i->form == LOW) {
        READ(integers, 0, a);
        READ(integers, 1, b);
        READ(integers, 2, c);
        ALL {
            u64 sum = (u64)(a[l] * b[l]) + c[l] + (carry >> l & 1);
            o[l] = (u32)sum;
            p |= (u32)(sum >> 32) << l;
        }
        set_predicate(t, 0, p);
        return set(t, o);
    }
    READ(bits, 0, a);
    READ(bits, 1, b);
    READ(pairs, 2, d);
    int negative = (i->source[0].flags ^ i->source[1].flags) & NEGATED;
    ALL {
        u64 product = i->is_unsigned ? (u64)a[l] * b[l] : (u64)((i64)(i32)a[l] * (i32)b[l]);
        u64 addend = i->source[2].flags & NEGATED ? -d[l] : i->source[2].flags & INVERTED ? ~d[l] : d[l];
        unsigned __int128 sum = (unsigned __int128)(negative ? -product : product) + addend + (carry >> l & 1);
        wide[l] = (u64)sum;
        o[l] = (u32)(wide[l] >> 32);
        p |= (u32)(sum >> 64) << l;
    }
    if (i->form == WIDE)
        set_pairs(t, wide);
    else
        set(t, o);
    set_predicate(t, 0, p);
    return 1;
}

static int shift_add(Step* t) // LEA
{
    const Instruction* i = t->i;
    u32 a[32], b[32], o[32], upper[32] = {0}, p = 0;
    READ(integers, 0, a);
    READ(bits, 1, b);
    int n = 2;
    if (i->high && i->is_unsigned)
        READ(bits, n++, upper);
    if (!i->is_unsigned)
        ALL upper[l] = (u32)((i32)a[l] >> 31);
    int shift = i->source[n].value & 31;
    u32 carry = i->extended ? predicate(t, n + 1) : 0;
    ALL {
        u64 wide = (u64)upper[l] << 32 | a[l];
        u32 shifted = i->high ? (u32)(wide << shift >> 32) : a[l] << shift;
        u64 sum = (u64)shifted + term(&i->source[1], b[l]) + (carry >> l & 1);
        o[l] = (u32)sum;
        p |= (u32)(sum >> 32 != 0) << l;
    }
    set_predicate(t, 0, p);
    return set(t, o);
}

static int shift(Step* t) // SHF
{
    enum { LEFT, RIGHT };
    const Instruction* i = t->i;
    u32 low[32], by[32], high[32], o[32];
    READ(integers, 0, low);
    READ(integers, 1, by);
    READ(integers, 2, high);
    ALL {
        u32 n = by[l], most = i->size == 8 ? 63 : 32;
        n = n > most ? most : n;
        u64 wide = (u64)high[l] << 32 | low[l];
        if (i->form == LEFT)
            o[l] = i->high ? (u32)(wide << n >> 32) : n >= 32 ? 0 : low[l] << n;
        else if (i->high)
            o[l] = i->is_unsigned ? (n >= 32 ? 0 : high[l] >> n) : (u32)((i32)high[l] >> (n >= 32 ? 31 : n));
        else
            o[l] = (u32)(i->is_unsigned ? wide >> n : (u64)((i64)wide >> n));
    }
    return set(t, o);
}

static u32 permute(u32 low, u32 how, u32 high)
{
    u64 wide = (u64)high << 32 | low;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        int from = how >> 4 * k & 15;
        u32 x = (u32)(wide >> 8 * (from & 7)) & 255;
        if (from & 8)
            x = x & 128 ? 255 : 0;
        result |= x << 8 * k;
    }
    return result;
}

static int compare_integers(Step* t)
{
    const Instruction* i = t->i;
    u32 a[32], b[32], p = 0, with = predicate(t, 2), lower = i->extended ? predicate(t, 3) : 0;
    READ(integers, 0, a);
    READ(integers, 1, b);
    ALL {
        int equal = a[l] == b[l];
        int holds = i->extended && equal ? lower >> l & 1 : (u32)compare(i->form, is_less(i, a[l], b[l]), equal);
        p |= (u32)holds << l;
    }
    set_predicate(t, 0, combine(i->logic, p, with));
    set_predicate(t, 1, combine(i->logic, ~p, with));
    return 1;
}

static int add_pairs(Step* t) // IADD3.64
{
    u64 x[32], o[32] = {0};
    for (int k = 0; k < 3; k++) {
        READ(pairs, k, x);
        ALL o[l] += t->i->source[k].flags & NEGATED ? -x[l] : x[l];
    }
    set_pairs(t, o);
    return 1;
}

static int add_three(Step* t)
{
    const Instruction* i = t->i;
    u32 x[3][32], o[32], p = 0, q = 0;
    for (int k = 0; k < 3; k++)
        READ(bits, k, x[k]);
    u32 c = i->extended ? predicate(t, 3) : 0, d = i->extended ? predicate(t, 4) : 0;
    ALL {
        u64 sum = (c >> l & 1) + (d >> l & 1);
        for (int k = 0; k < 3; k++)
            sum += term(&i->source[k], x[k][l]);
        o[l] = (u32)sum;
        p |= (u32)(sum >> 32 >= 1) << l;
        q |= (u32)(sum >> 32 >= 2) << l;
    }
    set_predicate(t, 0, p);
    set_predicate(t, 1, q);
    return set(t, o);
}

static u32 special(const Step* t, int lane)
{
    enum { THREAD, BLOCK_X, BLOCK_Y };
    switch (t->i->form) {
    case THREAD: return t->warp->id * 32 + lane;
    case BLOCK_X: return t->block->block_x;
    case BLOCK_Y: return t->block->block_y;
    default: return 0;
    }
}

// 1: done, 0: of another kind, -1: failed.
static int integer_step(Step* t)
{
    const Instruction* i = t->i;
    u32 a[32], b[32], c[32], o[32], p;
    switch (i->op) {
    case OP_MOV: READ(integers, 0, o); return set(t, o);
    case OP_R2UR: READ(bits, 0, o); return set(t, o);
    case OP_CS2R:
        ALL o[l] = 0;
        set_word(t, 1, o);
        return set(t, o);
    case OP_S2R:
        ALL o[l] = special(t, l);
        return set(t, o);
    case OP_SEL:
        READ(integers, 0, a);
        READ(integers, 1, b);
        p = predicate(t, 2);
        ALL o[l] = p >> l & 1 ? a[l] : b[l];
        return set(t, o);
    case OP_IADD3: return i->size == 8 ? add_pairs(t) : add_three(t);
    case OP_VIADD:
        READ(integers, 0, a);
        READ(integers, 1, b);
        ALL o[l] = a[l] + b[l];
        return set(t, o);
    case OP_VIMNMX:
        READ(integers, 0, a);
        READ(integers, 1, b);
        p = predicate(t, 2);
        ALL o[l] = relu(i, lesser(i, a[l], b[l], p >> l & 1));
        return set(t, o);
    case OP_VIADDMNMX:
    case OP_VIMNMX3:
        READ(integers, 0, a);
        READ(integers, 1, b);
        READ(integers, 2, c);
        p = predicate(t, 3);
        ALL {
            int least = p >> l & 1;
            u32 x = i->op == OP_VIADDMNMX ? a[l] + b[l] : lesser(i, a[l], b[l], least);
            o[l] = relu(i, lesser(i, x, c[l], least));
        }
        return set(t, o);
    case OP_IMAD: return multiply_add(t);
    case OP_LEA: return shift_add(t);
    case OP_SHF: return shift(t);
    case OP_ISETP: return compare_integers(t);
    case OP_LOP3:
        READ(integers, 0, a);
        READ(integers, 1, b);
        READ(integers, 2, c);
        p = predicate(t, 4);
        ALL {
            o[l] = look_up(i->source[3].value, a[l], b[l], c[l]);
            p |= (u32)(o[l] != 0) << l;
        }
        set_predicate(t, 0, p);
        return set(t, o);
    case OP_PLOP3:
        for (int k = 0; k < 2; k++)
            c[k] = look_up(i->source[3 + k].value, predicate(t, 0), predicate(t, 1), predicate(t, 2));
        set_predicate(t, 0, c[0]);
        set_predicate(t, 1, c[1]);
        return 1;
    case OP_PRMT:
        READ(bits, 0, a);
        READ(bits, 1, b);
        READ(bits, 2, c);
        ALL o[l] = permute(a[l], b[l], c[l]);
        return set(t, o);
    case OP_P2R: // predicates into a mask's bits
        READ(bits, 0, a);
        READ(bits, 1, b);
        ALL {
            u32 lane = 0;
            for (int k = 0; k < PT; k++)
                lane |= (t->warp->P[k] >> l & 1) << k;
            o[l] = (a[l] & ~b[l]) | (lane & b[l]);
        }
        return set(t, o);
    case OP_SGXT: // the lower b bits, as a number
        READ(integers, 0, a);
        READ(integers, 1, b);
        ALL {
            u64 one = 1ull << (b[l] > 32 ? 32 : b[l]), low = a[l] & (one - 1);
            o[l] = (u32)(i->is_unsigned || !(low & one >> 1) ? low : low - one);
        }
        return set(t, o);
    case OP_IABS:
        READ(bits, 0, a);
        ALL o[l] = (i32)a[l] < 0 ? -a[l] : a[l];
        return set(t, o);
    default: return 0;
    }
}
