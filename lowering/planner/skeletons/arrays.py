"""The skeleton of a planner: what every one of them does, in functions that jax.numpy, torch and numpy share.

`HEADERS` gives each backend the few it has to have under these names: `arange take concat cumsum nth slot_of sort
scalar at_least at_most`, and `where minimum maximum`.
"""

from __future__ import annotations

HEADERS: dict[str, str] = {
    "jnp": '''
import math

import jax.numpy as jnp
from jax import lax
from jax.numpy import clip, maximum, minimum, sort, where

Int, Float, Bool = {int}, {float}, bool


def arange(n, like):
    return jnp.arange(n, dtype=Int)


def scalar(x, kind, like):
    return jnp.asarray(x).astype(kind)


def concat(parts):
    return jnp.concatenate(parts, -1)


def cumsum(x):
    return jnp.cumsum(x, -1, dtype=Int)


def take(x, i):
    return jnp.take_along_axis(x, i, -1)


def below(x, values):
    """How many entries of each sorted row of x are below each of `values`."""
    return (x[..., None, :] < values[..., :, None]).sum(-1, dtype=Int)


def top(x):
    return x.max(-1, keepdims=True)


def repeated(step, widths, state):
    """The step for each width; compiled once, whatever their number."""
    if len(widths) == 1:
        return step(widths[0], *state)
    steps = jnp.asarray(widths, Int)
    body = lambda i, state: tuple(x.astype(Int) for x in step(steps[i], *state))
    return lax.fori_loop(0, len(widths), body, tuple(x.astype(Int) for x in state))


def typed(x):
    return x if x.dtype == bool else x.astype(Float if jnp.issubdtype(x.dtype, jnp.floating) else Int)


def front(table, axes):
    """The named axes last."""
    return jnp.moveaxis(table, axes, range(-len(axes), 0))


def known(rows, place):
    return jnp.asarray(rows, Int)[place]


def search(table, values, side):
    return jnp.searchsorted(typed(table), values, side).astype(Int)
''',
    "torch": '''
import math

import torch
from torch import where

Int, Float, Bool = torch.int64, torch.float64, torch.bool


def arange(n, like):
    return torch.arange(n, device=like.device)


def scalar(x, kind, like):
    return x.to(kind) if isinstance(x, torch.Tensor) else torch.full((), x, dtype=kind, device=like.device)


def clip(x, lo, hi):
    return torch.clip(x, lo, hi) if isinstance(x, torch.Tensor) else min(max(x, lo), hi)


def concat(parts):
    return torch.cat(parts, -1)


def sort(x):
    return torch.sort(x, -1).values


def cumsum(x):
    return torch.cumsum(x, -1, dtype=Int)


def take(x, i):
    return torch.take_along_dim(x, i, -1)


def below(x, values):
    """How many entries of each sorted row of x are below each of `values`."""
    return torch.searchsorted(x.contiguous(), values.expand(*x.shape[:-1], -1).contiguous())


def top(x):
    return x.amax(-1, keepdim=True)


def repeated(step, widths, state):
    for width in widths:
        state = step(width, *state)
    return state


def typed(x):
    return x if x.dtype == torch.bool else x.to(Float if x.is_floating_point() else Int)


def front(table, axes):
    """The named axes last."""
    return torch.moveaxis(table, axes, tuple(range(-len(axes), 0)))


def known(rows, place):
    return torch.tensor(rows, device=place.device)[place]


def search(table, values, side):
    values = scalar(values, Int, table).contiguous()
    return torch.searchsorted(typed(table).contiguous(), values, side=side)


def minimum(x, y):
    return where((x <= y) | (x != x), x, y)


def maximum(x, y):
    return where((x >= y) | (x != x), x, y)
''',
}

READING = {
    "look": '''
def look(table, *index):
    """A lookup: indices beyond the table mean its nearest entry."""
    return typed(table[tuple(clip(i, 0, n - 1) for i, n in zip(index, table.shape))])
''',
    "leading": '''
def leading(table, *index):
    """The place of leading indices in a table whose leading axes are made one."""
    place = 0
    for i, n in zip(index, table.shape):
        place = place * n + clip(i, 0, n - 1)
    return place
''',
    "segment": """
def segment(offsets, x):
    return clip(search(offsets, x, "right") - 1, 0, max(offsets.shape[0] - 2, 0))
""",
    "at_least": '''
def at_least(table, x):
    """The first position of a sorted table whose entry is at least x."""
    found = search(table, x, "left")
    return where(found < table.shape[0], found, FAR)
''',
    "at_most": '''
def at_most(table, x):
    """The last position of a sorted table whose entry is at most x."""
    found = search(table, x, "right")
    return where(found < table.shape[0], found - 1, FAR)
''',
    "above": '''
def above(table, x):
    """The first position of a sorted table whose entry is above x."""
    found = search(table, x, "right")
    return where(found < table.shape[0], found, FAR)
''',
    "under": '''
def under(table, x):
    """The last position of a sorted table whose entry is below x."""
    found = search(table, x, "left")
    return where(found < table.shape[0], found - 1, FAR)
''',
    "line": '''
def line(table, join, other):
    """For the joins (minima or maxima) of a table over any range of its last axis: joins with what lies before
    and after within a block of `grain` entries, and over 1, 2, 4, ... blocks from each block on."""
    n = table.shape[-1]
    grain = 1 if n <= FINE else GRAIN
    count = -(-n // grain)
    if count * grain > n:
        table = concat([table, *[table[..., -1:]] * (count * grain - n)])
    ahead = behind = table.reshape(*table.shape[:-1], count, grain)
    step = 1
    while step < grain:
        ahead = concat([ahead[..., :step], join(ahead[..., step:], ahead[..., :-step])])
        behind = concat([join(behind[..., :-step], behind[..., step:]), behind[..., -step:]])
        step *= 2
    levels, step = [ahead[..., -1]], 1
    while 2 * step <= count:
        last = levels[-1]
        levels.append(concat([join(last[..., :-step], last[..., step:]), last[..., -step:]]))
        step *= 2
    return n, grain, count, join, other, ahead.reshape(-1), behind.reshape(-1), concat(levels).reshape(-1), len(levels)


def over(lines, row, lo, hi):
    """The join of the entries lo..hi, both included, of one row of the table; exact, or within one block wider."""
    n, grain, count, join, other, ahead, behind, windows, levels = lines
    lo, hi = (clip(scalar(x, Int, ahead), 0, n - 1) for x in (lo, hi))
    first, last = lo // grain, hi // grain
    a, z = behind[row * (count * grain) + lo], ahead[row * (count * grain) + hi]
    between = last - first - 1
    level, width = between * 0, between * 0 + 1
    for i in range(1, levels):
        level, width = where(between >= 2**i, i, level), where(between >= 2**i, 2**i, width)
    row = (row * levels + level) * count
    inner = join(windows[row + clip(first + 1, 0, count - 1)], windows[row + clip(last - width, 0, count - 1)])
    ends = join(a, z)
    return typed(where(between > 0, join(ends, inner), where(between == 0, ends, other(a, z))))
''',
    "plane": '''
def plane(table, join, axes):
    """For the joins of a table over any box of its last `axes` axes: blocks of 1, 2, 4, ... entries along each."""
    shape, parts, places = table.shape[-axes:], [], []

    def halved(t, axis):
        t = swap(t, axis)
        t = concat([t, t[..., -1:]]) if t.shape[-1] % 2 else t
        return swap(join(t[..., 0::2], t[..., 1::2]), axis)

    def swap(t, axis):
        return t.swapaxes(axis - axes, -1)

    def cut(t, axis):
        while True:
            if axis + 1 < axes:
                cut(t, axis + 1)
            else:
                places.append(tuple(t.shape[-axes:]))
                parts.append(t.reshape(*table.shape[:-axes], -1))
            if t.shape[axis - axes] == 1:
                return
            t = halved(t, axis)

    cut(table, 0)
    flat = concat(parts)
    return shape, places, join, flat.reshape(-1), flat.shape[-1]


def within(planes, row, los, his):
    """The join of the entries of a box, ends included, or of a box that covers it."""
    shape, places, join, flat, size = planes
    counts = [(n - 1).bit_length() + 1 for n in shape]
    ends, place = [], 0
    for lo, hi, n, count in zip(los, his, shape, counts):
        lo, hi = (clip(scalar(x, Int, flat), 0, n - 1) for x in (lo, hi))
        level = (hi - lo) * 0
        for i in range(1, count):
            level = where(hi - lo >= 2 ** (i - 1), i, level)
        ends.append((lo >> level, hi >> level))
        place = place * count + level
    starts, start = [], 0
    for block in places:
        starts.append([start, *block])
        start += math.prod(block)
    rows = known(starts, place)
    found = None
    for corner in range(2 ** len(shape)):
        at = 0
        for axis in range(len(shape)):
            at = at * rows[..., 1 + axis] + ends[axis][corner >> axis & 1]
        part = flat[row * size + rows[..., 0] + at]
        found = part if found is None else join(found, part)
    return typed(found)
''',
}

SHARED = '''
EMPTY, PARTIAL, FULL, OPEN = 0, 1, 2, 3
FAR = 1 << 30  # beyond every position
FINE, GRAIN = 4096, 32  # tables up to FINE entries are searched entry by entry, longer ones in blocks


def nth(flags, n):
    """Where the first n true flags of each row are, and whether there are so many."""
    count, wanted = cumsum(flags), arange(n, flags) + 1
    return minimum(below(count, wanted), flags.shape[-1] - 1), wanted <= count[..., -1:]


def stops(start, columns):
    return concat([start[..., 1:], start[..., :1] * 0 + columns])


def shifted(kind, by):
    return concat([kind[..., :by] * 0, kind[..., :-by]])


def kept(flags, start, kind, n, columns):
    """The pieces with a flag, in n slots; slots without a piece begin at `columns`."""
    place, there = nth(flags, n)
    return where(there, take(start, place), columns), where(there, take(kind, place), EMPTY)


def joined(start, kind, columns):
    """Neighbours of one kind become one piece, EMPTY ones before the first are left out."""
    new = (kind != shifted(kind, 1)) | (kind == OPEN)
    return kept(new & (start < columns), start, kind, start.shape[-1], columns)


def records_of(start, kind, columns, n):
    """Runs of tiles as records (lo, full_lo, full_hi, hi), n per row: bounds, count, whether that was enough.
    Partial, full, partial share a record; every other full run opens a new one."""
    stop = stops(start, columns)
    live, before, second = kind != EMPTY, shifted(kind, 1), shifted(shifted(kind, 1), 1)
    follows = (before == PARTIAL) & (second == EMPTY)
    opens = live & ((before == EMPTY) | ((kind == FULL) & ~follows))
    place, there = nth(opens, n)

    def at(x, i):
        return take(x, minimum(i, x.shape[-1] - 1))

    def kind_at(i):
        return where(i < kind.shape[-1], at(kind, i), EMPTY)

    full = where(kind_at(place) == FULL, place, place + 1)
    has = kind_at(full) == FULL
    last = where(has, full + (kind_at(full + 1) == PARTIAL), place)
    lo, hi = at(start, place), at(stop, last)
    total = cumsum(opens)[..., -1:]
    more = (arange(n, start) == n - 1) & (total > n)  # the last record takes in what is left, as PARTIAL
    hi = where(more, top(where(live, stop, 0)), hi)
    parts = (lo, where(has, at(start, full), hi), where(has, at(stop, full), hi), hi)
    bounds = concat([where(there, x, 0)[..., None] for x in parts])
    return bounds, minimum(total, n)[..., 0], (total > n).any()
'''

INTERVALS = '''
def swept(seen, hidden, columns):
    """Intervals of tiles united: pieces of every row, PARTIAL where a hidden interval reaches."""
    ends = sort(concat([x for pair in (*seen, *hidden) for x in pair]))
    start = concat([ends[..., :1] * 0, ends])

    def covered(parts):
        hit = start < 0
        for lo, hi in parts:
            hit = hit | ((lo <= start) & (start < hi))
        return hit

    kind = where(covered(seen), where(covered(hidden), PARTIAL, FULL), EMPTY)
    start, kind = kept(stops(start, columns) > start, start, kind, start.shape[-1], columns)
    return joined(start, kind, columns)
'''

PIECES = '''
def widths(columns, room):
    """Tiles of a piece, level by level: half the room at first, then four pieces for one, down to a tile."""
    width = 1 if columns <= room else -(-columns // max(room // 2, 1))
    found = [width]
    while found[-1] > 1:
        found.append(-(-found[-1] // 4))
    return found


def split(start, kind, width, columns):
    """Open pieces cut into pieces of `width` tiles, first come first served while there is room."""
    room = start.shape[-1]
    used = where(start < columns, 1, 0)
    parts = where(kind == OPEN, (stops(start, columns) - start + width - 1) // width, used)
    fits = cumsum(parts - used) <= room - cumsum(used)[..., -1:]
    parts = where(fits, parts, used)
    end = cumsum(parts)
    slot = arange(room, start)
    source = minimum(below(end, slot + 1), room - 1)
    offset = slot - take(end - parts, source)
    there = slot < end[..., -1:]
    start = where(there, take(start, source) + offset * width, columns)
    return start, where(there, take(kind, source), EMPTY)
'''
