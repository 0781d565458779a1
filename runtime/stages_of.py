"""What becomes of a mask and a score mod for one geometry and backend: stages, kernel text."""

from __future__ import annotations

import sys

from frisket.lowering.plan import Geometry, LoopPlan, Target
from frisket.lowering.stages import Pair, Stages

from .bind import Work
from .call import AnyPlan
from .flat_plan import FlatPlan, FlatWork


def text_of(plan: LoopPlan, target: Target, g: Geometry, dtype: str) -> str:
    """The kernel's text; empty where library calls run."""
    if target.backend == "cpp":
        from frisket.lowering.emit import cpp

        return cpp.emit(plan, target, g.head_dim, g.v_dim, dtype)
    if target.backend == "triton":
        from frisket.lowering.emit import triton_forward
        from frisket.lowering.emit.triton_writer import Dims

        return triton_forward.emit(plan, target, Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads))
    if target.backend == "pallas-tpu":
        from frisket.lowering.emit import pallas_tpu

        return pallas_tpu.emit(plan, target, g, dtype)
    return ""


def stages_of(made: Work, target: Target, g: Geometry, dtype: str) -> Stages:
    text = text_of(made.plan, target, g, dtype)
    m, s = made.subject.mask, made.subject.score
    written = Pair(None if m is None else m.expr, None if s is None else s.expr)
    return Stages(written, Pair(*made.simplified), made.layout.facts, made.layout, made.plan, target, text, made.rules)


def show(names: tuple[str, ...], plan: AnyPlan, made: Work | FlatWork, target: Target, g: Geometry, dtype: str) -> None:
    """Print these stages to stderr, once for each target of a plan."""
    if target in plan.shown:
        return
    plan.shown.add(target)
    if isinstance(made, FlatWork):
        assert isinstance(plan, FlatPlan)
        stages = plan.stages(made, target, text_of(made.plan, target, g, dtype))
    else:
        stages = stages_of(made, target, g, dtype)
    print("\n\n".join(stages.text(n) for n in names), file=sys.stderr)
