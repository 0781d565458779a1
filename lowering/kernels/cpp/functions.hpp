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
// With e = e^(-2|x|) - 1, tanh |x| = -e / (e + 2), which does not cancel near 0: error 3 ulp. From 0.55 on it is
// 1 - 2 (e + 1) / (e + 2), which rounds by what is left to 1: error 2 ulp, 1 from 1.5 on, where soft caps saturate.
INLINE Vec tanh(Vec x) {
    Vec size = x < 0 ? -x : x;
    Vec y = size > 20.0f ? reals(-57.7078f) : size * (-2 * LOG2E);
    Vec shifted = y + (ROUNDER + BIAS);
    Vec f = y - (shifted - (ROUNDER + BIAS));
    Vec scale = (Vec)((Raw)shifted << MANTISSA);
    Vec p = power_less_one(f), e = p * scale + (scale - 1.0f);
    const Bits large = size > 0.55f;
    Vec t = (large ? -2.0f * (p * scale + scale) : e) / (e + 2.0f);
    t = large ? t + 1.0f : -t;
    return x < 0 ? -t : t;
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
#if WEIGHTED && REAL_BYTES == 4
// 1 / x for x from 1 to 2^126: an estimate and a step of Newton's where CPUs have one. Error 1 ulp.
INLINE Vec reciprocal(Vec x) {
#if LANES == 16
    Vec y;
    asm("vrcp14ps %1, %0" : "=v"(y) : "v"(x));
#elif LANES == 8
    Vec y;
    asm("vrcpps %1, %0" : "=v"(y) : "v"(x));
#else
    const Vec y = 1 / x;
#endif
    return y * (1 - x * y) + y;
}
// The weight of each pair, in half the operations of the other. 2^n 2^f is e^-x; only the rounding of log2 e is in f,
// as the product is not rounded. A NaN stays.
INLINE Vec sigmoid(Vec x) {
#if LANES >= 8  // g++ compares and chooses
    asm("vminps %1, %2, %0" : "=v"(x) : "v"(x), "v"(reals(87.3f)));
    asm("vmaxps %1, %2, %0" : "=v"(x) : "v"(x), "v"(reals(-87.3f)));
#else
    x = x > 87.3f ? reals(87.3f) : x < -87.3f ? reals(-87.3f) : x;
#endif
    Vec shifted = x * -LOG2E + (ROUNDER + BIAS);
    Vec f = x * -LOG2E - (shifted - (ROUNDER + BIAS));
    Vec scale = (Vec)((Raw)shifted << MANTISSA);
    return reciprocal(power_less_one(f) * scale + (scale + 1.0f));
}
#endif
template <class T> INLINE T rsqrt(T x) { return 1 / sqrt(x); }

INLINE Real power(Real x, Real y) { return REAL_BYTES == 4 ? __builtin_powf(x, y) : __builtin_pow(x, y); }
APART Vec power(Vec x, Vec y) {
#if WEIGHTED && REAL_BYTES == 4
    // One base, as that of a decay: 2^n 2^f is 2^(y log2 x), whose whole part n takes digits that only a double has.
    if (x[0] > 1e-37f && x[0] < INF && !any(~((x == x[0]) & (y < 1e9f) & (y > -1e9f)))) {
        const double base = __builtin_log2(x[0]);
        Real number[LANES], whole[LANES], rest[LANES];
        store(number, y);
        for (int i = 0; i < LANES; i++) {
            double z = number[i] * base;
            z = z < -126.0 ? -126.0 : z > 128.0 ? 128.0 : z;
            const double n = z + 6755399441055744.0 - 6755399441055744.0;
            whole[i] = (Real)n, rest[i] = (Real)(z - n);
        }
        return exp2(load<Vec>(whole)) * (1.0f + power_less_one(load<Vec>(rest)));
    }
#endif
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
INLINE Int select(bool c, Int x, Int y) { return c ? x : y; }  // a literal is an int, whatever Int is
INLINE Ints minimum(Ints x, Ints y) { return x < y ? x : y; }
INLINE Ints maximum(Ints x, Ints y) { return x > y ? x : y; }
