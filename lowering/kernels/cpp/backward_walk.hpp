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

INLINE int64_t length_of(const Call *call, int n) {
    return OVER[n] == COLUMNS ? tiles_of(call) * BLOCK_K : call->q_len + call->kv_len + BLOCK_K;
}

static int64_t name_of(const Call *call, int64_t batch, int64_t kv_head, int64_t tile) {
    return (batch * call->kv_heads + kv_head) * tiles_of(call) + tile;
}

// The slot of the packed keys and values of one tile, from before or made now.
static int64_t packed(Worker &w, const Call *call, int64_t batch, int64_t kv_head, int64_t tile) {
    const int64_t name = name_of(call, batch, kv_head, tile), slot = tile % w.slots;
    Slot &known = w.slot[slot];
    if (known.tile == name) return slot;
    known.tile = name;
    const int64_t start = tile * BLOCK_K, present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
    const auto k = rows_of(call->k, batch, kv_head, call->k_rows, start), v = rows_of(call->v, batch, kv_head, call->k_rows, start);
    Operand *to = w.tiles + slot * TILE;
    pack_turned<HEAD_DIM, BESIDE>(to, k, present, BLOCK_K);
    pack_turned<V_DIM, BESIDE>(to + TURNED_K, v, present, BLOCK_K);
    if (!K_AS_IS) pack_rows<HEAD_DIM, K_STRIDE>(to + TURNED_K + TURNED_V, k, present, round_up(BLOCK_K, DEPTH));
    known.odd = TERMS > 1 ? !tame(most_of<HEAD_DIM>(k, present)) : any_odd(k, present, HEAD_DIM);
    known.wild = TERMS > 1 && !tame(most_of<V_DIM>(v, present));
    return slot;
}

static void load_queries(Worker &w, const Call *call, const Fixed &fixed, int64_t batch, int64_t head, int64_t row) {
    const int64_t start = row * call->block_q, line = (batch * call->heads + head) * call->q_len;
    const int present = (int)(call->q_len - start < call->block_q ? call->q_len - start : call->block_q);
    const int all = round_up(present, GROUP);  // with zeros behind the queries
    const auto of = [&](const Array &x) { return rows_of(x, batch, head, call->q_rows, start); };
#if WEIGHTED
    const Lines<const Entry> q = of(call->q), dout = of(call->dout);
#else
    const Lines<const Entry> q = of(call->q), out = of(call->out), dout = of(call->dout);
#endif
    w.present = present;
    pack_rows<HEAD_DIM, Q_LINE>(w.q_lines, q, present, all);
    pack_rows<V_DIM, V_LINE>(w.dout_lines, dout, present, all);
#if PAIRS || AMX
    pack_left<V_DIM>(w.dout_left, dout, present, all, 1);
#endif
    w.few = false;
    const Int q_first = (Int)(call->q_origin[batch * call->q_origin_step] + start);
#if !WEIGHTED
    pack_left<V_DIM>(w.outs, out, present, all, 1);
    multiply_outs(w);
#endif
#if TERMS > 1
    const bool wild_dout = !tame(most_of<V_DIM>(dout, present));
    w.wild_queries = !tame(most_of<HEAD_DIM>(q, present) * magnitude(unit_of(call)));
    w.wild_outs = wild_dout || !tame(most_of<V_DIM>(out, present));
    w.queries_odd = w.wild_queries || wild_dout;
    for (int i = 0; i < present && w.wild_outs; i++) {
        Real products[LANES];
        dots_of_terms<V_DIM>(w.dout_left + i * V_STEPS, 1, out, i, 1, products, 0);
        w.delta[i] = products[0];
    }
#else
    w.queries_odd = any_odd(q, present, HEAD_DIM) || any_odd(dout, present, V_DIM);
#endif
    for (int i = 0; i < present; i++) {
        const int64_t at = line + row_at(call->q_rows, start + i);
#if WEIGHTED
        w.delta[i] = call->dlse ? -call->dlse[at] : 0;
#else
        const Real lse = call->lse[at];
#endif
        w.rows[i] = row_of(fixed, q_first + i);
        w.repeated[i] = i && alike(w.rows[i - 1], w.rows[i]);
#if !WEIGHTED
        w.shift[i] = lse == -INF ? INF : SCORED ? lse : lse * LOG2E, w.share[i] = 1;  // weights of an empty row are 0
        const Real *norm = call->norm ? call->norm + call->norm_width * at : nullptr;  // 0: nothing is known but lse
        if (norm && norm[1] != 0) w.shift[i] = norm[0], w.share[i] = magnitude(norm[1]), w.few |= norm[1] < 0;
        if (HALF && norm && call->norm_width > 2 && magnitude(norm[1]) >= PEAKED) {
            const Entry *rest = (const Entry *)(norm + 2);
            Vec products = {};
            for (int d = 0; d < V_DIM; d += LANES)
                products += load_reals(dout.row(i) + d, V_DIM - d) * load_reals(rest + d, V_DIM - d);
            w.delta[i] += sum(products);
        }
        if (call->dlse) w.delta[i] -= call->dlse[at];
#endif
    }
    pack_queries(w.query, q, present, all, unit_of(call), w.few && !MOVED);
    for (int i = 0; i < all * Q_WIDE; i++) w.dq[i] = 0;
}

// A tile of queries beside one tile of keys.
template <bool PARTIAL>
static void visit(Worker &w, const Call *call, const Fixed &fixed, const Operand *tile, const Lines<const Entry> &keys,
                  const Lines<const Entry> &values, const Operand *rows, int64_t stride, int64_t n, int64_t present,
                  int64_t slot, bool exactly) {
    const Real scale = (Real)call->scale, unit = unit_of(call);
    const int groups = (w.present + GROUP - 1) / GROUP;
    for (int i = 0; i < KEY_GROUPS; i++) w.count[i] = 0;
    for (int start = 0; start < w.present; start += GROUP)
        strip<PARTIAL>(w, fixed, tile, tile + TURNED_K, keys, values, present, start, unit, scale,
                       TERMS > 1 && (w.wild_queries || w.slot[slot].odd), TERMS > 1 && (w.wild_outs || w.slot[slot].wild));
    if (exactly) return add_exactly(w, groups, rows, stride, present, n);
    const int seen = present < BLOCK_K ? (int)present : BLOCK_K;
    const int all_keys = round_up(seen, GROUP) < BLOCK_K ? round_up(seen, GROUP) : BLOCK_K;
    for (int i = 0; i * GROUP < seen; i++)
        w.by_key[i] = PARTIAL ? steps_of(w.queries[i], w.count[i]) : Steps{0, groups * GROUP / PACK, nullptr};
    if (w.with_dv)
        accumulate_turned<V_WIDE>(w, groups, all_keys, w.weights, w.dout_lines, V_LINE, w.dv.tile(n),
                                  w.dv.row_of(n, V_WIDE), w.dv.rows_of(n, w.counted));
    if (w.with_dk)
        accumulate_turned<Q_WIDE>(w, groups, all_keys, w.slopes, w.q_lines, Q_LINE, w.dk.tile(n),
                                  w.dk.row_of(n, Q_WIDE), w.dk.rows_of(n, w.counted));
    if (!w.with_dq) return;
    for (int g = 0; g < groups && !PARTIAL; g++) w.by_query[g] = {0, (seen + PACK - 1) / PACK, nullptr};
    accumulate<Q_WIDE, GROUP>(groups * GROUP, w.by_query, left_slopes(w), LEFT, 1, rows, stride, w.dq, Q_WIDE);
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
        for (int i = 0; i < w.present && OVER[n] == ROWS_OF_QUERIES; i++) captured.row[n][i] = Vec{};
    }
    const int64_t spans = call->slice_of[line] * call->rows + row;
    const int32_t *record = call->spans + spans * call->records * 4;
    for (int32_t r = 0; r < call->count[spans]; r++, record += 4)
        for (int64_t n = record[0]; n < record[3]; n++) {
            const bool partial = n < record[1] || n >= record[2];
            const int64_t start = n * BLOCK_K, slot = packed(w, call, batch, kv_head, n);
            const int64_t present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
            const Operand *tile = w.tiles + slot * TILE, *rows = tile + TURNED_K + TURNED_V;
            w.next = w.slot[(n + 1) % w.slots].tile == name_of(call, batch, kv_head, n + 1) ? w.tiles + (n + 1) % w.slots * TILE : nullptr;
            const Lines<const Entry> keys = rows_of(call->k, batch, kv_head, call->k_rows, start);
            const Lines<const Entry> values = rows_of(call->v, batch, kv_head, call->k_rows, start);
            const bool odd = w.queries_odd || w.slot[slot].odd;
            int64_t stride = K_STRIDE;
            if (K_AS_IS) rows = (const Operand *)keys.data, stride = keys.stride;
            if (partial || POSITIONS)
                for (int j = 0; j < VECTORS; j++)
                    w.columns[j] = column_of(fixed, (Int)(k_origin + start + j * LANES), call->kv_len - start - j * LANES);
            if (DISTANCES)
                by_distance(fixed, w.rows[w.present - 1], (Int)(k_origin + start), w.present, w.distances, w.columns);
            for (int c = 0; c < CAPTURED; c++)
                if (task.lines[c]) {
                    const int64_t length = length_of(call, c), in_line = OVER[c] == COLUMNS
                        ? start : row * call->block_q - start + call->kv_len - 1 + BLOCK_K;
                    captured.place[c] = task.lines[c] + (part * call->batch * call->heads + line) * length + in_line;
                }
            if (partial)
                visit<true>(w, call, fixed, tile, keys, values, rows, stride, n, present, slot, odd);
            else
                visit<false>(w, call, fixed, tile, keys, values, rows, stride, n, present, slot, TERMS > 1 && odd);
        }
    for (int n = 0; n < CAPTURED; n++) {
        if (!captured.buffer[n]) continue;
        if (OVER[n] == HEADS) task.heads[n][line * call->rows + row] = sum(captured.head[n]);
        for (int i = 0; i < w.present && OVER[n] == ROWS_OF_QUERIES; i++)
            captured.buffer[n][line * call->q_len + row * call->block_q + i] = sum(captured.row[n][i]);
    }
    if (!w.with_dq) return;
    for (int i = 0; i < w.present; i++) {
        Entry *dq = at_row(call->dq, batch, head, row_at(call->q_rows, row * call->block_q + i));
        for (int d = 0; d < HEAD_DIM; d++) dq[d] = rounded(w.dq[i * Q_WIDE + d]);
    }
}

static void clear(Real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = 0;
}

// Where dK (or dV) of an item is summed up: the item's own memory, the result, or the worker's memory.
template <int DIM, bool AS_IS>
static Sums begin(const Call *call, const Array &result, int64_t batch, int64_t kv_head, const Part &part, Real *own, Real *worker, Real *edge) {
    const int WIDE = round_up(DIM, LANES);
    if (!result.data) return {};
    Sums sums = {own ? own : worker, edge, WIDE, part.lo, -1, nullptr};
    if (own || !AS_IS) {
        clear(sums.data, (part.hi - part.lo) * BLOCK_K * WIDE);
        return sums;
    }
    Real *data = at_row<Real>(result, batch, kv_head, 0);
    for (int64_t i = 0; i < call->kv_len; i++) clear(data + i * result.row, DIM);
    clear(edge, BLOCK_K * WIDE);
    return {data, edge, result.row, 0, call->kv_len % BLOCK_K ? call->kv_len / BLOCK_K : -1, call->k_rows};
}

// Sums to results: the tiles of an item, or of all items of a key head, in their order.
template <int DIM, bool DV>
static void end(const Call *call, const Array &result, int64_t batch, int64_t kv_head, const Part *part, int64_t parts, int64_t tile, Sums sums) {
    const int WIDE = round_up(DIM, LANES);
    const int64_t start = tile * BLOCK_K, present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
    for (int64_t i = 0; i < present; i++) {
        Entry *to = at_row(result, batch, kv_head, row_at(call->k_rows, start + i));
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
    w.dk = begin<HEAD_DIM, DK_AS_IS>(call, call->dk, batch, kv_head, part, part.sums, w.own, w.edge_dk);
    w.dv = begin<V_DIM, DV_AS_IS>(call, call->dv, batch, kv_head, part, part.sums ? part.sums + keys * Q_WIDE : nullptr,
                                 w.own + keys * Q_WIDE, w.edge_dv);
    for (int64_t n = part.begin; n < part.end; n++)
        differentiate(w, task, item % task.parts, batch, kv_head * group + n / call->rows, n % call->rows);
    if (task.parts > 1) return;
    for (int64_t tile = 0; tile < tiles_of(call); tile++) {
        if (w.with_dk && (!DK_AS_IS || tile == w.dk.edge_tile)) end<HEAD_DIM, false>(call, call->dk, batch, kv_head, &part, 1, tile, w.dk);
        if (w.with_dv && (!DV_AS_IS || tile == w.dv.edge_tile)) end<V_DIM, true>(call, call->dv, batch, kv_head, &part, 1, tile, w.dv);
    }
}
