// A call by XLA as the record of a native kernel. jax.py puts in front: XLA's xla/ffi/api/c_api.h and the text
// of lowering/kernels/cpp/call.py with Real = void.
//
// Operands  q, k, v; in a backward out, lse, dout and, if given, dlse and norm; of tangents out and those of q, k and v
//           that there are; words, floats, spans, count, slice_of; the rows of queries and keys, if given; sinks, if
//           given; tables.
// Results   out, lse, top, norm; or those wanted of dq, dk, dv and a buffer for each captured gradient; or the tangents
//           of out and lse.
// words     pairs of int32, low half first: the four sizes, b and h of the origin, q's and k's, Int slots (a Float
//           slot's word is unused); floats has an entry for each slot too. Tables in 64 bits are pairs likewise.
// form      the attribute: see Form. jax.vmap puts lengths in front of every operand, 1 where it does not change.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t (*Kernel)(const Call *);

// XLA's threads take denormal numbers for zero, and float16's smallest are denormal on their way to float. Kernels run
// as they do anywhere else.
struct Denormals {
#if defined(__x86_64__)
    unsigned saved = __builtin_ia32_stmxcsr();
    Denormals() { __builtin_ia32_ldmxcsr(saved & ~0x8040u); }
    ~Denormals() { __builtin_ia32_ldmxcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
    Denormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
        __asm__ volatile("msr fpcr, %0" ::"r"(saved & ~(UINT64_C(1) << 24 | UINT64_C(1) << 19)));
    }
    ~Denormals() { __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

// -- threads: XLA's own ------------------------------------------------------------------------------------------

struct Pool {
    const XLA_FFI_Api *api;
    XLA_FFI_ExecutionContext *context;
};

// One run of work on many workers. Tasks that the pool starts after it is over find it closed; the last holder frees.
struct Job {
    Work work;
    void *task;
    int64_t workers;  // numbers given out
    int64_t running;  // workers inside `work`, CLOSED added once none may begin
    int64_t holders;
    pthread_mutex_t mutex;
    pthread_cond_t over;
};

static const int64_t CLOSED = INT64_MIN;
static const int SPINS = 4096;  // some microseconds: the last item of another worker is often nearly done

static void release(Job *job, int64_t holders) {
    if (__atomic_sub_fetch(&job->holders, holders, __ATOMIC_ACQ_REL)) return;
    pthread_mutex_destroy(&job->mutex);
    pthread_cond_destroy(&job->over);
    free(job);
}

static void join(void *data) {
    Job *job = (Job *)data;
    int64_t running = __atomic_load_n(&job->running, __ATOMIC_ACQUIRE);
    while (running >= 0 && !__atomic_compare_exchange_n(
        &job->running, &running, running + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    if (running >= 0) {
        Denormals kept;
        job->work(job->task, __atomic_fetch_add(&job->workers, 1, __ATOMIC_RELAXED));
        if (__atomic_sub_fetch(&job->running, 1, __ATOMIC_ACQ_REL) == CLOSED) {
            pthread_mutex_lock(&job->mutex);
            pthread_cond_signal(&job->over);
            pthread_mutex_unlock(&job->mutex);
        }
    }
    release(job, 1);
}

static bool over(Job *job) { return __atomic_load_n(&job->running, __ATOMIC_ACQUIRE) == CLOSED; }

// The caller is worker 0 and pulls whatever nobody else does, so that a pool whose threads all wait here still ends.
static void run(void *data, Work work, void *task, int64_t workers) {
    Pool *pool = (Pool *)data;
    Job *job = workers > 1 ? (Job *)malloc(sizeof(Job)) : nullptr;
    if (!job) return work(task, 0);
    *job = {work, task, 1, 0, workers, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};
    for (int64_t i = 1; i < workers; ++i) {
        XLA_FFI_ThreadPool_Schedule_Args args = {
            XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, pool->context, join, job};
        if (XLA_FFI_Error *error = pool->api->XLA_FFI_ThreadPool_Schedule(&args)) {
            XLA_FFI_Error_Destroy_Args dropped = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
            pool->api->XLA_FFI_Error_Destroy(&dropped);
            release(job, workers - i);
            break;
        }
    }
    work(task, 0);
    __atomic_add_fetch(&job->running, CLOSED, __ATOMIC_ACQ_REL);
    for (int i = 0; i < SPINS && !over(job); ++i) __asm__ volatile("" ::: "memory");
    if (!over(job)) {
        pthread_mutex_lock(&job->mutex);
        while (!over(job)) pthread_cond_wait(&job->over, &job->mutex);
        pthread_mutex_unlock(&job->mutex);
    }
    release(job, 1);
}

static int64_t threads_of(Pool *pool) {
    int64_t threads = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args = {
        XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, pool->context, &threads};
    if (XLA_FFI_Error *error = pool->api->XLA_FFI_ThreadPool_NumThreads(&args)) {
        XLA_FFI_Error_Destroy_Args dropped = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
        pool->api->XLA_FFI_Error_Destroy(&dropped);
    }
    return threads > 1 ? threads : 1;
}

// -- operands ----------------------------------------------------------------------------------------------------

// What the buffers do not tell. Behind it: whether each slot is Float, ranks of tables, whether each of dq, dk, dv and
// the captured gradients is wanted, or, of tangents, is there.
struct Form {
    int64_t wanted;  // how many of those flags there are: 0 in a forward
    int64_t tangents;  // whether tangents are computed
    int64_t dlse, norm, sinks;
    int64_t rows;  // whether rows are read by tables
    int64_t q_origins, k_origins;  // one, or one for each batch entry
    int64_t slots, tables;
    int64_t page, paged;  // tokens of a page, 0: k and v are not in pages; the number of the table that says in which
    int64_t block_q;
};

struct Frame {
    const XLA_FFI_CallFrame *frame;
    Kernel kernel;
    Pool pool;
    Form form;
    const int64_t *floating, *ranks, *wanted;
    double scale;
    int64_t mapped;  // dimensions that vmap put in front
    int64_t instances;
    int64_t threads;
    int64_t next, failed;  // the next instance; a kernel's code
};

static const XLA_FFI_Buffer *operand(const Frame &f, int64_t i) {
    return (const XLA_FFI_Buffer *)f.frame->args.args[i];
}

static const XLA_FFI_Buffer *result(const Frame &f, int64_t i) {
    return (const XLA_FFI_Buffer *)f.frame->rets.rets[i];
}

static int64_t width(XLA_FFI_DataType type) {
    switch (type) {
    case XLA_FFI_DataType_PRED: case XLA_FFI_DataType_U8: case XLA_FFI_DataType_S8: return 1;
    case XLA_FFI_DataType_F8E4M3FN: case XLA_FFI_DataType_F8E5M2: return 1;
    case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32: case XLA_FFI_DataType_F32: return 4;
    default: return 8;
    }
}

// Where one instance of a mapped call has its part of a buffer; null of no buffer.
static char *part(const Frame &f, const XLA_FFI_Buffer *buffer, int64_t instance) {
    if (!buffer) return nullptr;
    int64_t entry = width(buffer->dtype), offset = 0;
    for (int64_t d = f.mapped; d < buffer->rank; ++d) entry *= buffer->dims[d];
    for (int64_t d = f.mapped; d-- > 0; entry *= buffer->dims[d]) {
        int64_t length = result(f, 0)->dims[d];
        if (buffer->dims[d] > 1) offset += instance % length * entry;
        instance /= length;
    }
    return (char *)buffer->data + offset;
}

static Array array(const Frame &f, const XLA_FFI_Buffer *buffer, int64_t instance) {
    if (!buffer) return {};
    const int64_t *dims = buffer->dims + f.mapped;  // batch, length, heads, entries
    return {part(f, buffer, instance), dims[1] * dims[2] * dims[3], dims[3], dims[2] * dims[3]};
}

static int64_t words_of_tables(const Frame &f) {
    int64_t words = 0;
    for (int64_t i = 0; i < f.form.tables; ++i) words += 1 + 2 * f.ranks[i];
    return words;
}

static void fill_slots(const Frame &f, Slot *slots, const int64_t *words, const XLA_FFI_Buffer *floats, int64_t n) {
    const char *data = part(f, floats, n);
    for (int64_t i = 0; i < f.form.slots; ++i) {
        if (!f.floating[i]) slots[i].i = words[i];
        else slots[i].f = floats->dtype == XLA_FFI_DataType_F64 ? ((const double *)data)[i] : ((const float *)data)[i];
    }
}

static void fill_tables(const Frame &f, int64_t *words, int64_t first, int64_t instance) {
    for (int64_t i = 0; i < f.form.tables; ++i) {
        const XLA_FFI_Buffer *table = operand(f, first + i);
        int64_t rank = f.ranks[i], step = 1;
        words[0] = (int64_t)part(f, table, instance);
        for (int64_t d = rank; d-- > 0; step *= words[1 + d]) {
            words[1 + d] = table->dims[f.mapped + d];
            words[1 + rank + d] = step;
        }
        words += 1 + 2 * rank;
    }
}

// One instance. Alone on its thread it has the same number of threads to divide work by, for the same bits.
static int64_t call_kernel(const Frame &f, int64_t n, bool alone) {
    Call call = {};
    int64_t next = 0, written = 0;
    auto take = [&] { return operand(f, next++); };
    auto give = [&] { return result(f, written++); };
    auto wanted = [&](int64_t i) { return f.wanted[i] ? give() : nullptr; };
    auto norm = [&](const XLA_FFI_Buffer *x) {
        call.norm = (Real *)part(f, x, n), call.norm_width = x->dims[f.mapped + 3], call.norm_zeros = 1;
    };
    const XLA_FFI_Buffer *q = take(), *k = take(), *v = take();
    const int64_t *q_dims = q->dims + f.mapped, *k_dims = k->dims + f.mapped;
    call.threads = f.threads;
    call.parallel = alone ? nullptr : run;
    call.pool = (void *)&f.pool;
    call.batch = q_dims[0], call.q_len = q_dims[1], call.heads = q_dims[2];
    call.kv_len = k_dims[1], call.kv_heads = k_dims[2];
    call.scale = f.scale;
    call.q = array(f, q, n), call.k = array(f, k, n), call.v = array(f, v, n);
    int64_t captured = f.form.wanted > 3 ? f.form.wanted - 3 : 0;
    Real **gradients = (Real **)__builtin_alloca((captured + 1) * sizeof(Real *));
    if (f.form.tangents) {
        auto given = [&](int64_t i) { return f.wanted[i] ? take() : nullptr; };
        call.out = array(f, take(), n);
        call.dq = array(f, given(0), n), call.dk = array(f, given(1), n), call.dv = array(f, given(2), n);
        call.dout = array(f, give(), n), call.dlse = (Real *)part(f, give(), n);
    } else if (f.form.wanted) {
        call.out = array(f, take(), n), call.lse = (Real *)part(f, take(), n), call.dout = array(f, take(), n);
        if (f.form.dlse) call.dlse = (Real *)part(f, take(), n);
        if (f.form.norm) norm(take());
        call.dq = array(f, wanted(0), n), call.dk = array(f, wanted(1), n), call.dv = array(f, wanted(2), n);
        for (int64_t i = 0; i < captured; ++i) gradients[i] = (Real *)part(f, wanted(3 + i), n);
    } else {
        call.out = array(f, give(), n), call.lse = (Real *)part(f, give(), n), call.top = (Real *)part(f, give(), n);
        norm(give());
    }
    call.gradients = captured ? gradients : nullptr;

    const int64_t *words = (const int64_t *)part(f, take(), n);
    call.size_b = words[0], call.size_h = words[1], call.size_q = words[2], call.size_k = words[3];
    call.b_origin = words[4], call.h_origin = words[5];
    call.q_origin = words + 6, call.k_origin = call.q_origin + f.form.q_origins;
    call.q_origin_step = f.form.q_origins > 1, call.k_origin_step = f.form.k_origins > 1;
    Slot *slots = (Slot *)__builtin_alloca((f.form.slots + 1) * sizeof(Slot));
    fill_slots(f, slots, call.k_origin + f.form.k_origins, take(), n);
    call.slots = slots;

    const XLA_FFI_Buffer *spans = take();
    call.rows = spans->dims[f.mapped + 1], call.records = spans->dims[f.mapped + 2];
    call.block_q = f.form.block_q;
    call.spans = (const int32_t *)part(f, spans, n);
    call.count = (const int32_t *)part(f, take(), n);
    call.slice_of = (const int32_t *)part(f, take(), n);
    if (f.form.rows) call.q_rows = (const int32_t *)part(f, take(), n), call.k_rows = (const int32_t *)part(f, take(), n);
    if (f.form.sinks) call.sinks = (const Real *)part(f, take(), n);
    if (f.form.page) {
        call.pages = k_dims[0];
        call.kv_len = operand(f, next + f.form.paged)->dims[f.mapped + 1] * f.form.page;
    }
    int64_t *tables = (int64_t *)__builtin_alloca((words_of_tables(f) + 1) * sizeof(int64_t));
    fill_tables(f, tables, next, n);
    call.tables = tables;
    return f.kernel(&call);
}

// -- the call ----------------------------------------------------------------------------------------------------

static void *error(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
    return frame->api->XLA_FFI_Error_Create(&args);
}

static bool named(const XLA_FFI_ByteSpan *span, const char *name) {
    return span->len == strlen(name) && !memcmp(span->ptr, name, span->len);
}

static bool read_attributes(Frame &f) {
    const XLA_FFI_Attrs &given = f.frame->attrs;
    bool form = false, scale = false;
    for (int64_t i = 0; i < given.size; ++i) {
        if (named(given.names[i], "form") && given.types[i] == XLA_FFI_AttrType_ARRAY) {
            const XLA_FFI_Array *array = (const XLA_FFI_Array *)given.attrs[i];
            if (array->dtype != XLA_FFI_DataType_S64 || array->size * sizeof(int64_t) < sizeof(Form)) return false;
            memcpy(&f.form, array->data, sizeof(Form));
            f.floating = (const int64_t *)array->data + sizeof(Form) / sizeof(int64_t);
            f.ranks = f.floating + f.form.slots, f.wanted = f.ranks + f.form.tables;
            int64_t flags = f.form.slots + f.form.tables + f.form.wanted;
            form = (int64_t)(array->size - sizeof(Form) / sizeof(int64_t)) == flags;
        } else if (named(given.names[i], "scale") && given.types[i] == XLA_FFI_AttrType_SCALAR) {
            const XLA_FFI_Scalar *scalar = (const XLA_FFI_Scalar *)given.attrs[i];
            scale = scalar->dtype == XLA_FFI_DataType_F64;
            if (scale) memcpy(&f.scale, scalar->value, sizeof(double));
        }
    }
    return form && scale;
}

// Instances of a mapped call, one after the other on each worker.
static void pull(void *task, int64_t) {
    Frame *f = (Frame *)task;
    for (int64_t n; (n = __atomic_fetch_add(&f->next, 1, __ATOMIC_RELAXED)) < f->instances;)
        if (int64_t code = call_kernel(*f, n, true)) __atomic_store_n(&f->failed, code, __ATOMIC_RELAXED);
}

extern "C" void *frisket_bridge(void *data, Kernel kernel) {
    const XLA_FFI_CallFrame *frame = (const XLA_FFI_CallFrame *)data;
    if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
        XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
        metadata->api_version.major_version = XLA_FFI_API_MAJOR;
        metadata->api_version.minor_version = XLA_FFI_API_MINOR;
        return nullptr;
    }
    Frame f = {};
    f.frame = frame, f.kernel = kernel, f.pool = {frame->api, frame->ctx};
    if (!read_attributes(f))
        return error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "this call was made by another version of frisket");
    int64_t arguments = 8 + f.form.sinks + 2 * f.form.rows + f.form.tables;
    int64_t results = 0, main = 0;
    for (int64_t i = 0; i < f.form.wanted; ++i) results += f.wanted[i], main += i < 3 && f.wanted[i];
    if (f.form.tangents) arguments += 1 + results, results = main = 2;
    else if (f.form.wanted) arguments += 3 + f.form.dlse + f.form.norm;
    else results = 4;
    if (frame->args.size != arguments || frame->rets.size != results || !results)
        return error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "operands of a frisket kernel are missing");
    f.mapped = operand(f, 0)->rank - 4;
    f.instances = 1;
    for (int64_t d = 0; d < f.mapped; ++d) f.instances *= result(f, 0)->dims[d];
    for (int64_t i = main; f.form.wanted && i < results; ++i) {  // captured gradients are added to
        const XLA_FFI_Buffer *buffer = result(f, i);
        int64_t bytes = width(buffer->dtype);
        for (int64_t d = 0; d < buffer->rank; ++d) bytes *= buffer->dims[d];
        memset(buffer->data, 0, bytes);
    }
    Denormals kept;
    f.threads = threads_of(&f.pool);
    if (f.instances >= 4 * f.threads && f.threads > 1)
        run(&f.pool, pull, &f, f.threads);
    else
        for (int64_t n = 0; n < f.instances && !f.failed; ++n) f.failed = call_kernel(f, n, f.threads == 1);
    if (!f.failed) return nullptr;
    return error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "a frisket kernel ran out of memory");
}
