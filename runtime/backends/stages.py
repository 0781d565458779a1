"""Stages of a mask and a score mod for one geometry and backend, up to the kernel's text."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from frisket.lowering.plan import Geometry, LoopPlan, Target
from frisket.lowering.stages import Pair, Stages
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.call import AnyPlan, Call
from frisket.runtime.plans.compiled import Work
from frisket.runtime.plans.device import FlatPlan, FlatWork

from .base import RECORDS
from .registry import target_of


def text_of(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = ()
) -> tuple[str, Target]:
    """The kernel's text and the target it runs with; the text is empty where library calls run. `learned` are the
    user's names of what gradients flow to beside the arrays."""
    emit = RECORDS[target.backend].text
    found: tuple[str, Target] = ("", target) if emit is None else emit(plan, target, g, dtype, sinks, learned)
    return found


def stages_of(
    work: Work, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = ()
) -> Stages:
    text, target = text_of(work.plan, target, g, dtype, sinks, learned)
    m, s = work.program.mask, work.program.score
    written = Pair(None if m is None else m.expr, None if s is None else s.expr)
    return Stages(written, Pair(*work.simplified), work.layout.facts, work.layout, work.plan, target, text, work.rules)


def show(names: tuple[str, ...], plan: AnyPlan, work: Work | FlatWork, target: Target, g: Geometry, dtype: str) -> None:
    """Print these stages to stderr, once for each target of a plan."""
    if target in plan.shown:
        return
    plan.shown.add(target)
    if isinstance(work, FlatWork):
        assert isinstance(plan, FlatPlan)
        given = plan.given if plan.key.framework == "torch" else {}
        learned = [n for n, x in given.items() if x.is_floating_point()]
        text, runs = text_of(work.plan, target, g, dtype, learned=learned)
        stages = plan.stages(work, runs, text)
    else:
        stages = stages_of(work, target, g, dtype)
    print("\n\n".join(stages.text(n) for n in names), file=sys.stderr)


def show_if_asked(call: Call, options: Options, device: Any = None) -> None:
    """Print the stages of a call that FRISKET_SHOW names."""
    if names := Settings.read().show:
        g, dtype = call.geometry, call.given.dtype
        target = target_of(call.backend, g, dtype, options, call.plan, device)
        made = call.plan.work((target.block_q, target.block_k), proofs=RECORDS[call.backend].guarded)
        show(names, call.plan, made, target, g, dtype)
