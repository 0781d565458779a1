// -- scores, the same to the last bit in both kernels --------------------------------------------------------------
//
// The backward computes scores again and subtracts the largest of each row, which the forward has left in `Call.norm`.
// The last bit of a score of a million changes its weight by a factor of e^0.06. So queries are packed and multiplied
// in one way and order, and no operation here is fused with an operation outside.

const int STEPS = deep(HEAD_DIM);                      // of the product of queries and keys
const int QUERY = round_up(STEPS, LANES);              // Operands in a row of queries
const int VECTORS = BLOCK_K / LANES;
static_assert(BLOCK_K % LANES == 0, "a tile of keys is whole vectors");
const int PANEL = panel(VECTORS);                      // vectors of keys that are multiplied together
const int BESIDE = AMX ? 1 : PANEL;                    // vectors of keys in a row of packed keys

// The largest weight of a row from which on dP - delta cancels: delta is dout times an `out` that is not rounded.
const Real PEAKED = 0.125;

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

// Opens the vectors of keys of which some row sees a lane, and lists the steps of a product that rows need.
INLINE Steps open_vectors(const uint32_t *some, bool *open, int32_t *list) {
    int count = 0;
    for (int j = 0; j < VECTORS; j++) {
        open[j] = some[j] || (PACK == 2 && (j ^ 1) < VECTORS && some[j ^ 1]);
        count = listed(list, count, j, some[j]);
    }
    return steps_of(list, count);
}

// Tabulates functions of the distance for `rows` queries, the last of which is given, and a tile of keys from `first`
// on: entry i is that of the last query and key first + i.
static void by_distance(const Fixed &fixed, const Row &last, Int first, int rows, Real *to, Column *columns) {
    for (int i = 0; i < BLOCK_K + rows; i += LANES)
        tabulate(fixed, last, column_of(fixed, (Int)(first + i), LANES), to + i);
    for (int i = 0; i < BLOCK_K; i += LANES) columns[i / LANES].distances = to + i + last.q;
}

// Calls run(Count<N>, row) for the rows of an item by twos, threes and fours, as even as can be.
template <class Run> INLINE void by_few(int rows, Run run) {
    for (int done = 0, n; done < rows; done += n) {
        const int left = rows - done, parts = (left + 3) / 4;
        n = (left + parts - 1) / parts;
        if (n == 1) run(Count<1>(), done);
        else if (n == 2) run(Count<2>(), done);
        else if (n == 3) run(Count<3>(), done);
        else run(Count<4>(), done);
    }
}

// Products of GROUP rows of queries and N vectors of packed keys, class by class.
template <Start START, int N> static void multiply_classes(const Operand *queries, const Operand *keys, Real *to) {
    Vec total[GROUP][N];
    UNROLLED for (int n = 0; n < CLASSES; n++) {
        Vec sum[GROUP][N];
        UNROLLED for (int i = 0; i < GROUP; i++)
            UNROLLED for (int j = 0; j < N; j++) sum[i][j] = settled(Vec{});
        for (int step = n; step < STEPS; step += CLASSES) {
            Operands right[N];
            UNROLLED for (int j = 0; j < N; j++)
                right[j] = load<Operands>(keys + step * stride_of_keys(STEPS) + j * LANES);
            UNROLLED for (int i = 0; i < GROUP; i++)
                UNROLLED for (int j = 0; j < N; j++)
                    sum[i][j] = plus_product(sum[i][j], queries[i * QUERY + step], right[j]);
        }
        UNROLLED for (int i = 0; i < GROUP; i++)
            UNROLLED for (int j = 0; j < N; j++) total[i][j] = n ? total[i][j] + sum[i][j] : sum[i][j];
    }
    UNROLLED for (int i = 0; i < GROUP; i++)
        UNROLLED for (int j = 0; j < N; j++) {
            Real *at = to + i * BLOCK_K + j * LANES;
            store(at, START == ADD ? total[i][j] + load<Vec>(at) : total[i][j]);
        }
}
// The same of `vectors` vectors. By twos, the sums of all classes stay in registers.
template <Start START>
INLINE void multiply_queries(int vectors, const Operand *queries, const Operand *keys, Real *to) {
    if constexpr (CLASSES == 1)
        return multiply_some<GROUP, START>(vectors, queries, QUERY, 1, keys, stride_of_keys(STEPS), STEPS, to, BLOCK_K);
    for (; vectors > 1; vectors -= 2, keys += 2 * LANES, to += 2 * LANES) multiply_classes<START, 2>(queries, keys, to);
    if (vectors) multiply_classes<START, 1>(queries, keys, to);
}

// Products of a few rows of queries, without terms, and one vector of keys, of which `present` are there. Their sums
// have another order than those of many rows: `Call.norm` says which rows were few.
static void few_products(const Operand *query, int rows, const Stored *keys, const Stored *ahead, int64_t stride,
                         int64_t present, Real *to, int64_t to_row) {
    by_few(rows, [&](auto count, int row) {
        dots<decltype(count)::N, HEAD_DIM>(query + row * QUERY, QUERY, keys, ahead, stride, present, to + row * to_row,
                                           to_row);
    });
}

#if INVARIANT && !AMX
// The same with the bits of many rows. Keys that are no Operands are converted first. Absent ones are the last or the
// first one that is there.
template <class From>
static void few_of_classes(const Operand *query, int rows, const From &keys, int64_t first, int64_t present, Real *to,
                           int64_t to_row) {
    const bool PLAIN = sizeof(Stored) * PAIR == sizeof(Operand) && HEAD_DIM % (PIECE * PAIR) == 0;
    const bool THERE = PLAIN || by_two<HEAD_DIM>();
    alignas(64) Operand copies[THERE ? 1 : LANES * QUERY];
    const Operand *key[LANES];
    const auto *from = keys.row(first), *ahead = keys.row(first + FETCH);
    const bool whole = first >= keys.begin && first + LANES <= present;  // neighbours, a stride apart
    for (int i = 0; i < LANES; i++, from += keys.stride) {
        if (!whole) from = keys.row(first + i < present ? first + i : present - 1);
        if (!SPREAD_FETCHES) fetch_row<HEAD_DIM, 2>(ahead + i * keys.stride);
        key[i] = THERE ? (const Operand *)from : copies + i * QUERY;
        for (int d = 0; d < QUERY && !THERE; d += LANES) {
            const auto *part = from + d * PAIR;
            const int64_t left = HEAD_DIM - d * PAIR;
            const Operands x = left < LANES * PAIR ? load_operands(part, left) : load_operands<true>(part, left);
            store(copies + i * QUERY + d, x);
        }
    }
    by_few(rows, [&](auto count, int row) {
        dots_of_classes<decltype(count)::N, HEAD_DIM>(query + row * QUERY, QUERY, key, ahead, keys.stride,
                                                      to + row * to_row, to_row);
    });
}
#endif
