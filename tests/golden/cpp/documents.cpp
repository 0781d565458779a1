// Attention in C++, written by frisket for
//
//     causal & same(doc)
//
// Head size 80 (values 64), bfloat16; tiles of 64 keys by as many queries as the call says.

#include <stddef.h>
#include <stdint.h>

#define REAL_BYTES 4
#define INT_BYTES 4
#define HALF 1  // 0: entries are Real, 1: bfloat16, 2: float16
typedef float Real;  // scores, weights, sums
typedef int32_t Int;
#define EIGHT 0  // entries of k and v are 0: as those of q, 1: int8, 2: float8_e4m3fn, 3: float8_e5m2
typedef uint16_t Entry;  // of q and out
typedef Entry Stored;  // of k and v

const int BLOCK_Q = 96;
const int BLOCK_K = 64;
const int HEAD_DIM = 80;
const int V_DIM = 64;
const int PAGE = 0;
const bool SCORED = false;
const bool DROPPED = false;
const bool SCALED = false;
const bool BY_HEAD = false;  // heads differ
const bool MOVED = false;  // rows are in the order of tables
// Tiles without a predicate look at positions too.
const bool POSITIONS = SCORED || DROPPED || SCALED;
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
    const Real *sinks;       // [heads], a logit beside every row's keys that has no value; or null
    Real *lse;               // [batch, heads, q_len], natural log; written forward, where not null, read backward
    Real *top;               // [batch, heads, q_len], the largest visible score of each row, or null
    Real *norm;              // [batch, heads, q_len, 2], what a backward takes off scores and its factor; or null
    int64_t pages;           // of the pool that keys and values are in, where they are in one
    Array q;                 // [batch, heads, q_len, HEAD_DIM]
    Array k;                 // [batch, kv_heads, kv_len, HEAD_DIM], in a pool [pages, kv_heads, PAGE, HEAD_DIM]
    Array v;                 // [batch, kv_heads, kv_len, V_DIM], likewise
    Array out;               // [batch, heads, q_len, V_DIM]; written forward, read backward
    Array dout;              // the cotangent of out
    Array dq;
    Array dk;
    Array dv;
    const Real *dlse;        // the cotangent of lse, contiguous, or null
    Real *const *gradients;  // a zeroed buffer for each of the plan's captured gradients, or null
};
const double SHORT = 4194304;

namespace {
// -- the mask and the score mod, over a vector of keys -----------------------------------------------------------

struct Fixed {  // known once: sizes, parameters, tables, batch entry and head
    Int b;
    Table<Int, 2> doc;
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    fixed.b = (Int)(call->b_origin + batch);
    const int64_t *words = call->tables;
    words = read(fixed.doc, words);
    return fixed;
}

struct Row {  // known once per query
    Int q;
    Int doc_b_q;
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
    row.doc_b_q = at(fixed.doc, fixed.b, row.q);
    return row;
}

const bool REPEATED = false;  // rows that see the same keys are neighbours
INLINE bool alike(const Row &a, const Row &b) { return false; }

struct Column {  // known once per vector of keys
    Int first;
    const Real *distances;  // where those of query 0 are
    Ints k;
    Bits inside;  // before the end of the keys
    Ints doc_b_k;
};

INLINE Column column_of(const Fixed &fixed, Int first, int64_t left) {
    Column column;
    column.first = first;
    column.k = first + counting();
    column.inside = cast<Bits>(counting()) < (Lane)(left < LANES ? left : LANES);
    column.doc_b_k = ahead<1>(fixed.doc, fixed.b, column.first);
    return column;
}

// Functions of the distance of query and key alone, computed for the diagonals of a tile.
const int DISTANCES = 0, SPAN = BLOCK_Q + BLOCK_K + 32;
INLINE void tabulate(const Fixed &fixed, const Row &row, const Column &column, Real *to) {
}
// q >= k & doc[b, q] == doc[b, k]
INLINE Bits visible(const Fixed &fixed, const Row &row, const Column &column) {
    return (row.q >= column.k) & (row.doc_b_q == column.doc_b_k);
}

INLINE Vec modified(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return score;
}

INLINE Bits kept(const Fixed &fixed, const Row &row, const Column &column) {
    return bits(true);
}

INLINE Vec scale_of_value(const Fixed &fixed, const Row &row, const Column &column) {
    return reals(1);
}

// What survives dropout weighs more.
INLINE Real survivors(const Fixed &fixed) { return 1; }
