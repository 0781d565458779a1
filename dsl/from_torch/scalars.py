"""The meaning of torch's elementwise functions on symbols, by name. Nothing here needs torch.

>>> from frisket.dsl.ir import var
>>> q, k = Symbol(var("q")), Symbol(var("k"))
>>> SCALARS["where"](q >= k, SCALARS["remainder"](q, 4), -1)
where(q >= k, q % 4, -1)

An entry takes torch's arguments by torch's names. Dtypes count as Bool, Int or Float; widths neither wrap nor round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from frisket.dsl.from_python.elements import alike, number, real, truth
from frisket.dsl.from_python.symbol import Symbol, apply_binary, choice, elementwise, operand
from frisket.dsl.from_python.user_line import fail
from frisket.dsl.functions import MADE_OF, expm1
from frisket.dsl.ir import FLOAT_FUNCTIONS, INF, NEG_INF, Expr, build, lit, to_float
from frisket.dsl.sugar import eq, maximum, minimum, ne, where
from frisket.dsl.types import BOOL, FLOAT, INT, Type

Function = Callable[..., Any]


def type_of_dtype(dtype: Any) -> Type:
    """Bool, Int or Float for a dtype of torch or numpy, or one of Python's types."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.").removeprefix("cuda.").lower()
    if name.startswith("bool"):
        return BOOL
    if name.startswith(("int", "uint", "long", "short")):
        return INT
    if name.startswith(("float", "bfloat", "half", "double")):
        return FLOAT
    return fail(f"{name} has no counterpart in the language: it has bool, int and float")


def cast(e: Expr, type: Type) -> Expr:
    if type is BOOL:
        return truth(e)
    if type is FLOAT:
        return real(e)
    if e.type is FLOAT:
        return e.args[0] if e.op == "float" else build("int", e)
    return number(e)


def to(x: Any, *args: Any, dtype: Any = None, **_: Any) -> Symbol:
    """The conversion `x.to(...)` to a dtype, another tensor's, or a device, which means nothing here."""
    for a in args:
        if a is None or isinstance(a, bool | str) or type(a).__name__ == "device":
            continue
        dtype = a.dtype if hasattr(a, "dtype") and not isinstance(a, type) else a
    return (
        operand(x, "`to`") if dtype is None else elementwise(lambda e: cast(e, type_of_dtype(dtype)), x, label="`to`")
    )


def typed(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Symbol:
    """The conversion `x.type(...)` or `x.astype(...)`: a text names a dtype here, where for `to` it names a device."""
    return to(x, dtype=dtype)


def _cast(type: str, input: Any, **_: Any) -> Symbol:
    """The method `x.float()`, `x.long()`, ... for one type."""
    return to(input, dtype=type)


# -- one element each -------------------------------------------------------------------------------


def _softplus(x: Expr) -> Expr:
    return MADE_OF["softplus"](x)


def _floor(x: Expr) -> Expr:
    return to_float(build("floor", x))


def _round(x: Expr) -> Expr:
    """Rounding to the nearest integer, halves to the even neighbour."""
    low = build("floor", x)
    rest = x - to_float(low)
    return to_float(where(rest < 0.5, low, where(rest > 0.5, low + 1, low + low % 2)))


def _bounded(x: Expr, low: float, high: float) -> Expr:
    return minimum(maximum(x, low), high)


def _sinc(x: Expr) -> Expr:
    turned = where(eq(x, 0.0), 1.0, math.pi * x)  # nothing is divided by 0, in derivatives either
    return where(eq(x, 0.0), 1.0, build("sin", turned) / turned)


def _signbit(x: Expr) -> Expr:
    """Whether a number is below 0, or -0.0."""
    return build("or", x < 0.0, 1.0 / x < 0.0) if x.type is FLOAT else x < 0


ON_FLOAT: dict[str, Callable[[Expr], Expr]] = {
    **{n: partial(build, n) for n in FLOAT_FUNCTIONS},
    **MADE_OF,
    "expit": lambda x: build("sigmoid", x),
    "log10": lambda x: build("log", x) / math.log(10.0),
    "expm1": expm1,
    "erfc": lambda x: 1.0 - build("erf", x),
    "reciprocal": lambda x: 1.0 / x,
    "sinh": lambda x: 0.5 * (expm1(x) + expm1(x) / (expm1(x) + 1.0)),
    "cosh": lambda x: 0.5 * (build("exp", x) + build("exp", -x)),
    "logit": lambda x: build("log", x / (1.0 - x)),
    "log_sigmoid": lambda x: -_softplus(-x),
    "softsign": lambda x: x / (1.0 + abs(x)),
    "mish": lambda x: x * build("tanh", _softplus(x)),
    "tanhshrink": lambda x: x - build("tanh", x),
    "relu6": lambda x: _bounded(x, 0.0, 6.0),
    "hardsigmoid": lambda x: _bounded(x + 3.0, 0.0, 6.0) / 6.0,
    "hardswish": lambda x: x * _bounded(x + 3.0, 0.0, 6.0) / 6.0,
    "sinc": _sinc,
    "selu": lambda x: 1.0507009873554805 * where(x > 0.0, x, 1.6732632423543772 * expm1(x)),
    "isfinite": partial(build, "isfinite"),
    "isnan": lambda x: ne(x, x),
    "isinf": lambda x: eq(abs(x), INF),
    "isneginf": lambda x: eq(x, NEG_INF),
    "isposinf": lambda x: eq(x, INF),
}
ON_NUMBER: dict[str, Callable[[Expr], Expr]] = {
    "signbit": _signbit,
    "abs": abs,
    "absolute": abs,
    "fabs": abs,
    "neg": lambda x: build("neg", x),
    "negative": lambda x: build("neg", x),
    "positive": lambda x: x,
    "square": lambda x: x * x,
    "relu": lambda x: maximum(x, lit(0) if x.type is INT else lit(0.0)),
    "floor": lambda x: x if x.type is INT else _floor(x),
    "ceil": lambda x: x if x.type is INT else to_float(-build("floor", -x)),
    "trunc": lambda x: x if x.type is INT else to_float(build("int", x)),
    "fix": lambda x: x if x.type is INT else to_float(build("int", x)),
    "frac": lambda x: x - to_float(build("int", x)),
    "round": lambda x: x if x.type is INT else _round(x),
}


def _one(name: str, make: Callable[[Expr], Expr], kind: Callable[[Expr], Expr]) -> Function:
    def call(input: Any, inplace: bool = False) -> Symbol:
        return elementwise(lambda x: make(kind(x)), input, label=f"`{name}`")

    return call


BINARY = {
    "add": "add", "sub": "sub", "subtract": "sub", "mul": "mul", "multiply": "mul", "true_divide": "div",
    "truediv": "div", "floor_divide": "floordiv", "floordiv": "floordiv", "remainder": "mod", "mod": "mod",
    "pow": "pow", "maximum": "max", "minimum": "min", "fmax": "max", "fmin": "min",
    "lt": "lt", "less": "lt", "le": "le", "less_equal": "le", "gt": "gt", "greater": "gt", "ge": "ge",
    "greater_equal": "ge", "eq": "eq", "ne": "ne", "not_equal": "ne",
    "and": "and", "or": "or", "xor": "xor", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "lshift": "shl", "rshift": "shr", "bitwise_left_shift": "shl", "bitwise_right_shift": "shr",
}  # fmt: skip
SWAPPED = {
    "radd": "add", "rsub": "sub", "rmul": "mul", "rdiv": "div", "rtruediv": "div", "rfloordiv": "floordiv",
    "rmod": "mod", "rpow": "pow", "rand": "and", "ror": "or", "rxor": "xor", "rlshift": "shl", "rrshift": "shr",
}  # fmt: skip


def _two(op: str, swapped: bool = False) -> Function:
    def call(input: Any, other: Any = None, *, alpha: Any = 1, **names: Any) -> Symbol:
        other = next(iter(names.values())) if names else other  # `exponent=`
        other = other if isinstance(alpha, int) and alpha == 1 else apply_binary("mul", other, alpha)
        return apply_binary(op, other, input) if swapped else apply_binary(op, input, other)

    return call


def _logical(op: str) -> Function:
    return lambda input, other: elementwise(
        lambda x, y: build(op, truth(x), truth(y)), input, other, label=f"`logical_{op}`"
    )


def _truncated(x: Expr, y: Expr) -> Expr:
    """The quotient x / y rounded towards zero, in their common type."""
    x, y = alike(number(x), number(y))
    if x.type is FLOAT:
        return to_float(build("int", x / y))
    sign = build("sign", x) if y.op == "lit" and y.name > 0 else build("sign", x) * build("sign", y)
    return sign * (abs(x) // abs(y))


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "trunc":
        return elementwise(_truncated, input, other, label="`div`")
    return apply_binary("div" if rounding_mode is None else "floordiv", input, other)


def fmod(input: Any, other: Any) -> Symbol:
    def make(x: Expr, y: Expr) -> Expr:
        x, y = alike(number(x), number(y))
        return x - y * _truncated(x, y)

    return elementwise(make, input, other, label="`fmod`")


def _logaddexp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)); at a tie, infinities too, each argument has half the derivative."""
    same = eq(x, y)
    gap = where(same, 1.0, x - y)
    apart = where(x > y, x, y) + build("log1p", build("exp", -abs(gap)))
    return where(same, 0.5 * x + 0.5 * y + math.log(2.0), apart)


def _on_floats(name: str, make: Callable[[Expr, Expr], Expr]) -> Function:
    return lambda input, other: elementwise(lambda x, y: make(real(x), real(y)), input, other, label=f"`{name}`")


def _heaviside(x: Expr, y: Expr) -> Expr:
    if {x.type, y.type} == {BOOL}:
        return build("or", x, y)
    x, y = alike(number(x), number(y))
    zero, one = (lit(0.0), lit(1.0)) if x.type is FLOAT else (lit(0), lit(1))
    return where(eq(x, zero), y, where(x > zero, one, zero))


def lerp(input: Any, end: Any, weight: Any) -> Symbol:
    def make(x: Expr, y: Expr, w: Expr) -> Expr:
        x, y, w = real(x), real(y), real(w)
        return where(abs(w) < 0.5, x + w * (y - x), y - (y - x) * (1.0 - w))  # as torch has it: exact at both ends

    return elementwise(make, input, end, weight, label="`lerp`")


def _added(op: str) -> Function:
    """The functions `addcmul` and `addcdiv`: input + value * (tensor1 op tensor2)."""

    def call(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Symbol:
        found = apply_binary(op, tensor1, tensor2)
        found = found if isinstance(value, int) and value == 1 else apply_binary("mul", found, value)
        return apply_binary("add", input, found)

    return call


def clamp(input: Any, min: Any = None, max: Any = None) -> Symbol:
    found = operand(input, "`clamp`")
    if min is not None:
        found = apply_binary("max", found, min)
    return found if max is None else apply_binary("min", found, max)


def chosen(condition: Any, input: Any = None, other: Any = None, **names: Any) -> Symbol:
    if input is None or other is None:
        fail("`torch.where` with one argument gives positions in an array: give it three")
    return choice(condition, input, other, "`torch.where`")


def sign(input: Any) -> Symbol:
    return elementwise(lambda x: x if x.type is BOOL else build("sign", x), input, label="`sign`")


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Symbol:
    # torch goes straight to x above the threshold, where the difference is below its precision
    return elementwise(lambda x: _softplus(real(x) * float(beta)) / float(beta) if beta != 1 else _softplus(real(x)),
                       input, label="`softplus`")  # fmt: skip


def gelu(input: Any, approximate: str = "none") -> Symbol:
    def tanh(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + build("tanh", math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))

    return elementwise(lambda x: (tanh if approximate == "tanh" else MADE_OF["gelu"])(real(x)), input, label="`gelu`")


def _piece(make: Callable[..., Expr], **defaults: float) -> Function:
    """The method of a Float function with a few numbers beside its argument."""

    def call(input: Any, *given: float, inplace: bool = False, **named: float) -> Symbol:
        numbers = {**defaults, **dict(zip(defaults, given)), **named}
        if set(numbers) != set(defaults):
            raise TypeError(f"it takes {', '.join(defaults)}")
        return elementwise(lambda x: make(real(x), *(float(v) for v in numbers.values())), input, label="a function")

    return call


PIECES: dict[str, Function] = {
    "leaky_relu": _piece(lambda x, s: where(x >= 0.0, x, x * s), negative_slope=0.01),
    "elu": _piece(lambda x, a: where(x > 0.0, x, a * expm1(x)), alpha=1.0),
    "celu": _piece(lambda x, a: where(x > 0.0, x, a * expm1(x / a)), alpha=1.0),
    "hardtanh": _piece(_bounded, min_val=-1.0, max_val=1.0),
    "threshold": _piece(lambda x, t, v: where(x > t, x, v), threshold=0.0, value=0.0),
    "hardshrink": _piece(lambda x, c: where(abs(x) > c, x, 0.0), lambd=0.5),
    "softshrink": _piece(lambda x, c: where(x > c, x - c, where(x < -c, x + c, 0.0)), lambd=0.5),
}


def nan_to_num(input: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Symbol:
    most = 3.4028234663852886e38  # of float32, as scores are
    high, low = (most if posinf is None else posinf), (-most if neginf is None else neginf)

    def make(x: Expr) -> Expr:
        if x.type is not FLOAT:
            return x
        return where(ne(x, x), float(nan), where(eq(x, INF), float(high), where(eq(x, NEG_INF), float(low), x)))

    return elementwise(make, input, label="`nan_to_num`")


SCALARS: dict[str, Function] = {
    **{n: _one(n, f, real) for n, f in ON_FLOAT.items()},
    **{n: _one(n, f, number) for n, f in ON_NUMBER.items()},
    **{n: _two(op) for n, op in BINARY.items()},
    **{n: _two(op, swapped=True) for n, op in SWAPPED.items()},
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor")},
    **PIECES,
    **{n: partial(_cast, n) for n in ("float", "double", "half", "bfloat16", "bool", "int", "long", "short")},
    "logaddexp": _on_floats("logaddexp", _logaddexp),
    "hypot": _on_floats("hypot", lambda x, y: build("sqrt", x * x + y * y)),
    "copysign": _on_floats("copysign", lambda x, y: where(_signbit(y), -abs(x), abs(x))),
    "heaviside": lambda input, values: elementwise(_heaviside, input, values, label="`heaviside`"),
    "lerp": lerp, "addcmul": _added("mul"), "addcdiv": _added("div"),
    "logical_not": lambda input: elementwise(lambda x: build("not", truth(x)), input, label="`logical_not`"),
    "invert": lambda input: ~operand(input, "`~`"),
    "bitwise_not": lambda input: ~operand(input, "`~`"),
    "float_power": lambda input, exponent: apply_binary("pow", to(input, dtype="float"), exponent),
    "div": div, "divide": div, "fmod": fmod, "clamp": clamp, "clip": clamp,
    "clamp_min": lambda input, min: clamp(input, min=min),
    "clamp_max": lambda input, max: clamp(input, max=max),
    "where": chosen,
    "masked_fill": lambda input, mask, value: choice(mask, value, input, "`masked_fill`"),
    "sign": sign, "sgn": sign, "softplus": softplus, "gelu": gelu, "nan_to_num": nan_to_num,
    "to": to, "type": typed, "astype": typed, "type_as": lambda input, other: to(input, other.dtype),
}  # fmt: skip
