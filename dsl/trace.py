"""A Python function of positions to Expr, by calling it once with symbols.

>>> trace(lambda q, k: (q >= k) & (q - k < 256)).expr
q >= k & q - k < 256

Arrays the function captures (closure, globals, defaults, functools.partial) become tables: numpy has no
protocol for being indexed by a foreign object, so the trace runs a copy of the function whose cells hold
`Table` in their place. The user's function is never changed.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal, NoReturn

import numpy as np

from . import ir
from .errors import TraceError
from .functions import RESERVED
from .ir import COORDINATES, Expr, binary, build, lit, to_float
from .types import BOOL, FLOAT, INT, Type

Kind = Literal["mask", "score"]
ELEMENT: dict[str, Type] = {"b": BOOL, "i": INT, "u": INT, "f": FLOAT}
ORDER = ("score", *COORDINATES)


@dataclass(frozen=True)
class Traced:
    """`tables` are the captured arrays by the names they have in `expr`."""

    expr: Expr
    tables: dict[str, np.ndarray[Any, Any]]
    kind: Kind


def trace(fn: Callable[..., Any], kind: Kind | None = None) -> Traced:
    """Trace `fn`. Arguments named b, h, q, k, score bind by name; else four (mask) or five (score first) by place."""
    if not callable(fn):
        raise TraceError(f"a mask is a text or a function, not {type(fn).__name__}")
    tracer = _Tracer()
    names = _arguments(fn)
    found: Kind = "score" if "score" in names.values() else "mask"
    if kind is not None and kind != found and kind == "mask":
        raise TraceError("this function takes `score`, so it is a score mod; use frisket.score")
    kind = kind or found
    symbols = {p: Symbol(ir.SCORE if n == "score" else ir.var(n)) for p, n in names.items()}
    by_place = inspect.signature(fn).parameters
    args = [s for p, s in symbols.items() if by_place[p].kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {p: s for p, s in symbols.items() if by_place[p].kind is inspect.Parameter.KEYWORD_ONLY}
    call = tracer.copied(fn)
    if isinstance(fn, functools.partial) and fn.keywords:
        args, keywords = [], symbols
    try:
        result = call(*args, **keywords)
    except TraceError:
        raise
    except (TypeError, IndexError, ValueError, AttributeError) as error:
        _fail(f"{type(error).__name__}: {error}", error)
    return Traced(_result(fn, kind, result), tracer.used_tables(), kind)


def _arguments(fn: Callable[..., Any]) -> dict[str, str]:
    """Parameter -> coordinate."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        raise TraceError(f"{fn!r} has no signature; wrap it: `lambda q, k: ...`") from None
    fixed = fn.keywords if isinstance(fn, functools.partial) else {}
    free = [
        n for n, p in parameters.items()
        if n not in fixed and (p.default is p.empty or n in ORDER) and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    if free and set(free) <= set(ORDER):
        return {n: n for n in free}
    if len(free) == 4:
        return dict(zip(free, COORDINATES, strict=True))
    if len(free) == 5:
        return dict(zip(free, ORDER, strict=True))
    shown = ", ".join(free) or "no arguments"
    raise TraceError(
        f"{_named(fn)} takes {shown}; name its arguments among b, h, q, k (and score), "
        "or take four (b, h, q, k) or five (score, b, h, q, k) by place"
    )


def _named(fn: Any) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return "this lambda" if name == "<lambda>" else f"`{name}`"


def _result(fn: Callable[..., Any], kind: Kind, result: Any) -> Expr:
    e = _expr(result)
    if e is None:
        raise TraceError(f"{_named(fn)} returns {_what(result)}; return one expression of its arguments")
    if kind == "mask" and e.type is not BOOL:
        article = "an" if e.type is INT else "a"
        raise TraceError(
            f"a mask returns a Bool, {_named(fn)} returns {article} {e.type}; "
            "compare it with something, for example `q - k >= 0`"
        )
    if kind == "score":
        if e.type is BOOL:
            raise TraceError(f"a score mod returns a number, {_named(fn)} returns a Bool; is it a mask?")
        return to_float(e)
    return e


def _what(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _expr(value: Any) -> Expr | None:
    """The Expr of a symbol or a Python or numpy number."""
    if isinstance(value, Symbol):
        return value.expr
    if isinstance(value, Table):
        return value.element()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    return lit(value) if isinstance(value, bool | int | float) else None


# -- errors at the user's line ----------------------------------------------------------------------


def _place() -> str:
    """ "file:line" and the source of the line of the user's that runs now."""
    frame = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        assert frame.f_back is not None
        frame = frame.f_back
    return _line(frame.f_code.co_filename, frame.f_lineno)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename == __file__ or "/numpy/" in code.co_filename.replace("\\", "/")


def _line(file: str, number: int) -> str:
    source = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f"\n    {source}" if source else "")


def _fail(message: str, cause: BaseException | None = None) -> NoReturn:
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
    _fail(f"a position has no truth value while the function is traced: {advice}")


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
            _fail(f"np.{ufunc.__name__}.{method} does not take positions")
        return _apply(ufunc.__name__, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _array_function(func, args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _fail(
            "an array is indexed or combined with a position where the trace cannot see it; "
            "capture the array itself in a variable of the function, outside of objects"
        )

    def __bool__(self) -> bool:
        _no_truth()

    def __index__(self) -> int:
        _fail("a position is not a number while the function is traced: no range(), no Python indexing")

    def __float__(self) -> float:
        _fail("float() of a position: leave it out, Int and Float mix freely")

    def __int__(self) -> int:
        _fail("int() of a position: leave it out, or write np.floor(x) to round")

    def __iter__(self) -> Any:
        _fail("a position is one number: nothing to loop over")

    def __len__(self) -> int:
        _fail("a position is one number: it has no length")

    def __repr__(self) -> str:
        return repr(self.expr)

    # fmt: off
    def __add__(self, other: Any) -> Any: return _binary("add", self, other)
    def __radd__(self, other: Any) -> Any: return _binary("add", other, self)
    def __sub__(self, other: Any) -> Any: return _binary("sub", self, other)
    def __rsub__(self, other: Any) -> Any: return _binary("sub", other, self)
    def __mul__(self, other: Any) -> Any: return _binary("mul", self, other)
    def __rmul__(self, other: Any) -> Any: return _binary("mul", other, self)
    def __truediv__(self, other: Any) -> Any: return _binary("div", self, other)
    def __rtruediv__(self, other: Any) -> Any: return _binary("div", other, self)
    def __floordiv__(self, other: Any) -> Any: return _binary("floordiv", self, other)
    def __rfloordiv__(self, other: Any) -> Any: return _binary("floordiv", other, self)
    def __mod__(self, other: Any) -> Any: return _binary("mod", self, other)
    def __rmod__(self, other: Any) -> Any: return _binary("mod", other, self)
    def __pow__(self, other: Any) -> Any: return _binary("pow", self, other)
    def __rpow__(self, other: Any) -> Any: return _binary("pow", other, self)
    def __lshift__(self, other: Any) -> Any: return _binary("shl", self, other)
    def __rlshift__(self, other: Any) -> Any: return _binary("shl", other, self)
    def __rshift__(self, other: Any) -> Any: return _binary("shr", self, other)
    def __rrshift__(self, other: Any) -> Any: return _binary("shr", other, self)
    def __and__(self, other: Any) -> Any: return _binary("and", self, other)
    def __rand__(self, other: Any) -> Any: return _binary("and", other, self)
    def __or__(self, other: Any) -> Any: return _binary("or", self, other)
    def __ror__(self, other: Any) -> Any: return _binary("or", other, self)
    def __xor__(self, other: Any) -> Any: return _binary("xor", self, other)
    def __rxor__(self, other: Any) -> Any: return _binary("xor", other, self)
    def __lt__(self, other: Any) -> Any: return _binary("lt", self, other)
    def __le__(self, other: Any) -> Any: return _binary("le", self, other)
    def __gt__(self, other: Any) -> Any: return _binary("gt", self, other)
    def __ge__(self, other: Any) -> Any: return _binary("ge", self, other)
    def __eq__(self, other: Any) -> Any: return _binary("eq", self, other)
    def __ne__(self, other: Any) -> Any: return _binary("ne", self, other)
    def __neg__(self) -> Any: return Symbol(build("neg", _number(self.expr)))
    def __pos__(self) -> Any: return self
    def __abs__(self) -> Any: return Symbol(build("abs", _number(self.expr)))
    def __invert__(self) -> Any: return Symbol(~self.expr)
    def __floor__(self) -> Any: return _floor(self.expr)
    # fmt: on


def _operand(value: Any, what: str) -> Expr:
    e = _expr(value)
    if e is not None:
        return e
    if _foreign(value):
        _fail(_no_foreign(value))
    if isinstance(value, np.ndarray | Table):
        shape = "x".join(map(str, value.shape))
        _fail(f"an array ({shape}) and a position meet in {what}: index the array first, as in `table[q]`")
    _fail(f"{_what(value)} and a position meet in {what}: only numbers do")


def _number(e: Expr) -> Expr:
    return build("int", e) if e.type is BOOL else e


def _binary(op: str, left: Any, right: Any) -> Symbol:
    x, y = _operand(left, f"`{op}`"), _operand(right, f"`{op}`")
    if op not in ("and", "or", "xor", "eq", "ne"):
        x, y = _number(x), _number(y)
    elif {x.type, y.type} not in ({BOOL}, {INT}) and (op in ir.ON_INT or BOOL in (x.type, y.type)):
        if op in ir.ON_INT and FLOAT in (x.type, y.type):
            _fail(f"`{op}` of a Float: compare it first")
        x, y = _number(x), _number(y)
    if op == "pow" and not (x.type is INT and y.op == "lit" and y.type is INT and y.name >= 0):
        x, y = to_float(x), to_float(y)
    try:
        return Symbol(binary(op, x, y))
    except TypeError as error:
        _fail(str(error))


def _floor(e: Expr) -> Symbol:
    return Symbol(build("floor", e) if e.type is FLOAT else _number(e))


def _apply(name: str, inputs: tuple[Any, ...]) -> Any:
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
        "square": lambda: Symbol(x) * Symbol(x),
        "reciprocal": lambda: 1.0 / Symbol(x),
        "expm1": lambda: Symbol(build("exp", to_float(x)) - 1.0),
        "isnan": lambda: Symbol(build("ne", to_float(x), to_float(x))),
    }
    if name not in one:
        _fail(f"np.{name} has no counterpart in the language")
    return one[name]()


def _truth(e: Expr) -> Expr:
    return e if e.type is BOOL else build("ne", e, lit(0) if e.type is INT else lit(0.0))


def where(condition: Any, yes: Any, no: Any) -> Symbol:
    """`np.where` of positions."""
    c, x, y = (_operand(v, "np.where") for v in (condition, yes, no))
    if x.type is not y.type:
        x, y = _number(x), _number(y)
        if FLOAT in (x.type, y.type):
            x, y = to_float(x), to_float(y)
    return Symbol(build("where", _truth(c), x, y))


def _array_function(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs:
        _fail(f"np.{func.__name__} of a position takes no keywords here")
    if func is np.where and len(args) == 3:
        return where(*args)
    if func is np.clip and len(args) == 3:
        return _binary("min", _binary("max", args[0], args[1]), args[2])
    _fail(f"np.{func.__name__} has no counterpart in the language")


# -- captured arrays --------------------------------------------------------------------------------


class Table:
    """Stands for a captured array during the trace. Indexing with positions makes lookups; everything else
    sees the array."""

    __slots__ = ("_fixed", "_name", "_tracer", "array")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: _Tracer, array: Any, name: str, fixed: tuple[Expr, ...] = ()) -> None:
        self._tracer, self.array, self._name, self._fixed = tracer, array, name, fixed

    def element(self) -> Expr | None:
        """The Expr, once every axis has an index."""
        array = self.array
        if len(self._fixed) < array.ndim:
            return None
        name = self._tracer.name_table(self._name, array)
        return ir.lookup(name, self._fixed, ELEMENT[array.dtype.kind])

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not self._fixed and not any(isinstance(x, Symbol | Table) for x in keys):
            return self._again(self.array[key])
        indices = list(self._fixed)
        for x in keys:
            e = _expr(x)
            if e is None or e.type is FLOAT:
                what = "a Float" if e is not None else f"`{x!r}`"
                _fail(f"`{self._name}` is indexed with {what}; an index is one Int per axis")
            indices.append(_number(e))
        if len(indices) > self.array.ndim:
            _fail(f"`{self._name}` has {self.array.ndim} axes, indexed with {len(indices)}")
        found = Table(self._tracer, self.array, self._name, tuple(indices))
        e = found.element()
        return found if e is None else Symbol(e)

    def _again(self, value: Any) -> Any:
        """A table of what was computed from a table."""
        if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in ELEMENT:
            return Table(self._tracer, value, self._name)
        return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value

    def _whole(self) -> Any:
        if self._fixed:
            _fail(f"`{self._name}` needs {self.array.ndim} indices, it has {len(self._fixed)}")
        return self.array

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.asarray(self._whole(), *args)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(x, Symbol) for x in inputs):
            return _apply(ufunc.__name__, inputs)
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


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror xor rxor "
    "lshift rlshift rshift rrshift lt le gt ge eq ne neg pos abs invert"
).split():
    setattr(Table, f"__{_name}__", _forward(f"__{_name}__"))


def _foreign(value: Any) -> bool:
    return type(value).__module__.split(".")[0] in ("torch", "jax", "jaxlib") and hasattr(value, "shape")


def _no_foreign(value: Any) -> str:
    root = type(value).__module__.split(".")[0].replace("jaxlib", "jax")
    convert = "x.numpy()" if root == "torch" else "numpy.asarray(x)"
    return f"a {root} array is captured, which a trace does not read yet: capture `{convert}` instead"


# -- the copy of the user's function ----------------------------------------------------------------------

LIBRARIES = frozenset({"numpy", "torch", "jax", "jaxlib", "frisket", "builtins", *sys.stdlib_module_names})


@dataclass
class _Tracer:
    """Copies functions with tables in place of arrays, and gives the tables names."""

    tables: dict[str, Any] = field(default_factory=dict)
    copies: dict[int, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # ids stay valid while these live

    def used_tables(self) -> dict[str, Any]:
        return dict(self.tables)

    def name_table(self, wish: str, array: Any) -> str:
        name = wish if wish.isascii() and wish.isidentifier() and wish not in RESERVED else "table"
        number, base = 1, name
        while name in self.tables and self.tables[name] is not array:
            number += 1
            name = f"{base}_{number}"
        self.tables[name] = array
        return name

    def copied(self, fn: Any) -> Any:
        """`fn` with every array it can reach replaced."""
        if isinstance(fn, functools.partial):
            parameters = list(inspect.signature(fn.func).parameters)
            args = [self.value(a, n) for a, n in zip(fn.args, parameters)]
            return functools.partial(
                self.copied(fn.func), *args, **{n: self.value(v, n) for n, v in fn.keywords.items()}
            )
        if isinstance(fn, MethodType):
            return MethodType(self.copied(fn.__func__), fn.__self__)
        if isinstance(fn, FunctionType):
            return self.function(fn)
        call = inspect.getattr_static(type(fn), "__call__", None)
        if isinstance(call, FunctionType):
            return MethodType(self.function(call), fn)
        return fn

    def function(self, fn: FunctionType) -> Any:
        if id(fn) in self.copies:
            return self.copies[id(fn)]
        if (fn.__module__ or "").split(".")[0] in LIBRARIES - {"__main__"}:
            return fn
        cells = tuple(CellType() for _ in fn.__closure__ or ())
        scope = dict(fn.__globals__)
        copy = FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        self.copies[id(fn)] = copy
        self.kept.append(fn)
        for name in _global_names(fn.__code__):
            if name in scope:
                scope[name] = self.value(scope[name], name)
        for cell, old, name in zip(cells, fn.__closure__ or (), fn.__code__.co_freevars):
            try:
                cell.cell_contents = self.value(old.cell_contents, name)
            except ValueError:  # an empty cell stays empty
                continue
        count = fn.__code__.co_argcount - len(fn.__defaults__ or ())
        names = fn.__code__.co_varnames[count:]
        copy.__defaults__ = tuple(self.value(d, n) for d, n in zip(fn.__defaults__ or (), names)) or None
        copy.__kwdefaults__ = {n: self.value(d, n) for n, d in (fn.__kwdefaults__ or {}).items()} or None
        return copy

    def value(self, value: Any, name: str) -> Any:
        if isinstance(value, np.ndarray):
            if value.ndim == 0:
                return value.item()
            if value.dtype.kind not in ELEMENT:
                raise TraceError(f"`{name}` is an array of {value.dtype}; tables hold bool, int or float")
            return Table(self, value, name)
        if isinstance(value, np.generic):
            return value.item()
        if _foreign(value):
            raise TraceError(f"`{name}`: {_no_foreign(value)}")
        if type(value) in (list, tuple):
            return type(value)(self.value(v, name) for v in value)
        if type(value) is dict and all(isinstance(k, str) for k in value):
            return {k: self.value(v, k) for k, v in value.items()}
        if isinstance(value, BuiltinFunctionType):
            return _BUILTINS.get(value, value)
        if isinstance(value, FunctionType | functools.partial | MethodType):
            return self.copied(value)
        return value


def _global_names(code: CodeType) -> set[str]:
    """The names that the code, and functions written inside it, may read from the module."""
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _math(name: str) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        return _apply(name, (x,)) if isinstance(x, Symbol | Table) else getattr(math, name)(x)

    return call


_BUILTINS: dict[Any, Callable[..., Any]] = {getattr(math, n): _math(n) for n in ("exp", "log", "tanh", "sqrt")}

__all__ = ["Symbol", "Table", "Traced", "trace", "where"]
