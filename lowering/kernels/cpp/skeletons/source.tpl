$# The text of native kernels between their hand-written parts, with holes that `cpp.forward` and `cpp.backward` fill.

$part head
// Attention in C++, written by frisket for
//
$mask
//
// Head size $size, $dtype$note; tiles of $block_k keys by as many queries as the call says.

#include <stddef.h>
#include <stdint.h>

#define REAL_BYTES $real_bytes
#define INT_BYTES $int_bytes
#define HALF $half  // 0: entries are Real, 1: bfloat16, 2: float16
#define SIX  // a matrix unit, if there is one, multiplies float32 by six products of bfloat16  $if six
#define INVARIANT $invariant  // a row's sums have one order, whatever the call is
typedef $real Real;  // scores, weights, sums
typedef $int Int;
#define EIGHT $eight  // entries of k and v are $kinds
typedef $entry Entry;  // of q and out
typedef $stored Stored;  // of k and v

$constants
const bool SCORED = $scored || INVARIANT;  // a score mod may be simplified away in some calls
const bool DROPPED = $dropped;
const bool SCALED = $scaled;
#define WEIGHTED 1  // scores become the weights of visible pairs, and rows are no softmax  $if weighted
const bool COUNTS = $counts;  // visible keys are counted, and a row without any is 0  $if weighted
const bool COUNTED = $counted;  // a score may hide a pair that the mask shows  $if weighted
const bool NONNEGATIVE = $nonnegative;  // weights  $if weighted
const bool NEAR_ONE = $near_one;  // weights are at most 1, and nothing is divided: terms hold them  $if weighted
$# Constants rather than macros: the compiler checks the branches that it drops.
const bool BY_HEAD = $by_head;  // heads differ
const bool MOVED = $moved;  // rows are in the order of tables
const bool TANGENT = $tangent;  // the forward computes tangents too
// Tiles without a predicate look at positions too.
const bool POSITIONS = $scored || DROPPED || SCALED;

$part positions
// -- the mask and the score mod, over a vector of keys -----------------------------------------------------------

struct Fixed {  // known once: sizes, parameters, tables, batch entry and head
    $fixed_fields
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    $fixed_lines
    return fixed;
}

struct Row {  // known once per query
    Int q;
    $row_fields
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
    $row_lines
    return row;
}

const bool REPEATED = $repeated;  // rows that see the same keys are neighbours
INLINE bool alike(const Row &a, const Row &b) { return $alike; }

struct Column {  // known once per vector of keys
    Int first;
    const Real *distances;  // where those of query 0 are
    Ints k;
    Bits inside;  // before the end of the keys
    $column_fields
};

// Of LANES keys from `first` on, those before `left` and from `begin` on are there.
INLINE Column column_of(const Fixed &fixed, Int first, int64_t left, int64_t begin = 0) {
    Column column;
    column.first = first;
    column.k = first + counting();
    column.inside = cast<Bits>(counting()) < (Lane)(left < LANES ? left : LANES);
    if (INVARIANT && begin > 0) column.inside &= cast<Bits>(counting()) >= (Lane)(begin < LANES ? begin : LANES);
    $column_lines
    return column;
}

$of_distance
// Functions of the distance of query and key alone, computed for the diagonals of a tile.
const int DISTANCES = $distances, SPAN = BLOCK_Q + BLOCK_K + 32;
INLINE void tabulate(const Fixed &fixed, const Row &row, const Column &column, Real *to) {
    $tabulated
}
const bool SLOPED = $sloped;  // the kernel needs the slope of the score mod, which is not 1
const bool GUARDED = $guarded;  // a weight of 0 may meet infinity there
$functions
// What survives dropout weighs more.
INLINE Real survivors(const Fixed &fixed) { return $survivors; }

$part storage
// The page of the pool that is a batch entry's.
INLINE int64_t page_of(const Fixed &fixed, int64_t batch, int64_t page) { return $page; }
// Whether the query heads of a key head differ in nothing that depends on the head.
INLINE bool alike_in_group(const Call *call) {
    const int64_t group = call->heads / call->kv_heads;
    return $alike;
}
// Whether the keys that a query sees are one interval, and its part of a tile: from begin, before end.
const bool INTERVAL = $interval;
INLINE void interval(const Fixed &fixed, const Row &row, int64_t tile, int64_t keys, int64_t &begin, int64_t &end) {
    $# Begin and end are 0 until they are set: a query that sees nothing has no keys.
    if (!$asked) return;  $if asked
    end = keys;  $if not last
    end = between(0, (int64_t)$last + 1 - tile, keys);  $if last
    begin = 0;  $if not first
    begin = between(0, (int64_t)$first - tile, end);  $if first
}

$part derivatives
// -- derivatives of the score mod --------------------------------------------------------------------------------

$functions
enum Over { HEADS, ROWS_OF_QUERIES, COLUMNS, DIAGONALS, ENTRIES };
const int CAPTURED = $captured;
const Over OVER[CAPTURED + 1] = {$over};  // on what the index of a captured value depends

// dm times the weight of each captured value, added to its gradient; p is the weight of the softmax.
template <bool CHECKED, class C>
INLINE void collect(C &captured, $arguments, int i, int j, Vec p, Vec dm, Vec score) {
    $# A call may want some of the gradients: one text for all choices.
    $for gradients:
        if (captured.buffer[$n]) {  // $name
            Vec x = dm * weight$n(fixed, row, column, score);
            if (CHECKED) x = select(p != 0, x, Vec{});
            captured.add_entries($n, fixed.$name.size, x$index);  $if index
            captured.add_$over($n, i, j, x);  $if not index
        }
}

INLINE int64_t entries(const Fixed &fixed, int n) {
    $for scattered:
        if (n == $n) return $size;
    return 0;
}

// Whether work items never meet at an entry, because they differ in its index.
INLINE bool apart(const Call *call, const Fixed &fixed, int n, bool parts) {
    $for scattered:
        if (n == $n) return $apart;
    return true;
}
