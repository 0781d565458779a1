"""Simplifies a mask and a score mod, and moves masks hidden in the score mod into the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from frisket.dsl.ir import FALSE, SCORE, TRUE, Expr, conj

from .canonical import Canonical, canonical
from .engine import RULES, Simplifier, simplify
from .hoist import hoist
from .pattern import Rule

__all__ = ["RULES", "Canonical", "Rule", "Simplifier", "canonical", "hoist", "prepare", "simplify"]


def prepare(
    mask: Expr | None, score: Expr | None, finite: Mapping[str, bool] | None = None, counts: Counter[str] | None = None
) -> tuple[Expr | None, Expr | None]:
    """The simplified (mask, score); None for a mask that is always true and for a score mod that changes nothing.

    `finite` says which Float tables hold only finite values: a bias beside a hidden mask needs it.
    """
    run = Simplifier()
    seen, rest = TRUE, run(score) if score is not None else SCORE
    while True:  # a branch can hide another
        more, rest = hoist(rest, finite or {})
        if more is TRUE:
            break
        if more is FALSE:  # nothing is visible, so nothing is left to score
            seen, rest = FALSE, SCORE
            break
        seen, rest = conj(seen, more), run(rest)
    whole = run(conj(mask if mask is not None else TRUE, seen))  # together: terms of both may imply one another
    if counts is not None:
        counts.update(run.counts)
    return None if whole is TRUE else whole, None if rest is SCORE else rest
