"""The text of Triton's kernels for one geometry."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from frisket.lowering.kernels.triton import decode, module
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, Target

from .decode import PACK, Shares, shares
from .tiles import processors


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = ()
) -> tuple[str, Target]:
    """The module's text and the target it runs with. `learned` are the user's names of what gradients flow to beside
    the arrays."""
    dims = dims_of(plan, g, dtype, learned)
    if (few := _few_queries(plan, target, g, dtype)) is not None:
        own = replace(few.target, splits=0) if few.balanced else few.target
        return decode.emit(plan, own, dims, packs=few.pack > 1, sinks=sinks, balanced=few.balanced), few.target
    wanted = module.ARRAYS.union(dims.live, (t.name for t in plan.tables if t.source in learned))
    return module.emit(plan, target, dims, wanted=wanted, sinks=sinks), target


def dims_of(plan: LoopPlan, g: Geometry, dtype: str, learned: Collection[str] = ()) -> Dims:
    """The part of a call that kernels' texts depend on. They load the values of slots that gradients flow to."""
    live = tuple(s.name for s in plan.slots if s.source in learned)
    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype, live)


def _few_queries(plan: LoopPlan, target: Target, g: Geometry, dtype: str) -> Shares | None:
    """How Triton divides a call of few queries, on the GPU at hand or an H100; None where there are many, though
    such a call is divided too where its grid leaves much of the GPU idle."""
    return None if g.q_len >= PACK else shares(plan, None, g, target, dims_of(plan, g, dtype), processors())
