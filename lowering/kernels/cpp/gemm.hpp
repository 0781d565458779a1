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
#if defined(FRISKET_AMX) && EIGHT == 1 && REGISTER_BYTES == 64 && REAL_BYTES == 4 && !INVARIANT && \
    (__has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>))
#define BYTES 1
#else
#define BYTES 0
#endif
const int PACK = AMX ? 2 : PAIR;
const int DEPTH = AMX ? 32 : PAIR;  // zeros fill the steps of a product up to a multiple of so many numbers
const int MOST = REGISTERS == 32 ? 4 : 2;  // vectors of B held at once
const int GROUP = AMX ? 32 : 6;            // rows of A whose accumulators fit beside them
// INVARIANT: a product of queries and keys is the sum of CLASSES sums. Sum n has step n and each CLASSES-th step after
// it. With a few queries, so many neighbours in a key then stay neighbours in a register.
const int CLASSES = !INVARIANT || AMX ? 1 : LANES < 4 ? LANES : 4;
// Whether a few queries read two bfloat16 of a key as one lane. Of eight numbers in a row of DIM, those in the lower
// halves of such lanes are then packed before those in the upper halves.
template <int DIM> constexpr bool by_two() {
    return INVARIANT && HALF == 1 && !PAIRS && !EIGHT && CLASSES == 4 && DIM % (LANES < 8 ? 8 : LANES) == 0;
}
template <int DIM> constexpr int place_of(int d) { return by_two<DIM>() ? d / 8 * 8 + d % 2 * 4 + d % 8 / 2 : d; }
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
template <Start HOW> struct From {
    static const Start START = HOW;
};

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

// A number of rows or vectors that the compiler knows.
template <int COUNT> struct Count {
    static const int N = COUNT;
};
// Calls run(Count<N>, column) for each panel of N vectors of WIDE columns. 5 vectors are 3 and 2: one alone has so few
// sums that each step waits for the one before.
template <int WIDE, class Run> INLINE void by_panels(Run run) {
    const int BLOCKS = WIDE / LANES, REST = BLOCKS % MOST;
    const int SPLIT = MOST == 4 && BLOCKS > MOST && REST == 1 ? 3 : 0;
    const int LAST = SPLIT ? 2 : REST;
    int column = 0;
    for (; column < (BLOCKS - SPLIT - LAST) * LANES; column += MOST * LANES) run(Count<MOST>(), column);
    if (SPLIT) run(Count<(SPLIT ? SPLIT : 1)>(), column);
    if (LAST) run(Count<(LAST ? LAST : 1)>(), column + SPLIT * LANES);
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
        for (int d = 0; d < WIDE; d++) to[place_of<DIM>(d)] = i < rows && d < DIM ? real(from[d]) * factor : 0;
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
                    if (step + i < STEPS) store(to + place_of<DIM>(step + i) * N * LANES + block * LANES, square[i]);
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

#if INVARIANT && !AMX
const bool SPREAD_FETCHES = LANES == 16;           // fewer rows take less time to fetch than to count
const int BLOCKS = LANES / CLASSES;                // of a register: CLASSES Operands each, of as many keys
const int PIECE = BLOCKS > 1 ? LANES / 2 : LANES;  // Operands of a key that are loaded at once

#if LANES >= 8
#if REGISTER_BYTES == 32
#define IN_BLOCKS "vbroadcastf128 %1, %0"
#define INSERTED "vinsertf128 $1, %2, %t1, %0"
#elif LANES == 16
#define IN_BLOCKS "vbroadcastf32x4 %1, %0"
#define INSERTED "vinsertf64x4 $1, %2, %g1, %0"
#else
#define IN_BLOCKS "vbroadcastf64x4 %1, %0"
#define INSERTED "vinsertf64x4 $1, %2, %g1, %0"
#endif
// CLASSES Operands, in each block of a register.
INLINE Operands in_blocks(const Operand *from) {
    typedef Operand Block __attribute__((vector_size(CLASSES * sizeof(Operand)), aligned(1)));
    Operands x;
    asm(IN_BLOCKS : "=v"(x) : "m"(*(const Block *)from));
    return x;
}
// A piece of one key and a piece of another one.
INLINE Vec joined(const Operand *left, const Operand *right) {
    typedef Operand Piece __attribute__((vector_size(PIECE * sizeof(Operand))));
    typedef Operand Anywhere __attribute__((vector_size(PIECE * sizeof(Operand)), aligned(1)));
    Vec x;
    asm(INSERTED : "=v"(x) : "v"(load<Piece>(left)), "m"(*(const Anywhere *)right));
    return x;
}
// Lanes of the first and the third, and of the second and the last block of two vectors.
#define FIRST_BLOCKS(i, n) ((i) / 4 % 2 * 8 + (i) % 4 + (i) / 8 * LANES)
#define LAST_BLOCKS(i, n) (FIRST_BLOCKS(i, n) + 4)
#else
INLINE Operands in_blocks(const Operand *from) { return load<Operands>(from); }
#endif

// A piece of each of BLOCKS keys, which are CLASSES apart: block n of a vector is that of key n.
INLINE void load_blocks(Vec *to, const Operand *const *key, int64_t d) {
#if LANES == 16
    const Vec left = joined(key[0] + d, key[CLASSES] + d), right = joined(key[2 * CLASSES] + d, key[3 * CLASSES] + d);
    to[0] = SHUFFLE(left, right, FIRST_BLOCKS, 4), to[1] = SHUFFLE(left, right, LAST_BLOCKS, 4);
#elif LANES == 8
    to[0] = joined(key[0] + d, key[CLASSES] + d);
#else
    to[0] = load<Vec>(key[0] + d);
#endif
}

// scores[M, LANES] of M queries and LANES keys like `dots`, with the bits of `multiply_queries`. Lane i of a block
// adds up class i. The rows `ahead` are fetched one after the other, as memory has them,
// between the products if SPREAD_FETCHES: at once they are too many for the buffers of a core.
template <int M, int DIM, class T>
static void dots_of_classes(const Operand *query, int64_t q_row, const Operand *const *key, const T *ahead,
                            int64_t stride, Real *scores, int64_t row) {
    const int ONCE = M > 2 && REGISTERS == 16 ? (CLASSES + 1) / 2 : CLASSES, PARTS = BLOCKS > 1 ? BLOCKS / 2 : 1;
    const int EACH = by_two<DIM>() ? 2 : 1;  // numbers of a lane
    const int WIDE = round_up(deep(DIM) / EACH, PIECE);
    int fetched = 0;
    Vec sums[M][CLASSES];
    for (int first = 0; first < CLASSES; first += ONCE) {
        Vec sum[M][ONCE];
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int i = 0; i < ONCE; i++) sum[m][i] = settled(Vec{});
        for (int d = 0; d < WIDE; d += PIECE) {
            Vec x[ONCE][PARTS];
            UNROLLED for (int i = 0; i < ONCE; i++) load_blocks(x[i], key + first + i, d);
            for (; SPREAD_FETCHES && fetched < LANES * (first + ONCE * (d + PIECE) / WIDE) / CLASSES; fetched++)
                fetch_row<DIM, 2>(ahead + fetched * stride);
            UNROLLED for (int part = 0; part < PARTS; part++)
                UNROLLED for (int n = 0; n < EACH; n++)
                    UNROLLED for (int m = 0; m < M; m++) {
                        const Operands y = in_blocks(query + m * q_row + (d + part * CLASSES) * EACH + n * CLASSES);
                        UNROLLED for (int i = 0; i < ONCE; i++) {
                            const Raw both = (Raw)x[i][part];
                            const Raw number = EACH == 1 ? both : n ? both & 0xFFFF0000 : both << 16;
                            sum[m][i] = plus_product(sum[m][i], y, (Operands)number);
                        }
                    }
        }
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int i = 0; i < ONCE; i++) sums[m][first + i] = sum[m][i];
    }
    UNROLLED for (int m = 0; m < M; m++) {
#if LANES >= 8
        transpose_fours(sums[m]);
#else
        transpose(sums[m]);
#endif
        UNROLLED for (int i = 1; i < CLASSES; i++) sums[m][0] += sums[m][i];
        store(scores + m * row, sums[m][0]);
    }
}
#endif

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
        UNROLLED for (int j = 0; j < N; j++)
            sum[m][j] = INVARIANT ? settled(Vec{}) : load<Vec>(c + m * c_row + j * LANES) * factor[m];
    for (int64_t i = start; i < end; i++) {
        if (SOME && !some[i]) continue;
        const auto *from = values.there(i) + column, *ahead = values.there(i + FETCH) + column;
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
        UNROLLED for (int j = 0; j < N; j++) {
            Real *to = c + m * c_row + j * LANES;
            if (INVARIANT) sum[m][j] += load<Vec>(to) * factor[m];  // last, as in `multiply`
            store(to, sum[m][j]);
        }
}

#if INVARIANT && PAIRS && !AMX
// Words of two vectors by turns: of each four lanes the first and the last two, apart from the others.
INLINE Vec woven_low(Operands even, Operands odd) {
    Vec x;
    asm("vpunpcklwd %2, %1, %0" : "=v"(x) : "v"(even), "v"(odd));
    return x;
}
INLINE Vec woven_high(Operands even, Operands odd) {
    Vec x;
    asm("vpunpckhwd %2, %1, %0" : "=v"(x) : "v"(even), "v"(odd));
    return x;
}
// Fours of lanes of two vectors by turns: from the first half of each, and from the last.
#define FIRST_FOURS(i, n) ((i) / 8 * 4 + (i) % 4 + ((i) / 4 % 2 ? LANES : 0))
#define LAST_FOURS(i, n) (FIRST_FOURS(i, n) + LANES / 2)

// `add_few` with the bits of `multiply`: of pairs of weights and pairs of values, N times 32 entries of a row.
template <int M, int N, bool WHOLE, bool SOME, class From>
static void add_few_pairs(const Operand *weights, int64_t w_row, const From &values, int64_t column, int64_t left,
                          int64_t start, int64_t end, const Lane *some, Real *c, int64_t c_row, const Real *factor) {
    Vec sum[M][2 * N];
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int j = 0; j < 2 * N; j++) sum[m][j] = settled(Vec{});
    for (int64_t i = start; i < end; i += 2) {
        const bool even = !SOME || some[i], odd = i + 1 < end && (!SOME || some[i + 1]);
        if (SOME && !even && !odd) continue;
        const auto *first = values.there(even ? i : i + 1) + column, *second = values.there(odd ? i + 1 : i) + column;
        const auto *ahead = values.there(i + FETCH) + column, *behind = values.there(i + FETCH + 1) + column;
        Vec x[2 * N];
        UNROLLED for (int j = 0; j < N; j++) {
            const int d = j * 2 * LANES;
            Operands a = load_operands<WHOLE>(first + d, left - d), b = load_operands<WHOLE>(second + d, left - d);
            if (SOME && !even) a = Operands{};
            if (!odd) b = Operands{};
            x[2 * j] = woven_low(a, b), x[2 * j + 1] = woven_high(a, b);
            fetch(ahead, d), fetch(behind, d);
        }
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int j = 0; j < 2 * N; j++)
                sum[m][j] = plus_product(sum[m][j], weights[m * w_row + i / 2], (Operands)x[j]);
    }
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int j = 0; j < 2 * N; j += 2) {
            const Vec low = sum[m][j], high = sum[m][j + 1];
            sum[m][j] = SHUFFLE(low, high, FIRST_FOURS, 4), sum[m][j + 1] = SHUFFLE(low, high, LAST_FOURS, 4);
            Real *to = c + m * c_row + j * LANES;
            for (int n = j; n < j + 2 && (n == j || WHOLE || n * LANES < left); n++, to += LANES)
                store(to, sum[m][n] + load<Vec>(to) * factor[m]);
        }
}
#endif
