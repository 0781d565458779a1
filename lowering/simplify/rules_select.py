"""Choices, casts, and Float arithmetic. Nothing here assumes away NaN or inf or reassociates scores."""

from __future__ import annotations

from frisket.dsl.ir import FALSE, TRUE, Expr, build, lit
from frisket.dsl.sugar import eq, maximum, minimum, where
from frisket.dsl.types import FLOAT, INT, Type

from .pattern import hole, p, r, rule, u, v, x

NEG_ZERO = lit(-0.0)


def _select(type: Type) -> list[object]:
    """The rows of `where` for one type."""
    s, t = hole("s", type), hole("t", type)
    w = hole("w", type)
    return [
        rule("where-same", where(p, s, s), s),
        rule("where-literal", "where", _literal),
        rule("where-not", where(~p, s, t), where(p, t, s)),
        rule("where-nested-yes", where(p, where(p, s, w), t), where(p, s, t)),
        rule("where-nested-no", where(p, s, where(p, w, t)), where(p, s, t)),
        rule("where-of-where", where(p, where(r, s, t), t), where(p & r, s, t)),
        rule("where-else-where", where(p, s, where(r, s, t)), where(p | r, s, t)),
    ]


def _literal(node: Expr) -> Expr | None:
    cond = node.args[0]
    if cond.op != "lit":
        return None
    return node.args[1] if cond is TRUE else node.args[2]


RULES = [
    *_select(INT), *_select(FLOAT),
    rule("float-of-floor", build("floor", build("float", x)), x),
    rule("int-of-float", build("int", build("float", x)), x),
    rule("add-negative-zero", u + NEG_ZERO, u),
    rule("sub-zero", u - 0.0, u),
    rule("mul-one", u * 1.0, u),
    rule("div-one", u / 1.0, u),
    rule("neg-neg", build("neg", -u), u),
    rule("sub-neg", u - (-v), u + v),
    rule("add-neg", u + (-v), u - v),
    rule("abs-neg", abs(-u), abs(u)),
    rule("abs-abs", abs(abs(u)), abs(u)),
    rule("min-self", minimum(u, u), u),
    rule("max-self", maximum(u, u), u),
    rule("pow-one", u ** 1.0, u),
    rule("pow-two", u ** 2.0, u * u),
    rule("less-than-self", u < u, FALSE),
    rule("less-than-self", u > u, FALSE),
    rule("at-most-self", u <= u, eq(u, u)),
    rule("at-most-self", u >= u, eq(u, u)),
    rule("isfinite-float", build("isfinite", build("float", x)), TRUE),
]  # fmt: skip
