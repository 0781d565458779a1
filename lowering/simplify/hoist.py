"""Masks hidden in score mods: a `-inf` branch means masked, and becomes part of the mask.

`where(c, s, -inf)` at any depth below operators that keep -inf: branches, + of something provably finite,
* of something provably positive and finite. Others stay: `50 * tanh(-inf / 50)` is -50, not masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from frisket.dsl.ir import FALSE, NEG_INF, TRUE, Expr, conj, disj, lit, make, uses
from frisket.dsl.sugar import where
from frisket.dsl.transfer import DEEPEST, finite, positive
from frisket.dsl.types import FLOAT

from .rules_boolean import negate

FLOAT_ZEROS = (lit(0.0), lit(-0.0))


def hoist(e: Expr, tables: Mapping[str, bool]) -> tuple[Expr, Expr]:
    """A score mod as (visible, rest), e == where(visible, rest, -inf): `rest` is what a FULL tile runs."""
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
