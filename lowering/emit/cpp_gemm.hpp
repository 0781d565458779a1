// -- products of small matrices -----------------------------------------------------------------------------------
//
// Declared before: Entry (an entry of q, k, v), HALF (0: Entry is Real, 1: bfloat16, 2: float16).
//
// multiply<M, N>: C[M, N * LANES] = A[M, steps] B[steps, N * LANES], in M * N accumulators.
// A is read number by number at a + row * a_row + step * a_step, so a transposed A costs nothing: S = Q K^T and
// O = P V take a_step = 1, dV = P^T dO and dK = dS^T Q take a_row = 1 and a_step = the width of P.
// B is read a vector at a time at b + step * b_step: K as packed by `pack_turned` (a column of keys after the
// other) for S and dP, rows as they are (or as packed by `pack_rows`) for O, dV, dK, dQ.
// What is multiplied is an Operand: a Real, or where the CPU multiplies pairs of bfloat16 (PAIR = 2), two
// neighbours along the steps in one word.

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

const int MOST = REGISTERS == 32 ? 4 : 2;  // vectors of B held at once
const int GROUP = 6;                       // rows of A whose accumulators fit beside them
constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
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

template <int M, int N, Start START>
static void multiply(const Operand *a, int64_t a_row, int64_t a_step, const Operand *b, int64_t b_step, int64_t steps,
                     Real *c, int64_t c_row, const Real *factor = nullptr) {
    Vec sum[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            sum[i][j] = Vec{};
            if (START != ZERO) sum[i][j] = load<Vec>(c + i * c_row + j * LANES);
            if (START == RESCALE) sum[i][j] *= factor[i];
        }
    for (; steps > 0; steps--, a += a_step, b += b_step) {
        Operands right[N];
        for (int j = 0; j < N; j++) right[j] = load<Operands>(b + j * LANES);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) sum[i][j] = plus_product(sum[i][j], a[i * a_row], right[j]);
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store(c + i * c_row + j * LANES, sum[i][j]);
}

// The same for `vectors` of them, a number known at run time from 1 to MOST.
template <int M, Start START>
INLINE void multiply_some(int vectors, const Operand *a, int64_t a_row, int64_t a_step, const Operand *b,
                          int64_t b_step, int64_t steps, Real *c, int64_t c_row, const Real *factor = nullptr) {
    if (vectors == MOST) return multiply<M, MOST, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
    if (vectors == 1) return multiply<M, 1, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
#if REGISTERS == 32
    if (vectors == 2) return multiply<M, 2, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
    if (vectors == 3) return multiply<M, 3, START>(a, a_row, a_step, b, b_step, steps, c, c_row, factor);
#endif
}

// -- numbers of 16 bits -------------------------------------------------------------------------------------------

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

#if PAIRS
// LANES neighbours, and the LANES after them, as bfloat16 in one register.
INLINE void store_operands(Operand *to, Vec left, Vec right) {
    Operands both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(left), "v"(right));
    store(to, both);
}
#endif

// LANES Operands of a row that has `left` entries from here on; zeros behind them.
INLINE Operands load_operands(const Entry *from, int64_t left) {
    Operands x = {};
#if PAIRS
    if (left >= 2 * LANES) return load<Operands>(from);
    for (int i = 0; i < LANES && 2 * i < left; i++)
        x[i] = from[2 * i] | (2 * i + 1 < left ? (uint32_t)from[2 * i + 1] << 16 : 0);
#else
#if HALF == 0
    if (left >= LANES) return load<Operands>(from);
#endif
    if (left > LANES) left = LANES;
    for (int i = 0; i < left; i++) x[i] = real(from[i]);
#endif
    return x;
}

// LANES entries of a row that has `left` from here on, as Reals.
INLINE Vec load_reals(const Entry *from, int64_t left) {
#if HALF == 0
    if (left >= LANES) return load<Vec>(from);
#elif HALF == 1
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
    if (left >= LANES) return (Vec)(cast<Words>(load<Halves>(from)) << 16);
#endif
    Vec x = {};
    for (int i = 0; i < LANES && i < left; i++) x[i] = real(from[i]);
    return x;
}

// -- packing ------------------------------------------------------------------------------------------------------

// Rows of DIM entries, in memory with a stride, as Operands [all, WIDE]: the A of a product. Rows from `rows` on and
// entries from DIM on are 0. Pairs are not multiplied by `factor`, which would round them again.
template <int DIM, int WIDE = round_up(DIM, PAIR) / PAIR>
static void pack_left(Operand *to, const Entry *from, int64_t stride, int64_t rows, int64_t all, Real factor) {
    for (int64_t i = 0; i < all; i++, from += stride, to += WIDE)
        for (int d = 0; d < WIDE * PAIR; d += PAIR) {
#if PAIRS
            uint32_t left = i < rows && d < DIM ? from[d] : 0, right = i < rows && d + 1 < DIM ? from[d + 1] : 0;
            to[d / 2] = left | right << 16;
#else
            to[d] = i < rows && d < DIM ? real(from[d]) * factor : 0;
#endif
        }
}

const int AHEAD = 128;  // rows that are fetched before they are needed: transposing is quick, memory far away

// `keys` rows of DIM entries, turned: for each panel of N * LANES of them [DIM / PAIR, N * LANES].
// Rows from `present` on are 0.
template <int DIM, int N>
static void pack_turned(Operand *to, const Entry *from, int64_t stride, int64_t present, int64_t keys) {
    const int STEPS = round_up(DIM, PAIR) / PAIR;
    for (int64_t start = 0; start < keys; start += N * LANES, to += STEPS * N * LANES)
        for (int64_t block = 0; block < N; block++)
            for (int step = 0; step < STEPS; step += LANES) {
                Vec square[LANES];
                for (int i = 0; i < LANES; i++) {
                    int64_t key = start + block * LANES + i;
                    square[i] = Vec{};
                    __builtin_prefetch(from + (key + AHEAD) * stride + step * PAIR);
                    if (key < present)
                        square[i] = (Vec)load_operands(from + key * stride + step * PAIR, DIM - step * PAIR);
                }
                transpose(square);
                for (int i = 0; i < LANES && step + i < STEPS; i++)
                    store(to + (step + i) * N * LANES + block * LANES, square[i]);
            }
}

// `keys` rows of DIM entries as they are, [keys / PAIR, WIDE] with WIDE = DIM rounded up to LANES.
template <int DIM>
static void pack_rows(Operand *to, const Entry *from, int64_t stride, int64_t present, int64_t keys) {
    const int WIDE = round_up(DIM, LANES);
    for (int64_t i = 0; i < keys; i += PAIR, to += WIDE)
        for (int d = 0; d < WIDE; d += LANES) {
            const Entry *at = from + i * stride + d;
            const int64_t left = DIM - d;
#if PAIRS
            Raw first = {}, second = {};  // a bfloat16 is the upper half of a float
            if (i < present) first = (Raw)load_reals(at, left) >> 16;
            if (i + 1 < present) second = (Raw)load_reals(at + stride, left);
            store(to + d, first | second);
#else
            store(to + d, i < present ? load_reals(at, left) : Vec{});
#endif
        }
}

// -- one row of queries, without packing ----------------------------------------------------------------------------

// Lane i of x[0] becomes the sum of x[i]: neighbours are added while halves of them are still apart.
template <int STEP> INLINE void add_turned(Vec *x) {
#if LANES > 1
    for (int i = 0; i < LANES / STEP; i += 2) {
        Vec left = x[i], right = x[i + 1];
        x[i / 2] = SHUFFLE(left, right, FROM_LEFT, STEP) + SHUFFLE(left, right, FROM_RIGHT, STEP);
    }
#endif
}

// scores[LANES] of a query of DIM entries, padded with zeros to whole vectors, and of LANES keys, `present` of them.
template <int DIM> INLINE Vec dots(const Operand *query, const Entry *keys, int64_t stride, int64_t present) {
    Vec sums[LANES];
    for (int i = 0; i < LANES; i++) {
        sums[i] = Vec{};
        if (i >= present) continue;
        for (int d = 0; d < DIM; d += LANES * PAIR)
            sums[i] = plus_product(sums[i], load<Operands>(query + d / PAIR),
                                   load_operands(keys + i * stride + d, DIM - d));
    }
    add_turned<1>(sums);
#if LANES > 2
    add_turned<2>(sums);
#endif
#if LANES > 4
    add_turned<4>(sums);
#endif
#if LANES > 8
    add_turned<8>(sums);
#endif
    return sums[0];
}

// c = c * factor + weights * values, row by row of N * LANES entries, of which the last row has `left`.
template <int N>
static void add_rows(const Real *weights, const Entry *values, int64_t stride, int64_t count, int64_t left, Real *c,
                     Real factor) {
    Vec sum[N];
    for (int j = 0; j < N; j++) sum[j] = load<Vec>(c + j * LANES) * factor;
    for (; count > 0; count--, weights++, values += stride)
        for (int j = 0; j < N; j++) sum[j] += *weights * load_reals(values + j * LANES, left - j * LANES);
    for (int j = 0; j < N; j++) store(c + j * LANES, sum[j]);
}
