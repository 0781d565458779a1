// -- work items ---------------------------------------------------------------------------------------------------

struct Task {
    const Call *call;
    const int32_t *order;  // [slices, rows] rows of tiles, longest first
    int64_t *next;         // [batch, kv_heads] items begun
    int64_t workers, slots, tile, failed;  // tile: Operands of a slot
};

// An item: `count` query rows from `start` on of each of the heads from `head` on, `heads` of one key head.
struct Item {
    const Call *call;
    int64_t batch, head, heads, start, count;
    int64_t kv_head() const { return head / (call->heads / call->kv_heads); }
    int rows() const { return (int)(heads * count); }
};

static void clear_sums(Worker &w, int rows) {
    for (int i = 0; i < rows; i++) w.total[i] = Vec{}, w.top[i] = LOWEST;
#if WEIGHTED
    for (int i = 0; i < rows; i++) w.count[i] = 0;
#endif
    for (int i = 0; i < rows * V_WIDE; i++) w.acc[i] = 0;
    for (int i = 0; i < rows * V_WIDE && TANGENT; i++) w.acc_tangents[i] = 0;
    for (int i = 0; i < rows && TANGENT; i++) w.mean[i] = Vec{};
}

#if INVARIANT
// Adds the sums of a part to those of the parts before it, `all`. It is one function, so that the compiler fuses the
// same operations in all calls. A part without a visible key changes nothing.
APART void join(Real *all, const Real *acc, Real total, Real top) {
    if (total == 0 && top == LOWEST) return;
    const Real most = maximum(all[V_WIDE + 1], top);
    const Real mine = weight((all[V_WIDE + 1] - most) * BASE), its = weight((top - most) * BASE);
    for (int d = 0; d < V_WIDE; d++) all[d] = all[d] * mine + acc[d] * its;
    all[V_WIDE] = all[V_WIDE] * mine + total * its, all[V_WIDE + 1] = most;
}
static void clear_parts(Worker &w, int rows) {
    for (int i = 0; i < rows * (V_WIDE + 2); i++) w.all[i] = 0;
    for (int row = 0; row < rows; row++) w.all[row * (V_WIDE + 2) + V_WIDE + 1] = LOWEST;
}
// Ends a part: the next one has no sums.
static void end_part(Worker &w, int rows) {
    for (int row = 0; row < rows; row++)
        join(w.all + row * (V_WIDE + 2), w.acc + row * V_WIDE, sum(w.total[row]), w.top[row]);
    clear_sums(w, rows);
}
// The sums of all parts, where `finish` looks for them.
static void take_parts(Worker &w, int rows) {
    for (int row = 0; row < rows; row++) {
        const Real *from = w.all + row * (V_WIDE + 2);
        __builtin_memcpy(w.acc + row * V_WIDE, from, V_WIDE * sizeof(Real));
        w.total[row] = Vec{}, w.total[row][0] = from[V_WIDE], w.top[row] = from[V_WIDE + 1];
    }
}
#endif

// Queries, coordinates and sums of an item's rows.
static void begin(Worker &w, const Item &item) {
    const Call *call = item.call;
    const Int first = (Int)(call->q_origin[item.batch * call->q_origin_step] + item.start);
    const Real unit = unit_of(call);
    const bool few = item.rows() <= FEW;
    const int all = round_up(item.rows(), few ? 1 : item.rows() <= SQUARE ? 16 : GROUP);
    w.tame_queries = true;
    w.adds_out = call->lse || HALF;
    w.q_varies = call->dq.data, w.k_varies = call->dk.data, w.v_varies = call->dv.data;
    w.places = BY_HEAD && !alike_in_group(call) ? item.heads : 1;
    for (int n = 0; n < item.heads; n++) {
        w.fixed[n] = fixed_of(call, item.batch, item.head + n);
        const Lines<const Entry> q = rows_of(call->q, item.batch, item.head + n, call->q_rows, item.start);
        const int row = n * (int)item.count;
        const int64_t here = n == item.heads - 1 ? all - row : item.count;
        pack_queries(w.query + row * QUERY, q, item.count, here, unit, few);
        if (TANGENT && call->dq.data) {
            const Lines<const Entry> dq = rows_of(call->dq, item.batch, item.head + n, call->q_rows, item.start);
            pack_queries(w.q_tangents + row * QUERY, dq, item.count, here, unit, few);
        }
#if BYTES
        for (int i = 0; i < item.count && item.rows() >= FEWEST && item.rows() <= SQUARE; i++)
            w.tame_queries &= take_query(w.whole, row + i, q.row(i), PAIR == 1 ? unit : 1);
#endif
        if (TERMS > 1 && !few) w.tame_queries &= tame(most_of<HEAD_DIM>(q, item.count) * magnitude(unit));
        for (int i = row; i < all; i++) {
            w.rows[i] = row_of(w.fixed[n], first + (i - row));
            w.place[i] = n < w.places ? n : 0;
            w.repeated[i] = i > row && alike(w.rows[i - 1], w.rows[i]);
        }
    }
    clear_sums(w, all);
#if AMX && PAIRS
    for (int step = 0; step < STEPS && all == 16; step += 16)
        turn_square(w.turned + step * 16, 16, w.query + step, QUERY);
#endif
}

static Tile tile_of(const Worker &w, const Item &item, int64_t number) {
    const Call *call = item.call;
    const int64_t head = item.kv_head(), start = number * BLOCK_K - shift_of(call, item.batch);
    const int64_t before = INVARIANT && start < 0 ? -start : 0;
    const int32_t *rows = rows_from(call->k_rows, start);
    const int64_t present = call->kv_len - start;
    Tile tile = {};
    tile.k = {{}, call->k.row, rows, before}, tile.v = {{}, call->v.row, rows, before};
    tile.present = present, tile.begin = before;
    tile.k_tangents = {{}, call->dk.row, rows, before}, tile.v_tangents = {{}, call->dv.row, rows, before};
    for (int i = 0; i < (MOVED ? 1 : CHUNKS); i++) {
        int64_t batch = item.batch, row = MOVED ? 0 : start + i * CHUNK;
        if (PAGE) {
            batch = page_of(w.fixed[0], item.batch, row / PAGE), row %= PAGE;
            batch = batch < 0 ? 0 : batch < call->pages ? batch : call->pages - 1;
        }
        tile.k.at[i] = at_row<Stored>(call->k, batch, head, row);
        tile.v.at[i] = at_row<Stored>(call->v, batch, head, row);
        if (TANGENT) tile.k_tangents.at[i] = at_row<Stored>(call->dk, batch, head, row);
        if (TANGENT) tile.v_tangents.at[i] = at_row<Stored>(call->dv, batch, head, row);
    }
    return tile;
}

// Packs keys, and values where they need it, unless that was done before.
static void pack(Worker &w, const Item &item, Tile &tile, int64_t number) {
    const Call *call = item.call;
    const int64_t name = (item.batch * call->kv_heads + item.kv_head()) * tiles_of(call) + number;
    const int64_t slot = w.slots == 1 ? 0 : number % w.slots;
    Operand *keys = w.tiles + slot * w.tile, *values = keys + KEYS;
    Operand *k_tangents = keys + w.tile / 2, *v_tangents = k_tangents + KEYS;
    const bool here = in_place(call);
    tile.slot = w.slot + slot;
    if (tile.slot->tile != name) {
        *tile.slot = {name, UNKNOWN, UNKNOWN, true, true};
        pack_turned<HEAD_DIM, BESIDE>(keys, tile.k, tile.present, BLOCK_K);
        const int64_t own = tile.present < BLOCK_K ? tile.present : BLOCK_K;  // what is behind is of the next tile
        if (!here) pack_rows<V_DIM, V_STRIDE>(values, tile.v, own, V_KEYS);
        if (TANGENT && w.k_varies) pack_turned<HEAD_DIM, BESIDE>(k_tangents, tile.k_tangents, tile.present, BLOCK_K);
        if (TANGENT && w.v_varies && !here) pack_rows<V_DIM, V_STRIDE>(v_tangents, tile.v_tangents, own, V_KEYS);
        if (TERMS > 1) tile.slot->tame_keys = tame(most_of<HEAD_DIM>(tile.k, own));
        if (TERMS > 1) tile.slot->tame_values = tame(most_of<V_DIM>(tile.v, own));
    }
    const int64_t next = (number + 1) % w.slots;
    tile.next = w.slot[next].tile == name + 1 ? w.tiles + next * w.tile : nullptr;
    tile.keys = keys;
    tile.values = here ? (const Operand *)tile.v.at[0] : values;
    tile.packed_k_tangents = k_tangents;
    tile.packed_v_tangents = here ? (const Operand *)tile.v_tangents.at[0] : v_tangents;
}

// One tile of keys for the rows of an item.
template <bool PARTIAL> static void visit(Worker &w, const Item &item, int64_t number) {
    const Call *call = item.call;
    const int64_t first = first_of(call, item.batch) - shift_of(call, item.batch) + number * BLOCK_K;
    Tile tile = tile_of(w, item, number);
    if (PARTIAL || POSITIONS)
        for (int n = 0; n < w.places; n++)
            for (int j = 0; j < VECTORS; j++)
                w.columns[n * VECTORS + j] = column_of(w.fixed[n], (Int)(first + j * LANES), tile.present - j * LANES,
                                                       tile.begin - j * LANES);
    for (int n = 0; n < w.places && DISTANCES; n++)
        by_distance(w.fixed[n], w.rows[n * item.count + item.count - 1], (Int)first, (int)item.count,
                    w.distances + n * DISTANCES * SPAN, w.columns + n * VECTORS);
    if (PARTIAL)
        for (int i = 0; i < V_KEYS; i++) w.some[i] = w.edges[i < BLOCK_K ? i : 0] = 0;
    const Real unit = unit_of(call);
    if (SQUARE && item.rows() <= SQUARE) {
        weigh<PARTIAL, true>(w, tile, item.rows(), unit);
#if BYTES
        if (item.rows() >= FEWEST && add_bytes<PARTIAL>(w, tile, item.rows())) return;
#endif
#if AMX && PAIRS
        if (item.rows() > FEW) return add_square<PARTIAL>(w, tile, item.rows());
#endif
        return add_few_values<PARTIAL>(w, tile, item.rows());
    }
    pack(w, item, tile, number);
#if WEIGHTED
    w.visited = &tile;
#endif
#if AMX
    const bool tame_values = tile.slot->tame_values;
    if (!TANGENT && !PARTIAL && tame_keys(w, tile) && tame_values) return weigh_and_add(w, tile, item.rows(), unit);
#endif
    weigh<PARTIAL, false>(w, tile, item.rows(), unit);
#if TERMS > 1
    if (!tame_values) return add_values_of_terms(w, tile, item.rows());
#endif
    if (PARTIAL) hide(w, tile, item.rows());
    add_values(w, tile, item.rows());
}
static void visit(Worker &w, const Item &item, int64_t number, bool partial) {
    partial ? visit<true>(w, item, number) : visit<false>(w, item, number);
}

#if WEIGHTED
static void finish(Worker &w, const Item &item);
#else
// Outputs of an item, from its sums.
static void finish(Worker &w, const Item &item) {
    const Call *call = item.call;
    for (int row = 0; row < item.rows(); row++) {
        const int64_t head = item.head + row / item.count, query = row_at(call->q_rows, item.start + row % item.count);
        const int64_t line = (item.batch * call->heads + head) * call->q_len + query;
        Entry *out = at_row(call->out, item.batch, head, query);
        const Real top = w.top[row];
        Real total = sum(w.total[row]), shrink = 1;
        Real peak = total == 0 ? -INF : top * NATURAL;  // natural logarithms from here on
        if (call->top) call->top[line] = total != total && top != INF ? NOT_A_NUMBER : peak;
        if (call->sinks) {
            const Real sink = call->sinks[head];
            const double above = (double)sink - (total == 0 ? (double)-INF : (double)top * EXACTLY_NATURAL);
            if (sink != -INF || peak > -INF) {
                shrink = total == 0 ? 0 : above > 0 ? exp((Real)-above) : 1;
                total = total * shrink + (above > 0 ? 1 : exp((Real)above));
                if (above > 0) peak = sink;
            }
        }
        if (call->lse) call->lse[line] = total == 0 ? -INF : peak + log(total);
        const Real share = total == 0 ? 0 : shrink / total;
        Real *norm = call->norm ? call->norm + call->norm_width * line : nullptr;
        if (norm) norm[0] = top, norm[1] = !INVARIANT && item.rows() <= FEW ? -share : share;  // below 0: of few rows
        const Real factor = share * (DROPPED ? survivors(w.fixed[head - item.head]) : 1);
        const Real *acc = w.acc + row * V_WIDE;
        Real joined[V_WIDE];
        if (SPLIT && item.rows() > FEW && item.rows() <= SQUARE) {
            for (int d = 0; d < V_WIDE; d++) joined[(d & ~31) | (d & 15) << 1 | (d >> 4 & 1)] = acc[d];
            acc = joined;
        }
        for (int d = 0; d < V_DIM && (!TANGENT || call->lse); d++) out[d] = rounded(acc[d] * factor);
        if (TANGENT) {
            const Real mean = sum(w.mean[row]) * share, *tangents = w.acc_tangents + row * V_WIDE;
            Entry *to = at_row(call->dout, item.batch, head, query);
            for (int d = 0; d < V_DIM; d++)
                to[d] = rounded(tangents[d] * factor - mean * (w.adds_out ? acc[d] * factor : real(out[d])));
            call->dlse[line] = mean;
        }
        if (!HALF || !norm || call->norm_width == 2) continue;
        Entry *rest = (Entry *)(norm + 2);
        const bool peaked = share >= PEAKED;  // memory of other rows is not even touched
        for (int64_t i = 2; i < call->norm_width && (peaked || call->norm_zeros); i++) norm[i] = 0;
        for (int d = 0; d < V_DIM && peaked; d++) rest[d] = rounded(acc[d] * factor - real(out[d]));
    }
}
#endif

// The tiles of a row.
#if !INVARIANT
static void visit_row(Worker &w, const Item &item, int64_t line) {
    const int32_t *record = item.call->spans + line * item.call->records * 4;
    for (int32_t n = 0; n < item.call->count[line]; n++, record += 4)
        for (int32_t tile = record[0]; tile < record[3]; tile++)
            visit(w, item, tile, tile < record[1] || tile >= record[2]);
}
#else
// Calls run(record, start, end) for the tiles that a row of tiles visits. They begin at multiples of BLOCK_K positions,
// so that each may cover two of the tiles that ranges count, which begin at the first key.
template <class Run> INLINE void by_position(const Item &item, int64_t line, Run run) {
    const Call *call = item.call;
    const int64_t shift = shift_of(call, item.batch);
    const int32_t *record = call->spans + line * call->records * 4;
    int64_t next = 0;
    for (int32_t n = 0; n < call->count[line]; n++, record += 4) {
        const int64_t start = record[0] < next ? next : record[0];
        const int64_t end = record[3] + (shift && record[3] * BLOCK_K - shift < call->kv_len);
        if (start < end) run(record, start, end), next = end;
    }
}
// The part of a tile, and the first tile of a part.
static int64_t part_of(const Item &item, int64_t tile) {
    const int64_t at = first_of(item.call, item.batch) - shift_of(item.call, item.batch) + tile * BLOCK_K;
    return (at - (at < 0 ? PART - 1 : 0)) / PART;
}
static int64_t tile_of_part(const Item &item, int64_t part) {
    return (part * PART - first_of(item.call, item.batch) + shift_of(item.call, item.batch)) / BLOCK_K;
}
// Visits those of the tiles of a record from `start` to `end`.
static void visit_range(Worker &w, const Item &item, const int32_t *record, int64_t start, int64_t end) {
    const bool shifted = shift_of(item.call, item.batch) > 0;
    for (int64_t tile = start; tile < end; tile++)
        visit(w, item, tile, tile < record[1] + shifted || tile >= record[2]);
}
static void visit_row(Worker &w, const Item &item, int64_t line) {
    const int all = PARTED ? item.rows() : 0;
    int64_t part = 0;
    clear_parts(w, all);
    by_position(item, line, [&](const int32_t *record, int64_t start, int64_t end) {
        for (int64_t next; start < end; start = next) {
            const int64_t now = part_of(item, start), after = tile_of_part(item, now + 1);
            if (now != part) end_part(w, all);
            part = now, next = after < end ? after : end;
            visit_range(w, item, record, start, next);
        }
    });
    end_part(w, all), take_parts(w, all);
}
#endif

static void attend(Worker &w, const Item &item) {
    const Call *call = item.call;
    begin(w, item);
    const int64_t slice = call->slice_of[item.batch * call->heads + item.head];
    visit_row(w, item, slice * call->rows + item.start / call->block_q);
    finish(w, item);
}

// A worker takes the next item when it is free. Each begins at another key head, whose packed tiles it keeps, and then
// helps the others.
static void work(void *pointer, int64_t number) {
    Task &task = *(Task *)pointer;
    const Call *call = task.call;
    const int64_t all = call->batch * call->kv_heads, group = call->heads / call->kv_heads;
    [[maybe_unused]] const MatrixUnit unit;
    Worker *w = take(task.slots, task.tile);
    if (!w) return __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    for (int64_t n = 0; n < all; n++) {
        const int64_t at = (number * all / task.workers + n) % all, batch = at / call->kv_heads;
        for (int64_t item; (item = next_item(task.next[at])) < call->rows * group;) {
            const int64_t head = at % call->kv_heads * group + item % group;
            const int32_t *order = task.order + call->slice_of[batch * call->heads + head] * call->rows;
            const int64_t start = (int64_t)order[item / group] * call->block_q, left = call->q_len - start;
            attend(*w, {call, batch, head, 1, start, left < call->block_q ? left : call->block_q});
        }
    }
    give(w);
}

// Rows of each slice by the bits of the number of tiles they visit, most first; equal ones from the last to the first,
// so that neighbours find the tiles packed which they share.
static void sort_rows(const Call *call, int64_t slices, int32_t *order) {
    for (int64_t s = 0; s < slices; s++, order += call->rows) {
        int32_t places_of[66] = {};
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t row = call->rows - 1; row >= 0; row--) {
                const int64_t visits = visits_of(call, s * call->rows + row).tiles;
                const int place = visits ? __builtin_clzll(visits) : 64;
                if (pass == 0) places_of[place + 1]++;
                else order[places_of[place]++] = (int32_t)row;
            }
            for (int i = 1; i < 66 && pass == 0; i++) places_of[i] += places_of[i - 1];
        }
    }
}

// 0: done; 1: no memory.
static int64_t all_rows(const Call *call, int64_t slices) {
    const int64_t all = call->batch * call->kv_heads, tile = (in_place(call) ? KEYS : TILE) * (TANGENT ? 2 : 1);
    int64_t *memory = (int64_t *)malloc(8 * (all + 1) + 4 * slices * call->rows);
    if (!memory) return 1;
    int32_t *order = (int32_t *)(memory + all);
    for (int64_t i = 0; i < all; i++) memory[i] = 0;
    sort_rows(call, slices, order);
    const int64_t workers = workers_for(call, call->rows * call->batch * call->heads);
    Task task = {call, order, memory, workers, slots_for(call, tile, KEPT_BYTES), tile, 0};
    spread(call, work, &task, workers);
    free(memory);
    return task.failed;
}
