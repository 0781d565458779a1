$# Functions of planners in Triton: a text has those that it uses.
$# A row of tiles is held as pieces, [rows, PIECES] int32 in order: four times the tile where a piece begins, and its kind;
$# `end`, four times the number of tiles, stands where there is none. Integers have 64 bits and Floats are doubles, as in
$# the planner's other texts, so all of them find the same records.

$part floordiv
@triton.jit
def floordiv(x, y):
    """Rounds to minus infinity; 0 where y is 0."""
    divisor = tl.where(y == 0, 1, y)
    quotient = x // divisor
    down = (quotient * divisor != x) & ((x < 0) != (divisor < 0))
    return tl.where(y == 0, 0, tl.where(down, quotient - 1, quotient))

$part least
@triton.jit
def least(x, y):
    return tl.where((x <= y) | (x != x), x, y)

$part most
@triton.jit
def most(x, y):
    return tl.where((x >= y) | (x != x), x, y)

$part real_tanh
@triton.jit
def real_tanh(x):
    y = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - y) / (1.0 + y)
    return tl.where(x < 0, -size, tl.where(x == 0, x, size))

$part number
@triton.jit
def number(x, kind: tl.constexpr):
    """A scalar: given as a number, or as a tensor that holds it; Floats come as the bits of a double."""
    if x.dtype.is_ptr():
        return tl.load(x).to(kind)
    elif kind == tl.float64:
        return x.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        return x.to(kind)

$part below
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

$part segment
@triton.jit
def segment(Offsets, size, stride, x):
    return tl.minimum(tl.maximum(below(Offsets, size, stride, x, True) - 1, 0), tl.maximum(size - 2, 0))

$part at_least
@triton.jit
def at_least(Table, size, stride, x):
    """The first position of a sorted table whose entry is at least x."""
    found = below(Table, size, stride, x, False)
    return tl.where(found < size, found, FAR)

$part at_most
@triton.jit
def at_most(Table, size, stride, x):
    """The last position of a sorted table whose entry is at most x."""
    found = below(Table, size, stride, x, True)
    return tl.where(found < size, found - 1, FAR)

$part above
@triton.jit
def above(Table, size, stride, x):
    """The first position of a sorted table whose entry is above x."""
    found = below(Table, size, stride, x, True)
    return tl.where(found < size, found, FAR)

$part under
@triton.jit
def under(Table, size, stride, x):
    """The last position of a sorted table whose entry is below x."""
    found = below(Table, size, stride, x, False)
    return tl.where(found < size, found - 1, FAR)

$part over
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

$part along
@triton.jit
def along(size, lo, hi):
    """Where the two blocks are that cover the entries lo..hi of an axis of a table that `halves` has made ready."""
    lo, hi = clip(lo, size - 1), clip(hi, size - 1)
    level = magnitude(tl.maximum(hi - lo, 1))
    level += (hi >> level) - (lo >> level) > 1  # two blocks reach over it
    room = tl.full((), 2, tl.int64) << tl.where(size > 1, magnitude(tl.maximum(size - 1, 1).to(tl.int64)) + 1, 0)
    start = room - (room >> level)
    return start + (lo >> level), start + (hi >> level), room

$part tiles
@triton.jit
def tiles(first, last, k0, bk, columns):
    """The tiles that hold the keys first..last."""
    start = clip(floordiv(first - k0, bk), columns)
    return start, tl.where(last >= first, clip(floordiv(last - k0, bk) + 1, columns), start)

$part magnitude
@triton.jit
def magnitude(x):
    """The place of the highest bit of a positive integer below 2**53."""
    return (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023

$part join
@triton.jit
def join(x, y, MOST: tl.constexpr):
    return most(x, y) if MOST else least(x, y)

$part clip
@triton.jit
def clip(x, last):
    return tl.minimum(tl.maximum(x, 0), last)

$part slots
@triton.jit
def slots(pieces):
    return tl.arange(0, pieces.shape[1])[None, :]

$part at
@triton.jit
def at(pieces, i, beyond):
    """Pieces by their numbers."""
    last: tl.constexpr = pieces.shape[1] - 1
    i += pieces * 0
    return tl.where((i < 0) | (i > last), beyond, tl.gather(pieces, tl.minimum(tl.maximum(i, 0), last), 1))

$part reaching
@triton.jit
def reaching(x, values):
    """How many entries of each sorted row of x are below each of `values`, but the last."""
    found = x * 0
    for i in tl.static_range(1, 11):
        if x.shape[1] >> i > 0:
            ahead = tl.gather(x, found + ((x.shape[1] >> i) - 1), 1) < values
            found += tl.where(ahead, x.shape[1] >> i, 0)
    return found

$part kept
@triton.jit
def kept(pieces, flags, end):
    """The pieces with a flag."""
    count = tl.cumsum(flags.to(tl.int32), 1)
    found = tl.gather(pieces, reaching(count, slots(pieces) + 1), 1)
    return tl.where(slots(pieces) < tl.max(count, 1)[:, None], found, end)

$part joined
@triton.jit
def joined(pieces, end):
    """Neighbours of one kind become one piece, EMPTY ones before the first are left out."""
    kind, before = pieces & 3, at(pieces, slots(pieces) - 1, EMPTY) & 3
    return kept(pieces, ((kind != before) | (kind == OPEN)) & (pieces < end), end)

$part split
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

$part record
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
