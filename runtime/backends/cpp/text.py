"""The texts of kernels of C++."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from frisket.lowering.aten.expr import distance_only
from frisket.lowering.kernels.cpp.backward import KERNELS
from frisket.lowering.kernels.cpp.tiles import long_runs, pays, tiles
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target
from frisket.runtime.machine.cpp_cpu import lacking


def target(plan: Any, g: Geometry, dtype: str, tile: Any, narrow: bool, exact: bool = False) -> Target:
    """The tiles of a call, or the caller's, and how float32 is multiplied: `exact`, by vectors alone."""
    six = not exact and pays(g, dtype, narrow) and not lacking("amx") and _in_long_runs(plan)
    block_q, block_k = tile or tiles(g, dtype, narrow, six)
    return Target("cpp", block_q, block_k, precision="bf16x6" if six else "ieee")


def _in_long_runs(plan: Any) -> bool:
    """Whether rows see long runs of keys; of masks of q - k alone, a plan's `narrow` has told the others."""
    mask = None if plan is None else plan.mask if isinstance(plan, LoopPlan) else plan.simplified[0]
    return mask is None or distance_only(mask) or long_runs(mask)


def call_target(plan: Any, g: Geometry, dtype: str, tile: Any, tuning: Any, device: Any, arch: Any) -> Target:
    """The target of a call of torch."""
    return target(plan, g, dtype, tile, plan is not None and plan.narrow, tuning.precision == "ieee")


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The forward kernel's text, and its target."""
    return KERNELS["forward"](plan, target, g.head_dim, g.v_dim, dtype, g.kv_dtype).source(), target


def ahead(plan: LoopPlan, target: Target, g: Geometry, dtype: str, kind: str, permuted: bool) -> str:
    """The text that calls load whose keys have the dtype of queries. `permuted`: it reads rows by tables."""
    return str(KERNELS[kind](plan, target, g.head_dim, g.v_dim, dtype, named=False, permuted=permuted).source())
