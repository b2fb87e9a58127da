// Floating point: float32 rounds as the card does, MUFU is exact and rounded, matrix products are summed in double.

static void round_by(int how) // nearest, down, up, towards zero
{
    static const int modes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    fesetround(modes[how]);
}
static double to_whole(double x, int how)
{
    return how == 0 ? nearbyint(x) : how == 1 ? floor(x) : how == 2 ? ceil(x) : trunc(x);
}
static u32 only_nan(u32 x) { return (x & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : x; }

static double from_half(u32 x)
{
    u16 low = (u16)x;
    _Float16 h;
    memcpy(&h, &low, 2);
    return (double)h;
}
static u16 to_half(double x)
{
    _Float16 h = (_Float16)x;
    u16 low;
    memcpy(&low, &h, 2);
    return x != x ? 0x7fff : low;
}
static u16 to_bfloat(u32 x)
{
    return (x & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (u16)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
// A half of a pair: both for `part` 0, else one for both.
static double half_of(const Source* s, u32 x, int k)
{
    int upper = s->kind == IMMEDIATE || s->part == 0 ? k : s->part - 1;
    double value = from_half(x >> 16 * upper);
    if (s->flags & ABSOLUTE)
        value = fabs(value);
    return s->flags & NEGATED ? -value : value;
}

static double special_function(int form, double x)
{
    enum { COS, SIN, EX2, LG2, RCP, RSQ, SQRT };
    switch (form) {
    case COS: return cos(2 * M_PI * fmod(x, 1.0));
    case SIN: return sin(2 * M_PI * fmod(x, 1.0));
    case EX2: return exp2(x);
    case LG2: return log2(x);
    case RCP: return 1.0 / x;
    case RSQ: return 1.0 / sqrt(x);
    default: return sqrt(x);
    }
}

static int arithmetic(Step* t)
{
    const Instruction* i = t->i;
    u32 a[32], b[32], c[32] = {0}, o[32];
    READ(floats, 0, a);
    READ(floats, 1, b);
    if (i->op == OP_FFMA)
        READ(floats, 2, c);
    round_by(i->round);
    ALL {
        float x = as_float(a[l]), y = as_float(b[l]);
        volatile float value = i->op == OP_FADD ? x + y : i->op == OP_FMUL ? x * y : fmaf(x, y, as_float(c[l]));
        o[l] = only_nan(as_bits(value));
    }
    round_by(0);
    ALL {
        if (i->ftz)
            o[l] = flush(o[l]);
        float x = as_float(o[l]);
        if (i->sat)
            o[l] = as_bits(x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f);
    }
    return set(t, o);
}

static int compare_floats(Step* t) // forms from 8 on hold where there is a NaN
{
    u32 a[32], b[32], p = 0, with = predicate(t, 2);
    READ(floats, 0, a);
    READ(floats, 1, b);
    ALL {
        float x = as_float(a[l]), y = as_float(b[l]);
        int unordered = x != x || y != y;
        p |= (u32)(unordered ? t->i->form >= 8 : compare(t->i->form & 7, x < y, x == y)) << l;
    }
    set_predicate(t, 0, combine(t->i->logic, p, with));
    set_predicate(t, 1, combine(t->i->logic, ~p, with));
    return 1;
}

static u32 lesser_float(u32 a, u32 b, int least)
{
    float x = as_float(a), y = as_float(b);
    if (x != x)
        return only_nan(b);
    if (y != y)
        return a;
    int less = x < y || (x == y && a >> 31 > b >> 31);
    return less == least ? a : b;
}

// Whether a / b needs more than an approximate 1 / b and its refinement.
static u32 hard_to_divide(u32 a, u32 b)
{
    int x = a >> 23 & 255, y = b >> 23 & 255;
    return x < 24 || x == 255 || y == 0 || y >= 253 || x - y > 125 || x - y < -125;
}

static u32 to_integer(const Instruction* i, u32 x)
{
    double value = to_whole(as_float(x), i->round);
    double least = i->is_unsigned ? 0.0 : -2147483648.0, most = i->is_unsigned ? 4294967295.0 : 2147483647.0;
    if (value != value)
        return 0; // as all conversions here have .NTZ
    value = value < least ? least : value > most ? most : value;
    return i->is_unsigned ? (u32)value : (u32)(i32)value;
}

static int to_floats(Step* t)
{
    u32 a[32], o[32];
    READ(integers, 0, a);
    int shift = t->i->size ? 32 - 8 * t->i->size : 0; // the lower bytes alone
    ALL a[l] = t->i->is_unsigned ? a[l] << shift >> shift : (u32)((i32)(a[l] << shift) >> shift);
    round_by(t->i->round);
    ALL {
        volatile double exact = t->i->is_unsigned ? (double)a[l] : (double)(i32)a[l];
        volatile float value = (float)exact;
        o[l] = t->i->form ? to_half(exact) : as_bits(value);
    }
    round_by(0);
    return set(t, o);
}

static int add_halves(Step* t) // HADD2, HFMA2
{
    const Source* s = t->i->source;
    int fused = t->i->op == OP_HFMA2;
    u32 a[32], b[32], c[32] = {0}, o[32];
    READ(bits, 0, a);
    READ(bits, 1, b);
    if (fused)
        READ(bits, 2, c);
    ALL {
        double sum[2];
        for (int k = 0; k < 2; k++) {
            double x = half_of(&s[0], a[l], k), y = half_of(&s[1], b[l], k);
            sum[k] = fused ? x * y + half_of(&s[2], c[l], k) : x + y;
        }
        o[l] = t->i->size == 4 ? as_bits((float)sum[0]) : (u32)to_half(sum[1]) << 16 | to_half(sum[0]);
    }
    return set(t, o);
}

// D = A B + C, A 16 x 16 and B 16 x 8 of float16, C and D 16 x 8 of float32.
static int multiply_matrices(Step* t)
{
    if (t->mask != ~0u)
        return fail(t, "HMMA without all lanes");
    static _Thread_local float a[16][16], b[16][8], c[16][8];
    const Instruction* i = t->i;
    u32 x[4][32], y[2][32], z[4][32];
    for (int n = 0; n < 4; n++)
        if (word(t, 0, n, x[n]) || word(t, 2, n, z[n]) || (n < 2 && word(t, 1, n, y[n])))
            return fail(t, "HMMA of no registers");
    ALL for (int k = 0; k < 2; k++) {
        int row = l / 4, column = 2 * (l % 4) + k;
        for (int n = 0; n < 4; n++)
            a[row + 8 * (n & 1)][column + 8 * (n >> 1)] = (float)from_half(x[n][l] >> 16 * k);
        for (int n = 0; n < 2; n++) {
            b[column + 8 * n][row] = (float)from_half(y[n][l] >> 16 * k);
            c[row + 8 * n][column] = as_float(z[2 * n + k][l]);
        }
    }
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            double sum = c[m][n];
            for (int k = 0; k < 16; k++)
                sum += (double)a[m][k] * b[k][n];
            c[m][n] = (float)sum;
        }
    ALL for (int n = 0; n < 4; n++)
        t->warp->R[i->destination + n][l] = as_bits(c[l / 4 + 8 * (n >> 1)][2 * (l % 4) + (n & 1)]);
    return 1;
}

// Where an element of a matrix in shared memory is: row r of A or column r of B, and k along the sum.
static u32 place_of(u64 descriptor, int transposed, int r, int k)
{
    u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    u32 stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
    u32 row = 16 << (mode ? 4 - mode : 0), half = row / 2; // bytes and elements of the rows of an atom
    u32 x = start;
    if (transposed)
        x += r / half * leading + k / 8 * stride + k % 8 * row + r % half * 2;
    else if (mode)
        x += r / 8 * stride + r % 8 * row + k * 2;
    else
        x += r / 8 * stride + k / 8 * leading + r % 8 * 16 + k % 8 * 2;
    return mode ? x ^ ((x >> 7 & (row / 16 - 1)) << 4) : x;
}

// D = A B + C of four warps, of which each has 16 rows of A: A 64 x 16, in registers or shared memory, and B 16 x N.
static int multiply_shared_matrices(Step* t)
{
    if (t->mask != ~0u)
        return fail(t, "HGMMA without all lanes");
    static _Thread_local float a[16][16], b[16];
    const Instruction* i = t->i;
    const u32* UR = t->warp->UR;
    int in_registers = i->source[1].kind == REGISTER, from = i->source[in_registers].index;
    const Block* block = t->block;
    if (i->source[1 + in_registers].kind && !predicate(t, 1 + in_registers))
        from = RZ;
    // A's descriptor comes before that of B, where A is in shared memory.
    u64 descriptor[2] = {UR[i->ureg] | (u64)UR[i->ureg + 1] << 32, UR[i->ureg + 2] | (u64)UR[i->ureg + 3] << 32};
    u64 second = descriptor[1];
    if (t->record)
        t->record->wavefronts = (int16_t)((in_registers ? 0 : 4) + i->size / 16); // a quarter of what four warps read
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++) {
            u16 half;
            u32 x = place_of(descriptor[0], i->high, t->warp->id % 4 * 16 + m, k);
            if (in_registers) {
                int lane = m % 8 * 4 + k % 8 / 2;
                half = (u16)(t->warp->R[i->source[0].index + m / 8 + 2 * (k / 8)][lane] >> 16 * (k & 1));
            } else if (x + 2 > (u32)block->shared_bytes)
                return fail(t, "no shared memory at 0x%x for A", x);
            else
                memcpy(&half, block->shared + x, 2);
            a[m][k] = (float)from_half(half);
        }
    for (int n = 0; n < i->size; n++) {
        for (int k = 0; k < 16; k++) {
            u16 half;
            u32 x = place_of(second, i->extended, n, k);
            if (x + 2 > (u32)block->shared_bytes)
                return fail(t, "no shared memory at 0x%x for B", x);
            memcpy(&half, block->shared + x, 2);
            b[k] = (float)from_half(half);
        }
        for (int m = 0; m < 16; m++) {
            int place = n / 8 * 4 + m / 8 * 2 + n % 2, lane = m % 8 * 4 + n % 8 / 2;
            double sum = from == RZ ? 0.0 : as_float(t->warp->R[from + place][lane]);
            for (int k = 0; k < 16; k++)
                sum += (double)a[m][k] * b[k];
            t->warp->R[i->destination + place][lane] = as_bits((float)sum);
        }
    }
    return 1;
}

static int floating_step(Step* t)
{
    const Instruction* i = t->i;
    u32 a[32], b[32], o[32], p = 0;
    switch (i->op) {
    case OP_FADD:
    case OP_FMUL:
    case OP_FFMA: return arithmetic(t);
    case OP_FSETP: return compare_floats(t);
    case OP_I2F: return to_floats(t);
    case OP_HADD2:
    case OP_HFMA2: return add_halves(t);
    case OP_HMMA: return multiply_matrices(t);
    case OP_HGMMA: return multiply_shared_matrices(t);
    case OP_FSEL:
        READ(floats, 0, a);
        READ(floats, 1, b);
        p = predicate(t, 2);
        ALL o[l] = p >> l & 1 ? a[l] : b[l];
        return set(t, o);
    case OP_FMNMX:
        READ(floats, 0, a);
        READ(floats, 1, b);
        p = predicate(t, 2);
        ALL o[l] = lesser_float(a[l], b[l], p >> l & 1);
        return set(t, o);
    case OP_FCHK:
        READ(floats, 0, a);
        READ(floats, 1, b);
        ALL p |= hard_to_divide(a[l], b[l]) << l;
        set_predicate(t, 0, p);
        return 1;
    case OP_MUFU:
        READ(floats, 0, a);
        ALL o[l] = only_nan(flush(as_bits((float)special_function(i->form, as_float(flush(a[l]))))));
        return set(t, o);
    case OP_FRND:
        READ(floats, 0, a);
        ALL o[l] = as_bits((float)to_whole(as_float(a[l]), i->round));
        return set(t, o);
    case OP_F2I:
        READ(floats, 0, a);
        ALL o[l] = to_integer(i, a[l]);
        return set(t, o);
    case OP_F2FP: {
        enum { HALF, BFLOAT };
        READ(floats, 0, a);
        READ(floats, 1, b);
        ALL {
            u16 high = i->form == HALF ? to_half(as_float(a[l])) : to_bfloat(a[l]);
            o[l] = (u32)high << 16 | (i->form == HALF ? to_half(as_float(b[l])) : to_bfloat(b[l]));
        }
        return set(t, o);
    }
    default: return 0;
    }
}
