"""Operators on single elements of any type, with array semantics: a Bool counts as 0 or 1, `+` of two Bools is `or`.

>>> from frisket.dsl.sugar import k, q
>>> joined("sub", q >= k, q)
int(q >= k) - q
>>> joined("mul", q >= k, q > 2)
q >= k & q > 2
"""

from __future__ import annotations

from frisket.dsl import ir
from frisket.dsl.ir import Expr, binary, build, lit, to_float
from frisket.dsl.types import BOOL, FLOAT, INT, Type

from .user_line import fail

DTYPES = {"bool": BOOL, **dict.fromkeys(("int", "uint", "long", "short"), INT)}
DTYPES |= dict.fromkeys(("float", "bfloat", "half", "double"), FLOAT)


def named_type(dtype: str) -> Type | None:
    """The type of the elements of a dtype, by its name; None where the language has none."""
    return next((type for prefix, type in DTYPES.items() if dtype.startswith(prefix)), None)


def number(e: Expr) -> Expr:
    """A Bool converted to 0 or 1; a number unchanged."""
    return build("int", e) if e.type is BOOL else e


def real(e: Expr) -> Expr:
    return to_float(number(e))


def truth(e: Expr) -> Expr:
    if e.type is BOOL:
        return e
    if e.op == "int" and e.args[0].type is BOOL:
        return e.args[0]
    return build("ne", e, lit(0) if e.type is INT else lit(0.0))


def floor(e: Expr) -> Expr:
    return build("floor", e) if e.type is FLOAT else number(e)


def alike(x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """Two elements converted to one type: the wider of their types in the order Bool, Int, Float."""
    if x.type is not y.type:
        x, y = number(x), number(y)
        if FLOAT in (x.type, y.type):
            x, y = to_float(x), to_float(y)
    return x, y


ON_BOOL = {"add": "or", "mul": "and", "max": "or", "min": "and"}  # as numpy, torch and JAX have it


def joined(op: str, x: Expr, y: Expr) -> Expr:
    """One operator of the language applied to elements of any types, with array semantics."""
    if {x.type, y.type} == {BOOL}:
        if op == "sub":
            fail("`-` of two Bools: write `x ^ y`, or `x & ~y`")
        op = ON_BOOL.get(op, op)
        if op in ("and", "or", "xor", "eq", "ne"):
            return build(op, x, y)
    if op in ir.ON_INT and FLOAT in (x.type, y.type):
        fail(f"`{op}` of a Float: compare it first")
    x, y = alike(number(x), number(y))
    if op == "pow":
        return _power(x, y)
    if op in ("floordiv", "mod") and x.type is FLOAT:
        # `floor` is an Int here, and Python's `//` of floats a float
        quotient = to_float(build("floor", build("div", x, y)))
        return quotient if op == "floordiv" else x - y * quotient
    if op in ("shl", "shr") and x.type is FLOAT:
        fail(f"`{op}` of a Float: make it an Int first")
    return binary(op, x, y)


def _power(x: Expr, y: Expr) -> Expr:
    if x.type is FLOAT or (y.op == "lit" and y.name >= 0):
        return build("pow", x, y)
    if x is lit(2):  # exact, where a power of Floats is rounded
        return build("shl", ir.ONE, y)
    return build("pow", to_float(x), to_float(y))
