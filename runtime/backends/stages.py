"""The stages of `lowering.pipeline` for a plan, a geometry and a backend, and FRISKET_SHOW."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from frisket.lowering.pipeline import Exprs, stages
from frisket.lowering.plan import Geometry, Target
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.cpp_build import there
from frisket.runtime.machine.parameters import is_tensor
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.device import Call, CallPlan

from .base import RECORDS
from .registry import library, target_of


@dataclass(frozen=True)
class PlanCompilation:
    """A plan compiled for one geometry and backend, a stage when it is first asked for. `learned` are the user's names
    of what gradients flow to beside the arrays; `arch` is a GPU's, where it is not that of `device`."""

    plan: CallPlan
    backend: str
    geometry: Geometry
    dtype: str
    options: Options
    device: Any = None
    arch: str | None = None
    sinks: bool = False
    learned: Collection[str] = ()
    framework: str = "torch"
    engines: str = ""  # which engine runs, and why the others do not, a line each
    awaits: str = ""  # the backend whose kernel is being compiled, or will be, while this one runs

    @property
    def written(self) -> Exprs:
        return self.plan.host_program.exprs

    @cached_property
    def target(self) -> Target:
        """The target that is chosen; the kernel's text may ask for another one."""
        found: Target = target_of(
            self.backend, self.geometry, self.dtype, self.options, self.plan, self.device, self.arch
        )
        return found

    @cached_property
    def work(self) -> Any:
        """The plan's work for the tiles of the target; an engine has tiles of its own."""
        engine = RECORDS[self.backend].engine is not None
        block = (128, 128) if engine else (self.target.block_q, self.target.block_k)
        return self.plan.work(block, proofs=RECORDS[self.backend].guarded)

    @cached_property
    def kernel(self) -> tuple[str, Target]:
        """The text and target of the kernel; the text of the planner where there is one beside library calls."""
        if RECORDS[self.backend].engine is not None:
            return "", Target(self.backend, 0, 0)
        emit, text, target = RECORDS[self.backend].text, "", self.target
        if emit is not None:
            spans = self.plan if self.framework != "jax" else None  # JAX prints kernels before spans are known
            text, target = emit(self.work.plan, target, self.geometry, self.dtype, self.sinks, self.learned, spans)
        return text or self.plan.planner, target

    def now(self) -> PlanCompilation:
        """The compilation of library calls where FRISKET_COMPILE lets no call wait for the kernel; else this one."""
        ahead = RECORDS[self.backend].ahead
        if ahead is None or self.geometry.kv_dtype or Settings.read().compile != "background":
            return self
        text = ahead(self.work.plan, self.target, self.geometry, self.dtype, "forward", self.options.rows is not None)
        return self if there(text) else replace(self, backend=library("torch"), awaits=self.backend)


def compiled(call: Call, options: Options, device: Any = None) -> PlanCompilation:
    """The compilation of a checked call. Stages that FRISKET_SHOW names go to stderr, once for a target of a plan."""
    found = PlanCompilation(
        call.plan, call.backend, call.geometry, call.given.dtype, options, device, framework=call.given.framework,
        learned=[n for n, x in call.plan.given.items() if is_tensor(x) and x.is_floating_point()],
    )  # fmt: skip
    if (names := Settings.read().show) and found.target not in call.plan.shown:
        call.plan.shown.add(found.target)
        made = stages(found)
        print("\n\n".join(made.text(n) for n in names), file=sys.stderr)
    return found
