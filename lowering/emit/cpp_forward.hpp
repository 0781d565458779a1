// -- forward ------------------------------------------------------------------------------------------------------
//
// One work item is one tile of BLOCK_Q queries of one head. For every tile of keys it visits: scores and weights of
// all rows, GROUP rows at a time, then weights times values. Online softmax in base 2 where scores are not modified
// (log2 e is in the scale), in base e otherwise. Few rows read keys and values where they are, many have them packed.

const Real BASE = SCORED ? LOG2E : 1, NATURAL = SCORED ? 1 : LN2;  // of scores: to exponents of 2, to natural ones
const int VECTORS = BLOCK_K / LANES;
const int PANEL = panel(VECTORS);                      // vectors of a panel of packed keys
const int STEPS = round_up(HEAD_DIM, PAIR) / PAIR;     // of the product of queries and keys
const int QUERY = round_up(STEPS, LANES);              // Operands in a row of queries
const int V_WIDE = round_up(V_DIM, LANES);
const int ROWS = round_up(BLOCK_Q, GROUP);
const int HEADS = 16;                                  // query heads of one item of decoding, at most
const int FEW = PAIR == 1 ? 8 : GROUP - 1;             // rows of an item that packing does not pay for
const int TOGETHER = FEW > GROUP ? FEW : GROUP;        // rows that are weighed in one go
const int CHUNK = 16;                                  // keys of a tile that are neighbours in memory, at least
const int WEIGHTS = round_up(BLOCK_K, 2 * LANES) / PAIR;  // Operands in a row of weights
const int64_t TILE = (int64_t)STEPS * BLOCK_K + (int64_t)BLOCK_K / PAIR * V_WIDE;  // Operands of packed keys and values
const int64_t KEPT_BYTES = 4 << 20;  // packed tiles that a worker keeps, from one row of tiles to the next
static_assert(BLOCK_K % LANES == 0, "a tile of keys is whole vectors");
static_assert(BLOCK_K % CHUNK == 0 && PAGE % CHUNK == 0 && CHUNK % LANES == 0, "and whole chunks, as a page is");

extern "C" void *malloc(size_t);
extern "C" void free(void *);

// The memory of one worker; lives on between calls.
struct Worker {
    int64_t bytes, slots;
    int64_t *tag;     // [slots] which tile is there
    Operand *tiles;   // [slots, TILE]
    Operand query[ROWS * QUERY];
    Operand weights[ROWS * WEIGHTS];
    Operand values[BLOCK_K / PAIR * V_WIDE];  // those of a tile without what nobody sees
    Real acc[ROWS * V_WIDE];
    Real scores[TOGETHER * BLOCK_K];
    Bits seen[TOGETHER * VECTORS];
    Lane some[BLOCK_K];        // whether any row of the item sees a key
    Vec total[ROWS];
    Real top[ROWS], shrink[ROWS];
    int from[ROWS], to[ROWS];  // vectors of keys that a group of rows sees
    Row rows[ROWS];
    int place[ROWS];           // of the row's head among those of this item that differ
    int places;
    Fixed fixed[HEADS];
    Column columns[HEADS * VECTORS];
};

// Memory is taken from and given back to a few places by one exchange each: nothing to lock, nothing to break by fork.
const int PLACES = 16;  // what a kernel at rest holds: some 70 MB at most; more threads than this use malloc
static void *places[PLACES];

static Worker *take(int64_t slots) {
    const int64_t bytes = sizeof(Worker) + slots * (8 + TILE * (int64_t)sizeof(Operand)) + 256;
    void *found = nullptr;
    for (int i = 0; i < PLACES && !found; i++)
        if (__atomic_load_n(&places[i], __ATOMIC_RELAXED))
            found = __atomic_exchange_n(&places[i], nullptr, __ATOMIC_ACQUIRE);
    if (found && *(int64_t *)found < bytes) free(found), found = nullptr;
    if (!found) {
        found = malloc(bytes + 64);
        if (!found) return nullptr;
        *(int64_t *)found = bytes;
    }
    Worker *worker = (Worker *)(((uintptr_t)found + 64) & ~(uintptr_t)63);
    ((void **)worker)[-1] = found;
    worker->slots = slots;
    worker->tiles = (Operand *)(((uintptr_t)(worker + 1) + 63) & ~(uintptr_t)63);
    worker->tag = (int64_t *)(worker->tiles + slots * TILE);
    for (int64_t i = 0; i < slots; i++) worker->tag[i] = -1;
    return worker;
}

static void give(Worker *worker) {
    void *memory = ((void **)worker)[-1];
    for (int i = 0; i < PLACES; i++) {
        void *none = nullptr;
        if (__atomic_compare_exchange_n(&places[i], &none, memory, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    free(memory);
}

// Where keys or values of a tile are, and those that are fetched ahead: addresses of chunks, strides within them.
struct Chunks {
    const Stored *at[(BLOCK_K + AHEAD) / CHUNK];
    int64_t stride;
    const Stored *row(uint64_t i) const { return at[i / CHUNK] + (int64_t)(i % CHUNK) * stride; }
};
struct Tile {
    Chunks k, v;
    int64_t present;                // keys before the end
    const Operand *keys, *values;   // the same packed, or values as they came
    int64_t v_stride;               // of `values`
};

// -- few rows -----------------------------------------------------------------------------------------------------

// Rows of an item by twos, threes and fours, as even as can be.
template <class Do> INLINE void by_few(int rows, Do run) {
    for (int done = 0, n; done < rows; done += n) {
        const int left = rows - done, parts = (left + 3) / 4;
        n = (left + parts - 1) / parts;
        run(done, n);
    }
}

// Scores of one vector of keys.
static void score_few(Worker &w, const Tile &tile, int rows, int j) {
    const Stored *k = tile.k.row(j * LANES), *ahead = tile.k.row(j * LANES + FETCH);
    const int64_t stride = tile.k.stride, present = tile.present - j * LANES;
    by_few(rows, [&](int row, int n) {
        const Operand *q = w.query + row * QUERY;
        Real *to = w.scores + row * BLOCK_K + j * LANES;
        if (n == 1) return dots<1, HEAD_DIM>(q, QUERY, k, ahead, stride, present, to, BLOCK_K);
        if (n == 2) return dots<2, HEAD_DIM>(q, QUERY, k, ahead, stride, present, to, BLOCK_K);
        if (n == 3) return dots<3, HEAD_DIM>(q, QUERY, k, ahead, stride, present, to, BLOCK_K);
        dots<4, HEAD_DIM>(q, QUERY, k, ahead, stride, present, to, BLOCK_K);
    });
}

// acc = acc * shrink + weights * values for N vectors of them, from `column` on; weights are in place of scores.
template <bool PARTIAL, int N, bool WHOLE>
static void add_columns(Worker &w, const Tile &tile, int rows, int64_t column, int64_t start, int64_t end) {
    by_few(rows, [&](int row, int n) {
        const Real *weights = w.scores + row * BLOCK_K, *shrink = w.shrink + row;
        Real *acc = w.acc + row * V_WIDE + column;
        const int64_t left = V_DIM - column;
#define ADD(M) \
    add_few<M, N, WHOLE, PARTIAL>(weights, BLOCK_K, tile.v, column, left, start, end, w.some, acc, V_WIDE, shrink)
        if (n == 1) return ADD(1);
        if (n == 2) return ADD(2);
        if (n == 3) return ADD(3);
        ADD(4);
#undef ADD
    });
}

template <bool PARTIAL> static void add_few_values(Worker &w, const Tile &tile, int rows) {
    const int BLOCKS = V_WIDE / LANES, REST = BLOCKS % MOST;
    int64_t start = w.from[0] * LANES, end = w.to[0] * LANES;
    if (start == end) return;
    if (end > tile.present) end = tile.present;
    const int last = (BLOCKS - REST) * LANES;
    const bool WHOLE = V_DIM == V_WIDE;
    for (int d = 0; d < last; d += MOST * LANES) {
        if (WHOLE || d < V_WIDE - MOST * LANES)
            add_columns<PARTIAL, MOST, true>(w, tile, rows, d, start, end);
        else
            add_columns<PARTIAL, MOST, WHOLE>(w, tile, rows, d, start, end);
    }
    if (REST) add_columns<PARTIAL, REST ? REST : 1, WHOLE>(w, tile, rows, last, start, end);
}

// -- a tile of keys -----------------------------------------------------------------------------------------------

// Scores and weights of one tile of keys, GROUP rows at a time or all of the few. PARTIAL: not every position is
// visible.
template <bool PARTIAL, bool SMALL> static void weigh(Worker &w, const Tile &tile, int rows, Real unit) {
    const int M = SMALL ? rows : GROUP;
    for (int g = 0; g < rows; g += M) {
        int lo = 0, hi = VECTORS;
        if (PARTIAL) {
            Bits some[VECTORS] = {};
            for (int i = 0; i < M; i++) {
                const int place = BY_HEAD ? w.place[g + i] : 0;
                for (int j = 0; j < VECTORS; j++) {
                    const Column &column = w.columns[place * VECTORS + j];
                    Bits seen = column.inside & visible(w.fixed[place], w.rows[g + i], column);
                    w.seen[i * VECTORS + j] = seen;
                    some[j] |= seen;
                    if (g + i < rows) store(w.some + j * LANES, load<Bits>(w.some + j * LANES) | seen);
                }
            }
            while (lo < hi && !any(some[lo])) lo++;
            while (lo < hi && !any(some[hi - 1])) hi--;
        }
        if (PAIR == 2 && !SMALL) lo &= ~1;
        w.from[g] = lo, w.to[g] = hi;
        if (lo == hi) continue;
        const Operand *query = w.query + g * QUERY;
        for (int j = lo, n; j < hi; j += n) {
            n = SMALL ? 1 : PANEL - j % PANEL < hi - j ? PANEL - j % PANEL : hi - j;
            if (SMALL) {
                score_few(w, tile, rows, j);
                continue;
            }
            const Operand *panel = tile.keys + j / PANEL * (STEPS * PANEL * LANES) + j % PANEL * LANES;
            multiply_some<GROUP, ZERO>(n, query, QUERY, 1, panel, PANEL * LANES, STEPS, w.scores + j * LANES, BLOCK_K);
        }
        Real *top = w.top + g, peaks[TOGETHER];
        for (int i = 0; i < M; i++) {
            const int place = BY_HEAD ? w.place[g + i] : 0;
            Vec peak = reals(LOWEST);
            for (int j = lo; j < hi; j++) {
                Real *at = w.scores + i * BLOCK_K + j * LANES;
                Vec score = load<Vec>(at);
                if (PAIR == 2) score *= unit;
                if (SCORED) score = modified(w.fixed[place], w.rows[g + i], w.columns[place * VECTORS + j], score);
                if (PARTIAL) score = select(w.seen[i * VECTORS + j], score, reals(-INF));
                if (PAIR == 2 || SCORED || PARTIAL) store(at, score);
                peak = larger(score, peak);
            }
            peaks[i] = largest(peak);
        }
        for (int i = 0; i < M; i++) {
            const int row = g + i, place = BY_HEAD ? w.place[row] : 0;
            w.shrink[row] = 1;
            if (peaks[i] > top[i]) {
                w.shrink[row] = weight((top[i] - peaks[i]) * BASE);
                top[i] = peaks[i];
                w.total[row] *= w.shrink[row];
            }
            Vec total = w.total[row], weights[2];
            for (int j = lo; j < hi; j++) {
                const Column &column = w.columns[place * VECTORS + j];
                Vec p = weight((load<Vec>(w.scores + i * BLOCK_K + j * LANES) - top[i]) * BASE);
                total += p;
                if (DROPPED) p = select(kept(w.fixed[place], w.rows[row], column), p, Vec{});
                if (SCALED) {  // 0 times a scale that nobody sees may be NaN
                    p *= scale_of_value(w.fixed[place], w.rows[row], column);
                    if (PARTIAL) p = select(w.seen[i * VECTORS + j], p, Vec{});
                }
                if (SMALL) {
                    store(w.scores + i * BLOCK_K + j * LANES, p);
                    continue;
                }
#if PAIRS
                weights[j & 1] = p;
                if ((j & 1) || j == hi - 1)
                    store_operands(w.weights + row * WEIGHTS + j / 2 * LANES, weights[0], j & 1 ? weights[1] : Vec{});
#else
                (void)weights;
                store(w.weights + row * WEIGHTS + j * LANES, p);
#endif
            }
            w.total[row] = total;
        }
    }
}

// Values that no row of the item sees may be anything, as memory is that was never written to, and 0 times NaN is NaN:
// where they are not finite a copy of the tile has zeros for them.
static void hide(Worker &w, Tile &tile, int rows) {
    if (EIGHT == 1) return;  // whole numbers are finite
    int lo = VECTORS, hi = 0;
    for (int g = 0; g < rows; g += GROUP) {
        if (w.from[g] == w.to[g]) continue;
        lo = w.from[g] < lo ? w.from[g] : lo, hi = w.to[g] > hi ? w.to[g] : hi;
    }
    const int64_t end = hi * LANES < tile.present ? hi * LANES : tile.present;
    Bits odd = {};
    for (int64_t i = lo * LANES; i < end; i++)
        for (int d = 0; d < V_DIM && !w.some[i]; d += LANES) {
            const Vec x = load_reals(tile.v.row(i) + d, V_DIM - d);
            odd |= x - x != 0;
        }
    if (!any(odd)) return;
    for (int64_t i = lo * LANES / PAIR; i * PAIR < end; i++) {
        Raw mask = (Raw)bits(w.some[i * PAIR] != 0);
#if PAIRS
        mask = mask >> 16 | (Raw)bits(w.some[i * PAIR + 1] != 0) << 16;
#endif
        for (int d = 0; d < V_WIDE; d += LANES)
            store(w.values + i * V_WIDE + d, (Raw)load<Operands>(tile.values + i * tile.v_stride + d) & mask);
    }
    tile.values = w.values, tile.v_stride = V_WIDE;
}

// acc = acc * shrink + weights * values
static void add_values(Worker &w, const Tile &tile, int rows) {
    const int BLOCKS = V_WIDE / LANES, REST = BLOCKS % MOST, M = GROUP;
    const int64_t present = (tile.present + PAIR - 1) / PAIR;
    for (int g = 0; g < rows; g += M) {
        if (w.from[g] == w.to[g]) continue;
        int64_t start = (int64_t)w.from[g] * LANES / PAIR, end = ((int64_t)w.to[g] * LANES + PAIR - 1) / PAIR;
        if (end > present) end = present;
        const Operand *weights = w.weights + g * WEIGHTS + start, *right = tile.values + start * tile.v_stride;
        Real *acc = w.acc + g * V_WIDE;
        const Real *shrink = w.shrink + g;
        for (int j = 0; j + MOST <= BLOCKS; j += MOST)
            multiply<M, MOST, RESCALE>(weights, WEIGHTS, 1, right + j * LANES, tile.v_stride, end - start,
                                       acc + j * LANES, V_WIDE, shrink);
        const int last = (BLOCKS - REST) * LANES;
        if (REST)
            multiply<M, REST ? REST : 1, RESCALE>(weights, WEIGHTS, 1, right + last, tile.v_stride, end - start,
                                                  acc + last, V_WIDE, shrink);
    }
}

// Whether values need no packing: rows of whole vectors, close to each other.
static bool in_place(const Call *call) {
#if HALF == 0 && EIGHT == 0
    return !PAGE && V_DIM == V_WIDE && call->v.row == V_DIM;
#else
    return false;
#endif
}

// Run `work` of a task with as many workers as there are threads and items for.
template <class Task> static void spread(const Call *call, Work work, Task &task, int64_t items) {
    task.workers = call->threads < items ? call->threads : items;
    if (call->parallel && task.workers > 1) {
        call->parallel(call->pool, work, &task, task.workers);
    } else {
        task.workers = 1;
        work(&task, 0);
    }
}

struct Task {
    const Call *call;
    const int32_t *order;  // [slices, rows] rows of tiles, longest first
    int64_t *next;         // [batch, kv_heads] items begun
    int64_t workers, slots, failed;
};

// An item: `count` query rows from `start` on of each of the heads from `head` on, `heads` of one key head.
struct Item {
    const Call *call;
    int64_t batch, head, heads, start, count;
    int64_t kv_head() const { return head / (call->heads / call->kv_heads); }
    int rows() const { return (int)(heads * count); }
};

template <class T = Entry> static T *at_row(const Array &x, int64_t batch, int64_t head, int64_t row) {
    return (T *)x.data + batch * x.batch + head * x.head + row * x.row;
}

// Queries, coordinates and sums of an item's rows.
static void begin(Worker &w, const Item &item) {
    const Call *call = item.call;
    const Int first = (Int)(call->q_origin[item.batch * call->q_origin_step] + item.start);
    const Real unit = (Real)(PAIR == 1 ? call->scale * (SCORED ? 1.0 : 1.4426950408889634) : 1.0);
    const int all = round_up(item.rows(), item.rows() <= FEW ? 1 : GROUP);
    w.places = BY_HEAD && !alike_in_group(call) ? item.heads : 1;
    for (int n = 0; n < item.heads; n++) {
        w.fixed[n] = fixed_of(call, item.batch, item.head + n);
        const Entry *q = at_row(call->q, item.batch, item.head + n, item.start);
        const int row = n * (int)item.count;
        pack_left<HEAD_DIM, QUERY>(w.query + row * QUERY, q, call->q.row, item.count,
                                   n == item.heads - 1 ? all - row : item.count, unit);
        for (int i = row; i < all; i++) {
            w.rows[i] = row_of(w.fixed[n], first + (i - row));
            w.place[i] = n < w.places ? n : 0;
        }
    }
    for (int i = 0; i < all; i++) w.total[i] = Vec{}, w.top[i] = LOWEST;
    for (int i = 0; i < all * V_WIDE; i++) w.acc[i] = 0;
}

static Tile tile_of(const Worker &w, const Item &item, int64_t number) {
    const Call *call = item.call;
    const int64_t head = item.kv_head(), start = number * BLOCK_K;
    Tile tile = {{{}, call->k.row}, {{}, call->v.row}, call->kv_len - start, nullptr, nullptr, V_WIDE};
    for (int i = 0; i < (BLOCK_K + AHEAD) / CHUNK; i++) {
        int64_t batch = item.batch, row = start + i * CHUNK;
        if (PAGE) {
            batch = page_of(w.fixed[0], item.batch, row / PAGE), row %= PAGE;
            batch = batch < 0 ? 0 : batch < call->pages ? batch : call->pages - 1;
        }
        tile.k.at[i] = at_row<Stored>(call->k, batch, head, row);
        tile.v.at[i] = at_row<Stored>(call->v, batch, head, row);
    }
    return tile;
}

// Packs keys, and values where they need it, unless that was done before.
static void pack(Worker &w, const Item &item, Tile &tile, int64_t number) {
    const Call *call = item.call;
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K;
    const int64_t name = (item.batch * call->kv_heads + item.kv_head()) * tiles + number;
    const int64_t slot = w.slots == 1 ? 0 : number % w.slots;
    Operand *keys = w.tiles + slot * TILE, *values = keys + (int64_t)STEPS * BLOCK_K;
    const bool here = in_place(call);
    if (w.tag[slot] != name) {
        w.tag[slot] = name;
        pack_turned<HEAD_DIM, PANEL>(keys, tile.k, tile.present, BLOCK_K);
        if (!here) pack_rows<V_DIM>(values, tile.v, tile.present, BLOCK_K);
    }
    tile.keys = keys;
    tile.values = here ? (const Operand *)tile.v.at[0] : values;
}

// One tile of keys for the rows of an item.
template <bool PARTIAL> static void visit(Worker &w, const Item &item, int64_t number) {
    const Call *call = item.call;
    const int64_t start = number * BLOCK_K, first = call->k_origin[item.batch * call->k_origin_step] + start;
    Tile tile = tile_of(w, item, number);
    if (PARTIAL || POSITIONS)
        for (int n = 0; n < w.places; n++)
            for (int j = 0; j < VECTORS; j++)
                w.columns[n * VECTORS + j] = column_of(w.fixed[n], (Int)(first + j * LANES), tile.present - j * LANES);
    if (PARTIAL)
        for (int i = 0; i < BLOCK_K; i++) w.some[i] = 0;
    const Real unit = (Real)(call->scale * (SCORED ? 1.0 : 1.4426950408889634));
    if (item.rows() <= FEW) {
        weigh<PARTIAL, true>(w, tile, item.rows(), unit);
        add_few_values<PARTIAL>(w, tile, item.rows());
        return;
    }
    pack(w, item, tile, number);
    weigh<PARTIAL, false>(w, tile, item.rows(), unit);
    if (PARTIAL) hide(w, tile, item.rows());
    add_values(w, tile, item.rows());
}
static void visit(Worker &w, const Item &item, int64_t number, bool partial) {
    partial ? visit<true>(w, item, number) : visit<false>(w, item, number);
}

// Outputs of an item, from its sums.
static void finish(Worker &w, const Item &item) {
    const Call *call = item.call;
    for (int row = 0; row < item.rows(); row++) {
        const int64_t head = item.head + row / item.count, query = item.start + row % item.count;
        const int64_t line = (item.batch * call->heads + head) * call->q_len + query;
        Entry *out = at_row(call->out, item.batch, head, query);
        const Real top = w.top[row];
        Real total = sum(w.total[row]), shrink = 1;
        Real peak = total == 0 ? -INF : top * NATURAL;  // natural logarithms from here on
        if (call->top) call->top[line] = total != total && top != INF ? NOT_A_NUMBER : peak;
        if (call->sinks) {
            const Real sink = call->sinks[head], most = sink > peak ? sink : peak;
            if (most > -INF) {
                shrink = total == 0 ? 0 : exp(peak - most);
                total = total * shrink + exp(sink - most);
                peak = most;
            }
        }
        call->lse[line] = total == 0 ? -INF : peak + log(total);
        const Real factor = (total == 0 ? 0 : shrink / total) * (DROPPED ? survivors(w.fixed[head - item.head]) : 1);
        const Real *acc = w.acc + row * V_WIDE;
        for (int d = 0; d < V_DIM; d++) out[d] = rounded(acc[d] * factor);
    }
}

static void attend(Worker &w, const Item &item) {
    const Call *call = item.call;
    begin(w, item);
    const int64_t slice = call->slice_of[item.batch * call->heads + item.head];
    const int64_t line = slice * call->rows + item.start / BLOCK_Q;
    const int32_t *record = call->spans + line * call->records * 4;
    for (int32_t n = 0; n < call->count[line]; n++, record += 4)
        for (int32_t tile = record[0]; tile < record[3]; tile++)
            visit(w, item, tile, tile < record[1] || tile >= record[2]);
    finish(w, item);
}

// Items are pulled. A worker begins at a key head of its own, whose packed tiles it keeps, and then helps the others.
static void work(void *pointer, int64_t number) {
    Task &task = *(Task *)pointer;
    const Call *call = task.call;
    const int64_t all = call->batch * call->kv_heads, group = call->heads / call->kv_heads;
    Worker *w = take(task.slots);
    if (!w) {
        __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t n = 0; n < all; n++) {
        const int64_t at = (number * all / task.workers + n) % all, batch = at / call->kv_heads;
        for (;;) {
            const int64_t item = __atomic_fetch_add(&task.next[at], 1, __ATOMIC_RELAXED);
            if (item >= call->rows * group) break;
            const int64_t head = at % call->kv_heads * group + item % group;
            const int32_t *order = task.order + call->slice_of[batch * call->heads + head] * call->rows;
            const int64_t start = (int64_t)order[item / group] * BLOCK_Q, left = call->q_len - start;
            attend(*w, {call, batch, head, 1, start, left < BLOCK_Q ? left : BLOCK_Q});
        }
    }
    give(w);
}

// Rows of each slice by the number of tiles they visit, most first; equal ones from the last to the first.
static void sort_rows(const Call *call, int64_t slices, int32_t *order, int32_t *places_of) {
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K;
    for (int64_t s = 0; s < slices; s++, order += call->rows) {
        for (int64_t i = 0; i <= tiles + 1; i++) places_of[i] = 0;
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t row = call->rows - 1; row >= 0; row--) {
                int64_t visits = 0;
                for (int32_t n = 0; n < call->count[s * call->rows + row]; n++) {
                    const int32_t *record = call->spans + ((s * call->rows + row) * call->records + n) * 4;
                    visits += record[3] - record[0];
                }
                const int64_t place = tiles - visits;
                if (pass == 0) places_of[place + 1]++;
                else order[places_of[place]++] = (int32_t)row;
            }
            if (pass == 0)
                for (int64_t i = 1; i <= tiles + 1; i++) places_of[i] += places_of[i - 1];
        }
    }
}

// 0: done; 1: no memory.
static int64_t all_rows(const Call *call, int64_t slices) {
    const int64_t all = call->batch * call->kv_heads, items = call->rows * call->batch * call->heads;
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K, most = KEPT_BYTES / (TILE * (int64_t)sizeof(Operand));
    int64_t *memory = (int64_t *)malloc(8 * (all + 1) + 4 * (slices * call->rows + tiles + 2));
    if (!memory) return 1;
    int32_t *order = (int32_t *)(memory + all);
    for (int64_t i = 0; i < all; i++) memory[i] = 0;
    sort_rows(call, slices, order, order + slices * call->rows);
    Task task = {call, order, memory, 0, tiles < most ? tiles : most > 0 ? most : 1, 0};
    spread(call, work, task, items);
    free(memory);
    return task.failed;
}
