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
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal

import numpy as np

from . import ir
from .errors import TraceError
from .functions import RESERVED
from .ir import COORDINATES, Expr, to_float
from .symbol import ELEMENT, Symbol, Table, apply, as_expr, fail, foreign, what_is
from .types import BOOL

Kind = Literal["mask", "score"]
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
        fail(f"{type(error).__name__}: {error}", error)
    return Traced(_result(fn, kind, result), tracer.tables, kind)


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
    e = as_expr(result)
    if e is None:
        raise TraceError(f"{_named(fn)} returns {what_is(result)}; return one expression of its arguments")
    if kind == "mask" and e.type is not BOOL:
        raise TraceError(
            f"a mask returns a Bool, {_named(fn)} returns {e.type.with_article}; "
            "compare it with something, for example `q - k >= 0`"
        )
    if kind == "score":
        if e.type is BOOL:
            raise TraceError(f"a score mod returns a number, {_named(fn)} returns a Bool; is it a mask?")
        return to_float(e)
    return e


# -- the copy of the user's function ----------------------------------------------------------------

LIBRARIES = frozenset({"numpy", "torch", "jax", "jaxlib", "frisket", "builtins", *sys.stdlib_module_names})


@dataclass
class _Tracer:
    """Copies functions with tables in place of arrays, and gives the tables names."""

    tables: dict[str, Any] = field(default_factory=dict)
    copies: dict[int, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # ids stay valid while these live

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
            return Table(self.name_table, value, name)
        if isinstance(value, np.generic):
            return value.item()
        if advice := foreign(value):
            raise TraceError(f"`{name}`: {advice}")
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
        return apply(name, (x,)) if isinstance(x, Symbol | Table) else getattr(math, name)(x)

    return call


_BUILTINS: dict[Any, Callable[..., Any]] = {getattr(math, n): _math(n) for n in ("exp", "log", "tanh", "sqrt")}

__all__ = ["Traced", "trace"]
