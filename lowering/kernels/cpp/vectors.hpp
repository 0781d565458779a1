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
template <int STEP = 1> INLINE Real largest(Vec x) {
    if constexpr (STEP < LANES) return largest<STEP * 2>(larger(x, SHUFFLE(x, x, SWAPPED, STEP)));
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

// Of 8 or 16 lanes: those that are unpacked from groups of n numbers, of each four lanes apart; of 8 lanes, one half of
// each vector.
#define UNPACK_LOW(i, n) ((i) / 4 * 4 + (i) % 4 / (2 * (n)) * (n) + (i) % (n) + ((i) / (n) % 2 ? LANES : 0))
#define UNPACK_HIGH(i, n) (UNPACK_LOW(i, n) + 2)
#define FIRST_HALVES(i, n) ((i) % 4 + ((i) / 4 ? LANES : 0))
#define LAST_HALVES(i, n) (FIRST_HALVES(i, n) + 4)

#if LANES >= 8
// The 4 x 4 squares of four vectors, turned.
INLINE void transpose_fours(Vec *x) {
    Vec y[4];
    UNROLLED for (int i = 0; i < 4; i += 2) {
        y[i] = SHUFFLE(x[i], x[i + 1], UNPACK_LOW, 1);
        y[i + 1] = SHUFFLE(x[i], x[i + 1], UNPACK_HIGH, 1);
    }
    UNROLLED for (int i = 0; i < 2; i++) {
        x[2 * i] = SHUFFLE(y[i], y[i + 2], UNPACK_LOW, 2);
        x[2 * i + 1] = SHUFFLE(y[i], y[i + 2], UNPACK_HIGH, 2);
    }
}
#endif

// A LANES x LANES square, turned: for each power of two, swap the blocks beside the diagonal.
template <int STEP = 1> INLINE void transpose(Vec *x) {
#if LANES == 8 && defined(__AVX2__)  // three rounds of eight instructions, half as many as of exchanges of blocks
    transpose_fours(x), transpose_fours(x + 4);
    UNROLLED for (int i = 0; i < 4; i++) {
        const Vec left = x[i], right = x[i + 4];
        x[i] = SHUFFLE(left, right, FIRST_HALVES, 4), x[i + 4] = SHUFFLE(left, right, LAST_HALVES, 4);
    }
    return;
#endif
    if constexpr (STEP < LANES) {
        for (int i = 0; i < LANES; i++) {
            if (i & STEP) continue;
            Vec left = x[i], right = x[i + STEP];
            x[i] = SHUFFLE(left, right, FROM_LEFT, STEP);
            x[i + STEP] = SHUFFLE(left, right, FROM_RIGHT, STEP);
        }
        transpose<STEP * 2>(x);
    }
}
