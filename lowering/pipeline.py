"""The seven stages from a text to a kernel, in the order of docs/how-it-works.md, and a printable record of them.

Calls, `Attention.stages`, `frisket emit`, `frisket explain` and FRISKET_SHOW go through this list. A stage is a
function of a `Compilation`, which computes its parts once, when they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from frisket.dsl.notebook import sections
from frisket.dsl.show import show

from .plan import LoopPlan, Target
from .simplify import ProgramExprs


class StagedWork(Protocol):
    """A mask and a score mod compiled for one shape and tile size."""

    @property
    def simplified(self) -> ProgramExprs: ...
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
    def written(self) -> ProgramExprs: ...
    @property
    def work(self) -> StagedWork: ...
    @property
    def kernel(self) -> tuple[str, Target]: ...
    @property
    def engines(self) -> str: ...
    @property
    def awaits(self) -> str: ...


def expr(c: Compilation) -> ProgramExprs:
    """The mask and the score mod as written."""
    return c.written


def simplified(c: Compilation) -> ProgramExprs:
    """The mask and the score mod after the rules, with masks hoisted out of the score mod."""
    return c.work.simplified


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


# a stage is a function here, so that each can be asked for without the later ones
PIPELINE: tuple[Callable[[Compilation], Any], ...] = (expr, simplified, facts, layout, plan, target, source)


def stages(c: Compilation) -> Stages:
    """The record of all stages."""
    return Stages(
        **{stage.__name__: stage(c) for stage in PIPELINE}, rules=c.work.rules, engines=c.engines, awaits=c.awaits
    )


NAMES = tuple(stage.__name__ for stage in PIPELINE)


@dataclass(frozen=True, repr=False)
class Stages:
    """The stages of a mask and a score mod: `print(att.stages(...))`, or one field of it.

    >>> import frisket as fk
    >>> print(fk.compile("causal & window(64)").stages(q_len=256).simplified)
    mask = q >= k & q - k <= 63
    >>> print(fk.compile("causal").stages(q_len=256).text("expr"))
    mask = causal

    `expr` as written, `simplified` after the rules (`rules` counts them) and with masks hoisted out of the score mod,
    `facts` and `layout` of the analysis, the `plan` every backend shares, the `target` chosen, and the `source` of the
    kernel, empty for backends that run library calls. `engines` says which kernel of a vendor runs instead of a
    generated one, and why others do not. `awaits` is the backend that runs after FRISKET_COMPILE has compiled its
    kernel.
    """

    expr: ProgramExprs
    simplified: ProgramExprs
    facts: Any
    layout: Any
    plan: LoopPlan
    target: Target
    source: str
    rules: Counter[str] = field(default_factory=Counter)
    engines: str = ""
    awaits: str = ""

    def text(self, name: str) -> str:
        """The text of one stage."""
        if name not in NAMES:
            raise ValueError(f"no stage {name!r}; there are {', '.join(NAMES)}")
        if name == "target":
            t = self.target
            if not t.block_q:
                return self.engines.partition("\n")[0]  # an engine, with tiles of its own
            lines = [f"{t.backend}: {_launch(t)}"]
            if self.awaits:
                lines[0] += f", until the kernel of {self.awaits} is compiled"
            # kernels of gradients may have tiles different from those of the forward
            lines += [f"    {n}: {_launch(part)}" for n in ("dq", "dkv", "dv") if (part := getattr(t, n))]
            return "\n".join(lines)
        shown = str(getattr(self, name))
        if name == "simplified" and self.rules:
            fired = ", ".join(f"{n} x {c}" if c > 1 else n for n, c in self.rules.most_common())
            shown += f"\nrules: {fired}"
        if name == "facts" and self.layout is not None:
            questions = self.layout.questions
            shown += "".join(f"\n{n:9} {show(questions[n])}" for n in ("always", "never"))
        return shown or "library calls"

    def _repr_html_(self) -> str:
        return sections((name, self.text(name)) for name in NAMES)

    def __str__(self) -> str:
        return "\n\n".join(f"-- {name} {'-' * (76 - len(name))}\n{self.text(name)}" for name in NAMES)

    __repr__ = __str__


def _launch(t: Target) -> str:
    return f"{t.block_q} queries x {t.block_k} keys, {t.num_warps} warps, {t.num_stages} stages"
