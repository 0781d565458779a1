"""Which tiles of keys each tile of queries reads: spans of

    q >= k & doc[q] == doc[k]

for tables that live on a device or are traced. Shapes are fixed, nothing is copied to the host.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.numpy import clip, maximum, minimum, sort, where

Int, Float, Bool = jnp.int32, jnp.float32, bool


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

def plan_spans(b, h, q, k, sizes, scalars, tables, *, q_len, kv_len, block, room, records):
    doc = tables["doc"]
    doc_least = line(doc, minimum, maximum)
    doc_most = line(doc, maximum, minimum)
    bq, bk = block
    rows, columns = -(-q_len // bq), -(-kv_len // bk)
    row = arange(rows, q)[:, None]
    q0, q1 = q + row * bq, q + minimum(row * bq + bq, q_len) - 1
    x1 = over(doc_least, 0, q0, q1)
    x4 = over(doc_most, 0, q0, q1)

    def ask(start):
        """Kinds of the pieces of every row that begin at these tiles."""
        stop = stops(start, columns)
        k0, k1 = k + start * bk, k + minimum(stop * bk, kv_len) - 1
        single, whole = stop - start == 1, (stop * bk <= kv_len) & (row * bq + bq <= q_len)
        x0 = q0 >= k1
        x2 = over(doc_most, 0, k0, k1)
        x3 = x1 >= x2
        x5 = over(doc_least, 0, k0, k1)
        x6 = x4 <= x5
        x7 = (q1 < k0) | (x1 > x2) | (x4 < x5)
        always = x0 & x3 & x6
        never = x7
        mixed = x0 & x3 & x6 & x7
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
    overflow = (kind == OPEN).any()
    start, kind = joined(start, where(kind == OPEN, PARTIAL, kind), columns)
    bounds, count, more = records_of(start, kind, columns, records)
    return bounds, count, overflow | more
