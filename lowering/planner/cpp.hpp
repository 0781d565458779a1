// What every flat planner in C++ shares: numbers as the interpreter has them, tables, pieces of a row of tiles, records.
// Integers have 64 bits and Floats are doubles; nothing here knows of a mask.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off", "signed-zeros", "wrapv")
#endif
#define INLINE static inline __attribute__((always_inline))

typedef int64_t Int;
typedef double Real;
typedef uint32_t Word;

const Real INF = __builtin_inf(), NOT_A_NUMBER = __builtin_nan("");
const Int FAR = (Int)1 << 30;  // beyond every position
const Int FINE = 4096, GRAIN = 32;  // ranges of longer tables than FINE are known to a block of GRAIN entries
enum { EMPTY, PARTIAL, FULL, OPEN };

// -- numbers -----------------------------------------------------------------------------------------------------

// NaN where either is.
template <class T> INLINE T least(T x, T y) { return (x <= y) | (x != x) ? x : y; }
template <class T> INLINE T most(T x, T y) { return (x >= y) | (x != x) ? x : y; }
INLINE Int minimum(Int x, Int y) { return x < y ? x : y; }
INLINE Int maximum(Int x, Int y) { return x > y ? x : y; }
INLINE Real minimum(Real x, Real y) { return least(x, y); }
INLINE Real maximum(Real x, Real y) { return most(x, y); }
INLINE Int clip(Int x, Int lo, Int hi) { return x < lo ? lo : x > hi ? hi : x; }
template <class T, class U> INLINE auto select(bool c, T x, U y) -> decltype(true ? T() : U()) { return c ? x : y; }
INLINE Int magnitude(Int x) { return x < 0 ? -x : x; }
INLINE Real magnitude(Real x) { return __builtin_fabs(x); }
INLINE Int sign(Int x) { return (x > 0) - (x < 0); }
INLINE Real sign(Real x) { return x != x ? x : (Real)((x > 0) - (x < 0)); }
INLINE Real to_real(Int x) { return (Real)x; }
INLINE Int to_int(bool x) { return x; }
INLINE Int to_int(Real x) {
    const Real far = 4611686018427387904.0;
    return x != x ? 0 : (Int)(x < -far ? -far : x > far ? far : x);
}
INLINE bool bounded(Real x) { return x - x == 0; }
INLINE Real power(Real x, Real y) { return pow(x, y); }
INLINE Int power(Int x, Int n) {
    Int found = 1;
    for (; n > 0; n--) found = (Int)((uint64_t)found * (uint64_t)x);
    return found;
}
INLINE Real sigmoid(Real x) { return 0.5 * (1 + tanh(0.5 * x)); }
INLINE Real rsqrt(Real x) { return 1 / sqrt(x); }

INLINE Int floordiv(Int x, Int y) {
    if (y == 0) return 0;
    if (y == -1) return -x;  // the least integer has no opposite, and a division would trap
    Int found = x / y;
    return found - ((x % y != 0) & ((x < 0) != (y < 0)));
}
INLINE Int modulo(Int x, Int y) { return y == 0 ? 0 : x - floordiv(x, y) * y; }
INLINE Int shift_left(Int x, Int n) { return n < 0 || n > 63 ? 0 : (Int)((uint64_t)x << n); }
INLINE Int shift_right(Int x, Int n) { return n < 0 || n > 63 ? 0 : x >> n; }
INLINE Int wrapping_neg(Int x) { return (Int)-(uint64_t)x; }
INLINE Int wrapping_add(Int x, Int y) { return (Int)((uint64_t)x + (uint64_t)y); }
INLINE Int wrapping_sub(Int x, Int y) { return (Int)((uint64_t)x - (uint64_t)y); }
INLINE Int wrapping_mul(Int x, Int y) { return (Int)((uint64_t)x * (uint64_t)y); }
INLINE Int wrapped(Int x, Int bits) {
    const Int unused = 64 - clip(bits, 0, 64);
    return shift_right(shift_left(x, unused), unused);
}

// A 24-bit uniform in [0, 1) from counters; see dsl.evaluate.
INLINE Word mixed_word(Word x) {
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}
INLINE Word stirred(Word x) { return x; }
template <class... Rest> INLINE Word stirred(Word x, Int counter, Rest... rest) {
    return stirred(mixed_word(x ^ (Word)counter * 0x9E3779B1u), rest...);
}
template <class... Rest> INLINE Real uniform(Int seed, Rest... counters) {
    return (Real)(stirred(mixed_word((Word)seed + 0x9E3779B9u), counters...) >> 8) * 5.9604644775390625e-8;
}

// -- tables ------------------------------------------------------------------------------------------------------

const int AXES = 64;  // as many as frameworks have

INLINE Real real(Int word) {
    Real x;
    memcpy(&x, &word, sizeof x);
    return x;
}

template <class T> struct Table {  // row by row, without gaps
    const T *data;
    Int sizes[AXES], strides[AXES];

    Table(const Int *word, int rank) : data((const T *)word[0]) {
        Int stride = 1;
        for (int i = rank; i-- > 0; stride *= sizes[i]) sizes[i] = word[1 + i], strides[i] = stride;
    }
};

// Indices beyond the table mean its nearest entry.
template <class T, class... At> INLINE T look(const Table<T> &table, At... at) {
    const Int index[] = {at...};
    Int place = 0;
    for (int i = 0; i < (int)sizeof...(at); i++) place += clip(index[i], 0, table.sizes[i] - 1) * table.strides[i];
    return table.data[place];
}

// How many entries of a sorted table are below x, or at most x.
INLINE Int below(const Table<Int> &table, Int x) {
    Int start = 0, n = table.sizes[0];
    while (n > 0) {
        const Int half = n / 2;
        const bool up = table.data[start + half] < x;
        start = up ? start + half + 1 : start;
        n = up ? n - half - 1 : half;
    }
    return start;
}
INLINE Int up_to(const Table<Int> &table, Int x) {
    Int start = 0, n = table.sizes[0];
    while (n > 0) {
        const Int half = n / 2;
        const bool up = table.data[start + half] <= x;
        start = up ? start + half + 1 : start;
        n = up ? n - half - 1 : half;
    }
    return start;
}
INLINE Int segment(const Table<Int> &offsets, Int x) {
    return clip(up_to(offsets, x) - 1, 0, maximum(offsets.sizes[0] - 2, 0));
}
INLINE Int found_in(const Table<Int> &table, Int n, Int by) { return n < table.sizes[0] ? n - by : FAR; }
INLINE Int at_least(const Table<Int> &table, Int x) { return found_in(table, below(table, x), 0); }
INLINE Int above(const Table<Int> &table, Int x) { return found_in(table, up_to(table, x), 0); }
INLINE Int at_most(const Table<Int> &table, Int x) { return found_in(table, up_to(table, x), 1); }
INLINE Int under(const Table<Int> &table, Int x) { return found_in(table, below(table, x), 1); }

template <class T> struct Buffer {  // grows; freed at the end
    T *data;
    Int size, room;
    bool failed;  // there was no memory: it has fewer entries than were asked for

    Buffer() : data(nullptr), size(0), room(0), failed(false) {}
    Buffer(const Buffer &) = delete;
    ~Buffer() { free(data); }
    bool more(Int n) {  // n further entries
        if (size + n > room) {
            const Int wanted = maximum(size + n, 2 * room);
            T *moved = (T *)realloc((void *)data, (size_t)wanted * sizeof(T));
            if (!moved) return failed = true, false;
            data = moved, room = wanted;
        }
        size += n;
        return true;
    }
    void add(T x) {
        if (more(1)) data[size - 1] = x;
    }
};

// Which axes of a table are ranged over, and which are fixed by an index: the fixed ones number the rows.
template <class T, int RANGED> struct Turned {
    Table<T> table;
    int rank, ranged[RANGED], fixed[AXES];
    Int rows;

    Turned(const Table<T> &table, int rank, const int (&axes)[RANGED]) : table(table), rank(rank), rows(1) {
        for (int i = 0; i < RANGED; i++) ranged[i] = axes[i];
        int n = 0;
        for (int i = 0, next = 0; i < rank; i++) {
            if (next < RANGED && axes[next] == i) next++;
            else fixed[n++] = i, rows *= table.sizes[i];
        }
    }
    Int row(const Int *at) const {
        Int place = 0;
        for (int i = 0; i < rank - RANGED; i++) {
            const Int n = table.sizes[fixed[i]];
            place = place * n + clip(at[i], 0, n - 1);
        }
        return place;
    }
    const T *begin(Int row) const {
        const T *found = table.data;
        for (int i = rank - RANGED; i-- > 0; row /= table.sizes[fixed[i]])
            found += row % table.sizes[fixed[i]] * table.strides[fixed[i]];
        return found;
    }
};

// Facts of a range of entries: `of` one entry, of `both` of two ranges, and of a range that lies `inside` of two.
template <class T> struct Least {
    typedef T Type;
    static T of(T x) { return x; }
    static T both(T x, T y) { return least(x, y); }
    static T inside(T x, T y) { return most(x, y); }
};
template <class T> struct Greatest {
    typedef T Type;
    static T of(T x) { return x; }
    static T both(T x, T y) { return most(x, y); }
    static T inside(T x, T y) { return least(x, y); }
};
template <Word SEED> struct Classes {  // a bit for each of 64 classes of numbers, by the last bits or by a hash
    typedef Int Type;
    static Int of(Int x) { return (Int)((uint64_t)1 << ((SEED ? mixed_word((Word)x + SEED) : (Word)x) & 63)); }
    static Int both(Int x, Int y) { return x | y; }
    static Int inside(Int x, Int y) { return x & y; }
};

// `J` (Least, Greatest or Classes) of a table over any range of one axis: of 1, 2, 4, ... blocks from each block on.
template <class J> struct Line {
    typedef typename J::Type T;
    Turned<T, 1> turned;
    Int n, stride, grain, count, levels;
    Buffer<T> windows;  // [rows, levels, count]

    bool failed() const { return windows.failed; }

    Line(const Table<T> &table, int rank, const int (&axes)[1]) : turned(table, rank, axes) {
        n = table.sizes[axes[0]], stride = table.strides[axes[0]];
        grain = n <= 8 * GRAIN ? 1 : GRAIN, count = (n + grain - 1) / grain;
        for (levels = 1; (Int)1 << levels <= count; levels++) {}
        if (!windows.more(turned.rows * levels * count)) return;
        for (Int row = 0; row < turned.rows; row++) {
            T *at = windows.data + row * levels * count;
            const T *data = turned.begin(row);
            for (Int i = 0; i < count; i++) at[i] = joined(data, i * grain, minimum(i * grain + grain, n));
            for (Int level = 1; level < levels; level++, at += count) {
                const Int step = (Int)1 << (level - 1);
                for (Int i = 0; i + step < count; i++) at[count + i] = J::both(at[i], at[i + step]);
                for (Int i = count - step; i < count; i++) at[count + i] = at[i];
            }
        }
    }
    T joined(const T *data, Int lo, Int hi) const {
        T found = J::of(data[lo * stride]);
        for (Int i = lo + 1; i < hi; i++) found = J::both(found, J::of(data[i * stride]));
        return found;
    }
};

// `J` of the entries lo..hi, both included; within one block of a long table, perhaps of more entries.
template <class J, class... At> static typename J::Type over(const Line<J> &x, Int lo, Int hi, At... fixed) {
    typedef typename J::Type T;
    const Int at[] = {fixed..., 0};
    const Int row = x.turned.row(at);
    lo = clip(lo, 0, x.n - 1), hi = clip(hi, 0, x.n - 1);
    const Int first = lo / x.grain, last = hi / x.grain, between = last - first - 1;
    const T *data = x.turned.begin(row), *windows = x.windows.data + row * x.levels * x.count;
    const Int start = first * x.grain, stop = minimum(start + x.grain, x.n), end = last * x.grain;
    const T a = lo == start ? windows[first] : x.joined(data, lo, stop);
    const T z = hi + 1 == minimum(end + x.grain, x.n) ? windows[last] : x.joined(data, end, hi + 1);
    if (between < 0) return x.n > FINE ? J::inside(a, z) : x.joined(data, lo, hi + 1);
    if (between == 0) return J::both(a, z);
    const Int level = minimum(63 - __builtin_clzll((unsigned long long)between), x.levels - 1);
    windows += level * x.count;
    return J::both(J::both(a, z), J::both(windows[first + 1], windows[last - ((Int)1 << level)]));
}

// `J` of a table over any box of two or more axes: blocks of 1, 2, 4, ... entries along each.
template <class J, int RANGED> struct Plane {
    typedef typename J::Type T;
    Turned<T, RANGED> turned;
    Int sizes[RANGED], counts[RANGED], plane;  // entries, levels; of all levels together
    Buffer<Int> places;                        // where each combination of levels begins
    Buffer<T> blocks;                          // [rows, plane]

    bool failed() const { return places.failed || blocks.failed; }
    Int extent(int axis, Int level) const { return (sizes[axis] + ((Int)1 << level) - 1) >> level; }

    Plane(const Table<T> &table, int rank, const int (&axes)[RANGED]) : turned(table, rank, axes), plane(0) {
        Int all = 1;
        for (int i = 0; i < RANGED; i++) {
            sizes[i] = table.sizes[axes[i]];
            for (counts[i] = 1; (Int)1 << (counts[i] - 1) < sizes[i]; counts[i]++) {}
            all *= counts[i];
        }
        if (!places.more(all)) return;
        for (Int i = 0; i < all; i++) {
            Int level[RANGED], size = 1;
            levels_of(i, level);
            for (int j = 0; j < RANGED; j++) size *= extent(j, level[j]);
            places.data[i] = plane, plane += size;
        }
        if (!blocks.more(turned.rows * plane)) return;
        for (Int row = 0; row < turned.rows; row++)
            for (Int i = 0; i < all; i++) fill(row, i);
    }
    void levels_of(Int i, Int *level) const {
        for (int j = RANGED; j-- > 0; i /= counts[j]) level[j] = i % counts[j];
    }
    Int place_of(const Int *level) const {
        Int i = 0;
        for (int j = 0; j < RANGED; j++) i = i * counts[j] + level[j];
        return places.data[i];
    }
    void fill(Int row, Int i) {  // one combination of levels, from that with the last positive level one lower
        Int level[RANGED], at[RANGED] = {}, below[RANGED];
        levels_of(i, level);
        int axis = RANGED - 1;
        while (axis >= 0 && level[axis] == 0) axis--;
        for (int j = 0; j < RANGED; j++) below[j] = level[j] - (j == axis);
        T *to = blocks.data + row * plane + places.data[i];
        const T *from = axis < 0 ? turned.begin(row) : blocks.data + row * plane + place_of(below);
        Int strides[RANGED], stride = 1, size = 1;
        for (int j = RANGED; j-- > 0; stride *= extent(j, below[j])) {
            strides[j] = axis < 0 ? turned.table.strides[turned.ranged[j]] : stride;
            size *= extent(j, level[j]);
        }
        for (Int n = 0; n < size; n++) {
            Int place = 0;
            for (int j = 0; j < RANGED; j++) place += (j == axis ? 2 * at[j] : at[j]) * strides[j];
            to[n] = axis < 0 ? J::of(from[place]) : from[place];
            if (axis >= 0 && 2 * at[axis] + 1 < extent(axis, below[axis])) to[n] = J::both(to[n], from[place + strides[axis]]);
            for (int j = RANGED - 1; j >= 0 && ++at[j] == extent(j, level[j]); j--) at[j] = 0;
        }
    }
};

// `J` of the box with these first and last entries, or of one that covers it: `within(plane, lo0, lo1, hi0, hi1,
// fixed...)`.
template <class J, int RANGED, class... At> static typename J::Type within(const Plane<J, RANGED> &x, At... values) {
    typedef typename J::Type T;
    const Int at[] = {values..., 0};
    Int level[RANGED], lo[RANGED], hi[RANGED];
    for (int j = 0; j < RANGED; j++) {
        lo[j] = clip(at[j], 0, x.sizes[j] - 1), hi[j] = clip(at[RANGED + j], 0, x.sizes[j] - 1);
        for (level[j] = 0; (hi[j] >> level[j]) - (lo[j] >> level[j]) > 1; level[j]++) {}  // two blocks reach over it
        lo[j] >>= level[j], hi[j] >>= level[j];
    }
    const T *data = x.blocks.data + x.turned.row(at + 2 * RANGED) * x.plane + x.place_of(level);
    T found = T();
    for (int corner = 0; corner < 1 << RANGED; corner++) {
        Int place = 0;
        for (int j = 0; j < RANGED; j++) place = place * x.extent(j, level[j]) + (corner >> j & 1 ? hi[j] : lo[j]);
        found = corner == 0 ? data[place] : J::both(found, data[place]);
    }
    return found;
}
