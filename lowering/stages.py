"""Stages: a printable record of the steps from a text to a kernel, in the order of docs/how-it-works.md.

Calls, `Attention.stages`, `frisket emit`, `frisket explain` and FRISKET_SHOW print fields of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from frisket.dsl.notebook import sections
from frisket.dsl.show import show

from .plan import LoopPlan, Target
from .simplify import ProgramExprs

NAMES = ("expr", "simplified", "facts", "layout", "plan", "target", "source")


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
