"""The text of Triton's kernels for one geometry."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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
    values: list[Any] = [*plan.tables, *plan.slots]
    read = [x for x in values if x.source in learned]
    live = tuple(s.name for s in plan.slots if s in read)  # slots whose values the kernels load
    dims = Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype, live)
    if (few := _few_queries(plan, target, g, dtype)) is not None:
        return decode.emit(plan, few.target, dims, packs=few.pack > 1, sinks=sinks), few.target
    wanted = module.ARRAYS.union(x.name for x in read)
    return module.emit(plan, target, dims, wanted=wanted, sinks=sinks), target


def _few_queries(plan: LoopPlan, target: Target, g: Geometry, dtype: str) -> Shares | None:
    """How Triton divides a call of few queries, on the GPU at hand or an H100; None where there are many, though
    such a call is divided too where its grid leaves much of the GPU idle."""
    dims = Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype)
    return None if g.q_len >= PACK else shares(plan, None, g, target, dims, processors())
