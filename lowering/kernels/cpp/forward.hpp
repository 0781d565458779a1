// -- forward ------------------------------------------------------------------------------------------------------
//
// One work item is one tile of queries of one head, at most BLOCK_Q of them. For every tile of keys that it visits, it
// computes scores and weights of all rows, GROUP rows at a time, then weights times values. Where scores are not
// modified, the online softmax has base 2 (log2 e is in the scale), otherwise base e. Few rows read keys and values
// where they are; for many rows these are packed first.
//
// A TANGENT kernel also computes the tangents of out and lse, given those of queries, keys and values (call->dq, dk and
// dv, of which some may be null). With a score's tangent s', p its weight and mean the average of s' by these weights:
// out' = sum of p s' v + p v' over the keys, less mean * out, and lse' = mean. All rows count as many there.

const Real BASE = SCORED ? LOG2E : 1, NATURAL = SCORED ? 1 : LN2;  // factors from scores to exponents of 2, and of e
const double EXACTLY_NATURAL = SCORED ? 1 : 0.6931471805599453;  // a float LN2 is off by percents at scores of 1e5
const int V_WIDE = round_up(V_DIM, LANES);
const int ROWS = round_up(BLOCK_Q, GROUP);
const int HEADS = 16;                                  // the most query heads of one item of decoding
const bool PACKED = MOVED || TANGENT;                // few rows read packed keys, too
const bool ALIKE = INVARIANT && AMX;                 // few rows are multiplied as many are, padded
const bool PAIRED = INVARIANT && PAIRS;              // weights of few rows are multiplied in pairs
// The most rows that vectors multiply by unpacked keys.
const int FEW = PACKED || ALIKE ? 0 : AMX && PAIRS ? 4 : 16;
const int SQUARE = AMX && PAIRS && !PACKED && !ALIKE ? 16 : FEW;  // and those that a matrix unit multiplies so
const bool SPLIT = SQUARE > FEW && !EIGHT && V_DIM % 32 == 0;  // of 32 columns of such rows, the even ones come first
const int TOGETHER = FEW > GROUP ? FEW : GROUP;        // the most rows of one call of weigh
const int CHUNK = 16;                                  // keys of a tile that are neighbours in memory, at least
const int WEIGHTS = round_up(BLOCK_K, 2 * LANES) / PACK * TERMS;  // Operands in a row of weights
const int V_STEPS = deep(BLOCK_K), V_STRIDE = stride_of(V_WIDE, V_STEPS);  // of packed values
const int V_KEYS = round_up(BLOCK_K, DEPTH);            // keys, with those that are zeros
const int64_t KEYS = (int64_t)STEPS * BLOCK_K;                 // Operands of the packed keys of a tile
const int64_t TILE = KEYS + (int64_t)V_STEPS * V_WIDE;  // Operands of the packed keys and values of a tile
const int64_t KEPT_BYTES = (TERMS > 1 ? 16 : 8) << 20;  // packed tiles that a worker keeps for the next row of tiles
// INVARIANT: the tiles of PART keys are summed up apart, and the sums joined in order, by decoding and by all other
// calls. A part begins at a multiple of PART positions, whatever the lengths, the threads and the queries.
const bool PARTED = INVARIANT && !TANGENT;
const int PART = BLOCK_K < 512 ? 512 / BLOCK_K * BLOCK_K : BLOCK_K;
static_assert(BLOCK_K % CHUNK == 0 && PAGE % CHUNK == 0 && CHUNK % LANES == 0, "a tile and a page are whole chunks");

// What is known of a packed tile: its number, whether its values are finite, and whether terms hold its numbers.
enum Finite { UNKNOWN, FINITE, ODD };
struct Slot {
    int64_t tile;
    Finite values, v_tangents;
    bool tame_keys, tame_values;
};

// Rows that are worked on together, beside a tile of keys.
struct Strip {
    Real scores[TOGETHER * BLOCK_K], tangents[TANGENT ? TOGETHER * BLOCK_K : 1];
    Bits seen[TOGETHER * VECTORS];
    Lane begin[GROUP], end[GROUP];  // the interval of keys that a row sees
    bool open[VECTORS];             // whether any row sees a vector
};
const int STRIPS = AMX ? 2 : 1;  // a matrix unit multiplies the next rows while weights of these are computed

#if BYTES
// Numbers as four bytes each: see bytes.hpp. With fewer rows than FEWEST, vectors take no longer.
const int FEWEST = PAIRS ? 1 : 5;
const int DEEP = 64, BYTE_STEPS = (HEAD_DIM + DEEP - 1) / DEEP, BYTE_GROUPS = (BLOCK_K + DEEP - 1) / DEEP;
struct Whole {
    alignas(64) int32_t queries[4][BYTE_STEPS][16][16];  // right operands: four entries of a row at a time
    int8_t keys[16][BYTE_STEPS * DEEP];                  // of which the unit cannot read whole rows in place
    int8_t weights[4][BYTE_GROUPS][16][DEEP];            // left operands, for each group of 64 keys
    int8_t values[BYTE_GROUPS][4][16][DEEP];             // right operands, of 64 columns of values
    int32_t products[16 * 256];
    Real unit[16], share[16];  // what the high bytes of a row of queries and of weights count
};
#endif

// The memory of one worker, which is kept between calls.
struct Worker {
    int64_t bytes, slots, tile;
    Slot *slot;       // [slots]
    Operand *tiles;   // [slots, tile], each the keys of a tile and, unless they are read in place, its values
    alignas(64) Operand query[ROWS * QUERY];
    Operand weights[ROWS * WEIGHTS];
    Operand values[V_STEPS * V_WIDE];  // the values of a tile, with zeros where no row sees the key
    Real acc[ROWS * V_WIDE];
    bool adds_out;  // the sums of `out` are wanted: a TANGENT kernel without `lse` reads it, unless it is rounded
    bool q_varies, k_varies, v_varies;  // of a TANGENT kernel: which tangents the call has, and those of each row
    Operand q_tangents[TANGENT ? ROWS * QUERY : 1], weight_tangents[TANGENT ? ROWS * WEIGHTS : 1];
    Operand v_tangents[TANGENT ? V_STEPS * V_WIDE : 1];
    Real acc_tangents[TANGENT ? ROWS * V_WIDE : 1];
    Vec mean[TANGENT ? ROWS : 1];
#if AMX && PAIRS
    Operand turned[STEPS * 16], unread[4 * 16 * STEPS];  // queries as the right operand, keys as the left one
    Real products[4 * 256];
#endif
#if BYTES
    Whole whole;
#endif
    Strip strips[STRIPS];
    Lane some[V_KEYS];          // whether any row of the item sees a key
    Lane edges[BLOCK_K + 1];        // how many more of the item's intervals begin at a key than end before it
    Vec total[ROWS];
    Real top[ROWS], shrink[ROWS];
    Real all[PARTED ? ROWS * (V_WIDE + 2) : 1];  // of the parts before: acc, total, top
#if WEIGHTED
    int64_t count[ROWS];       // visible keys
    const struct Tile *visited;
    bool exactly;              // vectors multiply weights, where numbers have terms
#endif
    int from[ROWS], to[ROWS];  // vectors of keys that a group of rows sees
    Steps steps[ROWS / GROUP];                 // keys that a group of rows sees
    int32_t list[ROWS / GROUP * (BLOCK_K / PACK)];
    bool tame_queries;         // terms, or bytes, hold them
    Row rows[ROWS];
    bool repeated[ROWS];       // whether a row sees what the row before it sees
    int place[ROWS];           // the index in `fixed` of a row's head
    int places;                // entries of `fixed`: heads of the item, 1 where heads do not differ
    Fixed fixed[HEADS];
    Column columns[HEADS * VECTORS];
    Real distances[DISTANCES ? HEADS * DISTANCES * SPAN : 1];
};

// Workers lie in a few places between calls. One atomic exchange takes a worker out or puts it back: there is no lock
// that a fork could leave locked.
const int PLACES = 16;  // workers kept, each with its tiles; more threads than this call malloc each time
static void *places[PLACES];

static Worker *take(int64_t slots, int64_t tile) {
    const int64_t bytes = sizeof(Worker) + slots * (sizeof(Slot) + tile * (int64_t)sizeof(Operand)) + 256;
    void *found = nullptr;
    for (int i = 0; i < PLACES && !found; i++)
        if (__atomic_load_n(&places[i], __ATOMIC_RELAXED))
            found = __atomic_exchange_n(&places[i], nullptr, __ATOMIC_ACQUIRE);
    if (found && *(int64_t *)found < bytes) free(found), found = nullptr;
    if (!found) {
        found = malloc(bytes + 64);
        if (!found) return nullptr;
        *(int64_t *)found = bytes;
    }
    Worker *worker = (Worker *)next_line((int64_t *)found + 2);
    ((void **)worker)[-1] = found;
    worker->slots = slots, worker->tile = tile;
#if WEIGHTED
    worker->exactly = false;
#endif
    worker->tiles = (Operand *)next_line(worker + 1);
    worker->slot = (Slot *)(worker->tiles + slots * tile);
    for (int64_t i = 0; i < slots; i++) worker->slot[i].tile = -1;
    return worker;
}

static void give(Worker *worker) {
    void *memory = ((void **)worker)[-1];
    for (int i = 0; i < PLACES; i++) {
        void *none = nullptr;
        if (__atomic_compare_exchange_n(&places[i], &none, memory, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    free(memory);
}

const int CHUNKS = (V_KEYS + AHEAD) / CHUNK;  // of a tile, zeros behind it included, and of the rows AHEAD

// Where the keys or values of a tile are, and those fetched ahead of it: the address of each chunk, and the stride
// between rows of a chunk; of MOVED keys the first row of all, and a table.
struct Chunks {
    const Stored *at[CHUNKS];
    int64_t stride;
    const int32_t *rows;
    int64_t begin;  // of an INVARIANT tile that begins before the keys: the first one that is there
    const Stored *there(uint64_t i) const {  // of a row that is there
        return MOVED ? at[0] + rows[i] * stride : at[i / CHUNK] + (int64_t)(i % CHUNK) * stride;
    }
    const Stored *row(uint64_t i) const { return there(INVARIANT && (int64_t)i < begin ? begin : i); }
};
struct Tile {
    Chunks k, v, k_tangents, v_tangents;
    int64_t present;                // keys before the end
    int64_t begin;                  // keys that an INVARIANT tile has before the first one
    const Operand *keys, *values;   // the packed tile; values may be unpacked, as the caller gave them
    const Operand *packed_k_tangents, *packed_v_tangents;  // likewise
    const Operand *next;            // the packed tile that comes next, null if it is not there
    Slot *slot;
};

INLINE bool scores_vary(const Worker &w) { return TANGENT && (w.q_varies || w.k_varies); }
INLINE bool tame_keys(const Worker &w, const Tile &tile) { return w.tame_queries && tile.slot->tame_keys; }

// -- few rows -----------------------------------------------------------------------------------------------------

// Scores of one vector of keys.
static void score_few(Worker &w, const Tile &tile, int rows, int j) {
#if INVARIANT && !AMX
    few_of_classes(w.query, rows, tile.k, j * LANES, tile.present, w.strips->scores + j * LANES, BLOCK_K);
#else
    const Stored *k = tile.k.row(j * LANES), *ahead = tile.k.row(j * LANES + FETCH);
    few_products(w.query, rows, k, ahead, tile.k.stride, tile.present - j * LANES, w.strips->scores + j * LANES,
                 BLOCK_K);
#endif
}

#if INVARIANT && PAIRS && !AMX
template <bool PARTIAL, int N, bool WHOLE>
static void add_pairs(Worker &w, const Tile &tile, int rows, int64_t column, int64_t start, int64_t end) {
    by_few(rows, [&](auto count, int row) {
        add_few_pairs<decltype(count)::N, N, WHOLE, PARTIAL>(w.weights + row * WEIGHTS, WEIGHTS, tile.v, column,
                                                             V_DIM - column, start, end, w.some,
                                                             w.acc + row * V_WIDE + column, V_WIDE, w.shrink + row);
    });
}
template <bool PARTIAL> static void add_few_values(Worker &w, const Tile &tile, int rows) {
    const int64_t start = w.from[0] * LANES, last = w.to[0] * LANES, end = last < tile.present ? last : tile.present;
    const int WIDE = 4 * LANES;  // columns at once
    if (start == last) return;
    int column = 0;
    for (; column + WIDE <= V_DIM; column += WIDE) add_pairs<PARTIAL, 2, true>(w, tile, rows, column, start, end);
    if (V_DIM - column > WIDE / 2) add_pairs<PARTIAL, 2, false>(w, tile, rows, column, start, end);
    else if (column < V_DIM) add_pairs<PARTIAL, 1, V_DIM % (WIDE / 2) == 0>(w, tile, rows, column, start, end);
}
#else
// acc = acc * shrink + weights * values for N vectors of values, from `column` on; weights are where scores were.
template <bool PARTIAL, int N, bool WHOLE>
static void add_columns(Worker &w, const Tile &tile, int rows, int64_t column, int64_t start, int64_t end) {
    by_few(rows, [&](auto count, int row) {
        add_few<decltype(count)::N, N, WHOLE, PARTIAL>(w.strips->scores + row * BLOCK_K, BLOCK_K, tile.v, column,
                                                       V_DIM - column, start, end, w.some,
                                                       w.acc + row * V_WIDE + column, V_WIDE, w.shrink + row);
    });
}

template <bool PARTIAL> static void add_few_values(Worker &w, const Tile &tile, int rows) {
    const int BLOCKS = V_WIDE / LANES, REST = BLOCKS % MOST;
    int64_t start = w.from[0] * LANES, end = w.to[0] * LANES;
    if (start == end) return;
    if (end > tile.present) end = tile.present;
    const int last = (BLOCKS - REST) * LANES;
    const bool WHOLE = V_DIM == V_WIDE;
    for (int d = 0; d < last; d += MOST * LANES) {
        if (WHOLE || d < V_WIDE - MOST * LANES)
            add_columns<PARTIAL, MOST, true>(w, tile, rows, d, start, end);
        else
            add_columns<PARTIAL, MOST, WHOLE>(w, tile, rows, d, start, end);
    }
    if (REST) add_columns<PARTIAL, REST ? REST : 1, WHOLE>(w, tile, rows, last, start, end);
}
#endif

// Weights of a row and vector j of the keys, which are where scores were; zeros where no row sees the vector.
template <bool PARTIAL> INLINE Vec few_weights(const Worker &w, int row, int j) {
    const bool none = j >= VECTORS || (PARTIAL && (j < w.from[0] || j >= w.to[0] || !w.strips->open[j]));
    return none ? Vec{} : load<Vec>(w.strips->scores + row * BLOCK_K + j * LANES);
}

#if AMX && PAIRS
// -- up to 16 rows on a matrix unit -------------------------------------------------------------------------------

// Products of queries, which were turned once, and N vectors of keys from vector j on. Keys are the left operand, read
// where they are if the unit can read whole rows of them. The bits are those of `multiply_squares`, where queries are
// the left operand.
template <int N> static void multiply_in_place(Worker &w, const Tile &tile, int j) {
    const int64_t stride = tile.k.stride;
    const bool whole = !EIGHT && HEAD_DIM % DEPTH == 0 && stride % 2 == 0;
    const Operand *left[N];
    int64_t row[N];
    for (int n = 0; n < N; n++) {
        const int64_t present = tile.present - (j + n) * LANES;
        const Stored *keys = tile.k.row((j + n) * LANES);
        const bool there = whole && present >= LANES;
        Operand *copy = w.unread + n * 16 * STEPS;
        left[n] = there ? (const Operand *)keys : copy, row[n] = there ? stride / 2 : STEPS;
        for (int i = 0; i < LANES; i++) {
            for (int step = 0; step < STEPS && !there; step += LANES) {
                const int64_t width = i < present ? HEAD_DIM - step * PAIR : 0;
                const Stored *from = keys + i * stride + step * PAIR;
                Operand *to = copy + i * STEPS + step;
                store(to, width < DEPTH ? load_operands(from, width) : load_operands<true>(from, width));
            }
        }
    }
    square_of_zeros<0>();
    if (N > 1) square_of_zeros<1>(), square_of_zeros<2>(), square_of_zeros<3>();
    for (int step = 0; step < STEPS; step += 16) {
        load_square<7>(w.turned + step * 16, 16);
        load_square<4>(left[0] + step, row[0]), add_product<0, 4, 7>();
        if (N > 1) load_square<5>(left[N - 3] + step, row[N - 3]), add_product<1, 5, 7>();
        if (N > 1) load_square<6>(left[N - 2] + step, row[N - 2]), add_product<2, 6, 7>();
        if (N > 1) load_square<4>(left[N - 1] + step, row[N - 1]), add_product<3, 4, 7>();
    }
    Real *to = w.products;
    store_square<0>(to, 16);
    if (N > 1) store_square<1>(to + 256, 16), store_square<2>(to + 512, 16), store_square<3>(to + 768, 16);
}

// Scores of vectors lo to hi of the keys.
static void score_square(Worker &w, const Tile &tile, int rows, int lo, int hi) {
    for (int j = lo, n; j < hi; j += n) {
        n = hi - j >= 4 ? 4 : 1;
        n == 4 ? multiply_in_place<4>(w, tile, j) : multiply_in_place<1>(w, tile, j);
        for (int i = 0; i < n; i++) {
            const Stored *next = tile.k.row((j + i + n) * LANES);  // the unit waits for what is not in the first level
            for (int k = 0; k < LANES; k++) fetch_row<HEAD_DIM, 3>(next + k * tile.k.stride);
            Vec square[LANES];
            UNROLLED for (int k = 0; k < LANES; k++) square[k] = load<Vec>(w.products + i * 256 + k * 16);
            transpose(square);
            Real *to = w.strips->scores + (j + i) * LANES;
            for (int k = 0; k < rows; k++) store(to + k * BLOCK_K, square[k]);
        }
    }
}

// Values of 32 keys from `start` on, of N vectors of columns from `column` on, as squares. Those that are hidden are
// zeros. SPLIT: of 32 columns, the even ones come before the odd ones.
template <bool PARTIAL, int N>
INLINE void pack_square(const Worker &w, const Tile &tile, int64_t start, int64_t column, Operand *to) {
    static const Stored NONE[V_WIDE] = {};
    const auto row = [&](int64_t i) {
        return i < BLOCK_K && (!PARTIAL || (i < tile.present && w.some[i])) ? tile.v.row(i) : NONE;
    };
    for (int64_t i = start; i < start + 32; i += 2, to += 16) {
        const Stored *first = row(i) + column, *second = row(i + 1) + column;
        const Stored *ahead = tile.v.row(i + FETCH) + column, *behind = tile.v.row(i + FETCH + 1) + column;
        UNROLLED for (int n = 0, d = 0; n < N; n++, d += 16) {
            fetch(ahead, d), fetch(behind, d);
            if (!SPLIT) {
                const int64_t left = V_DIM - column - d;
                store(to + n * 256, (Raw)load_reals(first + d, left) >> 16 | (Raw)load_reals(second + d, left));
            } else if (n % 2 == 0) {
                const Operands a = load<Operands>(first + d), b = load<Operands>(second + d);
                store(to + n * 256, (a & 0xFFFF) | b << 16), store(to + n * 256 + 256, a >> 16 | (b & 0xFFFF0000));
            }
        }
    }
}

// acc += weights * values for vectors lo to hi of the keys, both even, and N vectors of columns.
template <bool PARTIAL, int N>
static void add_squares_of_columns(Worker &w, const Tile &tile, int lo, int hi, int column) {
    Real *acc = w.acc + column;
    load_square<0>(acc, V_WIDE);
    if (N > 1) load_square<1>(acc + 16, V_WIDE);
    if (N > 2) load_square<2>(acc + 32, V_WIDE), load_square<3>(acc + 48, V_WIDE);
    for (int j = lo; j < hi; j += 2) {
        Operand *values = w.values + j / 2 % 2 * N * 256;
        pack_square<PARTIAL, N>(w, tile, j * LANES, column, values);
        load_square<4>(w.weights + j / 2 * LANES, WEIGHTS);
        load_square<5>(values, 16), add_product<0, 4, 5>();
        if (N > 1) load_square<6>(values + 256, 16), add_product<1, 4, 6>();
        if (N > 2) load_square<7>(values + 512, 16), add_product<2, 4, 7>();
        if (N > 2) load_square<5>(values + 768, 16), add_product<3, 4, 5>();
    }
    store_square<0>(acc, V_WIDE);
    if (N > 1) store_square<1>(acc + 16, V_WIDE);
    if (N > 2) store_square<2>(acc + 32, V_WIDE), store_square<3>(acc + 48, V_WIDE);
}

// acc = acc * shrink + weights * values.
template <bool PARTIAL> static void add_square(Worker &w, const Tile &tile, int rows) {
    const int lo = w.from[0] & ~1, hi = round_up(w.to[0], 2);
    if (w.from[0] == w.to[0]) return;
    for (int i = 0; i < rows; i++) {
        for (int d = 0; d < V_WIDE && w.shrink[i] != 1; d += LANES) {
            Real *acc = w.acc + i * V_WIDE + d;
            store(acc, load<Vec>(acc) * w.shrink[i]);
        }
        const auto weights_at = [&](int j) { return few_weights<PARTIAL>(w, i, j); };
        Operand *to = w.weights + i * WEIGHTS;
        for (int j = lo; j < hi; j += 2) store_operands(to + j / 2 * LANES, weights_at(j), weights_at(j + 1));
    }
    int column = 0;
    for (; column + 64 <= V_WIDE; column += 64) add_squares_of_columns<PARTIAL, 4>(w, tile, lo, hi, column);
    for (; column + 32 <= V_WIDE; column += 32) add_squares_of_columns<PARTIAL, 2>(w, tile, lo, hi, column);
    if (column < V_WIDE) add_squares_of_columns<PARTIAL, 1>(w, tile, lo, hi, column);
}
#endif

#if BYTES
static void score_bytes(Worker &w, const Tile &tile, int rows, int lo, int hi);
#endif

// -- a tile of keys -----------------------------------------------------------------------------------------------

// Evaluates the mask for M rows from g on, pair by pair, and narrows lo and hi to the vectors with visible keys.
INLINE void look(Worker &w, Strip &strip, int g, int M, int rows, int &lo, int &hi) {
    const int here = rows - g < M ? rows - g : M;
    uint32_t some[VECTORS];
    for (int j = 0; j < VECTORS; j++) {  // the outer loop, so that the values of a column stay in registers
        Bits all = {}, seen = {};
        for (int i = 0; i < here; i++) {
            const int place = BY_HEAD ? w.place[g + i] : 0;
            const Column &column = w.columns[place * VECTORS + j];
            if (!REPEATED || i == 0 || !w.repeated[g + i])
                all |= seen = column.inside & visible(w.fixed[place], w.rows[g + i], column);
            strip.seen[i * VECTORS + j] = seen;
        }
        store(w.some + j * LANES, load<Bits>(w.some + j * LANES) | all);
        some[j] = truths(all);
    }
    for (int j = here * VECTORS; j < M * VECTORS; j++) strip.seen[j] = Bits{};
    w.steps[g / GROUP] = open_vectors(some, strip.open, w.list + g / GROUP * (BLOCK_K / PACK));
    while (lo < hi && !strip.open[lo]) lo++;
    while (lo < hi && !strip.open[hi - 1]) hi--;
}

// Fills in the interval of keys that each of GROUP rows from g on sees in the tile, and narrows lo and hi to the
// vectors with visible keys.
INLINE void clip(Worker &w, Strip &strip, const Tile &tile, int g, int rows, int &lo, int &hi) {
    const int64_t all = tile.present < BLOCK_K ? tile.present : BLOCK_K;
    int64_t first = BLOCK_K, last = 0;
    for (int i = 0; i < GROUP; i++) {
        int64_t begin = 0, end = 0;
        const int place = BY_HEAD ? w.place[g + i] : 0;
        if (g + i < rows) interval(w.fixed[place], w.rows[g + i], w.columns[0].first, all, begin, end);
        if (INVARIANT && begin < tile.begin) begin = tile.begin < end ? tile.begin : end;
        strip.begin[i] = (Lane)begin, strip.end[i] = (Lane)end;
        if (begin == end) continue;
        first = begin < first ? begin : first, last = end > last ? end : last;
        w.edges[begin]++, w.edges[end]--;
    }
    lo = (int)(first / LANES), hi = (int)((last + LANES - 1) / LANES);
    if (lo > hi) lo = hi = 0;
    w.steps[g / GROUP] = {(int)(first / PACK), lo < hi ? (int)((last + PACK - 1) / PACK - first / PACK) : 0, nullptr};
}

// Products of M rows from g on and a tile of keys, and which of these the rows see. PARTIAL: not every position is
// visible. SMALL: the rows are few.
template <bool PARTIAL, bool SMALL>
static void multiply_keys(Worker &w, Strip &strip, const Tile &tile, int g, int M, int rows) {
    const bool CLIPPED = PARTIAL && INTERVAL && !SMALL, LOOKED = PARTIAL && !CLIPPED;
    const int present = (int)((tile.present < BLOCK_K ? tile.present : BLOCK_K) + PACK - 1) / PACK;
    int lo = 0, hi = VECTORS;
    if (CLIPPED) clip(w, strip, tile, g, rows, lo, hi);
    else if (PARTIAL) look(w, strip, g, M, rows, lo, hi);
    else w.steps[g / GROUP] = {0, present, nullptr};
    if (PACK == 2 && (PAIRED || !SMALL)) lo &= ~1;
    w.from[g] = lo, w.to[g] = hi;
#if BYTES
    if (SMALL && rows >= FEWEST && w.tame_queries) return score_bytes(w, tile, rows, lo, hi);
#endif
#if AMX && PAIRS
    if (SMALL && rows > FEW) return score_square(w, tile, rows, lo, hi);
#elif AMX
    for (int j = lo; j < hi && !SMALL && !tame_keys(w, tile); j++)
        if (!LOOKED || strip.open[j])
            dots_of_terms<HEAD_DIM>(w.query + g * QUERY, rows - g < M ? rows - g : M, tile.k, j * LANES,
                                    tile.present - j * LANES, strip.scores + j * LANES, BLOCK_K);
    if (!SMALL && !tame_keys(w, tile)) return;
#endif
    for (int j = lo, n; j < hi; j += n ? n : 1) {
        n = LOOKED ? opened(strip.open, j) : PANEL - j % PANEL < hi - j ? PANEL - j % PANEL : hi - j;
        if (!n) continue;
        if (SMALL) {
            n = 1;
            if (j * LANES < tile.present) score_few(w, tile, rows, j);  // or open beside one that is seen, and absent
            continue;
        }
        const auto multiply = [&](auto start, const Operand *queries, const Operand *keys, Real *to) {
            multiply_queries<decltype(start)::START>(n, queries + g * QUERY, keys + vector_at(j, STEPS),
                                                     to + j * LANES);
        };
        multiply(From<ZERO>(), w.query, tile.keys, strip.scores);
        if (TANGENT && w.q_varies) multiply(From<ZERO>(), w.q_tangents, tile.keys, strip.tangents);
        if (!TANGENT || !w.k_varies) continue;
        if (w.q_varies) multiply(From<ADD>(), w.query, tile.packed_k_tangents, strip.tangents);
        else multiply(From<ZERO>(), w.query, tile.packed_k_tangents, strip.tangents);
    }
}

#if WEIGHTED
template <bool PARTIAL, bool SMALL, class Meanwhile>
INLINE void weigh_rows(Worker &w, Strip &strip, int g, int M, Real unit, Meanwhile meanwhile);
#else
// Weights of the same rows. meanwhile(i) is called before the weights of row i.
template <bool PARTIAL, bool SMALL, class Meanwhile>
INLINE void weigh_rows(Worker &w, Strip &strip, int g, int M, Real unit, Meanwhile meanwhile) {
    const bool CLIPPED = PARTIAL && INTERVAL && !SMALL, LOOKED = PARTIAL && !CLIPPED;
    const int lo = w.from[g], hi = w.to[g];
    const Real factor = NATURAL * (PAIR == 1 ? 1 : unit);  // of the tangents of scores
    if (lo == hi) return;
    Real *top = w.top + g, peaks[TOGETHER];
    for (int i = 0; i < M; i++) {
        const int place = BY_HEAD ? w.place[g + i] : 0;
        Vec peak = reals(LOWEST);
        const Bits begin = Bits{} + strip.begin[CLIPPED ? i : 0], end = Bits{} + strip.end[CLIPPED ? i : 0];
        Bits key = cast<Bits>(counting()) + (Lane)(lo * LANES);
        for (int j = lo; j < hi; j++) {
            if (LOOKED && !strip.open[j]) continue;
            Real *at = strip.scores + i * BLOCK_K + j * LANES;
            Vec score = scaled(load<Vec>(at), unit);
            if (SLOPED && scores_vary(w)) {
                Real *to = strip.tangents + i * BLOCK_K + j * LANES;
                store(to, load<Vec>(to) * slope(w.fixed[place], w.rows[g + i], w.columns[place * VECTORS + j], score));
            }
            score = score_of(w.fixed[place], w.rows[g + i], w.columns[place * VECTORS + j], score);
            if (CLIPPED) score = select((key >= begin) & (key < end), score, reals(-INF)), key += LANES;
            else if (LOOKED) score = select(strip.seen[i * VECTORS + j], score, reals(-INF));
            if (PAIR == 2 || SCORED || PARTIAL) store(at, score);
            peak = larger(score, peak);
        }
        peaks[i] = largest(peak);
    }
    for (int i = 0; i < M; i++) {
        const int row = g + i, place = BY_HEAD ? w.place[row] : 0;
        meanwhile(i);
        w.shrink[row] = 1;
        if (peaks[i] > top[i]) {
            w.shrink[row] = top[i] == LOWEST ? 0 : weight((top[i] - peaks[i]) * BASE);
            top[i] = peaks[i];
            w.total[row] = settled(w.total[row] * w.shrink[row]);
            if (TANGENT) w.mean[row] *= w.shrink[row];
            for (int d = 0; d < V_WIDE && AMX && !SMALL; d += LANES) {
                Real *acc = w.acc + row * V_WIDE + d, *tangents = w.acc_tangents + row * V_WIDE + d;
                store(acc, load<Vec>(acc) * w.shrink[row]);
                if (TANGENT) store(tangents, load<Vec>(tangents) * w.shrink[row]);
            }
        }
        Vec total = w.total[row], mean = TANGENT ? w.mean[row] : Vec{};
        const auto weight_at = [&](int j, Vec &tangent) __attribute__((always_inline)) {
            const Column &column = w.columns[place * VECTORS + j];
            Vec p = weight((load<Vec>(strip.scores + i * BLOCK_K + j * LANES) - top[i]) * BASE);
            if (INVARIANT) p = settled(p);  // not fused with a sum in some calls
            total += p;
            if (scores_vary(w)) {
                tangent = p * (load<Vec>(strip.tangents + i * BLOCK_K + j * LANES) * factor);
                if (PARTIAL || GUARDED) tangent = select(p != 0, tangent, Vec{});
                mean += tangent;
            }
            if (DROPPED) {
                const Bits keep = kept(w.fixed[place], w.rows[row], column);
                p = select(keep, p, Vec{}), tangent = select(keep, tangent, Vec{});
            }
            if (SCALED) {  // the scale of a hidden value may be NaN, and 0 times NaN is NaN
                p *= scale_of_value(w.fixed[place], w.rows[row], column);
                if (PARTIAL) p = select(strip.seen[i * VECTORS + j], p, Vec{});
            }
            return p;
        };
        const int ONE = SMALL && !PAIRED ? 1 : PACK;  // vectors that are stored together
        for (int j = lo; j < hi; j += ONE) {
            const int64_t at = row * WEIGHTS + j / PACK * LANES * TERMS;
            if (LOOKED && !strip.open[j]) {
                for (int n = 0; n < TERMS && AMX && !SMALL; n++) store(w.weights + at + n * LANES, Operands{});
                if (TANGENT && AMX) store(w.weight_tangents + at, Operands{});
                continue;
            }
            Vec left_tangent = {}, right_tangent = {};
            const Vec left = weight_at(j, left_tangent);
            const Vec right = ONE == 2 && j + 1 < hi ? weight_at(j + 1, right_tangent) : Vec{};
            if (SMALL && !PAIRED) store(strip.scores + i * BLOCK_K + j * LANES, left);
            else store_terms(w.weights + at, left, right);
            if (scores_vary(w)) store_terms(w.weight_tangents + at, left_tangent, right_tangent);
        }
        w.total[row] = total;
        if (TANGENT) w.mean[row] = mean;
    }
}
#endif

// Computes scores and weights of one tile of keys: GROUP rows at a time, or all rows at once where they are few.
template <bool PARTIAL, bool SMALL> static void weigh(Worker &w, const Tile &tile, int rows, Real unit) {
    const int M = SMALL ? rows : GROUP, LATER = SMALL ? 0 : (STRIPS - 1) * M;
    for (int g = 0; g < rows + LATER; g += M) {
        if (g < rows) multiply_keys<PARTIAL, SMALL>(w, w.strips[g / GROUP % STRIPS], tile, g, M, rows);
        if (g >= LATER)
            weigh_rows<PARTIAL, SMALL>(w, w.strips[(g - LATER) / GROUP % STRIPS], g - LATER,
                                       rows - (g - LATER) < M ? rows - (g - LATER) : M, unit, [](int) {});
    }
}

// Values of a tile, where some that no row sees are not finite, as a copy with zeros in their place.
static void hide_values(const Worker &w, const Tile &tile, const Chunks &rows, const Operand *&values, Finite &known,
                        Operand *copy, int64_t end) {
    if (known == UNKNOWN) {
        Bits odd = {};
        for (int64_t i = 0; i < BLOCK_K && i < tile.present; i++)
            for (int d = 0; d < V_DIM; d += LANES) {
                const Vec x = load_reals(rows.row(i) + d, V_DIM - d);
                odd |= x - x != 0;
            }
        known = any(odd) ? ODD : FINITE;
    }
    if (known == FINITE) return;
    for (int64_t i = 0; i < deep((int)end); i++) {
        Raw mask = (Raw)bits(w.some[i * PAIR] != 0);
#if PAIRS
        mask = mask >> 16 | (Raw)bits(w.some[i * PAIR + 1] != 0) << 16;
#endif
        for (int d = 0; d < V_WIDE; d += LANES)
            store(copy + entry_at(i, d, V_STRIDE), (Raw)load<Operands>(values + entry_at(i, d, V_STRIDE)) & mask);
    }
    values = copy;
}

// Values that no row of the item sees may be anything, as in memory that was never written to, and 0 times NaN is NaN.
static void hide(Worker &w, Tile &tile, int rows) {
    if (EIGHT == 1 || TERMS > 1) return;  // whole numbers are finite; vectors multiply numbers that are not tame
    for (int i = 0, n = 0; i < BLOCK_K && INTERVAL; i++) n += (int)w.edges[i], w.some[i] = n ? -1 : 0;
    int lo = VECTORS, hi = 0;
    for (int g = 0; g < rows; g += GROUP) {
        if (w.from[g] == w.to[g]) continue;
        lo = w.from[g] < lo ? w.from[g] : lo, hi = w.to[g] > hi ? w.to[g] : hi;
    }
    hi = round_up(hi * LANES, DEPTH) / LANES;  // the vectors that products read
    const int64_t end = hi * LANES < tile.present ? hi * LANES : tile.present;
    while (lo < hi && !any(~load<Bits>(w.some + lo * LANES))) lo++;
    if (lo >= hi) return;  // every key is visible
    hide_values(w, tile, tile.v, tile.values, tile.slot->values, w.values, end);
    if (TANGENT && w.v_varies)
        hide_values(w, tile, tile.v_tangents, tile.packed_v_tangents, tile.slot->v_tangents, w.v_tangents, end);
}

#if TERMS > 1
// acc += weights * values, position by position.
static void add_values_of_terms(Worker &w, const Tile &tile, int rows) {
    for (int i = 0; i < rows; i++) {
        Real sum[V_DIM] = {};
        const int64_t end = w.to[i / GROUP * GROUP] * LANES, last = end < tile.present ? end : tile.present;
        for (int64_t j = w.from[i / GROUP * GROUP] * LANES; j < last; j++) {
            const Real weight = left_number(w.weights + i * WEIGHTS, j);
            const Stored *value = tile.v.row(j);
            for (int d = 0; d < V_DIM && weight != 0; d++) sum[d] += weight * value[d];
        }
        for (int d = 0; d < V_DIM; d++) w.acc[i * V_WIDE + d] += sum[d];
    }
}
#endif

// acc = acc * shrink + weights * values, or acc + weights * values
template <Start START>
static void add_products(Worker &w, const Operand *weights, const Operand *values, Real *acc, int rows) {
    by_panels<V_WIDE>([&](auto vectors, int column) {
        for (int g = 0; g < rows; g += GROUP)
            multiply_steps<GROUP, decltype(vectors)::N, START>(
                w.steps[g / GROUP], weights + g * WEIGHTS, WEIGHTS, 1, values + entry_at(0, column, V_STRIDE), V_STRIDE,
                acc + g * V_WIDE + column, V_WIDE, w.shrink + g);
    });
}
static void add_values(Worker &w, const Tile &tile, int rows) {
    if (!TANGENT || w.adds_out) add_products<RESCALE>(w, w.weights, tile.values, w.acc, rows);
    if (scores_vary(w)) add_products<RESCALE>(w, w.weight_tangents, tile.values, w.acc_tangents, rows);
    if (!TANGENT || !w.v_varies) return;
    const auto add = scores_vary(w) ? add_products<ADD> : add_products<RESCALE>;
    add(w, w.weights, tile.packed_v_tangents, w.acc_tangents, rows);
}

#if AMX
// `weigh` and `add_values` for a tile that is visible throughout. While the weights of GROUP rows are computed, the
// matrix unit multiplies the queries of the next GROUP rows by keys, and weights of the GROUP rows before by values.
static void weigh_and_add(Worker &w, const Tile &tile, int rows, Real unit) {
    typedef Product<BLOCK_K, STEPS, false> Keys;
    typedef Product<V_WIDE, V_STEPS, true> Values;
    for (int g = 0; g < rows + 2 * GROUP; g += GROUP) {
        const int now = g - GROUP, before = now - GROUP;
        const bool with_keys = g < rows, with_values = before >= 0;
        const Keys keys = {w.query + g * QUERY, QUERY, tile.keys, stride_of_keys(STEPS),
                           w.strips[g / GROUP % 2].scores, BLOCK_K};
        const Values values = {w.weights + before * WEIGHTS, WEIGHTS, tile.values, V_STRIDE,
                               w.acc + before * V_WIDE, V_WIDE};
        int done = 0;
        const auto multiply_until = [&](int end) {
            for (; done < end; done++) {
                if (done < Keys::PIECES && with_keys) keys.piece(done);
                if (done == Keys::PIECES && with_keys) keys.end(Keys::PARTS - 1);
                if (done >= Keys::PIECES && with_values) values.piece(done - Keys::PIECES);
            }
        };
        const int all = Keys::PIECES + Values::PIECES;
        if (now >= 0 && now < rows) {
            w.from[now] = 0, w.to[now] = VECTORS;
            weigh_rows<false, false>(w, w.strips[now / GROUP % 2], now, rows - now < GROUP ? rows - now : GROUP, unit,
                                     [&](int i) {
                                         if (tile.next) fetch_part(tile.next, w.tile, now + i, rows);
                                         multiply_until((i + 1) * all / GROUP);
                                     });
        }
        multiply_until(all);
        if (with_values) values.end(Values::PARTS - 1);
    }
}
#endif

// Whether values need no packing: their rows are whole vectors, one directly after another.
static bool in_place(const Call *call) {
#if HALF == 0 && EIGHT == 0 && !AMX
    const bool tangents = TANGENT && call->dv.data && call->dv.row != V_DIM;
    if (INVARIANT && (call->k_origin_step || shift_of(call, 0))) return false;  // a tile may begin before the values
    return !MOVED && !PAGE && V_DIM == V_WIDE && call->v.row == V_DIM && !tangents;
#else
    return false;
#endif
}
