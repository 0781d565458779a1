// Attention in C++, written by frisket for
//
//     causal & q // 3 % n == k // 3 % n & seen[k + 2]
//     score + bias[h, q - k + 512] + grid[q // 8, k // 8]
//     s1 = 2
//     s2 = 512
//
// Head size 64, float16; tiles of 64 keys by as many queries as the call says.

#include <stddef.h>
#include <stdint.h>

#define REAL_BYTES 4
#define INT_BYTES 8
#define HALF 2  // 0: entries are Real, 1: bfloat16, 2: float16
#define INVARIANT 0  // a row's sums have one order, whatever the call is
typedef float Real;  // scores, weights, sums
typedef int64_t Int;
#define EIGHT 0  // entries of k and v are 0: as those of q, 1: int8, 2: float8_e4m3fn, 3: float8_e5m2
typedef uint16_t Entry;  // of q and out
typedef Entry Stored;  // of k and v

const int BLOCK_Q = 96;
const int BLOCK_K = 64;
const int HEAD_DIM = 64;
const int V_DIM = 64;
const int PAGE = 0;
const bool SCORED = true || INVARIANT;  // a score mod may be simplified away in some calls
const bool DROPPED = false;
const bool SCALED = false;
const bool BY_HEAD = true;  // heads differ
const bool MOVED = false;  // rows are in the order of tables
const bool TANGENT = false;  // the forward computes tangents too
// Tiles without a predicate look at positions too.
const bool POSITIONS = true || DROPPED || SCALED;
#include "call.hpp"

namespace {
// -- the mask and the score mod, over a vector of keys -----------------------------------------------------------

struct Fixed {  // known once: sizes, parameters, tables, batch entry and head
    Int h;
    Int n;
    Int s1;
    Int s2;
    Table<uint8_t, 1> seen;
    Table<Real, 2> grid;
    Table<Real, 2> bias;
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    fixed.h = (Int)(call->h_origin + head);
    fixed.n = (Int)call->slots[0].i;
    fixed.s1 = (Int)call->slots[1].i;
    fixed.s2 = (Int)call->slots[2].i;
    const int64_t *words = call->tables;
    words = read(fixed.seen, words);
    words = read(fixed.grid, words);
    words = read(fixed.bias, words);
    return fixed;
}

struct Row {  // known once per query
    Int q;
    Int x0;
    Int x2;
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
    row.x0 = modulo(floordiv(row.q, 3), fixed.n);
    row.x2 = row.q >> 3;
    return row;
}

const bool REPEATED = false;  // rows that see the same keys are neighbours
INLINE bool alike(const Row &a, const Row &b) { return false; }

struct Column {  // known once per vector of keys
    Int first;
    const Real *distances;  // where those of query 0 are
    Ints k;
    Bits inside;  // before the end of the keys
    Ints x1;
    Bits seen_at;
    Ints x3;
};

// Of LANES keys from `first` on, those before `left` and from `begin` on are there.
INLINE Column column_of(const Fixed &fixed, Int first, int64_t left, int64_t begin = 0) {
    Column column;
    column.first = first;
    column.k = first + counting();
    column.inside = cast<Bits>(counting()) < (Lane)(left < LANES ? left : LANES);
    if (INVARIANT && begin > 0) column.inside &= cast<Bits>(counting()) >= (Lane)(begin < LANES ? begin : LANES);
    column.x1 = modulo(floordiv(column.k, ints(3)), ints(fixed.n));
    column.seen_at = ahead<0>(fixed.seen, column.first + fixed.s1);
    column.x3 = column.k >> 3;
    return column;
}

// Functions of the distance of query and key alone, computed for the diagonals of a tile.
const int DISTANCES = 0, SPAN = BLOCK_Q + BLOCK_K + 32;
INLINE void tabulate(const Fixed &fixed, const Row &row, const Column &column, Real *to) {
}
const bool SLOPED = false;  // the kernel needs the slope of the score mod, which is not 1
const bool GUARDED = false;  // a weight of 0 may meet infinity there
// q >= k & q // 3 % n == k // 3 % n & seen[k + s1]
INLINE Bits visible(const Fixed &fixed, const Row &row, const Column &column) {
    return flags(row.q >= column.k) & flags(row.x0 == column.x1) & column.seen_at;
}

// grid[q // 8, k // 8] + (score + bias[h, q - k + s2])
INLINE Vec modified(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    const Vec x4 = gather(fixed.grid, ints(row.x2), column.x3);
    return x4 + (score + behind<1>(fixed.bias, fixed.h, row.q - column.first + fixed.s2));
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
