"""The skeleton of planners in Triton: kernels that make range tables, pieces of rows, records, the order of rows.

A row of tiles is held as pieces, [rows, PIECES] int32 in order: four times the tile where a piece begins, and its kind;
`end`, four times the number of tiles, stands where there is none. Integers have 64 bits and Floats are doubles, as in
the planner's other texts, so all of them find the same records.
"""

from __future__ import annotations

from frisket.lowering.kernels.triton import expr as expr_triton

FINE, GRAIN = 4096, 32
HEADER = f"""
import triton
import triton.language as tl

EMPTY, PARTIAL, FULL, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FAR = tl.constexpr(1 << 30)  # beyond every position
FINE, GRAIN = tl.constexpr({FINE}), tl.constexpr({GRAIN})  # tables up to FINE entries are searched entry by entry
"""


def searched(name: str, asked: str, *, before: bool, last: bool) -> str:
    """The search for an entry that is `asked` x; `before` it, or on it, are those that equal x."""
    return f'''
@triton.jit
def {name}(Table, size, stride, x):
    """The {"last" if last else "first"} position of a sorted table whose entry is {asked} x."""
    found = below(Table, size, stride, x, {before})
    return tl.where(found < size, found{" - 1" * last}, FAR)
'''


FUNCTIONS = {
    "least": """
@triton.jit
def least(x, y):
    return tl.where((x <= y) | (x != x), x, y)
""",
    "most": """
@triton.jit
def most(x, y):
    return tl.where((x >= y) | (x != x), x, y)
""",
    "real_power": f"\n@triton.jit{expr_triton.power('real_power', 'tl.float64')}",
    "real_tanh": """
@triton.jit
def real_tanh(x):
    y = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - y) / (1.0 + y)
    return tl.where(x < 0, -size, tl.where(x == 0, x, size))
""",
    "number": '''
@triton.jit
def number(x, kind: tl.constexpr):
    """A scalar: given as a number, or as a tensor that holds it; Floats come as the bits of a double."""
    if x.dtype.is_ptr():
        return tl.load(x).to(kind)
    elif kind == tl.float64:
        return x.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        return x.to(kind)
''',
    "below": '''
@triton.jit
def below(Table, size, stride, x, reach: tl.constexpr):
    """How many entries of a sorted table are below x, or at most x with `reach`."""
    start, left = x * 0, size.to(tl.int64)
    while left > 1:
        half = left // 2
        entry = tl.load(Table + (start + half - 1) * stride).to(tl.int64)
        start = tl.where((entry <= x) if reach else (entry < x), start + half, start)
        left -= half
    entry = tl.load(Table + start * stride).to(tl.int64)
    return start + ((entry <= x) if reach else (entry < x)).to(tl.int64)
''',
    "segment": """
@triton.jit
def segment(Offsets, size, stride, x):
    return tl.minimum(tl.maximum(below(Offsets, size, stride, x, True) - 1, 0), tl.maximum(size - 2, 0))
""",
    "at_least": searched("at_least", "at least", before=False, last=False),
    "at_most": searched("at_most", "at most", before=True, last=True),
    "above": searched("above", "above", before=True, last=False),
    "under": searched("under", "below", before=False, last=True),
    "over": '''
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
''',
    "along": '''
@triton.jit
def along(size, lo, hi):
    """Where the two blocks are that cover the entries lo..hi of an axis of a table that `halves` has made ready."""
    lo, hi = clip(lo, size - 1), clip(hi, size - 1)
    level = tl.where(hi > lo, magnitude(tl.maximum(hi - lo, 1)) + 1, 0)
    room = tl.full((), 2, tl.int64) << tl.where(size > 1, magnitude(tl.maximum(size - 1, 1).to(tl.int64)) + 1, 0)
    start = room - (room >> level)
    return start + (lo >> level), start + (hi >> level), room
''',
    "tiles": '''
@triton.jit
def tiles(first, last, k0, bk, columns):
    """The tiles that hold the keys first..last."""
    start = clip(floordiv(first - k0, bk), columns)
    return start, tl.where(last >= first, clip(floordiv(last - k0, bk) + 1, columns), start)
''',
    "magnitude": '''
@triton.jit
def magnitude(x):
    """The place of the highest bit of a positive integer below 2**53."""
    return (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
''',
    "join": """
@triton.jit
def join(x, y, MOST: tl.constexpr):
    return most(x, y) if MOST else least(x, y)
""",
    "clip": """
@triton.jit
def clip(x, last):
    return tl.minimum(tl.maximum(x, 0), last)
""",
    "slots": """
@triton.jit
def slots(pieces):
    return tl.arange(0, pieces.shape[1])[None, :]
""",
    "at": '''
@triton.jit
def at(pieces, i, beyond):
    """Pieces by their numbers."""
    last: tl.constexpr = pieces.shape[1] - 1
    i += pieces * 0
    return tl.where((i < 0) | (i > last), beyond, tl.gather(pieces, tl.minimum(tl.maximum(i, 0), last), 1))
''',
    "reaching": '''
@triton.jit
def reaching(x, values):
    """How many entries of each sorted row of x are below each of `values`, but the last."""
    found = x * 0
    for i in tl.static_range(1, 11):
        if x.shape[1] >> i > 0:
            ahead = tl.gather(x, found + ((x.shape[1] >> i) - 1), 1) < values
            found += tl.where(ahead, x.shape[1] >> i, 0)
    return found
''',
    "kept": '''
@triton.jit
def kept(pieces, flags, end):
    """The pieces with a flag."""
    count = tl.cumsum(flags.to(tl.int32), 1)
    found = tl.gather(pieces, reaching(count, slots(pieces) + 1), 1)
    return tl.where(slots(pieces) < tl.max(count, 1)[:, None], found, end)
''',
    "joined": '''
@triton.jit
def joined(pieces, end):
    """Neighbours of one kind become one piece, EMPTY ones before the first are left out."""
    kind, before = pieces & 3, at(pieces, slots(pieces) - 1, EMPTY) & 3
    return kept(pieces, ((kind != before) | (kind == OPEN)) & (pieces < end), end)
''',
    "split": '''
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
''',
    "record": '''
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
''',
}

LINES = '''
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
'''

HALVES = '''
@triton.jit(do_not_specialize=[
    "Source", "Target", "outer", "size", "inner", "stride_outer", "stride", "stride_inner", "level", "room",
])
def halves(
    Source, Target, outer, size, inner, stride_outer, stride, stride_inner, level, room, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Along the middle axis of [outer, size, inner], the joins of 1, 2, 4, ... entries: [outer, room, inner]. Five
    levels at a time: from the table (`level` 0), or from the last level that is there."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside = lane < outer * inner.to(tl.int64)
    before, after = lane // inner, lane % inner
    Target += before * room * inner + after
    i = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    held = tl.minimum(i, (size - 1) >> level).to(tl.int64)
    if level == 0:
        at = Source + before * stride_outer + held * stride + after * stride_inner
        entry = tl.load(at, mask=inside)
        tl.store(Target + i * inner.to(tl.int64), entry, mask=inside & (i < (room >> 1)))
    else:
        entry = tl.load(Target + (room - (room >> level) + held) * inner, mask=inside)
    for n in tl.static_range(1, 6):
        first, second = tl.split(tl.reshape(entry, (BLOCK, entry.shape[1] // 2, 2)))
        entry = join(first, second, MOST)
        j = tl.program_id(1) * (32 >> n) + tl.arange(0, 32 >> n)[None, :]
        start = room - (room >> (level + n))
        tl.store(Target + (start + j) * inner.to(tl.int64), entry, mask=inside & (j < (room >> (level + n + 1))))
'''

ORDER = '''
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
'''


def within(axes: int) -> str:
    """The join over a box of this many axes: of the blocks at its corners."""
    each = range(axes)
    names = ", ".join(f"{n}{i}" for n in ("size", "lo", "hi") for i in each)
    lines = ["", "@triton.jit", f"def within{axes}(Halves, row, {names}, MOST: tl.constexpr):"]
    lines += ['    """The join of the entries of a box, ends included, or of a box that covers it."""']
    for i in each:
        lines.append(f"    a{i}, z{i}, room = along(size{i}, lo{i}, hi{i})")
        places = [f"row{c}" for c in range(1 << i)] if i else ["row"]
        for c, place in reversed(list(enumerate(places))):
            lines.append(f"    row{2 * c + 1} = {place} * room + z{i}")
            lines.append(f"    row{2 * c} = {place} * room + a{i}")
    lines.append("    found = tl.load(Halves + row0)")
    lines += [f"    found = join(found, tl.load(Halves + row{c}), MOST)" for c in range(1, 1 << axes)]
    return "\n".join([*lines, "    return found", ""])
