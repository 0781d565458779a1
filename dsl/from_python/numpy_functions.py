"""numpy's functions and arrays in a traced function.

>>> from frisket.dsl.ir import var
>>> q, k = Symbol(var("q")), Symbol(var("k"))
>>> np.where(q > k, q - k, 0) < 4
where(q > k, q - k, 0) < 4
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import invert, neg, pos
from types import BuiltinFunctionType
from typing import Any

import numpy as np

from frisket.dsl.from_torch.scalars import BINARY, ONE, REDUCTIONS
from frisket.dsl.ir import Expr, build
from frisket.dsl.types import BOOL, FLOAT, INT, Type

from .elements import floor, joined, number, real, truth
from .symbol import ARITHMETIC, COMPARISONS, Symbol, apply_binary, choice, elementwise, handles, indexed, operand, table
from .user_line import fail

ELEMENT: dict[str, Type] = {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}
Naming = Callable[[str, Any], str]  # the name a table gets, from the one it wishes for and its array

# numpy's names of the operators that take two, and the language's, where torch has other names
_UFUNCS = "divide:div power:pow float_power:pow left_shift:shl right_shift:shr equal:eq"
UFUNCS = BINARY | dict(pair.split(":") for pair in _UFUNCS.split())
UNARY: dict[str, Callable[[Expr], Expr]] = {
    **ONE,
    "logical_not": lambda x: build("not", truth(x)),
    "fabs": lambda x: build("abs", real(x)),
    "sign": lambda x: build("sign", number(x)),
    "floor": floor,
    "ceil": lambda x: -build("floor", -x) if x.type is FLOAT else number(x),
    "trunc": lambda x: build("int", x) if x.type is FLOAT else number(x),
}

OF_SYMBOL: dict[str, Callable[[Any], Any]] = {"invert": invert, "bitwise_not": invert, "negative": neg, "positive": pos}


@handles("__array_ufunc__")
def apply(name: str, inputs: tuple[Any, ...]) -> Any:
    """The result of `np.name(*inputs)` where some input is a symbol."""
    what = f"np.{name}"
    if name in UFUNCS:
        return elementwise(lambda x, y: joined(UFUNCS[name], x, y), *inputs, label=what)
    if name.startswith("logical_") and len(inputs) == 2:
        return elementwise(lambda x, y: build(name[8:], truth(x), truth(y)), *inputs, label=what)
    x = operand(inputs[0], what)
    if name in OF_SYMBOL:
        return OF_SYMBOL[name](x)
    if name in UNARY:
        return elementwise(UNARY[name], x, label=what)
    return fail(f"np.{name} has no counterpart in the language")


@handles("__array_function__")
def array_function(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__
    if name in REDUCTIONS and args and not set(kwargs) - {"axis", "keepdims"}:
        return REDUCTIONS[name](*args, **kwargs)
    if kwargs:
        fail(f"np.{name} of a position takes no keywords here")
    if func is np.where and len(args) == 3:
        condition, yes, no = args
        return choice(condition, yes, no, "np.where")
    if func is np.clip and len(args) == 3:
        return apply_binary("min", apply_binary("max", args[0], args[1]), args[2])
    if func is np.dot:
        return args[0] @ args[1]
    return fail(f"np.{name} has no counterpart in the language")


def element(array: Any) -> Type | None:
    """The type of an array's entries, None where they are no numbers of the language."""
    kind = array.dtype.kind
    # numpy lists the dtypes of ml_dtypes as void
    return FLOAT if kind == "V" and array.dtype.name.startswith(("bfloat16", "float8")) else ELEMENT.get(kind)


class TracedTable:
    """A stand-in for a captured array during the trace. Indexing by positions makes lookups; all else reads it."""

    __slots__ = ("_name", "_naming", "array")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, naming: Naming, array: Any, name: str) -> None:
        self._naming, self.array, self._name = naming, array, name

    def symbol(self) -> Symbol:
        """The whole array, as Exprs."""
        kind: Any = element(self.array)
        return table(self._naming(self._name, self.array), self.array.shape, kind)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(x, Symbol) for x in keys):  # no position enters: numpy itself indexes
            return self._again(self.array[tuple(x.array if isinstance(x, TracedTable) else x for x in keys)])
        return indexed(self.symbol(), tuple(x.symbol() if isinstance(x, TracedTable) else x for x in keys))

    def _again(self, value: Any) -> Any:
        """A new table of values computed from a table."""
        if isinstance(value, np.ndarray) and value.ndim and element(value):
            return TracedTable(self._naming, value, self._name)
        return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.asarray(self.array, *args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        for x in inputs:
            if isinstance(x, Symbol):
                return x.__array_ufunc__(ufunc, method, *inputs, **options)
        plain = [x.array if isinstance(x, TracedTable) else x for x in inputs]
        return self._again(getattr(ufunc, method)(*plain, **options))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, Symbol) for x in args):
            return array_function(func, args, kwargs)
        return self._again(func(*[x.array if isinstance(x, TracedTable) else x for x in args], **kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.array, name)
        if callable(value):
            return lambda *args, **options: self._again(value(*args, **options))
        return self._again(value)

    def __len__(self) -> int:
        return len(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)


def _forward(name: str) -> Any:
    def method(self: TracedTable, *others: Any) -> Any:
        if any(isinstance(o, Symbol) for o in others):
            operand(self, f"`{name.strip('_')}`")  # raises: an array has to be indexed before it meets a position
        return self._again(getattr(self.array, name)(*[o.array if isinstance(o, TracedTable) else o for o in others]))

    return method


# Python looks operators up on the class, where `__getattr__` does not see them
for _name in (*ARITHMETIC, *(f"r{n}" for n in ARITHMETIC), *COMPARISONS, "neg", "pos", "abs", "invert"):
    setattr(TracedTable, f"__{_name}__", _forward(f"__{_name}__"))


def _math(name: str) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        return apply(name, (x,)) if isinstance(x, Symbol | TracedTable) else getattr(math, name)(x)

    return call


# Functions that a copy of the user's function calls in place of Python's own.
BUILTINS: dict[BuiltinFunctionType, Callable[..., Any]] = {
    getattr(math, n): _math(n) for n in ("exp", "log", "tanh", "sqrt", "sin", "cos")
}
