"""Tiles and scores of the XLA executor's loops, inside the trace: where a row of tiles begins, its chunks of keys,
tiles of the arrays, and scores. Tiles are [batch, kv head, head of the group, query, ...].

The schedule is made on the host. It has the chunks of keys that each row of tiles visits, and the steps. A *body* is a
fixed number of keys, with or without the predicate. So K and V are read by `dynamic_slice` of a static size while the
trip counts are data: other values in a mask's tables do not recompile.

Of traced spans nothing is listed in advance, since how many steps a row takes is a value. Step i of a row finds the
segment it falls in by comparing i with the running number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.kernels.features import XLA
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Geometry, KernelInputs, LoopPlan, Spans
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
    # a tile of few queries would be mostly padding
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
    loops: list[Body] = []
    ends, chunks = [], []
    for partial, part in ((False, full), (True, edge)):
        for width, pieces in _cut(part, partial, block_k, widest):
            loops.append(Body(min(width * block_k, g.kv_len), partial))
            order = np.argsort(pieces[:, 0], kind="stable")
            end, chunk = _pack(pieces[order], len(rows), loops[-1].width, block_k, g.kv_len)
            ends.append(end)
            chunks.append(chunk)
    once = len(loops) == 1 and loops[0].partial and bool((np.diff(ends[0]) <= 1).all())
    if once:
        ends, chunks = _one_each(ends[0], chunks[0])
    return Schedule(tuple(loops), batches, heads, rows, tuple(ends), tuple(chunks), once)


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
    nonempty = stop > start
    return np.stack([row[nonempty], start[nonempty], stop[nonempty]], 1)


def _cut(segments: Ints, partial: bool, block_k: int, widest: int) -> list[tuple[int, Ints]]:
    """The segments cut into [(width, pieces)] in tiles: one width for PARTIAL segments, whose last piece may be cut
    short by the predicate. For FULL ones a wide piece and, for the remainder, a single tile."""
    if not len(segments):
        return []
    length = segments[:, 2] - segments[:, 1]
    extra = STEP_COST / block_k
    most = min(max(1, widest // block_k), int(length.max()))

    def cost(width: int) -> float:
        steps, rest = np.divmod(length, width)
        left = (rest > 0) * (width + extra) if partial else rest * (1 + extra)
        return float((steps * (width + extra) + left).sum())

    # the least cost in tokens, where each step counts as `extra` more of them
    width = min(range(1, most + 1), key=cost)
    pieces = _pieces(segments, width)
    if partial or width == 1:  # a partial piece may be cut short by the predicate, a full one may not
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
    by_row = np.zeros((len(ends) - 1, 3), np.int32)
    by_row[np.diff(ends) == 1] = chunks[: ends[-1]]
    return [np.arange(len(ends), dtype=np.int32)], [by_row]


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
    wide_steps = jnp.where(hi - lo <= partial.width, 0, (full_hi - full_lo) // full.width)
    full_lo, rest = (jnp.where(wide_steps > 0, x, hi) for x in (full_lo, full_lo + wide_steps * full.width))
    edges = jnp.concatenate([lo, rest]), jnp.concatenate([full_lo, hi])
    yield full, *_steps(full_lo, full_lo + wide_steps * full.width, full.width, kv_len)
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


Array = Any  # a jax.Array, traced or not
ZERO = np.int32(0)  # the indices of a slice have one type


@dataclass(frozen=True)
class Static:
    """The static arguments of the compiled function, in addition to the shapes of its arrays."""

    plan: LoopPlan
    scale: float
    block_q: int
    batches: int  # batch entries of one step
    heads: int  # heads of one step: a whole number of groups, or a part of one
    bodies: tuple[Body, ...]
    once: bool  # row i has chunk i and no other
    float64: bool
    block_k: int | None = None  # of traced spans: records count in tiles of so many keys
    grad_names: frozenset[str] = frozenset()  # gradients to make
    lse_residual: bool = False  # whether a backward will want the rounding error of lse

    @property
    def dtype(self) -> Any:
        return np.float64 if self.float64 else np.float32

    @property
    def widths(self) -> dict[str, bool]:
        """Whether Ints and Floats have 64 bits, as keywords."""
        return {"int64": self.plan.int64, "float64": self.float64}


class Numbers(NamedTuple):
    """The data of a compiled function in addition to q, k and v; arrays."""

    slots: tuple[Array, ...]
    tables: tuple[Array, ...]
    origin: tuple[Array, ...]
    sizes: tuple[Array, ...]
    rows: Array
    ends: tuple[Array, ...]
    chunks: tuple[Array, ...]


def prepared(
    inputs: KernelInputs, float64: bool, grad_names: frozenset[str] = frozenset(), lse_residual: bool = False
) -> tuple[Static, Numbers]:
    """Divide a call into its compiled part and its data."""
    plan, spans, geometry, target = inputs.plan, inputs.spans, inputs.geometry, inputs.target
    if plan.int64 and not int64_enabled():  # JAX would narrow to 32 bits without an error
        raise LoweringError(XLA["64-bit integers"])
    work = schedule(spans, geometry, (target.block_q, target.block_k))
    block_q, block_k = min(target.block_q, geometry.q_len), target.block_k if isinstance(spans, DeviceSpans) else None
    shared = work.batches, work.heads, work.bodies, work.once
    static = Static(plan, geometry.scale, block_q, *shared, float64, block_k, grad_names, lse_residual)
    origin = tuple(scalar(INT, x, **static.widths).reshape(-1) for x in geometry.origin)
    sizes = tuple(scalar(INT, x, **static.widths) for x in geometry.full)
    return static, Numbers(*slots_and_tables(inputs, static), origin, sizes, work.rows, work.ends, work.chunks)


def slots_and_tables(inputs: KernelInputs, static: Static) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The slots and the tables of a call, in the plan's order."""
    import jax.numpy as jnp

    slots = (scalar(s.type, inputs.slots[s.name], **static.widths) for s in inputs.plan.slots)
    return tuple(slots), tuple(jnp.asarray(inputs.tables[t.name]) for t in inputs.plan.tables)


def int64_enabled() -> bool:
    import jax

    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


def scalar(type: Type, value: Any, int64: bool, float64: bool) -> Any:
    """A number, or a vector of them, in the width the kernel computes in; traced values stay traced."""
    whole, floating = (np.int64 if int64 else np.int32), (np.float64 if float64 else np.float32)
    dtype = {BOOL: np.bool_, INT: whole, FLOAT: floating}[type]
    return value.astype(dtype) if hasattr(value, "astype") else np.asarray(value, dtype)


def dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    """A batch of matrix products over the two leading axes, in full precision."""
    from jax import lax

    axes = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    # JAX's default rounds float32 products to fewer bits on some devices
    return lax.dot_general(x, y, axes, precision=lax.Precision.HIGHEST)


def added(whole: Array, tile: Array, place: tuple[Any, ...]) -> Array:
    """The array `whole` with a tile added at a place."""
    from jax import lax

    return lax.dynamic_update_slice(whole, lax.dynamic_slice(whole, place, tile.shape) + tile, place)


@dataclass(frozen=True)
class TileRow:
    """One row of tiles: indices of its first batch entry, head, kv head and query, and what its mask reads."""

    b: Array
    h: Array
    kv: Array
    start: Array
    env: dict[str, Array]
    k_origin: Array


class XlaTiles:
    """One call: its arrays and how a row of tiles reads them. Query head h is (h // group, h % group)."""

    def __init__(self, static: Static, numbers: Numbers, q: Array, k: Array) -> None:
        import jax.numpy as jnp
        from jax import lax

        self.jnp, self.lax = jnp, lax
        self.static, self.numbers, self.axes = static, numbers, varying_axes(q)
        self.batch, self.q_len, self.heads, self.dim = q.shape
        self.kv_len, self.kv_heads = k.shape[1:3]
        self.group = self.heads // self.kv_heads
        inside = static.heads >= self.group
        self.kvs: int = static.heads // self.group if inside else 1
        self.groups: int = self.group if inside else static.heads
        self.length = -(-self.q_len // static.block_q) * static.block_q
        plan = static.plan
        self.tables = {t.name: array for t, array in zip(plan.tables, numbers.tables, strict=True)}
        self.pages = None if plan.pages is None else self.tables[plan.pages]
        if self.pages is not None:
            self.kv_len = self.pages.shape[1] * plan.page
        self.constants = {
            **dict(zip(("B", "H", "Q_LEN", "KV_LEN"), numbers.sizes, strict=True)),
            **{s.name: value for s, value in zip(plan.slots, numbers.slots, strict=True)},
        }

    def full(self, shape: tuple[int, ...], value: float, dtype: Any = None) -> Array:
        """A constant to carry through a loop, which varies between the devices of a `shard_map` as q does."""
        x = self.jnp.full(shape, value, self.static.dtype if dtype is None else dtype)
        # JAX refuses a loop whose carry varies between devices while its start does not
        return self.lax.pcast(x, self.axes, to="varying") if self.axes else x

    @property
    def steps(self) -> Any:
        """The number of rows of tiles in all."""
        return len(self.numbers.rows)

    def place(self, r: Array) -> tuple[Array, Array, Array]:
        """The first batch entry and head of row r, and its tile of queries."""
        rows = self.numbers.rows
        return rows[r, 0], rows[r, 1], rows[r, 2]

    def row(self, r: Array) -> TileRow:
        b, h, tile = self.place(r)
        start = tile * self.static.block_q
        heads = self.jnp.arange(self.kvs * self.groups, dtype=self.jnp.int32).reshape(1, self.kvs, self.groups, 1, 1)
        batches = self.jnp.arange(self.static.batches, dtype=self.jnp.int32).reshape(-1, 1, 1, 1, 1)
        queries = start + self.jnp.arange(self.static.block_q, dtype=self.jnp.int32).reshape(1, 1, 1, -1, 1)
        b0, h0, q0, k0 = (x.reshape(-1, 1, 1, 1, 1) for x in self.numbers.origin)
        env = {**self.constants, "b": b0 + b + batches, "h": h0 + h + heads, "q": self._per_batch(q0 + queries, b)}
        return TileRow(b, h, h // self.group, start, env, self._per_batch(k0, b))

    def _per_batch(self, x: Array, b: Array) -> Array:
        """The entries of the current batches, where there is one per batch."""
        batches = self.static.batches
        # one origin serves all batch entries
        return x if x.shape[0] <= batches else self.lax.dynamic_slice_in_dim(x, b, batches)

    def walk(self, r: Array) -> Iterator[Loop]:
        static, numbers = self.static, self.numbers
        if static.block_k is not None:
            yield from of_records(static.bodies, numbers.ends[0][r], static.block_k, self.kv_len)
            return
        for body, end, listed in zip(static.bodies, numbers.ends, numbers.chunks):
            yield body, end[r], end[r + 1], _reader(listed)

    def visit(self, r: Array, step: Any, state: Any) -> Any:
        """Run `step(body, (start, first, stop), state)` for every chunk of row r."""
        for body, begin, end, chunk in self.walk(r):
            if self.static.once:
                state = step(body, chunk(r), state)
            else:
                # bound by default: the lambda of each turn reads its own body and chunk
                state = self.lax.fori_loop(begin, end, lambda i, s, b=body, c=chunk: step(b, c(i), s), state)
        return state

    # -- tiles of arrays: turned heads outside as they are read and back as they are written, since a whole array
    # -- turned would be memory that the system hands out page by page at every call

    def padded(self, x: Array, axis: int = 1, value: float = 0.0) -> Array:
        """The array `x` padded to a whole number of tiles."""
        width = [(0, 0)] * x.ndim
        width[axis] = (0, self.length - self.q_len)
        # a pad copies the whole array
        return self.jnp.pad(x, width, constant_values=value) if self.length > self.q_len else x

    def queries(self, x: Array, row: TileRow) -> Array:
        """A tile of [batch, length, heads, n], as [batch, kv head, group * query, n]."""
        shape = (self.static.batches, self.static.block_q, self.kvs * self.groups, x.shape[-1])
        tile = self.lax.dynamic_slice(x, (row.b, row.start, row.h, ZERO), shape)
        tile = tile.reshape(*shape[:2], self.kvs, self.groups, shape[-1]).transpose(0, 2, 3, 1, 4)
        return tile.reshape(shape[0], self.kvs, -1, shape[-1]).astype(self.static.dtype)

    def lines(self, x: Array, row: TileRow) -> Array:
        """A tile of [batch, heads, length], as [batch, kv head, group, query]."""
        shape = (self.static.batches, self.kvs * self.groups, self.static.block_q)
        return self.lax.dynamic_slice(x, (row.b, row.h, row.start), shape).reshape(self.part)

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The part [batch, kv head, group, query] of one step."""
        return self.static.batches, self.kvs, self.groups, self.static.block_q

    def keys(self, x: Array, row: TileRow, start: Array, width: int) -> Array:
        """A tile of [batch, length, kv heads, n], or of a pool, as [batch, kv head, key, n]."""
        shape = (self.static.batches, width, self.kvs, x.shape[-1])
        if self.pages is None:
            tile = self.lax.dynamic_slice(x, (row.b, start, row.kv, ZERO), shape)
        else:
            tile = self._paged(self.pages, x, row, start, shape)
        return tile.transpose(0, 2, 1, 3).astype(self.static.dtype)

    def _paged(self, pages: Array, x: Array, row: TileRow, start: Array, shape: tuple[int, ...]) -> Array:
        """A tile [batch, key, kv head, n] of a pool [pages, tokens, kv heads, n]."""
        page = self.static.plan.page
        places = start + self.jnp.arange(shape[1], dtype=self.jnp.int32)
        mine = self.lax.dynamic_slice_in_dim(pages, row.b, shape[0])[:, places // page]
        heads = self.lax.dynamic_slice_in_dim(x, row.kv, shape[2], 2)
        # entries of pages without a visible key may have any number
        return heads.at[mine, places % page].get(mode="clip")

    def put_queries(self, whole: Array, tile: Array, row: TileRow) -> Array:
        """Write a tile of queries: the inverse of `queries`."""
        batches, _, groups, block = self.part
        tile = tile.reshape(batches, self.kvs, groups, block, -1).transpose(0, 3, 1, 2, 4)
        tile = tile.reshape(batches, block, self.kvs * groups, -1).astype(whole.dtype)
        return self.lax.dynamic_update_slice(whole, tile, (row.b, row.start, row.h, ZERO))

    def put_lines(self, whole: Array, tile: Array, row: TileRow) -> Array:
        tile = tile.reshape(self.static.batches, self.kvs * self.groups, self.static.block_q)
        return self.lax.dynamic_update_slice(whole, tile, (row.b, row.h, row.start))

    # -- scores --

    def scores(
        self, row: TileRow, body: Body, chunk: tuple[Array, Array, Array], q_tile: Array, k_tile: Array
    ) -> tuple[Array, dict[str, Array], Array]:
        """The (modified scores [batch, kv head, group, query, key], -inf where hidden; values Exprs read there; where
        the mask shows a key). Of weighted rows the first are weights, 0 where hidden."""
        plan, (start, first, stop) = self.static.plan, chunk
        s = dot(q_tile, k_tile, (3, 3)).reshape(*self.part, body.width)
        local = start + self.jnp.arange(body.width, dtype=self.jnp.int32)
        env = {**row.env, "k": row.k_origin + local, "score": s}
        if plan.score is not None:
            s = self.jnp.broadcast_to(self.value(plan.score, env, rounded=True), s.shape)
        seen = self.jnp.ones((), bool)
        if body.partial:
            seen = (local >= first) & (local < stop)
            if plan.mask is not None:
                seen &= self.value(plan.mask, env)
            s = self.jnp.where(seen, s, 0 if plan.weighted else -self.jnp.inf)
        return s, env, seen

    def value(self, e: Expr, env: Mapping[str, Array], rounded: bool = False) -> Array:
        # fused products of a compiler would round scores otherwise in forward and backward
        return evaluate(e, env, self.tables, **self.static.widths, rounded=rounded)

    def counted(self, seen: Array, env: Mapping[str, Array]) -> Array:
        """The positions whose keys a weighted row counts."""
        counted = self.static.plan.counted
        return seen if counted is None else seen & self.value(counted, env)

    def survivors(self, env: Mapping[str, Array]) -> Array | None:
        """The positions that dropout keeps; None: all."""
        return None if self.static.plan.keep_mask is None else self.value(self.static.plan.keep_mask, env)

    def weights(self, env: Mapping[str, Array]) -> Array | None:
        """The factors of weights, once summed; None: no factors."""
        return None if self.static.plan.value_scale is None else self.value(self.static.plan.value_scale, env)

    @property
    def keep(self) -> Array | float:
        """The factor of the weights that dropout keeps."""
        rate = self.static.plan.rate
        return 1.0 if rate is None else 1.0 / (1.0 - self.constants[rate])


def _reader(chunks: Array) -> Chunk:
    return lambda i: (chunks[i, 0], chunks[i, 1], chunks[i, 2])


def varying_axes(x: Array) -> tuple[str, ...]:
    """The mesh axes of an enclosing `shard_map` along which `x` differs between devices."""
    import jax

    kind = jax.typeof(x)
    kind = getattr(kind, "manual_axis_type", kind)
    return tuple(sorted(getattr(kind, "varying", getattr(kind, "vma", ()))))
