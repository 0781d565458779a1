"""The built-in functions: signature, number of arguments, meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

from . import ir
from .ir import FLOAT_FUNCTIONS, Expr, build, lit
from .operators import ERROR, Frame, Operators, Part, Value
from .types import BOOL, FLOAT, INT

Meaning = Callable[[Operators, Frame, Sequence[Part]], Value]


class Function(NamedTuple):
    signature: str
    least: int
    most: int
    apply: Meaning


CONSTANTS: dict[str, Expr] = {
    "inf": ir.INF, "nan": lit(math.nan), "pi": lit(math.pi), "e": lit(math.e),
    "true": ir.TRUE, "false": ir.FALSE, "True": ir.TRUE, "False": ir.FALSE,
}  # fmt: skip

LEAVES = {n: ir.var(n) for n in (*ir.COORDINATES, *ir.SIZES)} | {"score": ir.SCORE} | CONSTANTS
CALL_KEYWORDS = frozenset(
    "scale mask score sinks dropout seed backend return_lse return_max origin sizes plan layout".split()
)
RESERVED = frozenset(LEAVES) | CALL_KEYWORDS


# Functions of one Float without an operator of their own.
MADE_OF: dict[str, Callable[[Expr], Expr]] = {
    "relu": lambda x: build("max", x, lit(0.0)),
    "silu": lambda x: x * build("sigmoid", x),
    "softplus": lambda x: build("max", x, lit(0.0)) + build("log1p", build("exp", -abs(x))),
    "gelu": lambda x: 0.5 * x * (1.0 + build("erf", x / math.sqrt(2.0))),
}


def expm1(x: Expr) -> Expr:
    """exp(x) - 1 without the loss of all digits near 0."""
    return build("tanh", x * 0.5) * (build("exp", x) + 1.0)


def _extreme(op: str) -> Meaning:
    def apply(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
        found = c.numbers(frame, f"`{op}`", parts)
        return ERROR if found is None else Value(reduce(lambda x, y: build(op, x, y), found[0]), found[1])

    return apply


def _clamp(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    found = c.numbers(frame, "`clamp`", parts)
    if found is None:
        return ERROR
    x, low, high = found[0]
    return Value(build("min", build("max", x, low), high), found[1])


def _float_function(name: str) -> Meaning:
    make = MADE_OF.get(name) or (lambda x: build(name, x))
    return lambda c, frame, parts: c.floating(frame, f"`{name}`", parts[0], make)


def _rounded(name: str, make: Callable[[Expr], Expr]) -> Meaning:
    def apply(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
        c.prefer(parts[0][1], FLOAT)
        found = c.numbers(frame, f"`{name}`", parts)
        if found is None:
            return ERROR
        (x,), _ = found
        return Value(x if x.type is INT else make(x))

    return apply


def _ceil(x: Expr) -> Expr:
    return -build("floor", -x)


def _int(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    x = parts[0][1].expr
    return ERROR if x is None else Value(x if x.type is INT else build("int", x))


def _float(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    node, value = parts[0]
    if value.expr is not None and value.expr.type is BOOL and not value.flex:
        return c.report(
            frame, node, f"`float` takes a number, {c.quote(frame, node)} is a Bool", "write `1.0 if ... else 0.0`"
        )
    found = c.numbers(frame, "`float`", parts)
    return ERROR if found is None else Value(ir.to_float(found[0][0]))


def _random(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    ints = c.integers(frame, "`random`", parts)
    return ERROR if ints is None else Value(ir.random(*ints))


FUNCTIONS: dict[str, Function] = {
    name: Function(f"{name}(x)", 1, 1, _float_function(name))
    for name in sorted(FLOAT_FUNCTIONS | MADE_OF.keys() | {"isfinite"})
} | {
    "abs": Function("abs(x)", 1, 1, lambda c, f, p: c.unary(f, "`abs`", p[0], abs)),
    "sign": Function("sign(x)", 1, 1, lambda c, f, p: c.unary(f, "`sign`", p[0], lambda x: build("sign", x))),
    "min": Function("min(x, y, ...)", 2, 64, _extreme("min")),
    "max": Function("max(x, y, ...)", 2, 64, _extreme("max")),
    "clamp": Function("clamp(x, low, high)", 3, 3, _clamp),
    "floor": Function("floor(x)", 1, 1, _rounded("floor", lambda x: build("floor", x))),
    "ceil": Function("ceil(x)", 1, 1, _rounded("ceil", _ceil)),
    "int": Function("int(x)", 1, 1, _int),
    "float": Function("float(x)", 1, 1, _float),
    "where": Function("where(condition, a, b)", 3, 3, lambda c, f, p: c.choose(f, p, "`where`")),
    "pow": Function("pow(x, y)", 2, 2, lambda c, f, p: c.power(f, p)),
    "random": Function("random(seed, i, ...)", 1, 64, _random),
}

# Forms whose arguments are not all values; the checker handles them.
FORMS = {
    "at": "at(mask, q = ..., k = ...)",
    "dot": "dot(x[b, :], y[k, :])",
    "segment": "segment(offsets, x)",
    "extent": "extent(table, axis)",
    "any": "any(j in 0..n: ...)",
    "all": "all(j in 0..n: ...)",
    "sum": "sum(j in 0..n: ...)",
}
BUILT_IN = frozenset(FUNCTIONS) | frozenset(FORMS)
