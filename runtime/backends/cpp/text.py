"""The texts of kernels of C++."""

from __future__ import annotations

from collections.abc import Collection

from frisket.lowering.kernels.cpp.backward import BackwardKernel
from frisket.lowering.kernels.cpp.forward import CppKernel
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The forward kernel's text, and its target."""
    return CppKernel(plan, target, g.head_dim, g.v_dim, dtype, g.kv_dtype).source(), target


def ahead(plan: LoopPlan, target: Target, g: Geometry, dtype: str, kind: str, moved: bool) -> str:
    """The text that calls load whose keys have the dtype of queries. `moved`: it reads rows by tables."""
    kernel = BackwardKernel if kind == "backward" else CppKernel
    return kernel(plan, target, g.head_dim, g.v_dim, dtype, named=False, moved=moved).source()
