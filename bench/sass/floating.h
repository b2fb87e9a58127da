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
    round_by(t->i->round);
    ALL {
        volatile double exact = t->i->is_unsigned ? (double)a[l] : (double)(i32)a[l];
        volatile float value = (float)exact;
        o[l] = as_bits(value);
    }
    round_by(0);
    return set(t, o);
}

static int add_halves(Step* t)
{
    u32 a[32], b[32], o[32];
    READ(bits, 0, a);
    READ(bits, 1, b);
    ALL {
        double sum[2];
        for (int k = 0; k < 2; k++)
            sum[k] = half_of(&t->i->source[0], a[l], k) + half_of(&t->i->source[1], b[l], k);
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
    case OP_HADD2: return add_halves(t);
    case OP_HMMA: return multiply_matrices(t);
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
