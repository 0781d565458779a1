"""The text of the Pallas kernels for TPUs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from frisket.dsl.ir import uses
from frisket.lowering.kernels.pallas_tpu import backward, forward
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from .forward import together


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The forward's text and, where there are gradients, the backward's, and their target."""
    known: list[Any] = [*plan.tables, *plan.slots]
    names = {*"qkv", *(x.name for x in known if x.source in learned)}
    sharing = plan.mask is None or "h" not in uses(plan.mask)
    source = forward.emit(plan, target, g, dtype, sinks, together=together(g, dtype, target.block_q) if sharing else 1)
    if g.kv_dtype or plan.weight is not None or plan.pages is not None:  # without gradients
        return source, target
    return f"{source}\n\n{backward.emit(plan, target, g, dtype, names)}", target
