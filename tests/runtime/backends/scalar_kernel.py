"""A native kernel that anyone can read: what the bridges to frameworks are tested with, whatever is emitted.

    mask   q >= k & q - k <= s0 & t0[q] == t0[k]
    score  score * s1 + t1[h, k]

Pair by pair in double, over the tiles of the spans, so that wrong spans show. A work item is a batch entry, or of a
forward a row of it.
"""

from types import SimpleNamespace

from frisket.lowering.kernels.cpp import call as cpp_call

KERNEL = """
static Real load(const Array &x, int64_t b, int64_t h, int64_t n, int64_t d) {
    return (Real)((const T *)x.data)[b * x.batch + h * x.head + n * x.row + d];
}
static T &at(const Array &x, int64_t b, int64_t h, int64_t n, int64_t d) {
    return ((T *)x.data)[b * x.batch + h * x.head + n * x.row + d];
}
static int64_t clamp(int64_t i, int64_t n) { return i < 0 ? 0 : i < n ? i : n - 1; }

struct Query {
    const Call *c;
    int64_t b, h, q;
    int64_t key_head() const { return h / (c->heads / c->kv_heads); }
    int64_t k_at(int64_t k) const { return c->k_origin[b * c->k_origin_step] + k; }
    int64_t q_at() const { return c->q_origin[b * c->q_origin_step] + q; }
    int64_t document(int64_t i) const { return ((const I *)c->tables[0])[clamp(i, c->tables[1]) * c->tables[2]]; }
    double plain(int64_t k) const {
        double s = 0;
        for (int64_t d = 0; d < DIM; ++d) s += load(c->q, b, h, q, d) * load(c->k, b, key_head(), k, d);
        return s * c->scale;
    }
    double modified(int64_t k) const {
        const Real *bias = (const Real *)c->tables[3];
        int64_t line = clamp(c->h_origin + h, c->tables[4]), column = clamp(k_at(k), c->tables[5]);
        return plain(k) * c->slots[1].f + bias[line * c->tables[6] + column * c->tables[7]];
    }
    bool sees(int64_t k) const {
        int64_t distance = q_at() - k_at(k);
        return distance >= 0 && distance <= c->slots[0].i && document(q_at()) == document(k_at(k));
    }
    template <typename F> void each(F f) const {  // every visible key
        int64_t row = c->slice_of[b * c->heads + h] * c->rows + q / BLOCK_Q;
        for (int64_t r = 0; r < c->count[row]; ++r) {
            const int32_t *s = c->spans + (row * c->records + r) * 4;
            for (int64_t k = s[0] * BLOCK_K; k < s[3] * BLOCK_K && k < c->kv_len; ++k) {
                int64_t tile = k / BLOCK_K;
                if ((s[1] <= tile && tile < s[2]) || sees(k)) f(k);
            }
        }
    }
    int64_t entry() const { return (b * c->heads + h) * c->q_len + q; }
};

static void attend(const Query &row) {
    const Call *c = row.c;
    double top = -INFINITY, total = 0, acc[V_DIM] = {};
    row.each([&](int64_t k) { top = fmax(top, row.modified(k)); });
    double most = c->sinks ? fmax(top, c->sinks[row.h]) : top;
    if (c->sinks && most > -INFINITY) total = exp(c->sinks[row.h] - most);
    row.each([&](int64_t k) {
        double p = exp(row.modified(k) - most);
        total += p;
        for (int64_t d = 0; d < V_DIM; ++d) acc[d] += p * load(c->v, row.b, row.key_head(), k, d);
    });
    for (int64_t d = 0; d < V_DIM; ++d) at(c->out, row.b, row.h, row.q, d) = (T)(total ? acc[d] / total : 0);
    c->lse[row.entry()] = total ? most + log(total) : -INFINITY;
    c->top[row.entry()] = top;
}

static void differentiate(const Query &row, Real *slot, Real *column) {
    const Call *c = row.c;
    double delta = c->dlse ? -c->dlse[row.entry()] : 0;
    for (int64_t d = 0; d < V_DIM; ++d)
        delta += load(c->dout, row.b, row.h, row.q, d) * load(c->out, row.b, row.h, row.q, d);
    row.each([&](int64_t k) {
        double p = exp(row.modified(k) - c->lse[row.entry()]), dp = 0;
        for (int64_t d = 0; d < V_DIM; ++d) {
            double g = load(c->dout, row.b, row.h, row.q, d);
            dp += g * load(c->v, row.b, row.key_head(), k, d);
            if (c->dv.data) at(c->dv, row.b, row.key_head(), k, d) += p * g;
        }
        double dm = p * (dp - delta), ds = dm * c->slots[1].f * c->scale;
        if (slot) slot[row.b * c->heads + row.h] += dm * row.plain(k);
        if (column) column[(row.b * c->heads + row.h) * c->kv_len + k] += dm;
        for (int64_t d = 0; d < DIM; ++d) {
            if (c->dq.data) at(c->dq, row.b, row.h, row.q, d) += ds * load(c->k, row.b, row.key_head(), k, d);
            if (c->dk.data) at(c->dk, row.b, row.key_head(), k, d) += ds * load(c->q, row.b, row.h, row.q, d);
        }
    });
}

struct Task { const Call *call; int64_t items, next; void (*run)(const Call *, int64_t); };

static void pull(void *data, int64_t) {
    Task *task = (Task *)data;
    for (int64_t n; (n = __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED)) < task->items;) task->run(task->call, n);
}
static int64_t all(Task task) {
    if (task.call->parallel) task.call->parallel(task.call->pool, pull, &task, task.call->threads);
    else pull(&task, 0);
    return 0;
}
static void queries(const Call *c, int64_t n) {
    for (int64_t q = 0; q < c->q_len; ++q) attend({c, n / c->heads, n % c->heads, q});
}
static void batch(const Call *c, int64_t b) {
    for (int64_t h = 0; h < c->heads; ++h)
        for (int64_t q = 0; q < c->q_len; ++q)
            for (int64_t d = 0; d < DIM && c->dq.data; ++d) at(c->dq, b, h, q, d) = 0;
    for (int64_t h = 0; h < c->kv_heads; ++h)
        for (int64_t k = 0; k < c->kv_len; ++k) {
            for (int64_t d = 0; d < DIM && c->dk.data; ++d) at(c->dk, b, h, k, d) = 0;
            for (int64_t d = 0; d < V_DIM && c->dv.data; ++d) at(c->dv, b, h, k, d) = 0;
        }
    for (int64_t h = 0; h < c->heads; ++h)
        for (int64_t q = 0; q < c->q_len; ++q) differentiate({c, b, h, q}, c->gradients[0], c->gradients[1]);
}
extern "C" int64_t frisket_forward(const Call *c) {
    return c->scale < 0 ? 1 : all({c, c->batch * c->heads, 0, queries});  // 1: for the test of errors
}
extern "C" int64_t frisket_backward(const Call *c) { return all({c, c->batch, 0, batch}); }
"""


def forward(*kernel, named=True):
    """As `CppKernel`; for float32 and float64."""
    return _kernel(source(*kernel) + cpp_call.bridged("frisket_forward"))


def backward(*kernel, named=True):
    """As `BackwardKernel`."""
    return _kernel(source(*kernel) + cpp_call.bridged("frisket_backward"))


def _kernel(text):
    return SimpleNamespace(source=lambda: text, literals=())


def source(plan, target, arrays):
    c_type = {"float32": "float", "float64": "double"}[arrays.dtype]
    names = [
        "#include <stdint.h>", "#include <math.h>", f"typedef {c_type} T;", f"typedef {c_type} Real;",
        f"typedef {'int64_t' if plan.int64 else 'int32_t'} I;",
        f"enum {{ DIM = {arrays.head_dim}, V_DIM = {arrays.v_dim} }};",
        f"enum {{ BLOCK_Q = {target.block_q}, BLOCK_K = {target.block_k} }};",
    ]  # fmt: skip
    return "\n".join([*names, cpp_call.text(), KERNEL])
