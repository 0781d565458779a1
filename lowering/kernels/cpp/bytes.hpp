// -- FEWEST to 16 rows beside keys and values of int8, on a matrix unit ---------------------------------------------
//
// The unit multiplies bytes and sums products up as whole numbers, without rounding. So a row of queries, or of
// weights of a tile, becomes whole numbers: its largest magnitude is 127 * 2^24, and others are rounded, by 2^-32 of the
// largest at most. Such a number is four bytes, the high one first, and each byte has a column of its own in a square.
// Sums of the four are joined as floats. Fewer bytes are too few, also beside queries of 16 bits: where one key takes
// nearly all weight and its value is 0, the result is that of the small weights. Numbers that are not tame are
// multiplied by vectors.

#if BYTES
const int NUMBER = 4;             // bytes of a number
const int QUERIES = 16 / NUMBER;  // rows of queries in a square

// Calls put(n, bytes) for each byte n of 64 numbers; `most` is the largest magnitude in their row. Byte 16 a + 4 b + c
// is of number 16 b + 4 a + c.
template <class Number, class Put> INLINE void as_bytes(Number number, Real most, Put put) {
    const Real factor = most == 0 ? 0 : 127 / most;
    Bits whole[4];
    UNROLLED for (int i = 0; i < 4; i++) {
        const Vec x = number(i) * factor * (Real)(1 << 24);
        asm("vcvtps2dq %1, %0" : "=v"(whole[i]) : "v"(x));
    }
    UNROLLED for (int n = NUMBER - 1; n >= 0; n--) {
        Bits low[4], left, right, all;
        UNROLLED for (int i = 0; i < 4; i++) low[i] = whole[i] & 255, whole[i] = (whole[i] + 128) >> 8;
        asm("vpackusdw %2, %1, %0" : "=v"(left) : "v"(low[0]), "v"(low[1]));
        asm("vpackusdw %2, %1, %0" : "=v"(right) : "v"(low[2]), "v"(low[3]));
        asm("vpackuswb %2, %1, %0" : "=v"(all) : "v"(left), "v"(right));
        put(n, all);
    }
}
constexpr int place_of(int four) { return four % 4 * 4 + four / 4; }  // where four neighbours are in such bytes

// The sums of four bytes as one number, of LANES rows or columns; the high byte counts 1.
template <class Sum> INLINE Vec joined(Sum sum) {
    Vec x = cast<Vec>((Bits)sum(NUMBER - 1));
    UNROLLED for (int n = NUMBER - 2; n >= 0; n--) x = x * (Real)0x1p-8 + cast<Vec>((Bits)sum(n));
    return x;
}

// A row of queries; whether bytes hold it.
static bool take_query(Whole &to, int row, const Entry *from, Real unit) {
    const Real most = most_of<HEAD_DIM>(Lines<const Entry>{from, 0, nullptr}, 1) * magnitude(unit);
    if (!tame(most)) return false;
    to.unit[row] = most / 127;
    for (int step = 0; step < BYTE_STEPS; step++) {
        const auto number = [&](int i) {
            const int d = step * DEEP + i * LANES;
            return load_reals(from + d, HEAD_DIM - d) * unit;
        };
        as_bytes(number, most, [&](int n, Bits bytes) {
            auto *square = to.queries[row / QUERIES][step];
            for (int i = 0; i < 16; i++) square[i][NUMBER * (row % QUERIES) + n] = bytes[place_of(i)];
        });
    }
    return true;
}

// Products of a vector of keys and `squares` of queries. Keys are the left operand, read where they are if the unit can
// read whole rows of them.
static void multiply_bytes(Whole &own, const int8_t *keys, int64_t stride, int64_t present, int squares, int32_t *to) {
    const int8_t *left = keys;
    int64_t row = stride;
    if (HEAD_DIM % DEEP || stride % 4 || present < LANES) {
        left = own.keys[0], row = sizeof own.keys[0];
        for (int i = 0; i < LANES; i++) {
            for (int d = HEAD_DIM; d < BYTE_STEPS * DEEP; d++) own.keys[i][d] = 0;
            if (i < present) __builtin_memcpy(own.keys[i], keys + i * stride, HEAD_DIM);
            else __builtin_memset(own.keys[i], 0, HEAD_DIM);
        }
    }
    square_of_zeros<0>(), square_of_zeros<1>(), square_of_zeros<2>(), square_of_zeros<3>();
    for (int step = 0; step < BYTE_STEPS; step++) {
        load_square<4>(left + step * DEEP, row / 4);
        load_square<5>(own.queries[0][step], 16), add_product_of_bytes<0, 4, 5>();
        if (squares > 1) load_square<6>(own.queries[1][step], 16), add_product_of_bytes<1, 4, 6>();
        if (squares > 2) load_square<7>(own.queries[2][step], 16), add_product_of_bytes<2, 4, 7>();
        if (squares > 3) load_square<5>(own.queries[3][step], 16), add_product_of_bytes<3, 4, 5>();
    }
    store_square<0>(to, 16);
    if (squares > 1) store_square<1>(to + 256, 16);
    if (squares > 2) store_square<2>(to + 512, 16);
    if (squares > 3) store_square<3>(to + 768, 16);
}

// Scores of vectors lo to hi of the keys.
static void score_bytes(Worker &w, const Tile &tile, int rows, int lo, int hi) {
    Whole &own = w.whole;
    const int64_t stride = tile.k.stride;
    const int squares = (rows + QUERIES - 1) / QUERIES;
    for (int first = lo; first < hi; first += 4) {
        const int last = first + 4 < hi ? first + 4 : hi;
        for (int j = first; j < last; j++)
            multiply_bytes(own, tile.k.row(j * LANES), stride, tile.present - j * LANES, squares,
                           own.products + (j - first) * 1024);
        for (int j = first; j < last; j++) {
            const int8_t *ahead = tile.k.row(j * LANES + FETCH);
            for (int i = 0; i < LANES; i++) fetch_row<HEAD_DIM, 2>(ahead + i * stride);
            for (int n = 0; n < squares; n++) {
                Vec square[LANES];
                UNROLLED for (int i = 0; i < LANES; i++)
                    square[i] = load<Vec>(own.products + (j - first) * 1024 + n * 256 + i * 16);
                transpose(square);
                UNROLLED for (int i = 0; i < QUERIES; i++) {
                    const int row = n * QUERIES + i;
                    if (row >= rows) break;
                    const Vec score = joined([&](int byte) { return square[NUMBER * i + byte]; });
                    store(w.strips->scores + row * BLOCK_K + j * LANES, score * own.unit[row]);
                }
            }
        }
    }
}

// Values of 64 keys from `start` on and 64 columns from `column` on, as four squares: a row has 16 columns of four keys.
// Column 16 a + 4 b + c is in square b.
template <bool PARTIAL> INLINE void pack_bytes(const Tile &tile, int64_t start, int column, int8_t (*to)[16][DEEP]) {
    static const int8_t NONE[DEEP] = {};
    for (int i = 0; i < 16; i++) {
        const int64_t first = start + 4 * i;
        const int8_t *from = tile.v.row(first) + column, *ahead = tile.v.row(first % BLOCK_K + FETCH) + column;
        Raw row[4];
        UNROLLED for (int n = 0; n < 4; n++, from += tile.v.stride, ahead += tile.v.stride) {
            const bool there = BLOCK_K % DEEP == 0 || first + n < BLOCK_K;
            const int8_t *at = there && (!PARTIAL || first + n < tile.present) ? from : NONE;
            const int left = V_DIM - column < DEEP ? V_DIM - column : DEEP;
            if (V_DIM % DEEP && left < DEEP) row[n] = Raw{}, __builtin_memcpy(&row[n], at, left);
            else row[n] = load<Raw>(at);
            __builtin_prefetch(ahead, 0, 2);
        }
        Raw pair[4];  // two keys, whose bytes take turns: the lower and the upper half of each 16 columns
        asm("vpunpcklbw %2, %1, %0" : "=v"(pair[0]) : "v"(row[0]), "v"(row[1]));
        asm("vpunpckhbw %2, %1, %0" : "=v"(pair[1]) : "v"(row[0]), "v"(row[1]));
        asm("vpunpcklbw %2, %1, %0" : "=v"(pair[2]) : "v"(row[2]), "v"(row[3]));
        asm("vpunpckhbw %2, %1, %0" : "=v"(pair[3]) : "v"(row[2]), "v"(row[3]));
        UNROLLED for (int n = 0; n < 2; n++) {
            Raw low, high;
            asm("vpunpcklwd %2, %1, %0" : "=v"(low) : "v"(pair[n]), "v"(pair[n + 2]));
            asm("vpunpckhwd %2, %1, %0" : "=v"(high) : "v"(pair[n]), "v"(pair[n + 2]));
            store(to[2 * n][place_of(i)], low), store(to[2 * n + 1][place_of(i)], high);
        }
    }
}

// Four vectors as squares of 4 x 4 fours of lanes, turned.
INLINE void turn_fours(Vec *x) {
    for (int i = 0; i < 4; i += 2) {
        const Vec left = x[i], right = x[i + 1];
        x[i] = SHUFFLE(left, right, FROM_LEFT, 4), x[i + 1] = SHUFFLE(left, right, FROM_RIGHT, 4);
    }
    for (int i = 0; i < 2; i++) {
        const Vec left = x[i], right = x[i + 2];
        x[i] = SHUFFLE(left, right, FROM_LEFT, 8), x[i + 2] = SHUFFLE(left, right, FROM_RIGHT, 8);
    }
}

// acc = acc * shrink + weights * values; false, and nothing is done, where bytes do not hold the weights. The unit waits
// until what it reads is in the cache, and vectors for its results: so each has other work between.
template <bool PARTIAL> static bool add_bytes(Worker &w, const Tile &tile, int rows) {
    if (w.from[0] == w.to[0]) return true;
    Whole &own = w.whole;
    const int first = w.from[0] * LANES / DEEP, last = (w.to[0] * LANES + DEEP - 1) / DEEP;  // groups of keys
    const int squares = (NUMBER * rows + 15) / 16;
    const auto pack = [&](int column) {
        for (int g = first; g < last; g++) pack_bytes<PARTIAL>(tile, g * DEEP, column, own.values[g]);
    };
    pack(0);
    for (int i = 0; i < rows; i++) {
        const auto weights_at = [&](int j) { return few_weights<PARTIAL>(w, i, j); };
        Raw sizes = {};
        for (int j = first * 4; j < last * 4; j++) {
            const Raw x = (Raw)weights_at(j) << 1;
            sizes = x > sizes ? x : sizes;
        }
        const Real most = largest_of(sizes);
        if (!tame(most)) return false;
        own.share[i] = most / 127;
        for (int g = first; g < last; g++)
            as_bytes([&](int j) { return weights_at(4 * g + j); }, most, [&](int n, Bits bytes) {
                const int column = NUMBER * i + n;
                store(own.weights[column / 16][g][column % 16], bytes);
            });
    }
    const auto add = [&](int column) {
        for (int i = 0; i < rows; i++) {
            const int32_t *from = own.products + NUMBER * i * 64;
            Vec sums[4];
            UNROLLED for (int b = 0; b < 4; b++)
                sums[b] = joined([&](int byte) { return load<Bits>(from + byte * 64 + b * 16); });
            turn_fours(sums);
            UNROLLED for (int a = 0; a < 4; a++) {
                Real *acc = w.acc + i * V_WIDE + column + a * LANES;
                if (column + a * LANES < V_WIDE) store(acc, load<Vec>(acc) * w.shrink[i] + sums[a] * own.share[i]);
            }
        }
    };
    for (int column = 0; column < V_WIDE; column += DEEP) {
        if (column) pack(column), add(column - DEEP);
        for (int n = 0; n < squares; n++) {
            square_of_zeros<0>(), square_of_zeros<1>(), square_of_zeros<2>(), square_of_zeros<3>();
            for (int g = first; g < last; g++) {
                load_square<4>(own.weights[n][g], 16);
                load_square<5>(own.values[g][0], 16), add_product_of_bytes<0, 4, 5>();
                load_square<6>(own.values[g][1], 16), add_product_of_bytes<1, 4, 6>();
                load_square<7>(own.values[g][2], 16), add_product_of_bytes<2, 4, 7>();
                load_square<5>(own.values[g][3], 16), add_product_of_bytes<3, 4, 5>();
            }
            int32_t *to = own.products + n * 1024;
            store_square<0>(to, 64), store_square<1>(to + 16, 64);
            store_square<2>(to + 32, 64), store_square<3>(to + 48, 64);
        }
    }
    add((V_WIDE - 1) / DEEP * DEEP);
    return true;
}
#endif
