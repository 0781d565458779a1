"""The XLA executor for lengths and batches that are symbols of `jax.export`: forward.

Nothing is laid out in advance. A row of tiles computes from the intervals of the mask (`planner.intervals`) which keys
it reads, and visits them with the predicate. Arrays get one tile of padding more than they may need, so that their
shapes stay plain sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from frisket.dsl.ir import walk
from frisket.dsl.types import INT
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Geometry, LoopPlan
from frisket.lowering.planner.intervals import Interval

from .forward import attended
from .tiles import EDGE, Body, Loop, Numbers, Static, TileRow, XlaTiles, scalar

QUERIES = 128  # of a row of tiles
Array = Any  # a jax.Array, traced
# with the predicate alone: a full tile is not known in advance
KEYS = Body(EDGE, True)


@dataclass(frozen=True)
class Lengths:
    """The sizes of a call that are traced values: batch entries, queries, keys."""

    batch: Array
    q_len: Array
    kv_len: Array


class SymbolicTiles(XlaTiles):
    """Rows and their keys, of one batch entry and all heads a step."""

    def __init__(
        self, static: Static, numbers: Numbers, q: Array, k: Array, seen: tuple[Interval, ...] | None,
        values: Mapping[str, Any], lengths: Lengths,
    ) -> None:  # fmt: skip
        super().__init__(static, numbers, q, k)
        self.seen, self.values, self.lengths = seen, values, lengths
        self.length = self.q_len + static.block_q
        self.tiles = (lengths.q_len + static.block_q - 1) // static.block_q

    @property
    def steps(self) -> Array:
        return self.lengths.batch * self.tiles

    def place(self, r: Array) -> tuple[Array, Array, Array]:
        return r // self.tiles, 0 * r, r % self.tiles  # 0 * r: a zero of the trace's own type

    def padded(self, x: Array, axis: int = 1, value: float = 0.0) -> Array:
        return longer(x, self.static.block_q)

    def walk(self, r: Array) -> Iterator[Loop]:
        import jax.numpy as jnp

        lo, hi = self._keys(self.row(r))
        count = jnp.maximum(hi - lo + EDGE - 1, 0) // EDGE  # rounded up, and not negative where a row sees nothing
        yield KEYS, 0, count, lambda i: (lo + i * EDGE, lo + i * EDGE, jnp.minimum(lo + (i + 1) * EDGE, hi))

    def _keys(self, row: TileRow) -> tuple[Array, Array]:
        """The keys [lo, hi) outside of which no query of the row sees any."""
        import jax.numpy as jnp

        n = self.lengths.kv_len
        if self.seen is None:
            return jnp.zeros_like(n), n
        q1 = jnp.minimum(row.start + self.static.block_q, self.lengths.q_len) - 1
        env = {**row.env, **self.values, "q0": row.start, "q1": q1, "k0": jnp.zeros_like(n), "k1": n - 1}
        lo, hi = n, jnp.zeros_like(n)
        for pair in self.seen:
            first, last = jnp.broadcast_arrays(*(self._value(e, env) for e in pair))
            some = last >= first
            lo = jnp.minimum(lo, jnp.where(some, first, n).min())
            hi = jnp.maximum(hi, jnp.where(some, jnp.minimum(last, n - 1) + 1, 0).max())
        # the slice begins inside the array, whatever an end says
        return jnp.maximum(lo, 0).astype(n.dtype), hi.astype(n.dtype)

    def _value(self, e: Any, env: Mapping[str, Array]) -> Array:
        import jax.numpy as jnp

        tables = {n.name: jnp.asarray(self.values[n.name]) for n in walk(e) if n.op == "lookup"}
        return evaluate(e, env, tables, int64=self.static.int64, float64=self.static.float64)


def longer(x: Array, n: int) -> Array:
    """The array `x` with n zeros added along its length."""
    import jax.numpy as jnp

    return jnp.concatenate([x, jnp.zeros((x.shape[0], n, *x.shape[2:]), x.dtype)], 1)


def forward(
    plan: LoopPlan, seen: tuple[Interval, ...] | None, geometry: Geometry, q: Array, k: Array, v: Array,
    slots: Mapping[str, Any], tables: Mapping[str, Any], values: Mapping[str, Any], sinks: Array | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The forward (out, lse, top) as in `xla.forward`, in shapes whose batch and lengths are symbols.

    `seen` are the intervals of keys that a row of tiles sees, as expressions over `values`; None: all keys."""
    import jax.numpy as jnp

    float64, g = q.dtype == jnp.float64, geometry
    static = Static(plan, g.scale, QUERIES, 1, g.heads, (KEYS,), False, plan.int64, float64)
    whole = jnp.int64 if plan.int64 else jnp.int32
    sizes = [jnp.asarray(n, whole) for n in (g.batch, g.heads, g.q_len, g.kv_len)]
    zero = scalar(INT, 0, plan.int64, float64).reshape(-1)
    numbers = Numbers(
        slots=tuple(scalar(s.type, slots[s.name], plan.int64, float64) for s in plan.slots),
        tables=tuple(jnp.asarray(tables[t.name]) for t in plan.tables), origin=(zero,) * 4, sizes=tuple(sizes),
        rows=None, ends=(), chunks=(),
    )  # fmt: skip
    lengths = Lengths(*(jnp.asarray(n, jnp.int32) for n in (g.batch, g.q_len, g.kv_len)))
    k, v = longer(k, EDGE), longer(v, EDGE)
    out, lse, top = attended(SymbolicTiles(static, numbers, q, k, seen, values, lengths), q, k, v, sinks)
    return out, lse, top
