"""Masks hidden in score mods: a `-inf` branch means masked, and becomes part of the mask.

`where(c, s, -inf)` at any depth below operators that keep -inf: branches, + of something provably finite,
* of something provably positive and finite. Others stay: `50 * tanh(-inf / 50)` is -50, not masked.
"""

from __future__ import annotations

from collections.abc import Mapping

from frisket.dsl.ir import FALSE, NEG_INF, SCORE, TRUE, Expr, conj, disj, lit, make, uses
from frisket.dsl.sugar import where
from frisket.dsl.types import FLOAT, INT

from .affine import interval
from .rules_boolean import negate

FLOAT_ZEROS = (lit(0.0), lit(-0.0))
_DEEPEST = 200  # deeper scores keep their -inf where it is; the checks for it in the kernel remain
# finite if their arguments are: a product of finite float32 values is taken as finite, like `score` itself
_FINITE = frozenset("add sub mul neg abs min max sign tanh sigmoid sin cos erf float".split())


def finite(e: Expr, tables: Mapping[str, bool]) -> bool:
    """Whether an Expr is provably neither NaN nor infinite, where scores are; `tables` says which tables are finite."""
    if e.type is INT:
        return True
    if e.depth > _DEEPEST:
        return False
    if e.op == "lit":
        return bool(abs(e.name) < float("inf"))
    if e is SCORE or e.op == "random":
        return True
    if e.op == "lookup":
        return tables.get(e.name, False)
    if e.op in ("sigmoid", "tanh"):
        return finite(e.args[0], tables)
    if e.op == "where":
        return all(finite(a, tables) for a in e.args[1:])
    if e.op == "div":
        d = e.args[1]
        # a quotient by 0 is infinite or NaN
        return finite(e.args[0], tables) and d.op == "lit" and d.name not in (0.0, float("inf"))
    return e.op in _FINITE and all(finite(a, tables) for a in e.args)


def positive(e: Expr, tables: Mapping[str, bool]) -> bool:
    """Whether an Expr is provably > 0 and finite."""
    if e.depth > _DEEPEST:
        return False
    if e.op == "lit":
        return bool(0 < e.name < float("inf"))
    if e.op == "float":
        return (interval(e.args[0])[0] or 0) > 0
    return e.op in ("mul", "div", "add") and all(positive(a, tables) for a in e.args)


def hoist(e: Expr, tables: Mapping[str, bool]) -> tuple[Expr, Expr]:
    """A score mod as (visible, rest), e == where(visible, rest, -inf): `rest` is what a FULL tile runs."""
    if e is NEG_INF:
        return FALSE, e
    if e.depth > _DEEPEST:
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
    if e.op in ("add", "sub", "mul", "div"):
        return _hoist_binary(e, tables)
    return TRUE, e


def _hoist_binary(e: Expr, tables: Mapping[str, bool]) -> tuple[Expr, Expr]:
    left, right = e.args
    safe = finite if e.op in ("add", "sub") else positive
    if e.op == "add":
        (seen_left, new_left), (seen_right, new_right) = hoist(left, tables), hoist(right, tables)
        # -inf on either side hides the sum, if the other side is not +inf or NaN
        if TRUE not in (seen_left, seen_right) and finite(new_left, tables) and finite(new_right, tables):
            return conj(seen_left, seen_right), _rest("add", new_left, new_right)
    seen, new = hoist(left, tables)
    if seen is not TRUE and safe(right, tables):
        return seen, _rest(e.op, new, right)
    if e.op in ("add", "mul"):
        seen, new = hoist(right, tables)
        if seen is not TRUE and safe(left, tables):
            return seen, _rest(e.op, left, new)
    return TRUE, e


def _rest(op: str, left: Expr, right: Expr) -> Expr:
    # the 0 of `score + where(c, 0, -inf)` has done its work; only the sign of a zero score could tell
    if op == "add" and right in FLOAT_ZEROS:
        return left
    return right if op == "add" and left in FLOAT_ZEROS else make(op, (left, right), None, FLOAT)
