static Worker *worker_for(Task &task) {
    const Call *call = task.call;
    const int64_t slots = slots_for(call, TILE, KEPT_BYTES);
    const int64_t own = task.parts > 1 || (DK_AS_IS && DV_AS_IS) ? 0 : tiles_of(call) * BLOCK_K * (Q_WIDE + V_WIDE);
    const int64_t bytes = slots * (TILE * (int64_t)sizeof(Operand) + sizeof(Slot)) + own * (int64_t)sizeof(Real);
    void *memory = malloc(sizeof(Worker) + bytes + 256);
    if (!memory) return nullptr;
    Worker *w = (Worker *)next_line((char *)memory + 64);
    ((void **)w)[-1] = memory;
    w->slots = slots;
    w->tiles = (Operand *)next_line(w + 1);
    w->own = (Real *)(w->tiles + slots * TILE);
    w->slot = (Slot *)(w->own + own);
    for (int64_t i = 0; i < slots; i++) w->slot[i].tile = -1;
    for (int i = 0; i < BLOCK_K && MOVED; i++) w->counted[i] = i;
    w->with_dq = call->dq.data, w->with_dk = call->dk.data, w->with_dv = call->dv.data;
    w->with_slopes = w->with_dq || w->with_dk;
    for (int n = 0; n < CAPTURED; n++) {
        w->captured.buffer[n] = call->gradients ? call->gradients[n] : nullptr;
        w->with_slopes |= w->captured.buffer[n] != nullptr;
    }
    return w;
}

// A worker takes the next chain of items when it is free. The items of a chain run one after the other.
static void work(void *pointer, int64_t) {
    Task &task = *(Task *)pointer;
    [[maybe_unused]] const MatrixUnit unit;
    Worker *w = worker_for(task);
    if (!w) return __atomic_store_n(&task.failed, 1, __ATOMIC_RELAXED);
    for (int64_t chain; (chain = next_item(task.next)) < task.chains;) {
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
    const int64_t tiles = tiles_of(call), all = call->batch * call->kv_heads * tiles;
    for (int64_t n; (n = next_item(task.next)) < all;) {
        const int64_t unit = n / tiles, tile = n % tiles;
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

// Cuts the tiles of queries of every key head into `parts` of about equal work. Bytes of their sums.
static int64_t cut(const Call *call, Part *part, int64_t parts) {
    const int64_t group = call->heads / call->kv_heads, all = group * call->rows;
    int64_t bytes = 0;
    for (int64_t unit = 0; unit < call->batch * call->kv_heads; unit++, part += parts) {
        const int32_t *slice = call->slice_of + unit * group;
        const auto visited = [&](int64_t i) { return visits_of(call, slice[i / call->rows] * call->rows + i % call->rows); };
        int64_t work = 0, done = 0, n = 0;
        for (int64_t i = 0; i < all; i++) work += 1 + visited(i).tiles;
        for (int64_t p = 0; p < parts; p++) {
            part[p] = {n, n, tiles_of(call), 0, nullptr};
            for (; n < all && (p == parts - 1 || done * parts < work * (p + 1)); n++) {
                const Visits row = visited(n);
                part[p].lo = row.lo < part[p].lo ? row.lo : part[p].lo, part[p].hi = row.hi > part[p].hi ? row.hi : part[p].hi;
                done += 1 + row.tiles;
            }
            part[p].end = n;
            if (part[p].lo > part[p].hi) part[p].lo = part[p].hi = 0;
            bytes += (part[p].hi - part[p].lo) * BLOCK_K * (Q_WIDE + V_WIDE) * (int64_t)sizeof(Real);
        }
    }
    return bytes;
}

// Parts of a key head: so many that no thread waits long for the others, and one of a call that a thread ends alone.
// Depends on shapes and `threads` alone, so equal calls give equal bits.
static int64_t parts_wanted(const Call *call) {
    const double pairs = (double)call->batch * call->heads * call->q_len * call->kv_len;
    if (2 * pairs * (3 * HEAD_DIM + 2 * V_DIM) < SHORT) return 1;
    const int64_t units = call->batch * call->kv_heads, all = call->rows * (call->heads / call->kv_heads);
    const int64_t most = units < call->threads ? 4 * (call->threads / (units ? units : 1)) : 4;
    int64_t parts = 1;
    for (; parts < most && parts < all; parts++) {
        const int64_t items = units * parts, rounds = (items + call->threads - 1) / call->threads;
        if (10 * rounds * call->threads <= 11 * items) break;
    }
    return parts;
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
        spread(call, work, &task, workers_for(call, task.chains));
        task.next = 0;
        if (task.parts > 1 && !task.failed) spread(call, add_parts, &task, workers_for(call, units * tiles_of(call)));
        if (CAPTURED && !task.failed) add_captured(task);
    }
    for (int n = 0; n < CAPTURED; n++) free(task.heads[n]), free(task.lines[n]), free(task.copies[n]);
    free(sums);
    free(part);
    return task.failed;
}
