"""The meaning of JAX's primitives for one element: Exprs in, an Expr out.

Casts among floats do nothing. An Int that may leave its dtype in JAX is reduced to the dtype by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.from_python.elements import ON_BOOL, named_type, number, truth
from frisket.dsl.from_torch.scalars import ONE
from frisket.dsl.ir import COMPARISONS, OPERATORS, Expr, binary, build, lit, literal_value, to_float
from frisket.dsl.transfer import EXACT, integral
from frisket.dsl.types import BOOL, FLOAT, INT, Type

Equation = Any  # jax.extend.core.JaxprEqn
Meaning = Callable[..., Expr]  # of the equation and its operands


class Refused(Exception):  # noqa: N818 (not an error yet: the caller adds the user's line)
    """The language cannot express an equation; the text says why and what to do."""


def type_of(dtype: Any) -> Type:
    """The type of a JAX dtype."""
    name = str(dtype)
    type = named_type(name)
    if type is None:
        raise Refused(RANDOM if name.startswith("key") else f"an array of {name}; the language has bool, int and float")
    return type


def literal(value: Any, dtype: Any) -> Expr:
    """A number as its writer meant it: the shortest decimal that rounds to JAX's float32; pi and e are themselves."""
    type, number_ = type_of(dtype), np.asarray(value)
    if type is FLOAT:
        if str(dtype) != "float32" or number_.dtype == np.float64:
            return lit(float(number_))
        known = next((c for c in (math.pi, math.e) if np.float32(c) == number_), None)
        return lit(float(str(number_)) if known is None else known)
    return lit(bool(number_) if type is BOOL else int(number_))


# -- arithmetic -------------------------------------------------------------------------------------

ON_TRUTH: dict[str, Callable[[Expr, Expr], Expr]] = {
    "lt": lambda x, y: ~x & y,
    "le": lambda x, y: ~x | y,
    "gt": lambda x, y: x & ~y,
    "ge": lambda x, y: x | ~y,
}


def _arithmetic(op: str, _: Equation, x: Expr, y: Expr) -> Expr:
    return build(ON_BOOL[op] if x.type is BOOL and op in ON_BOOL else op, x, y)


def _comparison(op: str, _: Equation, x: Expr, y: Expr) -> Expr:
    if x.type is BOOL and op in ON_TRUTH:
        return ON_TRUTH[op](x, y)
    whole = integral(x), integral(y)
    if x.type is FLOAT and (_rounded(x) or _rounded(y)) and whole[0] is not None and whole[1] is not None:
        x, y = whole[0], whole[1]
    return build(op, x, y)


def _rounded(e: Expr) -> bool:
    """Whether a rounding function is among the operators that `integral` takes apart."""
    if e.op == "float":
        return bool(ir.find(e, "floor"))
    return e.op in EXACT and any(map(_rounded, e.args))


def _unsigned(eqn: Equation) -> bool:
    return bool(eqn.invars[0].aval.dtype.kind == "u")


def _div(eqn: Equation, x: Expr, y: Expr) -> Expr:
    if x.type is FLOAT:
        return build("div", x, y)
    if _unsigned(eqn):  # without signs, rounding down is rounding towards zero
        return x // y
    return build("sign", x) * build("sign", y) * (abs(x) // abs(y))  # towards zero


def _rem(eqn: Equation, x: Expr, y: Expr) -> Expr:
    if x.type is FLOAT:
        raise Refused("`%` and `//` of floats; write `x - y * jnp.floor(x / y)`, or compute with integers")
    return x % y if _unsigned(eqn) else build("sign", x) * (abs(x) % abs(y))


def _integer_pow(eqn: Equation, x: Expr) -> Expr:
    y = eqn.params["y"]
    if x.type is INT and y < 0:
        raise Refused(f"an integer to the power {y}")
    return build("pow", x, lit(y if x.type is INT else float(y)))


def _pow(_: Equation, x: Expr, y: Expr) -> Expr:
    if x.type is INT and y.type is INT and literal_value(y, -1) < 0:
        raise Refused("an integer to a power that varies; convert one to float")
    return build("pow", x, y) if x.type is INT and y.type is INT else build("pow", to_float(x), to_float(y))


def _shift_right_logical(eqn: Equation, x: Expr, y: Expr) -> Expr:
    bits = eqn.invars[0].aval.dtype.itemsize * 8
    if bits == 64:  # 1 << 64 leaves 64 bits: the sign's copies are masked off after the shift
        return (x >> y) & build("wrap", (ir.ONE << 64 - y) - 1, lit(64))
    return build("shr", x if _unsigned(eqn) else x % (1 << bits), y)


# -- rounding and casts -----------------------------------------------------------------------------


def _round(eqn: Equation, x: Expr) -> Expr:
    if int(eqn.params["rounding_method"]) == 0:  # away from zero
        return build("sign", x) * to_float(build("floor", abs(x) + 0.5))
    up = build("floor", x + 0.5)
    tie = build("eq", to_float(up) - x, lit(0.5))
    return to_float(build("where", tie & build("eq", up % 2, ir.ONE), up - 1, up))  # halves to even


def _convert(eqn: Equation, x: Expr) -> Expr:
    want = type_of(eqn.params["new_dtype"])
    if want is x.type:
        return x
    if want is BOOL:
        return truth(x)
    if want is FLOAT:
        return to_float(number(x))
    whole = integral(x) if _rounded(x) else None
    return whole if whole is not None else build("int", x)


# -- choices ----------------------------------------------------------------------------------------


def choose(which: Expr, *cases: Expr) -> Expr:
    """The Expr of `cases[which]`; which is a Bool, or an Int clamped to the last case."""
    if which.op == "int" and which.args[0].type is BOOL:
        which = which.args[0]
    if which.type is BOOL:
        return build("where", which, cases[1], cases[0])
    if which.op == "lit":
        place: int = min(max(which.name, 0), len(cases) - 1)
        return cases[place]
    if which.op == "where" and which.args[1].op == "lit":  # the first condition that holds, as jnp.select asks
        return build("where", which.args[0], choose(which.args[1], *cases), choose(which.args[2], *cases))
    out = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        out = build("where", build("le", which, lit(i)), cases[i], out)
    return out


def _of_elements(make: Callable[..., Expr]) -> Meaning:
    return lambda _, *elements: make(*elements)


# JAX's names of the language's operators, where they have others
NAMES = {"logistic": "sigmoid", "is_finite": "isfinite"}
NAMES |= {op: op for op, o in OPERATORS.items() if o.takes in ("number", "float") and o.arity == 1}
BITWISE = {"and": "and", "or": "or", "xor": "xor", "shift_left": "shl", "shift_right_arithmetic": "shr"}


SCALARS: dict[str, Meaning] = {
    **{op: partial(_arithmetic, op) for op, o in OPERATORS.items() if (o.takes, o.arity) == ("number", 2)},
    **{op: partial(_comparison, op) for op in sorted(COMPARISONS)},
    **{n: _of_elements(partial(build, op)) for n, op in NAMES.items()},
    **{n: _of_elements(partial(binary, op)) for n, op in BITWISE.items()},
    **{n: _of_elements(ONE[n]) for n in ("square", "expm1", "erfc", "floor", "ceil")},
    **{f.__name__[1:]: f for f in (_div, _rem, _pow, _integer_pow, _round, _shift_right_logical)},
    "clamp": lambda _, low, x, high: build("min", build("max", x, low), high),
    "not": lambda _, x: ~x,
    "select_n": lambda _, which, *cases: choose(which, *cases),
    "convert_element_type": _convert,
    **dict.fromkeys("copy copy_p reduce_precision optimization_barrier stop_gradient".split(), lambda _, x: x),
}

RANDOM = (
    "jax.random inside a mask: positions draw nothing; write `random(seed, b, h, q, k)` in text, "
    "or draw an array outside the function and index it"
)
LOOP = "a loop that runs until a condition holds; write a Python loop over a fixed range, or a reduction over an axis"
CALLBACK = "a callback into Python; leave it out"
REASONS = {"while": LOOP, "threefry2x32": RANDOM}
REASONS |= {f"random_{n}": RANDOM for n in "bits fold_in seed wrap unwrap split gamma clone".split()}
REASONS |= dict.fromkeys(("debug_callback", "pure_callback", "io_callback"), CALLBACK)


def argument(shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value that jax.make_jaxpr takes in place of an array."""
    import jax

    struct: Any = jax.ShapeDtypeStruct  # JAX leaves it untyped
    return struct(shape, dtype)
