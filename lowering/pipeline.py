"""The seven stages from a text to a kernel, in the order of docs/how-it-works.md.

Calls, `Attention.stages`, `frisket emit`, `frisket explain` and FRISKET_SHOW go through this list. A stage is a
function of a `Compilation`, which computes its parts once, when they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from frisket.dsl.ir import Expr

from .plan import LoopPlan, Target
from .stages import Pair, Stages

Exprs = tuple[Expr | None, Expr | None]  # of a mask and of a score mod


class StagedWork(Protocol):
    """A mask and a score mod compiled for one shape and tile size."""

    @property
    def simplified(self) -> Exprs: ...
    @property
    def rules(self) -> Counter[str]: ...
    @property
    def facts(self) -> Any: ...
    @property
    def layout(self) -> Any: ...
    @property
    def plan(self) -> LoopPlan: ...


class Compilation(Protocol):
    """One geometry and backend: a mask and a score mod as written, their work, the kernel's text and target."""

    @property
    def written(self) -> Exprs: ...
    @property
    def work(self) -> StagedWork: ...
    @property
    def kernel(self) -> tuple[str, Target]: ...
    @property
    def engines(self) -> str: ...
    @property
    def awaits(self) -> str: ...


def expr(c: Compilation) -> Pair:
    """The mask and the score mod as written."""
    return Pair(*c.written)


def simplified(c: Compilation) -> Pair:
    """The mask and the score mod after the rules, with masks hoisted out of the score mod."""
    return Pair(*c.work.simplified)


def facts(c: Compilation) -> Any:
    """The facts that the analysis finds: closed form, empty rows, what tables hold."""
    return c.work.facts


def layout(c: Compilation) -> Any:
    """The tiles that each row of tiles reads; None where a device plans them."""
    return c.work.layout


def plan(c: Compilation) -> LoopPlan:
    """The loop that every backend shares."""
    return c.work.plan


def target(c: Compilation) -> Target:
    """The backend, its tiles, warps and stages."""
    return c.kernel[1]


def source(c: Compilation) -> str:
    """The kernel's text; empty where library calls run."""
    return c.kernel[0]


PIPELINE: tuple[Callable[[Compilation], Any], ...] = (expr, simplified, facts, layout, plan, target, source)


def stages(c: Compilation) -> Stages:
    """The record of all stages."""
    return Stages(
        **{stage.__name__: stage(c) for stage in PIPELINE}, rules=c.work.rules, engines=c.engines, awaits=c.awaits
    )
