"""Simplifies a mask and a score mod, and moves masks hidden in the score mod into the mask.

A `-inf` branch of a score mod means masked: `where(c, s, -inf)` at any depth below operators that keep -inf. These are
branches, + of something provably finite, and * of something provably positive and finite. Others stay:
`50 * tanh(-inf / 50)` is -50, not masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from frisket.dsl.ir import FALSE, NEG_INF, SCORE, TOTAL, TRUE, Expr, conj, disj, lit, make, substitute, uses
from frisket.dsl.show import show
from frisket.dsl.sugar import eq, where
from frisket.dsl.transfer import DEEPEST, finite, nonnegative, positive
from frisket.dsl.types import FLOAT

from .canonical import Canonical, canonical
from .engine import RULES, Simplifier, simplify
from .pattern import Rule
from .rules_boolean import negate

__all__ = ["RULES", "Canonical", "ProgramExprs", "Rule", "Simplifier", "canonical", "hoist", "prepare", "simplify"]


@dataclass(frozen=True)
class ProgramExprs:
    """The expressions of a program; None for a part that changes nothing. Without a `weight` a row is a softmax.

    A visible pair weighs `weight` of its modified score. A row is divided by `divide` of the sum of its weights and
    of the number of keys that it sees, or by nothing. A pair whose modified score is -inf is hidden."""

    mask: Expr | None = None
    score: Expr | None = None
    weight: Expr | None = None
    divide: Expr | None = None

    @property
    def parts(self) -> tuple[Expr, ...]:
        """The expressions that there are."""
        return tuple(e for e in (self.mask, self.score, self.weight, self.divide) if e is not None)

    @property
    def visible(self) -> Expr:
        """The mask, true where there is none."""
        return TRUE if self.mask is None else self.mask

    def changed(self, change: Callable[[Expr], Expr]) -> ProgramExprs:
        """The expressions, each of them changed."""
        all_ = self.mask, self.score, self.weight, self.divide
        return ProgramExprs(*(None if e is None else change(e) for e in all_))

    def weight_of_score(self, finite: bool) -> Expr:
        """The weight of a visible pair as an expression in the score before the score mod. It is 0, and so are its
        derivatives, where the modified score is -inf, unless all of these are known to be `finite`."""
        assert self.weight is not None
        if self.score is None:
            return self.weight
        weight = substitute(self.weight, {SCORE: self.score})
        return weight if finite else where(eq(self.score, NEG_INF), 0.0, weight)

    @property
    def has_lse(self) -> bool:
        """Whether the logarithm of a row's sum is the lse of attention: its parts merge by it."""
        return self.weight is None or (self.divide is TOTAL and nonnegative(self.weight))

    def __str__(self) -> str:
        lines = [f"mask = {'true' if self.mask is None else show(self.mask)}"]
        others = {"score": self.score, "weight": self.weight, "divide": self.divide}
        return "\n".join([*lines, *(f"{n} = {show(e)}" for n, e in others.items() if e is not None)])


def prepare(
    exprs: ProgramExprs, tables: Mapping[str, bool] | None = None, counts: Counter[str] | None = None
) -> ProgramExprs:
    """The simplified expressions; None for a mask that is always true and for a score mod that changes nothing.

    `tables` says which Float tables hold only finite values: a bias with a hidden mask needs it.
    """
    run = Simplifier()
    seen, rest = TRUE, run(exprs.score) if exprs.score is not None else SCORE
    while True:  # a branch can hide another
        more, rest = hoist(rest, tables or {})
        if more is TRUE:
            break
        if more is FALSE:  # nothing is visible, so nothing is left to score
            seen, rest = FALSE, SCORE
            break
        seen, rest = conj(seen, more), run(rest)
    whole = run(conj(exprs.visible, seen))  # together: terms of both may imply one another
    weight, divide = (None if e is None else run(e) for e in (exprs.weight, exprs.divide))
    if counts is not None:
        counts.update(run.counts)
    return ProgramExprs(None if whole is TRUE else whole, None if rest is SCORE else rest, weight, divide)


FLOAT_ZEROS = (lit(0.0), lit(-0.0))


def hoist(e: Expr, tables: Mapping[str, bool]) -> tuple[Expr, Expr]:
    """A score mod as (visible, rest), e == where(visible, rest, -inf): `rest` is what a FULL tile computes."""
    if e is NEG_INF:
        return FALSE, e
    if e.depth > DEEPEST:
        return TRUE, e
    if e.op == "where" and e.type is FLOAT and "score" not in uses(e.args[0]):  # no mask knows a score
        cond, yes, no = e.args
        (seen_yes, yes2), (seen_no, no2) = hoist(yes, tables), hoist(no, tables)
        seen = disj(conj(cond, seen_yes), conj(negate(cond), seen_no))
        if seen_yes is TRUE and seen_no is TRUE:
            return TRUE, e
        if seen_yes is FALSE:
            return conj(negate(cond), seen_no), no2
        if seen_no is FALSE:
            return conj(cond, seen_yes), yes2
        return seen, where(cond, yes2, no2)
    return _hoist_binary(e, tables) if e.op in EITHER else (TRUE, e)


EITHER = {"add": True, "sub": False, "mul": True, "div": False}  # keep -inf: of either operand, or of the left one


def _hoist_binary(e: Expr, tables: Mapping[str, bool]) -> tuple[Expr, Expr]:
    left, right = e.args
    safe = positive if e.op in ("mul", "div") else partial(finite, tables=tables)
    seen_left, new_left = hoist(left, tables)
    seen_right, new_right = hoist(right, tables) if EITHER[e.op] else (TRUE, right)
    # -inf on either side hides the sum, if the other side is not +inf or NaN
    if e.op == "add" and TRUE not in (seen_left, seen_right) and safe(new_left) and safe(new_right):
        return conj(seen_left, seen_right), _rest("add", new_left, new_right)
    if seen_left is not TRUE and safe(right):
        return seen_left, _rest(e.op, new_left, right)
    if seen_right is not TRUE and safe(left):
        return seen_right, _rest(e.op, left, new_right)
    return TRUE, e


def _rest(op: str, left: Expr, right: Expr) -> Expr:
    # the 0 of `score + where(c, 0, -inf)` has done its work; only the sign of a zero score could tell
    if op == "add" and right in FLOAT_ZEROS:
        return left
    return right if op == "add" and left in FLOAT_ZEROS else make(op, (left, right), None, FLOAT)
