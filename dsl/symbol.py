"""What a traced function computes with: `Symbol` stands for a position, `Table` for a captured array.

>>> q, k = Symbol(ir.var("q")), Symbol(ir.var("k"))
>>> np.where(q > k, q - k, 0) < 4
where(q > k, q - k, 0) < 4

Both answer to Python's operators and numpy's functions with Exprs; what has no counterpart in the language is a
`TraceError` at the user's line.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import numpy as np

from . import ir
from .errors import TraceError
from .ir import Expr, binary, build, lit, to_float
from .types import BOOL, FLOAT, INT, Type

HERE = Path(__file__).parent
ELEMENT: dict[str, Type] = {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}
Naming = Callable[[str, Any], str]  # the name a table gets, from the one it wishes for and its array


def what_is(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def as_expr(value: Any) -> Expr | None:
    """The Expr of a symbol or a Python or numpy number."""
    if isinstance(value, Symbol):
        return value.expr
    if isinstance(value, Table):
        return value.element()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    return lit(value) if isinstance(value, bool | int | float) else None


def foreign(value: Any) -> str:
    """What to do about a captured torch or JAX array; nothing for any other value."""
    root = type(value).__module__.split(".")[0].replace("jaxlib", "jax")
    if root not in ("torch", "jax") or not hasattr(value, "shape"):
        return ""
    convert = "x.numpy()" if root == "torch" else "numpy.asarray(x)"
    return f"a {root} array is captured, which a trace does not read yet: capture `{convert}` instead"


# -- errors at the user's line ----------------------------------------------------------------------


def _place() -> str:
    """ "file:line" and the source of the line of the user's that runs now."""
    frame = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        assert frame.f_back is not None
        frame = frame.f_back
    return _line(frame.f_code.co_filename, frame.f_lineno)


def _is_ours(code: CodeType) -> bool:
    return Path(code.co_filename).parent == HERE or "/numpy/" in code.co_filename.replace("\\", "/")


def _line(file: str, number: int) -> str:
    source = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f"\n    {source}" if source else "")


def fail(message: str, cause: BaseException | None = None) -> NoReturn:
    if cause is None:
        raise TraceError(f"{message}\n  {_place()}")
    last = None
    trace_ = cause.__traceback__
    while trace_ is not None:
        if not _is_ours(trace_.tb_frame.f_code):
            last = _line(trace_.tb_frame.f_code.co_filename, trace_.tb_lineno)
        trace_ = trace_.tb_next
    raise TraceError(message + (f"\n  {last}" if last else "")) from cause


WORDS = {
    "and": "write `(x) & (y)` for `x and y`",
    "or": "write `(x) | (y)` for `x or y`",
    "not": "write `~(x)` for `not x`",
    "if": "write `np.where(condition, a, b)` for `a if condition else b`",
}
CHAIN = "write `(a <= x) & (x < b)` for `a <= x < b`"


def _no_truth() -> NoReturn:
    line = _place().partition("\n")[2]
    found = [say for word, say in WORDS.items() if re.search(rf"\b{word}\b", line)]
    if re.search(r"[<>]=?[^<>=]+[<>]=?", line) and not re.search(r"\b(and|or|if)\b|[&|]", line):
        found = [CHAIN]
    advice = "; ".join(found or [*WORDS.values(), CHAIN])
    fail(f"a position has no truth value while the function is traced: {advice}")


# -- symbols ----------------------------------------------------------------------------------------

UFUNCS: dict[str, str] = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "floor_divide": "floordiv", "remainder": "mod", "mod": "mod", "power": "pow", "float_power": "pow",
    "left_shift": "shl", "right_shift": "shr", "minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne",
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip
FLOATING = "exp exp2 log log2 log1p tanh sin cos tan sqrt isfinite".split()


class Symbol:
    """An Expr that can be computed with as a number; `==` and `!=` build expressions too."""

    __slots__ = ("expr",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            fail(f"np.{ufunc.__name__}.{method} does not take positions")
        return apply(ufunc.__name__, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _array_function(func, args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        fail(
            "an array is indexed or combined with a position where the trace cannot see it; "
            "capture the array itself in a variable of the function, outside of objects"
        )

    def __bool__(self) -> bool:
        _no_truth()

    def __index__(self) -> int:
        fail("a position is not a number while the function is traced: no range(), no Python indexing")

    def __float__(self) -> float:
        fail("float() of a position: leave it out, Int and Float mix freely")

    def __int__(self) -> int:
        fail("int() of a position: leave it out, or write np.floor(x) to round")

    def __iter__(self) -> Any:
        fail("a position is one number: nothing to loop over")

    def __len__(self) -> int:
        fail("a position is one number: it has no length")

    def __repr__(self) -> str:
        return repr(self.expr)

    def __neg__(self) -> Symbol:
        return Symbol(build("neg", _number(self.expr)))

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return Symbol(build("abs", _number(self.expr)))

    def __invert__(self) -> Symbol:
        return Symbol(~self.expr)

    def __floor__(self) -> Symbol:
        return _floor(self.expr)


def _operand(value: Any, what: str) -> Expr:
    e = as_expr(value)
    if e is not None:
        return e
    if advice := foreign(value):
        fail(advice)
    if isinstance(value, np.ndarray | Table):
        shape = "x".join(map(str, value.shape))
        fail(f"an array ({shape}) and a position meet in {what}: index the array first, as in `table[q]`")
    fail(f"{what_is(value)} and a position meet in {what}: only numbers do")


def _number(e: Expr) -> Expr:
    return build("int", e) if e.type is BOOL else e


def _binary(op: str, left: Any, right: Any) -> Symbol:
    x, y = _operand(left, f"`{op}`"), _operand(right, f"`{op}`")
    if op not in ("and", "or", "xor", "eq", "ne"):
        x, y = _number(x), _number(y)
    elif {x.type, y.type} not in ({BOOL}, {INT}) and (op in ir.ON_INT or BOOL in (x.type, y.type)):
        if op in ir.ON_INT and FLOAT in (x.type, y.type):
            fail(f"`{op}` of a Float: compare it first")
        x, y = _number(x), _number(y)
    if op == "pow" and not (x.type is INT and y.op == "lit" and y.type is INT and y.name >= 0):
        x, y = to_float(x), to_float(y)
    try:
        return Symbol(binary(op, x, y))
    except TypeError as error:
        fail(str(error))


def _floor(e: Expr) -> Symbol:
    return Symbol(build("floor", e) if e.type is FLOAT else _number(e))


def apply(name: str, inputs: tuple[Any, ...]) -> Any:
    args = [_operand(x, f"np.{name}") for x in inputs]
    if name in UFUNCS:
        op = UFUNCS[name]
        if name.startswith("logical_"):
            args = [_truth(a) for a in args]
        return _binary(op, Symbol(args[0]), Symbol(args[1]))
    (x, *_) = args
    if name in FLOATING:
        return Symbol(build(name, to_float(_number(x))))
    one: dict[str, Callable[[], Symbol]] = {
        "logical_not": lambda: Symbol(build("not", _truth(x))),
        "invert": lambda: ~Symbol(x),
        "bitwise_not": lambda: ~Symbol(x),
        "negative": lambda: -Symbol(x),
        "positive": lambda: Symbol(x),
        "absolute": lambda: abs(Symbol(x)),
        "fabs": lambda: Symbol(build("abs", to_float(_number(x)))),
        "sign": lambda: Symbol(build("sign", _number(x))),
        "floor": lambda: _floor(x),
        "ceil": lambda: -_floor(build("neg", x)) if x.type is FLOAT else Symbol(_number(x)),
        "trunc": lambda: Symbol(build("int", x) if x.type is FLOAT else _number(x)),
        "square": lambda: _binary("mul", Symbol(x), Symbol(x)),
        "reciprocal": lambda: _binary("div", 1.0, Symbol(x)),
        "expm1": lambda: Symbol(build("exp", to_float(x)) - 1.0),
        "isnan": lambda: Symbol(build("ne", to_float(x), to_float(x))),
    }
    if name not in one:
        fail(f"np.{name} has no counterpart in the language")
    return one[name]()


def _truth(e: Expr) -> Expr:
    return e if e.type is BOOL else build("ne", e, lit(0) if e.type is INT else lit(0.0))


def _where(condition: Any, yes: Any, no: Any) -> Symbol:
    """`np.where` of positions."""
    c, x, y = (_operand(v, "np.where") for v in (condition, yes, no))
    if x.type is not y.type:
        x, y = _number(x), _number(y)
        if FLOAT in (x.type, y.type):
            x, y = to_float(x), to_float(y)
    return Symbol(build("where", _truth(c), x, y))


def _array_function(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs:
        fail(f"np.{func.__name__} of a position takes no keywords here")
    if func is np.where and len(args) == 3:
        return _where(*args)
    if func is np.clip and len(args) == 3:
        return _binary("min", _binary("max", args[0], args[1]), args[2])
    fail(f"np.{func.__name__} has no counterpart in the language")


# Python's names of the operators that take two, and the language's.
ARITHMETIC = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod", "pow": "pow",
    "lshift": "shl", "rshift": "shr", "and": "and", "or": "or", "xor": "xor",
}  # fmt: skip
COMPARISONS = "lt le gt ge eq ne".split()


def _method(op: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: _binary(op, other, self) if swapped else _binary(op, self, other)


for _name, _op in ARITHMETIC.items():
    setattr(Symbol, f"__{_name}__", _method(_op))
    setattr(Symbol, f"__r{_name}__", _method(_op, swapped=True))
for _name in COMPARISONS:
    setattr(Symbol, f"__{_name}__", _method(_name))


# -- captured arrays --------------------------------------------------------------------------------


class Table:
    """Stands for a captured array during the trace. Indexing with positions makes lookups; everything else
    sees the array."""

    __slots__ = ("_fixed", "_name", "_naming", "array")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, naming: Naming, array: Any, name: str, fixed: tuple[Expr, ...] = ()) -> None:
        self._naming, self.array, self._name, self._fixed = naming, array, name, fixed

    def element(self) -> Expr | None:
        """The Expr, once every axis has an index."""
        array = self.array
        if len(self._fixed) < array.ndim:
            return None
        return ir.lookup(self._naming(self._name, array), self._fixed, ELEMENT[array.dtype.kind])

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not self._fixed and not any(isinstance(x, Symbol | Table) for x in keys):
            return self._again(self.array[key])
        indices = list(self._fixed)
        for x in keys:
            e = as_expr(x)
            if e is None or e.type is FLOAT:
                what = "a Float" if e is not None else f"`{x!r}`"
                fail(f"`{self._name}` is indexed with {what}; an index is one Int per axis")
            indices.append(_number(e))
        if len(indices) > self.array.ndim:
            fail(f"`{self._name}` has {self.array.ndim} axes, indexed with {len(indices)}")
        found = Table(self._naming, self.array, self._name, tuple(indices))
        e = found.element()
        return found if e is None else Symbol(e)

    def _again(self, value: Any) -> Any:
        """A table of what was computed from a table."""
        if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in ELEMENT:
            return Table(self._naming, value, self._name)
        return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value

    def _whole(self) -> Any:
        if self._fixed:
            fail(f"`{self._name}` needs {self.array.ndim} indices, it has {len(self._fixed)}")
        return self.array

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.asarray(self._whole(), *args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(x, Symbol) for x in inputs):
            return apply(ufunc.__name__, inputs)
        plain = [x._whole() if isinstance(x, Table) else x for x in inputs]
        return self._again(getattr(ufunc, method)(*plain, **options))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, Symbol) for x in args):
            return _array_function(func, args, kwargs)
        plain = [x._whole() if isinstance(x, Table) else x for x in args]
        return self._again(func(*plain, **kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._whole(), name)
        if callable(value):
            return lambda *args, **options: self._again(value(*args, **options))
        return self._again(value)

    def __len__(self) -> int:
        return len(self._whole())

    def __bool__(self) -> bool:
        return bool(self._whole())


def _forward(name: str) -> Any:
    def method(self: Table, *others: Any) -> Any:
        if any(isinstance(o, Symbol) for o in others):
            _operand(self, f"`{name.strip('_')}`")
        plain = [o._whole() if isinstance(o, Table) else o for o in others]
        return self._again(getattr(self._whole(), name)(*plain))

    return method


for _name in (*ARITHMETIC, *(f"r{n}" for n in ARITHMETIC), *COMPARISONS, "neg", "pos", "abs", "invert"):
    setattr(Table, f"__{_name}__", _forward(f"__{_name}__"))
