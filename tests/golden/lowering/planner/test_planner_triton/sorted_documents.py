"""Which tiles of keys each tile of queries reads: spans of

    q >= k & doc[q] == doc[k]

for tables on the device. Shapes are fixed, nothing is copied to the host.
"""

import triton
import triton.language as tl

EMPTY, PARTIAL, FULL, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FAR = tl.constexpr(1 << 30)  # beyond every position
FINE, GRAIN = tl.constexpr(4096), tl.constexpr(32)  # tables up to FINE entries are searched entry by entry


@triton.jit
def step(i, size, stride):
    return tl.minimum(tl.maximum(i, 0), size - 1).to(tl.int64) * stride


@triton.jit
def floordiv(x, y):
    """Rounds to minus infinity; 0 where y is 0."""
    divisor = tl.where(y == 0, 1, y)
    quotient = x // divisor
    down = (quotient * divisor != x) & ((x < 0) != (divisor < 0))
    return tl.where(y == 0, 0, tl.where(down, quotient - 1, quotient))


@triton.jit
def least(x, y):
    return tl.where((x <= y) | (x != x), x, y)


@triton.jit
def most(x, y):
    return tl.where((x >= y) | (x != x), x, y)


@triton.jit
def below(Table, size, stride, x, reach: tl.constexpr):
    """How many entries of a sorted table are below x, or at most x with `reach`."""
    left = size.to(tl.int64)
    start = left * 0 + x * 0  # of 64 bits where x is a number, too: a loop keeps the type of what it changes
    while left > 1:
        half = left // 2
        entry = tl.load(Table + (start + half - 1) * stride).to(tl.int64)
        start = tl.where((entry <= x) if reach else (entry < x), start + half, start)
        left -= half
    entry = tl.load(Table + start * stride).to(tl.int64)
    return start + ((entry <= x) if reach else (entry < x)).to(tl.int64)


@triton.jit
def at_least(Table, size, stride, x):
    """The first position of a sorted table whose entry is at least x."""
    found = below(Table, size, stride, x, False)
    return tl.where(found < size, found, FAR)


@triton.jit
def at_most(Table, size, stride, x):
    """The last position of a sorted table whose entry is at most x."""
    found = below(Table, size, stride, x, True)
    return tl.where(found < size, found - 1, FAR)


@triton.jit
def above(Table, size, stride, x):
    """The first position of a sorted table whose entry is above x."""
    found = below(Table, size, stride, x, True)
    return tl.where(found < size, found, FAR)


@triton.jit
def under(Table, size, stride, x):
    """The last position of a sorted table whose entry is below x."""
    found = below(Table, size, stride, x, False)
    return tl.where(found < size, found - 1, FAR)


@triton.jit
def tiles(first, last, k0, bk, columns):
    """The tiles that hold the keys first..last."""
    start = clip(floordiv(first - k0, bk), columns)
    return start, tl.where(last >= first, clip(floordiv(last - k0, bk) + 1, columns), start)


@triton.jit
def clip(x, last):
    return tl.minimum(tl.maximum(x, 0), last)


@triton.jit
def slots(pieces):
    return tl.arange(0, pieces.shape[1])[None, :]


@triton.jit
def at(pieces, i, beyond):
    """Pieces by their numbers."""
    last: tl.constexpr = pieces.shape[1] - 1
    i += pieces * 0
    return tl.where((i < 0) | (i > last), beyond, tl.gather(pieces, tl.minimum(tl.maximum(i, 0), last), 1))


@triton.jit
def reaching(x, values):
    """How many entries of each sorted row of x are below each of `values`, but the last."""
    found = x * 0
    for i in tl.static_range(1, 11):
        if x.shape[1] >> i > 0:
            ahead = tl.gather(x, found + ((x.shape[1] >> i) - 1), 1) < values
            found += tl.where(ahead, x.shape[1] >> i, 0)
    return found


@triton.jit
def kept(pieces, flags, end):
    """The pieces with a flag."""
    count = tl.cumsum(flags.to(tl.int32), 1)
    found = tl.gather(pieces, reaching(count, slots(pieces) + 1), 1)
    return tl.where(slots(pieces) < tl.max(count, 1)[:, None], found, end)


@triton.jit
def joined(pieces, end):
    """Neighbours of one kind become one piece, EMPTY ones before the first are left out."""
    kind, before = pieces & 3, at(pieces, slots(pieces) - 1, EMPTY) & 3
    return kept(pieces, ((kind != before) | (kind == OPEN)) & (pieces < end), end)


@triton.jit
def record(pieces, end, records, line, inside, Bounds, Count, Work):
    """Runs of tiles as records (lo, full_lo, full_hi, hi); whether there were more than there is room for.
    Partial, full, partial share a record; every other full run opens a new one, and the last takes in what is
    left, as PARTIAL."""
    slot = slots(pieces)
    kind, before, second = pieces & 3, at(pieces, slot - 1, EMPTY) & 3, at(pieces, slot - 2, EMPTY) & 3
    live, follows = kind != EMPTY, (before == PARTIAL) & (second == EMPTY)
    opens = live & ((before == EMPTY) | ((kind == FULL) & ~follows))
    count = tl.cumsum(opens.to(tl.int32), 1)
    total = tl.max(count, 1)[:, None]
    place = reaching(count, slot + 1)
    first, second = at(pieces, place, end), at(pieces, place + 1, end)
    third, fourth = at(pieces, place + 2, end), at(pieces, place + 3, end)
    leads = (first & 3) == FULL
    full, after, last = tl.where(leads, first, second), tl.where(leads, second, third), tl.where(leads, third, fourth)
    has = (full & 3) == FULL
    hi = tl.where(has, tl.where((after & 3) == PARTIAL, last, after), second) >> 2
    stop = tl.max(tl.where(live, at(pieces, slot + 1, end) >> 2, 0), 1)[:, None]
    hi = tl.where((slot == records - 1) & (total > records), stop, hi)
    lo, full_lo, full_hi = first >> 2, tl.where(has, full >> 2, hi), tl.where(has, after >> 2, hi)
    there = slot < total
    to = Bounds + (line.to(tl.int64) * records + slot) * 4
    here = inside & (slot < records)
    tl.store(to, tl.where(there, lo, 0), mask=here)
    tl.store(to + 1, tl.where(there, full_lo, 0), mask=here)
    tl.store(to + 2, tl.where(there, full_hi, 0), mask=here)
    tl.store(to + 3, tl.where(there, hi, 0), mask=here)
    work = tl.sum(tl.where(there & (slot < records), hi - lo, 0), 1)[:, None]
    tl.store(Work + line, work, mask=inside)
    tl.store(Count + line, tl.minimum(total, records), mask=inside)
    return total > records


@triton.jit(do_not_specialize=["Work", "Order", "rows"])
def longest_first(Work, Order, rows, BLOCK: tl.constexpr):
    """The rows of each slice by their work, the longest first, those of equal work as they come."""
    Work += tl.program_id(0).to(tl.int64) * rows
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    work = tl.load(Work + mine, mask=mine < rows, other=0)[:, None]
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(Work + other, mask=other < rows, other=-1)[None, :]
        rank += tl.sum(((theirs > work) | ((theirs == work) & (other[None, :] < mine[:, None]))).to(tl.int32), 1)
    tl.store(Order + tl.program_id(0).to(tl.int64) * rows + rank, mine, mask=mine < rows)


@triton.jit(do_not_specialize=[
    "Bounds", "Count", "Left", "Work", "Place", "line_count", "rows", "q_len", "kv_len", "bq", "bk", "room",
    "records", "doc", "doc_size", "doc_stride",
])
def plan_spans(
    Bounds, Count, Left, Work, Place, line_count, rows, q_len, kv_len, bq, bk, room, records, doc, doc_size,
    doc_stride, ROWS: tl.constexpr, PIECES: tl.constexpr,
):
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = line < line_count
    line = tl.minimum(line, line_count - 1)
    at_slice = Place + (line // rows) * 4
    row = (line % rows).to(tl.int64)
    b, h = tl.load(at_slice), tl.load(at_slice + 1)
    q, k = tl.load(at_slice + 2), tl.load(at_slice + 3)
    columns = (kv_len + bk - 1) // bk
    end = 4 * columns
    slot = tl.arange(0, PIECES)[None, :]
    q0, q1 = q + row * bq, q + tl.minimum(row * bq + bq, q_len) - 1
    k0, k1 = k, k + kv_len - 1
    x0 = tl.load(doc + step(q0, doc_size, doc_stride)).to(tl.int64)
    x1 = tl.load(doc + step(q1, doc_size, doc_stride)).to(tl.int64)
    # Ends of intervals of tiles; the first is where the row begins.
    starts = tl.where(slot == 0, row * 0, columns)
    first = tl.maximum(k0, at_least(doc, doc_size, doc_stride, x0))
    last = tl.minimum(tl.minimum(q1, k1), at_most(doc, doc_size, doc_stride, x1))
    seen0, seen0_end = tiles(first, last, k0, bk, columns)
    first = tl.maximum(k0, q0 + 1)
    last = k1
    hidden0, hidden0_end = tiles(first, last, k0, bk, columns)
    first = tl.maximum(k0, above(doc, doc_size, doc_stride, x0))
    last = k1
    hidden1, hidden1_end = tiles(first, last, k0, bk, columns)
    first = k0
    last = tl.minimum(k1, under(doc, doc_size, doc_stride, x1))
    hidden2, hidden2_end = tiles(first, last, k0, bk, columns)
    # Cut tiles hold positions outside.
    hidden3, hidden3_end = tl.where(kv_len % bk != 0, columns - 1, columns), columns
    cut = (row == rows - 1) & (q_len % bq != 0)
    hidden4, hidden4_end = tl.where(cut, 0, columns), columns
    starts = tl.where(slot == 1, seen0, tl.where(slot == 2, seen0_end, starts))
    starts = tl.where(slot == 3, hidden0, tl.where(slot == 4, hidden0_end, starts))
    starts = tl.where(slot == 5, hidden1, tl.where(slot == 6, hidden1_end, starts))
    starts = tl.where(slot == 7, hidden2, tl.where(slot == 8, hidden2_end, starts))
    starts = tl.where(slot == 9, hidden3, tl.where(slot == 10, hidden3_end, starts))
    starts = tl.where(slot == 11, hidden4, tl.where(slot == 12, hidden4_end, starts))
    starts = tl.sort(starts.to(tl.int32))
    seen, hidden = starts < 0, starts < 0
    seen |= (seen0 <= starts) & (starts < seen0_end)
    hidden |= (hidden0 <= starts) & (starts < hidden0_end)
    hidden |= (hidden1 <= starts) & (starts < hidden1_end)
    hidden |= (hidden2 <= starts) & (starts < hidden2_end)
    hidden |= (hidden3 <= starts) & (starts < hidden3_end)
    hidden |= (hidden4 <= starts) & (starts < hidden4_end)
    kind = tl.where(seen, tl.where(hidden, PARTIAL, FULL), EMPTY)
    pieces = 4 * starts + kind
    pieces = joined(kept(pieces, (at(pieces, slot + 1, end) >> 2) > starts, end), end)
    left = record(pieces, end, records, line, inside, Bounds, Count, Work)
    tl.store(Left + line, left, mask=inside)
