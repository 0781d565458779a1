// Attention in C++, written by frisket for
//
//     causal
//     softcap(50) + slope[h] * (k - q)
//     seed = seed of dropout
//     rate = rate of dropout
//     c0 = 50.0
//     c1 = 0.02
//
// Head size 128, float32; tiles of 64 keys by as many queries as the call says.

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
const int HEAD_DIM = 128;
const int V_DIM = 128;
const int PAGE = 0;
const bool SCORED = true || INVARIANT;  // a score mod may be simplified away in some calls
const bool DROPPED = true;
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
    Int b;
    Int h;
    Int seed;
    Real rate;
    Real c0;
    Real c1;
    Table<Real, 1> slope;
    Real slope_h;
    Word x0;
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    fixed.b = (Int)(call->b_origin + batch);
    fixed.h = (Int)(call->h_origin + head);
    fixed.seed = (Int)call->slots[0].i;
    fixed.rate = (Real)call->slots[1].f;
    fixed.c0 = (Real)call->slots[2].f;
    fixed.c1 = (Real)call->slots[3].f;
    const int64_t *words = call->tables;
    words = read(fixed.slope, words);
    fixed.slope_h = at(fixed.slope, fixed.h);
    fixed.x0 = stirred(stirred(seeded(fixed.seed), fixed.b), fixed.h);
    return fixed;
}

struct Row {  // known once per query
    Int q;
    Word x1;
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
    row.x1 = stirred(fixed.x0, row.q);
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
// q >= k
INLINE Bits visible(const Fixed &fixed, const Row &row, const Column &column) {
    return row.q >= column.k;
}

// 50.0 * tanh(score / 50.0) + slope[h] * (k - q)
INLINE Vec modified(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return fixed.c0 * tanh(score * fixed.c1) + fixed.slope_h * to_real(column.k - row.q);
}

// random(seed, b, h, q, k) >= rate
INLINE Bits kept(const Fixed &fixed, const Row &row, const Column &column) {
    return uniform(stirred(words(row.x1), column.k)) >= fixed.rate;
}

INLINE Vec scale_of_value(const Fixed &fixed, const Row &row, const Column &column) {
    return reals(1);
}

INLINE Vec slope(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return reals(1);
}

// What survives dropout weighs more.
INLINE Real survivors(const Fixed &fixed) { return fixed.rate < 1 ? 1 / (1 - fixed.rate) : 0; }
