// -- backward -----------------------------------------------------------------------------------------------------
//
// One work item is the tiles of queries of one key head, all query heads that read it, or a part of them. For every
// tile of keys a tile of queries visits: scores S and products dP of all rows, GROUP rows at a time, from which the
// weights P and the slopes dS; then dV += P^T dO, dK += dS^T Q and dQ += dS K. The sums dK, dV are those of the item
// alone: in the result's own memory, or in memory of the item which is added up in the order of the items.

const Real BASE = SCORED ? LOG2E : 1;
const int V_STEPS = deep(V_DIM);
const int Q_WIDE = round_up(HEAD_DIM, LANES), V_WIDE = round_up(V_DIM, LANES);
const int ROWS = round_up(BLOCK_Q, GROUP), GROUPS = ROWS / GROUP;
const int LONG = deep(ROWS);                                          // Operands in a row of turned weights
const int Q_LINE = stride_of(line(Q_WIDE), LONG), V_LINE = stride_of(line(V_WIDE), LONG);  // of packed rows
const int K_STRIDE = stride_of(Q_WIDE, deep(BLOCK_K));
const int KEY_GROUPS = (BLOCK_K + GROUP - 1) / GROUP, K_TAIL = BLOCK_K % GROUP ? BLOCK_K % GROUP : GROUP;
const int LEFT = round_up(BLOCK_K, PACK * LANES) / PACK * TERMS;      // Operands in a row of slopes
const int64_t NEXT_TERM = ROWS / PACK * BLOCK_K;                      // from one term of weights to the next
const bool DK_AS_IS = HALF == 0 && HEAD_DIM % LANES == 0 && !(AMX && MOVED);  // rows of dK need no copy
const bool DV_AS_IS = HALF == 0 && V_DIM % LANES == 0 && !(AMX && MOVED);
const bool K_AS_IS = DK_AS_IS && !MOVED && !AMX;
const int64_t TURNED_K = (int64_t)STEPS * BLOCK_K, TURNED_V = (int64_t)V_STEPS * BLOCK_K;
const int64_t TILE = TURNED_K + TURNED_V + (K_AS_IS ? 0 : (int64_t)deep(BLOCK_K) * Q_WIDE);  // Operands of a packed tile
const int64_t KEPT_BYTES = (TERMS > 1 ? 32 : 16) << 20;  // packed tiles that a worker keeps for the next row of tiles
const int64_t COPIES_BYTES = 64 << 20;   // of scattered gradients
const int64_t PARTS_BYTES = 256 << 20;   // of dK, dV of parts

// Whether rows hold NaN or infinity: 0 times those is not 0, so a masked position would contribute.
INLINE bool odd(Entry x) {
#if HALF
    const Entry ones = HALF == 1 ? 0x7F80 : 0x7C00;
    return (x & ones) == ones;
#else
    return !(x - x == 0);
#endif
}
static bool any_odd(const Lines<const Entry> &lines, int64_t rows, int dim) {
    int found = 0;
    for (int64_t i = 0; i < rows; i++) {
        const Entry *from = lines.row(i);
        for (int d = 0; d < dim; d++) found |= odd(from[d]);
    }
    return found != 0;
}

#if PAIRS
// Two rows as bfloat16, lane by lane in one word.
INLINE void store_rows(Operand *to, Vec low, Vec high, int64_t) {
    typedef uint16_t Both __attribute__((vector_size(64)));
    Operand memory[LANES];
    store_operands(memory, low, high);
    Both x = load<Both>(memory);
    store(to, __builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11,
                                      27, 12, 28, 13, 29, 14, 30, 15, 31));
}
#endif

#define METHOD inline __attribute__((always_inline))

// What a captured value's gradient is added to. x are the addends of row i of the tile, vector j of its keys.
struct Captured {
    Real *buffer[CAPTURED + 1];     // of the call; null: not wanted
    double *copy[CAPTURED + 1];     // scattered: of this chain, if several may meet at an entry
    Real *place[CAPTURED + 1];      // columns, diagonals: where row 0 and key 0 of the tiles at hand are added
    Vec head[CAPTURED + 1];
    Vec row[CAPTURED + 1][ROWS];

    METHOD void add_head(int n, int, int, Vec x) { head[n] += x; }
    METHOD void add_row(int n, int i, int, Vec x) { row[n][i] += x; }
    METHOD void add_column(int n, int, int j, Vec x) {
        Real *at = place[n] + j * LANES;
        store(at, load<Vec>(at) + x);
    }
    METHOD void add_diagonal(int n, int i, int j, Vec x) {
        Real *at = place[n] + i - j * LANES - (LANES - 1);
        store(at, load<Vec>(at) + SHUFFLE(x, x, SWAPPED, LANES - 1));
    }
    template <class... I> METHOD void add_entries(int n, const int64_t *size, Vec x, I... index) {
        for (int i = 0; i < LANES; i++) {
            if (x[i] == 0) continue;
            int64_t at = 0;
            int axis = 0;
            ((at = at * size[axis] + (index[i] < 0 ? 0 : index[i] < size[axis] ? index[i] : size[axis] - 1), axis++), ...);
            if (copy[n]) copy[n][at] += x[i];
            else buffer[n][at] += x[i];
        }
    }
};

// dK or dV of some tiles of keys. The last tile, if it is not whole, has memory of its own beside a result, whose rows
// are where `rows` says.
struct Sums {
    Real *data, *edge;
    int64_t row, first, edge_tile;
    const int32_t *rows;  // null: as they come
    Real *tile(int64_t n) const {
        return n == edge_tile ? edge : MOVED && rows ? data : data + (n - first) * BLOCK_K * row;
    }
    int64_t row_of(int64_t n, int wide) const { return n == edge_tile ? wide : row; }
    const int32_t *rows_of(int64_t n, const int32_t *counted) const {
        return !MOVED ? nullptr : rows && n != edge_tile ? rows + n * BLOCK_K : counted;
    }
};

// What is known of a packed tile: its number, and what it holds.
struct Slot {
    int64_t tile;
    bool odd;   // keys: NaN or infinity; with TERMS, numbers that are not tame
    bool wild;  // values: numbers that are not tame
};

// The memory of one worker.
struct Worker {
    int64_t slots;
    Slot *slot;      // [slots]
    Operand *tiles;  // [slots, TILE]
    Real *own;       // dK, dV of an item
    Sums dk, dv;
    bool with_dq, with_dk, with_dv, with_slopes;
    Captured captured;
    // a tile of queries
    alignas(64) Operand query[ROWS * QUERY], outs[ROWS * V_STEPS], q_lines[LONG * line(Q_WIDE)], dout_lines[LONG * line(V_WIDE)];
#if PAIRS || AMX
    Operand dout_left[ROWS * V_STEPS], slopes_left[ROWS * LEFT];
#endif
    Real dq[ROWS * Q_WIDE], shift[ROWS], share[ROWS], delta[ROWS];
    Row rows[ROWS];
    int present;     // queries of the tile
    const Operand *next;  // the packed tile that comes next, null if it is not there
    bool queries_odd, few;  // few: the forward's products were those of few rows
    bool wild_queries, wild_outs;  // queries, and dout or out, hold numbers that are not tame
    // a tile of keys beside it
    Column columns[VECTORS];
    Real distances[DISTANCES ? DISTANCES * SPAN : 1];
    Bits seen[GROUP * VECTORS];
    Real scores[GROUP * BLOCK_K], products[GROUP * BLOCK_K];
    Operand weights[NEXT_TERM * TERMS], slopes[NEXT_TERM * TERMS];
#if AMX
    Operand turned[BLOCK_K * LONG];  // A^T: weights or slopes, a key after the other
#endif
    Steps by_query[GROUPS], by_key[KEY_GROUPS];  // keys that a group of rows sees, and queries that see a group of keys
    int32_t keys[GROUPS * (BLOCK_K / PACK)], queries[KEY_GROUPS][ROWS / PACK];
    int count[KEY_GROUPS];         // of `queries`
    bool open[VECTORS];            // whether the group of rows at hand sees a vector of keys
    bool repeated[ROWS];           // whether a row sees what the row before it sees
    Real edge_dk[BLOCK_K * Q_WIDE], edge_dv[BLOCK_K * V_WIDE];
    int32_t counted[MOVED ? BLOCK_K : 1];  // 0, 1, 2, ...
};

// dO and slopes as left operands: the packed rows themselves, where these have no pairs of neighbours along the steps.
#if PAIRS || AMX
const int DOUT = V_STEPS;
INLINE const Operand *left_dout(const Worker &w) { return w.dout_left; }
INLINE const Operand *left_slopes(const Worker &w) { return w.slopes_left; }
#else
const int DOUT = V_LINE;
INLINE const Operand *left_dout(const Worker &w) { return w.dout_lines; }
INLINE const Operand *left_slopes(const Worker &w) { return w.slopes; }
#endif

#if WEIGHTED
// Weights and slopes of row i of a group, vector j of the keys. The caller has divided dO, and what the sum of weights
// adds to the cotangent of each is in `delta`, less than 0 where it adds. All is 0 where the pair is hidden, whatever it
// is there, and not where the weight is.
template <bool PARTIAL>
INLINE void position(Worker &w, const Fixed &fixed, int start, int i, int j, Real unit, Real scale, Vec &weight_of, Vec &slope_of) {
    const int row = start + i;
    weight_of = slope_of = Vec{};
    if (row >= w.present) return;
    const bool CHECKED = PARTIAL || COUNTED;
    const Column &column = w.columns[j];
    const Vec score = scaled(load<Vec>(w.scores + i * BLOCK_K + j * LANES), unit);
    Bits seen = PARTIAL ? w.seen[i * VECTORS + j] : bits(true);
    if (COUNTED) seen &= counted(fixed, w.rows[row], column, score);
    Vec dp = w.with_slopes ? load<Vec>(w.products + i * BLOCK_K + j * LANES) : Vec{};
    weight_of = modified(fixed, w.rows[row], column, score);
    if (DROPPED) {
        const Bits keep = kept(fixed, w.rows[row], column);
        weight_of = select(keep, weight_of * survivors(fixed), Vec{});
        dp = select(keep, dp * survivors(fixed), Vec{});
    }
    if (CHECKED) weight_of = select(seen, weight_of, Vec{});
    if (!w.with_slopes) return;
    Vec dm = dp - w.delta[row];
    if (CHECKED) dm = select(seen, dm, Vec{});
    if (CAPTURED) collect<CHECKED>(w.captured, fixed, w.rows[row], column, row, j, select(seen, reals(1), Vec{}), dm, score);
    if (SLOPED) {
        dm *= slope(fixed, w.rows[row], column, score);
        if (CHECKED) dm = select(seen, dm, Vec{});
    }
    slope_of = dm * scale;
}
#else
// Weights and slopes of row i of a group, vector j of the keys.
template <bool PARTIAL>
INLINE void position(Worker &w, const Fixed &fixed, int start, int i, int j, Real unit, Real scale, Vec &weight_of, Vec &slope_of) {
    const int row = start + i;
    weight_of = slope_of = Vec{};
    if (row >= w.present) return;
    const Vec score = scaled(load<Vec>(w.scores + i * BLOCK_K + j * LANES), unit);
    // Negligible weights are 0: gradients of far keys would be denormal numbers, a hundred times as slow.
    Vec p = weight((score_of(fixed, w.rows[row], w.columns[j], score) - w.shift[row]) * BASE, NEGLIGIBLE) * w.share[row];
    if (PARTIAL) p = select(w.seen[i * VECTORS + j], p, Vec{});
    weight_of = p;
    if (!w.with_slopes) {
        if (DROPPED) weight_of = select(kept(fixed, w.rows[row], w.columns[j]), p * survivors(fixed), Vec{});
        return;
    }
    Vec dp = load<Vec>(w.products + i * BLOCK_K + j * LANES);
    if (DROPPED) {
        const Bits keep = kept(fixed, w.rows[row], w.columns[j]);
        weight_of = select(keep, p * survivors(fixed), Vec{});
        dp = select(keep, dp * survivors(fixed), Vec{});
    }
    const bool CHECKED = PARTIAL || GUARDED;
    Vec dm = p * (dp - w.delta[row]);
    if (CHECKED) dm = select(p != 0, dm, Vec{});
    if (CAPTURED) collect<CHECKED>(w.captured, fixed, w.rows[row], w.columns[j], row, j, p, dm, score);
    if (SLOPED) {
        dm *= slope(fixed, w.rows[row], w.columns[j], score);
        if (CHECKED) dm = select(p != 0, dm, Vec{});
    }
    slope_of = dm * scale;
}
#endif

// dout times out of every row, in the order of the products of dout and values: where a row sees one key, whose value is
// out, their difference is 0.
static void multiply_outs(Worker &w) {
    const Operand *dout = left_dout(w);
#if AMX
    for (int start = 0; start < w.present; start += LANES) {
        Operand square[TERMS * LANES * LANES];
        Real sums[LANES * LANES] = {};
        for (int step = 0; step < V_STEPS; step += LANES * TERMS) {
            for (int n = 0; n < TERMS; n++)
                turn_square(square + n * 256, LANES, w.outs + start * V_STEPS + step + n * LANES, V_STEPS);
            multiply_squares<LANES, 1, true>(dout + start * DOUT + step, DOUT, square, 0, LANES * TERMS, sums, LANES);
        }
        for (int i = 0; i < LANES; i++) w.delta[start + i] = sums[i * LANES + i];
    }
#else
    for (int start = 0; start < w.present; start += GROUP) {
        const int rows = w.present - start < GROUP ? w.present - start : GROUP;
        Vec sum[GROUP];
        for (int i = 0; i < GROUP; i++) sum[i] = settled(Vec{});
        for (int step = 0; step < V_STEPS; step++)
            for (int i = 0; i < GROUP; i++) {
                const int at = start + (i < rows ? i : 0);
                const Operands out = w.outs[at * V_STEPS + step] - Operands{};
                sum[i] = plus_product(sum[i], dout[at * DOUT + step], PAIR == 1 ? (Operands)settled((Vec)out) : out);
            }
        for (int i = 0; i < rows; i++) w.delta[start + i] = sum[i][0];
    }
#endif
}

// C[GROUP, vectors] = A B
INLINE void multiply_rows(int vectors, const Operand *a, int64_t a_row, const Operand *b, int64_t steps, Real *c) {
    multiply_some<GROUP, ZERO>(vectors, a, a_row, 1, b, stride_of_keys(steps), steps, c, BLOCK_K);
}

// Evaluates the mask for `rows` rows from `start` on, and writes down which keys they see and which keys see them.
static void look(Worker &w, const Fixed &fixed, int start, int rows) {
    uint32_t some[VECTORS], truth[GROUP][VECTORS];
    for (int j = 0; j < VECTORS; j++) {
        Bits seen = {};
        some[j] = 0;
        for (int i = 0; i < rows; i++) {
            if (!REPEATED || i == 0 || !w.repeated[start + i])
                seen = w.columns[j].inside & visible(fixed, w.rows[start + i], w.columns[j]);
            w.seen[i * VECTORS + j] = seen;
            some[j] |= truth[i][j] = truths(seen);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++)
            for (uint32_t left = truth[i][j]; left;) {
                const int group = (j * LANES + __builtin_ctz(left)) / GROUP, past = (group + 1) * GROUP - j * LANES;
                int32_t *queries = w.queries[group], query = (start + i) / PACK;
                int &n = w.count[group];
                if (!n || queries[n - 1] != query) queries[n++] = query;
                left = past < LANES ? left >> past << past : 0;
            }
    w.by_query[start / GROUP] = open_vectors(some, w.open, w.keys + start / GROUP * (BLOCK_K / PACK));
}

// Weights and slopes of GROUP rows of a tile of queries beside a tile of keys, packed and, `from`, as they are.
// PARTIAL: not every position is visible. `wild_keys`, `wild_values`: keys or queries, values or dout are not tame.
template <bool PARTIAL>
static void strip(Worker &w, const Fixed &fixed, const Operand *keys, const Operand *values, const Lines<const Entry> &from,
                  const Lines<const Entry> &values_from, int64_t present, int start, Real unit, Real scale, bool wild_keys,
                  bool wild_values) {
    const int rows = GROUP < w.present - start ? GROUP : w.present - start;
    if (PARTIAL) {
        look(w, fixed, start, rows);
        for (int i = start / PACK * BLOCK_K; i < (start + GROUP) / PACK * BLOCK_K; i += BLOCK_K)
            for (int j = 0; j < VECTORS * TERMS; j++) {
                const int64_t at = i + j % VECTORS * LANES + j / VECTORS * NEXT_TERM;
                if (!w.open[j % VECTORS]) store(w.weights + at, Operands{}), store(w.slopes + at, Operands{});
            }
#if AMX
        for (int i = start; i < start + GROUP; i++)
            for (int j = 0; j < VECTORS; j += 2)
                if (!w.open[j]) store_terms(w.slopes_left + i * LEFT + j / 2 * LANES * TERMS, Vec{}, Vec{});
#endif
        if (!w.by_query[start / GROUP].count) return;
    }
    const Operand *q = w.query + start * QUERY;
    const Operand *dout = left_dout(w) + start * DOUT;
    for (int j = 0, n; j < VECTORS; j += n ? n : 1) {
        n = PARTIAL ? opened(w.open, j) : PANEL - j % PANEL;
        if (!n) continue;
#if TERMS > 1
        for (int i = j; i < j + n; i++) {
            const int64_t first = i * LANES, left = present - first;
            if (wild_keys && (MOVED || !w.few)) dots_of_terms<HEAD_DIM>(q, rows, from, first, left, w.scores + first, BLOCK_K);
            if (wild_values && w.with_slopes)
                dots_of_terms<V_DIM>(dout, rows, values_from, first, left, w.products + first, BLOCK_K);
        }
#endif
        if ((MOVED || !w.few) && !wild_keys) multiply_queries<ZERO>(n, q, keys + vector_at(j, STEPS), w.scores + j * LANES);
        if (w.with_slopes && !wild_values) multiply_rows(n, dout, DOUT, values + vector_at(j, V_STEPS), V_STEPS, w.products + j * LANES);
    }
    for (int64_t j = 0; !MOVED && w.few && j < BLOCK_K; j += LANES)
        if (!PARTIAL || w.open[j / LANES])
            few_products(q, rows, from.row(j), from.row(j + FETCH), from.stride, present - j, w.scores + j, BLOCK_K);
    (void)values_from;
    for (int i = 0; i < GROUP; i += PACK) {
        Operand *weights = w.weights + (start + i) / PACK * BLOCK_K, *slopes = w.slopes + (start + i) / PACK * BLOCK_K;
        if (AMX && w.next) fetch_part(w.next, TILE, (start + i) / PACK, round_up(w.present, GROUP) / PACK);
#if PAIRS || AMX
        Vec held[2][2] = {};
        for (int j = 0; j < VECTORS; j++) {
            if (PARTIAL && !w.open[j]) continue;
            Vec p[2], ds[2];
            for (int r = 0; r < 2; r++) {
                position<PARTIAL>(w, fixed, start, i + r, j, unit, scale, p[r], ds[r]);
                held[r][j & 1] = ds[r];
                if (!(j & 1) && j < VECTORS - 1) continue;
                store_terms(w.slopes_left + (start + i + r) * LEFT + j / 2 * LANES * TERMS, held[r][0], j & 1 ? ds[r] : Vec{});
            }
            store_rows(weights + j * LANES, p[0], p[1], NEXT_TERM);
            store_rows(slopes + j * LANES, ds[0], ds[1], NEXT_TERM);
        }
#else
        for (int j = 0; j < VECTORS; j++) {
            if (PARTIAL && !w.open[j]) continue;
            Vec p, ds;
            position<PARTIAL>(w, fixed, start, i, j, unit, scale, p, ds);
            store(weights + j * LANES, p);
            store(slopes + j * LANES, ds);
        }
#endif
    }
}

// C[rows, WIDE] += A[rows, steps] B[steps, WIDE]. Columns are the outer loop: those that GROUP rows read of B stay in the
// first level of the cache for the next rows. TAIL: the rows at the end. SPREAD: rows of C are where `at` says.
template <int WIDE, int TAIL, bool SPREAD = false>
static void accumulate(int rows, const Steps *steps, const Operand *a, int64_t a_row, int64_t a_step, const Operand *b,
                       int64_t b_step, Real *c, int64_t c_row, const int32_t *at = nullptr) {
    by_panels<WIDE>([&](auto vectors, int column) {
        const int N = decltype(vectors)::N;
        const Operand *right = b + entry_at(0, column, b_step);
        for (int row = 0; row < rows; row += GROUP, steps++) {
            const Operand *left = a + row * a_row;
            Real *to = c + (SPREAD ? 0 : row * c_row) + column;
            const int32_t *rows_at = SPREAD ? at + row : nullptr;
            if (row + GROUP <= rows)
                multiply_steps<GROUP, N, ADD, SPREAD>(*steps, left, a_row, a_step, right, b_step, to, c_row, nullptr, rows_at);
            else
                multiply_steps<TAIL, N, ADD, SPREAD>(*steps, left, a_row, a_step, right, b_step, to, c_row, nullptr, rows_at);
        }
        steps -= (rows + GROUP - 1) / GROUP;
    });
}

// C[keys, WIDE] += A^T B. A is weights or slopes, a query after the other. A matrix unit does not read A^T in place, so
// `turned` gets a copy.
template <int WIDE>
static void accumulate_turned(Worker &w, int groups, int keys, const Operand *a, const Operand *b, int64_t b_step, Real *c,
                              int64_t c_row, const int32_t *at) {
#if AMX
    for (int i = 0; i < groups * GROUP / PACK; i += LANES)
        for (int j = 0; j < keys; j += LANES)
            for (int n = 0; n < TERMS; n++)
                turn_square(w.turned + j * LONG + i * TERMS + n * LANES, LONG, a + n * NEXT_TERM + i * BLOCK_K + j, BLOCK_K);
    accumulate<WIDE, K_TAIL>(keys, w.by_key, w.turned, LONG, 1, b, b_step, c, c_row);
    (void)at;
#else
    accumulate<WIDE, K_TAIL, MOVED>(keys, w.by_key, a, 1, BLOCK_K, b, b_step, c, c_row, at);
    (void)w, (void)groups;
#endif
}

// Adds a tile to dV, dK and dQ position by position, without the masked ones, where an operand holds NaN, infinity or
// numbers that are not tame.
template <int WIDE, class Factor>
static void add_products(Real *to, int64_t count, const Operand *rows, int64_t stride, Factor factor) {
    // The unit sums even and odd steps apart, and adds both sums to C every 32 steps.
    const int64_t together = AMX ? 32 : count;
    for (int64_t i = 0; i < count;) {
        const int64_t end = count - i < together ? count : i + together;
        Real sum[2][WIDE] = {};
        for (; i < end; i++) {
            const Real x = factor(i);
            Real *some = sum[AMX ? i % 2 : 0];
            for (int d = 0; d < WIDE && x != 0; d++)
                some[d] += x * number(rows + entry_at(i / PACK, d, stride), i % PACK, LANES * LANES);
        }
        for (int d = 0; d < WIDE; d++) to[d] += sum[0][d] + sum[1][d];
    }
}
static void add_exactly(Worker &w, int groups, const Operand *rows, int64_t stride, int64_t present, int64_t tile) {
    const int64_t queries = w.present < groups * GROUP ? w.present : groups * GROUP;
    const auto at = [](const Operand *x, int64_t i, int64_t j) { return number(x + i / PACK * BLOCK_K + j, i % PACK, NEXT_TERM); };
    for (int64_t i = 0; i < queries && w.with_dq; i++)
        add_products<Q_WIDE>(w.dq + i * Q_WIDE, present, rows, stride, [&](int64_t j) { return at(w.slopes, i, j); });
    const int32_t *k_rows = w.dk.rows_of(tile, w.counted), *v_rows = w.dv.rows_of(tile, w.counted);
    for (int64_t j = 0; j < present; j++) {
        if (w.with_dk)
            add_products<Q_WIDE>(w.dk.tile(tile) + row_at(k_rows, j) * w.dk.row_of(tile, Q_WIDE), queries, w.q_lines, Q_LINE,
                                 [&](int64_t i) { return at(w.slopes, i, j); });
        if (w.with_dv)
            add_products<V_WIDE>(w.dv.tile(tile) + row_at(v_rows, j) * w.dv.row_of(tile, V_WIDE), queries, w.dout_lines,
                                 V_LINE, [&](int64_t i) { return at(w.weights, i, j); });
    }
}
