"""The JAX library executor: online softmax over the visited key tiles, nothing gathered, no S x S array.

One compiled loop over q tiles; inside, one loop per *body* over that row's chunks of keys. A body is a fixed
number of keys, with or without the predicate, so K and V are read by `dynamic_slice` of a static size while
the trip counts are data: the same mask with other values in its tables compiles nothing. Where one chunk is
all a row ever has (windows, documents) there is no inner loop. Where the spans themselves are traced, each row works
its chunks out of its records (`xla_walk`). Batch and heads ride in the batch dimensions of
`dot_general`, or go one at a time where the mask differs between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.dsl.types import BOOL, FLOAT, INT, Type

from .emit.expr_jnp import evaluate
from .flat import DeviceSpans
from .plan import Geometry, LoopPlan, Spans, Target
from .xla_walk import Body, Chunk, Loop, bodies, of_records

if TYPE_CHECKING:
    import jax

Ints: TypeAlias = NDArray[np.integer[Any]]
STEP_COST = 96.0  # tokens of key length that one more step of a loop is worth
WIDEST = 512  # tokens of key length beyond which a step gains nothing and leaves the cache


@dataclass(frozen=True)
class Static:
    """What the compiled function depends on, beside the shapes of its arguments."""

    plan: LoopPlan
    scale: float
    block_q: int
    batches: int  # batch entries that share a row of spans: all of them or one
    heads: int  # heads that do: all or one
    bodies: tuple[Body, ...]
    once: bool  # row i has chunk i and no other
    int64: bool
    float64: bool
    block_k: int | None = None  # of traced spans: chunks are worked out from records in tiles of so many keys


@dataclass(frozen=True)
class Schedule:
    """`rows` [n, 3] holds (batch, head, q tile); for each body `ends` [n + 1] divides `chunks` [m, 3] among
    the rows. A chunk is (start of the slice, first key that counts, end of those that count), in tokens."""

    bodies: tuple[Body, ...]
    batches: int
    heads: int
    rows: Ints
    ends: tuple[Any, ...]
    chunks: tuple[Ints, ...]
    once: bool = False


def forward(
    plan: LoopPlan,
    spans: Spans | DeviceSpans,
    geometry: Geometry,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: Mapping[str, Any],
    tables: Mapping[str, Any],
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """(out [batch, q_len, heads, v_dim], lse [batch, heads, q_len] in float32, natural log) from
    q [batch, q_len, heads, dim] and k, v [batch, kv_len, kv_heads, dim]. Float64 throughout where q is.
    The arrays, slots, tables and the origin may be traced, and the spans if they are `DeviceSpans`; shapes are
    the host's."""
    import jax.numpy as jnp

    float64 = q.dtype == jnp.float64
    if plan.int64 and not int64_enabled():
        raise LoweringError(
            "an index of this mask may leave 32 bits and JAX has 64-bit integers switched off; "
            'set jax.config.update("jax_enable_x64", True) or shrink the numbers in the mask'
        )
    block_q = min(target.block_q, geometry.q_len)
    traced = isinstance(spans, DeviceSpans)
    work = schedule(spans, geometry, target.block_k)
    static = Static(
        plan, geometry.scale, block_q, work.batches, work.heads, work.bodies, work.once, plan.int64, float64,
        target.block_k if traced else None,
    )  # fmt: skip
    values = tuple(scalar(s.type, slots[s.name], plan.int64, float64) for s in plan.slots)
    arrays = tuple(jnp.asarray(tables[t.name]) for t in plan.tables)
    origin = tuple(scalar(INT, x, plan.int64, float64).reshape(-1) for x in geometry.origin)
    sizes = tuple(scalar(INT, x, plan.int64, float64) for x in geometry.full)
    compiled = _compiled(static)
    result: tuple[jax.Array, jax.Array] = compiled(
        q, k, v, values, arrays, origin, sizes, work.rows, work.ends, work.chunks
    )
    return result


def int64_enabled() -> bool:
    import jax

    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


def scalar(type: Type, value: Any, int64: bool, float64: bool) -> Any:
    """A number, or a vector of them, in the width the kernel computes in; traced values stay traced."""
    whole, floating = (np.int64 if int64 else np.int32), (np.float64 if float64 else np.float32)
    dtype = {BOOL: np.bool_, INT: whole, FLOAT: floating}[type]
    return value.astype(dtype) if hasattr(value, "astype") else np.asarray(value, dtype)


# -- on the host: which chunks each row visits ------------------------------------------------------


def _traced(spans: DeviceSpans, geometry: Geometry) -> Schedule:
    """Two bodies whatever the spans hold; in place of chunks, the records of each row."""
    (batches, heads), slices, places = _sharing(spans.slice_of)
    records = spans.bounds[slices]
    listed = (records.reshape(-1, *records.shape[2:]),)
    return Schedule(bodies(geometry.kv_len), batches, heads, _rows(places, records.shape[1]), listed, ())


def _rows(places: list[tuple[int, int]], n: int) -> Ints:
    parts = [np.stack([np.full(n, b), np.full(n, h), np.arange(n)], 1) for b, h in places]
    return np.concatenate(parts).astype(np.int32)


def schedule(spans: Spans | DeviceSpans, geometry: Geometry, block_k: int) -> Schedule:
    """Spans as chunks of few widths."""
    if isinstance(spans, DeviceSpans):
        return _traced(spans, geometry)
    (batches, heads), slices, places = _sharing(spans.slice_of)
    rows = _rows(places, spans.bounds.shape[1])
    records = spans.bounds[slices].reshape(-1, *spans.bounds.shape[2:])
    used = np.arange(records.shape[1]) < spans.count[slices].reshape(-1, 1)
    row, record = np.nonzero(used)
    lo, full_lo, full_hi, hi = records[row, record].T
    # a record that one step can take is taken whole: the predicate costs less than two more steps
    full_lo = np.where((hi - lo) * block_k <= WIDEST, hi, full_lo)
    full_hi = np.maximum(full_lo, full_hi)
    edge = np.concatenate([_segments(row, lo, full_lo), _segments(row, full_hi, hi)])
    full = _segments(row, full_lo, full_hi)
    found: list[Body] = []
    ends, chunks = [], []
    for partial, part in ((False, full), (True, edge)):
        for width, pieces in _cut(part, partial, block_k):
            found.append(Body(min(width * block_k, geometry.kv_len), partial))
            order = np.argsort(pieces[:, 0], kind="stable")
            end, chunk = _pack(pieces[order], len(rows), found[-1].width, block_k, geometry.kv_len)
            ends.append(end)
            chunks.append(chunk)
    once = len(found) == 1 and found[0].partial and bool((np.diff(ends[0]) <= 1).all())
    if once:
        ends, chunks = _one_each(ends[0], chunks[0])
    return Schedule(tuple(found), batches, heads, rows, tuple(ends), tuple(chunks), once)


def _sharing(slice_of: Ints) -> tuple[tuple[int, int], Ints, list[tuple[int, int]]]:
    """((batches, heads) that share a slice, the slices, where each begins): all or one along either axis."""
    along_b = bool((slice_of == slice_of[:1]).all())
    along_h = bool((slice_of == slice_of[:, :1]).all())
    distinct = slice_of[: 1 if along_b else None, : 1 if along_h else None]
    shared = (slice_of.shape[0] if along_b else 1, slice_of.shape[1] if along_h else 1)
    places = [(b, h) for b in range(distinct.shape[0]) for h in range(distinct.shape[1])]
    return shared, distinct.reshape(-1), places


def _segments(row: Ints, start: Ints, stop: Ints) -> Ints:
    kept = stop > start
    return np.stack([row[kept], start[kept], stop[kept]], 1)


def _cut(segments: Ints, partial: bool, block_k: int) -> list[tuple[int, Ints]]:
    """[(width, pieces)] in tiles: one width for PARTIAL segments, whose last piece may be cut short by the
    predicate; for FULL ones a wide and, for what is left over, a single tile."""
    if not len(segments):
        return []
    length = segments[:, 2] - segments[:, 1]
    extra = STEP_COST / block_k
    most = min(max(1, WIDEST // block_k), int(length.max()))

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
    """Each segment cut from its start into pieces of `width` tiles; the last may be shorter."""
    count = -(-(segments[:, 2] - segments[:, 1]) // width)
    of = np.repeat(np.arange(len(segments)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    start = segments[of, 1] + nth * width
    return np.stack([segments[of, 0], start, np.minimum(start + width, segments[of, 2])], 1)


def _pack(pieces: Ints, rows: int, width: int, block_k: int, kv_len: int) -> tuple[Ints, Ints]:
    """(row ends, chunks), in tokens; the chunk list is padded to a power of two so that few lengths exist."""
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(pieces[:, 0], minlength=rows), out=ends[1:])
    first, stop = pieces[:, 1] * block_k, np.minimum(pieces[:, 2] * block_k, kv_len)
    chunks = np.zeros((1 << max(0, len(pieces) - 1).bit_length(), 3), np.int32)
    # a slice may not run over the end: it begins earlier, and the keys before `first` are masked
    chunks[: len(pieces)] = np.stack([np.minimum(first, kv_len - width), first, stop], 1)
    return ends, chunks


def _one_each(ends: Ints, chunks: Ints) -> tuple[list[Ints], list[Ints]]:
    """One chunk for every row of at most one; that of a row with none has no key that counts."""
    held = np.zeros((len(ends) - 1, 3), np.int32)
    held[np.diff(ends) == 1] = chunks[: ends[-1]]
    return [np.arange(len(ends), dtype=np.int32)], [held]


# -- in JAX -----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _compiled(static: Static) -> Any:
    import jax

    def attention(*args: Any) -> Any:
        return _attention(static, *args)

    return jax.jit(attention)


def _attention(
    static: Static, q: Any, k: Any, v: Any, slots: Any, tables: Any, origin: Any, sizes: Any, rows: Any,
    ends: Any, chunks: Any,
) -> tuple[Any, Any]:  # fmt: skip
    import jax.numpy as jnp
    from jax import lax

    batch, q_len, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    group, block = heads // kv_heads, static.block_q
    dtype = jnp.float64 if static.float64 else jnp.float32
    zero = jnp.int32(0)  # the indices of a slice have one type
    # tiles are turned heads outside as they are read and back as they are written: a whole array turned would be
    # memory that the system hands out page by page at every call; query head h is (h // group, h % group)
    length = -(-q_len // block) * block
    if length > q_len:
        q = jnp.pad(q, ((0, 0), (0, length - q_len), (0, 0), (0, 0)))
    kvs, groups = (kv_heads, group) if static.heads == heads else (1, 1)
    constants = _constants(static.plan, slots, sizes)
    tables = {t.name: array for t, array in zip(static.plan.tables, tables, strict=True)}

    def walk(r: Any) -> Iterator[Loop]:
        if static.block_k is not None:
            yield from of_records(static.bodies, ends[0][r], static.block_k, k.shape[1])
            return
        for body, end, listed in zip(static.bodies, ends, chunks):
            yield body, end[r], end[r + 1], _reader(listed)

    def row(r: Any, results: Any) -> Any:
        b, h, start = rows[r, 0], rows[r, 1], rows[r, 2] * block
        here = constants | _coordinates(static, origin, b, h, kvs, groups, start)
        k_origin = _per_batch(origin[3].reshape(-1, 1, 1, 1, 1), b, static.batches)
        q_tile = lax.dynamic_slice(q, (b, start, h, zero), (static.batches, block, kvs * groups, dim))
        q_tile = q_tile.reshape(static.batches, block, kvs, groups, dim)
        q_tile = q_tile.transpose(0, 2, 3, 1, 4).astype(dtype) * static.scale
        part = q_tile.shape[:-1]
        least = jnp.full(part, np.finfo(dtype).min, dtype)
        state = least, jnp.zeros(part, dtype), jnp.zeros((*part, v_dim), dtype)
        for body, begin, end, chunk in walk(r):
            step = _step(static, body, chunk, q_tile, k, v, (b, h // group), here, tables, k_origin)
            state = step(r, state) if static.once else lax.fori_loop(begin, end, step, state)
        top, total, acc = state
        out = acc / jnp.where(total == 0, 1, total)[..., None]
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(total))
        out = out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(static.batches, block, kvs * groups, v_dim)
        lse = lse.reshape(static.batches, kvs * groups, block)
        return (
            lax.dynamic_update_slice(results[0], out, (b, start, h, zero)),
            lax.dynamic_update_slice(results[1], lse, (b, h, start)),
        )

    empty = jnp.zeros((batch, length, heads, v_dim), q.dtype), jnp.full((batch, heads, length), -jnp.inf, dtype)
    out, lse = lax.fori_loop(0, len(rows), row, empty)
    return out[:, :q_len], lse[..., :q_len]


def _reader(chunks: Any) -> Chunk:
    return lambda i: (chunks[i, 0], chunks[i, 1], chunks[i, 2])


def _step(
    static: Static, body: Body, chunk: Chunk, q_tile: Any, k: Any, v: Any, at: Any, here: Any, tables: Any,
    k_origin: Any,
) -> Any:  # fmt: skip
    """One chunk of keys into the running (max, sum, accumulator)."""
    import jax.numpy as jnp
    from jax import lax

    plan, exact, zero = static.plan, lax.Precision.HIGHEST, jnp.int32(0)
    kvs = q_tile.shape[1]

    def step(i: Any, state: Any) -> Any:
        top, total, acc = state
        start, first, stop = chunk(i)
        k_tile, v_tile = (
            lax.dynamic_slice(x, (at[0], start, at[1], zero), (static.batches, body.width, kvs, x.shape[-1]))
            .transpose(0, 2, 1, 3)
            .astype(q_tile.dtype)
            for x in (k, v)
        )
        s = lax.dot_general(q_tile, k_tile, (((4,), (3,)), ((0, 1), (0, 1))), precision=exact)
        local = start + jnp.arange(body.width, dtype=jnp.int32)
        names = {**here, "k": k_origin + local, "score": s}
        widths = {"int64": static.int64, "float64": static.float64}
        if plan.score is not None:
            s = jnp.broadcast_to(evaluate(plan.score, names, tables, **widths), s.shape)
        if body.partial:
            seen = (local >= first) & (local < stop)
            if plan.mask is not None:
                seen &= evaluate(plan.mask, names, tables, **widths)
            s = jnp.where(seen, s, -jnp.inf)
        # `top` starts at the least finite number, so that -inf - top is -inf and never NaN
        new = jnp.maximum(top, s.max(-1))
        p, shrink = jnp.exp(s - new[..., None]), jnp.exp(top - new)
        mixed = lax.dot_general(p, v_tile, (((4,), (2,)), ((0, 1), (0, 1))), precision=exact)
        return new, total * shrink + p.sum(-1), acc * shrink[..., None] + mixed

    return step


def _constants(plan: LoopPlan, slots: Any, sizes: Any) -> dict[str, Any]:
    return {
        **dict(zip(("B", "H", "Q_LEN", "KV_LEN"), sizes, strict=True)),
        **{s.name: value for s, value in zip(plan.slots, slots, strict=True)},
    }


def _coordinates(static: Static, origin: Any, b: Any, h: Any, kvs: int, groups: int, start: Any) -> dict[str, Any]:
    """Global b, h, q of one row of tiles, shaped to broadcast as [batch, kv head, group, q, k]."""
    import jax.numpy as jnp

    heads = jnp.arange(kvs * groups, dtype=jnp.int32).reshape(1, kvs, groups, 1, 1)
    batches = jnp.arange(static.batches, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
    queries = start + jnp.arange(static.block_q, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
    return {
        "b": origin[0] + b + batches,
        "h": origin[1] + h + heads,
        "q": _per_batch(origin[2].reshape(-1, 1, 1, 1, 1) + queries, b, static.batches),
    }


def _per_batch(x: Any, b: Any, batches: int) -> Any:
    """The entries of the batches at hand, where there is one per batch."""
    from jax import lax

    return x if x.shape[0] <= batches else lax.dynamic_slice_in_dim(x, b, 1)
