// Attention in C++, written by frisket for
//
//     causal & window(w)
//
// Head size 64, float32; tiles of 64 keys by as many queries as the call says.

#include <stddef.h>
#include <stdint.h>

#define REAL_BYTES 4
#define INT_BYTES 4
#define HALF 0  // 0: entries are Real, 1: bfloat16, 2: float16
#define INVARIANT 0  // a row's sums have one order, whatever the call is
typedef float Real;  // scores, weights, sums
typedef int32_t Int;
#define EIGHT 0  // entries of k and v are 0: as those of q, 1: int8, 2: float8_e4m3fn, 3: float8_e5m2
typedef float Entry;  // of q and out
typedef Entry Stored;  // of k and v

const int BLOCK_Q = 96;
const int BLOCK_K = 64;
const int HEAD_DIM = 64;
const int V_DIM = 64;
const int PAGE = 0;
const bool SCORED = false || INVARIANT;  // a score mod may be simplified away in some calls
const bool DROPPED = false;
const bool SCALED = false;
const bool BY_HEAD = false;  // heads differ
const bool MOVED = false;  // rows are in the order of tables
const bool TANGENT = false;  // the forward computes tangents too
// Tiles without a predicate look at positions too.
const bool POSITIONS = false || DROPPED || SCALED;
#include "call.hpp"

namespace {

#include "vectors.hpp"

#include "functions.hpp"

#include "integers.hpp"

#include "gemm.hpp"

// -- the mask and the score mod, over a vector of keys -----------------------------------------------------------

struct Fixed {  // known once: sizes, parameters, tables, batch entry and head
    Int w;
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    fixed.w = (Int)call->slots[0].i;
    return fixed;
}

struct Row {  // known once per query
    Int q;
    Int x0;
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
    row.x0 = row.q - fixed.w + 1;
    return row;
}

const bool REPEATED = false;  // rows that see the same keys are neighbours
INLINE bool alike(const Row &a, const Row &b) { return false; }

struct Column {  // known once per vector of keys
    Int first;
    const Real *distances;  // where those of query 0 are
    Ints k;
    Bits inside;  // before the end of the keys
};

// Of LANES keys from `first` on, those before `left` and from `begin` on are there.
INLINE Column column_of(const Fixed &fixed, Int first, int64_t left, int64_t begin = 0) {
    Column column;
    column.first = first;
    column.k = first + counting();
    column.inside = cast<Bits>(counting()) < (Lane)(left < LANES ? left : LANES);
    if (INVARIANT && begin > 0) column.inside &= cast<Bits>(counting()) >= (Lane)(begin < LANES ? begin : LANES);
    return column;
}

// Functions of the distance of query and key alone, computed for the diagonals of a tile.
const int DISTANCES = 0, SPAN = BLOCK_Q + BLOCK_K + 32;
INLINE void tabulate(const Fixed &fixed, const Row &row, const Column &column, Real *to) {
}
const bool SLOPED = false;  // the kernel needs the slope of the score mod, which is not 1
const bool GUARDED = false;  // a weight of 0 may meet infinity there
// q >= k & q - k < w
INLINE Bits visible(const Fixed &fixed, const Row &row, const Column &column) {
    return (row.q >= column.k) & (row.q - column.k < fixed.w);
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

INLINE Vec slope(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return reals(1);
}

// What survives dropout weighs more.
INLINE Real survivors(const Fixed &fixed) { return 1; }

// The page of the pool that is a batch entry's.
INLINE int64_t page_of(const Fixed &fixed, int64_t batch, int64_t page) { return 0; }
// Whether the query heads of a key head differ in nothing that depends on the head.
INLINE bool alike_in_group(const Call *call) {
    const int64_t group = call->heads / call->kv_heads;
    return false;
}
// Whether the keys that a query sees are one interval, and its part of a tile: from begin, before end.
const bool INTERVAL = true;
INLINE void interval(const Fixed &fixed, const Row &row, int64_t tile, int64_t keys, int64_t &begin, int64_t &end) {
    end = between(0, (int64_t)row.q + 1 - tile, keys);
    begin = between(0, (int64_t)row.x0 - tile, end);
}

#include "scores.hpp"

#include "work.hpp"

#include "forward.hpp"

#include "forward_work.hpp"

#include "decode.hpp"

}  // namespace

extern "C" int64_t frisket_forward(const Call *call) { return forward(call); }
// An XLA call is turned into a Call by runtime/backends/cpp/bridge.cpp, which sets this where JAX is.
extern "C" { void *(*frisket_bridge)(void *frame, int64_t (*kernel)(const Call *)); }
extern "C" void *frisket_forward_xla(void *frame) { return frisket_bridge(frame, frisket_forward); }
