"""The text of a kernel of C++."""

from __future__ import annotations

from collections.abc import Collection

from frisket.lowering.kernels.cpp.forward import CppKernel
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The forward kernel's text, and its target."""
    return CppKernel(plan, target, g.head_dim, g.v_dim, dtype, g.kv_dtype).source(), target
