"""The schedule of an XLA call, made on the host: the chunks of keys each row of tiles visits, and the steps.

A *body* is a fixed number of keys, with or without the predicate, so K and V are read by `dynamic_slice` of a static
size while the trip counts are data: other values in a mask's tables do not recompile.

Of traced spans nothing is listed in advance, since how many steps a row takes is a value. Step i of a row finds the
segment it falls in by comparing i with the running number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frisket.lowering.plan import Geometry, Spans
from frisket.lowering.planner.planner import DeviceSpans

Ints: TypeAlias = NDArray[np.integer[Any]]
STEP_COST = 96.0  # tokens of key length that one more step of a loop is worth
WIDEST = 512  # tokens of key length beyond which a step gains nothing and leaves the cache
CELLS = 2**20  # scores, and numbers of K, that one step may hold; few queries take more keys, many heads take turns


@dataclass(frozen=True)
class Schedule:
    """The steps of a call. `rows` [n, 3] holds (batch, head, q tile) where a step begins; the step takes `batches` and
    `heads` from there. For each body `ends` [n + 1] divides `chunks` [m, 3] among the rows. A chunk is (start of the
    slice, first key that counts, end of those), in tokens. With traced spans `ends` holds the records of each row."""

    bodies: tuple[Body, ...]
    batches: int
    heads: int
    rows: Ints
    ends: tuple[Any, ...]
    chunks: tuple[Ints, ...]
    once: bool = False  # row i has chunk i and no other


def schedule(spans: Spans | DeviceSpans, geometry: Geometry, block: tuple[int, int]) -> Schedule:
    """The schedule of spans, in chunks of few widths."""
    g, (block_q, block_k) = geometry, block
    block_q = min(block_q, g.q_len)
    group = g.heads // g.kv_heads
    (batches, heads), slices, places = _sharing(spans.slice_of, group, CELLS // (block_q * WIDEST))
    if isinstance(spans, DeviceSpans):  # two bodies whatever the spans hold
        records = spans.bounds[slices]
        listed = (records.reshape(-1, *records.shape[2:]),)
        return Schedule(bodies(g.kv_len), batches, heads, _rows(places, records.shape[1]), listed, ())
    shared = batches * max(1, heads // group)
    widest = max(WIDEST, min(CELLS // (block_q * batches * heads), CELLS // (shared * g.head_dim)))
    rows = _rows(places, spans.bounds.shape[1])
    records = spans.bounds[slices].reshape(-1, *spans.bounds.shape[2:])
    used = np.arange(records.shape[1]) < spans.count[slices].reshape(-1, 1)
    row, record = np.nonzero(used)
    lo, full_lo, full_hi, hi = records[row, record].T
    # a record that one step can take is taken whole: the predicate costs less than two more steps
    full_lo = np.where((hi - lo) * block_k <= widest, hi, full_lo)
    full_hi = np.maximum(full_lo, full_hi)
    edge = np.concatenate([_segments(row, lo, full_lo), _segments(row, full_hi, hi)])
    full = _segments(row, full_lo, full_hi)
    found: list[Body] = []
    ends, chunks = [], []
    for partial, part in ((False, full), (True, edge)):
        for width, pieces in _cut(part, partial, block_k, widest):
            found.append(Body(min(width * block_k, g.kv_len), partial))
            order = np.argsort(pieces[:, 0], kind="stable")
            end, chunk = _pack(pieces[order], len(rows), found[-1].width, block_k, g.kv_len)
            ends.append(end)
            chunks.append(chunk)
    once = len(found) == 1 and found[0].partial and bool((np.diff(ends[0]) <= 1).all())
    if once:
        ends, chunks = _one_each(ends[0], chunks[0])
    return Schedule(tuple(found), batches, heads, rows, tuple(ends), tuple(chunks), once)


def _sharing(slice_of: Ints, group: int, most: int) -> tuple[tuple[int, int], Ints, list[tuple[int, int]]]:
    """The division of a call into steps: ((batches, heads) of one step, the slice of each step, where it begins). A
    step takes at most `most` heads of equal spans, a whole number of groups or a part of one."""
    batch, heads = slice_of.shape
    h = heads if (slice_of == slice_of[:, :1]).all() else 1
    fits = [n for n in range(1, h + 1) if h % n == 0 and (n % group == 0 or group % n == 0) and n <= max(1, most)]
    h = fits[-1]
    b = batch if h == heads and (slice_of == slice_of[:1]).all() else 1
    b = max(n for n in range(1, b + 1) if b % n == 0 and n * h <= max(h, most))
    places = [(i, j) for i in range(0, batch, b) for j in range(0, heads, h)]
    return (b, h), np.array([slice_of[p] for p in places]), places


def _rows(places: list[tuple[int, int]], n: int) -> Ints:
    parts = [np.stack([np.full(n, b), np.full(n, h), np.arange(n)], 1) for b, h in places]
    return np.concatenate(parts).astype(np.int32)


def _segments(row: Ints, start: Ints, stop: Ints) -> Ints:
    kept = stop > start
    return np.stack([row[kept], start[kept], stop[kept]], 1)


def _cut(segments: Ints, partial: bool, block_k: int, widest: int) -> list[tuple[int, Ints]]:
    """The segments cut into [(width, pieces)] in tiles: one width for PARTIAL segments, whose last piece may be cut
    short by the predicate; for FULL ones a wide piece and, for the remainder, a single tile."""
    if not len(segments):
        return []
    length = segments[:, 2] - segments[:, 1]
    extra = STEP_COST / block_k
    most = min(max(1, widest // block_k), int(length.max()))

    def cost(width: int) -> float:
        steps, rest = np.divmod(length, width)
        left = (rest > 0) * (width + extra) if partial else rest * (1 + extra)
        return float((steps * (width + extra) + left).sum())

    width = min(range(1, most + 1), key=cost)
    pieces = _pieces(segments, width)
    if partial or width == 1:
        return [(width, pieces)]
    whole = pieces[:, 2] - pieces[:, 1] == width
    rest = _pieces(pieces[~whole], 1)
    return [(width, pieces[whole])] + ([(1, rest)] if len(rest) else [])


def _pieces(segments: Ints, width: int) -> Ints:
    """The pieces of each segment, cut from its start into pieces of `width` tiles; the last may be shorter."""
    count = -(-(segments[:, 2] - segments[:, 1]) // width)
    of = np.repeat(np.arange(len(segments)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    start = segments[of, 1] + nth * width
    return np.stack([segments[of, 0], start, np.minimum(start + width, segments[of, 2])], 1)


def _pack(pieces: Ints, rows: int, width: int, block_k: int, kv_len: int) -> tuple[Ints, Ints]:
    """The (row ends, chunks), in tokens; the chunk list is padded to a power of two so that few lengths exist."""
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(pieces[:, 0], minlength=rows), out=ends[1:])
    first, stop = pieces[:, 1] * block_k, np.minimum(pieces[:, 2] * block_k, kv_len)
    chunks = np.zeros((1 << max(0, len(pieces) - 1).bit_length(), 3), np.int32)
    # a slice may not run over the end: it begins earlier, and the keys before `first` are masked
    chunks[: len(pieces)] = np.stack([np.minimum(first, kv_len - width), first, stop], 1)
    return ends, chunks


def _one_each(ends: Ints, chunks: Ints) -> tuple[list[Ints], list[Ints]]:
    """One chunk for every row of at most one; the chunk of a row with none holds no key that counts."""
    held = np.zeros((len(ends) - 1, 3), np.int32)
    held[np.diff(ends) == 1] = chunks[: ends[-1]]
    return [np.arange(len(ends), dtype=np.int32)], [held]


WIDE, EDGE = 512, 256  # tokens of key length that one step takes, without the predicate and with it
Chunk = Callable[[Any], tuple[Any, Any, Any]]  # step -> start of the slice, first key that counts, end of those
Loop = tuple["Body", Any, Any, Chunk]  # with its first step and the end of its steps


@dataclass(frozen=True)
class Body:
    """One inner loop: `width` keys a step, with the predicate or without."""

    width: int
    partial: bool


def bodies(kv_len: int) -> tuple[Body, ...]:
    return Body(min(WIDE, kv_len), False), Body(min(EDGE, kv_len), True)


def of_records(both: tuple[Body, ...], records: Any, block_k: int, kv_len: int) -> Iterator[Loop]:
    """The steps of one row, (body, first step, end of the steps, chunk of a step), from `records` [R, 4], in key tiles;
    unused records are zero. The part of a FULL segment beyond whole wide steps goes with the PARTIAL one after it."""
    import jax.numpy as jnp

    full, partial = both
    lo, full_lo, full_hi, hi = jnp.minimum(records.T * block_k, kv_len)
    taken = jnp.where(hi - lo <= partial.width, 0, (full_hi - full_lo) // full.width)
    full_lo, rest = jnp.where(taken > 0, full_lo, hi), jnp.where(taken > 0, full_lo + taken * full.width, hi)
    edges = jnp.concatenate([lo, rest]), jnp.concatenate([full_lo, hi])
    yield full, *_steps(full_lo, full_lo + taken * full.width, full.width, kv_len)
    yield partial, *_steps(*edges, partial.width, kv_len)


def _steps(start: Any, stop: Any, width: int, kv_len: int) -> tuple[int, Any, Chunk]:
    """Segments cut from their starts into steps of `width` keys; the last may be cut short by the predicate."""
    import jax.numpy as jnp

    count = (stop - start + width - 1) // width
    ends = jnp.cumsum(count, dtype=jnp.int32)

    def chunk(i: Any) -> tuple[Any, Any, Any]:
        at = (ends <= i).sum(dtype=jnp.int32)
        first = start[at] + (i - (ends[at] - count[at])) * width
        # a slice may not run over the end: it begins earlier, and the keys before `first` are masked
        return jnp.minimum(first, kv_len - width), first, jnp.minimum(first + width, stop[at])

    return 0, ends[-1], chunk
