$# The functions of the planners on arrays, in Triton and in C++, with holes that these three writers fill. They compute
$# the kinds of tiles of a row from `intervals` of keys, or else they split pieces of a row until each has one kind.

$part array_function
def plan_spans(b, h, q, k, sizes, scalars, tables, *, q_len, kv_len, block, room, records):
    $arguments
    bq, bk = block
    rows, columns = -(-q_len // bq), -(-kv_len // bk)
    row = arange(rows, q)[:, None]
    q0, q1 = q + row * bq, q + minimum(row * bq + bq, q_len) - 1
    k0, k1 = k, k + kv_len - 1  $if intervals
    $of_rows

    $if intervals:
        def tiles(first, last):
            $# By a sum with zeros: a bound may be one number for all rows.
            first, last = q0 * 0 + first, q0 * 0 + last
            start = clip((first - k0) // bk, 0, columns)
            return start, where(last >= first, clip((last - k0) // bk + 1, 0, columns), start)

        seen = [
            $seen
        ]
        hidden = [
            $hidden
        ]
        if kv_len % bk:
            hidden.append((q0 * 0 + columns - 1, q0 * 0 + columns))  # cut tiles hold positions outside
        if q_len % bq:
            hidden.append((where(row == rows - 1, q0 * 0, columns), q0 * 0 + columns))
        start, kind = swept(seen, hidden, columns)
    $else:
        def ask(start):
            """Kinds of the pieces of every row that begin at these tiles."""
            stop = stops(start, columns)
            k0, k1 = k + start * bk, k + minimum(stop * bk, kv_len) - 1
            single, whole = stop - start == 1, (stop * bk <= kv_len) & (row * bq + bq <= q_len)
            tk = where(stop == columns, kv_len - (columns - 1) * bk, bk)  # its narrowest tile  $if tk
            $of_pieces
            always = $always
            never = $never
            mixed = $mixed
            kind = where(single | mixed, PARTIAL, OPEN)
            kind = where(whole & always, FULL, kind)
            return where((start >= columns) | never, EMPTY, kind)

        def finer(width, start, kind):
            start, kind = split(*joined(start, kind, columns), width, columns)
            return start, where(kind == OPEN, ask(start), kind)

        room = min(room, columns)
        start = where(arange(room, q) == 0, q0 * 0, columns)  # one open piece a row
        kind = where(start == 0, OPEN, EMPTY)
        start, kind = repeated(finer, widths(columns, room), (start, kind))
        $# No loop until all is decided: shapes are fixed before the kinds are known.
        overflow = (kind == OPEN).any()
        start, kind = joined(start, where(kind == OPEN, PARTIAL, kind), columns)
    bounds, count, more = records_of(start, kind, columns, records)
    return bounds, count, more  $if intervals
    return bounds, count, overflow | more  $if not intervals

$part triton_kernel
$# Lengths change from call to call: specialised, each would compile again.
@triton.jit(do_not_specialize=[
$names
])
def plan_spans(
$parameters
):
    $arguments
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    $# Lines past the last repeat it, so that no load needs a mask.
    inside = line < line_count
    line = tl.minimum(line, line_count - 1)
    at_slice = Place + (line // rows) * 4
    row = (line % rows).to(tl.int64)
    b, h = tl.load(at_slice), tl.load(at_slice + 1)
    q, k = tl.load(at_slice + 2), tl.load(at_slice + 3)
    $# A piece is 4 * its first tile + its kind: one number to sort.
    columns = (kv_len + bk - 1) // bk
    end = 4 * columns
    slot = tl.arange(0, PIECES)[None, :]
    q0, q1 = q + row * bq, q + tl.minimum(row * bq + bq, q_len) - 1
    k0, k1 = k, k + kv_len - 1  $if intervals
    $of_rows
    $if intervals:
        # Ends of intervals of tiles; the first is where the row begins.
        starts = tl.where(slot == 0, row * 0, columns)
        $for intervals:
            first = $first
            last = $last
            $name, ${name}_end = tiles(first, last, k0, bk, columns)
        # Cut tiles hold positions outside.
        $cut_by_keys, ${cut_by_keys}_end = tl.where(kv_len % bk != 0, columns - 1, columns), columns
        cut = (row == rows - 1) & (q_len % bq != 0)
        $cut_by_queries, ${cut_by_queries}_end = tl.where(cut, 0, columns), columns
        $# Kinds change only at these ends, so that each piece between two of them has one kind.
        $for ends:
            starts = tl.where(slot == $at, $name, tl.where(slot == $after, ${name}_end, starts))
        $# Tiles fit 32 bits, and a sort of 64 bits takes twice the registers.
        starts = tl.sort(starts.to(tl.int32))
        seen, hidden = starts < 0, starts < 0
        $for ends:
            $kind |= ($name <= starts) & (starts < ${name}_end)
        kind = tl.where(seen, tl.where(hidden, PARTIAL, FULL), EMPTY)
        pieces = 4 * starts + kind
        pieces = joined(kept(pieces, (at(pieces, slot + 1, end) >> 2) > starts, end), end)
    $else:
        $# Each round asks pieces of a quarter of the width, until they are single tiles.
        room = tl.minimum(room, columns)
        pieces = tl.where(slot == 0, OPEN, end + line * 0)
        half = tl.maximum(room // 2, 1)
        width = tl.where(columns <= room, 1, (columns + half - 1) // half)
        coarse = columns > 0
        while coarse:
            pieces = split(joined(pieces, end), width, room, end)
            start, stop = (pieces >> 2).to(tl.int64), (at(pieces, slot + 1, end) >> 2).to(tl.int64)
            k0, k1 = k + start * bk, k + tl.minimum(stop * bk, kv_len) - 1
            single, whole = stop - start == 1, (stop * bk <= kv_len) & (row * bq + bq <= q_len)
            tk = tl.where(stop == columns, kv_len - (columns - 1) * bk, bk)  # its narrowest tile  $if tk
            $of_pieces
            kind = tl.where(single | ($mixed), PARTIAL, OPEN)
            kind = tl.where(whole & ($always), FULL, kind)
            kind = tl.where($never, EMPTY, kind)
            pieces = tl.where((pieces & 3) == OPEN, (pieces & -4) | kind, pieces)
            coarse = width > 1
            width = (width + 3) // 4
        $# What stays open is read with the mask, which is slower and never wrong.
        open = (pieces & 3) == OPEN
        lacking = tl.max(open.to(tl.int32), 1)[:, None] > 0
        pieces = joined(tl.where(open, (pieces & -4) | PARTIAL, pieces), end)
    left = record(pieces, end, records, line, inside, Bounds, Count, Work)
    tl.store(Left + line, left, mask=inside)  $if intervals
    tl.store(Left + line, left | lacking, mask=inside)  $if not intervals

$part cpp_function
// Which tiles of keys each tile of queries reads: spans of
//
$mask
extern "C" int64_t $name(const int64_t *word) {
    $arguments
    $# Lengths and tiles are words of the call: a planner is compiled once for a mask.
    const Int rows = (q_len + bq - 1) / bq, columns = (kv_len + bk - 1) / bk;
    Pieces found(columns);
    bool overflow = false;
    for (Int slice = 0; slice < slices; slice++) {
        const Int b = from_b[slice], h = from_h[slice], q = from_q[slice], k = from_k[slice];
        const Int k0 = k, k1 = k + kv_len - 1;  $if intervals
        $of_slices
        for (Int row = 0; row < rows; row++, bounds += 4 * most, count++) {
            const Int q0 = q + row * bq, q1 = q + minimum(row * bq + bq, q_len) - 1;
            $of_rows
            $if intervals:
                $# Two more hidden intervals, for the tiles that the lengths cut.
                Sweep<$seen, $hidden> sweep(columns, k0, bk);
                $for intervals:
                    sweep.keys($first, $last);  // $kind
                if (kv_len % bk) sweep.tiles(columns - 1, columns);  // cut tiles hold positions outside
                if (q_len % bq && row == rows - 1) sweep.tiles(0, columns);
                sweep.into(found);
            $else:
                overflow |= found.refine(room, [&](Int start, Int stop) -> int {
                    const Int k0 = k + start * bk, k1 = k + minimum(stop * bk, kv_len) - 1;
                    const bool single = stop - start == 1;
                    const Int tk = stop == columns ? kv_len - (columns - 1) * bk : bk;  // its narrowest tile  $if tk
                    $# Most pieces are empty, so that this is asked first.
                    $for never:
                        $lines
                        if ($condition) return EMPTY;
                    if (stop * bk <= kv_len && row * bq + bq <= q_len) {
                        $of_always
                        if ($always) return FULL;
                    }
                    if (single) return PARTIAL;
                    $of_mixed
                    return $mixed ? PARTIAL : OPEN;
                });
            if (found.failed()) return 2;
            overflow |= found.records(most, bounds, count);
        }
    }
    return overflow;
}
