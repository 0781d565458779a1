// -- the mask and the score mod, over a vector of keys -----------------------------------------------------------

struct Fixed {  // known once: sizes, parameters, tables, batch entry and head
    Int h;
    Real c;
    Table<Real, 2> bias;
};

INLINE Fixed fixed_of(const Call *call, int64_t batch, int64_t head) {
    Fixed fixed;
    fixed.h = (Int)(call->h_origin + head);
    fixed.c = (Real)call->slots[0].f;
    const int64_t *words = call->tables;
    words = read(fixed.bias, words);
    return fixed;
}

struct Row {  // known once per query
    Int q;
};

INLINE Row row_of(const Fixed &fixed, Int q) {
    Row row;
    row.q = q;
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
const bool SLOPED = true;  // the kernel needs the slope of the score mod, which is not 1
const bool GUARDED = true;  // a weight of 0 may meet infinity there
// q >= k
INLINE Bits visible(const Fixed &fixed, const Row &row, const Column &column) {
    return row.q >= column.k;
}

// bias[h, q - k] + c * tanh(score / c)
INLINE Vec modified(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    const Vec x0 = score / fixed.c;
    const Vec x1 = tanh(x0);
    return behind<1>(fixed.bias, fixed.h, row.q - column.first) + fixed.c * x1;
}

INLINE Bits kept(const Fixed &fixed, const Row &row, const Column &column) {
    return bits(true);
}

INLINE Vec scale_of_value(const Fixed &fixed, const Row &row, const Column &column) {
    return reals(1);
}

// c * (1.0 - tanh(score / c) * tanh(score / c)) / c
INLINE Vec slope(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    const Vec x0 = score / fixed.c;
    const Vec x1 = tanh(x0);
    const Vec x2 = fixed.c * (1.0f - x1 * x1);
    return x2 / fixed.c;
}

// What survives dropout weighs more.
INLINE Real survivors(const Fixed &fixed) { return 1; }

// -- derivatives of the score mod --------------------------------------------------------------------------------

// 1.0
INLINE Vec weight0(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    return reals(1.0f);
}

// tanh(score / c) - score / c * (c * (1.0 - tanh(score / c) * tanh(score / c))) / c
INLINE Vec weight1(const Fixed &fixed, const Row &row, const Column &column, Vec score) {
    const Vec x0 = score / fixed.c;
    const Vec x1 = tanh(x0);
    const Vec x2 = fixed.c * (1.0f - x1 * x1);
    return x1 - x0 * x2 / fixed.c;
}

enum Over { HEADS, ROWS_OF_QUERIES, COLUMNS, DIAGONALS, ENTRIES };
const int CAPTURED = 2;
const Over OVER[CAPTURED + 1] = {DIAGONALS, HEADS};  // on what the index of a captured value depends

// dm times the weight of each captured value, added to its gradient; p is the weight of the softmax.
template <bool CHECKED, class C>
INLINE void collect(C &captured, const Fixed &fixed, const Row &row, const Column &column, int i, int j, Vec p, Vec dm, Vec score) {
    if (captured.buffer[0]) {  // bias
        Vec x = dm * weight0(fixed, row, column, score);
        if (CHECKED) x = select(p != 0, x, Vec{});
        captured.add_diagonal(0, i, j, x);
    }
    if (captured.buffer[1]) {  // c
        Vec x = dm * weight1(fixed, row, column, score);
        if (CHECKED) x = select(p != 0, x, Vec{});
        captured.add_head(1, i, j, x);
    }
}

INLINE int64_t entries(const Fixed &fixed, int n) {
    return 0;
}

// Whether work items never meet at an entry, because they differ in its index.
INLINE bool apart(const Call *call, const Fixed &fixed, int n, bool parts) {
    return true;
}
