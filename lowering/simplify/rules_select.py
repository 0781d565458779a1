"""Rules of choices, casts, and Float arithmetic. No rule assumes away NaN or inf or reassociates scores."""

from __future__ import annotations

import math
from collections.abc import Callable

from frisket.dsl.ir import FALSE, FLOAT_FUNCTIONS, TRUE, Expr, build, lit
from frisket.dsl.sugar import eq, maximum, minimum, ne, where
from frisket.dsl.transfer import integral
from frisket.dsl.types import BOOL, FLOAT, INT, Type

from .affine import natural
from .pattern import c, d, hole, m, n, p, r, rule, u, v, x, y
from .rules_order import MIRRORED

NEG_ZERO = lit(-0.0)


def _select(type: Type) -> list[object]:
    """The rules of `where` for one type."""
    s, t, w = (hole(n, type) for n in "stw")
    return [
        rule("where-same", where(p, s, s), s),
        *_chosen(s, t),
        rule("where-not", where(~p, s, t), where(p, t, s)),
        rule("where-nested-yes", where(p, where(p, s, w), t), where(p, s, t)),
        rule("where-nested-no", where(p, s, where(p, w, t)), where(p, s, t)),
        rule("where-of-where", where(p, where(r, s, t), t), where(p & r, s, t)),
        rule("where-else-where", where(p, s, where(r, s, t)), where(p | r, s, t)),
        rule("where-unequal", where(ne(x, y), s, t), where(eq(x, y), t, s)),
    ]


def _chosen(s: Expr, t: Expr) -> list[object]:
    return [rule("where-literal", where(True, s, t), s), rule("where-literal", where(False, s, t), t)]


def flag(e: Expr) -> Expr:
    return build("int", e)


def real(e: Expr) -> Expr:
    return build("float", e)


_EXACT = frozenset({"var", "lit", "add", "sub", "neg", "abs", "min", "max", "floordiv", "mod", "int", "where"})


def position(e: Expr) -> bool:
    """Whether an Int stays far below 2 ** 53: sums, differences, quotients of coordinates, sizes and small literals."""
    return e.type is not INT or (
        e.depth < 12  # bounded, as `position` walks the tree and not the graph
        and e.op in _EXACT
        and (e.op != "lit" or abs(e.name) < 2**31)
        and all(a.type is BOOL or position(a) for a in e.args)
    )


def beside_number(op: str) -> Callable[[Expr, Expr], Expr]:
    """The right side of a rule that compares Ints, not Floats: float(x) >= 3.5 is x >= 4, and x == 3.5 is false."""
    never = {"eq": FALSE, "ne": TRUE}.get(op)
    up = op in ("ge", "lt")  # x >= 3.5 is x >= 4, x < 3.5 is x < 4; x <= 3.5 is x <= 3

    def right(x: Expr, c: Expr) -> Expr:
        if never is not None and c.name != math.floor(c.name):
            return never
        return build(op, x, lit(math.ceil(c.name) if up else math.floor(c.name)))

    return right


def both_positions(x: Expr, y: Expr) -> bool:
    return position(x) and position(y)


def exact(x: Expr, c: Expr) -> bool:
    return bool(abs(c.name) < 2**31)  # near so small a number every Int is exact as a Float


def whole_divisor(x: Expr, c: Expr) -> bool:
    return position(x) and 0 < c.name < 2**31 and c.name == math.floor(c.name)


def natural_quotient(x: Expr, c: Expr) -> bool:
    return natural(x) and whole_divisor(x, c)


def in_branches(op: str) -> Callable[..., Expr]:
    """The right side of a rule that moves an operator, and its second operand, into both branches of a `where`."""
    return lambda p, c, d, *bound: where(p, build(op, c, *bound), build(op, d, *bound))


def _positions(op: str) -> list[object]:
    """The rules of a comparison of Ints that were made Floats."""
    return [
        rule("compare-positions", build(op, c, real(x)), lambda c, x: build(MIRRORED[op], real(x), c)),
        rule("compare-positions", build(op, real(x), real(y)), build(op, x, y), both_positions),
        rule("compare-positions", build(op, real(x), c), beside_number(op), exact),
    ]


def compare_whole(e: Expr) -> Expr | None:
    """A comparison of whole Floats as one of Ints: float(x) - float(y) <= 1.0 is x - y <= 1.

    An Int with a Float is converted, so that `abs(floor(q / 6) - k // 6) <= 1.0` arrives as Float arithmetic on whole
    numbers: exact there as in Ints, where the Ints are positions."""
    # bounded, as `integral` walks the tree and not the graph
    x, y = (integral(a, position) if a.depth < 40 else None for a in e.args)
    return None if x is None or y is None else build(e.op, x, y)


bound = hole("bound", FLOAT, literal=True)

RULES = [
    *_select(INT), *_select(FLOAT), *_chosen(p, r),
    # Bools as numbers
    rule("int-of-choice", where(p, 1, 0), flag(p)), rule("int-of-choice", where(p, 0, 1), flag(~p)),
    rule("int-product", flag(p) * flag(r), flag(p & r)), rule("int-product", flag(p) & flag(r), flag(p & r)),
    rule("int-product", minimum(flag(p), flag(r)), flag(p & r)),
    rule("int-union", flag(p) | flag(r), flag(p | r)),
    rule("int-union", maximum(flag(p), flag(r)), flag(p | r)),
    rule("int-xor", flag(p) ^ flag(r), flag(p ^ r)),
    rule("float-of-choice", real(flag(p)), where(p, 1.0, 0.0)),
    rule("float-of-choice", real(where(p, m, n)), lambda p, m, n: where(p, float(m.name), float(n.name))),
    *(rule("function-of-choice", build(f, where(p, c, d)), in_branches(f)) for f in ("neg", *sorted(FLOAT_FUNCTIONS))),
    *(rule("compare-choice", build(op, where(p, c, d), bound), in_branches(op)) for op in MIRRORED),
    rule("sub-choice", u - where(p, c, d), lambda u, p, c, d: u + where(p, -c.name, -d.name)),
    # positions through Float: exact below 2 ** 53, where every position is
    *(row for op in MIRRORED for row in _positions(op)),
    rule("floor-of-quotient", build("floor", real(x) / c), lambda x, c: x // int(c.name), whole_divisor),
    rule("int-of-quotient", build("int", real(x) / c), lambda x, c: x // int(c.name), natural_quotient),
    rule("float-of-floor", build("floor", real(x)), x),
    rule("int-of-float", build("int", real(x)), x),
    rule("add-negative-zero", u + NEG_ZERO, u), rule("sub-zero", u - 0.0, u), rule("mul-one", u * 1.0, u),
    rule("div-one", u / 1.0, u), rule("neg-neg", build("neg", -u), u), rule("sub-neg", u - (-v), u + v),
    rule("add-neg", u + (-v), u - v), rule("abs-neg", abs(-u), abs(u)), rule("abs-abs", abs(abs(u)), abs(u)),
    rule("min-self", minimum(u, u), u), rule("max-self", maximum(u, u), u), rule("pow-one", u**1.0, u),
    rule("pow-two", u**2.0, u * u), rule("less-than-self", u < u, FALSE), rule("less-than-self", u > u, FALSE),
    rule("at-most-self", u <= u, eq(u, u)), rule("at-most-self", u >= u, eq(u, u)),
    rule("isfinite-float", build("isfinite", real(x)), TRUE),
    *(rule("whole-comparison", op, compare_whole, of=FLOAT) for op in MIRRORED),
]  # fmt: skip
