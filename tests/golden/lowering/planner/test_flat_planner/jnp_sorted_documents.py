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
    if x.shape[-1] <= 64:
        return (x[..., None, :] < values[..., :, None]).sum(-1, dtype=Int)
    half = 1 << (x.shape[-1].bit_length() - 1)

    def step(i, found):
        reach = found + (half >> i)
        further = (reach <= x.shape[-1]) & (take(x, minimum(reach, x.shape[-1]) - 1) < values)
        return where(further, reach, found)

    found = jnp.zeros((*x.shape[:-1], values.shape[-1]), Int)
    return lax.fori_loop(0, half.bit_length(), step, found)


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


def look(table, *index):
    """A lookup: indices beyond the table mean its nearest entry."""
    return typed(table[tuple(clip(i, 0, n - 1) for i, n in zip(index, table.shape))])


def at_least(table, x):
    """The first position of a sorted table whose entry is at least x."""
    found = search(table, x, "left")
    return where(found < table.shape[0], found, FAR)


def at_most(table, x):
    """The last position of a sorted table whose entry is at most x."""
    found = search(table, x, "right")
    return where(found < table.shape[0], found - 1, FAR)


def above(table, x):
    """The first position of a sorted table whose entry is above x."""
    found = search(table, x, "right")
    return where(found < table.shape[0], found, FAR)


def under(table, x):
    """The last position of a sorted table whose entry is below x."""
    found = search(table, x, "left")
    return where(found < table.shape[0], found - 1, FAR)

def plan_spans(b, h, q, k, sizes, scalars, tables, *, q_len, kv_len, block, room, records):
    doc = tables["doc"]
    bq, bk = block
    rows, columns = -(-q_len // bq), -(-kv_len // bk)
    row = arange(rows, q)[:, None]
    q0, q1 = q + row * bq, q + minimum(row * bq + bq, q_len) - 1
    k0, k1 = k, k + kv_len - 1
    x0 = look(doc, q0)
    x1 = look(doc, q1)

    def tiles(first, last):
        first, last = q0 * 0 + first, q0 * 0 + last
        start = clip((first - k0) // bk, 0, columns)
        return start, where(last >= first, clip((last - k0) // bk + 1, 0, columns), start)

    seen = [
        tiles(jnp.maximum(k0, at_least(doc, x0)), jnp.minimum(jnp.minimum(q1, k1), at_most(doc, x1))),
    ]
    hidden = [
        tiles(jnp.maximum(k0, q0 + 1), k1),
        tiles(jnp.maximum(k0, above(doc, x0)), k1),
        tiles(k0, jnp.minimum(k1, under(doc, x1))),
    ]
    if kv_len % bk:
        hidden.append((q0 * 0 + columns - 1, q0 * 0 + columns))  # cut tiles hold positions outside
    if q_len % bq:
        hidden.append((where(row == rows - 1, q0 * 0, columns), q0 * 0 + columns))
    start, kind = swept(seen, hidden, columns)
    bounds, count, more = records_of(start, kind, columns, records)
    return bounds, count, more
