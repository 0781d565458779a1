// -- rows that are no softmax --------------------------------------------------------------------------------------
//
// The score mod is the weight of a visible pair: 0 by selection where the mask hides the pair, whatever it is there.
// Weights are as they are, so that no row has a largest score, and none of its sums shrinks. `Call.lse` is the sum of
// a row's weights, `Call.top` the number of keys that it sees, where these are counted.

#if TERMS > 1
// acc += weights * values for one row, whose weights are where scores were.
static void add_row(Worker &w, int row, const Real *weights, int64_t start, int64_t end) {
    Real sum[V_WIDE] = {};
    for (int64_t j = start; j < end && j < w.visited->present; j++) {
        const Stored *value = w.visited->v.row(j);
        for (int d = 0; d < V_DIM && weights[j] != 0; d++) sum[d] += weights[j] * value[d];
    }
    for (int d = 0; d < V_DIM; d++) w.acc[row * V_WIDE + d] += sum[d];
}
#endif

template <bool PARTIAL, bool SMALL, class Meanwhile>
INLINE void weigh_rows(Worker &w, Strip &strip, int g, int M, Real unit, Meanwhile meanwhile) {
    const bool CLIPPED = PARTIAL && INTERVAL && !SMALL, LOOKED = PARTIAL && !CLIPPED;
    const int lo = w.from[g], hi = w.to[g];
    if (lo == hi) return;
    for (int i = 0; i < M; i++) {
        const int row = g + i, place = BY_HEAD ? w.place[row] : 0;
        const Bits begin = Bits{} + strip.begin[CLIPPED ? i : 0], end = Bits{} + strip.end[CLIPPED ? i : 0];
        meanwhile(i);
        w.shrink[row] = 1;
        Vec total = w.total[row];
        Bits count = {};
        const bool TAMED = TERMS > 1 && !SMALL && !NEAR_ONE;
        Raw most = {};
        const auto weight_at = [&](int j) __attribute__((always_inline)) {
            const Column &column = w.columns[place * VECTORS + j];
            const Vec score = scaled(load<Vec>(strip.scores + i * BLOCK_K + j * LANES), unit);
            const Bits key = cast<Bits>(counting()) + (Lane)(j * LANES);
            const Bits looked = LOOKED ? strip.seen[i * VECTORS + j] : bits(true);
            const Bits shown = CLIPPED ? (key >= begin) & (key < end) : looked;
            Vec p = modified(w.fixed[place], w.rows[row], column, score);
            if (PARTIAL) p = select(shown, p, Vec{});
            if (COUNTS) count -= COUNTED ? shown & counted(w.fixed[place], w.rows[row], column, score) : shown;
            total += p;
            if (DROPPED) p = select(kept(w.fixed[place], w.rows[row], column), p, Vec{});
            if (SCALED) {  // the scale of a hidden value may be NaN, and 0 times NaN is NaN
                p *= scale_of_value(w.fixed[place], w.rows[row], column);
                if (PARTIAL) p = select(shown, p, Vec{});
            }
            if (TAMED) {
                if (!NONNEGATIVE) most = (Raw)p << 1 > most ? (Raw)p << 1 : most;
                store(strip.scores + i * BLOCK_K + j * LANES, p);
            }
            return p;
        };
        const int ONE = SMALL ? 1 : PACK;  // vectors that are stored together
        for (int j = lo; j < hi; j += ONE) {
            Operand *to = w.weights + row * WEIGHTS + j / PACK * LANES * TERMS;
            if (LOOKED && !strip.open[j]) {
                for (int n = 0; n < TERMS && AMX && !SMALL; n++) store(to + n * LANES, Operands{});
                for (int n = j; n < hi && n < j + PACK && TAMED; n++)
                    store(strip.scores + i * BLOCK_K + n * LANES, Vec{});
                continue;
            }
            const Vec left = weight_at(j), right = ONE == 2 && j + 1 < hi ? weight_at(j + 1) : Vec{};
            if (SMALL) store(strip.scores + i * BLOCK_K + j * LANES, left);
            else store_terms(to, left, right);
        }
#if TERMS > 1
        if (NONNEGATIVE) most = (Raw)total << 1;  // no weight is larger
        if (TAMED && (w.exactly || any((Bits)(most > __builtin_bit_cast(Unsigned, (Real)0x1p36) << 1)))) {
            add_row(w, row, strip.scores + i * BLOCK_K, lo * LANES, hi * LANES);
            for (int j = lo; j < hi; j += ONE)
                for (int n = 0; n < TERMS; n++)
                    store(w.weights + row * WEIGHTS + (j / PACK * TERMS + n) * LANES, Operands{});
        }
#endif
        w.total[row] = total;
        for (int n = 0; n < LANES && COUNTS; n++) w.count[row] += count[n];
    }
}

// What an item's row is divided by.
INLINE Real divisor_of(const Worker &w, const Item &item, int row) {
    const Real by = divisor(w.fixed[row / item.count], w.rows[row], sum(w.total[row]), (Int)w.count[row]);
    return COUNTS && w.count[row] == 0 ? 0 : by;
}

static void attend(Worker &w, const Item &item);

// Outputs of an item, from its sums. What terms leave out of weights is far below 1, but not below any divisor: what is
// divided by a smaller one is summed up again, by vectors.
static void finish(Worker &w, const Item &item) {
    const Call *call = item.call;
    for (int row = 0; row < item.rows() && TERMS > 1 && !NEAR_ONE && !w.exactly; row++) {
        const Real by = magnitude(divisor_of(w, item, row));
        if (by == 0 || !(by < (Real)0x1p-60)) continue;
        w.exactly = true;
        attend(w, item);
        w.exactly = false;
        return;
    }
    for (int row = 0; row < item.rows(); row++) {
        const int64_t head = item.head + row / item.count, query = row_at(call->q_rows, item.start + row % item.count);
        const int64_t line = (item.batch * call->heads + head) * call->q_len + query;
        const Real by = divisor_of(w, item, row), factor = DROPPED ? survivors(w.fixed[row / item.count]) : 1;
        if (call->lse) call->lse[line] = sum(w.total[row]);
        if (call->top) call->top[line] = (Real)w.count[row];
        for (int64_t i = 0; call->norm && i < (call->norm_zeros ? call->norm_width : 2); i++)
            call->norm[call->norm_width * line + i] = 0;
        const bool split = SPLIT && item.rows() > FEW && item.rows() <= SQUARE;
        const Real *acc = w.acc + row * V_WIDE;
        Entry *out = at_row(call->out, item.batch, head, query);
        for (int d = 0; d < V_DIM; d++) {
            const int at = split ? (d & ~31) | (d & 1) << 4 | (d >> 1 & 15) : d;
            out[d] = rounded(by == 0 ? 0 : acc[at] * factor / by);
        }
    }
}
