"""Simplifies a mask and a score mod, and moves masks hidden in the score mod into the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frisket.dsl.ir import FALSE, SCORE, TRUE, Expr, conj
from frisket.dsl.show import show

from .canonical import Canonical, canonical
from .engine import RULES, Simplifier, simplify
from .hoist import hoist
from .pattern import Rule

__all__ = ["RULES", "Canonical", "ProgramExprs", "Rule", "Simplifier", "canonical", "hoist", "prepare", "simplify"]


@dataclass(frozen=True)
class ProgramExprs:
    """The expressions of a program: its mask and its score mod; None for a part that changes nothing."""

    mask: Expr | None = None
    score: Expr | None = None

    @property
    def parts(self) -> tuple[Expr, ...]:
        """The expressions that there are."""
        return tuple(e for e in (self.mask, self.score) if e is not None)

    @property
    def visible(self) -> Expr:
        """The mask, true where there is none."""
        return TRUE if self.mask is None else self.mask

    def changed(self, change: Callable[[Expr], Expr]) -> ProgramExprs:
        """The expressions, each of them changed."""
        return ProgramExprs(*(None if e is None else change(e) for e in (self.mask, self.score)))

    def __str__(self) -> str:
        lines = [f"mask = {'true' if self.mask is None else show(self.mask)}"]
        if self.score is not None:
            lines.append(f"score = {show(self.score)}")
        return "\n".join(lines)


def prepare(
    exprs: ProgramExprs, finite: Mapping[str, bool] | None = None, counts: Counter[str] | None = None
) -> ProgramExprs:
    """The simplified expressions; None for a mask that is always true and for a score mod that changes nothing.

    `finite` says which Float tables hold only finite values: a bias beside a hidden mask needs it.
    """
    run = Simplifier()
    seen, rest = TRUE, run(exprs.score) if exprs.score is not None else SCORE
    while True:  # a branch can hide another
        more, rest = hoist(rest, finite or {})
        if more is TRUE:
            break
        if more is FALSE:  # nothing is visible, so nothing is left to score
            seen, rest = FALSE, SCORE
            break
        seen, rest = conj(seen, more), run(rest)
    whole = run(conj(exprs.visible, seen))  # together: terms of both may imply one another
    if counts is not None:
        counts.update(run.counts)
    return ProgramExprs(None if whole is TRUE else whole, None if rest is SCORE else rest)
