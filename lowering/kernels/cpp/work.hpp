// -- work items and workers, the same in both kernels --------------------------------------------------------------

extern "C" void *malloc(size_t);
extern "C" void *calloc(size_t, size_t);
extern "C" void free(void *);

INLINE int64_t tiles_of(const Call *call) { return (call->kv_len + BLOCK_K - 1) / BLOCK_K + INVARIANT; }
// The position of a batch entry's first key, and how many keys an INVARIANT tile begins before a multiple of BLOCK_K.
INLINE int64_t first_of(const Call *call, int64_t batch) { return call->k_origin[batch * call->k_origin_step]; }
INLINE int64_t shift_of(const Call *call, int64_t batch) {
    return INVARIANT ? (first_of(call, batch) % BLOCK_K + BLOCK_K) % BLOCK_K : 0;
}
INLINE int64_t next_item(int64_t &next) { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
// The first address from `memory` on at which a line of memory begins.
INLINE void *next_line(const void *memory) { return (void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }

// How many workers a call has for so many items.
INLINE int64_t workers_for(const Call *call, int64_t items) {
    const int64_t most = call->threads < items ? call->threads : items;
    return call->parallel && most > 1 ? most : 1;
}

// Runs `work` of a task with so many workers.
static void spread(const Call *call, Work work, void *task, int64_t workers) {
    if (workers > 1) call->parallel(call->pool, work, task, workers);
    else work(task, 0);
}

// How many packed tiles of `tile` Operands a worker keeps in so many bytes.
INLINE int64_t slots_for(const Call *call, int64_t tile, int64_t bytes) {
    const int64_t tiles = tiles_of(call), most = bytes / (tile * (int64_t)sizeof(Operand));
    return tiles < most ? tiles : most > 0 ? most : 1;
}

// The tiles of keys that a row of tiles visits: how many, the first one, and the end of the last one.
struct Visits {
    int64_t tiles, lo, hi;
};
static Visits visits_of(const Call *call, int64_t line) {
    Visits all = {0, tiles_of(call), 0};
    for (int32_t n = 0; n < call->count[line]; n++) {
        const int32_t *record = call->spans + (line * call->records + n) * 4;
        all.tiles += record[3] - record[0];
        if (record[0] < all.lo) all.lo = record[0];
        if (record[3] > all.hi) all.hi = record[3];
    }
    return all;
}

template <class T = Entry> INLINE T *at_row(const Array &x, int64_t batch, int64_t head, int64_t row) {
    return (T *)x.data + batch * x.batch + head * x.head + row * x.row;
}

INLINE Lines<const Entry> rows_of(const Array &x, int64_t batch, int64_t head, const int32_t *rows, int64_t start) {
    return {at_row<const Entry>(x, batch, head, MOVED ? 0 : start), x.row, rows_from(rows, start)};
}
