// Which tiles of keys each tile of queries reads: spans of
//
//     q >= k & doc[q] == doc[k]
extern "C" int64_t frisket_plan(const int64_t *word) {
    const Int slices = word[0], q_len = word[1], kv_len = word[2];  // lengths in tokens
    const Int bq = word[3], bk = word[4], room = word[5], most = word[6];  // pieces and tile ranges in a row
    const Int *from_b = (const Int *)word[7], *from_h = (const Int *)word[8], *from_q = (const Int *)word[9], *from_k = (const Int *)word[10];
    int32_t *bounds = (int32_t *)word[11], *count = (int32_t *)word[12];
    const Table<Int> doc(word + 17, 1);
    const Int rows = (q_len + bq - 1) / bq, columns = (kv_len + bk - 1) / bk;
    Pieces found(columns);
    bool overflow = false;
    for (Int slice = 0; slice < slices; slice++) {
        const Int b = from_b[slice], h = from_h[slice], q = from_q[slice], k = from_k[slice];
        const Int k0 = k, k1 = k + kv_len - 1;
        for (Int row = 0; row < rows; row++, bounds += 4 * most, count++) {
            const Int q0 = q + row * bq, q1 = q + minimum(row * bq + bq, q_len) - 1;
            const Int x0 = look(doc, q0);
            const Int x1 = look(doc, q1);
            Sweep<1, 5> sweep(columns, k0, bk);
            sweep.keys(maximum(k0, at_least(doc, x0)), minimum(minimum(q1, k1), at_most(doc, x1)));  // seen
            sweep.keys(maximum(k0, q0 + 1), k1);  // hidden
            sweep.keys(maximum(k0, above(doc, x0)), k1);  // hidden
            sweep.keys(k0, minimum(k1, under(doc, x1)));  // hidden
            if (kv_len % bk) sweep.tiles(columns - 1, columns);  // cut tiles hold positions outside
            if (q_len % bq && row == rows - 1) sweep.tiles(0, columns);
            sweep.into(found);
            if (found.failed()) return 2;
            overflow |= found.records(most, bounds, count);
        }
    }
    return overflow;
}
