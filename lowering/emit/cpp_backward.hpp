// -- backward -----------------------------------------------------------------------------------------------------
//
// One work item is the tiles of queries of one key head, all query heads that read it, or a part of them. For every
// tile of keys a tile of queries visits: scores S and products dP of all rows, GROUP rows at a time, from which the
// weights P and the slopes dS; then dV += P^T dO, dK += dS^T Q and dQ += dS K. The sums dK, dV are those of the item
// alone: in the result's own memory, or in memory of the item which is added up in the order of the items.

const Real BASE = SCORED ? LOG2E : 1;
const int VECTORS = BLOCK_K / LANES, PANEL = panel(VECTORS);
const int Q_STEPS = round_up(HEAD_DIM, PAIR) / PAIR, V_STEPS = round_up(V_DIM, PAIR) / PAIR;
const int Q_WIDE = round_up(HEAD_DIM, LANES), V_WIDE = round_up(V_DIM, LANES);
const int ROWS = round_up(BLOCK_Q, PAIR), GROUPS = (ROWS + GROUP - 1) / GROUP;
const int Q_TAIL = ROWS % GROUP ? ROWS % GROUP : GROUP, K_TAIL = BLOCK_K % GROUP ? BLOCK_K % GROUP : GROUP;
const int LEFT = round_up(BLOCK_K, PAIR * LANES) / PAIR;              // Operands in a row of slopes
const bool K_AS_IS = HALF == 0 && HEAD_DIM % LANES == 0;             // rows of keys and of dK need no copy
const bool V_AS_IS = HALF == 0 && V_DIM % LANES == 0;                // rows of dV
const int64_t TURNED_K = (int64_t)Q_STEPS * BLOCK_K, TURNED_V = (int64_t)V_STEPS * BLOCK_K;
const int64_t TILE = TURNED_K + TURNED_V + (K_AS_IS ? 0 : (int64_t)BLOCK_K / PAIR * Q_WIDE);  // Operands of a packed tile
const int64_t KEPT_BYTES = 16 << 20;     // packed tiles that a worker keeps, from one row of tiles to the next
const int64_t COPIES_BYTES = 64 << 20;   // of scattered gradients
const int64_t PARTS_BYTES = 256 << 20;   // of dK, dV of parts
static_assert(BLOCK_K % LANES == 0, "a tile of keys is whole vectors");

extern "C" void *malloc(size_t);
extern "C" void *calloc(size_t, size_t);
extern "C" void free(void *);

// Whether rows hold NaN or infinity: 0 times those is not 0, so a masked position would contribute.
INLINE bool odd(Entry x) {
#if HALF
    const Entry ones = HALF == 1 ? 0x7F80 : 0x7C00;
    return (x & ones) == ones;
#else
    return !(x - x == 0);
#endif
}
static bool any_odd(const Entry *from, int64_t stride, int64_t rows, int dim) {
    int found = 0;
    for (int64_t i = 0; i < rows; i++, from += stride)
        for (int d = 0; d < dim; d++) found |= odd(from[d]);
    return found != 0;
}

#if PAIRS
// Two rows as bfloat16, lane by lane in one word.
INLINE Operands joined(Vec low, Vec high) {
    typedef uint16_t Both __attribute__((vector_size(64)));
    Operand memory[LANES];
    store_operands(memory, low, high);
    Both x = load<Both>(memory);
    return (Operands)__builtin_shufflevector(x, x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10,
                                             26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
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

// dK or dV of some tiles of keys. The last tile, if it is not whole, has memory of its own beside a result.
struct Sums {
    Real *data, *edge;
    int64_t row, first, edge_tile;
    Real *tile(int64_t n) const { return n == edge_tile ? edge : data + (n - first) * BLOCK_K * row; }
    int64_t row_of(int64_t n, int wide) const { return n == edge_tile ? wide : row; }
};

// The memory of one worker.
struct Worker {
    int64_t slots;
    int64_t *tag;    // [slots] which tile is there
    bool *tag_odd;   // [slots] its keys hold NaN or infinity
    Operand *tiles;  // [slots, TILE]
    Real *own;       // dK, dV of an item
    Sums dk, dv;
    bool with_dq, with_dk, with_dv, with_slopes;
    Captured captured;
    // a tile of queries
    Operand q_lines[ROWS / PAIR * Q_WIDE], dout_lines[ROWS / PAIR * V_WIDE];
#if PAIRS
    Operand q_left[ROWS * Q_STEPS], dout_left[ROWS * V_STEPS], slopes_left[ROWS * LEFT];
#endif
    Real dq[ROWS * Q_WIDE], lse[ROWS], delta[ROWS];
    Row rows[ROWS];
    int present;     // queries of the tile
    bool queries_odd;
    // a tile of keys beside it
    Column columns[VECTORS];
    Bits seen[GROUP * VECTORS];
    Real scores[GROUP * BLOCK_K], products[GROUP * BLOCK_K];
    Operand weights[ROWS / PAIR * BLOCK_K], slopes[ROWS / PAIR * BLOCK_K];
    int from[GROUPS], to[GROUPS];  // vectors of keys that a group of rows sees
    Real edge_dk[BLOCK_K * Q_WIDE], edge_dv[BLOCK_K * V_WIDE];
};

// Weights and slopes of row i of a group, vector j of the keys.
template <bool PARTIAL>
INLINE void position(Worker &w, const Fixed &fixed, int start, int i, int j, Real unit, Real scale, Vec &weight_of, Vec &slope_of) {
    const int row = start + i;
    weight_of = slope_of = Vec{};
    if (row >= w.present) return;
    const Vec score = load<Vec>(w.scores + i * BLOCK_K + j * LANES) * unit;
    const Vec m = SCORED ? modified(fixed, w.rows[row], w.columns[j], score) : score;
    Vec p = weight((m - w.lse[row]) * BASE);
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

// C[M, vectors] = A B for GROUP rows, or those at the end of a tile.
INLINE void multiply_rows(int m, int vectors, const Operand *a, int64_t a_row, const Operand *b, int64_t steps, Real *c) {
    if (m == GROUP)
        multiply_some<GROUP, ZERO>(vectors, a, a_row, 1, b, PANEL * LANES, steps, c, BLOCK_K);
    else
        multiply_some<Q_TAIL, ZERO>(vectors, a, a_row, 1, b, PANEL * LANES, steps, c, BLOCK_K);
}

// Weights and slopes of m rows of a tile of queries beside a tile of keys. PARTIAL: not every position is visible.
template <bool PARTIAL>
static void strip(Worker &w, const Fixed &fixed, const Operand *keys, const Operand *values, int start, int m, Real unit, Real scale) {
    int lo = 0, hi = VECTORS;
    if (PARTIAL) {
        Bits some[VECTORS] = {};
        for (int i = 0; i < m && start + i < w.present; i++)
            for (int j = 0; j < VECTORS; j++) {
                w.seen[i * VECTORS + j] = w.columns[j].inside & visible(fixed, w.rows[start + i], w.columns[j]);
                some[j] |= w.seen[i * VECTORS + j];
            }
        while (lo < hi && !any(some[lo])) lo++;
        while (lo < hi && !any(some[hi - 1])) hi--;
        for (int i = start / PAIR * BLOCK_K; i < (start + m) / PAIR * BLOCK_K; i += BLOCK_K)
            for (int j = 0; j < VECTORS; j++)
                if (j < lo || j >= hi) store(w.weights + i + j * LANES, Operands{}), store(w.slopes + i + j * LANES, Operands{});
    }
    w.from[start / GROUP] = lo, w.to[start / GROUP] = hi;
    if (lo == hi) return;
#if PAIRS
    const Operand *q = w.q_left + start * Q_STEPS, *dout = w.dout_left + start * V_STEPS;
    const int q_row = Q_STEPS, dout_row = V_STEPS;
#else
    const Operand *q = w.q_lines + start * Q_WIDE, *dout = w.dout_lines + start * V_WIDE;
    const int q_row = Q_WIDE, dout_row = V_WIDE;
#endif
    for (int j = lo, n; j < hi; j += n) {
        n = PANEL - j % PANEL < hi - j ? PANEL - j % PANEL : hi - j;
        const int64_t panel = (int64_t)(j / PANEL) * PANEL * LANES, inside = j % PANEL * LANES;
        multiply_rows(m, n, q, q_row, keys + panel * Q_STEPS + inside, Q_STEPS, w.scores + j * LANES);
        if (w.with_slopes) multiply_rows(m, n, dout, dout_row, values + panel * V_STEPS + inside, V_STEPS, w.products + j * LANES);
    }
    for (int i = 0; i < m; i += PAIR) {
        Operand *weights = w.weights + (start + i) / PAIR * BLOCK_K, *slopes = w.slopes + (start + i) / PAIR * BLOCK_K;
#if PAIRS
        Vec held[2][2] = {};
        for (int j = lo; j < hi; j++) {
            Vec p[2], ds[2];
            for (int r = 0; r < 2; r++) {
                position<PARTIAL>(w, fixed, start, i + r, j, unit, scale, p[r], ds[r]);
                held[r][j & 1] = ds[r];
                if (!(j & 1) && j < hi - 1) continue;
                store_operands(w.slopes_left + (start + i + r) * LEFT + j / 2 * LANES, held[r][0], j & 1 ? ds[r] : Vec{});
            }
            store(weights + j * LANES, joined(p[0], p[1]));
            store(slopes + j * LANES, joined(ds[0], ds[1]));
        }
#else
        for (int j = lo; j < hi; j++) {
            Vec p, ds;
            position<PARTIAL>(w, fixed, start, i, j, unit, scale, p, ds);
            store(weights + j * LANES, p);
            store(slopes + j * LANES, ds);
        }
#endif
    }
}

// C[M, WIDE] += A[M, steps] B[steps, WIDE]
template <int M, int WIDE>
INLINE void accumulate(const Operand *a, int64_t a_row, int64_t a_step, const Operand *b, int64_t b_step, int64_t steps, Real *c, int64_t c_row) {
    const int BLOCKS = WIDE / LANES, REST = BLOCKS % MOST;
    for (int j = 0; j + MOST <= BLOCKS; j += MOST)
        multiply<M, MOST, ADD>(a, a_row, a_step, b + j * LANES, b_step, steps, c + j * LANES, c_row);
    if (REST)
        multiply<M, REST ? REST : 1, ADD>(a, a_row, a_step, b + (BLOCKS - REST) * LANES, b_step, steps, c + (BLOCKS - REST) * LANES, c_row);
}

// The rows of queries, from and to, that see some key of [key, key + M).
INLINE void rows_seeing(const Worker &w, int groups, int key, int m, int &from, int &to) {
    from = 0, to = 0;
    for (int g = 0; g < groups; g++) {
        if (w.from[g] * LANES >= key + m || w.to[g] * LANES <= key) continue;
        if (!to) from = g * GROUP;
        to = (g + 1) * GROUP < ROWS ? (g + 1) * GROUP : ROWS;
    }
}

template <int M> static void add_keys(Worker &w, int key, int from, int to, int64_t tile) {
    const int64_t start = (int64_t)from / PAIR, steps = (to - from) / PAIR;
    if (w.with_dv) {
        const int64_t row = w.dv.row_of(tile, V_WIDE);
        accumulate<M, V_WIDE>(w.weights + start * BLOCK_K + key, 1, BLOCK_K, w.dout_lines + start * V_WIDE, V_WIDE, steps,
                            w.dv.tile(tile) + key * row, row);
    }
    if (w.with_dk) {
        const int64_t row = w.dk.row_of(tile, Q_WIDE);
        accumulate<M, Q_WIDE>(w.slopes + start * BLOCK_K + key, 1, BLOCK_K, w.q_lines + start * Q_WIDE, Q_WIDE, steps,
                            w.dk.tile(tile) + key * row, row);
    }
}

template <int M> static void add_queries(Worker &w, int start, const Operand *rows, int64_t stride, int64_t present) {
    const int lo = w.from[start / GROUP] * LANES, hi = w.to[start / GROUP] * LANES;
    const int64_t end = hi < present ? hi : (present + PAIR - 1) / PAIR * PAIR;
    if (lo >= end) return;
#if PAIRS
    const Operand *slopes = w.slopes_left + start * LEFT + lo / PAIR;
#else
    const Operand *slopes = w.slopes + start * LEFT + lo;
#endif
    accumulate<M, Q_WIDE>(slopes, LEFT, 1, rows + lo / PAIR * stride, stride, (end - lo) / PAIR, w.dq + start * Q_WIDE, Q_WIDE);
}

// The same three products position by position, without the masked ones: where an operand holds NaN or infinity.
INLINE Real half(const Operand *x, int64_t which) {
#if PAIRS
    return real((Entry)(x[0] >> 16 * which));
#else
    return x[0];
#endif
}
static void add_exactly(Worker &w, int groups, const Operand *rows, int64_t stride, int64_t present, int64_t tile) {
    for (int i = 0; i < w.present && i < groups * GROUP; i++)
        for (int64_t j = 0; j < present; j++) {
            const Real p = half(w.weights + i / PAIR * BLOCK_K + j, i % PAIR), ds = half(w.slopes + i / PAIR * BLOCK_K + j, i % PAIR);
            const Operand *q = w.q_lines + i / PAIR * Q_WIDE, *dout = w.dout_lines + i / PAIR * V_WIDE, *key = rows + j / PAIR * stride;
            Real *dk = w.with_dk ? w.dk.tile(tile) + j * w.dk.row_of(tile, Q_WIDE) : nullptr;
            Real *dv = w.with_dv ? w.dv.tile(tile) + j * w.dv.row_of(tile, V_WIDE) : nullptr;
            for (int d = 0; d < V_WIDE && dv && p != 0; d++) dv[d] += p * half(dout + d, i % PAIR);
            for (int d = 0; d < Q_WIDE && dk && ds != 0; d++) dk[d] += ds * half(q + d, i % PAIR);
            for (int d = 0; d < Q_WIDE && w.with_dq && ds != 0; d++) w.dq[i * Q_WIDE + d] += ds * half(key + d, j % PAIR);
        }
}

struct Part {
    int64_t begin, end;    // of the tiles of queries of a key head: query head by query head, each from the first row on
    int64_t lo, hi;        // the tiles of keys they visit
    Real *sums;            // dK, then dV, of those; null: the worker's or the result's
};

struct Task {
    const Call *call;
    Part *part;             // [batch, kv_heads, parts]
    int64_t parts, items, chains;
    int64_t next, failed;
    Real *heads[CAPTURED + 1];     // [batch, heads, rows] sums of tiles of queries
    Real *lines[CAPTURED + 1];     // [parts, batch, heads, length] columns or diagonals
    double *copies[CAPTURED + 1];  // [chains, entries]
};

INLINE int64_t tiles_of(const Call *call) { return (call->kv_len + BLOCK_K - 1) / BLOCK_K; }
INLINE int64_t length_of(const Call *call, int n) {
    return OVER[n] == COLUMNS ? tiles_of(call) * BLOCK_K : call->q_len + call->kv_len + BLOCK_K;
}
template <class T> INLINE T *entries_of(const Array &x, int64_t batch, int64_t head) {
    return x.data ? (T *)x.data + batch * x.batch + head * x.head : nullptr;
}

// Packed keys and values of one tile, from before or made now.
static int64_t packed(Worker &w, const Call *call, int64_t batch, int64_t kv_head, int64_t tile) {
    const int64_t name = (batch * call->kv_heads + kv_head) * tiles_of(call) + tile, slot = tile % w.slots;
    if (w.tag[slot] == name) return slot;
    w.tag[slot] = name;
    const int64_t start = tile * BLOCK_K, present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
    const Entry *k = entries_of<const Entry>(call->k, batch, kv_head) + start * call->k.row;
    const Entry *v = entries_of<const Entry>(call->v, batch, kv_head) + start * call->v.row;
    Operand *to = w.tiles + slot * TILE;
    pack_turned<HEAD_DIM, PANEL>(to, k, call->k.row, present, BLOCK_K);
    pack_turned<V_DIM, PANEL>(to + TURNED_K, v, call->v.row, present, BLOCK_K);
    if (!K_AS_IS) pack_rows<HEAD_DIM>(to + TURNED_K + TURNED_V, k, call->k.row, present, BLOCK_K);
    w.tag_odd[slot] = any_odd(k, call->k.row, present, HEAD_DIM);
    return slot;
}

static void load_queries(Worker &w, const Call *call, const Fixed &fixed, int64_t batch, int64_t head, int64_t row) {
    const int64_t start = row * BLOCK_Q, line = (batch * call->heads + head) * call->q_len + start;
    const int present = (int)(call->q_len - start < BLOCK_Q ? call->q_len - start : BLOCK_Q);
    const Entry *q = entries_of<const Entry>(call->q, batch, head) + start * call->q.row;
    const Entry *out = entries_of<const Entry>(call->out, batch, head) + start * call->out.row;
    const Entry *dout = entries_of<const Entry>(call->dout, batch, head) + start * call->dout.row;
    w.present = present;
    pack_rows<HEAD_DIM>(w.q_lines, q, call->q.row, present, ROWS);
    pack_rows<V_DIM>(w.dout_lines, dout, call->dout.row, present, ROWS);
#if PAIRS
    pack_left<HEAD_DIM>(w.q_left, q, call->q.row, present, ROWS, 1);
    pack_left<V_DIM>(w.dout_left, dout, call->dout.row, present, ROWS, 1);
#endif
    w.queries_odd = any_odd(q, call->q.row, present, HEAD_DIM) || any_odd(dout, call->dout.row, present, V_DIM);
    const Int q_first = (Int)(call->q_origin[batch * call->q_origin_step] + start);
    for (int i = 0; i < present; i++, out += call->out.row, dout += call->dout.row) {
        const Real lse = call->lse[line + i];
        Vec delta = {};
        for (int d = 0; d < V_DIM; d += LANES) delta += load_reals(out + d, V_DIM - d) * load_reals(dout + d, V_DIM - d);
        w.rows[i] = row_of(fixed, q_first + i);
        w.lse[i] = lse == -INF ? INF : SCORED ? lse : lse * LOG2E;  // weights of an empty row are 0
        w.delta[i] = sum(delta) - (call->dlse ? call->dlse[line + i] : 0);
    }
    for (int i = 0; i < ROWS * Q_WIDE; i++) w.dq[i] = 0;
}

// A tile of queries beside one tile of keys.
template <bool PARTIAL>
static void visit(Worker &w, const Call *call, const Fixed &fixed, const Operand *tile, const Operand *rows, int64_t stride, int64_t n,
                  int64_t present, bool exactly) {
    const Real scale = (Real)call->scale, unit = (Real)(call->scale * (SCORED ? 1.0 : 1.4426950408889634));
    const int groups = (w.present + GROUP - 1) / GROUP;
    for (int start = 0; start < w.present; start += GROUP)
        strip<PARTIAL>(w, fixed, tile, tile + TURNED_K, start, ROWS - start < GROUP ? ROWS - start : GROUP, unit, scale);
    if (PARTIAL && exactly) return add_exactly(w, groups, rows, stride, present, n);
    for (int key = 0; key < present; key += GROUP) {
        int from = 0, to = groups * GROUP < ROWS ? groups * GROUP : ROWS;
        if (PARTIAL) rows_seeing(w, groups, key, GROUP, from, to);
        if (from == to) continue;
        if (key + GROUP <= BLOCK_K)
            add_keys<GROUP>(w, key, from, to, n);
        else
            add_keys<K_TAIL>(w, key, from, to, n);
    }
    for (int g = 0; g < groups && w.with_dq; g++)
        if (g * GROUP + GROUP <= ROWS)
            add_queries<GROUP>(w, g * GROUP, rows, stride, present);
        else
            add_queries<Q_TAIL>(w, g * GROUP, rows, stride, present);
}

// One tile of queries: everything it sees.
static void differentiate(Worker &w, Task &task, int64_t part, int64_t batch, int64_t head, int64_t row) {
    const Call *call = task.call;
    const int64_t kv_head = head / (call->heads / call->kv_heads), line = batch * call->heads + head;
    const int64_t k_origin = call->k_origin[batch * call->k_origin_step];
    const Fixed fixed = fixed_of(call, batch, head);
    Captured &captured = w.captured;
    load_queries(w, call, fixed, batch, head, row);
    for (int n = 0; n < CAPTURED; n++) {
        captured.head[n] = Vec{};
        for (int i = 0; i < ROWS && OVER[n] == ROWS_OF_QUERIES; i++) captured.row[n][i] = Vec{};
    }
    const int64_t spans = call->slice_of[line] * call->rows + row;
    const int32_t *record = call->spans + spans * call->records * 4;
    for (int32_t r = 0; r < call->count[spans]; r++, record += 4)
        for (int64_t n = record[0]; n < record[3]; n++) {
            const bool partial = n < record[1] || n >= record[2];
            const int64_t start = n * BLOCK_K, slot = packed(w, call, batch, kv_head, n);
            const int64_t present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
            const Operand *tile = w.tiles + slot * TILE, *rows = tile + TURNED_K + TURNED_V;
            int64_t stride = Q_WIDE;
            if (K_AS_IS) {
                rows = (const Operand *)(entries_of<const Entry>(call->k, batch, kv_head) + start * call->k.row);
                stride = call->k.row;
            }
            if (partial || POSITIONS)
                for (int j = 0; j < VECTORS; j++)
                    w.columns[j] = column_of(fixed, (Int)(k_origin + start + j * LANES), call->kv_len - start - j * LANES);
            for (int c = 0; c < CAPTURED; c++)
                if (task.lines[c]) {
                    const int64_t length = length_of(call, c), in_line = OVER[c] == COLUMNS
                        ? start : row * BLOCK_Q - start + call->kv_len - 1 + BLOCK_K;
                    captured.place[c] = task.lines[c] + (part * call->batch * call->heads + line) * length + in_line;
                }
            if (partial)
                visit<true>(w, call, fixed, tile, rows, stride, n, present, w.queries_odd || w.tag_odd[slot]);
            else
                visit<false>(w, call, fixed, tile, rows, stride, n, present, false);
        }
    for (int n = 0; n < CAPTURED; n++) {
        if (!captured.buffer[n]) continue;
        if (OVER[n] == HEADS) task.heads[n][line * call->rows + row] = sum(captured.head[n]);
        for (int i = 0; i < w.present && OVER[n] == ROWS_OF_QUERIES; i++)
            captured.buffer[n][line * call->q_len + row * BLOCK_Q + i] = sum(captured.row[n][i]);
    }
    if (!w.with_dq) return;
    Entry *dq = entries_of<Entry>(call->dq, batch, head) + row * BLOCK_Q * call->dq.row;
    for (int i = 0; i < w.present; i++, dq += call->dq.row)
        for (int d = 0; d < HEAD_DIM; d++) dq[d] = rounded(w.dq[i * Q_WIDE + d]);
}

static void clear(Real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = 0;
}

// Where dK (or dV) of an item is summed up: the item's own memory, the result, or the worker's memory.
template <int DIM, bool AS_IS>
static Sums begin(const Call *call, const Array &result, int64_t batch, int64_t kv_head, const Part &part, Real *own, Real *worker, Real *edge) {
    const int WIDE = round_up(DIM, LANES);
    if (!result.data) return {};
    Sums sums = {own ? own : worker, edge, WIDE, part.lo, -1};
    if (own || !AS_IS) {
        clear(sums.data, (part.hi - part.lo) * BLOCK_K * WIDE);
        return sums;
    }
    Real *data = (Real *)entries_of<Entry>(result, batch, kv_head);
    for (int64_t i = 0; i < call->kv_len; i++) clear(data + i * result.row, DIM);
    clear(edge, BLOCK_K * WIDE);
    return {data, edge, result.row, 0, call->kv_len % BLOCK_K ? call->kv_len / BLOCK_K : -1};
}

// Sums to results: the tiles of an item, or of all items of a key head, in their order.
template <int DIM, bool DV>
static void end(const Call *call, const Array &result, int64_t batch, int64_t kv_head, const Part *part, int64_t parts, int64_t tile, Sums sums) {
    const int WIDE = round_up(DIM, LANES);
    const int64_t start = tile * BLOCK_K, present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
    Entry *to = entries_of<Entry>(result, batch, kv_head) + start * result.row;
    for (int64_t i = 0; i < present; i++, to += result.row) {
        Real total[DIM] = {};
        for (int64_t n = 0; n < parts; n++) {
            if (tile < part[n].lo || tile >= part[n].hi) continue;
            const Real *from = parts > 1 ? nullptr : sums.tile(tile);
            if (parts > 1)
                from = part[n].sums + (DV ? (part[n].hi - part[n].lo) * BLOCK_K * Q_WIDE : 0) + (tile - part[n].lo) * BLOCK_K * WIDE;
            for (int d = 0; d < DIM; d++) total[d] += from[i * WIDE + d];
        }
        for (int d = 0; d < DIM; d++) to[d] = rounded(total[d]);
    }
}

static void run(Worker &w, Task &task, int64_t item) {
    const Call *call = task.call;
    const int64_t unit = item / task.parts, batch = unit / call->kv_heads, kv_head = unit % call->kv_heads;
    const Part &part = task.part[item];
    const int64_t keys = (part.hi - part.lo) * BLOCK_K, group = call->heads / call->kv_heads;
    w.dk = begin<HEAD_DIM, K_AS_IS>(call, call->dk, batch, kv_head, part, part.sums, w.own, w.edge_dk);
    w.dv = begin<V_DIM, V_AS_IS>(call, call->dv, batch, kv_head, part, part.sums ? part.sums + keys * Q_WIDE : nullptr,
                                 w.own + keys * Q_WIDE, w.edge_dv);
    for (int64_t n = part.begin; n < part.end; n++)
        differentiate(w, task, item % task.parts, batch, kv_head * group + n / call->rows, n % call->rows);
    if (task.parts > 1) return;
    for (int64_t tile = 0; tile < tiles_of(call); tile++) {
        if (w.with_dk && (!K_AS_IS || tile == w.dk.edge_tile)) end<HEAD_DIM, false>(call, call->dk, batch, kv_head, &part, 1, tile, w.dk);
        if (w.with_dv && (!V_AS_IS || tile == w.dv.edge_tile)) end<V_DIM, true>(call, call->dv, batch, kv_head, &part, 1, tile, w.dv);
    }
}

static Worker *worker_for(Task &task) {
    const Call *call = task.call;
    const int64_t tiles = tiles_of(call), most = KEPT_BYTES / (TILE * (int64_t)sizeof(Operand));
    int64_t slots = tiles < most ? tiles : most;
    if (slots < 1) slots = 1;
    const int64_t own = task.parts > 1 || (K_AS_IS && V_AS_IS) ? 0 : tiles * BLOCK_K * (Q_WIDE + V_WIDE);
    void *memory = malloc(sizeof(Worker) + slots * (TILE * (int64_t)sizeof(Operand) + 9) + own * (int64_t)sizeof(Real) + 256);
    if (!memory) return nullptr;
    Worker *w = (Worker *)(((uintptr_t)memory + 127) & ~(uintptr_t)63);
    ((void **)w)[-1] = memory;
    w->slots = slots;
    w->tiles = (Operand *)(((uintptr_t)(w + 1) + 63) & ~(uintptr_t)63);
    w->own = (Real *)(w->tiles + slots * TILE);
    w->tag = (int64_t *)(w->own + own);
    w->tag_odd = (bool *)(w->tag + slots);
    for (int64_t i = 0; i < slots; i++) w->tag[i] = -1;
    w->with_dq = call->dq.data, w->with_dk = call->dk.data, w->with_dv = call->dv.data;
    w->with_slopes = w->with_dq || w->with_dk;
    for (int n = 0; n < CAPTURED; n++) {
        w->captured.buffer[n] = call->gradients ? call->gradients[n] : nullptr;
        w->with_slopes |= w->captured.buffer[n] != nullptr;
    }
    return w;
}

// Chains of items are pulled; the items of a chain run one after the other.
static void work(void *pointer, int64_t) {
    Task &task = *(Task *)pointer;
    Worker *w = worker_for(task);
    if (!w) {
        __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        const int64_t chain = __atomic_fetch_add(&task.next, 1, __ATOMIC_RELAXED);
        if (chain >= task.chains) break;
        const Fixed fixed = fixed_of(task.call, 0, 0);
        for (int n = 0; n < CAPTURED; n++)
            w->captured.copy[n] = task.copies[n] ? task.copies[n] + chain * entries(fixed, n) : nullptr;
        for (int64_t item = chain; item < task.items; item += task.chains) run(*w, task, item);
    }
    free(((void **)w)[-1]);
}

// The parts of a key head, added up: one tile of keys at a time.
static void add_parts(void *pointer, int64_t) {
    Task &task = *(Task *)pointer;
    const Call *call = task.call;
    const int64_t tiles = tiles_of(call);
    for (;;) {
        const int64_t n = __atomic_fetch_add(&task.next, 1, __ATOMIC_RELAXED), unit = n / (tiles ? tiles : 1), tile = n % (tiles ? tiles : 1);
        if (unit >= call->batch * call->kv_heads || !tiles) break;
        const Part *part = task.part + unit * task.parts;
        if (call->dk.data) end<HEAD_DIM, false>(call, call->dk, unit / call->kv_heads, unit % call->kv_heads, part, task.parts, tile, {});
        if (call->dv.data) end<V_DIM, true>(call, call->dv, unit / call->kv_heads, unit % call->kv_heads, part, task.parts, tile, {});
    }
}

// Captured gradients, summed up in one order.
static void add_captured(const Task &task) {
    const Call *call = task.call;
    const int64_t lines = call->batch * call->heads;
    const Fixed fixed = fixed_of(call, 0, 0);
    for (int n = 0; n < CAPTURED; n++) {
        Real *to = call->gradients ? call->gradients[n] : nullptr;
        if (!to) continue;
        if (OVER[n] == HEADS)
            for (int64_t line = 0; line < lines; line++) {
                double total = 0;
                for (int64_t row = 0; row < call->rows; row++) total += task.heads[n][line * call->rows + row];
                to[line] = (Real)total;
            }
        if (OVER[n] == COLUMNS || OVER[n] == DIAGONALS) {
            const int64_t length = length_of(call, n), wanted = OVER[n] == COLUMNS ? call->kv_len : call->q_len + call->kv_len - 1;
            const Real *from = task.lines[n] + (OVER[n] == COLUMNS ? 0 : BLOCK_K);
            for (int64_t line = 0; line < lines; line++)
                for (int64_t i = 0; i < wanted; i++) {
                    Real total = 0;
                    for (int64_t part = 0; part < task.parts; part++) total += from[(part * lines + line) * length + i];
                    to[line * wanted + i] = total;
                }
        }
        if (OVER[n] == ENTRIES && task.copies[n])
            for (int64_t i = 0; i < entries(fixed, n); i++) {
                double total = 0;
                for (int64_t chain = 0; chain < task.chains; chain++) total += task.copies[n][chain * entries(fixed, n) + i];
                to[i] = (Real)total;
            }
    }
}

static int64_t visits(const Call *call, int64_t batch, int64_t head, int64_t row, int64_t &lo, int64_t &hi) {
    const int64_t line = call->slice_of[batch * call->heads + head] * call->rows + row;
    int64_t total = 0;
    for (int32_t r = 0; r < call->count[line]; r++) {
        const int32_t *record = call->spans + (line * call->records + r) * 4;
        total += record[3] - record[0];
        if (record[0] < lo) lo = record[0];
        if (record[3] > hi) hi = record[3];
    }
    return total;
}

// Cuts the tiles of queries of every key head into `parts` of about equal work. Bytes of their sums.
static int64_t cut(const Call *call, Part *part, int64_t parts) {
    const int64_t group = call->heads / call->kv_heads, all = group * call->rows;
    int64_t bytes = 0;
    for (int64_t unit = 0; unit < call->batch * call->kv_heads; unit++, part += parts) {
        const int64_t batch = unit / call->kv_heads, first = unit % call->kv_heads * group;
        int64_t work = 0, done = 0, n = 0, lo, hi;
        for (int64_t i = 0; i < all; i++) work += 1 + visits(call, batch, first + i / call->rows, i % call->rows, lo, hi);
        for (int64_t p = 0; p < parts; p++) {
            part[p] = {n, n, tiles_of(call), 0, nullptr};
            for (; n < all && (p == parts - 1 || done * parts < work * (p + 1)); n++)
                done += 1 + visits(call, batch, first + n / call->rows, n % call->rows, part[p].lo, part[p].hi);
            part[p].end = n;
            if (part[p].lo > part[p].hi) part[p].lo = part[p].hi = 0;
            bytes += (part[p].hi - part[p].lo) * BLOCK_K * (Q_WIDE + V_WIDE) * (int64_t)sizeof(Real);
        }
    }
    return bytes;
}

// Parts of a key head: so many that no thread waits long for the others. Depends on shapes and `threads` alone, so
// equal calls give equal bits.
static int64_t parts_wanted(const Call *call) {
    const int64_t units = call->batch * call->kv_heads, all = call->rows * (call->heads / call->kv_heads);
    const int64_t most = units < call->threads ? 4 * (call->threads / (units ? units : 1)) : 4;
    int64_t parts = 1;
    for (; parts < most && parts < all; parts++) {
        const int64_t items = units * parts, rounds = (items + call->threads - 1) / call->threads;
        if (10 * rounds * call->threads <= 11 * items) break;
    }
    return parts;
}

static void start(Task &task, Work what, int64_t items) {
    const Call *call = task.call;
    task.next = 0;
    if (call->parallel && call->threads > 1 && items > 1)
        call->parallel(call->pool, what, &task, call->threads < items ? call->threads : items);
    else
        what(&task, 0);
}

// Memory for captured gradients, and how many chains there are: one, if items meet at entries of which there are
// too many for copies.
static bool prepare(Task &task) {
    const Call *call = task.call;
    const int64_t lines = call->batch * call->heads;
    if (!CAPTURED || !call->gradients) return true;
    const Fixed fixed = fixed_of(call, 0, 0);
    int64_t bytes = 0;
    bool meet[CAPTURED + 1] = {}, done = true;
    for (int n = 0; n < CAPTURED; n++) {
        meet[n] = OVER[n] == ENTRIES && call->gradients[n] && !apart(call, fixed, n, task.parts > 1);
        if (meet[n]) bytes += entries(fixed, n) * 8;
    }
    if (bytes) {
        const int64_t fit = COPIES_BYTES / bytes, most = fit < 4 * call->threads ? fit : 4 * call->threads;
        task.chains = task.items < most ? task.items : most > 1 ? most : 1;
    }
    for (int n = 0; n < CAPTURED; n++) {
        if (!call->gradients[n]) continue;
        if (OVER[n] == HEADS) done &= (task.heads[n] = (Real *)malloc(lines * call->rows * sizeof(Real) + 1)) != nullptr;
        if (OVER[n] == COLUMNS || OVER[n] == DIAGONALS)
            done &= (task.lines[n] = (Real *)calloc(task.parts * lines * length_of(call, n) + LANES, sizeof(Real))) != nullptr;
        if (meet[n] && task.chains > 1) done &= (task.copies[n] = (double *)calloc(task.chains * entries(fixed, n), 8)) != nullptr;
    }
    return done;
}

// 0: done; 1: no memory.
static int64_t backward(const Call *call) {
    const int64_t units = call->batch * call->kv_heads;
    Task task = {};
    task.call = call;
    task.parts = parts_wanted(call);
    Part *part = (Part *)malloc(units * task.parts * sizeof(Part) + 1);
    if (!part) return 1;
    int64_t bytes = cut(call, part, task.parts);
    while (task.parts > 1 && bytes > PARTS_BYTES) bytes = cut(call, part, --task.parts);
    task.part = part;
    task.items = task.chains = units * task.parts;
    Real *sums = task.parts > 1 ? (Real *)malloc(bytes + 64) : nullptr;
    task.failed = !prepare(task) || (task.parts > 1 && !sums);
    if (!task.failed) {
        Real *next = sums;
        for (int64_t i = 0; i < task.items && sums; i++) {
            part[i].sums = next;
            next += (part[i].hi - part[i].lo) * BLOCK_K * (Q_WIDE + V_WIDE);
        }
        start(task, work, task.chains);
        if (task.parts > 1 && !task.failed) start(task, add_parts, units * tiles_of(call));
        if (CAPTURED && !task.failed) add_captured(task);
    }
    for (int n = 0; n < CAPTURED; n++) free(task.heads[n]), free(task.lines[n]), free(task.copies[n]);
    free(sums);
    free(part);
    return task.failed;
}
