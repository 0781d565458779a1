// -- whole numbers ------------------------------------------------------------------------------------------------

// `//` and `%` round to minus infinity and give 0 for a divisor of 0.
INLINE Int floordiv(Int x, Int y) {
    if (y == 0) return 0;
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
}
INLINE Int modulo(Int x, Int y) {
    if (y == 0) return 0;
    Int rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
APART Ints floordiv(Ints x, Ints y) {
#if INT_BYTES == 4
    // 64-bit quotients of 32-bit numbers are never rounded past a whole number.
    typedef double Doubles __attribute__((vector_size(LANES * 8)));
    Doubles quotient = cast<Doubles>(x) / cast<Doubles>(y == 0 ? ints(1) : y);
    Ints whole = cast<Ints>(quotient);
    whole += cast<Ints>(cast<Doubles>(whole) > quotient);
    return y == 0 ? Ints{} : whole;
#else
    for (int i = 0; i < LANES; i++) x[i] = floordiv((Int)x[i], (Int)y[i]);
    return x;
#endif
}
INLINE Ints modulo(Ints x, Ints y) { return y == 0 ? Ints{} : x - floordiv(x, y) * y; }

INLINE int64_t between(int64_t least, int64_t x, int64_t most) { return x < least ? least : x < most ? x : most; }

// Shifts by 64 and more, or by less than 0, give 0; `>>` by the width of Int and more leaves the sign.
const Int WIDTH = 8 * INT_BYTES;
INLINE Int shift_left(Int x, Int n) { return n < 0 || n >= WIDTH ? 0 : (Int)((uint64_t)x << n); }
INLINE Int shift_right(Int x, Int n) { return n < 0 || n >= 64 ? 0 : x >> (n < WIDTH ? n : WIDTH - 1); }
INLINE Ints shift_left(Ints x, Ints n) { return (n < 0) | (n >= WIDTH) ? Ints{} : x << (n & (WIDTH - 1)); }
INLINE Ints shift_right(Ints x, Ints n) {
    return (n < 0) | (n >= 64) ? Ints{} : x >> minimum(maximum(n, Ints{}), ints(WIDTH - 1));
}

// Sums and products that may leave Int wrap: C++ defines that of unsigned numbers.
#if INT_BYTES == 4
typedef uint32_t Modular;
#else
typedef uint64_t Modular;
#endif
typedef Modular Modulars __attribute__((vector_size(LANES * INT_BYTES)));
INLINE Int wrapping_neg(Int x) { return (Int)-(Modular)x; }
INLINE Int wrapping_add(Int x, Int y) { return (Int)((Modular)x + (Modular)y); }
INLINE Int wrapping_sub(Int x, Int y) { return (Int)((Modular)x - (Modular)y); }
INLINE Int wrapping_mul(Int x, Int y) { return (Int)((Modular)x * (Modular)y); }
INLINE Ints wrapping_neg(Ints x) { return (Ints)-(Modulars)x; }
INLINE Ints wrapping_add(Ints x, Ints y) { return (Ints)((Modulars)x + (Modulars)y); }
INLINE Ints wrapping_sub(Ints x, Ints y) { return (Ints)((Modulars)x - (Modulars)y); }
INLINE Ints wrapping_mul(Ints x, Ints y) { return (Ints)((Modulars)x * (Modulars)y); }
// The low bits, as a number with a sign.
INLINE Int wrapped(Int x, Int bits) {
    const Int unused = bits < 0 ? WIDTH : bits < WIDTH ? WIDTH - bits : 0;
    return shift_right(shift_left(x, unused), unused);
}
INLINE Ints wrapped(Ints x, Ints bits) {
    const Ints unused = WIDTH - minimum(maximum(bits, Ints{}), ints(WIDTH));
    return shift_right(shift_left(x, unused), unused);
}

INLINE Int power(Int x, Int n) {
    Int y = 1;
    for (; n > 0; n--) y = wrapping_mul(y, x);
    return y;
}
APART Ints power(Ints x, Ints n) {
    for (int i = 0; i < LANES; i++) x[i] = power((Int)x[i], (Int)n[i]);
    return x;
}

// Towards zero; NaN is 0, and what does not fit becomes the largest that does.
const Real LARGEST = (Real)(INT_BYTES == 8 ? 4611686018427387904.0 : REAL_BYTES == 4 ? 2147483520.0 : 2147483647.0);
INLINE Int to_int(bool x) { return x; }
INLINE Int to_int(Real x) { return x != x ? 0 : x > LARGEST ? (Int)LARGEST : x < -LARGEST ? -(Int)LARGEST : (Int)x; }
INLINE Ints to_int(Vec x) {
    x = x != x ? Vec{} : x > LARGEST ? reals(LARGEST) : x < -LARGEST ? reals(-LARGEST) : x;
    return cast<Ints>(x);
}
INLINE Ints to_int(Bits x) { return -cast<Ints>(x); }
INLINE Real to_real(Int x) { return (Real)x; }
INLINE Vec to_real(Ints x) { return cast<Vec>(x); }

// -- random numbers: dsl/evaluate.py, uniform ---------------------------------------------------------------------

// A. Appleby, MurmurHash3 finaliser.
template <class T> INLINE T mixed(T x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}
INLINE Word low(Int x) { return (Word)x; }
INLINE Words low(Ints x) { return cast<Words>(x); }
template <class T> INLINE auto seeded(T seed) { return mixed(low(seed) + 0x9E3779B9u); }
INLINE Word stirred(Word x, Int counter) { return mixed(x ^ (low(counter) * 0x9E3779B1u)); }
INLINE Words stirred(Words x, Ints counter) { return mixed(x ^ (low(counter) * 0x9E3779B1u)); }
INLINE Real uniform(Word x) { return (Real)(int32_t)(x >> 8) * (Real)5.9604644775390625e-08; }
INLINE Vec uniform(Words x) { return cast<Vec>((Narrow)(x >> 8)) * (Real)5.9604644775390625e-08; }

// -- tables: an index out of range is clamped ----------------------------------------------------------------------

template <class T, int RANK> struct Table {
    const T *data;
    int64_t size[RANK], stride[RANK];
    inline __attribute__((always_inline)) int64_t step(int axis, int64_t i) const {
        return (i < 0 ? 0 : i < size[axis] ? i : size[axis] - 1) * stride[axis];
    }
};

// Its words in the call: data, sizes, strides.
template <class T, int RANK> INLINE const int64_t *read(Table<T, RANK> &table, const int64_t *words) {
    table.data = (const T *)words[0];
    for (int i = 0; i < RANK; i++) table.size[i] = words[1 + i], table.stride[i] = words[1 + RANK + i];
    return words + 1 + 2 * RANK;
}

INLINE bool entry(uint8_t x) { return x != 0; }
INLINE Int entry(int32_t x) { return x; }
INLINE Int entry(int64_t x) { return (Int)x; }
INLINE Real entry(Real x) { return x; }
template <class T> struct Wide { typedef Vec Type; };
template <> struct Wide<bool> { typedef Bits Type; };
template <> struct Wide<Int> { typedef Ints Type; };
INLINE void put(Vec &x, int i, Real y) { x[i] = y; }
INLINE void put(Ints &x, int i, Int y) { x[i] = y; }
INLINE void put(Bits &x, int i, bool y) { x[i] = -(Lane)y; }

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
INLINE Vec widened(Vec x) { return x; }
INLINE Ints widened(Ints x) { return x; }
INLINE Bits widened(Bytes x) { return cast<Bits>(x) != 0; }

// T[i, ...] at single indices.
template <class T, int RANK, class... I> INLINE auto at(const Table<T, RANK> &table, I... index) {
    int axis = 0;
    int64_t where = 0;
    ((where += table.step(axis++, (int64_t)index)), ...);
    return entry(table.data[where]);
}

// The same at a vector of indices along each axis.
template <class T, int RANK, class... I> APART auto gather(const Table<T, RANK> &table, I... index) {
    typename Wide<decltype(entry(T()))>::Type found;
    if ((any(flags(index != index[0])) || ...)) {
        for (int i = 0; i < LANES; i++) put(found, i, at(table, (Int)index[i]...));
    } else {  // one entry, as where keys are read by blocks
        const auto one = at(table, (Int)index[0]...);
        for (int i = 0; i < LANES; i++) put(found, i, one);
    }
    return found;
}

// LANES entries along an axis, some of whose indices are outside.
template <int AXIS, class T, int RANK>
APART auto clamped(const Table<T, RANK> &table, const T *row, int64_t first, int64_t step) {
    typename Wide<decltype(entry(T()))>::Type found;
    for (int i = 0; i < LANES; i++) put(found, i, entry(row[table.step(AXIS, first + i * step)]));
    return found;
}

// The same of entries that are inside, and apart.
template <class T> INLINE auto apart(const T *from, int64_t stride) {
    typename Wide<decltype(entry(T()))>::Type found;
    for (int i = 0; i < LANES; i++) put(found, i, entry(from[i * stride]));
    return found;
}

// The same at LANES neighbours along one axis, whose first index is given: upwards, or downwards.
template <bool UP, int AXIS, class T, int RANK, class... I>
INLINE auto neighbours(const Table<T, RANK> &table, I... index) {
    typedef T Entries __attribute__((vector_size(LANES * sizeof(T))));
    const int64_t place[] = {(int64_t)index...}, stride = table.stride[AXIS];
    const int64_t first = place[AXIS], least = UP ? first : first - (LANES - 1);
    const T *row = table.data;
    for (int i = 0; i < RANK; i++)
        if (i != AXIS) row += table.step(i, place[i]);
    if (least < 0 || least + LANES > table.size[AXIS]) return clamped<AXIS>(table, row, first, UP ? 1 : -1);
    if (stride != 1) return apart(row + first * stride, UP ? stride : -stride);
    auto found = widened(load<Entries>(row + least));
    if (!UP) found = SHUFFLE(found, found, SWAPPED, LANES - 1);
    return found;
}
template <int AXIS, class T, int RANK, class... I> INLINE auto ahead(const Table<T, RANK> &table, I... index) {
    return neighbours<true, AXIS>(table, index...);
}
template <int AXIS, class T, int RANK, class... I> INLINE auto behind(const Table<T, RANK> &table, I... index) {
    return neighbours<false, AXIS>(table, index...);
}
