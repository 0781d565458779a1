"""Converts a JAX function of positions to Expr, through its jaxpr.

`jax.make_jaxpr` runs the function once on int32 scalars (and a float32 score); `dsl/from_jax/arrays.py` and
`dsl/from_jax/scalars.py` say what the primitives mean. Captured arrays are the constants of the jaxpr: the very objects
the function closes over, which is how they get their names back. Captured scalars become run-time parameters.

JAX is imported by the caller who wrote the function, never by frisket first.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.numpy_functions import Naming
from frisket.dsl.from_python.symbol import Symbol
from frisket.dsl.from_python.user_line import NO_TRUTH, fail, instead, raised_at
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import memo

from .arrays import scalar
from .jaxpr import Reader
from .scalars import argument
from .written import replaced

# -- which functions are JAX's ----------------------------------------------------------------------


def reaches_jax(fn: Any) -> bool:
    """Whether a function uses JAX: a module, function or array of it is in its closure, globals, defaults, or those
    of the functions it calls. A global counts only if the code reads it."""
    return "jax" in sys.modules and any(_is_jax(v) for _, v in captured(fn))


def _is_jax(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    own = type(value).__module__  # of an array, a jitted function, a ufunc
    return any(isinstance(n, str) and n.split(".")[0] in ("jax", "jaxlib") for n in (name, own))


def raised_in_jax(error: BaseException) -> bool:
    """Whether JAX was called: with a symbol, it raises."""
    at = error.__traceback__
    while at is not None:
        if str(at.tb_frame.f_globals.get("__name__")).split(".")[0] in ("jax", "jaxlib"):
            return True
        at = at.tb_next
    return False


# How far to look: values, elements of one container, and objects inside objects (a module's settings, no more).
MOST, LONGEST, DEEPEST = 5000, 256, 2


def captured(fn: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function reaches by closure, globals, defaults, attributes and calls, nearest first."""
    seen: dict[int, Any] = {}
    waiting = deque([("", fn, 0)])
    while waiting and len(seen) < MOST:
        name, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield name, value
        if isinstance(value, list | tuple | dict):
            if len(value) <= LONGEST:
                items = value.items() if isinstance(value, dict) else ((name, v) for v in value)
                waiting.extend((str(n), v, depth) for n, v in items)
        elif isinstance(value, FunctionType | MethodType | partial) or hasattr(value, "__wrapped__"):
            waiting.extend((n or name, v, depth) for n, v in _called_by(value))
        elif depth < DEEPEST:
            waiting.extend((n, v, depth + 1) for n, v in _attributes(value))


def _called_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """The objects a function reads, and the function it wraps."""
    if isinstance(fn, partial):
        yield "", fn.func
        yield from zip(_argument_names(fn.func), fn.args)
        yield from fn.keywords.items()
    elif isinstance(fn, MethodType):
        yield "", fn.__func__
        yield "", fn.__self__
    elif isinstance(fn, FunctionType):
        if not _is_jax(fn) and (fn.__module__ or "").split(".")[0] not in _QUIET:
            yield from _read_by(fn)
    else:  # jax.jit(f)
        yield "", fn.__wrapped__


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    of_torch = any(c.__module__.startswith("torch.") for c in type(value).__mro__)
    if of_torch or isinstance(value, ModuleType | type) or not isinstance(getattr(value, "__dict__", None), dict):
        return  # of torch: a tensor, or a torch.nn.Module, which may hold thousands of them
    yield from ((n, v) for n, v in vars(value).items() if not n.startswith("__"))
    if isinstance(method := inspect.getattr_static(type(value), "__call__", None), FunctionType):
        yield "", method


_QUIET = frozenset({"numpy", "torch", "frisket", *sys.stdlib_module_names}) - {"__main__"}


def _read_by(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    for n, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        try:
            yield n, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from ((n, fn.__globals__[n]) for n in _global_names(fn.__code__) if n in fn.__globals__)
    defaults = fn.__defaults__ or ()
    count = fn.__code__.co_argcount
    yield from zip(fn.__code__.co_varnames[count - len(defaults) : count], defaults)
    yield from (fn.__kwdefaults__ or {}).items()


@memo(4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [n for c in code.co_consts if isinstance(c, CodeType) for n in _global_names(c)]
    return tuple(dict.fromkeys([*own, *inner]))


def _argument_names(fn: Any) -> tuple[str, ...]:
    code = getattr(fn, "__code__", None)
    return code.co_varnames[: code.co_argcount] if isinstance(code, CodeType) else ()


# -- tracing ----------------------------------------------------------------------------------------


def call(fn: Callable[..., Any], args: Sequence[Symbol], keywords: Mapping[str, Symbol], naming: Naming) -> Any:
    """The result of `fn` for these symbols: a symbol, or whatever is no number. `naming` names the captured arrays."""
    import jax

    given = [s.expr for s in (*args, *keywords.values())]
    kinds = [argument((), "float32" if e.type is FLOAT else "int32") for e in given]

    def flat(*xs: Any) -> Any:
        return fn(*xs[: len(args)], **dict(zip(keywords, xs[len(args) :])))

    try:
        closed, result = jax.make_jaxpr(flat, return_shape=True)(*kinds)
    except TraceError:
        raise
    except (TypeError, IndexError, ValueError, AttributeError, OverflowError, NotImplementedError) as error:
        fail(_explained(error, raised_at(error)), error)
    if not hasattr(result, "dtype"):
        return result  # nothing, or several
    if result.shape:
        size = "x".join(map(str, result.shape))
        raise TraceError(f"the function returns an array ({size}); return one number or Bool: index or reduce it")
    arrays = [(n, v) for n, v in captured(fn) if n and hasattr(v, "shape") and hasattr(v, "dtype")]
    reader = Reader(naming, arrays, replaced)
    consts = [reader.constant(c) for c in closed.consts]
    (out,) = reader.run(closed.jaxpr, consts, [scalar(e) for e in given])
    return Symbol(out.at())


# -- errors at the user's line ----------------------------------------------------------------------


def _explained(error: Exception, where: str) -> str:
    """The message of an error that JAX or the function raised."""
    name = type(error).__name__
    if name == "TracerBoolConversionError":
        return f"{NO_TRUTH}: {instead(where, 'jnp')}"
    if name == "TracerIntegerConversionError":
        return "a position is not a number while the function is traced: no range(), no Python indexing"
    if name == "TracerArrayConversionError":
        return "numpy meets a position that JAX traces: use jax.numpy, and index `jnp.asarray(x)` for a numpy array x"
    if name == "ConcretizationTypeError":
        return "a position has no value while the function is traced: leave float() and int() out, or use .astype"
    return f"{name}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
