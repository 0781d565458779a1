"""Tiles and scores of the XLA executor's loops, inside the trace: where a row of tiles begins, its chunks of keys,
tiles of the arrays, and scores. Tiles are [batch, kv head, head of the group, query, ...]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target
from frisket.lowering.planner.planner import DeviceSpans

from .schedule import Body, Chunk, Loop, of_records, schedule

Array = Any  # a jax.Array, traced or not


@dataclass(frozen=True)
class Static:
    """The static arguments of the compiled function, beside the shapes of its arrays."""

    plan: LoopPlan
    scale: float
    block_q: int
    batches: int  # batch entries of one step
    heads: int  # heads of one step: a whole number of groups, or a part of one
    bodies: tuple[Body, ...]
    once: bool  # row i has chunk i and no other
    int64: bool
    float64: bool
    block_k: int | None = None  # of traced spans: records count in tiles of so many keys
    wanted: frozenset[str] = frozenset()  # gradients to make
    low: bool = False  # whether a backward will want the rounding error of lse

    @property
    def dtype(self) -> Any:
        return np.float64 if self.float64 else np.float32


@dataclass(frozen=True)
class Numbers:
    """The data of a compiled function beside q, k and v; a pytree of arrays."""

    slots: tuple[Array, ...]
    tables: tuple[Array, ...]
    origin: tuple[Array, ...]
    sizes: tuple[Array, ...]
    rows: Array
    ends: tuple[Array, ...]
    chunks: tuple[Array, ...]

    def flat(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def prepared(
    plan: LoopPlan, spans: Spans | DeviceSpans, geometry: Geometry, float64: bool, slots: Mapping[str, Any],
    tables: Mapping[str, Any], target: Target, wanted: frozenset[str] = frozenset(), low: bool = False,
) -> tuple[Static, Numbers]:  # fmt: skip
    """Divide a call into its compiled part and its data."""
    import jax.numpy as jnp

    if plan.int64 and not int64_enabled():
        raise LoweringError(
            "an index of this mask may leave 32 bits and JAX has 64-bit integers switched off; "
            'set jax.config.update("jax_enable_x64", True) or shrink the numbers in the mask'
        )
    work = schedule(spans, geometry, (target.block_q, target.block_k))
    static = Static(
        plan, geometry.scale, min(target.block_q, geometry.q_len), work.batches, work.heads, work.bodies, work.once,
        plan.int64, float64, target.block_k if isinstance(spans, DeviceSpans) else None, wanted, low,
    )  # fmt: skip
    return static, Numbers(
        slots=tuple(scalar(s.type, slots[s.name], plan.int64, float64) for s in plan.slots),
        tables=tuple(jnp.asarray(tables[t.name]) for t in plan.tables),
        origin=tuple(scalar(INT, x, plan.int64, float64).reshape(-1) for x in geometry.origin),
        sizes=tuple(scalar(INT, x, plan.int64, float64) for x in geometry.full),
        rows=work.rows, ends=work.ends, chunks=work.chunks,
    )  # fmt: skip


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
        import jax.numpy as jnp
        from jax import lax

        x = jnp.full(shape, value, self.static.dtype if dtype is None else dtype)
        return lax.pcast(x, self.axes, to="varying") if self.axes else x

    @property
    def steps(self) -> Any:
        """The number of rows of tiles in all."""
        return len(self.numbers.rows)

    def place(self, r: Array) -> tuple[Array, Array, Array]:
        """The first batch entry and head of row r, and its tile of queries."""
        rows = self.numbers.rows
        return rows[r, 0], rows[r, 1], rows[r, 2]

    def row(self, r: Array) -> TileRow:
        import jax.numpy as jnp

        b, h, tile = self.place(r)
        start = tile * self.static.block_q
        heads = jnp.arange(self.kvs * self.groups, dtype=jnp.int32).reshape(1, self.kvs, self.groups, 1, 1)
        batches = jnp.arange(self.static.batches, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
        queries = start + jnp.arange(self.static.block_q, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        b0, h0, q0, k0 = (x.reshape(-1, 1, 1, 1, 1) for x in self.numbers.origin)
        env = {**self.constants, "b": b0 + b + batches, "h": h0 + h + heads, "q": self._per_batch(q0 + queries, b)}
        return TileRow(b, h, h // self.group, start, env, self._per_batch(k0, b))

    def _per_batch(self, x: Array, b: Array) -> Array:
        """The entries of the current batches, where there is one per batch."""
        from jax import lax

        batches = self.static.batches
        return x if x.shape[0] <= batches else lax.dynamic_slice_in_dim(x, b, batches)

    def walk(self, r: Array) -> Iterator[Loop]:
        static, numbers = self.static, self.numbers
        if static.block_k is not None:
            yield from of_records(static.bodies, numbers.ends[0][r], static.block_k, self.kv_len)
            return
        for body, end, listed in zip(static.bodies, numbers.ends, numbers.chunks):
            yield body, end[r], end[r + 1], _reader(listed)

    def visit(self, r: Array, step: Any, state: Any) -> Any:
        """Run `step(body, (start, first, stop), state)` for every chunk of row r."""
        from jax import lax

        for body, begin, end, chunk in self.walk(r):
            if self.static.once:
                state = step(body, chunk(r), state)
            else:
                state = lax.fori_loop(begin, end, lambda i, s, b=body, c=chunk: step(b, c(i), s), state)
        return state

    # -- tiles of arrays: turned heads outside as they are read and back as they are written, since a whole array
    # -- turned would be memory that the system hands out page by page at every call

    def padded(self, x: Array, axis: int = 1, value: float = 0.0) -> Array:
        """The array `x` padded to a whole number of tiles."""
        import jax.numpy as jnp

        width = [(0, 0)] * x.ndim
        width[axis] = (0, self.length - self.q_len)
        return jnp.pad(x, width, constant_values=value) if self.length > self.q_len else x

    def queries(self, x: Array, row: TileRow) -> Array:
        """A tile of [batch, length, heads, n], as [batch, kv head, group * query, n]."""
        from jax import lax

        shape = (self.static.batches, self.static.block_q, self.kvs * self.groups, x.shape[-1])
        tile = lax.dynamic_slice(x, (row.b, row.start, row.h, _zero()), shape)
        tile = tile.reshape(*shape[:2], self.kvs, self.groups, shape[-1]).transpose(0, 2, 3, 1, 4)
        return tile.reshape(shape[0], self.kvs, -1, shape[-1]).astype(self.static.dtype)

    def lines(self, x: Array, row: TileRow) -> Array:
        """A tile of [batch, heads, length], as [batch, kv head, group, query]."""
        from jax import lax

        shape = (self.static.batches, self.kvs * self.groups, self.static.block_q)
        return lax.dynamic_slice(x, (row.b, row.h, row.start), shape).reshape(self.part)

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The part [batch, kv head, group, query] of one step."""
        return self.static.batches, self.kvs, self.groups, self.static.block_q

    def keys(self, x: Array, row: TileRow, start: Array, width: int) -> Array:
        """A tile of [batch, length, kv heads, n], or of a pool, as [batch, kv head, key, n]."""
        from jax import lax

        shape = (self.static.batches, width, self.kvs, x.shape[-1])
        if self.pages is None:
            tile = lax.dynamic_slice(x, (row.b, start, row.kv, _zero()), shape)
        else:
            tile = self._paged(self.pages, x, row, start, shape)
        return tile.transpose(0, 2, 1, 3).astype(self.static.dtype)

    def _paged(self, pages: Array, x: Array, row: TileRow, start: Array, shape: tuple[int, ...]) -> Array:
        """A tile [batch, key, kv head, n] of a pool [pages, tokens, kv heads, n]."""
        import jax.numpy as jnp
        from jax import lax

        page = self.static.plan.page
        places = start + jnp.arange(shape[1], dtype=jnp.int32)
        mine = lax.dynamic_slice_in_dim(pages, row.b, shape[0])[:, places // page]
        heads = lax.dynamic_slice_in_dim(x, row.kv, shape[2], 2)
        return heads.at[mine, places % page].get(mode="clip")

    def put_queries(self, whole: Array, tile: Array, row: TileRow) -> Array:
        """Write a tile of queries: the inverse of `queries`."""
        from jax import lax

        batches, _, groups, block = self.part
        tile = tile.reshape(batches, self.kvs, groups, block, -1).transpose(0, 3, 1, 2, 4)
        tile = tile.reshape(batches, block, self.kvs * groups, -1).astype(whole.dtype)
        return lax.dynamic_update_slice(whole, tile, (row.b, row.start, row.h, _zero()))

    def put_lines(self, whole: Array, tile: Array, row: TileRow) -> Array:
        from jax import lax

        tile = tile.reshape(self.static.batches, self.kvs * self.groups, self.static.block_q)
        return lax.dynamic_update_slice(whole, tile, (row.b, row.h, row.start))

    # -- scores --

    def scores(
        self, row: TileRow, body: Body, chunk: tuple[Array, Array, Array], q_tile: Array, k_tile: Array
    ) -> tuple[Array, dict[str, Array]]:
        """The (modified scores [batch, kv head, group, query, key], -inf where hidden; values Exprs read there)."""
        import jax.numpy as jnp

        plan, (start, first, stop) = self.static.plan, chunk
        s = dot(q_tile, k_tile, (3, 3)).reshape(*self.part, body.width)
        local = start + jnp.arange(body.width, dtype=jnp.int32)
        env = {**row.env, "k": row.k_origin + local, "score": s}
        if plan.score is not None:
            s = jnp.broadcast_to(self.value(plan.score, env, rounded=True), s.shape)
        if body.partial:
            seen = (local >= first) & (local < stop)
            if plan.mask is not None:
                seen &= self.value(plan.mask, env)
            s = jnp.where(seen, s, -jnp.inf)
        return s, env

    def value(self, e: Expr, env: Mapping[str, Array], rounded: bool = False) -> Array:
        kinds = {"int64": self.static.int64, "float64": self.static.float64}
        return evaluate(e, env, self.tables, **kinds, rounded=rounded)

    def survivors(self, env: Mapping[str, Array]) -> Array | None:
        """The positions that dropout keeps; None: all."""
        return None if self.static.plan.kept is None else self.value(self.static.plan.kept, env)

    def weights(self, env: Mapping[str, Array]) -> Array | None:
        """The factors of weights, once summed; None: no factors."""
        return None if self.static.plan.weight is None else self.value(self.static.plan.weight, env)

    @property
    def keep(self) -> Array | float:
        """The factor of the weights that dropout keeps."""
        rate = self.static.plan.rate
        return 1.0 if rate is None else 1.0 / (1.0 - self.constants[rate])


def _zero() -> Array:
    import jax.numpy as jnp

    return jnp.int32(0)  # the indices of a slice have one type


def _reader(chunks: Array) -> Chunk:
    return lambda i: (chunks[i, 0], chunks[i, 1], chunks[i, 2])


def varying_axes(x: Array) -> tuple[str, ...]:
    """The mesh axes of an enclosing `shard_map` along which `x` differs between devices."""
    import jax

    kind = jax.typeof(x)
    kind = getattr(kind, "manual_axis_type", kind)
    return tuple(sorted(getattr(kind, "varying", getattr(kind, "vma", ()))))
