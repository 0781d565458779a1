// Attention in C++, written by frisket for
//
//     causal & window(w)
//
// Head size 64, float32; tiles of 64 keys by as many queries as the call says.

#include <stddef.h>
#include <stdint.h>

#define REAL_BYTES 4
#define INT_BYTES 4
#define HALF 0  // 0: entries are Real, 1: bfloat16, 2: float16
typedef float Real;  // scores, weights, sums
typedef int32_t Int;
#define EIGHT 0  // entries of k and v are 0: as those of q, 1: int8, 2: float8_e4m3fn, 3: float8_e5m2
typedef float Entry;  // of q and out
typedef Entry Stored;  // of k and v

const int BLOCK_Q = 96;
const int BLOCK_K = 64;
const int HEAD_DIM = 64;
const int V_DIM = 64;
const int PAGE = 0;
const bool SCORED = false;
const bool DROPPED = false;
const bool SCALED = false;
const bool BY_HEAD = false;  // heads differ
const bool MOVED = false;  // rows are in the order of tables
// Tiles without a predicate look at positions too.
const bool POSITIONS = SCORED || DROPPED || SCALED;
union Slot { int64_t i; double f; };  // Int and Bool parameters in i, Float ones in f
struct Array { void *data; int64_t batch, head, row; };  // strides in entries; a row's entries are neighbours
typedef void (*Work)(void *task, int64_t worker);
typedef void (*Parallel)(void *pool, Work work, void *task, int64_t workers);  // worker 0 always runs, others may
struct Call {
    int64_t threads;         // how many workers may run at once, at least 1
    Parallel parallel;       // runs work(task, worker) on up to `threads` workers; null: one worker
    void *pool;              // first argument of parallel
    int64_t batch;           // lengths of this call, in tokens
    int64_t heads;
    int64_t kv_heads;        // query head h reads key head h / (heads / kv_heads)
    int64_t q_len;
    int64_t kv_len;
    double scale;
    int64_t size_b;          // B, H, Q_LEN, KV_LEN of the whole problem
    int64_t size_h;
    int64_t size_q;
    int64_t size_k;
    int64_t b_origin;        // where the call begins in the whole problem
    int64_t h_origin;
    const int64_t *q_origin; // one, or one for each batch entry
    const int64_t *k_origin;
    int64_t q_origin_step;   // 0: the same for all batch entries; 1: one each
    int64_t k_origin_step;
    const Slot *slots;       // run-time numbers: the plan's, then literals
    const int64_t *tables;   // for each table its data, sizes and strides, in the plan's order
    const int32_t *spans;    // [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    const int32_t *count;    // [slices, rows]: records in use
    const int32_t *slice_of; // [batch, heads]
    int64_t rows;            // rows of tiles: ceil(q_len / block_q)
    int64_t records;
    int64_t block_q;         // queries of a tile, at most BLOCK_Q
    const int32_t *q_rows;   // of MOVED kernels: the row of q and the results that has each query
    const int32_t *k_rows;   // and that of k and v for each key, the last one again behind the last
    const Real *sinks;       // [heads], a logit beside every row's keys that has no value; or null
    Real *lse;               // [batch, heads, q_len], natural log; written forward, where not null, read backward
    Real *top;               // [batch, heads, q_len], the largest visible score of each row, or null
    Real *norm;              // [batch, heads, q_len, 2], what a backward takes off scores and its factor; or null
    int64_t pages;           // of the pool that keys and values are in, where they are in one
    Array q;                 // [batch, heads, q_len, HEAD_DIM]
    Array k;                 // [batch, kv_heads, kv_len, HEAD_DIM], in a pool [pages, kv_heads, PAGE, HEAD_DIM]
    Array v;                 // [batch, kv_heads, kv_len, V_DIM], likewise
    Array out;               // [batch, heads, q_len, V_DIM]; written forward, read backward
    Array dout;              // the cotangent of out
    Array dq;
    Array dk;
    Array dv;
    const Real *dlse;        // the cotangent of lse, contiguous, or null
    Real *const *gradients;  // a zeroed buffer for each of the plan's captured gradients, or null
};
const double SHORT = 4194304;

namespace {

// -- vectors: LANES numbers at once, in the compiler's vector extensions -----------------------------------------
//
// Declared before: Real (float or double, REAL_BYTES of them), Int (int32_t or int64_t, INT_BYTES).
// A register holds LANES Reals; Ints, Bits and Words have as many lanes, whatever their width.

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between functions of this file only

#if defined(FRISKET_SCALAR)
#define REGISTER_BYTES REAL_BYTES
#elif defined(__AVX512F__)
#define REGISTER_BYTES 64
#elif defined(__AVX2__)
#define REGISTER_BYTES 32
#else  // NEON, SSE2, and what compilers write out number by number
#define REGISTER_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#define LANES (REGISTER_BYTES / REAL_BYTES)
#define INLINE static inline __attribute__((always_inline))
// Loops over lanes: slow to compile where they are unrolled in many places.
#define APART static __attribute__((noinline, unused))
// For a loop over sums that registers hold. g++ unrolls other loops after it has given the sums a place in memory, and
// then writes them there at every step.
#define UNROLLED _Pragma("GCC unroll 16")

#if REAL_BYTES == 4
typedef int32_t Lane;
typedef uint32_t Unsigned;
#else
typedef int64_t Lane;
typedef uint64_t Unsigned;
#endif
typedef Real Vec __attribute__((vector_size(REGISTER_BYTES)));
typedef Lane Bits __attribute__((vector_size(REGISTER_BYTES)));  // 0: false, -1: true
typedef Unsigned Raw __attribute__((vector_size(REGISTER_BYTES)));
typedef Int Ints __attribute__((vector_size(LANES * INT_BYTES)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Narrow __attribute__((vector_size(LANES * 4)));
typedef uint32_t Word;

const Real INF = (Real)__builtin_inf();
const Real NOT_A_NUMBER = (Real)__builtin_nan("");
const Real LOWEST = REAL_BYTES == 4 ? (Real)-3.4028234663852886e38 : (Real)-1.7976931348623157e308;
const Real LOG2E = (Real)1.4426950408889634, LN2 = (Real)0.6931471805599453;

INLINE Vec reals(Real x) { return x - Vec{}; }
INLINE Ints ints(Int x) { return x + Ints{}; }
INLINE Bits bits(bool x) { return -(Lane)x - Bits{}; }
INLINE Words words(Word x) { return x + Words{}; }
#if defined(__AVX512F__)
#define REGISTER "+v"
#elif defined(__x86_64__)
#define REGISTER "+x"
#elif defined(__aarch64__)
#define REGISTER "+w"
#else
#define REGISTER "+m"
#endif
// x, opaque to the compiler: it fuses no operation before with one behind, as it would a product and a sum, or a sum
// that begins at 0.
INLINE Vec settled(Vec x) {
#if LANES > 1
    asm("" : REGISTER(x));
    return x;
#else
    Real number = x[0];
    asm("" : REGISTER(number));
    return reals(number);
#endif
}

template <class To, class From> INLINE To cast(From x) { return __builtin_convertvector(x, To); }

template <class T> INLINE T load(const void *p) {
    T x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
template <class T> INLINE void store(void *p, T x) { __builtin_memcpy(p, &x, sizeof x); }

INLINE Ints counting() {
    Ints x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

// The bits of a comparison, as wide as Reals.
#if REAL_BYTES == INT_BYTES
INLINE Bits flags(Bits x) { return x; }
#else
INLINE Bits flags(Bits x) { return x; }
INLINE Bits flags(Ints x) { return cast<Bits>(x); }
#endif

// c ? x : y; of scalars both are computed.
template <class T> INLINE T select(bool c, T x, T y) { return c ? x : y; }
INLINE Vec select(Bits c, Vec x, Vec y) { return c ? x : y; }
#if REAL_BYTES == INT_BYTES
INLINE Ints select(Bits c, Ints x, Ints y) { return c ? x : y; }
#else
INLINE Ints select(Bits c, Ints x, Ints y) { return cast<Ints>(c) ? x : y; }
INLINE Bits select(Bits c, Bits x, Bits y) { return c ? x : y; }
#endif

// Lane i of the result is lane i ^ N: what reductions and reversals need.
#if LANES == 16
#define EACH_LANE(f, n) f(0, n), f(1, n), f(2, n), f(3, n), f(4, n), f(5, n), f(6, n), f(7, n), \
                        f(8, n), f(9, n), f(10, n), f(11, n), f(12, n), f(13, n), f(14, n), f(15, n)
#elif LANES == 8
#define EACH_LANE(f, n) f(0, n), f(1, n), f(2, n), f(3, n), f(4, n), f(5, n), f(6, n), f(7, n)
#elif LANES == 4
#define EACH_LANE(f, n) f(0, n), f(1, n), f(2, n), f(3, n)
#elif LANES == 2
#define EACH_LANE(f, n) f(0, n), f(1, n)
#else
#define EACH_LANE(f, n) f(0, n)
#endif
#define SWAPPED(i, n) ((i) ^ (n))
#define FROM_LEFT(i, n) (((i) & (n)) ? LANES + (i) - (n) : (i))
#define FROM_RIGHT(i, n) (((i) & (n)) ? LANES + (i) : (i) + (n))
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, f, n) __builtin_shufflevector(x, y, EACH_LANE(f, n))
#else
#define SHUFFLE(x, y, f, n) __builtin_shuffle(x, y, (Bits){EACH_LANE(f, n)})
#endif

INLINE Vec larger(Vec x, Vec y) { return x > y ? x : y; }  // a NaN of x is dropped, one of y is kept
INLINE Real largest(Vec x) {
#if LANES > 1
    x = larger(x, SHUFFLE(x, x, SWAPPED, 1));
#endif
#if LANES > 2
    x = larger(x, SHUFFLE(x, x, SWAPPED, 2));
#endif
#if LANES > 4
    x = larger(x, SHUFFLE(x, x, SWAPPED, 4));
#endif
#if LANES > 8
    x = larger(x, SHUFFLE(x, x, SWAPPED, 8));
#endif
    return x[0];
}
INLINE Real sum(Vec x) {
    Real total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

// Whether some lane is true.
INLINE bool any(Bits x) {
#if REGISTER_BYTES == 64 && REAL_BYTES == 4 && !defined(__clang__)  // which has no such builtin
    return __builtin_ia32_ptestmd512(x, x, -1);
#else
    Lane found = 0;
    for (int i = 0; i < LANES; i++) found |= x[i];
    return found != 0;
#endif
}

// A bit for each lane that is true.
INLINE uint32_t truths(Bits x) {
#if REGISTER_BYTES == 64 && REAL_BYTES == 4 && !defined(__clang__)
    return __builtin_ia32_ptestmd512(x, x, -1);
#else
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= (uint32_t)(x[i] & 1) << i;
    return found;
#endif
}

// A LANES x LANES square, turned: for each power of two, swap the blocks beside the diagonal.
#if LANES > 1
template <int STEP> INLINE void turn(Vec *x) {
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        Vec left = x[i], right = x[i + STEP];
        x[i] = SHUFFLE(left, right, FROM_LEFT, STEP);
        x[i + STEP] = SHUFFLE(left, right, FROM_RIGHT, STEP);
    }
}
#endif
INLINE void transpose(Vec *x) {
#if LANES > 1
    turn<1>(x);
#endif
#if LANES > 2
    turn<2>(x);
#endif
#if LANES > 4
    turn<4>(x);
#endif
#if LANES > 8
    turn<8>(x);
#endif
}

// -- functions of scores: of vectors, and through them of single numbers -----------------------------------------

// 2^n for whole n in [-127, 128] (float): n is added to the exponent field of a number that is rounded on the way.
#if REAL_BYTES == 4
const int MANTISSA = 23;
const Real ROUNDER = 12582912.0f, BIAS = 127.0f, NEGLIGIBLE = 90.0f;  // 1.5 * 2^23
#else
const int MANTISSA = 52;
const Real ROUNDER = 6755399441055744.0, BIAS = 1023.0, NEGLIGIBLE = 900.0;  // 1.5 * 2^52
#endif

// 2^f - 1 for |f| <= 1/2, relative error 5e-9 of 2^f (float), 2e-17 (double). Coefficients fitted for this file.
INLINE Vec power_less_one(Vec f) {
#if REAL_BYTES == 4
    Vec p = 1.54035082e-4f * f + 1.33907355e-3f;
    p = p * f + 9.61823751e-3f;
    p = p * f + 5.55035743e-2f;
    p = p * f + 2.40226498e-1f;
    p = p * f + 6.93147188e-1f;
#else
    Vec p = 4.4549605981865186e-10 * f + 7.072585949269223e-09;
    p = p * f + 1.0178062445845774e-07;
    p = p * f + 1.321544258792169e-06;
    p = p * f + 1.525273382983612e-05;
    p = p * f + 0.0001540353044173605;
    p = p * f + 0.0013333558146416936;
    p = p * f + 0.009618129107606888;
    p = p * f + 0.0555041086648216;
    p = p * f + 0.24022650695910097;
    p = p * f + 0.6931471805599453;
#endif
    return p * f;
}

// 2^x for x <= 0, the weights of the softmax: 0 below 2^-126, NaN for NaN. Adding ROUNDER leaves round(x) in the
// low bits, which become the exponent of a factor; -ffast-math would cancel the addition. `least`: 0 below 2^-least.
INLINE Vec weight(Vec x, Real least = BIAS) {
    x = x < -least ? reals(-BIAS) : x;
    Vec shifted = x + (ROUNDER + BIAS);
    Vec f = x - (shifted - (ROUNDER + BIAS));
    Vec scale = (Vec)((Raw)shifted << MANTISSA);
    return power_less_one(f) * scale + scale;
}
INLINE Real weight(Real x) { return weight(reals(x))[0]; }

// `name` of every lane by the C library.
#define BY_LANES(name, float_name, double_name)                                                        \
    INLINE Real name(Real x) { return REAL_BYTES == 4 ? float_name((float)x) : double_name((double)x); } \
    APART Vec name(Vec x) {                                                                             \
        for (int i = 0; i < LANES; i++) x[i] = name(x[i]);                                              \
        return x;                                                                                       \
    }
BY_LANES(sin, __builtin_sinf, __builtin_sin)
BY_LANES(cos, __builtin_cosf, __builtin_cos)
BY_LANES(tan, __builtin_tanf, __builtin_tan)
BY_LANES(sqrt, __builtin_sqrtf, __builtin_sqrt)
BY_LANES(floor, __builtin_floorf, __builtin_floor)

#if REAL_BYTES == 4
// e^x = 2^n e^r with n whole: ln 2 in two parts keeps r exact. Error 2 ulp; 0 below 2^-125, inf above 2^128.
INLINE Vec exp(Vec x) {
    x = x > 89.5f ? reals(89.5f) : x < -87.3f ? reals(-87.3f) : x;
    Vec shifted = x * LOG2E + (ROUNDER + 126.0f);
    Vec n = shifted - (ROUNDER + 126.0f);
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = power_less_one(r * LOG2E);
    Vec scale = (Vec)((Raw)shifted << MANTISSA);
    return (p + 1.0f) * scale * 2.0f;  // p * scale + scale is NaN where scale is inf
}
INLINE Vec exp2(Vec x) {
    x = x > 129.0f ? reals(129.0f) : x < -126.0f ? reals(-126.0f) : x;
    Vec shifted = x + (ROUNDER + 126.0f);
    Vec f = x - (shifted - (ROUNDER + 126.0f));
    Vec scale = (Vec)((Raw)shifted << MANTISSA);
    return (power_less_one(f) + 1.0f) * scale * 2.0f;
}
// tanh x = -e / (e + 2) with e = e^(-2|x|) - 1, which does not cancel near 0. Error 3 ulp.
INLINE Vec tanh(Vec x) {
    Vec size = x < 0 ? -x : x;
    Vec y = size > 20.0f ? reals(-57.7078f) : size * (-2 * LOG2E);
    Vec shifted = y + (ROUNDER + BIAS);
    Vec f = y - (shifted - (ROUNDER + BIAS));
    Vec scale = (Vec)((Raw)shifted << MANTISSA);
    Vec e = power_less_one(f) * scale + (scale - 1.0f);
    Vec t = e / (e + 2.0f);
    return x < 0 ? t : -t;
}
// x = 2^exponent m with m between sqrt(1/2) and sqrt(2); log m = 2 atanh s, s = (m - 1) / (m + 1), by its series.
INLINE Vec log_of_mantissa(Vec x, Vec &exponent) {
    const Bits small = x < 1.17549435e-38f;  // subnormal
    x = small ? x * 8388608.0f : x;
    const Bits e = (Bits)((Raw)x - 0x3F3504F3) >> 23;
    exponent = cast<Vec>(e) - (small ? reals(23) : Vec{});
    const Vec m = (Vec)((Raw)x - ((Raw)e << 23)), s = (m - 1.0f) / (m + 1.0f), z = s * s;
    return 2.0f * s + 2.0f * s * z * (((z * 0.111111111f + 0.142857143f) * z + 0.2f) * z + 0.333333333f);
}
INLINE Vec of_positive(Vec x, Vec log) {
    return x > 0 ? (x < INF ? log : x) : x == 0 ? reals(-INF) : reals(NOT_A_NUMBER);
}
// Errors 2 ulp; of log2 and log1p 3.
INLINE Vec log(Vec x) {
    Vec exponent, rest = log_of_mantissa(x, exponent);
    return of_positive(x, exponent * 0.693359375f + (rest - exponent * 2.12194440e-4f));
}
INLINE Vec log2(Vec x) {
    Vec exponent, rest = log_of_mantissa(x, exponent);
    return of_positive(x, exponent + rest * LOG2E);
}
INLINE Vec log1p(Vec x) {  // what 1 + x rounds away comes back as a derivative
    const Vec y = 1.0f + x, lost = (x - (y - 1.0f)) / y;
    return log(y) + ((lost < INF) & (lost > -INF) ? lost : Vec{});
}
// A polynomial in x^2 up to 1, from there on 1 - 2^-p(x). Coefficients fitted for this file; error 3 ulp.
INLINE Vec erf(Vec x) {
    const Vec size = x < 0 ? -x : x, z = size * size, y = size > 4.0f ? reals(4) : size;
    Vec near = 7.85385768e-5f * z - 8.01019251e-4f;
    near = near * z + 5.18832756e-3f;
    near = near * z - 2.68538119e-2f;
    near = near * z + 1.12835851e-1f;
    near = near * z - 3.76126258e-1f;
    near = near * z + 1.12837917f;
    Vec far = -2.31153007e-6f * y + 6.54249161e-5f;
    far = far * y - 8.52150240e-4f;
    far = far * y + 6.82399134e-3f;
    far = far * y - 3.79930319e-2f;
    far = far * y + 1.58586359e-1f;
    far = far * y + 9.11779050e-1f;
    far = far * y + 1.63043347f;
    far = 1.0f - weight(4.24098578e-4f - far * y);
    return size < 1.0f ? near * x : x < 0 ? -far : x > 0 ? far : x;
}
INLINE Real exp(Real x) { return exp(reals(x))[0]; }
INLINE Real exp2(Real x) { return exp2(reals(x))[0]; }
INLINE Real tanh(Real x) { return tanh(reals(x))[0]; }
INLINE Real log(Real x) { return log(reals(x))[0]; }
INLINE Real log2(Real x) { return log2(reals(x))[0]; }
INLINE Real log1p(Real x) { return log1p(reals(x))[0]; }
INLINE Real erf(Real x) { return erf(reals(x))[0]; }
#else
BY_LANES(log, __builtin_logf, __builtin_log)
BY_LANES(log2, __builtin_log2f, __builtin_log2)
BY_LANES(log1p, __builtin_log1pf, __builtin_log1p)
BY_LANES(erf, __builtin_erff, __builtin_erf)
BY_LANES(exp, __builtin_expf, __builtin_exp)
BY_LANES(exp2, __builtin_exp2f, __builtin_exp2)
BY_LANES(tanh, __builtin_tanhf, __builtin_tanh)
#endif
template <class T> INLINE T sigmoid(T x) { return 1 / (1 + exp(-x)); }
template <class T> INLINE T rsqrt(T x) { return 1 / sqrt(x); }

INLINE Real power(Real x, Real y) { return REAL_BYTES == 4 ? __builtin_powf(x, y) : __builtin_pow(x, y); }
APART Vec power(Vec x, Vec y) {
    for (int i = 0; i < LANES; i++) x[i] = power(x[i], y[i]);
    return x;
}

INLINE bool finite(Real x) { return __builtin_isfinite(x); }
INLINE Bits finite(Vec x) { return (x < INF) & (x > -INF); }
INLINE Real magnitude(Real x) { return REAL_BYTES == 4 ? __builtin_fabsf(x) : __builtin_fabs(x); }
INLINE Vec magnitude(Vec x) { return (Vec)((Raw)x << 1 >> 1); }
INLINE Int magnitude(Int x) { return x < 0 ? -x : x; }
INLINE Ints magnitude(Ints x) { return x < 0 ? -x : x; }
INLINE Real sign(Real x) { return x > 0 ? (Real)1 : x < 0 ? (Real)-1 : x; }
INLINE Vec sign(Vec x) { return x > 0 ? reals(1) : x < 0 ? reals(-1) : x; }
INLINE Int sign(Int x) { return (x > 0) - (x < 0); }
INLINE Ints sign(Ints x) { return x > 0 ? ints(1) : x < 0 ? ints(-1) : ints(0); }
// NaN stays NaN.
INLINE Real minimum(Real x, Real y) { return x <= y || x != x ? x : y; }
INLINE Real maximum(Real x, Real y) { return x >= y || x != x ? x : y; }
INLINE Vec minimum(Vec x, Vec y) { return (x <= y) | (x != x) ? x : y; }
INLINE Vec maximum(Vec x, Vec y) { return (x >= y) | (x != x) ? x : y; }
INLINE Int minimum(Int x, Int y) { return x < y ? x : y; }
INLINE Int maximum(Int x, Int y) { return x > y ? x : y; }
INLINE Ints minimum(Ints x, Ints y) { return x < y ? x : y; }
INLINE Ints maximum(Ints x, Ints y) { return x > y ? x : y; }

// -- whole numbers ------------------------------------------------------------------------------------------------

// `//` and `%` round to minus infinity and give 0 for a divisor of 0.
INLINE Int floordiv(Int x, Int y) {
    if (y == 0) return 0;
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
}
INLINE Int modulo(Int x, Int y) {
    if (y == 0) return 0;
    Int rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
APART Ints floordiv(Ints x, Ints y) {
#if INT_BYTES == 4
    // 64-bit quotients of 32-bit numbers are never rounded past a whole number.
    typedef double Doubles __attribute__((vector_size(LANES * 8)));
    Doubles quotient = cast<Doubles>(x) / cast<Doubles>(y == 0 ? ints(1) : y);
    Ints whole = cast<Ints>(quotient);
    whole += cast<Ints>(cast<Doubles>(whole) > quotient);
    return y == 0 ? Ints{} : whole;
#else
    for (int i = 0; i < LANES; i++) x[i] = floordiv((Int)x[i], (Int)y[i]);
    return x;
#endif
}
INLINE Ints modulo(Ints x, Ints y) { return y == 0 ? Ints{} : x - floordiv(x, y) * y; }

INLINE int64_t between(int64_t least, int64_t x, int64_t most) { return x < least ? least : x < most ? x : most; }

// Shifts by 64 and more, or by less than 0, give 0; `>>` by the width of Int and more leaves the sign.
const Int WIDTH = 8 * INT_BYTES;
INLINE Int shift_left(Int x, Int n) { return n < 0 || n >= WIDTH ? 0 : (Int)((uint64_t)x << n); }
INLINE Int shift_right(Int x, Int n) { return n < 0 || n >= 64 ? 0 : x >> (n < WIDTH ? n : WIDTH - 1); }
INLINE Ints shift_left(Ints x, Ints n) { return (n < 0) | (n >= WIDTH) ? Ints{} : x << (n & (WIDTH - 1)); }
INLINE Ints shift_right(Ints x, Ints n) {
    return (n < 0) | (n >= 64) ? Ints{} : x >> minimum(maximum(n, Ints{}), ints(WIDTH - 1));
}

INLINE Int power(Int x, Int n) {
    Int y = 1;
    for (; n > 0; n--) y *= x;
    return y;
}
APART Ints power(Ints x, Ints n) {
    for (int i = 0; i < LANES; i++) x[i] = power((Int)x[i], (Int)n[i]);
    return x;
}

// Towards zero; NaN is 0, and what does not fit becomes the largest that does.
const Real LARGEST = (Real)(INT_BYTES == 8 ? 4611686018427387904.0 : REAL_BYTES == 4 ? 2147483520.0 : 2147483647.0);
INLINE Int to_int(bool x) { return x; }
INLINE Int to_int(Real x) { return x != x ? 0 : x > LARGEST ? (Int)LARGEST : x < -LARGEST ? -(Int)LARGEST : (Int)x; }
INLINE Ints to_int(Vec x) {
    x = x != x ? Vec{} : x > LARGEST ? reals(LARGEST) : x < -LARGEST ? reals(-LARGEST) : x;
    return cast<Ints>(x);
}
INLINE Ints to_int(Bits x) { return -cast<Ints>(x); }
INLINE Real to_real(Int x) { return (Real)x; }
INLINE Vec to_real(Ints x) { return cast<Vec>(x); }

// -- random numbers: dsl/evaluate.py, uniform ---------------------------------------------------------------------

// A. Appleby, MurmurHash3 finaliser.
template <class T> INLINE T mixed(T x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}
INLINE Word low(Int x) { return (Word)x; }
INLINE Words low(Ints x) { return cast<Words>(x); }
template <class T> INLINE auto seeded(T seed) { return mixed(low(seed) + 0x9E3779B9u); }
INLINE Word stirred(Word x, Int counter) { return mixed(x ^ (low(counter) * 0x9E3779B1u)); }
INLINE Words stirred(Words x, Ints counter) { return mixed(x ^ (low(counter) * 0x9E3779B1u)); }
INLINE Real uniform(Word x) { return (Real)(int32_t)(x >> 8) * (Real)5.9604644775390625e-08; }
INLINE Vec uniform(Words x) { return cast<Vec>((Narrow)(x >> 8)) * (Real)5.9604644775390625e-08; }

// -- tables: an index out of range is clamped ----------------------------------------------------------------------

template <class T, int RANK> struct Table {
    const T *data;
    int64_t size[RANK], stride[RANK];
    inline __attribute__((always_inline)) int64_t step(int axis, int64_t i) const {
        return (i < 0 ? 0 : i < size[axis] ? i : size[axis] - 1) * stride[axis];
    }
};

// Its words in the call: data, sizes, strides.
template <class T, int RANK> INLINE const int64_t *read(Table<T, RANK> &table, const int64_t *words) {
    table.data = (const T *)words[0];
    for (int i = 0; i < RANK; i++) table.size[i] = words[1 + i], table.stride[i] = words[1 + RANK + i];
    return words + 1 + 2 * RANK;
}

INLINE bool entry(uint8_t x) { return x != 0; }
INLINE Int entry(int32_t x) { return x; }
INLINE Int entry(int64_t x) { return (Int)x; }
INLINE Real entry(Real x) { return x; }
template <class T> struct Wide { typedef Vec Type; };
template <> struct Wide<bool> { typedef Bits Type; };
template <> struct Wide<Int> { typedef Ints Type; };
INLINE void put(Vec &x, int i, Real y) { x[i] = y; }
INLINE void put(Ints &x, int i, Int y) { x[i] = y; }
INLINE void put(Bits &x, int i, bool y) { x[i] = -(Lane)y; }

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
INLINE Vec widened(Vec x) { return x; }
INLINE Ints widened(Ints x) { return x; }
INLINE Bits widened(Bytes x) { return cast<Bits>(x) != 0; }

// T[i, ...] at single indices.
template <class T, int RANK, class... I> INLINE auto at(const Table<T, RANK> &table, I... index) {
    int axis = 0;
    int64_t where = 0;
    ((where += table.step(axis++, (int64_t)index)), ...);
    return entry(table.data[where]);
}

// The same at a vector of indices along each axis.
template <class T, int RANK, class... I> APART auto gather(const Table<T, RANK> &table, I... index) {
    typename Wide<decltype(entry(T()))>::Type found;
    if ((any(flags(index != index[0])) || ...)) {
        for (int i = 0; i < LANES; i++) put(found, i, at(table, (Int)index[i]...));
    } else {  // one entry, as where keys are read by blocks
        const auto one = at(table, (Int)index[0]...);
        for (int i = 0; i < LANES; i++) put(found, i, one);
    }
    return found;
}

// LANES entries along an axis, some of whose indices are outside.
template <int AXIS, class T, int RANK>
APART auto clamped(const Table<T, RANK> &table, const T *row, int64_t first, int64_t step) {
    typename Wide<decltype(entry(T()))>::Type found;
    for (int i = 0; i < LANES; i++) put(found, i, entry(row[table.step(AXIS, first + i * step)]));
    return found;
}

// The same of entries that are inside, and apart.
template <class T> INLINE auto apart(const T *from, int64_t stride) {
    typename Wide<decltype(entry(T()))>::Type found;
    for (int i = 0; i < LANES; i++) put(found, i, entry(from[i * stride]));
    return found;
}

// The same at LANES neighbours along one axis, whose first index is given: upwards, or downwards.
template <bool UP, int AXIS, class T, int RANK, class... I>
INLINE auto neighbours(const Table<T, RANK> &table, I... index) {
    typedef T Entries __attribute__((vector_size(LANES * sizeof(T))));
    const int64_t place[] = {(int64_t)index...}, stride = table.stride[AXIS];
    const int64_t first = place[AXIS], least = UP ? first : first - (LANES - 1);
    const T *row = table.data;
    for (int i = 0; i < RANK; i++)
        if (i != AXIS) row += table.step(i, place[i]);
    if (least < 0 || least + LANES > table.size[AXIS]) return clamped<AXIS>(table, row, first, UP ? 1 : -1);
    if (stride != 1) return apart(row + first * stride, UP ? stride : -stride);
    auto found = widened(load<Entries>(row + least));
    if (!UP) found = SHUFFLE(found, found, SWAPPED, LANES - 1);
    return found;
}
template <int AXIS, class T, int RANK, class... I> INLINE auto ahead(const Table<T, RANK> &table, I... index) {
    return neighbours<true, AXIS>(table, index...);
}
template <int AXIS, class T, int RANK, class... I> INLINE auto behind(const Table<T, RANK> &table, I... index) {
    return neighbours<false, AXIS>(table, index...);
}

// -- products of small matrices -----------------------------------------------------------------------------------
//
// Declared before: Entry (an entry of q and out), HALF (0: Entry is Real, 1: bfloat16, 2: float16), Stored (an entry of
// k and v), EIGHT (0: Stored is Entry, 1: int8, 2: float8_e4m3fn, 3: float8_e5m2).
//
// multiply<M, N>: C[M, N * LANES] = A[M, steps] B[steps, N * LANES], in M * N accumulators.
// A is read number by number at a + row * a_row + step * a_step, so a transposed A costs nothing: S = Q K^T and
// O = P V take a_step = 1, dV = P^T dO and dK = dS^T Q take a_row = 1 and a_step = the width of P.
// B is read a vector at a time at b + step * b_step: K as packed by `pack_turned` (a column of keys after the
// other) for S and dP, rows as they are (or as packed by `pack_rows`) for O, dV, dK, dQ.
// What is multiplied is an Operand: a Real, or where the CPU multiplies pairs of bfloat16 (PAIR = 2), two
// neighbours along the steps in one word. PACK: the numbers in a word of a packed matrix, 2 beside a PAIR of 1 where
// numbers have TERMS.

#if HALF == 1 && defined(__AVX512BF16__) && REGISTER_BYTES == 64
#define PAIRS 1
typedef uint32_t Operand;
const int PAIR = 2;
#else
#define PAIRS 0
typedef Real Operand;
const int PAIR = 1;
#endif
typedef Operand Operands __attribute__((vector_size(REGISTER_BYTES)));

// AMX: an Intel CPU's matrix unit multiplies pairs, 16 at a time. The compiler gets -DFRISKET_AMX where the process may
// use the unit; compilers without these headers, g++ 10 for one, do not know its instructions.
//
// A float32 is the sum of three bfloat16, its TERMS: the number rounded, what that leaves out, rounded, and the rest.
// A product of float32 is six products of terms; the three others are below its last bit. Numbers that are not `tame`
// are multiplied by vectors instead.
#if defined(FRISKET_AMX) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>)) && \
    (PAIRS || (defined(SIX) && REGISTER_BYTES == 64 && defined(__AVX512BF16__)))
#define AMX 1
#define TERMS (PAIRS ? 1 : 3)
#else
#define AMX 0
#define TERMS 1
#endif
// BYTES: a matrix unit multiplies few rows of queries and weights, as whole numbers, by keys and values of int8.
#if defined(FRISKET_AMX) && EIGHT == 1 && REGISTER_BYTES == 64 && REAL_BYTES == 4 && \
    (__has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>))
#define BYTES 1
#else
#define BYTES 0
#endif
const int PACK = AMX ? 2 : PAIR;
const int DEPTH = AMX ? 32 : PAIR;  // zeros fill the steps of a product up to a multiple of so many numbers
const int MOST = REGISTERS == 32 ? 4 : 2;  // vectors of B held at once
const int GROUP = AMX ? 32 : 6;            // rows of A whose accumulators fit beside them
constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int deep(int numbers) { return round_up(numbers, DEPTH) / PACK * TERMS; }  // Operands, zeros included
// B in memory is rows, a step each, `stride` apart. For a matrix unit, B is squares of 16 steps by 16 columns. A square
// is contiguous, and the squares of its other terms follow. The squares of the same 16 columns follow each other, and
// `stride` leads to the next 16 columns. In a row of A, 16 steps of one term come before 16 of the next.
constexpr int stride_of(int wide, int steps) { return AMX ? steps * 16 : wide; }
constexpr int64_t entry_at(int64_t step, int64_t column, int64_t stride) {
    const int64_t row = step / 16 * TERMS * 16 + step % 16;
    return AMX ? column / 16 * stride + row * 16 + column % 16 : step * stride + column;
}
// From one packed row to the next: its width, and a vector more where rows would be a large power of two apart. Such
// rows share a few places of the first-level cache, which then does not hold them.
constexpr int line(int wide) { return wide + (wide % (8 * LANES) ? 0 : LANES); }
constexpr int panel(int vectors) {
    return vectors % MOST == 0 ? MOST : vectors % 3 == 0 && MOST > 3 ? 3 : vectors % 2 == 0 ? 2 : 1;
}

#if PAIRS
INLINE Vec plus_product(Vec sum, Operands a, Operands b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
INLINE Vec plus_product(Vec sum, Operand a, Operands b) { return plus_product(sum, a - Operands{}, b); }
#else
INLINE Vec plus_product(Vec sum, Real a, Vec b) { return sum + a * b; }
INLINE Vec plus_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
#endif

enum Start { ZERO, ADD, RESCALE };  // C = A B, C + A B, or factor of the row * C + A B

// C is added last: what is summed over many tiles is rounded by its own size once a tile, not at every step. LISTED: of
// the steps, those in `list` alone. SPREAD: rows of C are where `rows` says.
template <int M, int N, Start START, bool LISTED = false, bool SPREAD = false>
static void multiply(const Operand *a, int64_t a_row, int64_t a_step, const Operand *b, int64_t b_step, int64_t steps,
                     Real *c, int64_t c_row, const Real *factor = nullptr, const int32_t *list = nullptr,
                     const int32_t *rows = nullptr) {
    Vec sum[M][N];
    UNROLLED for (int i = 0; i < M; i++)
        UNROLLED for (int j = 0; j < N; j++) sum[i][j] = settled(Vec{});  // equal bits wherever this is inlined
    for (; steps > 0; steps--) {
        const Operand *left = LISTED ? a + *list * a_step : a, *row = LISTED ? b + *list++ * b_step : b;
        Operands right[N];
        UNROLLED for (int j = 0; j < N; j++) right[j] = load<Operands>(row + j * LANES);
        UNROLLED for (int i = 0; i < M; i++)
            UNROLLED for (int j = 0; j < N; j++) sum[i][j] = plus_product(sum[i][j], left[i * a_row], right[j]);
        if (!LISTED) a += a_step, b += b_step;
    }
    UNROLLED for (int i = 0; i < M; i++)
        UNROLLED for (int j = 0; j < N; j++) {
            Real *to = c + (SPREAD ? rows[i] : i) * c_row + j * LANES;
            if (START == ADD) sum[i][j] += load<Vec>(to);
            if (START == RESCALE) sum[i][j] += load<Vec>(to) * factor[i];
            store(to, sum[i][j]);
        }
}

#if AMX || BYTES
#if FRISKET_AMX == 1  // 2: a test has defined the unit in software
struct MatrixUnit {  // configures the unit for this thread; its destructor restores the configuration
    struct Layout {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } before, whole = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    MatrixUnit() { asm volatile("sttilecfg %0\n\tldtilecfg %1" : "=m"(before) : "m"(whole)); }
    ~MatrixUnit() { asm volatile("ldtilecfg %0" : : "m"(before)); }
};
__attribute__((constructor)) static void allow() {  // a process has to ask Linux for the unit once
    int64_t answer = 158;                           // arch_prctl(ARCH_REQ_XCOMP_PERM, the data of tiles)
    asm volatile("syscall" : "+a"(answer) : "D"(0x1023), "S"(18) : "rcx", "r11", "memory");
}
template <int T> INLINE void square_of_zeros() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> INLINE void load_square(const void *from, int64_t row) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(row * 4) : "memory");
}
template <int T> INLINE void store_square(void *to, int64_t row) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(row * 4) : "memory");
}
template <int C, int A, int B> INLINE void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> INLINE void add_product_of_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif
#else
struct MatrixUnit {};
#endif

#if AMX

static void turn_square(Operand *to, int64_t to_row, const Operand *from, int64_t from_row) {
    Vec square[LANES];
    UNROLLED for (int i = 0; i < LANES; i++) square[i] = load<Vec>(from + i * from_row);
    transpose(square);
    UNROLLED for (int i = 0; i < LANES; i++) store(to + i * to_row, square[i]);
}

// C = A B, or C + A B if ADDED. A has ROWS rows (16 or 32), B has WIDE vectors (1 or 2). begin_squares loads C or zeros
// into the unit, add_squares adds the products of 16 steps, and end_squares stores C.
template <int ROWS, int WIDE, bool ADDED> INLINE void begin_squares(const Real *c, int64_t c_row) {
    ADDED ? load_square<0>(c, c_row) : square_of_zeros<0>();
    if (WIDE > 1) ADDED ? load_square<1>(c + 16, c_row) : square_of_zeros<1>();
    if (ROWS > 16) ADDED ? load_square<2>(c + 16 * c_row, c_row) : square_of_zeros<2>();
    if (ROWS > 16 && WIDE > 1) ADDED ? load_square<3>(c + 16 * c_row + 16, c_row) : square_of_zeros<3>();
}
// Products of terms, the smallest first: from one to the next, the unit keeps the squares of A or those of B.
const int PRODUCTS = TERMS == 1 ? 1 : 6;
const int A_TERM[] = {0, 0, 1, 1, 2, 0}, B_TERM[] = {TERMS - 1, 1, 1, 0, 0, 0};
template <int ROWS, int WIDE>
INLINE void add_squares(const Operand *a, int64_t a_row, const Operand *b, int64_t stride, int product) {
    a += A_TERM[product] * 16, b += B_TERM[product] * 256;
    const bool new_a = !product || A_TERM[product] != A_TERM[product - 1];
    const bool new_b = !product || B_TERM[product] != B_TERM[product - 1];
    if (new_a) load_square<4>(a, a_row);
    if (new_b) load_square<6>(b, 16);
    add_product<0, 4, 6>();
    if (ROWS > 16 && new_a) load_square<5>(a + 16 * a_row, a_row);
    if (ROWS > 16) add_product<2, 5, 6>();
    if (WIDE > 1 && new_b) load_square<7>(b + stride, 16);
    if (WIDE > 1) add_product<1, 4, 7>();
    if (ROWS > 16 && WIDE > 1) add_product<3, 5, 7>();
}
template <int ROWS, int WIDE> INLINE void end_squares(Real *c, int64_t c_row) {
    store_square<0>(c, c_row);
    if (WIDE > 1) store_square<1>(c + 16, c_row);
    if (ROWS > 16) store_square<2>(c + 16 * c_row, c_row);
    if (ROWS > 16 && WIDE > 1) store_square<3>(c + 16 * c_row + 16, c_row);
}
template <int ROWS, int WIDE, bool ADDED>
static void multiply_squares(const Operand *a, int64_t a_row, const Operand *b, int64_t stride, int64_t steps, Real *c,
                             int64_t c_row) {
    begin_squares<ROWS, WIDE, ADDED>(c, c_row);
    for (int64_t step = 0; step < steps; step += 16 * TERMS, a += 16 * TERMS, b += 256 * TERMS)
        UNROLLED for (int product = 0; product < PRODUCTS; product++)
            add_squares<ROWS, WIDE>(a, a_row, b, stride, product);
    end_squares<ROWS, WIDE>(c, c_row);
}

// The product of GROUP rows and WIDE columns, cut into pieces of 16 steps, two vectors and one of PRODUCTS. The caller
// does other work between two pieces. piece(n) stores the part before, and the caller stores the last one by
// end(PARTS - 1).
template <int WIDE, int STEPS, bool ADDED> struct Product {
    static const int PARTS = (WIDE / LANES + 1) / 2, CHAIN = STEPS / (16 * TERMS) * PRODUCTS, PIECES = PARTS * CHAIN;
    static const bool ODD = WIDE / LANES % 2;
    const Operand *a;
    int64_t a_row;
    const Operand *b;
    int64_t stride;
    Real *c;
    int64_t c_row;
    void end(int part) const {
        Real *to = c + part * 2 * LANES;
        ODD && part == PARTS - 1 ? end_squares<GROUP, 1>(to, c_row) : end_squares<GROUP, 2>(to, c_row);
    }
    void piece(int n) const {
        const int part = n / CHAIN, place = n % CHAIN, step = place / PRODUCTS * TERMS, product = place % PRODUCTS;
        const bool one = ODD && part == PARTS - 1;
        const Real *from = c + part * 2 * LANES;
        const Operand *left = a + step * 16, *right = b + part * 2 * stride + step * 256;
        if (place == 0 && part) end(part - 1);
        if (place == 0) one ? begin_squares<GROUP, 1, ADDED>(from, c_row) : begin_squares<GROUP, 2, ADDED>(from, c_row);
        one ? add_squares<GROUP, 1>(left, a_row, right, stride, product)
            : add_squares<GROUP, 2>(left, a_row, right, stride, product);
    }
};
#endif

// C = A B, C + A B, or factor * C + A B for `vectors` vectors of B, a number known at run time from 1 to MOST.
template <int M, Start START>
INLINE void multiply_some(int vectors, const Operand *a, int64_t a_row, int64_t a_step, const Operand *b,
                          int64_t b_step, int64_t steps, Real *c, int64_t c_row, const Real *factor = nullptr) {
#if AMX
    for (; vectors > 1; vectors -= 2, b += 2 * b_step, c += 2 * LANES)
        multiply_squares<M, 2, START == ADD>(a, a_row, b, b_step, steps, c, c_row);
    if (vectors) multiply_squares<M, 1, START == ADD>(a, a_row, b, b_step, steps, c, c_row);
#else
    if (vectors == MOST) return multiply<M, MOST, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
    if (vectors == 1) return multiply<M, 1, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
#if REGISTERS == 32
    if (vectors == 2) return multiply<M, 2, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
    if (vectors == 3) return multiply<M, 3, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
#endif
#endif
}

// The steps of a product that some rows of its result need, PACK numbers each: `count` from `first` on, or a list.
struct Steps {
    int first, count;
    const int32_t *list;  // null: neighbours
};
// Writes down the steps of vector j of which some lane is wanted, behind `count` others; how many there are then.
INLINE int listed(int32_t *list, int count, int j, uint32_t lanes) {
    uint32_t left = PACK == 2 ? (lanes | lanes >> 1) & 0x55555555 : lanes;
    for (; left; left &= left - 1) list[count++] = (j * LANES + __builtin_ctz(left)) / PACK;
    return count;
}
INLINE Steps steps_of(const int32_t *list, int count) {
    if (count == 0 || list[count - 1] - list[0] + 1 == count) return {count ? list[0] : 0, count, nullptr};
    return {0, count, list};
}
template <int M, int N, Start START, bool SPREAD = false>
INLINE void multiply_steps(const Steps &steps, const Operand *a, int64_t a_row, int64_t a_step, const Operand *b,
                           int64_t b_step, Real *c, int64_t c_row, const Real *factor = nullptr,
                           const int32_t *rows = nullptr) {
    const int32_t *list = steps.list;
    const int count = steps.count;
#if AMX  // all steps between the first and the last
    if (!count) return;
    const int first = (list ? list[0] : steps.first) & ~15, end = list ? list[count - 1] + 1 : steps.first + count;
    multiply_some<M, ADD>(N, a + first * TERMS, a_row, 1, b + first * TERMS * LANES, b_step,
                          round_up(end - first, 16) * TERMS, c, c_row);
#else
    if (list)
        return multiply<M, N, START, true, SPREAD>(a, a_row, a_step, b, b_step, count, c, c_row, factor, list, rows);
    a += steps.first * a_step, b += steps.first * b_step;
    if (count) multiply<M, N, START, false, SPREAD>(a, a_row, a_step, b, b_step, count, c, c_row, factor, list, rows);
#endif
}

// Calls run(Vectors<N>, column) for each panel of N vectors of WIDE columns. 5 vectors are 3 and 2: one alone has so
// few sums that each step waits for the one before.
template <int COUNT> struct Vectors {
    static const int N = COUNT;
};
template <int WIDE, class Run> INLINE void by_panels(Run run) {
    const int BLOCKS = WIDE / LANES, REST = BLOCKS % MOST;
    const int SPLIT = MOST == 4 && BLOCKS > MOST && REST == 1 ? 3 : 0;
    const int LAST = SPLIT ? 2 : REST;
    int column = 0;
    for (; column < (BLOCKS - SPLIT - LAST) * LANES; column += MOST * LANES) run(Vectors<MOST>(), column);
    if (SPLIT) run(Vectors<(SPLIT ? SPLIT : 1)>(), column);
    if (LAST) run(Vectors<(LAST ? LAST : 1)>(), column + SPLIT * LANES);
}

// -- numbers of 16 and 8 bits -------------------------------------------------------------------------------------

#if HALF == 1
INLINE Real real(Entry x) { return __builtin_bit_cast(float, (uint32_t)x << 16); }
INLINE Entry rounded(Real x) {  // to nearest, ties to even
    uint32_t y = __builtin_bit_cast(uint32_t, (float)x);
    return x != x ? y >> 16 | 64 : (y + 0x7FFF + (y >> 16 & 1)) >> 16;
}
#elif HALF == 2
INLINE Real real(Entry x) {
    uint32_t size = (uint32_t)(x & 0x7FFF) << 13;  // a float 2^112 too small, right for subnormal numbers too
    float y = __builtin_bit_cast(float, size) * 5.192296858534828e33f;
    y = size >= 0x0F800000 ? __builtin_bit_cast(float, size | 0x7F800000) : y;
    return x & 0x8000 ? -y : y;
}
INLINE Entry rounded(Real x) {  // to nearest, ties to even
    uint32_t y = __builtin_bit_cast(uint32_t, (float)x), sign = y >> 16 & 0x8000;
    y &= 0x7FFFFFFF;
    if (y > 0x7F800000) return sign | 0x7E00;
    if (y >= 0x477FF000) return sign | 0x7C00;
    if (y < 0x38800000)  // subnormal: adding 1/2 leaves the bits wanted at the low end
        return sign | (uint16_t)__builtin_bit_cast(uint32_t, __builtin_bit_cast(float, y) + 0.5f);
    return sign | (y - 0x38000000 + 0xFFF + (y >> 13 & 1)) >> 13;
}
#else
INLINE Real real(Entry x) { return x; }
INLINE Entry rounded(Real x) { return x; }
#endif

typedef float Singles __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef int8_t Eights __attribute__((vector_size(LANES)));

// LANES neighbours in memory, with wider lanes. g++ 12 takes nine instructions for what is one.
#if defined(__AVX2__) && LANES >= 8
#define WIDER(name, To, From, instruction)                                 \
    INLINE To name(const void *from) {                                     \
        typedef From Anywhere __attribute__((aligned(1)));                 \
        To x;                                                              \
        asm(instruction " %1, %0" : "=v"(x) : "m"(*(const Anywhere *)from)); \
        return x;                                                          \
    }
#else
#define WIDER(name, To, From, instruction) \
    INLINE To name(const void *from) { return cast<To>(load<From>(from)); }
#endif
WIDER(widened_halves, Words, Halves, "vpmovzxwd")
WIDER(widened_eights, Narrow, Eights, "vpmovsxbd")
WIDER(eights_by_two, Shorts, Eights, "vpmovsxbw")

// The numbers with these bits in float16.
INLINE Singles of_float16(Halves x) {
#if defined(__F16C__) && LANES >= 8
    Singles y;
    asm("vcvtph2ps %1, %0" : "=v"(y) : "v"(x));
    return y;
#else
    const Words word = cast<Words>(x), size = (word & 0x7FFF) << 13;  // as in `real`
    const Words y = (Words)((Singles)size * 5.192296858534828e33f);
    return (Singles)((size >= 0x0F800000 ? size | 0x7F800000 : y) | (word & 0x8000) << 16);
#endif
}

// LANES neighbours as Reals.
INLINE Vec load_all(const Entry *from) {
#if HALF == 0
    return load<Vec>(from);
#elif HALF == 1
    return (Vec)(widened_halves(from) << 16);
#else
    return of_float16(load<Halves>(from));
#endif
}
#if EIGHT
INLINE Vec load_all(const Stored *from) {
#if EIGHT == 1
    return cast<Vec>(widened_eights(from));
#elif EIGHT == 2
    // As float16, whose exponents are 8 larger; but its 480 stands for NaN, here one that fits bfloat16 too.
    const Halves x = (Halves)eights_by_two(from);
    return cast<Vec>(of_float16((x & 0x7F) == 0x7F ? (x & 0x8000) | 0x7E00 : x << 7 & 0xBFFF) * 256.0f);
#else
    return cast<Vec>(of_float16((Halves)eights_by_two(from) << 8));  // float16 without the end of its mantissa
#endif
}
#endif

// LANES entries of a row that has `left` from here on, as Reals; zeros behind them.
template <class T> INLINE Vec load_reals(const T *from, int64_t left) {
    if (left >= LANES) return load_all(from);
    T some[LANES] = {};
    for (int i = 0; i < LANES && i < left; i++) some[i] = from[i];
    return load_all(some);
}

// The same as Operands: pairs of them where those are pairs. WHOLE: nothing ends before.
#if PAIRS
INLINE Operands paired(Vec left, Vec right) {  // LANES neighbours, and the LANES after them, rounded
    Operands both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(left), "v"(right));
    return both;
}
INLINE void store_operands(Operand *to, Vec left, Vec right) { store(to, paired(left, right)); }
template <bool WHOLE = false> INLINE Operands load_operands(const Entry *from, int64_t left) {
    if (WHOLE || left >= 2 * LANES) return load<Operands>(from);
    Operands x = {};
    for (int i = 0; i < LANES && 2 * i < left; i++)
        x[i] = from[2 * i] | (2 * i + 1 < left ? (uint32_t)from[2 * i + 1] << 16 : 0);
    return x;
}
#if EIGHT
template <bool WHOLE = false> INLINE Operands load_operands(const Stored *from, int64_t left) {  // not rounded
    if (WHOLE) return paired(load_all(from), load_all(from + LANES));
    return paired(load_reals(from, left), load_reals(from + LANES, left - LANES));
}
#endif
#else
INLINE void store_operands(Operand *to, Vec x, Vec) { store(to, x); }
template <bool WHOLE = false, class T> INLINE Operands load_operands(const T *from, int64_t left) {
    return WHOLE ? load_all(from) : load_reals(from, left);
}
#endif

// -- terms of float32 ---------------------------------------------------------------------------------------------

#if TERMS > 1
INLINE Vec first_term(Vec x) { return (Vec)((Raw)x + 0x8000 & 0xFFFF0000); }  // to nearest, ties away from zero
// The terms of 2 * LANES neighbours, `apart` from each other: a row of A, or a row that becomes a column of B.
INLINE void store_terms(Operand *to, Vec left, Vec right, int64_t apart = LANES) {
    left = settled(left), right = settled(right);  // a product has been rounded
    UNROLLED for (int n = 0; n < TERMS; n++, to += apart) {
        const Vec x = first_term(left), y = first_term(right);
        Raw both;
        asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(x), "v"(y));
        store(to, both);
        left -= x, right -= y;
    }
}
// The terms of two rows, lane by lane in one word.
INLINE void store_rows(Operand *to, Vec low, Vec high, int64_t apart) {
    low = settled(low), high = settled(high);
    UNROLLED for (int n = 0; n < TERMS; n++, to += apart) {
        const Vec x = first_term(low), y = first_term(high);
        store(to, (Raw)x >> 16 | (Raw)y);
        low -= x, high -= y;
    }
}
#else
INLINE void store_terms(Operand *to, Vec left, Vec right) { store_operands(to, left, right); }
#endif

// The lower or the upper number of an Operand that is a pair; the number that is no pair.
INLINE Real half(const Operand *x, int64_t which) {
#if TERMS > 1
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, *x) >> 16 * which << 16);
#elif PAIRS
    return real((Entry)(*x >> 16 * which));
#else
    return *x;
#endif
}
// The sum of the terms of a number, which are `apart`; of infinity only the first one is no NaN.
INLINE Real number(const Operand *x, int64_t which, int64_t apart) {
    Real total = 0;
    if (TERMS > 1 && half(x, which) - half(x, which) != 0) return half(x, which);
    for (int n = TERMS - 1; n >= 0; n--) total += half(x + n * apart, which);
    return total;
}
// Number i of a packed row of A.
INLINE Real left_number(const Operand *row, int64_t i) {
    return AMX ? number(row + i / 32 * 16 * TERMS + i % 32 / 2, i % 2, 16) : half(row + i / PACK, i % PACK);
}

// The largest magnitude of numbers that are shifted to the left by a bit.
INLINE Real largest_of(Raw x) {
#if LANES == 16
    const auto fold = [&](Raw y) { x = x > y ? x : y; };
    fold(SHUFFLE(x, x, SWAPPED, 8)), fold(SHUFFLE(x, x, SWAPPED, 4)), fold(SHUFFLE(x, x, SWAPPED, 2));
    fold(SHUFFLE(x, x, SWAPPED, 1));
    return __builtin_bit_cast(Real, x[0] >> 1);
#else
    Unsigned all = 0;
    for (int i = 0; i < LANES; i++) all = x[i] > all ? x[i] : all;
    return __builtin_bit_cast(Real, all >> 1);
#endif
}
// The largest magnitude in rows of DIM entries; NaN if an entry is NaN.
template <int DIM, class From> static Real most_of(const From &from, int64_t rows) {
    Raw most = {};
    for (int64_t i = 0; i < rows; i++)
        for (int d = 0; d < DIM; d += LANES) {
            const Raw x = (Raw)load_reals(from.row(i) + d, DIM - d) << 1;
            most = x > most ? x : most;
        }
    return largest_of(most);
}
// Whether products of terms are as good as those of numbers up to a magnitude: the unit takes what is below 2^-126 for
// 0, infinity has terms that are NaN, and a sum of products that overflow may be infinity minus infinity.
INLINE bool tame(Real most) { return most == 0 || (most >= (Real)0x1p-100 && most <= (Real)0x1p36); }

// -- packing ------------------------------------------------------------------------------------------------------

// Rows of entries, a stride apart; those of a MOVED call are where a table says.
template <class T> struct Lines {
    const T *data;
    int64_t stride;
    const int32_t *rows;
    const T *row(int64_t i) const { return data + (MOVED ? rows[i] : i) * stride; }
};
INLINE int64_t row_at(const int32_t *rows, int64_t i) { return MOVED ? rows[i] : i; }
INLINE const int32_t *rows_from(const int32_t *rows, int64_t start) { return MOVED ? rows + start : nullptr; }

// Rows of DIM entries as Operands [all, WIDE]: the A of a product. Rows from `rows` on and entries from DIM on are 0.
// Pairs are not multiplied by `factor`, which would round them again.
template <int DIM, int WIDE = deep(DIM)>
static void pack_left(Operand *to, const Lines<const Entry> &lines, int64_t rows, int64_t all, Real factor) {
    for (int64_t i = 0; i < all; i++, to += WIDE) {
        const Entry *from = lines.row(i < rows ? i : 0);
#if TERMS > 1
        for (int d = 0; d < DIM; d += DEPTH) {
            const Vec left = load_reals(from + d, i < rows ? DIM - d : 0) * factor;
            const Vec right = load_reals(from + d + LANES, i < rows ? DIM - d - LANES : 0) * factor;
            store_terms(to + d / DEPTH * TERMS * LANES, left, right);
        }
#elif PAIRS
        const int whole = i < rows ? DIM / 2 : 0;
        __builtin_memcpy(to, from, whole * sizeof(Operand));
        for (int d = whole; d < WIDE; d++) to[d] = i < rows && 2 * d < DIM ? from[2 * d] : 0;
#else
        for (int d = 0; d < WIDE; d++) to[d] = i < rows && d < DIM ? real(from[d]) * factor : 0;
#endif
    }
}

const int AHEAD = 128;  // rows fetched before they are needed: transposing takes less time than loading
const int FETCH = 128;  // rows that are fetched into the second level ahead of these, whose work takes little time
static_assert(FETCH <= AHEAD, "the rows of a tile have addresses of AHEAD more");

template <class T> INLINE void fetch(const T *from, int64_t d) {  // a line of memory at a time
    if (d * sizeof(T) % 64 == 0) __builtin_prefetch(from + d, 0, 2);
}

// Fetches a row of DIM entries into the level that the builtin calls LOCALITY: 2 is the second, 3 the first.
template <int DIM, int LOCALITY, class T> INLINE void fetch_row(const T *from) {
    for (int d = 0; d < DIM; d += 64 / (int)sizeof(T)) __builtin_prefetch(from + d, 0, LOCALITY);
}

// Fetches part n of `parts` of a packed tile into the second level.
INLINE void fetch_part(const Operand *tile, int64_t size, int n, int parts) {
    const int64_t lines = size / 16;
    for (int64_t i = lines * n / parts; i < lines * (n + 1) / parts; i++) __builtin_prefetch(tile + i * 16, 0, 2);
}

// `keys` rows of DIM entries, turned: for each panel of N * LANES of them [deep(DIM), N * LANES].
// Rows from `present` on are 0; whole vectors of them are not read, and left out. `From` has the address of each row,
// as `Lines` has.
template <int DIM, int N, class From>
static void pack_turned(Operand *to, const From &from, int64_t present, int64_t keys) {
    const int STEPS = deep(DIM);
    for (int64_t start = 0; start < keys; start += N * LANES, to += STEPS * N * LANES)
        for (int64_t block = 0; block < N && start + block * LANES < present; block++) {
            const int64_t first = start + block * LANES;
            decltype(from.row(0)) row[LANES], ahead[LANES];
            for (int i = 0; i < LANES; i++)
                row[i] = from.row(first + i < present ? first + i : first), ahead[i] = from.row(first + i + AHEAD);
            for (int step = 0; step < STEPS; step += LANES * TERMS) {
#if TERMS > 1
                Operand terms[TERMS][LANES][LANES];
                const int d = step / TERMS * PACK;
                for (int i = 0; i < LANES; i++) {
                    const int64_t left = first + i < present ? DIM - d : 0;
                    __builtin_prefetch(ahead[i] + d), __builtin_prefetch(ahead[i] + d + LANES);
                    store_terms(terms[0][i], load_reals(row[i] + d, left), load_reals(row[i] + d + LANES, left - LANES),
                                LANES * LANES);
                }
                for (int n = 0; n < TERMS; n++) turn_square(to + (step + n * LANES) * LANES, LANES, terms[n][0], LANES);
#else
                Vec square[LANES];
                UNROLLED for (int i = 0; i < LANES; i++) {
                    __builtin_prefetch(ahead[i] + step * PAIR);
                    square[i] = (Vec)load_operands<DIM % (LANES * PAIR) == 0>(row[i] + step * PAIR, DIM - step * PAIR);
                }
                for (int64_t i = present - first; i < LANES; i++) square[i] = Vec{};
                transpose(square);
                UNROLLED for (int i = 0; i < LANES; i++)
                    if (step + i < STEPS) store(to + (step + i) * N * LANES + block * LANES, square[i]);
#endif
            }
        }
}

// `keys` rows of DIM entries as they are: B of keys / PACK steps and of DIM columns, rounded up to LANES.
template <int DIM, int STRIDE, class From>
static void pack_rows(Operand *to, const From &from, int64_t present, int64_t keys) {
    const int WIDE = round_up(DIM, LANES);
    for (int64_t i = 0; i < keys; i += PACK) {
        const auto *first = from.row(i < present ? i : 0), *second = from.row(i + 1 < present ? i + 1 : 0);
        const auto *ahead = from.row(i + AHEAD), *behind = from.row(i + AHEAD + PACK - 1);
        for (int d = 0; d < WIDE; d += LANES) {
            const int64_t left = DIM - d;
            if (MOVED) __builtin_prefetch(ahead + d), __builtin_prefetch(behind + d);
            else if (AMX) fetch(ahead, d), fetch(behind, d);
#if TERMS > 1
            store_rows(to + entry_at(i / PACK, d, STRIDE), load_reals(first + d, i < present ? left : 0),
                       load_reals(second + d, i + 1 < present ? left : 0), LANES * LANES);
#elif PAIRS
            Raw low = {}, high = {};  // a bfloat16 is the upper half of a float, numbers of 8 bits fit into one
            if (i < present) low = (Raw)load_reals(first + d, left) >> 16;
            if (i + 1 < present) high = (Raw)load_reals(second + d, left);
            store(to + entry_at(i / PACK, d, STRIDE), low | high);
#else
            (void)second;
            store(to + entry_at(i / PACK, d, STRIDE), i < present ? load_reals(first + d, left) : Vec{});
#endif
        }
    }
}

// -- a few rows of queries, without packing ------------------------------------------------------------------------

// Adds lanes of each of N vectors until one vector holds them all: its lane i belongs to x[i / STEP % N]. STEP lanes
// beside each other belong to different sums and stay apart. Vectors are joined by twos, and half as many are left.
template <int N, int STEP> INLINE Vec added(Vec *x) {
    if constexpr (N > 1) {
        UNROLLED for (int i = 0; i < N; i += 2) {
            Vec left = x[i], right = x[i + 1];
            x[i / 2] = SHUFFLE(left, right, FROM_LEFT, STEP) + SHUFFLE(left, right, FROM_RIGHT, STEP);
        }
        return added<N / 2, STEP * 2>(x);
    }
    return x[0];
}

const int ONCE = LANES < 4 ? LANES : REGISTERS == 32 ? 4 : 2;  // keys: enough sums to hide how long one takes

// sum[m][i] += query[m] * key[i] for LANES Operands from `d` on.
template <bool WHOLE, int M, class T>
INLINE void add_dots(Vec (*sum)[ONCE], const Operand *query, int64_t q_row, const T *const *key, const T *ahead,
                     int64_t stride, int d, int64_t left) {
    Operands x[ONCE];
    UNROLLED for (int i = 0; i < ONCE; i++) x[i] = load_operands<WHOLE>(key[i] + d, left), fetch(ahead + i * stride, d);
    UNROLLED for (int m = 0; m < M; m++) {
        const Operands y = (Operands)settled(load<Vec>((const Real *)query + m * q_row + d / PAIR));  // in a register
        UNROLLED for (int i = 0; i < ONCE; i++) sum[m][i] = plus_product(sum[m][i], y, x[i]);
    }
}

// scores[M, LANES] of M queries of DIM entries, padded with zeros to whole vectors, and of LANES keys, of which at
// least one is present. A key is loaded once for all queries. In place of absent keys the last one is loaded, and its
// scores are not used. `ahead` are the keys to be fetched.
template <int M, int DIM, class T>
static void dots(const Operand *query, int64_t q_row, const T *keys, const T *ahead, int64_t stride, int64_t present,
                 Real *scores, int64_t row) {
    const int STEP = LANES * PAIR, LAST = DIM / STEP * STEP;
    Vec sums[M][LANES / ONCE];
    for (int first = 0; first < LANES; first += ONCE) {
        const T *key[ONCE];
        for (int i = 0; i < ONCE; i++) key[i] = keys + (first + i < present ? first + i : present - 1) * stride;
        Vec sum[M][ONCE];
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int i = 0; i < ONCE; i++) sum[m][i] = settled(Vec{});
        for (int d = 0; d < LAST; d += STEP) add_dots<true, M>(sum, query, q_row, key, ahead, stride, d, STEP);
        if (LAST < DIM) add_dots<false, M>(sum, query, q_row, key, ahead, stride, LAST, DIM - LAST);
        ahead += ONCE * stride;
        UNROLLED for (int m = 0; m < M; m++) sums[m][first / ONCE] = added<ONCE, 1>(sum[m]);
    }
    UNROLLED for (int m = 0; m < M; m++) store(scores + m * row, added<LANES / ONCE, ONCE>(sums[m]));
}

#if TERMS > 1
// Products by vectors, of numbers that are not tame: `rows` packed rows of queries or dO by a vector of keys or values.
template <int DIM, class From>
static void dots_of_terms(const Operand *a, int rows, const From &keys, int64_t first, int64_t present, Real *to,
                          int64_t to_row) {
    Real left[round_up(DIM, LANES)] = {}, right[LANES * DIM];
    present = present < LANES ? present : LANES;
    for (int64_t i = 0; i < present; i++) __builtin_memcpy(right + i * DIM, keys.row(first + i), DIM * sizeof(Real));
    for (int i = 0; i < rows && present > 0; i++, a += deep(DIM), to += to_row) {
        for (int d = 0; d < DIM; d++) left[d] = left_number(a, d);
        dots<1, DIM>(left, 0, right, right, DIM, present, to, 0);
    }
}
#endif

// c[m] = c[m] * factor[m] + weights[m] * values for M rows of N * LANES entries, and the values from `start` to `end`,
// of which those without a `some` may be anything. WHOLE: rows of values do not end before.
template <int M, int N, bool WHOLE, bool SOME, class From>
static void add_few(const Real *weights, int64_t w_row, const From &values, int64_t column, int64_t left, int64_t start,
                    int64_t end, const Lane *some, Real *c, int64_t c_row, const Real *factor) {
    Vec sum[M][N];
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int j = 0; j < N; j++) sum[m][j] = load<Vec>(c + m * c_row + j * LANES) * factor[m];
    for (int64_t i = start; i < end; i++) {
        if (SOME && !some[i]) continue;
        const auto *from = values.row(i) + column, *ahead = values.row(i + FETCH) + column;
        Vec x[N];
        for (int j = 0, d; j < N; j++) {
            d = j * LANES;
            x[j] = WHOLE ? load_all(from + d) : load_reals(from + d, left - d);
            fetch(ahead, d);
        }
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < N; j++) sum[m][j] += weights[m * w_row + i] * x[j];
    }
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int j = 0; j < N; j++) store(c + m * c_row + j * LANES, sum[m][j]);
}

// -- the mask and the score mod, over a vector of keys -----------------------------------------------------------

struct Fixed {  // known once: sizes, parameters, tables, batch entry and head
    Int w;
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    fixed.w = (Int)call->slots[0].i;
    return fixed;
}

struct Row {  // known once per query
    Int q;
    Int x0;
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
    row.x0 = row.q - fixed.w + 1;
    return row;
}

const bool REPEATED = false;  // rows that see the same keys are neighbours
INLINE bool alike(const Row &a, const Row &b) { return false; }

struct Column {  // known once per vector of keys
    Int first;
    const Real *distances;  // where those of query 0 are
    Ints k;
    Bits inside;  // before the end of the keys
};

INLINE Column column_of(const Fixed &fixed, Int first, int64_t left) {
    Column column;
    column.first = first;
    column.k = first + counting();
    column.inside = cast<Bits>(counting()) < (Lane)(left < LANES ? left : LANES);
    return column;
}

// Functions of the distance of query and key alone, computed for the diagonals of a tile.
const int DISTANCES = 0, SPAN = BLOCK_Q + BLOCK_K + 32;
INLINE void tabulate(const Fixed &fixed, const Row &row, const Column &column, Real *to) {
}
// q >= k & q - k < w
INLINE Bits visible(const Fixed &fixed, const Row &row, const Column &column) {
    return (row.q >= column.k) & (row.q - column.k < fixed.w);
}

INLINE Vec modified(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return score;
}

INLINE Bits kept(const Fixed &fixed, const Row &row, const Column &column) {
    return bits(true);
}

INLINE Vec scale_of_value(const Fixed &fixed, const Row &row, const Column &column) {
    return reals(1);
}

// What survives dropout weighs more.
INLINE Real survivors(const Fixed &fixed) { return 1; }

// The page of the pool that is a batch entry's.
INLINE int64_t page_of(const Fixed &fixed, int64_t batch, int64_t page) { return 0; }
// Whether the query heads of a key head differ in nothing that depends on the head.
INLINE bool alike_in_group(const Call *call) {
    const int64_t group = call->heads / call->kv_heads;
    return false;
}
// Whether the keys that a query sees are one interval, and its part of a tile: from begin, before end.
const bool INTERVAL = true;
INLINE void interval(const Fixed &fixed, const Row &row, int64_t tile, int64_t keys, int64_t &begin, int64_t &end) {
    end = between(0, (int64_t)row.q + 1 - tile, keys);
    begin = between(0, (int64_t)row.x0 - tile, end);
}

// -- scores, the same to the last bit in both kernels --------------------------------------------------------------
//
// The backward computes scores again and subtracts the largest of each row, which the forward has left in `Call.norm`.
// The last bit of a score of a million changes its weight by a factor of e^0.06. So queries are packed and multiplied
// in one way and order, and no operation here is fused with an operation outside.

const int STEPS = deep(HEAD_DIM);                      // of the product of queries and keys
const int QUERY = round_up(STEPS, LANES);              // Operands in a row of queries
const int VECTORS = BLOCK_K / LANES;
const int PANEL = panel(VECTORS);                      // vectors of keys that are multiplied together
const int BESIDE = AMX ? 1 : PANEL;                    // vectors of keys in a row of packed keys

// Where vector j of packed keys begins, and the stride of packed keys.
INLINE int64_t vector_at(int j, int steps) { return j / BESIDE * (steps * BESIDE * LANES) + j % BESIDE * LANES; }
constexpr int stride_of_keys(int steps) { return stride_of(BESIDE * LANES, steps); }

// The factor of a score: the scale, times log2 e where nothing modifies the score.
INLINE Real unit_of(const Call *call) { return (Real)(call->scale * (SCORED ? 1.0 : 1.4426950408889634)); }

// Rows of queries, `all` of them; where products are exact the unit is in the queries. `few` rows are not packed.
static void pack_queries(Operand *to, const Lines<const Entry> &from, int64_t rows, int64_t all, Real unit, bool few) {
    if (TERMS == 1 || !few) return pack_left<HEAD_DIM, QUERY>(to, from, rows, all, PAIR == 1 ? unit : 1);
    for (int64_t i = 0; i < rows; i++)
        for (int d = 0; d < QUERY; d++) to[i * QUERY + d] = d < HEAD_DIM ? (Operand)(real(from.row(i)[d]) * unit) : 0;
}

INLINE Vec scaled(Vec product, Real unit) { return PAIR == 1 ? product : settled(product * unit); }
INLINE Vec score_of(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return SCORED ? settled(modified(fixed, row, column, score)) : score;
}

// How many vectors of a panel are open from vector j on.
INLINE int opened(const bool *open, int j) {
    int n = 0;
    while (n < PANEL - j % PANEL && open[j + n]) n++;
    return n;
}

// Tabulates functions of the distance for `rows` queries, the last of which is given, and a tile of keys from `first`
// on: entry i is that of the last query and key first + i.
static void by_distance(const Fixed &fixed, const Row &last, Int first, int rows, Real *to, Column *columns) {
    for (int i = 0; i < BLOCK_K + rows; i += LANES)
        tabulate(fixed, last, column_of(fixed, (Int)(first + i), LANES), to + i);
    for (int i = 0; i < BLOCK_K; i += LANES) columns[i / LANES].distances = to + i + last.q;
}

// Rows of an item by twos, threes and fours, as even as can be.
template <class Do> INLINE void by_few(int rows, Do run) {
    for (int done = 0, n; done < rows; done += n) {
        const int left = rows - done, parts = (left + 3) / 4;
        n = (left + parts - 1) / parts;
        run(done, n);
    }
}

// Products of a few rows of queries, without terms, and one vector of keys, of which `present` are there. Their sums
// have another order than those of many rows: `Call.norm` says which rows were few.
static void few_products(const Operand *query, int rows, const Stored *keys, const Stored *ahead, int64_t stride,
                         int64_t present, Real *to, int64_t to_row) {
    by_few(rows, [&](int row, int n) {
        const Operand *q = query + row * QUERY;
        Real *scores = to + row * to_row;
        if (n == 1) return dots<1, HEAD_DIM>(q, QUERY, keys, ahead, stride, present, scores, to_row);
        if (n == 2) return dots<2, HEAD_DIM>(q, QUERY, keys, ahead, stride, present, scores, to_row);
        if (n == 3) return dots<3, HEAD_DIM>(q, QUERY, keys, ahead, stride, present, scores, to_row);
        dots<4, HEAD_DIM>(q, QUERY, keys, ahead, stride, present, scores, to_row);
    });
}

// -- forward ------------------------------------------------------------------------------------------------------
//
// One work item is one tile of queries of one head, at most BLOCK_Q of them. For every tile of keys that it visits, it
// computes scores and weights of all rows, GROUP rows at a time, then weights times values. Where scores are not
// modified, the online softmax has base 2 (log2 e is in the scale), otherwise base e. Few rows read keys and values
// where they are; for many rows these are packed first.

const Real BASE = SCORED ? LOG2E : 1, NATURAL = SCORED ? 1 : LN2;  // factors from scores to exponents of 2, and of e
const double EXACTLY_NATURAL = SCORED ? 1 : 0.6931471805599453;  // a float LN2 is off by percents at scores of 1e5
const int V_WIDE = round_up(V_DIM, LANES);
const int ROWS = round_up(BLOCK_Q, GROUP);
const int HEADS = 16;                                  // the most query heads of one item of decoding
const int FEW = MOVED ? 0 : AMX && PAIRS ? 4 : 16;     // the most rows that vectors multiply by unpacked keys
const int SQUARE = AMX && PAIRS && !MOVED ? 16 : FEW;  // the most rows that a matrix unit multiplies by unpacked keys
const bool SPLIT = SQUARE > FEW && !EIGHT && V_DIM % 32 == 0;  // of 32 columns of such rows, the even ones come first
const int TOGETHER = FEW > GROUP ? FEW : GROUP;        // the most rows of one call of weigh
const int CHUNK = 16;                                  // keys of a tile that are neighbours in memory, at least
const int WEIGHTS = round_up(BLOCK_K, 2 * LANES) / PACK * TERMS;  // Operands in a row of weights
const int V_STEPS = deep(BLOCK_K), V_STRIDE = stride_of(V_WIDE, V_STEPS);  // of packed values
const int V_KEYS = round_up(BLOCK_K, DEPTH);            // keys, with those that are zeros
const int64_t KEYS = (int64_t)STEPS * BLOCK_K;                 // Operands of the packed keys of a tile
const int64_t TILE = KEYS + (int64_t)V_STEPS * V_WIDE;  // Operands of the packed keys and values of a tile
const int64_t KEPT_BYTES = (TERMS > 1 ? 16 : 8) << 20;  // packed tiles that a worker keeps for the next row of tiles
static_assert(BLOCK_K % LANES == 0, "a tile of keys is whole vectors");
static_assert(BLOCK_K % CHUNK == 0 && PAGE % CHUNK == 0 && CHUNK % LANES == 0, "a tile and a page are whole chunks");

extern "C" void *malloc(size_t);
extern "C" void free(void *);

// What is known of a packed tile: its number, whether its values are finite, and whether terms hold its numbers.
enum Finite { UNKNOWN, FINITE, ODD };
struct Slot {
    int64_t tile;
    Finite values;
    bool tame_keys, tame_values;
};

// Rows that are worked on together, beside a tile of keys.
struct Strip {
    Real scores[TOGETHER * BLOCK_K];
    Bits seen[TOGETHER * VECTORS];
    Lane begin[GROUP], end[GROUP];  // the interval of keys that a row sees
    bool open[VECTORS];             // whether any row sees a vector
};
const int STRIPS = AMX ? 2 : 1;  // a matrix unit multiplies the next rows while weights of these are computed

#if BYTES
// Numbers as four bytes each: see bytes.hpp. With fewer rows than FEWEST, vectors take no longer.
const int FEWEST = PAIRS ? 1 : 5;
const int DEEP = 64, BYTE_STEPS = (HEAD_DIM + DEEP - 1) / DEEP, BYTE_GROUPS = (BLOCK_K + DEEP - 1) / DEEP;
struct Whole {
    alignas(64) int32_t queries[4][BYTE_STEPS][16][16];  // right operands: four entries of a row at a time
    int8_t keys[16][BYTE_STEPS * DEEP];                  // of which the unit cannot read whole rows in place
    int8_t weights[4][BYTE_GROUPS][16][DEEP];            // left operands, for each group of 64 keys
    int8_t values[BYTE_GROUPS][4][16][DEEP];             // right operands, of 64 columns of values
    int32_t products[16 * 256];
    Real unit[16], share[16];  // what the high bytes of a row of queries and of weights count
};
#endif

// The memory of one worker, which is kept between calls.
struct Worker {
    int64_t bytes, slots, tile;
    Slot *slot;       // [slots]
    Operand *tiles;   // [slots, tile], each the keys of a tile and, unless they are read in place, its values
    alignas(64) Operand query[ROWS * QUERY];
    Operand weights[ROWS * WEIGHTS];
    Operand values[V_STEPS * V_WIDE];  // the values of a tile, with zeros where no row sees the key
    Real acc[ROWS * V_WIDE];
#if AMX && PAIRS
    Operand turned[STEPS * 16], unread[4 * 16 * STEPS];  // queries as the right operand, keys as the left one
    Real products[4 * 256];
#endif
#if BYTES
    Whole whole;
#endif
    Strip strips[STRIPS];
    Lane some[V_KEYS];          // whether any row of the item sees a key
    Lane edges[BLOCK_K + 1];        // how many more of the item's intervals begin at a key than end before it
    Vec total[ROWS];
    Real top[ROWS], shrink[ROWS];
    int from[ROWS], to[ROWS];  // vectors of keys that a group of rows sees
    Steps steps[ROWS / GROUP];                 // keys that a group of rows sees
    int32_t list[ROWS / GROUP * (BLOCK_K / PACK)];
    bool tame_queries;         // terms, or bytes, hold them
    Row rows[ROWS];
    bool repeated[ROWS];       // whether a row sees what the row before it sees
    int place[ROWS];           // the index in `fixed` of a row's head
    int places;                // entries of `fixed`: heads of the item, 1 where heads do not differ
    Fixed fixed[HEADS];
    Column columns[HEADS * VECTORS];
    Real distances[DISTANCES ? HEADS * DISTANCES * SPAN : 1];
};

// Workers lie in a few places between calls. One atomic exchange takes a worker out or puts it back: there is no lock
// that a fork could leave locked.
const int PLACES = 16;  // workers kept, each with its tiles; more threads than this call malloc each time
static void *places[PLACES];

static Worker *take(int64_t slots, int64_t tile) {
    const int64_t bytes = sizeof(Worker) + slots * (sizeof(Slot) + tile * (int64_t)sizeof(Operand)) + 256;
    void *found = nullptr;
    for (int i = 0; i < PLACES && !found; i++)
        if (__atomic_load_n(&places[i], __ATOMIC_RELAXED))
            found = __atomic_exchange_n(&places[i], nullptr, __ATOMIC_ACQUIRE);
    if (found && *(int64_t *)found < bytes) free(found), found = nullptr;
    if (!found) {
        found = malloc(bytes + 64);
        if (!found) return nullptr;
        *(int64_t *)found = bytes;
    }
    Worker *worker = (Worker *)(((uintptr_t)found + 64) & ~(uintptr_t)63);
    ((void **)worker)[-1] = found;
    worker->slots = slots, worker->tile = tile;
    worker->tiles = (Operand *)(((uintptr_t)(worker + 1) + 63) & ~(uintptr_t)63);
    worker->slot = (Slot *)(worker->tiles + slots * tile);
    for (int64_t i = 0; i < slots; i++) worker->slot[i].tile = -1;
    return worker;
}

static void give(Worker *worker) {
    void *memory = ((void **)worker)[-1];
    for (int i = 0; i < PLACES; i++) {
        void *none = nullptr;
        if (__atomic_compare_exchange_n(&places[i], &none, memory, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    free(memory);
}

const int CHUNKS = (V_KEYS + AHEAD) / CHUNK;  // of a tile, zeros behind it included, and of the rows AHEAD

// Where the keys or values of a tile are, and those fetched ahead of it: the address of each chunk, and the stride
// between rows of a chunk; of MOVED keys the first row of all, and a table.
struct Chunks {
    const Stored *at[CHUNKS];
    int64_t stride;
    const int32_t *rows;
    const Stored *row(uint64_t i) const {
        return MOVED ? at[0] + rows[i] * stride : at[i / CHUNK] + (int64_t)(i % CHUNK) * stride;
    }
};
struct Tile {
    Chunks k, v;
    int64_t present;                // keys before the end
    const Operand *keys, *values;   // the packed tile; values may be unpacked, as the caller gave them
    int64_t v_stride;               // of `values`
    const Operand *next;            // the packed tile that comes next, null if it is not there
    Slot *slot;
};

INLINE bool tame_keys(const Worker &w, const Tile &tile) { return w.tame_queries && tile.slot->tame_keys; }

// -- few rows -----------------------------------------------------------------------------------------------------

// Scores of one vector of keys.
static void score_few(Worker &w, const Tile &tile, int rows, int j) {
    const Stored *k = tile.k.row(j * LANES), *ahead = tile.k.row(j * LANES + FETCH);
    few_products(w.query, rows, k, ahead, tile.k.stride, tile.present - j * LANES, w.strips->scores + j * LANES,
                 BLOCK_K);
}

// acc = acc * shrink + weights * values for N vectors of values, from `column` on; weights are where scores were.
template <bool PARTIAL, int N, bool WHOLE>
static void add_columns(Worker &w, const Tile &tile, int rows, int64_t column, int64_t start, int64_t end) {
    by_few(rows, [&](int row, int n) {
        const Real *weights = w.strips->scores + row * BLOCK_K, *shrink = w.shrink + row;
        Real *acc = w.acc + row * V_WIDE + column;
        const int64_t left = V_DIM - column;
#define ADD(M) \
    add_few<M, N, WHOLE, PARTIAL>(weights, BLOCK_K, tile.v, column, left, start, end, w.some, acc, V_WIDE, shrink)
        if (n == 1) return ADD(1);
        if (n == 2) return ADD(2);
        if (n == 3) return ADD(3);
        ADD(4);
#undef ADD
    });
}

template <bool PARTIAL> static void add_few_values(Worker &w, const Tile &tile, int rows) {
    const int BLOCKS = V_WIDE / LANES, REST = BLOCKS % MOST;
    int64_t start = w.from[0] * LANES, end = w.to[0] * LANES;
    if (start == end) return;
    if (end > tile.present) end = tile.present;
    const int last = (BLOCKS - REST) * LANES;
    const bool WHOLE = V_DIM == V_WIDE;
    for (int d = 0; d < last; d += MOST * LANES) {
        if (WHOLE || d < V_WIDE - MOST * LANES)
            add_columns<PARTIAL, MOST, true>(w, tile, rows, d, start, end);
        else
            add_columns<PARTIAL, MOST, WHOLE>(w, tile, rows, d, start, end);
    }
    if (REST) add_columns<PARTIAL, REST ? REST : 1, WHOLE>(w, tile, rows, last, start, end);
}

// Weights of a row and vector j of the keys, which are where scores were; zeros where no row sees the vector.
template <bool PARTIAL> INLINE Vec few_weights(const Worker &w, int row, int j) {
    const bool none = j >= VECTORS || (PARTIAL && (j < w.from[0] || j >= w.to[0] || !w.strips->open[j]));
    return none ? Vec{} : load<Vec>(w.strips->scores + row * BLOCK_K + j * LANES);
}

#if AMX && PAIRS
// -- up to 16 rows on a matrix unit -------------------------------------------------------------------------------

// Products of queries, which were turned once, and N vectors of keys from vector j on. Keys are the left operand, read
// where they are if the unit can read whole rows of them. The bits are those of `multiply_squares`, where queries are
// the left operand.
template <int N> static void multiply_in_place(Worker &w, const Tile &tile, int j) {
    const int64_t stride = tile.k.stride;
    const bool whole = !EIGHT && HEAD_DIM % DEPTH == 0 && stride % 2 == 0;
    const Operand *left[N];
    int64_t row[N];
    for (int n = 0; n < N; n++) {
        const int64_t present = tile.present - (j + n) * LANES;
        const Stored *keys = tile.k.row((j + n) * LANES);
        const bool there = whole && present >= LANES;
        Operand *copy = w.unread + n * 16 * STEPS;
        left[n] = there ? (const Operand *)keys : copy, row[n] = there ? stride / 2 : STEPS;
        for (int i = 0; i < LANES; i++) {
            for (int step = 0; step < STEPS && !there; step += LANES) {
                const int64_t width = i < present ? HEAD_DIM - step * PAIR : 0;
                const Stored *from = keys + i * stride + step * PAIR;
                Operand *to = copy + i * STEPS + step;
                store(to, width < DEPTH ? load_operands(from, width) : load_operands<true>(from, width));
            }
        }
    }
    square_of_zeros<0>();
    if (N > 1) square_of_zeros<1>(), square_of_zeros<2>(), square_of_zeros<3>();
    for (int step = 0; step < STEPS; step += 16) {
        load_square<7>(w.turned + step * 16, 16);
        load_square<4>(left[0] + step, row[0]), add_product<0, 4, 7>();
        if (N > 1) load_square<5>(left[N - 3] + step, row[N - 3]), add_product<1, 5, 7>();
        if (N > 1) load_square<6>(left[N - 2] + step, row[N - 2]), add_product<2, 6, 7>();
        if (N > 1) load_square<4>(left[N - 1] + step, row[N - 1]), add_product<3, 4, 7>();
    }
    Real *to = w.products;
    store_square<0>(to, 16);
    if (N > 1) store_square<1>(to + 256, 16), store_square<2>(to + 512, 16), store_square<3>(to + 768, 16);
}

// Scores of vectors lo to hi of the keys.
static void score_square(Worker &w, const Tile &tile, int rows, int lo, int hi) {
    for (int j = lo, n; j < hi; j += n) {
        n = hi - j >= 4 ? 4 : 1;
        n == 4 ? multiply_in_place<4>(w, tile, j) : multiply_in_place<1>(w, tile, j);
        for (int i = 0; i < n; i++) {
            const Stored *next = tile.k.row((j + i + n) * LANES);  // the unit waits for what is not in the first level
            for (int k = 0; k < LANES; k++) fetch_row<HEAD_DIM, 3>(next + k * tile.k.stride);
            Vec square[LANES];
            UNROLLED for (int k = 0; k < LANES; k++) square[k] = load<Vec>(w.products + i * 256 + k * 16);
            transpose(square);
            Real *to = w.strips->scores + (j + i) * LANES;
            for (int k = 0; k < rows; k++) store(to + k * BLOCK_K, square[k]);
        }
    }
}

// Values of 32 keys from `start` on, of N vectors of columns from `column` on, as squares. Those that are hidden are
// zeros. SPLIT: of 32 columns, the even ones come before the odd ones.
template <bool PARTIAL, int N>
INLINE void pack_square(const Worker &w, const Tile &tile, int64_t start, int64_t column, Operand *to) {
    static const Stored NONE[V_WIDE] = {};
    const auto row = [&](int64_t i) {
        return i < BLOCK_K && (!PARTIAL || (i < tile.present && w.some[i])) ? tile.v.row(i) : NONE;
    };
    for (int64_t i = start; i < start + 32; i += 2, to += 16) {
        const Stored *first = row(i) + column, *second = row(i + 1) + column;
        const Stored *ahead = tile.v.row(i + FETCH) + column, *behind = tile.v.row(i + FETCH + 1) + column;
        UNROLLED for (int n = 0, d = 0; n < N; n++, d += 16) {
            fetch(ahead, d), fetch(behind, d);
            if (!SPLIT) {
                const int64_t left = V_DIM - column - d;
                store(to + n * 256, (Raw)load_reals(first + d, left) >> 16 | (Raw)load_reals(second + d, left));
            } else if (n % 2 == 0) {
                const Operands a = load<Operands>(first + d), b = load<Operands>(second + d);
                store(to + n * 256, (a & 0xFFFF) | b << 16), store(to + n * 256 + 256, a >> 16 | (b & 0xFFFF0000));
            }
        }
    }
}

// acc += weights * values for vectors lo to hi of the keys, both even, and N vectors of columns.
template <bool PARTIAL, int N>
static void add_squares_of_columns(Worker &w, const Tile &tile, int lo, int hi, int column) {
    Real *acc = w.acc + column;
    load_square<0>(acc, V_WIDE);
    if (N > 1) load_square<1>(acc + 16, V_WIDE);
    if (N > 2) load_square<2>(acc + 32, V_WIDE), load_square<3>(acc + 48, V_WIDE);
    for (int j = lo; j < hi; j += 2) {
        Operand *values = w.values + j / 2 % 2 * N * 256;
        pack_square<PARTIAL, N>(w, tile, j * LANES, column, values);
        load_square<4>(w.weights + j / 2 * LANES, WEIGHTS);
        load_square<5>(values, 16), add_product<0, 4, 5>();
        if (N > 1) load_square<6>(values + 256, 16), add_product<1, 4, 6>();
        if (N > 2) load_square<7>(values + 512, 16), add_product<2, 4, 7>();
        if (N > 2) load_square<5>(values + 768, 16), add_product<3, 4, 5>();
    }
    store_square<0>(acc, V_WIDE);
    if (N > 1) store_square<1>(acc + 16, V_WIDE);
    if (N > 2) store_square<2>(acc + 32, V_WIDE), store_square<3>(acc + 48, V_WIDE);
}

// acc = acc * shrink + weights * values.
template <bool PARTIAL> static void add_square(Worker &w, const Tile &tile, int rows) {
    const int lo = w.from[0] & ~1, hi = round_up(w.to[0], 2);
    if (w.from[0] == w.to[0]) return;
    for (int i = 0; i < rows; i++) {
        for (int d = 0; d < V_WIDE && w.shrink[i] != 1; d += LANES) {
            Real *acc = w.acc + i * V_WIDE + d;
            store(acc, load<Vec>(acc) * w.shrink[i]);
        }
        const auto weights_at = [&](int j) { return few_weights<PARTIAL>(w, i, j); };
        Operand *to = w.weights + i * WEIGHTS;
        for (int j = lo; j < hi; j += 2) store_operands(to + j / 2 * LANES, weights_at(j), weights_at(j + 1));
    }
    int column = 0;
    for (; column + 64 <= V_WIDE; column += 64) add_squares_of_columns<PARTIAL, 4>(w, tile, lo, hi, column);
    for (; column + 32 <= V_WIDE; column += 32) add_squares_of_columns<PARTIAL, 2>(w, tile, lo, hi, column);
    if (column < V_WIDE) add_squares_of_columns<PARTIAL, 1>(w, tile, lo, hi, column);
}
#endif

#if BYTES
static void score_bytes(Worker &w, const Tile &tile, int rows, int lo, int hi);
#endif

// -- a tile of keys -----------------------------------------------------------------------------------------------

// Evaluates the mask for M rows from g on, pair by pair, and narrows lo and hi to the vectors with visible keys.
INLINE void look(Worker &w, Strip &strip, int g, int M, int rows, int &lo, int &hi) {
    const int here = rows - g < M ? rows - g : M;
    uint32_t some[VECTORS];
    for (int j = 0; j < VECTORS; j++) {  // the outer loop, so that the values of a column stay in registers
        Bits all = {}, seen = {};
        for (int i = 0; i < here; i++) {
            const int place = BY_HEAD ? w.place[g + i] : 0;
            const Column &column = w.columns[place * VECTORS + j];
            if (!REPEATED || i == 0 || !w.repeated[g + i])
                all |= seen = column.inside & visible(w.fixed[place], w.rows[g + i], column);
            strip.seen[i * VECTORS + j] = seen;
        }
        store(w.some + j * LANES, load<Bits>(w.some + j * LANES) | all);
        some[j] = truths(all);
    }
    for (int j = here * VECTORS; j < M * VECTORS; j++) strip.seen[j] = Bits{};
    int32_t *list = w.list + g / GROUP * (BLOCK_K / PACK);
    int steps = 0;
    for (int j = 0; j < VECTORS; j++) {
        strip.open[j] = some[j] || (PACK == 2 && (j ^ 1) < VECTORS && some[j ^ 1]);
        steps = listed(list, steps, j, some[j]);
    }
    while (lo < hi && !strip.open[lo]) lo++;
    while (lo < hi && !strip.open[hi - 1]) hi--;
    w.steps[g / GROUP] = steps_of(list, steps);
}

// Fills in the interval of keys that each of GROUP rows from g on sees in the tile, and narrows lo and hi to the
// vectors with visible keys.
INLINE void clip(Worker &w, Strip &strip, const Tile &tile, int g, int rows, int &lo, int &hi) {
    const int64_t all = tile.present < BLOCK_K ? tile.present : BLOCK_K;
    int64_t first = BLOCK_K, last = 0;
    for (int i = 0; i < GROUP; i++) {
        int64_t begin = 0, end = 0;
        const int place = BY_HEAD ? w.place[g + i] : 0;
        if (g + i < rows) interval(w.fixed[place], w.rows[g + i], w.columns[0].first, all, begin, end);
        strip.begin[i] = (Lane)begin, strip.end[i] = (Lane)end;
        if (begin == end) continue;
        first = begin < first ? begin : first, last = end > last ? end : last;
        w.edges[begin]++, w.edges[end]--;
    }
    lo = (int)(first / LANES), hi = (int)((last + LANES - 1) / LANES);
    if (lo > hi) lo = hi = 0;
    w.steps[g / GROUP] = {(int)(first / PACK), lo < hi ? (int)((last + PACK - 1) / PACK - first / PACK) : 0, nullptr};
}

// Products of M rows from g on and a tile of keys, and which of these the rows see. PARTIAL: not every position is
// visible. SMALL: the rows are few.
template <bool PARTIAL, bool SMALL>
static void multiply_keys(Worker &w, Strip &strip, const Tile &tile, int g, int M, int rows) {
    const bool CLIPPED = PARTIAL && INTERVAL && !SMALL, LOOKED = PARTIAL && !CLIPPED;
    const int present = (int)((tile.present < BLOCK_K ? tile.present : BLOCK_K) + PACK - 1) / PACK;
    int lo = 0, hi = VECTORS;
    if (CLIPPED) clip(w, strip, tile, g, rows, lo, hi);
    else if (PARTIAL) look(w, strip, g, M, rows, lo, hi);
    else w.steps[g / GROUP] = {0, present, nullptr};
    if (PACK == 2 && !SMALL) lo &= ~1;
    w.from[g] = lo, w.to[g] = hi;
#if BYTES
    if (SMALL && rows >= FEWEST && w.tame_queries) return score_bytes(w, tile, rows, lo, hi);
#endif
#if AMX && PAIRS
    if (SMALL && rows > FEW) return score_square(w, tile, rows, lo, hi);
#elif AMX
    for (int j = lo; j < hi && !SMALL && !tame_keys(w, tile); j++)
        if (!LOOKED || strip.open[j])
            dots_of_terms<HEAD_DIM>(w.query + g * QUERY, rows - g < M ? rows - g : M, tile.k, j * LANES,
                                    tile.present - j * LANES, strip.scores + j * LANES, BLOCK_K);
    if (!SMALL && !tame_keys(w, tile)) return;
#endif
    for (int j = lo, n; j < hi; j += n ? n : 1) {
        n = LOOKED ? opened(strip.open, j) : PANEL - j % PANEL < hi - j ? PANEL - j % PANEL : hi - j;
        if (!n) continue;
        if (SMALL) {
            n = 1;
            if (j * LANES < tile.present) score_few(w, tile, rows, j);  // open beside one that is seen, and absent
            continue;
        }
        multiply_some<GROUP, ZERO>(n, w.query + g * QUERY, QUERY, 1, tile.keys + vector_at(j, STEPS),
                                   stride_of_keys(STEPS), STEPS, strip.scores + j * LANES, BLOCK_K);
    }
}

// Weights of the same rows. meanwhile(i) is called before the weights of row i.
template <bool PARTIAL, bool SMALL, class Meanwhile>
INLINE void weigh_rows(Worker &w, Strip &strip, int g, int M, Real unit, Meanwhile meanwhile) {
    const bool CLIPPED = PARTIAL && INTERVAL && !SMALL, LOOKED = PARTIAL && !CLIPPED;
    const int lo = w.from[g], hi = w.to[g];
    if (lo == hi) return;
    Real *top = w.top + g, peaks[TOGETHER];
    for (int i = 0; i < M; i++) {
        const int place = BY_HEAD ? w.place[g + i] : 0;
        Vec peak = reals(LOWEST);
        const Bits begin = Bits{} + strip.begin[CLIPPED ? i : 0], end = Bits{} + strip.end[CLIPPED ? i : 0];
        Bits key = cast<Bits>(counting()) + (Lane)(lo * LANES);
        for (int j = lo; j < hi; j++) {
            if (LOOKED && !strip.open[j]) continue;
            Real *at = strip.scores + i * BLOCK_K + j * LANES;
            Vec score = scaled(load<Vec>(at), unit);
            score = score_of(w.fixed[place], w.rows[g + i], w.columns[place * VECTORS + j], score);
            if (CLIPPED) score = select((key >= begin) & (key < end), score, reals(-INF)), key += LANES;
            else if (LOOKED) score = select(strip.seen[i * VECTORS + j], score, reals(-INF));
            if (PAIR == 2 || SCORED || PARTIAL) store(at, score);
            peak = larger(score, peak);
        }
        peaks[i] = largest(peak);
    }
    for (int i = 0; i < M; i++) {
        const int row = g + i, place = BY_HEAD ? w.place[row] : 0;
        meanwhile(i);
        w.shrink[row] = 1;
        if (peaks[i] > top[i]) {
            w.shrink[row] = top[i] == LOWEST ? 0 : weight((top[i] - peaks[i]) * BASE);
            top[i] = peaks[i];
            w.total[row] *= w.shrink[row];
            for (int d = 0; d < V_WIDE && AMX && !SMALL; d += LANES) {
                Real *acc = w.acc + row * V_WIDE + d;
                store(acc, load<Vec>(acc) * w.shrink[row]);
            }
        }
        Vec total = w.total[row];
        const auto weight_at = [&](int j) __attribute__((always_inline)) {
            const Column &column = w.columns[place * VECTORS + j];
            Vec p = weight((load<Vec>(strip.scores + i * BLOCK_K + j * LANES) - top[i]) * BASE);
            total += p;
            if (DROPPED) p = select(kept(w.fixed[place], w.rows[row], column), p, Vec{});
            if (SCALED) {  // the scale of a hidden value may be NaN, and 0 times NaN is NaN
                p *= scale_of_value(w.fixed[place], w.rows[row], column);
                if (PARTIAL) p = select(strip.seen[i * VECTORS + j], p, Vec{});
            }
            return p;
        };
        const int ONE = SMALL ? 1 : PACK;  // vectors that are stored together
        for (int j = lo; j < hi; j += ONE) {
            Operand *to = w.weights + row * WEIGHTS + j / PACK * LANES * TERMS;
            if (LOOKED && !strip.open[j]) {
                for (int n = 0; n < TERMS && AMX && !SMALL; n++) store(to + n * LANES, Operands{});
                continue;
            }
            const Vec left = weight_at(j), right = ONE == 2 && j + 1 < hi ? weight_at(j + 1) : Vec{};
            if (SMALL) store(strip.scores + i * BLOCK_K + j * LANES, left);
            else store_terms(to, left, right);
        }
        w.total[row] = total;
    }
}

// Computes scores and weights of one tile of keys: GROUP rows at a time, or all rows at once where they are few.
template <bool PARTIAL, bool SMALL> static void weigh(Worker &w, const Tile &tile, int rows, Real unit) {
    const int M = SMALL ? rows : GROUP, LATER = SMALL ? 0 : (STRIPS - 1) * M;
    for (int g = 0; g < rows + LATER; g += M) {
        if (g < rows) multiply_keys<PARTIAL, SMALL>(w, w.strips[g / GROUP % STRIPS], tile, g, M, rows);
        if (g >= LATER)
            weigh_rows<PARTIAL, SMALL>(w, w.strips[(g - LATER) / GROUP % STRIPS], g - LATER,
                                       rows - (g - LATER) < M ? rows - (g - LATER) : M, unit, [](int) {});
    }
}

// Values that no row of the item sees may be anything, as in memory that was never written to, and 0 times NaN is NaN.
// Where such values are not finite, this copies the tile with zeros in their place.
static void hide(Worker &w, Tile &tile, int rows) {
    if (EIGHT == 1 || TERMS > 1) return;  // whole numbers are finite; vectors multiply numbers that are not tame
    for (int i = 0, n = 0; i < BLOCK_K && INTERVAL; i++) n += (int)w.edges[i], w.some[i] = n ? -1 : 0;
    int lo = VECTORS, hi = 0;
    for (int g = 0; g < rows; g += GROUP) {
        if (w.from[g] == w.to[g]) continue;
        lo = w.from[g] < lo ? w.from[g] : lo, hi = w.to[g] > hi ? w.to[g] : hi;
    }
    hi = round_up(hi * LANES, DEPTH) / LANES;  // the vectors that products read
    const int64_t end = hi * LANES < tile.present ? hi * LANES : tile.present;
    while (lo < hi && !any(~load<Bits>(w.some + lo * LANES))) lo++;
    if (lo >= hi) return;  // every key is visible
    if (tile.slot->values == UNKNOWN) {
        Bits odd = {};
        for (int64_t i = 0; i < BLOCK_K && i < tile.present; i++)
            for (int d = 0; d < V_DIM; d += LANES) {
                const Vec x = load_reals(tile.v.row(i) + d, V_DIM - d);
                odd |= x - x != 0;
            }
        tile.slot->values = any(odd) ? ODD : FINITE;
    }
    if (tile.slot->values == FINITE) return;
    for (int64_t i = 0; i < deep((int)end); i++) {
        Raw mask = (Raw)bits(w.some[i * PAIR] != 0);
#if PAIRS
        mask = mask >> 16 | (Raw)bits(w.some[i * PAIR + 1] != 0) << 16;
#endif
        for (int d = 0; d < V_WIDE; d += LANES)
            store(w.values + entry_at(i, d, V_STRIDE),
                  (Raw)load<Operands>(tile.values + entry_at(i, d, tile.v_stride)) & mask);
    }
    tile.values = w.values, tile.v_stride = V_STRIDE;
}

#if TERMS > 1
// acc += weights * values, position by position.
static void add_values_of_terms(Worker &w, const Tile &tile, int rows) {
    for (int i = 0; i < rows; i++) {
        Real sum[V_DIM] = {};
        const int64_t end = w.to[i / GROUP * GROUP] * LANES, last = end < tile.present ? end : tile.present;
        for (int64_t j = w.from[i / GROUP * GROUP] * LANES; j < last; j++) {
            const Real weight = left_number(w.weights + i * WEIGHTS, j);
            const Stored *value = tile.v.row(j);
            for (int d = 0; d < V_DIM && weight != 0; d++) sum[d] += weight * value[d];
        }
        for (int d = 0; d < V_DIM; d++) w.acc[i * V_WIDE + d] += sum[d];
    }
}
#endif

// acc = acc * shrink + weights * values
static void add_values(Worker &w, const Tile &tile, int rows) {
    by_panels<V_WIDE>([&](auto vectors, int column) {
        const Operand *values = tile.values + entry_at(0, column, tile.v_stride);
        for (int g = 0; g < rows; g += GROUP)
            multiply_steps<GROUP, decltype(vectors)::N, RESCALE>(
                w.steps[g / GROUP], w.weights + g * WEIGHTS, WEIGHTS, 1, values, tile.v_stride,
                w.acc + g * V_WIDE + column, V_WIDE, w.shrink + g);
    });
}

#if AMX
// `weigh` and `add_values` for a tile that is visible throughout. While the weights of GROUP rows are computed, the
// matrix unit multiplies the queries of the next GROUP rows by keys, and weights of the GROUP rows before by values.
static void weigh_and_add(Worker &w, const Tile &tile, int rows, Real unit) {
    typedef Product<BLOCK_K, STEPS, false> Keys;
    typedef Product<V_WIDE, V_STEPS, true> Values;
    for (int g = 0; g < rows + 2 * GROUP; g += GROUP) {
        const int now = g - GROUP, before = now - GROUP;
        const bool with_keys = g < rows, with_values = before >= 0;
        const Keys keys = {w.query + g * QUERY, QUERY, tile.keys, stride_of_keys(STEPS),
                           w.strips[g / GROUP % 2].scores, BLOCK_K};
        const Values values = {w.weights + before * WEIGHTS, WEIGHTS, tile.values, tile.v_stride,
                               w.acc + before * V_WIDE, V_WIDE};
        int done = 0;
        const auto multiply_until = [&](int end) {
            for (; done < end; done++) {
                if (done < Keys::PIECES && with_keys) keys.piece(done);
                if (done == Keys::PIECES && with_keys) keys.end(Keys::PARTS - 1);
                if (done >= Keys::PIECES && with_values) values.piece(done - Keys::PIECES);
            }
        };
        const int all = Keys::PIECES + Values::PIECES;
        if (now >= 0 && now < rows) {
            w.from[now] = 0, w.to[now] = VECTORS;
            weigh_rows<false, false>(w, w.strips[now / GROUP % 2], now, rows - now < GROUP ? rows - now : GROUP, unit,
                                     [&](int i) {
                                         if (tile.next) fetch_part(tile.next, w.tile, now + i, rows);
                                         multiply_until((i + 1) * all / GROUP);
                                     });
        }
        multiply_until(all);
        if (with_values) values.end(Values::PARTS - 1);
    }
}
#endif

// Whether values need no packing: their rows are whole vectors, one directly after another.
static bool in_place(const Call *call) {
#if HALF == 0 && EIGHT == 0 && !AMX
    return !MOVED && !PAGE && V_DIM == V_WIDE && call->v.row == V_DIM;
#else
    return false;
#endif
}

// -- work items ---------------------------------------------------------------------------------------------------

// Run `work` of a task with as many workers as there are threads and items for.
template <class Task> static void spread(const Call *call, Work work, Task &task, int64_t items) {
    task.workers = call->threads < items ? call->threads : items;
    if (call->parallel && task.workers > 1) {
        call->parallel(call->pool, work, &task, task.workers);
    } else {
        task.workers = 1;
        work(&task, 0);
    }
}

struct Task {
    const Call *call;
    const int32_t *order;  // [slices, rows] rows of tiles, longest first
    int64_t *next;         // [batch, kv_heads] items begun
    int64_t workers, slots, tile, failed;  // tile: Operands of a slot
};

// An item: `count` query rows from `start` on of each of the heads from `head` on, `heads` of one key head.
struct Item {
    const Call *call;
    int64_t batch, head, heads, start, count;
    int64_t kv_head() const { return head / (call->heads / call->kv_heads); }
    int rows() const { return (int)(heads * count); }
};

template <class T = Entry> static T *at_row(const Array &x, int64_t batch, int64_t head, int64_t row) {
    return (T *)x.data + batch * x.batch + head * x.head + row * x.row;
}

static Lines<const Entry> rows_of(const Array &x, int64_t batch, int64_t head, const int32_t *rows, int64_t start) {
    return {at_row<const Entry>(x, batch, head, MOVED ? 0 : start), x.row, rows_from(rows, start)};
}

// Queries, coordinates and sums of an item's rows.
static void begin(Worker &w, const Item &item) {
    const Call *call = item.call;
    const Int first = (Int)(call->q_origin[item.batch * call->q_origin_step] + item.start);
    const Real unit = unit_of(call);
    const bool few = item.rows() <= FEW;
    const int all = round_up(item.rows(), few ? 1 : item.rows() <= SQUARE ? 16 : GROUP);
    w.tame_queries = true;
    w.places = BY_HEAD && !alike_in_group(call) ? item.heads : 1;
    for (int n = 0; n < item.heads; n++) {
        w.fixed[n] = fixed_of(call, item.batch, item.head + n);
        const Lines<const Entry> q = rows_of(call->q, item.batch, item.head + n, call->q_rows, item.start);
        const int row = n * (int)item.count;
        const int64_t here = n == item.heads - 1 ? all - row : item.count;
        pack_queries(w.query + row * QUERY, q, item.count, here, unit, few);
#if BYTES
        for (int i = 0; i < item.count && item.rows() >= FEWEST && item.rows() <= SQUARE; i++)
            w.tame_queries &= take_query(w.whole, row + i, q.row(i), PAIR == 1 ? unit : 1);
#endif
        if (TERMS > 1 && !few) w.tame_queries &= tame(most_of<HEAD_DIM>(q, item.count) * magnitude(unit));
        for (int i = row; i < all; i++) {
            w.rows[i] = row_of(w.fixed[n], first + (i - row));
            w.place[i] = n < w.places ? n : 0;
            w.repeated[i] = i > row && alike(w.rows[i - 1], w.rows[i]);
        }
    }
    for (int i = 0; i < all; i++) w.total[i] = Vec{}, w.top[i] = LOWEST;
    for (int i = 0; i < all * V_WIDE; i++) w.acc[i] = 0;
#if AMX && PAIRS
    for (int step = 0; step < STEPS && all == 16; step += 16)
        turn_square(w.turned + step * 16, 16, w.query + step, QUERY);
#endif
}

static Tile tile_of(const Worker &w, const Item &item, int64_t number) {
    const Call *call = item.call;
    const int64_t head = item.kv_head(), start = number * BLOCK_K;
    const int32_t *rows = rows_from(call->k_rows, start);
    const int64_t present = call->kv_len - start;
    Tile tile = {{{}, call->k.row, rows}, {{}, call->v.row, rows}, present, nullptr, nullptr, V_STRIDE};
    for (int i = 0; i < (MOVED ? 1 : CHUNKS); i++) {
        int64_t batch = item.batch, row = MOVED ? 0 : start + i * CHUNK;
        if (PAGE) {
            batch = page_of(w.fixed[0], item.batch, row / PAGE), row %= PAGE;
            batch = batch < 0 ? 0 : batch < call->pages ? batch : call->pages - 1;
        }
        tile.k.at[i] = at_row<Stored>(call->k, batch, head, row);
        tile.v.at[i] = at_row<Stored>(call->v, batch, head, row);
    }
    return tile;
}

// Packs keys, and values where they need it, unless that was done before.
static void pack(Worker &w, const Item &item, Tile &tile, int64_t number) {
    const Call *call = item.call;
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K;
    const int64_t name = (item.batch * call->kv_heads + item.kv_head()) * tiles + number;
    const int64_t slot = w.slots == 1 ? 0 : number % w.slots;
    Operand *keys = w.tiles + slot * w.tile, *values = keys + KEYS;
    const bool here = in_place(call);
    tile.slot = w.slot + slot;
    if (tile.slot->tile != name) {
        *tile.slot = {name, UNKNOWN, true, true};
        pack_turned<HEAD_DIM, BESIDE>(keys, tile.k, tile.present, BLOCK_K);
        const int64_t own = tile.present < BLOCK_K ? tile.present : BLOCK_K;  // what is behind is of the next tile
        if (!here) pack_rows<V_DIM, V_STRIDE>(values, tile.v, own, V_KEYS);
        if (TERMS > 1) tile.slot->tame_keys = tame(most_of<HEAD_DIM>(tile.k, own));
        if (TERMS > 1) tile.slot->tame_values = tame(most_of<V_DIM>(tile.v, own));
    }
    const int64_t next = (number + 1) % w.slots;
    tile.next = w.slot[next].tile == name + 1 ? w.tiles + next * w.tile : nullptr;
    tile.keys = keys;
    tile.values = here ? (const Operand *)tile.v.at[0] : values;
}

// One tile of keys for the rows of an item.
template <bool PARTIAL> static void visit(Worker &w, const Item &item, int64_t number) {
    const Call *call = item.call;
    const int64_t start = number * BLOCK_K, first = call->k_origin[item.batch * call->k_origin_step] + start;
    Tile tile = tile_of(w, item, number);
    if (PARTIAL || POSITIONS)
        for (int n = 0; n < w.places; n++)
            for (int j = 0; j < VECTORS; j++)
                w.columns[n * VECTORS + j] = column_of(w.fixed[n], (Int)(first + j * LANES), tile.present - j * LANES);
    for (int n = 0; n < w.places && DISTANCES; n++)
        by_distance(w.fixed[n], w.rows[n * item.count + item.count - 1], (Int)first, (int)item.count,
                    w.distances + n * DISTANCES * SPAN, w.columns + n * VECTORS);
    if (PARTIAL)
        for (int i = 0; i < V_KEYS; i++) w.some[i] = w.edges[i < BLOCK_K ? i : 0] = 0;
    const Real unit = unit_of(call);
    if (SQUARE && item.rows() <= SQUARE) {
        weigh<PARTIAL, true>(w, tile, item.rows(), unit);
#if BYTES
        if (item.rows() >= FEWEST && add_bytes<PARTIAL>(w, tile, item.rows())) return;
#endif
#if AMX && PAIRS
        if (item.rows() > FEW) return add_square<PARTIAL>(w, tile, item.rows());
#endif
        return add_few_values<PARTIAL>(w, tile, item.rows());
    }
    pack(w, item, tile, number);
#if AMX
    const bool tame_values = tile.slot->tame_values;
    if (!PARTIAL && tame_keys(w, tile) && tame_values) return weigh_and_add(w, tile, item.rows(), unit);
#endif
    weigh<PARTIAL, false>(w, tile, item.rows(), unit);
#if TERMS > 1
    if (!tame_values) return add_values_of_terms(w, tile, item.rows());
#endif
    if (PARTIAL) hide(w, tile, item.rows());
    add_values(w, tile, item.rows());
}
static void visit(Worker &w, const Item &item, int64_t number, bool partial) {
    partial ? visit<true>(w, item, number) : visit<false>(w, item, number);
}

// Outputs of an item, from its sums.
static void finish(Worker &w, const Item &item) {
    const Call *call = item.call;
    for (int row = 0; row < item.rows(); row++) {
        const int64_t head = item.head + row / item.count, query = row_at(call->q_rows, item.start + row % item.count);
        const int64_t line = (item.batch * call->heads + head) * call->q_len + query;
        Entry *out = at_row(call->out, item.batch, head, query);
        const Real top = w.top[row];
        Real total = sum(w.total[row]), shrink = 1;
        Real peak = total == 0 ? -INF : top * NATURAL;  // natural logarithms from here on
        if (call->top) call->top[line] = total != total && top != INF ? NOT_A_NUMBER : peak;
        if (call->sinks) {
            const Real sink = call->sinks[head];
            const double above = (double)sink - (total == 0 ? (double)-INF : (double)top * EXACTLY_NATURAL);
            if (sink != -INF || peak > -INF) {
                shrink = total == 0 ? 0 : above > 0 ? exp((Real)-above) : 1;
                total = total * shrink + (above > 0 ? 1 : exp((Real)above));
                if (above > 0) peak = sink;
            }
        }
        if (call->lse) call->lse[line] = total == 0 ? -INF : peak + log(total);
        const Real share = total == 0 ? 0 : shrink / total;
        if (call->norm) {  // below 0: of few rows
            call->norm[2 * line] = top;
            call->norm[2 * line + 1] = item.rows() <= FEW ? -share : share;
        }
        const Real factor = share * (DROPPED ? survivors(w.fixed[head - item.head]) : 1);
        const Real *acc = w.acc + row * V_WIDE;
        Real joined[V_WIDE];
        if (SPLIT && item.rows() > FEW && item.rows() <= SQUARE) {
            for (int d = 0; d < V_WIDE; d++) joined[(d & ~31) | (d & 15) << 1 | (d >> 4 & 1)] = acc[d];
            acc = joined;
        }
        for (int d = 0; d < V_DIM; d++) out[d] = rounded(acc[d] * factor);
    }
}

static void attend(Worker &w, const Item &item) {
    const Call *call = item.call;
    begin(w, item);
    const int64_t slice = call->slice_of[item.batch * call->heads + item.head];
    const int64_t line = slice * call->rows + item.start / call->block_q;
    const int32_t *record = call->spans + line * call->records * 4;
    for (int32_t n = 0; n < call->count[line]; n++, record += 4)
        for (int32_t tile = record[0]; tile < record[3]; tile++)
            visit(w, item, tile, tile < record[1] || tile >= record[2]);
    finish(w, item);
}

// A worker takes the next item when it is free. Each begins at another key head, whose packed tiles it keeps, and then
// helps the others.
static void work(void *pointer, int64_t number) {
    Task &task = *(Task *)pointer;
    const Call *call = task.call;
    const int64_t all = call->batch * call->kv_heads, group = call->heads / call->kv_heads;
    [[maybe_unused]] const MatrixUnit unit;
    Worker *w = take(task.slots, task.tile);
    if (!w) {
        __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t n = 0; n < all; n++) {
        const int64_t at = (number * all / task.workers + n) % all, batch = at / call->kv_heads;
        for (;;) {
            const int64_t item = __atomic_fetch_add(&task.next[at], 1, __ATOMIC_RELAXED);
            if (item >= call->rows * group) break;
            const int64_t head = at % call->kv_heads * group + item % group;
            const int32_t *order = task.order + call->slice_of[batch * call->heads + head] * call->rows;
            const int64_t start = (int64_t)order[item / group] * call->block_q, left = call->q_len - start;
            attend(*w, {call, batch, head, 1, start, left < call->block_q ? left : call->block_q});
        }
    }
    give(w);
}

// Rows of each slice by the bits of the number of tiles they visit, most first; equal ones from the last to the first,
// so that neighbours find the tiles packed which they share.
static void sort_rows(const Call *call, int64_t slices, int32_t *order) {
    for (int64_t s = 0; s < slices; s++, order += call->rows) {
        int32_t places_of[66] = {};
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t row = call->rows - 1; row >= 0; row--) {
                int64_t visits = 0;
                for (int32_t n = 0; n < call->count[s * call->rows + row]; n++) {
                    const int32_t *record = call->spans + ((s * call->rows + row) * call->records + n) * 4;
                    visits += record[3] - record[0];
                }
                const int place = visits ? __builtin_clzll(visits) : 64;
                if (pass == 0) places_of[place + 1]++;
                else order[places_of[place]++] = (int32_t)row;
            }
            for (int i = 1; i < 66 && pass == 0; i++) places_of[i] += places_of[i - 1];
        }
    }
}

// 0: done; 1: no memory.
static int64_t all_rows(const Call *call, int64_t slices) {
    const int64_t all = call->batch * call->kv_heads, items = call->rows * call->batch * call->heads;
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K, tile = in_place(call) ? KEYS : TILE;
    const int64_t most = KEPT_BYTES / (tile * (int64_t)sizeof(Operand));
    int64_t *memory = (int64_t *)malloc(8 * (all + 1) + 4 * slices * call->rows);
    if (!memory) return 1;
    int32_t *order = (int32_t *)(memory + all);
    for (int64_t i = 0; i < all; i++) memory[i] = 0;
    sort_rows(call, slices, order);
    Task task = {call, order, memory, 0, tiles < most ? tiles : most > 0 ? most : 1, tile, 0};
    spread(call, work, task, items);
    free(memory);
    return task.failed;
}

// -- decoding -----------------------------------------------------------------------------------------------------
//
// A few queries over many keys: the query heads of one key head are rows of one item, and the tiles they visit are
// split into parts. Their number depends on the call alone, not on its threads, and the worker that ends last combines
// the parts of a row in order: the result repeats bit for bit.

const int64_t LEAST = BLOCK_K < 256 ? 256 / BLOCK_K : 1, MOST_TILES = BLOCK_K < 4096 ? 4096 / BLOCK_K : 1;  // of a part

struct Parts {
    const Call *call;
    int64_t heads, bundles;  // query heads of an item; items a key head needs
    int64_t tiles, count;    // visited tiles of a part; parts
    int64_t next, failed, workers;
    int64_t *done;           // [batch, kv_heads, bundles] parts that have ended
    Real *sums;              // [batch, kv_heads, bundles, count, rows, V_WIDE + 2]: acc, total, top
};

static int64_t visited(const Call *call, int64_t slice) {
    int64_t tiles = 0;
    for (int32_t n = 0; n < call->count[slice * call->rows]; n++) {
        const int32_t *record = call->spans + (slice * call->rows * call->records + n) * 4;
        tiles += record[3] - record[0];
    }
    return tiles;
}

static Item bundle_of(const Parts &parts, int64_t number) {
    const Call *call = parts.call;
    const int64_t group = call->heads / call->kv_heads, batch = number / (call->kv_heads * parts.bundles);
    const int64_t first = number % parts.bundles * parts.heads, left = group - first;
    const int64_t head = number / parts.bundles % call->kv_heads * group + first;
    return {call, batch, head, left < parts.heads ? left : parts.heads, 0, call->q_len};
}

static Real *sums_of(const Parts &parts, int64_t number, int64_t part) {
    return parts.sums + (number * parts.count + part) * parts.heads * parts.call->q_len * (V_WIDE + 2);
}

// The sums of an item's parts, one after the other.
static void combine(Worker &w, const Parts &parts, const Item &item, int64_t number) {
    for (int64_t part = 0; part < parts.count; part++)
        for (int row = 0; row < item.rows(); row++) {
            const Real *from = sums_of(parts, number, part) + row * (V_WIDE + 2);
            Real *acc = w.acc + row * V_WIDE;
            const Real total = from[V_WIDE], top = from[V_WIDE + 1], most = maximum(w.top[row], top);
            const Real mine = weight((w.top[row] - most) * BASE), its = weight((top - most) * BASE);
            for (int d = 0; d < V_WIDE; d++) acc[d] = acc[d] * mine + from[d] * its;
            w.total[row] *= mine;
            w.total[row][0] += total * its;
            w.top[row] = most;
        }
}

static void decode_part(Worker &w, Parts &parts, int64_t number, int64_t part) {
    const Call *call = parts.call;
    const Item item = bundle_of(parts, number);
    begin(w, item);
    const int64_t line = (int64_t)call->slice_of[item.batch * call->heads + item.head] * call->rows;
    const int32_t *record = call->spans + line * call->records * 4;
    int64_t seen = 0, first = part * parts.tiles, end = first + parts.tiles;
    for (int32_t n = 0; n < call->count[line]; n++, record += 4) {
        int64_t tile = record[0] + (first > seen ? first - seen : 0);
        for (; tile < record[3] && seen + (tile - record[0]) < end; tile++)
            visit(w, item, tile, tile < record[1] || tile >= record[2]);
        seen += record[3] - record[0];
    }
    if (parts.count == 1) return finish(w, item);
    Real *to = sums_of(parts, number, part);
    for (int row = 0; row < item.rows(); row++, to += V_WIDE + 2) {
        for (int d = 0; d < V_WIDE; d++) to[d] = w.acc[row * V_WIDE + d];
        to[V_WIDE] = sum(w.total[row]), to[V_WIDE + 1] = w.top[row];
    }
    if (__atomic_fetch_add(&parts.done[number], 1, __ATOMIC_ACQ_REL) + 1 < parts.count) return;
    for (int i = 0; i < item.rows(); i++) w.total[i] = Vec{}, w.top[i] = LOWEST;
    for (int i = 0; i < item.rows() * V_WIDE; i++) w.acc[i] = 0;
    combine(w, parts, item, number);
    finish(w, item);
}

static void decode_work(void *pointer, int64_t) {
    Parts &parts = *(Parts *)pointer;
    [[maybe_unused]] const MatrixUnit unit;
    Worker *w = take(1, TILE);
    if (!w) {
        __atomic_store_n(&parts.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const int64_t items = parts.call->batch * parts.call->kv_heads * parts.bundles * parts.count;
    for (int64_t n; (n = __atomic_fetch_add(&parts.next, 1, __ATOMIC_RELAXED)) < items;)
        decode_part(*w, parts, n / parts.count, n % parts.count);
    give(w);
}

// 0: done; 1: no memory.
static int64_t decode(const Call *call, int64_t slices, bool alike) {
    const int64_t group = alike ? call->heads / call->kv_heads : 1;
    const int64_t fit = ROWS / call->q_len < HEADS ? ROWS / call->q_len : HEADS;
    Parts parts = {call, group < fit ? group : fit, 0, 1, 1, 0, 0, 0, nullptr, nullptr};
    parts.bundles = (call->heads / call->kv_heads + parts.heads - 1) / parts.heads;
    int64_t most = 1;
    for (int64_t s = 0; s < slices; s++) most = visited(call, s) > most ? visited(call, s) : most;
    const int64_t items = call->batch * call->kv_heads * parts.bundles;
    parts.tiles = most * items / 256;  // enough items for many threads, none too small to be worth its sums
    parts.tiles = parts.tiles < LEAST ? LEAST : parts.tiles > MOST_TILES ? MOST_TILES : parts.tiles;
    parts.count = (most + parts.tiles - 1) / parts.tiles;
    const int64_t sums = parts.count > 1 ? items * parts.count * parts.heads * call->q_len * (V_WIDE + 2) : 0;
    parts.done = (int64_t *)malloc(8 * items + sums * sizeof(Real));
    if (!parts.done) return 1;
    parts.sums = (Real *)(parts.done + items);
    for (int64_t i = 0; i < items; i++) parts.done[i] = 0;
    spread(call, decode_work, parts, items * parts.count);
    free(parts.done);
    return parts.failed;
}

// A call with one row of tiles is split over keys; otherwise rows are the work items.
static int64_t forward(const Call *call) {
    const int64_t group = call->heads / call->kv_heads;
    int64_t slices = 0;
    bool alike = true;  // the heads of a group visit the same tiles
    for (int64_t i = 0; i < call->batch * call->heads; i++) {
        if (call->slice_of[i] >= slices) slices = call->slice_of[i] + 1;
        alike &= call->slice_of[i] == call->slice_of[i - i % group];
    }
    return call->rows == 1 ? decode(call, slices, alike) : all_rows(call, slices);
}

}  // namespace

extern "C" int64_t frisket_forward(const Call *call) { return forward(call); }
// An XLA call is turned into a Call by runtime/backends/cpp/bridge.cpp, which sets this where JAX is.
extern "C" { void *(*frisket_bridge)(void *frame, int64_t (*kernel)(const Call *)); }
extern "C" void *frisket_forward_xla(void *frame) { return frisket_bridge(frame, frisket_forward); }
