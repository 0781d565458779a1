"""The text of Triton's kernels for one geometry."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from frisket.lowering.kernels.triton import decode, module
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from .decode import PACK, shares
from .rows import listed_kernels
from .tiles import processors


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The module's text and the target it runs with. `learned` are the user's names of what gradients flow to beside
    the arrays; `spans` say which rows of tiles are long, so that a call divides them."""
    dims = dims_of(plan, g, dtype, learned)
    at = spans if g.q_len >= PACK else None  # a step of decoding is shown as where queries see all keys
    few = shares(plan, at, g, target, dims_of(plan, g, dtype), processors())  # of this machine's GPU or an H100
    if few is not None and g.q_len < PACK:
        decode_target = replace(few.target, splits=0) if few.balanced else few.target
        return decode.emit(
            plan, decode_target, dims, packs=few.pack > 1, sinks=sinks, balanced=few.balanced
        ), few.target
    grad_names = module.ARRAYS.union(dims.device_slots, (t.name for t in plan.tables if t.source in learned))
    listed = listed_kernels(plan, spans, g, target, processors()).difference(["attention_forward"] * (few is not None))
    return module.emit(plan, target, dims, grad_names=grad_names, sinks=sinks, listed=listed), target


def dims_of(plan: LoopPlan, g: Geometry, dtype: str, learned: Collection[str] = ()) -> Dims:
    """The part of a call that kernels' texts depend on. They load the values of slots that gradients flow to."""
    device_slots = tuple(s.name for s in plan.slots if s.source in learned)
    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype, device_slots)
