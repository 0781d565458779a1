// -- decoding -----------------------------------------------------------------------------------------------------
//
// A few queries over many keys: the query heads of one key head are rows of one item, and the tiles they visit are
// split into parts. Their number depends on the call alone, not on its threads, and the worker that ends last combines
// the parts of a row in order: the result repeats bit for bit.

const int64_t LEAST = BLOCK_K < 256 ? 256 / BLOCK_K : 1, MOST_TILES = BLOCK_K < 4096 ? 4096 / BLOCK_K : 1;  // of a part

struct Parts {
    const Call *call;
    int64_t heads, bundles;  // query heads of an item; items a key head needs
    int64_t tiles, count;    // visited tiles of a part, unless PARTED; parts
    int64_t next, failed;
    int64_t *done;           // [batch, kv_heads, bundles] parts that have ended
    Real *sums;              // [batch, kv_heads, bundles, count, rows, V_WIDE + 2]: acc, total, top
};

static Item bundle_of(const Parts &parts, int64_t number) {
    const Call *call = parts.call;
    const int64_t group = call->heads / call->kv_heads, batch = number / (call->kv_heads * parts.bundles);
    const int64_t first = number % parts.bundles * parts.heads, left = group - first;
    const int64_t head = number / parts.bundles % call->kv_heads * group + first;
    return {call, batch, head, left < parts.heads ? left : parts.heads, 0, call->q_len};
}

static Real *sums_of(const Parts &parts, int64_t number, int64_t part) {
    return parts.sums + (number * parts.count + part) * parts.heads * parts.call->q_len * (V_WIDE + 2);
}

#if INVARIANT
static void combine(Worker &w, const Parts &parts, const Item &item, int64_t number) {
    clear_parts(w, item.rows());
    for (int64_t part = 0; part < parts.count; part++)
        for (int row = 0; row < item.rows(); row++) {
            const Real *from = sums_of(parts, number, part) + row * (V_WIDE + 2);
            join(w.all + row * (V_WIDE + 2), from, from[V_WIDE], from[V_WIDE + 1]);
        }
    take_parts(w, item.rows());
}
// The first part that an item visits, and how many there are to the last one.
static int64_t parts_of(const Item &item, int64_t line, int64_t &first) {
    int64_t count = 0;
    by_position(item, line, [&](const int32_t *, int64_t start, int64_t end) {
        first = count ? first : part_of(item, start), count = part_of(item, end - 1) - first + 1;
    });
    return count;
}
#elif WEIGHTED
static void combine(Worker &w, const Parts &parts, const Item &item, int64_t number) {
    for (int64_t part = 0; part < parts.count; part++)
        for (int row = 0; row < item.rows(); row++) {
            const Real *from = sums_of(parts, number, part) + row * (V_WIDE + 2);
            for (int d = 0; d < V_WIDE; d++) w.acc[row * V_WIDE + d] += from[d];
            w.total[row][0] += from[V_WIDE], w.count[row] += (int64_t)from[V_WIDE + 1];
        }
}
#else
// The sums of an item's parts, one after the other.
static void combine(Worker &w, const Parts &parts, const Item &item, int64_t number) {
    for (int64_t part = 0; part < parts.count; part++)
        for (int row = 0; row < item.rows(); row++) {
            const Real *from = sums_of(parts, number, part) + row * (V_WIDE + 2);
            Real *acc = w.acc + row * V_WIDE;
            const Real total = from[V_WIDE], top = from[V_WIDE + 1], most = maximum(w.top[row], top);
            const Real mine = weight((w.top[row] - most) * BASE), its = weight((top - most) * BASE);
            for (int d = 0; d < V_WIDE; d++) acc[d] = acc[d] * mine + from[d] * its;
            w.total[row] *= mine;
            w.total[row][0] += total * its;
            w.top[row] = most;
        }
}
#endif

static void decode_part(Worker &w, Parts &parts, int64_t number, int64_t part) {
    const Call *call = parts.call;
    const Item item = bundle_of(parts, number);
    begin(w, item);
    const int64_t line = (int64_t)call->slice_of[item.batch * call->heads + item.head] * call->rows;
#if INVARIANT
    int64_t first = 0;
    parts_of(item, line, first);
    const int64_t from = tile_of_part(item, first + part), until = tile_of_part(item, first + part + 1);
    by_position(item, line, [&](const int32_t *record, int64_t start, int64_t end) {
        visit_range(w, item, record, start < from ? from : start, end < until ? end : until);
    });
    if (parts.count == 1) clear_parts(w, item.rows()), end_part(w, item.rows()), take_parts(w, item.rows());
#else
    const int32_t *record = call->spans + line * call->records * 4;
    int64_t seen = 0, first = part * parts.tiles, end = first + parts.tiles;
    for (int32_t n = 0; n < call->count[line]; n++, record += 4) {
        int64_t tile = record[0] + (first > seen ? first - seen : 0);
        for (; tile < record[3] && seen + (tile - record[0]) < end; tile++)
            visit(w, item, tile, tile < record[1] || tile >= record[2]);
        seen += record[3] - record[0];
    }
#endif
    if (parts.count == 1) return finish(w, item);
    Real *to = sums_of(parts, number, part);
    for (int row = 0; row < item.rows(); row++, to += V_WIDE + 2) {
        for (int d = 0; d < V_WIDE; d++) to[d] = w.acc[row * V_WIDE + d];
        to[V_WIDE] = sum(w.total[row]), to[V_WIDE + 1] = w.top[row];
#if WEIGHTED
        to[V_WIDE + 1] = (Real)w.count[row];  // of a part, which a Real holds
#endif
    }
    if (__atomic_fetch_add(&parts.done[number], 1, __ATOMIC_ACQ_REL) + 1 < parts.count) return;
    clear_sums(w, item.rows());
    combine(w, parts, item, number);
    finish(w, item);
}

static void decode_work(void *pointer, int64_t) {
    Parts &parts = *(Parts *)pointer;
    [[maybe_unused]] const MatrixUnit unit;
    Worker *w = take(1, TILE);
    if (!w) return __atomic_store_n(&parts.failed, 1, __ATOMIC_RELAXED);
    const int64_t items = parts.call->batch * parts.call->kv_heads * parts.bundles * parts.count;
    for (int64_t n; (n = next_item(parts.next)) < items;)
        decode_part(*w, parts, n / parts.count, n % parts.count);
    give(w);
}

// 0: done; 1: no memory.
static int64_t decode(const Call *call, int64_t slices, bool alike) {
    const int64_t group = alike ? call->heads / call->kv_heads : 1;
    const int64_t fit = ROWS / call->q_len < HEADS ? ROWS / call->q_len : HEADS;
    Parts parts = {call, group < fit ? group : fit, 0, 1, 1, 0, 0, nullptr, nullptr};
    parts.bundles = (call->heads / call->kv_heads + parts.heads - 1) / parts.heads;
    int64_t most = 1;
    for (int64_t s = 0; s < slices; s++) {
        const int64_t tiles = visits_of(call, s * call->rows).tiles;
        most = tiles > most ? tiles : most;
    }
    const int64_t items = call->batch * call->kv_heads * parts.bundles;
    parts.tiles = most * items / 256;  // enough items for many threads, none too small to be worth its sums
    parts.tiles = parts.tiles < LEAST ? LEAST : parts.tiles > MOST_TILES ? MOST_TILES : parts.tiles;
    parts.count = (most + parts.tiles - 1) / parts.tiles;
#if INVARIANT
    parts.count = 1;
    for (int64_t i = 0; i < items; i++) {
        const Item item = bundle_of(parts, i);
        int64_t first = 0;
        const int64_t slice = call->slice_of[item.batch * call->heads + item.head];
        const int64_t count = parts_of(item, slice * call->rows, first);
        parts.count = count > parts.count ? count : parts.count;
    }
#endif
    const int64_t sums = parts.count > 1 ? items * parts.count * parts.heads * call->q_len * (V_WIDE + 2) : 0;
    parts.done = (int64_t *)malloc(8 * items + sums * sizeof(Real));
    if (!parts.done) return 1;
    parts.sums = (Real *)(parts.done + items);
    for (int64_t i = 0; i < items; i++) parts.done[i] = 0;
    spread(call, decode_work, &parts, workers_for(call, items * parts.count));
    free(parts.done);
    return parts.failed;
}

// A call with one row of tiles is split over keys; otherwise rows are the work items.
static int64_t forward(const Call *call) {
    const int64_t group = call->heads / call->kv_heads;
    int64_t slices = 0;
    bool alike = true;  // the heads of a group visit the same tiles
    for (int64_t i = 0; i < call->batch * call->heads; i++) {
        if (call->slice_of[i] >= slices) slices = call->slice_of[i] + 1;
        alike &= call->slice_of[i] == call->slice_of[i - i % group];
    }
    return call->rows == 1 && !TANGENT ? decode(call, slices, alike) : all_rows(call, slices);
}
