"""Prints the forward kernel for Hopper (Pallas, Mosaic GPU) of a LoopPlan, as the text of a module.

A program owns a row of tiles: BLOCK_Q queries, half of them for each of the two warpgroups that compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, uses, walk
from frisket.lowering.kernels.features import PALLAS_GPU, missing
from frisket.lowering.kernels.inputs import TableInputs, roots
from frisket.lowering.kernels.text import parts
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target
from frisket.lowering.planner.planner import DeviceSpans

from .kernel import BARRIERS, MOST, SHARED, SWIZZLE, GpuKernel, dims

TEXT = parts(__package__, "forward")
SKEWED = 512 * 2**20  # bytes that tables of distances may take, once they are skewed
LOG2E = "1.4426950408889634"


class GpuWalk(NamedTuple):
    """The spans as a kernel reads them, int32: `slice_of` [batch, heads]; `order` [slices, rows], the rows of a slice
    with the longest first. `count` [slices, rows, 2], runs and tiles of a row; `records` [slices, rows, runs, 4]."""

    slice_of: Any
    order: Any
    count: Any
    records: Any

    def in_order(self) -> GpuWalk:
        """The walk with `count` and `records` in the order of `order` too: a program that walks its own row alone reads
        them without waiting for the row's number."""
        order = self.order[..., None]
        xp: Any = np
        if not isinstance(order, np.ndarray):
            import jax.numpy as xp

        count = xp.take_along_axis(self.count, order, 1)
        return self._replace(count=count, records=xp.take_along_axis(self.records, order[..., None], 1))


def walked(spans: Spans | DeviceSpans) -> GpuWalk:
    """The walk of `spans`, in arrays of the same framework: numpy's or JAX's, traced or not."""
    xp: Any = np
    if not isinstance(spans.bounds, np.ndarray):
        import jax.numpy as xp

    tiles = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1)
    count = xp.stack([spans.count, tiles], -1).astype(xp.int32)
    # stable: rows of equal work come in one order on every run
    order = xp.argsort(-tiles, axis=-1, stable=True).astype(xp.int32)
    return GpuWalk(spans.slice_of, order, count, spans.bounds)


def stages(block_q: int, block_k: int, dim: int, v_dim: int) -> int:
    """The number of tiles of keys and values that fit together with the queries."""
    # a result of the size of the queries takes their room
    used = 2 * block_q * (dim + (v_dim if v_dim != dim else 0)) + 12 * block_q + BARRIERS
    return min(MOST, (SHARED - used) // (2 * block_k * (dim + v_dim)))


def refused(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The reason why no kernel for Hopper computes a call, or nothing. `shapes` are the shapes of the plan's tables."""
    # without a mask every key is seen, so each was written
    read = plan if plan.mask is not None else replace(plan, unwritten=False)
    return missing(PALLAS_GPU, read, geometry, dtype) or _refused_lookup(plan, geometry)


def _refused_lookup(plan: LoopPlan, g: Geometry) -> str:
    inputs = TableInputs(roots(plan))
    lookup = next((n for n in inputs.left() if n.op == "lookup"), None)
    if lookup is not None:
        source = next(t.source for t in plan.tables if t.name == lookup.name)
        return missing(PALLAS_GPU, needed=["pair lookups"], source=source)
    for e in inputs.distances:
        used = {v for n in walk(e) for v in uses(n)}
        size = (g.batch if "b" in used else 1) * (g.heads if "h" in used else 1) * SWIZZLE * 4 * (g.q_len + g.kv_len)
        if size > SKEWED:
            return (
                f"values by q - k take {size >> 20} MiB in kernels for Hopper, for {g.q_len} queries by {g.kv_len} "
                f'keys, at most {SKEWED >> 20}; use backend="triton"'
            )
    return ""


def check_tile(target: Target, geometry: Geometry) -> None:
    """Raise where a kernel for Hopper does not support a tile."""
    block_q, block_k = target.block_q, target.block_k
    if block_q not in (128, 256) or block_k not in (64, 128, 192, 256):
        raise LoweringError(
            f"tiles of kernels for Hopper have 128 or 256 queries and 64, 128, 192 or 256 keys, not {block_q} x "
            f"{block_k}; pass tile=(128, 128)"
        )
    dim, v_dim = dims(geometry.head_dim), dims(geometry.v_dim)
    if stages(block_q, block_k, dim, v_dim) < 2:
        raise LoweringError(
            f"a tile of {block_q} x {block_k} with head dims of {dim} leaves no shared memory of a Hopper to read "
            "ahead; pass a smaller tile"
        )


def emit(
    plan: LoopPlan,
    target: Target,
    g: Geometry,
    dtype: str,
    sinks: bool = False,
    interpreted: bool = False,
    lse_residual: bool = False,
) -> str:
    """The source of a module, whose `attention_forward` gives (out, lse, largest score), and with `lse_residual` what
    rounding took from lse. The same input gives the same text, which holds no length. `interpreted` text runs in Mosaic
    GPU's interpreter, which has less."""
    check_tile(target, g)
    if why := refused(plan, g, dtype, {}):
        raise LoweringError(why)
    return GpuForward(plan, target, g, interpreted, sinks, lse_residual).text()


@dataclass(eq=False)
class GpuForward(GpuKernel):
    """The forward kernel. A program walks the records of its row of tiles, of each first the tiles at its borders, with
    the mask as a predicate, then the full ones without. One counter of steps through all records says which place of
    the ring is meant. The two warpgroups that compute take turns: while one's products are in the tensor cores the
    other computes its softmax."""

    sinks: bool
    lse_residual: bool

    name, title, does, axis = "attention_forward", "forward", "computes", "head"
    length, semantics, walk, template = "kv_len", "Warpgroup", "GpuWalk.in_order", TEXT

    def text(self) -> str:
        plan, e, factor, own_result = self.plan, self.e, self.e.factor, self.dim != self.dim_v
        ahead = stages(self.target.block_q, self.target.block_k, self.dim, self.dim_v)
        folded = plan.score is None and self.geometry.scale > 0  # a negative scale would turn maxima into minima
        unit = f"SCALE * {LOG2E}" if folded else f"{factor!r} * {LOG2E}" if factor != 1.0 else LOG2E
        flags = {"sinks": self.sinks, "lse_residual": self.lse_residual, "guard": plan.guard}
        return self.module(
            "kernel", min(self.target.num_stages, ahead), **flags, rows=2 + self.lse_residual,
            unit=[f"UNIT = {unit}  # the softmax is to base 2"],
            score=[] if folded else [*e.each(plan, plan.score), *self.score("s")],
            seen=self.tile_lines(plan.mask, "x", "s = jnp.where({}, s, -jnp.inf)"),
            kept=self.tile_lines(plan.keep_mask, "z", "weights = jnp.where({}, p, 0.0)"),
            low="(top - jnp.maximum(lse * LOG2E, LOWEST) + jnp.log2(total)) * LN2",
            low_ref=" low_ref," * self.lse_residual, named=", low" * self.lse_residual,
            divisor="total" if plan.rate is None else f"(total * (1.0 - {plan.rate}))",
            result="result" if own_result else "query", room=" result," * own_result,
            sinks_argument=" sinks=None," * self.sinks, operands="sinks, " * self.sinks + "query, key, value",
            returned="found[0][:, :q_len, :, :v_dim], *(x[..., :q_len] for x in found[1:])",
        )  # fmt: skip

    def tile_lines(self, root: Expr | None, temporary: str, form: str) -> list[str]:
        """The lines of an expression with those of what it reads of a tile."""
        return [] if root is None else [*self.e.each(self.plan, root), *self.assigned(root, temporary, form)]
