// Which tiles of keys each tile of queries reads: spans of
//
//     q >= k & doc[q] == doc[k]
extern "C" int64_t frisket_plan(const int64_t *word) {
    const Int slices = word[0], q_len = word[1], kv_len = word[2];  // lengths in tokens
    const Int bq = word[3], bk = word[4], room = word[5], most = word[6];  // pieces and records of a row
    const Int *from_b = (const Int *)word[7], *from_h = (const Int *)word[8], *from_q = (const Int *)word[9], *from_k = (const Int *)word[10];
    int32_t *bounds = (int32_t *)word[11], *count = (int32_t *)word[12];
    const Table<Int> doc(word + 17, 1);
    const Line<Int, true> doc_least(doc, 1, {0});
    if (doc_least.failed()) return 2;
    const Line<Int, false> doc_most(doc, 1, {0});
    if (doc_most.failed()) return 2;
    const Int rows = (q_len + bq - 1) / bq, columns = (kv_len + bk - 1) / bk;
    Pieces found(columns);
    bool overflow = false;
    for (Int slice = 0; slice < slices; slice++) {
        const Int b = from_b[slice], h = from_h[slice], q = from_q[slice], k = from_k[slice];
        for (Int row = 0; row < rows; row++, bounds += 4 * most, count++) {
            const Int q0 = q + row * bq, q1 = q + minimum(row * bq + bq, q_len) - 1;
            const Int x1 = over(doc_least, q0, q1);
            const Int x4 = over(doc_most, q0, q1);
            overflow |= found.refine(room, [&](Int start, Int stop) -> int {
                const Int k0 = k + start * bk, k1 = k + minimum(stop * bk, kv_len) - 1;
                const bool single = stop - start == 1;
                const Int x2 = over(doc_most, k0, k1);
                const Int x5 = over(doc_least, k0, k1);
                const bool x7 = q1 < k0 || x1 > x2 || x4 < x5;
                if (x7) return EMPTY;
                if (stop * bk <= kv_len && row * bq + bq <= q_len) {
                    const bool x0 = q0 >= k1;
                    const bool x3 = x1 >= x2;
                    const bool x6 = x4 <= x5;
                    if (x0 && x3 && x6) return FULL;
                }
                if (single) return PARTIAL;
                const bool x0 = q0 >= k1;
                const bool x3 = x1 >= x2;
                const bool x6 = x4 <= x5;
                return x0 && x3 && x6 && x7 ? PARTIAL : OPEN;
            });
            if (found.failed()) return 2;
            overflow |= found.records(most, bounds, count);
        }
    }
    return overflow;
}
