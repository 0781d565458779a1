"""The XLA executor for lengths and batches that are symbols of `jax.export`: forward.

Nothing is laid out in advance. A row of tiles computes from the intervals of the mask (`planner.planner`) which keys
it reads, and visits them with the predicate. Arrays get one tile of padding more than they may need, so that their
shapes stay plain sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from frisket.dsl.ir import find
from frisket.dsl.types import INT
from frisket.lowering.analysis.rows import Interval
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import KernelInputs, Target

from .forward import attended
from .tiles import EDGE, Body, Loop, Numbers, Static, TileRow, XlaTiles, scalar, slots_and_tables

Array = Any  # a jax.Array, traced
TARGET = Target("xla", 128, EDGE)
# with the predicate alone: a full tile is not known in advance
KEYS = Body(EDGE, True)


@dataclass(frozen=True)
class SymbolicRows:
    """Rows whose keys are intervals: `seen` are expressions over `values`, or None where a row sees all keys. The sizes
    are traced values."""

    seen: tuple[Interval, ...] | None
    values: Mapping[str, Any]
    batch: Array
    q_len: Array
    kv_len: Array


class SymbolicTiles(XlaTiles):
    """Rows and their keys, of one batch entry and all heads a step."""

    def __init__(self, static: Static, numbers: Numbers, q: Array, k: Array, rows: SymbolicRows) -> None:
        super().__init__(static, numbers, q, k)
        self.rows = rows
        self.length = self.q_len + static.block_q
        self.tiles = (rows.q_len + static.block_q - 1) // static.block_q

    @property
    def steps(self) -> Array:
        return self.rows.batch * self.tiles

    def place(self, r: Array) -> tuple[Array, Array, Array]:
        return r // self.tiles, 0 * r, r % self.tiles  # 0 * r: a zero of the trace's own type

    def padded(self, x: Array, axis: int = 1, value: float = 0.0) -> Array:
        return longer(x, self.static.block_q)

    def walk(self, r: Array) -> Iterator[Loop]:
        lo, hi = self._keys(self.row(r))
        count = self.jnp.maximum(hi - lo + EDGE - 1, 0) // EDGE  # rounded up, and not negative where a row sees nothing
        yield KEYS, 0, count, lambda i: (lo + i * EDGE, lo + i * EDGE, self.jnp.minimum(lo + (i + 1) * EDGE, hi))

    def _keys(self, row: TileRow) -> tuple[Array, Array]:
        """The keys [lo, hi) outside of which no query of the row sees any."""
        n = self.rows.kv_len
        if self.rows.seen is None:
            return self.jnp.zeros_like(n), n
        q1 = self.jnp.minimum(row.start + self.static.block_q, self.rows.q_len) - 1
        env = {**row.env, **self.rows.values, "q0": row.start, "q1": q1, "k0": self.jnp.zeros_like(n), "k1": n - 1}
        lo, hi = n, self.jnp.zeros_like(n)
        for pair in self.rows.seen:
            first, last = self.jnp.broadcast_arrays(*(self._value(e, env) for e in pair))
            some = last >= first
            lo = self.jnp.minimum(lo, self.jnp.where(some, first, n).min())
            hi = self.jnp.maximum(hi, self.jnp.where(some, self.jnp.minimum(last, n - 1) + 1, 0).max())
        # the slice begins inside the array, whatever an end says
        return self.jnp.maximum(lo, 0).astype(n.dtype), hi.astype(n.dtype)

    def _value(self, e: Any, env: Mapping[str, Array]) -> Array:
        tables = {n.name: self.jnp.asarray(self.rows.values[n.name]) for n in find(e, "lookup")}
        return evaluate(e, env, tables, **self.static.widths)


def longer(x: Array, n: int) -> Array:
    """The array `x` with n zeros added along its length."""
    import jax.numpy as jnp

    return jnp.concatenate([x, jnp.zeros((x.shape[0], n, *x.shape[2:]), x.dtype)], 1)


def forward(
    inputs: KernelInputs, seen: tuple[Interval, ...] | None, values: Mapping[str, Any], q: Array, k: Array, v: Array
) -> tuple[Array, Array, Array]:
    """The forward (out, lse, top) as in `xla.forward`, in shapes whose batch and lengths are symbols, without spans.

    `seen` are the intervals of keys that a row of tiles sees, as expressions over `values`; None: all keys."""
    import jax.numpy as jnp

    plan, g = inputs.plan, inputs.geometry
    static = Static(plan, g.scale, inputs.target.block_q, 1, g.heads, (KEYS,), False, q.dtype == jnp.float64)
    whole = jnp.int64 if plan.int64 else jnp.int32
    sizes = tuple(jnp.asarray(n, whole) for n in (g.batch, g.heads, g.q_len, g.kv_len))
    zero = scalar(INT, 0, **static.widths).reshape(-1)
    numbers = Numbers(*slots_and_tables(inputs, static), (zero,) * 4, sizes, rows=None, ends=(), chunks=())
    rows = SymbolicRows(seen, values, *(jnp.asarray(n, jnp.int32) for n in (g.batch, g.q_len, g.kv_len)))
    k, v = longer(k, EDGE), longer(v, EDGE)
    out, lse, top = attended(SymbolicTiles(static, numbers, q, k, rows), q, k, v, inputs.sinks)
    return out, lse, top
