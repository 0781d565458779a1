"""Converts a JAX function of positions to Expr, through its jaxpr.

`jax.make_jaxpr` runs the function once on int32 scalars (and a float32 score); `dsl/from_jax/arrays.py` and
`dsl/from_jax/scalars.py` say what the primitives mean. Captured arrays are the constants of the jaxpr: the very objects
the function closes over, which is how they get their names back. Captured scalars become run-time parameters.

JAX is imported by the caller who wrote the function, never by frisket first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.closure import reached
from frisket.dsl.from_python.numpy_functions import Naming
from frisket.dsl.from_python.symbol import Symbol
from frisket.dsl.from_python.user_line import NO_TRUTH, fail, instead, raised_at
from frisket.dsl.types import FLOAT

from .arrays import scalar
from .jaxpr import Reader
from .scalars import argument
from .written import replaced

# -- which functions are JAX's ----------------------------------------------------------------------


def reaches_jax(fn: Any) -> bool:
    """Whether a function uses JAX: a module, function or array of it is in its closure, globals, defaults, or those
    of the functions it calls. A global counts only if the code reads it."""
    return "jax" in sys.modules and any(_is_jax(x) for _, x, _ in reached(fn))


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
    arrays = [(n, x) for n, x, _ in reached(fn) if n and hasattr(x, "shape") and hasattr(x, "dtype")]
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
