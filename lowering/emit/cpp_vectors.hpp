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

// c ? x : y; of scalars both are worked out.
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
const Real ROUNDER = 12582912.0f, BIAS = 127.0f;  // 1.5 * 2^23
#else
const int MANTISSA = 52;
const Real ROUNDER = 6755399441055744.0, BIAS = 1023.0;  // 1.5 * 2^52
#endif

// 2^f - 1 for |f| <= 1/2, relative error 1e-8 of 2^f (float), 1e-17 (double). Coefficients fitted for this file.
INLINE Vec power_less_one(Vec f) {
#if REAL_BYTES == 4
    Vec p = 1.54035082e-4f * f + 1.33907355e-3f;
    p = p * f + 9.61823751e-3f;
    p = p * f + 5.55035743e-2f;
    p = p * f + 2.40226498e-1f;
    p = p * f + 6.93147188e-1f;
#else
    Vec p = 5.911098933486411e-10 * f + 7.148697406637391e-09;
    p = p * f + 1.0169912224574216e-07;
    p = p * f + 1.3215008186636719e-06;
    p = p * f + 1.5252748888114321e-05;
    p = p * f + 0.00015403531275383375;
    p = p * f + 0.0013333558136459222;
    p = p * f + 0.009618129107002504;
    p = p * f + 0.05550410866483549;
    p = p * f + 0.24022650695911285;
    p = p * f + 0.6931471805599441;
#endif
    return p * f;
}

// 2^x for x <= 0, the weights of the softmax: 0 below 2^-126, NaN for NaN. Adding ROUNDER leaves round(x) in the
// low bits, which become the exponent of a factor; -ffast-math would cancel the addition.
INLINE Vec weight(Vec x) {
    x = x < -BIAS ? reals(-BIAS) : x;
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
// NaN is handed on.
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
    for (int i = 0; i < LANES; i++) put(found, i, at(table, (Int)index[i]...));
    return found;
}

// LANES entries of a row, some of whose indices are outside, or that are apart.
template <class T, int RANK>
APART auto clamped(const Table<T, RANK> &table, const T *row, int64_t first, int64_t step) {
    typename Wide<decltype(entry(T()))>::Type found;
    for (int i = 0; i < LANES; i++) put(found, i, entry(row[table.step(RANK - 1, first + i * step)]));
    return found;
}

// The same at LANES neighbours along the last axis, whose first index is given: upwards, or downwards.
template <bool UP, class T, int RANK, class... I> INLINE auto neighbours(const Table<T, RANK> &table, I... index) {
    typedef T Entries __attribute__((vector_size(LANES * sizeof(T))));
    const int64_t place[] = {(int64_t)index...};
    const int64_t first = place[RANK - 1], least = UP ? first : first - (LANES - 1);
    const T *row = table.data;
    for (int i = 0; i < RANK - 1; i++) row += table.step(i, place[i]);
    if (least < 0 || least + LANES > table.size[RANK - 1] || table.stride[RANK - 1] != 1)
        return clamped(table, row, first, UP ? 1 : -1);
    auto found = widened(load<Entries>(row + least));
    if (!UP) found = SHUFFLE(found, found, SWAPPED, LANES - 1);
    return found;
}
template <class T, int RANK, class... I> INLINE auto ahead(const Table<T, RANK> &table, I... index) {
    return neighbours<true>(table, index...);
}
template <class T, int RANK, class... I> INLINE auto behind(const Table<T, RANK> &table, I... index) {
    return neighbours<false>(table, index...);
}
