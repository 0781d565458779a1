"""What becomes of a mask and a score mod for one geometry and backend: stages, kernel text."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from frisket.lowering.plan import Geometry, LoopPlan, Target
from frisket.lowering.stages import Pair, Stages
from frisket.runtime.plans.call import AnyPlan
from frisket.runtime.plans.compiled import Work
from frisket.runtime.plans.device import FlatPlan, FlatWork

if TYPE_CHECKING:
    from frisket.lowering.kernels.triton.writer import Dims
    from frisket.runtime.backends.triton.decode import Shares


def text_of(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = ()
) -> tuple[str, Target]:
    """The kernel's text and the target it runs with; the text is empty where library calls run. `learned` are the
    user's names of what gradients flow to beside the arrays."""
    if target.backend == "cpp":
        from frisket.lowering.kernels.cpp import forward as cpp

        return cpp.emit(plan, target, g.head_dim, g.v_dim, dtype, g.kv_dtype), target
    if target.backend == "triton":
        from frisket.lowering.kernels.triton import decode as triton_decode
        from frisket.lowering.kernels.triton import module as triton

        values: list[Any] = [*plan.tables, *plan.slots]
        read = [x for x in values if x.source in learned]
        live = tuple(s.name for s in plan.slots if s in read)
        dims, few = dims_of(g, dtype, live), few_queries(plan, target, g, dtype)
        if few is not None:
            return triton_decode.emit(plan, few.target, dims, packs=few.pack > 1, sinks=sinks), few.target
        wanted = triton.ARRAYS.union(x.name for x in read)
        return triton.emit(plan, target, dims, wanted=wanted, sinks=sinks), target
    if target.backend == "pallas-tpu":
        from frisket.lowering.kernels.pallas_tpu import backward as pallas_tpu_backward
        from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu

        known: list[Any] = [*plan.tables, *plan.slots]
        names = {*"qkv", *(x.name for x in known if x.source in learned)}
        text = pallas_tpu.emit(plan, target, g, dtype, sinks)
        if g.kv_dtype or plan.weight is not None or plan.pages is not None:  # without gradients
            return text, target
        return f"{text}\n\n{pallas_tpu_backward.emit(plan, target, g, dtype, names)}", target
    if target.backend == "pallas-mosaic-gpu":
        from frisket.lowering.kernels.pallas_gpu import forward as pallas_gpu

        return pallas_gpu.emit(plan, target, g, dtype, sinks), target
    return "", target


def dims_of(g: Geometry, dtype: str, live: tuple[str, ...] = ()) -> Dims:
    """What of the shapes Triton's kernels depend on, and the slots whose values they load."""
    from frisket.lowering.kernels.triton.writer import Dims

    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype, live)


def few_queries(plan: LoopPlan, target: Target, g: Geometry, dtype: str) -> Shares | None:
    """How Triton divides a call of few queries, on the GPU at hand or an H100; None where there are many, though
    such a call is divided too where its grid leaves much of the GPU idle."""
    from frisket.runtime.backends.triton.decode import PACK, shares
    from frisket.runtime.backends.triton.tiles import processors

    return None if g.q_len >= PACK else shares(plan, None, g, target, dims_of(g, dtype), processors())


def stages_of(
    made: Work, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = ()
) -> Stages:
    text, target = text_of(made.plan, target, g, dtype, sinks, learned)
    m, s = made.program.mask, made.program.score
    written = Pair(None if m is None else m.expr, None if s is None else s.expr)
    return Stages(written, Pair(*made.simplified), made.layout.facts, made.layout, made.plan, target, text, made.rules)


def show(names: tuple[str, ...], plan: AnyPlan, made: Work | FlatWork, target: Target, g: Geometry, dtype: str) -> None:
    """Print these stages to stderr, once for each target of a plan."""
    if target in plan.shown:
        return
    plan.shown.add(target)
    if isinstance(made, FlatWork):
        assert isinstance(plan, FlatPlan)
        given = plan.given if plan.key.framework == "torch" else {}
        learned = [n for n, x in given.items() if x.is_floating_point()]
        text, runs = text_of(made.plan, target, g, dtype, learned=learned)
        stages = plan.stages(made, runs, text)
    else:
        stages = stages_of(made, target, g, dtype)
    print("\n\n".join(stages.text(n) for n in names), file=sys.stderr)
