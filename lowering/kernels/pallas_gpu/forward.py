"""Prints the forward kernel for Hopper (Pallas, Mosaic GPU) of a LoopPlan, as the text of a module.

A program owns a row of tiles: BLOCK_Q queries, half of them for each of the two warpgroups that compute; a third one
reads tiles of keys and values ahead into a ring in shared memory. All three walk the records of the row, of each first
the tiles at its borders, with the mask as a predicate, then the full ones without; one counter of steps through all
records says which place of the ring is meant. The two that compute take turns: while one's products are in the tensor
cores the other computes its softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, uses, walk
from frisket.lowering.dtypes import HALVES
from frisket.lowering.kernels.pallas_tpu import inputs as pallas_inputs
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target
from frisket.lowering.planner.planner import DeviceSpans

from .expr import Expressions

TEXT = parts(__package__, "forward")
SWIZZLE = 64  # dims of 16 bits that one swizzle of 128 bytes holds
SHARED = 227 * 1024  # bytes of shared memory of a program
BARRIERS = 2560  # of it, for barriers and the reductions of rows
MOST = 4  # tiles read ahead, at most
SKEWED = 512 * 2**20  # bytes that tables of distances may take, once they are skewed
INEXACT = {"sin", "cos", "tan", "log", "log2", "log1p", "pow", "rsqrt", "sqrt"}  # the machine's own are too rough


class GpuWalk(NamedTuple):
    """The spans as a kernel reads them, int32: `slice_of` [batch, heads]; `order` [slices, rows], the rows of a slice
    with the longest first; `count` [slices, rows, 2], runs and tiles of a row; `records` [slices, rows, runs, 4]."""

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


def dims(dim: int) -> int:
    """The head sizes a kernel computes with, zeros behind a head's own."""
    return -(-dim // SWIZZLE) * SWIZZLE  # TMA copies rows of whole swizzles, and zeros add nothing to a product


def stages(block_q: int, block_k: int, dim: int, v_dim: int) -> int:
    """The number of tiles of keys and values that fit beside the queries."""
    # a result of the size of the queries takes their room
    used = 2 * block_q * (dim + (v_dim if v_dim != dim else 0)) + 12 * block_q + BARRIERS
    return min(MOST, (SHARED - used) // (2 * block_k * (dim + v_dim)))


def roots(plan: LoopPlan) -> list[Expr]:
    return [e for e in (plan.mask, plan.score, plan.keep_mask) if e is not None]


def refused(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The reason why no kernel for Hopper computes a call, or nothing. `shapes` are the shapes of the plan's tables."""
    if dtype not in HALVES:
        return (
            f'kernels for Hopper multiply bfloat16 and float16, not {dtype}; cast q, k and v, or use backend="triton"'
        )
    for name, dim in (("head", geometry.head_dim), ("value", geometry.v_dim)):
        if dim > 256:
            return f'{name} dims of kernels for Hopper are at most 256, not {dim}; use backend="triton"'
    if plan.int64:
        return (
            "an index of this mask may leave 32 bits, which kernels for Hopper count in; shrink the numbers in the "
            'mask, or use backend="triton"'
        )
    stored = {
        f"those of {geometry.kv_dtype}": geometry.kv_dtype != "",
        "pages of them": plan.pages is not None,
        "scales of values": plan.weight is not None,
        "some that may never have been written": plan.mask is not None and plan.unwritten,
    }
    for what, there in stored.items():
        if there:
            return (
                f'kernels for Hopper read keys and values as they are, and this call has {what}; use backend="triton"'
            )
    return _refused_lookup(plan, geometry)


def _refused_lookup(plan: LoopPlan, g: Geometry) -> str:
    inputs = pallas_inputs.place(roots(plan))
    lookup = next((n for n in inputs.left() if n.op == "lookup"), None)
    if lookup is not None:
        source = next(t.source for t in plan.tables if t.name == lookup.name)
        return (
            f"`{source}` is indexed by q and k together, and kernels for Hopper have no gather; index it by q, by k "
            'or by q - k alone, or use backend="triton"'
        )
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
    geometry: Geometry,
    dtype: str,
    sinks: bool = False,
    interpreted: bool = False,
    lse_residual: bool = False,
) -> str:
    """The source of a module, whose `attention_forward` gives (out, lse, largest score), and with `lse_residual` what
    rounding took from lse; the same input gives the same text, which holds no length. `interpreted` text runs in Mosaic
    GPU's interpreter, which has less."""
    check_tile(target, geometry)
    if why := refused(plan, geometry, dtype, {}):
        raise LoweringError(why)
    rough = not {n.op for root in roots(plan) for n in walk(root)} & INEXACT
    e = Expressions(roots(plan), tanh=target.tanh if rough else "exact")
    dim, v_dim = dims(geometry.head_dim), dims(geometry.v_dim)
    folded = plan.score is None and geometry.scale > 0  # a negative scale would turn maxima into minima
    operands = [*e.operands(plan), *["sinks"] * sinks]
    listed = ", ".join(["slice_of", "order", "count", "records", *operands])
    return filled(
        TEXT["forward"],
        text=[f"#     {line}" for line in (plan.text or "every key").splitlines()],
        block_q=target.block_q, block_k=target.block_k, dim=dim, dim_v=v_dim, group=geometry.heads // geometry.kv_heads,
        stages=min(target.num_stages, stages(target.block_q, target.block_k, dim, v_dim)),
        scale=repr(float(geometry.scale)),
        unit="SCALE * 1.4426950408889634" if folded else "1.4426950408889634",
        shared=_lines(TEXT["shared"], TEXT["interpreted"] if interpreted else TEXT["on_device"], *_readers(e)),
        products=["", "", *_lines(TEXT["products_interpreted"] if interpreted else TEXT["products"])],
        prelude=e.definitions(plan), refs=listed, operands=listed,
        arguments=f"slots=(), tables=(),{' sinks=None,' * sinks} interpret=None",
        once=e.once(plan),
        score=([] if folded else ["s *= SCALE"]) + _written(plan, e, plan.score, "y", "s = {}"),
        seen=_written(plan, e, plan.mask, "x", "s = jnp.where({}, s, -jnp.inf)"),
        kept=_written(plan, e, plan.keep_mask, "z", "weights = jnp.where({}, p, 0.0)"),
        guard=plan.guard, sinks=sinks, lse_residual=lse_residual, own_result=dim != v_dim,
        low="(top - jnp.maximum(lse * LOG2E, LOWEST) + jnp.log2(total)) * LN2",
        divisor="total" if plan.rate is None else f"(total * (1.0 - {plan.rate}))",
        low_ref=" low_ref," * lse_residual, named=", low" * lse_residual, rows=2 + lse_residual,
        before=[*pallas_inputs.before(plan, e.inputs), *e.lined(), *["sinks = jnp.asarray(sinks, Float)"] * sinks],
        result="query" if dim == v_dim else "result", room="" if dim == v_dim else " result,",
        fast=str(rough),
    )  # fmt: skip


def _lines(*texts: str) -> list[str]:
    return "".join(texts).strip("\n").splitlines()


def _readers(e: Expressions) -> list[str]:
    readers = [TEXT["pairs"]] if e.inputs.pairs else []
    down, across = ("q", "k") if e.down == "q" else ("k", "q")
    return [*readers, "\n" + filled(TEXT["distances"], down=down, across=across)] if e.inputs.distances else readers


def _written(plan: LoopPlan, e: Expressions, root: Expr | None, temporary: str, use: str) -> list[str]:
    """The lines of an expression and of the `use` of its value; none where there is no such expression."""
    if root is None:
        return []
    assignments, value = e.written(root, temporary)
    return [*e.each(plan, root), *assignments, use.format(value)]
