union Slot { int64_t i; double f; };  // Int and Bool parameters in i, Float ones in f
struct Array { void *data; int64_t batch, head, row; };  // strides in entries; a row's entries are neighbours
typedef void (*Work)(void *task, int64_t worker);
typedef void (*Parallel)(void *pool, Work work, void *task, int64_t workers);  // worker 0 always runs, others may
struct Call {
    int64_t threads;         // how many workers may run at once, at least 1
    Parallel parallel;       // runs work(task, worker) on up to `threads` workers; null: one worker
    void *pool;              // first argument of parallel
    int64_t batch;           // lengths of this call, in tokens
    int64_t heads;
    int64_t kv_heads;        // query head h reads key head h / (heads / kv_heads)
    int64_t q_len;
    int64_t kv_len;
    double scale;
    int64_t size_b;          // B, H, Q_LEN, KV_LEN of the whole problem
    int64_t size_h;
    int64_t size_q;
    int64_t size_k;
    int64_t b_origin;        // where the call begins in the whole problem
    int64_t h_origin;
    const int64_t *q_origin; // one, or one for each batch entry
    const int64_t *k_origin;
    int64_t q_origin_step;   // 0: the same for all batch entries; 1: one each
    int64_t k_origin_step;
    const Slot *slots;       // run-time numbers: the plan's, then literals
    const int64_t *tables;   // for each table its data, sizes and strides, in the plan's order
    const int32_t *spans;    // [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    const int32_t *count;    // [slices, rows]: records in use
    const int32_t *slice_of; // [batch, heads]
    int64_t rows;            // rows of tiles: ceil(q_len / block_q)
    int64_t records;
    int64_t block_q;         // queries of a tile, at most BLOCK_Q
    const int32_t *q_rows;   // of MOVED kernels: the row of q and the results that has each query
    const int32_t *k_rows;   // and that of k and v for each key, the last one again behind the last
    const Real *sinks;       // [heads], a logit in every row that has no key and no value; or null
    Real *lse;               // [batch, heads, q_len], natural log; written forward, where not null, read backward
    Real *top;               // [batch, heads, q_len], the largest visible score of each row, or null
    Real *norm;              // [batch, heads, q_len, norm_width]: shift of scores, factor, for a backward; or null
    int64_t norm_width;      // 2; or more, with what rounding left out of PEAKED rows of `out`
    int64_t norm_zeros;      // whether zeros stand there in other rows, instead of anything
    int64_t pages;           // of the pool that keys and values are in, where they are in one
    Array q;                 // [batch, heads, q_len, HEAD_DIM]
    Array k;                 // [batch, kv_heads, kv_len, HEAD_DIM], in a pool [pages, kv_heads, PAGE, HEAD_DIM]
    Array v;                 // [batch, kv_heads, kv_len, V_DIM], likewise
    Array out;               // [batch, heads, q_len, V_DIM]; written forward, read backward
    Array dout;              // the cotangent of out; of a TANGENT kernel its tangent
    Array dq;                // gradients; of a TANGENT kernel tangents of q, k and v, null where there is none
    Array dk;
    Array dv;
    Real *dlse;              // the cotangent of lse, contiguous, or null; of a TANGENT kernel its tangent
    Real *const *gradients;  // a zeroed buffer for each of the plan's captured gradients, or null
};
const double SHORT = 4194304;
