"""Converts a Python function of positions to Expr, by calling it once with symbols.

>>> trace(lambda q, k: (q >= k) & (q - k < 256)).expr
q >= k & q - k < 256

Arrays the function captures become tables. numpy has no protocol for being indexed by a foreign object. So the trace
runs a copy of the function whose cells, globals and defaults hold `TracedTable` in place of numpy's arrays. torch has
one, so its tensors stay where they are (`from_torch/`). A function that uses JAX is read as a jaxpr (`from_jax/`). The
user's function is never changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any, Literal

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import TraceError, dense
from frisket.dsl.from_jax import callables as from_jax
from frisket.dsl.from_torch.callables import TracedAutogradFunction, active
from frisket.dsl.ir import COORDINATES, Expr, to_float
from frisket.dsl.operators import BUILT_IN, RESERVED
from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.dsl.widths import Widths
from frisket.grammar import load

from .closure import is_foreign, names_read
from .numpy_functions import BUILTINS, TracedTable, element
from .symbol import Symbol, shown, symbol_of, what_is
from .user_line import fail

Kind = Literal["mask", "score"]
ORDER = ("score", *COORDINATES)
MEANING = {"score": "score", "b": "batch entry", "h": "head", "q": "query", "k": "key"}


@dataclass(frozen=True)
class Traced:
    """The result of tracing a function. `tables` are the captured arrays and 0-d tensors, the user's own objects, by
    the names they have in `expr`. `read` are the tensors of torch whose values went into `expr` itself, `result` is the
    type of the function's result: an Int of a score mod is made a Float. `scored`: the function takes a score."""

    expr: Expr
    tables: dict[str, Any]
    kind: Kind
    notes: tuple[str, ...] = ()
    read: tuple[Any, ...] = ()
    result: Type = FLOAT
    scored: bool = False


def trace(
    fn: Callable[..., Any], kind: Kind | None = None, *, valueless: bool = False, by_place: bool = False
) -> Traced:
    """Trace `fn`. Arguments named b, h, q, k, score bind by name; else four (mask) or five (score first) by place.
    All four coordinates in another order than flex_attention's are an error: names and places would differ.
    `valueless`: captured torch tensors have a shape and a dtype, and no values to look at. `by_place`: bind four or
    five arguments by place whatever their names, as torch does."""
    if not callable(fn):
        what = "score mod" if kind == "score" else "mask"
        hint = f"\n  {dense(what, fn.ndim)}" if hasattr(fn, "ndim") else ""
        raise TraceError(f"a {what} is a text or a function, not {type(fn).__name__}{hint}")
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)  # what torch.compile was given
    names = _places(fn, kind) if by_place else _arguments(fn, kind)
    inferred: Kind = "score" if "score" in names.values() else "mask"
    if kind is not None and kind != inferred and kind == "mask":
        raise TraceError("this function takes `score`, so it is a score mod; use frisket.score")
    kind = kind or inferred
    had_torch = "torch" in sys.modules
    call = _called
    if "torch._dynamo" in sys.modules:  # symbols are none of its business: it would compile the user's function
        call = sys.modules["torch"].compiler.disable(_called)
    try:
        return call(fn, names, kind, valueless, by_place)
    except TraceError:
        if had_torch or "torch" not in sys.modules:
            raise
    return _called(fn, names, kind, valueless, by_place)  # the function imported torch itself: now its calls are seen


def _called(fn: Callable[..., Any], names: dict[str, str], kind: Kind, valueless: bool, by_place: bool) -> Traced:
    symbols = {p: Symbol(ir.SCORE if n == "score" else ir.var(n)) for p, n in names.items()}
    named = {n for n, p in _signature(fn).items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    args = [s for p, s in symbols.items() if p not in named]
    keywords = {p: s for p, s in symbols.items() if p in named}
    # a keyword in front of a free parameter would be filled a second time by place
    if isinstance(fn, functools.partial) and fn.keywords and not by_place:
        args, keywords = [], symbols
    tracer = _Tracer(read=None if valueless else {})
    through_jaxpr = functools.partial(from_jax.call, fn, args, keywords, tracer.name_table)
    try:
        if from_jax.reaches_jax(fn):
            e = _result(fn, kind, through_jaxpr())
        else:
            call = tracer.copied(fn)
            with _torch(tracer):
                e = _result(fn, kind, call(*args, **keywords))
            e = Widths(tracer.tables, not valueless).wrapped(e)  # which reads entries: the trace must not see that
    except (TraceError, TypeError, IndexError, ValueError, AttributeError, RuntimeError, NotImplementedError) as error:
        # the function uses JAX after all, which reads its own arrays: it is traced again
        if from_jax.raised_in_jax(error):
            tracer.tables.clear()
            e = _result(fn, kind, through_jaxpr())
        elif isinstance(error, TraceError):
            raise
        else:
            message = str(error).partition(", but expected one of")[0]  # torch lists every overload
            fail(f"{type(error).__name__}: {message}", error)
    used = {*chain(*ir.free_names(e)), *(n.name[0] for n in ir.find(e, "extent"))}
    tables = {n: t for n, t in tracer.tables.items() if n in used}
    read = tuple((tracer.read or {}).values())
    scored, expr = "score" in names.values(), to_float(e) if kind == "score" else e
    return Traced(expr, tables, kind, tuple(tracer.notes), read, e.type, scored)


def _torch(tracer: _Tracer) -> AbstractContextManager[None]:
    """The torch front end of the trace, where torch is imported."""
    if not hasattr(sys.modules.get("torch"), "Tensor"):
        return nullcontext()
    return active(tracer.name_table, tracer.tables, tracer.wishes, tracer.read)


def _signature(fn: Any, names: str = "q, k") -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; an error says to wrap one that does not tell them."""
    is_module = not isinstance(fn, FunctionType | MethodType | functools.partial) and hasattr(fn, "forward")
    try:
        return inspect.signature(fn.forward if is_module else fn).parameters  # a torch.nn.Module calls its forward
    except (TypeError, ValueError):  # a builtin
        raise TraceError(f"{fn!r} has no signature; wrap it: `lambda {names}: ...`") from None


def _arguments(fn: Callable[..., Any], kind: Kind | None) -> dict[str, str]:
    """The coordinate of every parameter of the function."""
    parameters = _signature(fn)
    fixed = fn.keywords if isinstance(fn, functools.partial) else {}
    single = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    free = [n for n, p in single.items() if n not in fixed and (p.default is p.empty or n in ORDER)]
    if free and set(free) <= set(ORDER):
        by_place = [n for n in free if parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY]
        if set(COORDINATES) <= set(by_place) and (pairs := _swapped(by_place)):
            raise TraceError(
                f"{_named(fn)} takes {', '.join(by_place)}\n"
                f"  by name, {', '.join(f'`{n}` is the {MEANING[n]}' for n, _ in pairs)}\n"
                f"  by place, as flex_attention reads it, {', '.join(f'`{n}` is the {MEANING[p]}' for n, p in pairs)}\n"
                f"  write the parameters in the order {', '.join(ORDER[-len(by_place) :])}"
            )
        return {n: n for n in free}
    params = ", ".join(free) or "no arguments"
    if len(free) == 5 or (len(free) == 4 and kind != "score"):
        for name, place in _swapped(free):
            if name in ORDER:
                raise TraceError(
                    f"{_named(fn)} takes {params}; by place `{name}` would be `{place}`, since not all are named among "
                    "b, h, q, k (and score)"
                )
        return dict(zip(free, ORDER[-len(free) :], strict=True))
    raise TraceError(
        f"{_named(fn)} takes {params}; name its arguments among b, h, q, k (and score), or take "
        f"{'' if kind == 'score' else 'four (b, h, q, k) or '}five (score, b, h, q, k) by place"
    )


def _swapped(names: list[str]) -> list[tuple[str, str]]:
    """(name, coordinate at its place in flex_attention's order) of every parameter where the two differ."""
    return [(n, place) for n, place in zip(names, ORDER[-len(names) :], strict=True) if n != place]


def _places(fn: Callable[..., Any], kind: Kind | None) -> dict[str, str]:
    """The coordinate of every parameter, for functions that take four or five by place."""
    parameters = _signature(fn, "b, h, q, k").values()
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    needed = [p.name for p in placed if p.default is p.empty]
    count = 5 if len(needed) > 4 or (kind == "score" and (any_more or len(placed) > 4)) else 4
    names = [p.name for p in placed][:count]
    if any_more:
        names += [f"*{i}" for i in range(len(names), count)]
    unset = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(needed) > count or len(names) < count or unset:
        params = ", ".join(needed + unset) or "no arguments"
        raise TraceError(
            f"{_named(fn)} takes {params}; a mask_mod takes four by place, (b, h, q_idx, kv_idx), a score_mod five, "
            "(score, b, h, q_idx, kv_idx); fix others with functools.partial, or give them defaults"
        )
    return dict(zip(names, ORDER[5 - count :], strict=True))


def _named(fn: Any) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return "this lambda" if name == "<lambda>" else f"`{name}`"


def _result(fn: Callable[..., Any], kind: Kind, result: Any) -> Expr:
    symbol = symbol_of(result)
    if symbol is None:
        raise TraceError(f"{_named(fn)} returns {what_is(result)}; return one expression of its arguments")
    if symbol.axes:
        raise TraceError(
            f"{_named(fn)} returns an array of {shown(symbol.shape)}; index it, or reduce it as in `.any(-1)`"
        )
    e = symbol.expr
    if kind == "mask" and e.type is not BOOL:
        raise TraceError(
            f"a mask returns a Bool, {_named(fn)} returns {e.type.with_article}; "
            "compare it with something, for example `q - k >= 0`"
        )
    if kind == "score" and e.type is BOOL:
        raise TraceError(f"a score mod returns a number, {_named(fn)} returns a Bool; is it a mask?")
    return e


# -- the copy of the user's function ----------------------------------------------------------------


@dataclass
class _Tracer:
    """A copier of functions that puts tables in place of arrays and names the tables."""

    tables: dict[str, Any] = field(default_factory=dict)
    copies: dict[int, Any] = field(default_factory=dict)
    originals: list[Any] = field(default_factory=list)  # ids stay valid while these live
    notes: list[str] = field(default_factory=list)
    read: dict[int, Any] | None = field(default_factory=dict)  # tensors whose values were looked at; None: have none
    wishes: dict[int, str] = field(default_factory=dict)  # the name of the variable a tensor is in, by its id

    def name_table(self, wish: str, array: Any) -> str:
        name = wish if wish.isascii() and wish.isidentifier() else "table"
        if name in RESERVED or name in BUILT_IN or name in load().words:
            name += "_"
        number, base = 1, name
        while name in self.tables and self.tables[name] is not array:
            number += 1
            name = f"{base}_{number}"
        self.tables[name] = array
        return name

    def copied(self, fn: Any) -> Any:
        """A copy of `fn` with every array it can reach replaced."""
        if isinstance(fn, functools.partial):
            args = [self.value(a, n) for a, n in zip(fn.args, list(inspect.signature(fn.func).parameters))]
            keywords = {n: self.value(v, n) for n, v in fn.keywords.items()}
            return functools.partial(self.copied(fn.func), *args, **keywords)
        if isinstance(fn, MethodType):
            return MethodType(self.copied(fn.__func__), fn.__self__)
        if isinstance(fn, FunctionType):
            return self.function(fn)
        if isinstance(fn, type) or hasattr(fn, "forward"):
            return fn
        call = inspect.getattr_static(type(fn), "__call__", None)
        if isinstance(call, FunctionType):
            return MethodType(self.function(call), fn)
        return fn

    def function(self, fn: FunctionType) -> Any:
        if id(fn) in self.copies:
            return self.copies[id(fn)]
        library = is_foreign(fn)
        if library and not fn.__closure__:
            return fn
        cells = tuple(CellType() for _ in fn.__closure__ or ())  # of a library too: and_masks holds the user's masks
        scope = fn.__globals__ if library else dict(fn.__globals__)
        copy = FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        vars(copy).update(vars(fn))
        self.copies[id(fn)] = copy  # before the cells are filled: functions may refer to each other
        self.originals.append(fn)
        for name in () if library else names_read(fn.__code__):
            if name in scope:
                scope[name] = self.value(scope[name], name)
        for cell, old, name in zip(cells, fn.__closure__ or (), fn.__code__.co_freevars):
            with suppress(ValueError):  # an empty cell stays empty
                cell.cell_contents = self.value(old.cell_contents, name)
        count = fn.__code__.co_argcount - len(fn.__defaults__ or ())
        names = fn.__code__.co_varnames[count:]
        copy.__defaults__ = tuple(self.value(d, n) for d, n in zip(fn.__defaults__ or (), names)) or None
        copy.__kwdefaults__ = {n: self.value(d, n) for n, d in (fn.__kwdefaults__ or {}).items()} or None
        return copy

    def value(self, value: Any, name: str) -> Any:
        if isinstance(value, np.ndarray):
            if value.ndim == 0:
                return value.item()
            if element(value) is None:
                raise TraceError(f"`{name}` is an array of {value.dtype}; tables hold bool, int or float")
            return TracedTable(self.name_table, value, name)
        if isinstance(value, np.generic):
            return value.item()
        if hasattr(type(value), "__torch_function__"):
            self.wishes[id(value)] = name
            return value
        if (cls := _autograd_function(value)) is not None:
            self.notes.append(
                f"`{cls.__name__}` is read through its forward: gradients are those of the forward, not its backward's"
            )
            forward = TracedAutogradFunction(self.copied(cls.forward), cls)
            return forward if value is cls else forward.apply
        # by exact type: constructors of subclasses, such as named tuples, take other arguments
        if type(value) in (list, tuple):
            return type(value)(self.value(v, name) for v in value)
        if type(value) is dict and all(isinstance(k, str) for k in value):
            return {k: self.value(v, k) for k, v in value.items()}
        if isinstance(value, BuiltinFunctionType):
            return BUILTINS.get(value, value)
        if isinstance(value, FunctionType | functools.partial | MethodType):
            return self.copied(value)
        return value


def _autograd_function(value: Any) -> type[Any] | None:
    """The torch.autograd.Function that a value is, or whose `apply` it is."""
    function = getattr(getattr(sys.modules.get("torch"), "autograd", None), "Function", None)
    cls = value if isinstance(value, type) else getattr(value, "__self__", None)
    is_autograd = function is not None and isinstance(cls, type) and issubclass(cls, function) and cls is not function
    return cls if is_autograd else None
