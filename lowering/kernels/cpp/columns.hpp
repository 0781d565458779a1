// -- columns ------------------------------------------------------------------------------------------------------
//
// The weights of each key, exp(score - lse), summed over the queries of one head. One work item is some tiles of
// queries of one head, every `parts`-th one. For every tile of keys that it visits, it computes scores of GROUP rows at
// a time, and adds their weights to sums of its own, which are added up in the order of the items.

const Real BASE = SCORED ? LOG2E : 1;
const int ROWS = round_up(BLOCK_Q, GROUP);
const int64_t TILE = (int64_t)STEPS * BLOCK_K;  // Operands of the packed keys of a tile
const int64_t KEPT_BYTES = 16 << 20;            // packed tiles that a worker keeps for the next row of tiles

struct Slot {
    int64_t tile;
    bool wild;  // with TERMS: keys are not tame
};

// The memory of one worker.
struct Worker {
    int64_t slots;
    Slot *slot;      // [slots]
    Operand *tiles;  // [slots, TILE]
    alignas(64) Operand query[ROWS * QUERY];
    Real shift[ROWS];
    Row rows[ROWS];
    bool repeated[ROWS];  // whether a row sees what the row before it sees
    int present;          // queries of the tile
    bool wild;            // with TERMS: queries are not tame
    Column columns[VECTORS];
    Real distances[DISTANCES ? DISTANCES * SPAN : 1];
    Bits seen[GROUP * VECTORS];
    bool open[VECTORS];  // whether the group of rows at hand sees a vector of keys
    Real scores[GROUP * BLOCK_K];
};

struct Task {
    const Call *call;
    int64_t parts, items, next, failed;
    Real *sums;  // [items, keys of whole tiles]
};

static int64_t packed(Worker &w, const Call *call, int64_t batch, int64_t kv_head, int64_t tile) {
    const int64_t name = (batch * call->kv_heads + kv_head) * tiles_of(call) + tile, slot = tile % w.slots;
    if (w.slot[slot].tile == name) return slot;
    const int64_t start = tile * BLOCK_K, present = call->kv_len - start < BLOCK_K ? call->kv_len - start : BLOCK_K;
    const auto keys = rows_of(call->k, batch, kv_head, call->k_rows, start);
    pack_turned<HEAD_DIM, BESIDE>(w.tiles + slot * TILE, keys, present, BLOCK_K);
    w.slot[slot] = {name, TERMS > 1 && !tame(most_of<HEAD_DIM>(keys, present))};
    return slot;
}

static void load_queries(Worker &w, const Call *call, const Fixed &fixed, int64_t batch, int64_t head, int64_t row) {
    const int64_t start = row * call->block_q, line = (batch * call->heads + head) * call->q_len;
    const int present = (int)(call->q_len - start < call->block_q ? call->q_len - start : call->block_q);
    const auto q = rows_of(call->q, batch, head, call->q_rows, start);
    const Int first = (Int)(call->q_origin[batch * call->q_origin_step] + start);
    w.present = present;
    w.wild = TERMS > 1 && !tame(most_of<HEAD_DIM>(q, present) * magnitude(unit_of(call)));
    pack_queries(w.query, q, present, round_up(present, GROUP), unit_of(call), false);
    for (int i = 0; i < present; i++) {
        const Real lse = call->lse[line + start + i];
        w.rows[i] = row_of(fixed, first + i);
        w.repeated[i] = i && alike(w.rows[i - 1], w.rows[i]);
        w.shift[i] = lse == -INF ? INF : SCORED ? lse : lse * LOG2E;  // weights of an empty row are 0
    }
}

// Which keys of a tile `rows` rows from `start` on see, and whether any of them sees a key.
static bool look(Worker &w, const Fixed &fixed, int start, int rows) {
    bool some = false;
    for (int j = 0; j < VECTORS; j++) {
        Bits seen = {};
        uint32_t all = 0;
        for (int i = 0; i < rows; i++) {
            if (!REPEATED || i == 0 || !w.repeated[start + i])
                seen = w.columns[j].inside & visible(fixed, w.rows[start + i], w.columns[j]);
            w.seen[i * VECTORS + j] = seen;
            all |= truths(seen);
        }
        w.open[j] = all, some |= w.open[j];
    }
    return some;
}

// Adds the weights of a tile of queries beside a tile of keys to `sums`.
template <bool PARTIAL>
static void visit(Worker &w, const Fixed &fixed, const Operand *keys, const Lines<const Entry> &from, int64_t present,
                  bool wild, Real unit, Real *sums) {
    for (int start = 0; start < w.present; start += GROUP) {
        const int rows = GROUP < w.present - start ? GROUP : w.present - start;
        const Operand *q = w.query + start * QUERY;
        if (PARTIAL && !look(w, fixed, start, rows)) continue;
        for (int j = 0, n; j < VECTORS; j += n ? n : 1) {
            n = PARTIAL ? opened(w.open, j) : PANEL - j % PANEL;
            if (!n) continue;
#if TERMS > 1
            for (int i = j; i < j + n && wild; i++)
                dots_of_terms<HEAD_DIM>(q, rows, from, i * LANES, present - i * LANES, w.scores + i * LANES, BLOCK_K);
#endif
            if (!wild) multiply_queries<ZERO>(n, q, keys + vector_at(j, STEPS), w.scores + j * LANES);
        }
        for (int j = 0; j < VECTORS; j++) {
            if (PARTIAL && !w.open[j]) continue;
            Vec sum = {};
            for (int i = 0; i < rows; i++) {
                const Vec product = scaled(load<Vec>(w.scores + i * BLOCK_K + j * LANES), unit);
                const Vec score = score_of(fixed, w.rows[start + i], w.columns[j], product);
                const Vec p = weight((score - w.shift[start + i]) * BASE, NEGLIGIBLE);
                sum += PARTIAL ? select(w.seen[i * VECTORS + j], p, Vec{}) : p;
            }
            store(sums + j * LANES, load<Vec>(sums + j * LANES) + sum);
        }
    }
    (void)from, (void)present;
}

static void run(Worker &w, const Task &task, int64_t item) {
    const Call *call = task.call;
    const int64_t line = item / task.parts, batch = line / call->heads, head = line % call->heads;
    const int64_t kv_head = head / (call->heads / call->kv_heads);
    const int64_t k_origin = call->k_origin[batch * call->k_origin_step];
    const Fixed fixed = fixed_of(call, batch, head);
    Real *sums = task.sums + item * tiles_of(call) * BLOCK_K;
    for (int64_t row = item % task.parts; row < call->rows; row += task.parts) {
        const int64_t spans = call->slice_of[line] * call->rows + row;
        const int32_t *record = call->spans + spans * call->records * 4;
        if (call->count[spans]) load_queries(w, call, fixed, batch, head, row);
        for (int32_t r = 0; r < call->count[spans]; r++, record += 4)
            for (int64_t n = record[0]; n < record[3]; n++) {
                const int64_t start = n * BLOCK_K, slot = packed(w, call, batch, kv_head, n);
                const bool partial = n < record[1] || n >= record[2], wild = w.wild || w.slot[slot].wild;
                const Lines<const Entry> keys = rows_of(call->k, batch, kv_head, call->k_rows, start);
                if (partial || POSITIONS)
                    for (int j = 0; j < VECTORS; j++)
                        w.columns[j] = column_of(fixed, (Int)(k_origin + start + j * LANES), call->kv_len - start - j * LANES);
                if (DISTANCES)
                    by_distance(fixed, w.rows[w.present - 1], (Int)(k_origin + start), w.present, w.distances, w.columns);
                const auto add = partial ? visit<true> : visit<false>;
                add(w, fixed, w.tiles + slot * TILE, keys, call->kv_len - start, wild, unit_of(call), sums + start);
            }
    }
}

// A worker takes the next item when it is free.
static void work(void *pointer, int64_t) {
    Task &task = *(Task *)pointer;
    [[maybe_unused]] const MatrixUnit unit;
    const int64_t slots = slots_for(task.call, TILE, KEPT_BYTES);
    void *memory = malloc(sizeof(Worker) + slots * (TILE * (int64_t)sizeof(Operand) + (int64_t)sizeof(Slot)) + 256);
    if (!memory) return __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    Worker *w = (Worker *)next_line(memory);
    w->slots = slots;
    w->tiles = (Operand *)next_line(w + 1);
    w->slot = (Slot *)(w->tiles + slots * TILE);
    for (int64_t i = 0; i < slots; i++) w->slot[i].tile = -1;
    for (int64_t item; (item = next_item(task.next)) < task.items;) run(*w, task, item);
    free(memory);
}

// 0: done; 1: no memory. Columns are dv, of Real: those of values that are 1.
static int64_t columns(const Call *call) {
    const int64_t lines = call->batch * call->heads, keys = tiles_of(call) * BLOCK_K;
    // so many parts that no thread waits long for the others; by shapes and `threads`, so equal calls give equal bits
    int64_t parts = 2.0 * lines * call->q_len * call->kv_len * HEAD_DIM < SHORT ? 1 : (4 * call->threads + lines - 1) / lines;
    if (parts > call->rows) parts = call->rows;
    Task task = {call, parts, lines * parts, 0, 0, (Real *)calloc(lines * parts * keys + LANES, sizeof(Real))};
    if (!task.sums) return 1;
    spread(call, work, &task, workers_for(call, task.items));
    for (int64_t line = 0; line < lines; line++) {
        Real *to = at_row<Real>(call->dv, line / call->heads, line % call->heads, 0);
        for (int64_t i = 0; i < call->kv_len; i++) {
            Real sum = 0;
            for (int64_t part = 0; part < parts; part++) sum += task.sums[(line * parts + part) * keys + i];
            to[i] = sum;
        }
    }
    free(task.sums);
    return task.failed;
}
