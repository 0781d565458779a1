"""Which tiles of keys each tile of queries reads: spans of

    q >= k & doc[q] == doc[k]

for tables on the device. Shapes are fixed, nothing is copied to the host.
"""

import triton
import triton.language as tl

EMPTY, PARTIAL, FULL, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FAR = tl.constexpr(1 << 30)  # beyond every position
FINE, GRAIN = tl.constexpr(4096), tl.constexpr(32)  # tables up to FINE entries are searched entry by entry
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def power(x, y):
    x, y = tl.broadcast(x, tl.cast(y, tl.float32))
    whole = tl.floor(y) == y
    odd = whole & (2.0 * tl.floor(0.5 * y) != y)
    negative = (x < 0) | ((x == 0) & (1.0 / x < 0))
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    size = tl.where((tl.abs(x) == 1.0) & (y == y), 1.0, size)
    signed = tl.where(negative & odd, -size, size)
    signed = tl.where((x < 0) & (x > -INFINITY) & ~whole, float("nan"), signed)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, signed)


@triton.jit
def least(x, y):
    return tl.where((x <= y) | (x != x), x, y)


@triton.jit
def most(x, y):
    return tl.where((x >= y) | (x != x), x, y)


@triton.jit
def over(Lines, rows, size, row, lo, hi, MOST: tl.constexpr):
    """The join of the entries lo..hi, both included, of one row of a table that `lines` and `windows` have made
    ready; exact, or within one block wider."""
    grain = tl.where(size <= FINE, 1, GRAIN)
    count = (size + grain - 1) // grain
    padded = (count * grain).to(tl.int64)
    lo, hi = clip(lo, size - 1), clip(hi, size - 1)
    first, last = lo // grain, hi // grain
    a, z = tl.load(Lines + (rows + row) * padded + lo), tl.load(Lines + row * padded + hi)
    between = last - first - 1
    level = magnitude(tl.maximum(between, 1))
    at = Lines + 2 * rows * padded + (level * rows + row) * count
    end = clip(last - (tl.full((), 1, tl.int64) << level), count - 1)
    inner = join(tl.load(at + clip(first + 1, count - 1)), tl.load(at + end), MOST)
    ends = join(a, z, MOST)
    return tl.where(between > 0, join(ends, inner, MOST), tl.where(between == 0, ends, join(a, z, not MOST)))


@triton.jit
def magnitude(x):
    """The place of the highest bit of a positive integer below 2**53."""
    return (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023


@triton.jit
def join(x, y, MOST: tl.constexpr):
    return most(x, y) if MOST else least(x, y)


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
def split(pieces, width, room, end):
    """Open pieces cut into pieces of `width` tiles, first come first served while there is room."""
    slot = slots(pieces)
    stop = at(pieces, slot + 1, end)
    used = (pieces < end).to(tl.int32)
    parts = tl.where((pieces & 3) == OPEN, ((stop >> 2) - (pieces >> 2) + width - 1) // width, used)
    fits = tl.cumsum(parts - used, 1) <= room - tl.sum(used, 1)[:, None]
    parts = tl.where(fits, parts, used)
    last = tl.cumsum(parts, 1)
    source = reaching(last, slot + 1)
    found = tl.gather(pieces, source, 1) + 4 * width * (slot - tl.gather(last - parts, source, 1))
    return tl.where(slot < tl.max(last, 1)[:, None], found, end)


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


@triton.jit(do_not_specialize=["Table", "Least", "Most", "rows", "size", "stride_row", "stride"])
def lines(
    Table, Least, Most, rows, size, stride_row, stride, GRAIN_: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Of each block of a row of a table, its least and greatest entries up to each place and from each place on, and
    of the whole block: the first of `windows`."""
    row = tl.program_id(0).to(tl.int64)
    count = (size + GRAIN_ - 1) // GRAIN_
    padded = (count * GRAIN_).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    i = tl.arange(0, GRAIN_)[None, :]
    place = block * GRAIN_ + i
    entry = tl.load(Table + row * stride_row + tl.minimum(place, size - 1).to(tl.int64) * stride)
    for which in tl.static_range(2):
        Lines = Most if which else Least
        ahead, behind = entry, entry
        for power in tl.static_range(5):
            if 1 << power < GRAIN_:
                near = tl.gather(ahead, tl.maximum(i + block * 0 - (1 << power), 0), 1)
                ahead = tl.where(i >= 1 << power, join(ahead, near, which), ahead)
                near = tl.gather(behind, tl.minimum(i + block * 0 + (1 << power), GRAIN_ - 1), 1)
                behind = tl.where(i < GRAIN_ - (1 << power), join(behind, near, which), behind)
        inside = block < count
        tl.store(Lines + row * padded + place, ahead, mask=inside)
        tl.store(Lines + (rows + row) * padded + place, behind, mask=inside)
        tl.store(Lines + 2 * rows * padded + row * count + block + i * 0, ahead, mask=inside & (i == GRAIN_ - 1))


@triton.jit(do_not_specialize=["Least", "Most", "rows", "count", "padded", "level"])
def windows(Least, Most, rows, count, padded, level, BLOCK: tl.constexpr):
    """The joins over 2, 4, ... blocks from each block on: least and greatest by programs of their own, five levels at a
    time, from the last level that is there."""
    if tl.program_id(1) == 0:
        windows_of(Least, rows, count, padded, level, False, BLOCK)
    else:
        windows_of(Most, rows, count, padded, level, True, BLOCK)


@triton.jit
def windows_of(Lines, rows, count, padded, level, MOST: tl.constexpr, BLOCK: tl.constexpr):
    Lines += 2 * rows * padded.to(tl.int64) + tl.program_id(0).to(tl.int64) * count
    size = rows.to(tl.int64) * count
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[:, None]
    ahead = i + (tl.arange(0, 32)[None, :] << level)
    entry = tl.load(Lines + level * size + tl.minimum(ahead, count - 1))
    for n in tl.static_range(1, 6):
        first, second = tl.split(tl.reshape(entry, (BLOCK, entry.shape[1] // 2, 2)))
        entry = join(first, second, MOST)
        j = tl.arange(0, 32 >> n)[None, :]
        inside = (j == 0) & (i < tl.where(count >> (level + n) > 0, count, 0))
        tl.store(Lines + (level + n) * size + i + j, entry, mask=inside)


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
    "records", "doc_least", "doc_most", "doc_rows", "doc_length",
])
def plan_spans(
    Bounds, Count, Left, Work, Place, line_count, rows, q_len, kv_len, bq, bk, room, records, doc_least,
    doc_most, doc_rows, doc_length, ROWS: tl.constexpr, PIECES: tl.constexpr,
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
    x1 = over(doc_least, doc_rows, doc_length, 0, q0, q1, False).to(tl.int64)
    x4 = over(doc_most, doc_rows, doc_length, 0, q0, q1, True).to(tl.int64)
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
        x0 = q0 >= k1
        x2 = over(doc_most, doc_rows, doc_length, 0, k0, k1, True).to(tl.int64)
        x3 = x1 >= x2
        x5 = over(doc_least, doc_rows, doc_length, 0, k0, k1, False).to(tl.int64)
        x6 = x4 <= x5
        x7 = (q1 < k0) | (x1 > x2) | (x4 < x5)
        kind = tl.where(single | (x0 & x3 & x6 & x7), PARTIAL, OPEN)
        kind = tl.where(whole & (x0 & x3 & x6), FULL, kind)
        kind = tl.where(x7, EMPTY, kind)
        pieces = tl.where((pieces & 3) == OPEN, (pieces & -4) | kind, pieces)
        coarse = width > 1
        width = (width + 3) // 4
    open = (pieces & 3) == OPEN
    lacking = tl.max(open.to(tl.int32), 1)[:, None] > 0
    pieces = joined(tl.where(open, (pieces & -4) | PARTIAL, pieces), end)
    left = record(pieces, end, records, line, inside, Bounds, Count, Work)
    tl.store(Left + line, left | lacking, mask=inside)
