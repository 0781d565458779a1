// -- forward ------------------------------------------------------------------------------------------------------
//
// One work item is one tile of BLOCK_Q queries of one head. For every tile of keys it visits: scores and weights of
// all rows, GROUP rows at a time, then weights times values. Online softmax in base 2 where scores are not modified
// (log2 e is in the scale), in base e otherwise.

const Real BASE = SCORED ? LOG2E : 1, NATURAL = SCORED ? 1 : LN2;  // of scores: to exponents of 2, to natural ones
const int VECTORS = BLOCK_K / LANES;
const int PANEL = panel(VECTORS);                      // vectors of a panel of packed keys
const int STEPS = round_up(HEAD_DIM, PAIR) / PAIR;     // of the product of queries and keys
const int V_WIDE = round_up(V_DIM, LANES);
const int ROWS = round_up(BLOCK_Q, GROUP), GROUPS = ROWS / GROUP;
const int WEIGHTS = round_up(BLOCK_K, 2 * LANES) / PAIR;  // Operands in a row of weights
const int64_t TILE = (int64_t)STEPS * BLOCK_K + (int64_t)BLOCK_K / PAIR * V_WIDE;  // Operands of packed keys and values
const int64_t KEPT_BYTES = 4 << 20;  // packed tiles that a worker keeps, from one row of tiles to the next
static_assert(BLOCK_K % LANES == 0, "a tile of keys is whole vectors");

extern "C" void *malloc(size_t);
extern "C" void free(void *);

// The memory of one worker; lives on between calls.
struct Worker {
    int64_t bytes, slots;
    int64_t *tag;     // [slots] which tile is there
    Operand *tiles;   // [slots, TILE]
    Operand query[ROWS * STEPS];
    Operand weights[ROWS * WEIGHTS];
    Real acc[ROWS * V_WIDE];
    Real scores[GROUP * BLOCK_K];
    Bits seen[GROUP * VECTORS];
    Vec total[ROWS];
    Real top[ROWS], shrink[ROWS];
    int from[GROUPS], to[GROUPS];  // vectors of keys that a group of rows sees
    Row rows[ROWS];
    Column columns[VECTORS];
};

// Memory is taken from and given back to a few places by one exchange each: nothing to lock, nothing to break by fork.
const int PLACES = 256;
static void *places[PLACES];

static Worker *take(int64_t slots) {
    const int64_t bytes = sizeof(Worker) + slots * (8 + TILE * (int64_t)sizeof(Operand)) + 256;
    void *found = nullptr;
    for (int i = 0; i < PLACES && !found; i++)
        if (__atomic_load_n(&places[i], __ATOMIC_RELAXED)) found = __atomic_exchange_n(&places[i], nullptr, __ATOMIC_ACQUIRE);
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

// Scores and weights of one tile of keys. PARTIAL: not every position is visible.
template <bool PARTIAL> static void weigh(Worker &w, const Fixed &fixed, const Operand *keys, int groups, Real unit) {
    for (int g = 0; g < groups; g++) {
        int lo = 0, hi = VECTORS;
        if (PARTIAL) {
            Bits some[VECTORS] = {};
            for (int i = 0; i < GROUP; i++)
                for (int j = 0; j < VECTORS; j++) {
                    Bits seen = w.columns[j].inside & visible(fixed, w.rows[g * GROUP + i], w.columns[j]);
                    w.seen[i * VECTORS + j] = seen;
                    some[j] |= seen;
                }
            while (lo < hi && !any(some[lo])) lo++;
            while (lo < hi && !any(some[hi - 1])) hi--;
        }
        if (PAIR == 2) lo &= ~1;
        w.from[g] = lo, w.to[g] = hi;
        if (lo == hi) continue;
        const Operand *query = w.query + g * GROUP * STEPS;
        for (int j = lo, n; j < hi; j += n) {
            n = PANEL - j % PANEL < hi - j ? PANEL - j % PANEL : hi - j;
            const Operand *panel = keys + j / PANEL * (STEPS * PANEL * LANES) + j % PANEL * LANES;
            multiply_some<GROUP, ZERO>(n, query, STEPS, 1, panel, PANEL * LANES, STEPS, w.scores + j * LANES, BLOCK_K);
        }
        Real *top = w.top + g * GROUP, peaks[GROUP];
        for (int i = 0; i < GROUP; i++) {
            Vec peak = reals(LOWEST);
            for (int j = lo; j < hi; j++) {
                Real *at = w.scores + i * BLOCK_K + j * LANES;
                Vec score = load<Vec>(at);
                if (PAIR == 2) score *= unit;
                if (SCORED) score = modified(fixed, w.rows[g * GROUP + i], w.columns[j], score);
                if (PARTIAL) score = select(w.seen[i * VECTORS + j], score, reals(-INF));
                if (PAIR == 2 || SCORED || PARTIAL) store(at, score);
                peak = larger(score, peak);
            }
            peaks[i] = largest(peak);
        }
        for (int i = 0; i < GROUP; i++) {
            const int row = g * GROUP + i;
            w.shrink[row] = 1;
            if (peaks[i] > top[i]) {
                w.shrink[row] = weight((top[i] - peaks[i]) * BASE);
                top[i] = peaks[i];
                w.total[row] *= w.shrink[row];
            }
            Vec total = w.total[row], weights[2];
            for (int j = lo; j < hi; j++) {
                Vec p = weight((load<Vec>(w.scores + i * BLOCK_K + j * LANES) - top[i]) * BASE);
                total += p;
                if (DROPPED) p = select(kept(fixed, w.rows[row], w.columns[j]), p, Vec{});
#if PAIRS
                weights[j & 1] = p;
                if ((j & 1) || j == hi - 1)
                    store_operands(w.weights + row * WEIGHTS + j / 2 * LANES, weights[0], j & 1 ? weights[1] : Vec{});
#else
                store(w.weights + row * WEIGHTS + j * LANES, p);
#endif
            }
            w.total[row] = total;
        }
    }
}

// acc = acc * shrink + weights * values
static void add_values(Worker &w, const Operand *values, int groups) {
    const int BLOCKS = V_WIDE / LANES, REST = BLOCKS % MOST;
    for (int g = 0; g < groups; g++) {
        if (w.from[g] == w.to[g]) continue;
        const int64_t start = (int64_t)w.from[g] * LANES / PAIR;
        const int64_t end = ((int64_t)w.to[g] * LANES + PAIR - 1) / PAIR;
        const Operand *weights = w.weights + g * GROUP * WEIGHTS + start, *right = values + start * V_WIDE;
        Real *acc = w.acc + g * GROUP * V_WIDE;
        const Real *shrink = w.shrink + g * GROUP;
        for (int j = 0; j + MOST <= BLOCKS; j += MOST)
            multiply<GROUP, MOST, RESCALE>(weights, WEIGHTS, 1, right + j * LANES, V_WIDE, end - start, acc + j * LANES, V_WIDE, shrink);
        if (REST)
            multiply<GROUP, REST ? REST : 1, RESCALE>(weights, WEIGHTS, 1, right + (BLOCKS - REST) * LANES, V_WIDE, end - start,
                                                      acc + (BLOCKS - REST) * LANES, V_WIDE, shrink);
    }
}

struct Task {
    const Call *call;
    const int32_t *order;  // [slices, rows] rows of tiles, longest first
    int64_t *next;         // [batch, kv_heads] items begun
    int64_t workers, slots, failed;
};

// Packed keys and values of one tile, from before or made now.
static const Operand *packed(Worker &w, const Call *call, int64_t batch, int64_t kv_head, int64_t tile) {
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K, name = (batch * call->kv_heads + kv_head) * tiles + tile;
    const int64_t slot = tile % w.slots, start = tile * BLOCK_K, present = call->kv_len - start;
    Operand *keys = w.tiles + slot * TILE;
    if (w.tag[slot] != name) {
        w.tag[slot] = name;
        const Entry *k = (const Entry *)call->k.data + batch * call->k.batch + kv_head * call->k.head + start * call->k.row;
        const Entry *v = (const Entry *)call->v.data + batch * call->v.batch + kv_head * call->v.head + start * call->v.row;
        pack_turned<HEAD_DIM, PANEL>(keys, k, call->k.row, present, BLOCK_K);
        pack_rows<V_DIM>(keys + (int64_t)STEPS * BLOCK_K, v, call->v.row, present, BLOCK_K);
    }
    return keys;
}

static void finish(Worker &w, const Call *call, const Fixed &fixed, int64_t batch, int64_t head, int64_t start, int64_t present) {
    Entry *out = (Entry *)call->out.data + batch * call->out.batch + head * call->out.head + start * call->out.row;
    const int64_t line = (batch * call->heads + head) * call->q_len + start;
    for (int64_t i = 0; i < present; i++, out += call->out.row) {
        Real top = w.top[i], total = sum(w.total[i]);
        Real peak = total == 0 ? -INF : top * NATURAL, shrink = 1;  // natural logarithms from here on
        if (call->top) call->top[line + i] = total != total && top != INF ? NOT_A_NUMBER : peak;
        if (call->sinks) {
            const Real sink = call->sinks[head], most = sink > peak ? sink : peak;
            if (most > -INF) {
                shrink = total == 0 ? 0 : exp(peak - most);
                total = total * shrink + exp(sink - most);
                peak = most;
            }
        }
        call->lse[line + i] = total == 0 ? -INF : peak + log(total);
        const Real factor = (total == 0 ? 0 : shrink / total) * (DROPPED ? survivors(fixed) : 1);
        const Real *acc = w.acc + i * V_WIDE;
        for (int d = 0; d < V_DIM; d++) out[d] = rounded(acc[d] * factor);
    }
}

static void attend(Worker &w, const Call *call, int64_t batch, int64_t head, int64_t row) {
    const int64_t kv_head = head / (call->heads / call->kv_heads), start = row * BLOCK_Q;
    const int64_t present = call->q_len - start < BLOCK_Q ? call->q_len - start : BLOCK_Q;
    const int groups = (int)((present + GROUP - 1) / GROUP);
    const Fixed fixed = fixed_of(call, batch, head);
    const Int q_first = (Int)(call->q_origin[batch * call->q_origin_step] + start);
    const int64_t k_origin = call->k_origin[batch * call->k_origin_step];
    const Real unit = (Real)(call->scale * (SCORED ? 1.0 : 1.4426950408889634));
    const Entry *q = (const Entry *)call->q.data + batch * call->q.batch + head * call->q.head + start * call->q.row;
    pack_left<HEAD_DIM>(w.query, q, call->q.row, present, groups * GROUP, unit);
    for (int i = 0; i < groups * GROUP; i++) {
        w.rows[i] = row_of(fixed, q_first + i);
        w.total[i] = Vec{};
        w.top[i] = LOWEST;
    }
    for (int64_t i = 0; i < (int64_t)groups * GROUP * V_WIDE; i++) w.acc[i] = 0;
    const int64_t line = (int64_t)call->slice_of[batch * call->heads + head] * call->rows + row;
    const int32_t *record = call->spans + line * call->records * 4;
    for (int32_t n = 0; n < call->count[line]; n++, record += 4)
        for (int32_t tile = record[0]; tile < record[3]; tile++) {
            const bool partial = tile < record[1] || tile >= record[2];
            const Operand *keys = packed(w, call, batch, kv_head, tile);
            if (partial || POSITIONS)
                for (int j = 0; j < VECTORS; j++)
                    w.columns[j] = column_of(fixed, (Int)(k_origin + (int64_t)tile * BLOCK_K + j * LANES),
                                             call->kv_len - (int64_t)tile * BLOCK_K - j * LANES);
            if (partial)
                weigh<true>(w, fixed, keys, groups, unit);
            else
                weigh<false>(w, fixed, keys, groups, unit);
            add_values(w, keys + (int64_t)STEPS * BLOCK_K, groups);
        }
    finish(w, call, fixed, batch, head, start, present);
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
            attend(*w, call, batch, head, order[item / group]);
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
static int64_t forward(const Call *call) {
    int64_t slices = 0, all = call->batch * call->kv_heads;
    for (int64_t i = 0; i < call->batch * call->heads; i++)
        if (call->slice_of[i] >= slices) slices = call->slice_of[i] + 1;
    const int64_t tiles = (call->kv_len + BLOCK_K - 1) / BLOCK_K, items = call->rows * call->batch * call->heads;
    int64_t *memory = (int64_t *)malloc(8 * (all + 1) + 4 * (slices * call->rows + tiles + 2));
    if (!memory) return 1;
    int32_t *order = (int32_t *)(memory + all);
    for (int64_t i = 0; i < all; i++) memory[i] = 0;
    sort_rows(call, slices, order, order + slices * call->rows);
    const int64_t most = KEPT_BYTES / (TILE * (int64_t)sizeof(Operand)), slots = tiles < most ? tiles : most;
    Task task = {call, order, memory, call->threads < items ? call->threads : items, slots > 0 ? slots : 1, 0};
    if (call->parallel && task.workers > 1) {
        call->parallel(call->pool, work, &task, task.workers);
    } else {
        task.workers = 1;
        work(&task, 0);
    }
    free(memory);
    return task.failed;
}
