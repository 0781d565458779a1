"""The meaning of torch's elementwise functions, reductions, indexing and shape changes, by name. Needs no torch.

>>> from frisket.dsl.ir import var
>>> q, k = Symbol(var("q")), Symbol(var("k"))
>>> SCALARS["where"](q >= k, SCALARS["remainder"](q, 4), -1)
where(q >= k, q % 4, -1)

An entry takes torch's arguments by torch's names. Dtypes count as Bool, Int or Float; casts neither wrap nor round.

>>> from frisket.dsl.from_python.symbol import table
>>> from frisket.dsl.ir import var
>>> from frisket.dsl.show import show
>>> from frisket.dsl.types import FLOAT
>>> x, q = table("x", (8, 3), FLOAT), Symbol(var("q"))
>>> show(norm(x[q], p=1, dim=-1).expr, ["x"])
'sum(j in 0..extent(x, 1): abs(x[q, j]))'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce, wraps
from typing import Any

from frisket.dsl import ir
from frisket.dsl.from_python.elements import alike, named_type, number, real, truth
from frisket.dsl.from_python.symbol import (
    ARITHMETIC,
    Symbol,
    aligned,
    apply_binary,
    axis,
    choice,
    elementwise,
    indexed,
    operand,
    product,
    reduced,
)
from frisket.dsl.from_python.user_line import fail
from frisket.dsl.ir import FLOAT_FUNCTIONS, INF, NEG_INF, Expr, build, lit, to_float
from frisket.dsl.operators import MADE_OF, expm1
from frisket.dsl.sugar import eq, maximum, minimum, ne, where
from frisket.dsl.types import BOOL, FLOAT, INT, Type

Function = Callable[..., Any]


def type_of_dtype(dtype: Any) -> Type:
    """Bool, Int or Float for a dtype of torch or numpy, or one of Python's types."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.").removeprefix("cuda.").lower()
    return named_type(name) or fail(f"{name} has no counterpart in the language: it has bool, int and float")


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


_softplus = MADE_OF["softplus"]


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
    return build("or", x < 0.0, 1.0 / x < 0.0) if x.type is FLOAT else x < 0  # -0.0 < 0 is false, and 1 / -0.0 is -inf


def _converted(make: Callable[..., Expr], kind: Callable[[Expr], Expr]) -> Callable[..., Expr]:
    return lambda *elements: make(*map(kind, elements))


ON_FLOAT: dict[str, Callable[[Expr], Expr]] = {
    **{n: partial(build, n) for n in FLOAT_FUNCTIONS},
    **MADE_OF,
    "expit": lambda x: build("sigmoid", x),
    "log10": lambda x: build("log", x) / math.log(10.0),
    "expm1": expm1,
    "erfc": lambda x: 1.0 - build("erf", x),
    "reciprocal": lambda x: 1.0 / x,
    # exp(x) - exp(-x) loses all digits near 0
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
    **dict.fromkeys(("abs", "absolute", "fabs"), abs),
    **dict.fromkeys(("neg", "negative"), lambda x: build("neg", x)),
    "positive": lambda x: x,
    "square": lambda x: x * x,
    "relu": lambda x: maximum(x, lit(0) if x.type is INT else lit(0.0)),
    "floor": lambda x: x if x.type is INT else _floor(x),
    "ceil": lambda x: x if x.type is INT else to_float(-build("floor", -x)),
    **dict.fromkeys(("trunc", "fix"), lambda x: x if x.type is INT else to_float(build("int", x))),
    "frac": lambda x: x - to_float(build("int", x)),
    "round": lambda x: x if x.type is INT else _round(x),
}


# the functions of one element of any type
ONE = {n: _converted(f, real) for n, f in ON_FLOAT.items()} | {n: _converted(f, number) for n, f in ON_NUMBER.items()}


def _one(name: str, make: Callable[[Expr], Expr]) -> Function:
    return lambda input, inplace=False: elementwise(make, input, label=f"`{name}`")


def _of_two(name: str, make: Callable[[Expr, Expr], Expr], kind: Callable[[Expr], Expr] = real) -> Function:
    """The function of two elements, each of them converted to a kind."""
    return lambda input, other: elementwise(_converted(make, kind), input, other, label=f"`{name}`")


# torch's names of the operators that take two, and the language's
_BINARY = """
add:add sub:sub subtract:sub mul:mul multiply:mul true_divide:div truediv:div
floor_divide:floordiv floordiv:floordiv remainder:mod mod:mod pow:pow
maximum:max minimum:min fmax:max fmin:min
lt:lt less:lt le:le less_equal:le gt:gt greater:gt ge:ge greater_equal:ge eq:eq ne:ne not_equal:ne
and:and or:or xor:xor bitwise_and:and bitwise_or:or bitwise_xor:xor
lshift:shl rshift:shr bitwise_left_shift:shl bitwise_right_shift:shr
"""
BINARY = dict(pair.split(":") for pair in _BINARY.split())
SWAPPED = {f"r{name}": op for name, op in {**ARITHMETIC, "div": "div"}.items()}


def _two(op: str, swapped: bool = False) -> Function:
    def call(input: Any, other: Any = None, *, alpha: Any = 1, **names: Any) -> Symbol:
        other = next(iter(names.values())) if names else other  # `exponent=`
        # a factor of 1 would stand in every text
        other = other if isinstance(alpha, int) and alpha == 1 else apply_binary("mul", other, alpha)
        return apply_binary(op, other, input) if swapped else apply_binary(op, input, other)

    return call


def _truncated(x: Expr, y: Expr) -> Expr:
    """The quotient x / y rounded towards zero, in their common type."""
    x, y = alike(number(x), number(y))
    if x.type is FLOAT:
        return to_float(build("int", x / y))
    # the sign of a positive literal is no factor
    sign = build("sign", x) if y.op == "lit" and y.name > 0 else build("sign", x) * build("sign", y)
    return sign * (abs(x) // abs(y))


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "trunc":
        return elementwise(_truncated, input, other, label="`div`")
    return apply_binary("div" if rounding_mode is None else "floordiv", input, other)


def _fmod(x: Expr, y: Expr) -> Expr:
    x, y = alike(x, y)
    return x - y * _truncated(x, y)


def _logaddexp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)); at a tie, infinities too, each argument has half the derivative."""
    same = eq(x, y)
    gap = where(same, 1.0, x - y)  # inf - inf is NaN, and the branch that is not chosen reaches the derivatives
    unequal = where(x > y, x, y) + build("log1p", build("exp", -abs(gap)))
    return where(same, 0.5 * x + 0.5 * y + math.log(2.0), unequal)


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
        term = apply_binary(op, tensor1, tensor2)
        term = term if isinstance(value, int) and value == 1 else apply_binary("mul", term, value)
        return apply_binary("add", input, term)

    return call


def clamp(input: Any, min: Any = None, max: Any = None) -> Symbol:
    result = operand(input, "`clamp`")
    if min is not None:
        result = apply_binary("max", result, min)
    return result if max is None else apply_binary("min", result, max)


def chosen(condition: Any, input: Any = None, other: Any = None, **names: Any) -> Symbol:
    if input is None or other is None:
        fail("`torch.where` with one argument gives positions in an array: give it three")
    return choice(condition, input, other, "`torch.where`")


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Symbol:
    # torch goes straight to x above the threshold, where the difference is below its precision
    def apply(x: Expr) -> Expr:
        return _softplus(real(x) * float(beta)) / float(beta) if beta != 1 else _softplus(real(x))

    return elementwise(apply, input, label="`softplus`")


def gelu(input: Any, approximate: str = "none") -> Symbol:
    def tanh(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + build("tanh", math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))

    return elementwise(lambda x: (tanh if approximate == "tanh" else MADE_OF["gelu"])(real(x)), input, label="`gelu`")


def _piece(make: Callable[..., Expr], **defaults: float) -> Function:
    """The method of a Float function with a few numbers after its argument."""

    def call(input: Any, *args: float, inplace: bool = False, **named: float) -> Symbol:
        numbers = {**defaults, **dict(zip(defaults, args)), **named}
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
    **{n: _one(n, f) for n, f in ONE.items()},
    **{n: _two(op) for n, op in BINARY.items()},
    **{n: _two(op, swapped=True) for n, op in SWAPPED.items()},
    **{n: _of_two(n, partial(build, n[8:]), truth) for n in ("logical_and", "logical_or", "logical_xor")},
    **PIECES,
    **{n: partial(_cast, n) for n in ("float", "double", "half", "bfloat16", "bool", "int", "long", "short")},
    "logaddexp": _of_two("logaddexp", _logaddexp),
    "hypot": _of_two("hypot", lambda x, y: build("sqrt", x * x + y * y)),
    "copysign": _of_two("copysign", lambda x, y: where(_signbit(y), -abs(x), abs(x))),
    "fmod": _of_two("fmod", _fmod, number),
    "heaviside": lambda input, values: elementwise(_heaviside, input, values, label="`heaviside`"),
    **{f.__name__: f for f in (lerp, softplus, gelu, nan_to_num, to)},
    "addcmul": _added("mul"),
    "addcdiv": _added("div"),
    "logical_not": _one("logical_not", lambda x: build("not", truth(x))),
    **dict.fromkeys(("invert", "bitwise_not"), lambda input: ~operand(input, "`~`")),
    "float_power": lambda input, exponent: apply_binary("pow", to(input, dtype="float"), exponent),
    **dict.fromkeys(("div", "divide"), div),
    **dict.fromkeys(("clamp", "clip"), clamp),
    "clamp_min": lambda input, min: clamp(input, min=min),
    "clamp_max": lambda input, max: clamp(input, max=max),
    "where": chosen,
    "masked_fill": lambda input, mask, value: choice(mask, value, input, "`masked_fill`"),
    **dict.fromkeys(("sign", "sgn"), _one("sign", lambda x: x if x.type is BOOL else build("sign", x))),
    **dict.fromkeys(("type", "astype"), typed),
    "type_as": lambda input, other: to(input, other.dtype),
}


def _on_array(function: Function) -> Function:
    """A function of a symbol that takes whatever stands for an array."""

    @wraps(function)
    def call(input: Any, *args: Any, **names: Any) -> Any:
        return function(operand(input, f"`{function.__name__}`"), *args, **names)

    return call


def _reduce(kind: str) -> Function:
    def call(input: Any, dim: Any = None, keepdim: bool = False, **names: Any) -> Symbol:
        x = stack(input) if isinstance(input, list | tuple) else operand(input, f"`{kind}`")
        dtype = names.pop("dtype", None)
        dim, keepdim = names.pop("axis", dim), names.pop("keepdims", keepdim)
        if names:
            raise TypeError(f"unexpected {', '.join(names)}")
        return reduced(kind, x if dtype is None else to(x, dtype), dim, keepdim)

    return call


def _extreme(kind: str) -> Function:
    def call(input: Any, other: Any = None, **names: Any) -> Symbol:
        if other is None and not names:
            return reduced(kind, operand(input, f"`{kind}`"))
        if names or isinstance(other, int):
            fail(f"`{kind}` along an axis gives indices too, which a mask cannot hold: write `torch.a{kind}`")
        return apply_binary(kind, input, other)

    return call


def mean(input: Any, dim: Any = None, keepdim: bool = False, **names: Any) -> Symbol:
    x = to(input, dtype="float")
    total = REDUCTIONS["sum"](x, dim, keepdim, **names)
    dim = names.get("axis", dim)
    chosen = x.shape if dim is None or not x.shape else [x.shape[d] for d in ([dim] if isinstance(dim, int) else dim)]
    return apply_binary("div", total, float(math.prod(chosen)))


def prod(x: Symbol, dim: Any = None, keepdim: bool = False, **_: Any) -> Symbol:
    if x.ndim == 0:
        return x
    # every entry is a factor that kernels write out
    if (x.ndim > 1 and dim is None) or keepdim or x.shape[dim or 0] > 64:
        fail("`prod` is over one axis of at most 64 entries")
    return reduce(partial(apply_binary, "mul"), moveaxis(x, dim or 0, 0), Symbol(lit(1)))


def norm(input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = None, **_: Any) -> Symbol:
    x = to(input, dtype="float")
    p = ord if ord is not None else 2 if p in (None, "fro") else p
    if p == 2:
        total = reduced("sum", apply_binary("mul", x, x), dim, keepdim)
        root = SCALARS["sqrt"](total)  # its derivative is infinite at 0, where torch takes 0 for the norm's
        return SCALARS["where"](apply_binary("eq", total, 0.0), 0.0, root)  # type: ignore[no-any-return]
    if p == 1:
        return reduced("sum", abs(x), dim, keepdim)
    if p == math.inf:
        return reduced("max", abs(x), dim, keepdim)
    return fail(f"`norm` of order {p}: the orders are 1, 2 and inf")


def dot(input: Any, tensor: Any = None, *, other: Any = None, dim: int = -1) -> Symbol:
    return reduced("sum", apply_binary("mul", input, tensor if other is None else other), dim)


def inner(input: Any, other: Any) -> Symbol:
    x, y = operand(input, "`inner`"), operand(other, "`inner`")
    if x.ndim > 1 and y.ndim > 1:
        fail(f"`inner` of arrays with {x.ndim} and {y.ndim} axes: one of them is a vector, the other has axes too")
    return dot(x, y) if x.ndim and y.ndim else apply_binary("mul", x, y)


def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Symbol:
    x, y = operand(elements, "`isin`"), operand(test_elements, "`isin`")
    member = reduced("any", apply_binary("eq", x[..., None] if x.ndim else x, reshape(y, -1)), -1)
    return ~member if invert else member


def linear(x: Symbol, weight: Any, bias: Any = None) -> Symbol:
    """The product `weight @ input + bias` for one vector."""
    if x.ndim != 1:
        fail(f"`linear` of an array with {x.ndim} axes: it takes one vector")
    output = product(operand(weight, "`linear`"), x)
    return output if bias is None else apply_binary("add", output, bias)


def embedding(input: Any, weight: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Symbol:
    return indexed(operand(weight, "`embedding`"), operand(input, "`embedding`"))


def stack(tensors: Sequence[Any], dim: int = 0) -> Symbol:
    parts, axes = aligned([operand(t, "`stack`") for t in tensors], "`stack`")
    for i in range(1, len(parts)):
        parts[0], parts[i] = alike(parts[0], parts[i])
    # the second pass: a later part may have widened the type of the first
    parts = [alike(p, parts[0])[0] for p in parts]
    new, element = axis(len(parts)), parts[-1]
    for i in reversed(range(len(parts) - 1)):
        element = where(eq(new.bound, i), parts[i], element)
    return moveaxis(Symbol(element, (new, *axes)), 0, dim)


def permute(x: Symbol, *dims: Any) -> Symbol:
    order = dims[0] if dims and not isinstance(dims[0], int) else dims
    return Symbol(x.expr, tuple(x.axes[d] for d in order))


def moveaxis(x: Symbol, source: int, destination: int) -> Symbol:
    axes = list(x.axes)
    axes.insert(destination % x.ndim, axes.pop(source))
    return Symbol(x.expr, tuple(axes))


def transpose(x: Symbol, dim0: int, dim1: int) -> Symbol:
    axes = list(x.axes)
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return Symbol(x.expr, tuple(axes))


def turned(input: Any) -> Symbol:
    """The transpose `x.t()`, `x.T`, `x.mT`."""
    x = operand(input, "`t`")
    return transpose(x, -2, -1) if x.ndim > 1 else x


def unsqueeze(x: Symbol, dim: int) -> Symbol:
    at = dim % (x.ndim + 1)
    return Symbol(x.expr, (*x.axes[:at], axis(1), *x.axes[at:]))


def squeeze(x: Symbol, dim: Any = None) -> Symbol:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % x.ndim for d in dims if x.axes and x.shape[d] == 1}
    moves = {x.axes[d].bound: ir.ZERO for d in gone}
    return Symbol(ir.substitute(x.expr, moves), tuple(a for i, a in enumerate(x.axes) if i not in gone))


def reshape(x: Symbol, *shape: Any) -> Symbol:
    """A row-major view in another shape: the old indices are quotients and remainders of the flat index."""
    dims = [int(n) for n in (shape[0] if shape and not isinstance(shape[0], int) else shape)]
    total, known = math.prod(x.shape), math.prod(n for n in dims if n >= 0)
    sizes = [total // max(known, 1) if n < 0 else n for n in dims]
    if math.prod(sizes) != total:
        fail(f"an array of {total} entries has no shape {tuple(dims)}")
    if tuple(sizes) == x.shape:
        return x
    axes = tuple(axis(n) for n in sizes)
    flat: Expr = ir.ZERO
    for a in axes:
        flat = a.bound if flat is ir.ZERO else flat * a.size + a.bound
    moves, below = {}, total
    for i, old in enumerate(x.axes):
        below //= max(old.size, 1)
        quotient = flat // below if below > 1 else flat
        moves[old.bound] = quotient % old.size if i else quotient
    return Symbol(ir.substitute(x.expr, moves), axes)


def flatten(x: Symbol, start_dim: int = 0, end_dim: int = -1) -> Symbol:
    if not x.ndim:
        return reshape(x, 1)
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return reshape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


def expand(x: Symbol, *sizes: Any) -> Symbol:
    want = list(sizes[0] if sizes and not isinstance(sizes[0], int) else sizes)
    full = [1] * (len(want) - x.ndim) + list(x.shape)
    wide = tuple(axis(n if w < 0 else w) for n, w in zip(full, want, strict=True))
    parts, axes = aligned([x, Symbol(ir.ZERO, wide)], "`expand`")
    return Symbol(parts[0], axes)


def select(x: Symbol, dim: int, index: Any) -> Symbol:
    return x[(*(slice(None),) * (dim % x.ndim), index)]


def same(input: Any, *_: Any, **__: Any) -> Symbol:
    """The input unchanged: copies, devices and memory formats mean nothing here."""
    return operand(input, "a copy")


REDUCTIONS: dict[str, Function] = {n: _reduce(n) for n in ("sum", "any", "all")}
REDUCTIONS |= {"amax": _reduce("max"), "amin": _reduce("min"), "mean": mean}

ARRAYS: dict[str, Function] = {
    **REDUCTIONS,
    "max": _extreme("max"),
    "min": _extreme("min"),
    **{f.__name__: f for f in (inner, isin, embedding, stack)},
    **{f.__name__: _on_array(f) for f in (prod, linear, permute, unsqueeze, squeeze, flatten, select)},
    **dict.fromkeys(("norm", "vector_norm"), norm),
    **dict.fromkeys(("dot", "vdot", "vecdot"), dot),
    "matmul": lambda input, other: product(operand(input, "`@`"), operand(other, "`@`")),
    "mv": lambda input, vec: product(operand(input, "`@`"), operand(vec, "`@`")),
    "rmatmul": lambda input, other: product(operand(other, "`@`"), operand(input, "`@`")),
    "take": lambda input, index: indexed(reshape(operand(input, "`reshape`"), -1), operand(index, "`take`")),
    "index_select": lambda input, dim, index: select(operand(input, "`select`"), dim, index),
    "getitem": lambda input, key: indexed(operand(input, "an index"), key),
    **dict.fromkeys(("moveaxis", "movedim"), _on_array(moveaxis)),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _on_array(transpose)),
    **dict.fromkeys(("t", "T", "mT"), turned),
    **dict.fromkeys(("reshape", "view"), _on_array(reshape)),
    **dict.fromkeys(("expand", "broadcast_to"), _on_array(expand)),
    "expand_as": lambda input, other: expand(operand(input, "`expand`"), operand(other, "`expand_as`").shape),
    **dict.fromkeys(("clone", "contiguous", "cpu", "cuda"), same),
}
