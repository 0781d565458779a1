"""Variables and helpers for writing expressions in Python: `(q >= k) & eq(q % 2, 0)`."""

from __future__ import annotations

from . import ir
from .ir import Expr, Operand, binary, build, lift, to_float
from .types import FLOAT, INT

b, h, q, k = (ir.var(n) for n in ir.COORDINATES)
score = ir.SCORE


def eq(left: Operand, right: Operand) -> Expr:
    return binary("eq", left, right)


def ne(left: Operand, right: Operand) -> Expr:
    return binary("ne", left, right)


def minimum(left: Operand, right: Operand) -> Expr:
    return binary("min", left, right)


def maximum(left: Operand, right: Operand) -> Expr:
    return binary("max", left, right)


def where(cond: Operand, yes: Operand, no: Operand) -> Expr:
    x, y = lift(yes), lift(no)
    if {x.type, y.type} == {INT, FLOAT}:
        x, y = to_float(x), to_float(y)
    return build("where", lift(cond), x, y)


def function(name: str, x: Operand) -> Expr:
    """A Float function of one argument: `function("tanh", score / 50)`; Int is converted."""
    return build(name, to_float(lift(x)))
