"""Rules of Int arithmetic: folding, affine normal form, absolute values, minima and maxima, powers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import FLOAT_FUNCTIONS, ONE, Expr, build, lit
from frisket.dsl.sugar import maximum, minimum
from frisket.dsl.transfer import interval
from frisket.dsl.types import INT

from .affine import linear, natural, ordered, write
from .pattern import m, n, rule, x, y
from .rules_order import pair_in_order

# on numbers of Python, where the interpreter's arrays take ten times as long
_PLAIN: dict[str, Callable[..., Any]] = {
    **{op: getattr(operator, op) for op in ("add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne")},
    "abs": abs,
    "min": min,
    "max": max,
}


def fold(node: Expr) -> Expr | None:
    """Fold an operator of literals to the literal the interpreter gives, if there is one."""
    if not node.args or any(a.op != "lit" for a in node.args) or node.op in ("random", "lookup", "segment"):
        return None
    values = [a.name for a in node.args]
    if node.op in _PLAIN and node.args[0].type is INT:
        result = _PLAIN[node.op](*values)
        # past 64 bits the interpreter decides what happens, with its error
        if all(-(2**63) <= x < 2**63 for x in (result, *values)):
            return lit(result)
    try:
        return lit(evaluate(node, {}).item())
    except ValueError:  # it leaves 64 bits: the emitter will say so
        return None


def affine(node: Expr) -> Expr | None:
    form = linear(node)
    if node.op == "add" and form.terms == ((node, 1),):  # too long, or numbers too large, to be put together
        return pair_in_order(node)
    return write(form)


def turn(e: Expr) -> Expr | None:
    """Turn abs(k - q) to abs(q - k): one sign."""
    terms = linear(e.args[0]).terms
    return abs(write(-linear(e.args[0]))) if terms and terms[0][1] < 0 else None


FOLDED = (
    "add sub mul neg abs sign min max pow floordiv mod bitand bitor bitxor bitnot shl shr int float floor "
    "lt le gt ge eq ne isfinite div"
).split() + sorted(FLOAT_FUNCTIONS)

RULES = [
    *(rule("fold", op, fold) for op in FOLDED),
    *(rule("affine", op, affine, of=INT) for op in ("add", "sub", "neg", "mul")),
    # absolute value, minimum, maximum
    rule("abs-of-natural", abs(x), x, natural),
    rule("abs-of-negative", abs(-x), abs(x)),
    rule("abs-canonical", "abs", turn, of=INT),
    rule("sign-of-positive", build("sign", x), ONE, lambda x: (interval(x)[0] or 0) > 0),
    rule("min-decided", minimum(x, y), y, ordered),
    rule("min-decided", minimum(y, x), y, lambda y, x: ordered(x, y)),
    rule("max-decided", maximum(x, y), x, ordered),
    rule("max-decided", maximum(y, x), x, lambda y, x: ordered(x, y)),
    rule("min-absorbs-max", minimum(x, maximum(x, y)), x),
    rule("max-absorbs-min", maximum(x, minimum(x, y)), x),
    rule("clamp-low-first", maximum(minimum(x, m), n), minimum(maximum(x, n), m), lambda x, m, n: n.name <= m.name),
    rule("pow-zero", x**0, ONE),
    rule("pow-one", x**1, x),
    rule("square", x**2, x * x),
]
