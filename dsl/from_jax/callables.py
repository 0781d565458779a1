"""Converts a JAX function of positions to Expr, through its jaxpr.

`jax.make_jaxpr` runs the function once on int32 scalars (and a float32 score); `dsl/from_jax/arrays.py` and
`dsl/from_jax/scalars.py` say what the primitives mean. Captured arrays are the constants of the jaxpr: the very objects
the function closes over, which is how they get their names back. Captured scalars become run-time parameters.

JAX is imported by the caller who wrote the function, never by frisket first.

jax.numpy's code for `//`, `%`, softplus and the like becomes the one operator meant. JAX has division towards zero and
no softplus; jnp puts them together from smaller primitives. What it puts together differs between versions, so the
patterns are made by tracing jnp's own functions on holes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from frisket.dsl import ir
from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.closure import reached
from frisket.dsl.from_python.numpy_functions import Naming
from frisket.dsl.from_python.symbol import Symbol
from frisket.dsl.from_python.user_line import NO_TRUTH, fail, instead, raised_at
from frisket.dsl.ir import Expr, build, lit, to_float
from frisket.dsl.operators import MADE_OF
from frisket.dsl.types import FLOAT, INT, Type
from frisket.grammar.memo import memo

from .arrays import scalar
from .jaxpr import Reader
from .scalars import Refused, argument


def _power(x: Expr, y: Expr) -> Expr:
    if x is lit(2):
        return build("shl", ir.ONE, y)
    raise Refused("an integer to a power that varies; make one of them a float, or write `2 ** x`")


X, Y = "first hole", "second hole"

# (how jnp is asked, the type of its arguments, how many, what is meant)
WRITTEN: list[tuple[str, Type, int, Callable[..., Expr]]] = [
    ("numpy.floor_divide", INT, 2, lambda x, y: build("floordiv", x, y)),
    ("numpy.remainder", INT, 2, lambda x, y: build("mod", x, y)),
    ("numpy.power", INT, 2, _power),
    ("numpy.trunc", FLOAT, 1, lambda x: to_float(build("int", x))),
    ("numpy.log2", FLOAT, 1, lambda x: build("log2", x)),
    ("nn.softplus", FLOAT, 1, MADE_OF["softplus"]),
    ("nn.gelu", FLOAT, 1, MADE_OF["gelu"]),
]


@memo(group="once")
def patterns() -> dict[str, list[tuple[Expr, tuple[Expr, ...], Callable[..., Expr]]]]:
    """The patterns by operator at the root: (jnp's code, holes of the pattern, the operator meant)."""
    import jax

    found: dict[str, list[tuple[Expr, tuple[Expr, ...], Callable[..., Expr]]]] = {}
    for where, type, count, meant in WRITTEN:
        module, name = where.split(".")
        function = getattr(getattr(jax, module), name)
        if name == "gelu":
            function = partial(function, approximate=False)
        kind = argument((), "int32" if type is INT else "float32")
        closed = jax.make_jaxpr(function)(*[kind] * count)
        holes = tuple(ir.var(n, type) for n in (X, Y)[:count])
        reader = Reader(lambda wish, array: wish)
        (out,) = reader.run(closed.jaxpr, [reader.constant(c) for c in closed.consts], [scalar(e) for e in holes])
        found.setdefault(out.at().op, []).append((out.at(), holes, meant))
    return found


def replaced(e: Expr) -> Expr:
    """The operator meant by `e`, where `e` is jnp's code for an operator."""
    for pattern, holes, meant in patterns().get(e.op, ()):
        bound: dict[Expr, Expr] = {}
        if _fits(pattern, e, holes, bound):
            return meant(*(bound[h] for h in holes))
    return e


def _fits(pattern: Expr, e: Expr, holes: tuple[Expr, ...], bound: dict[Expr, Expr]) -> bool:
    if pattern in holes:
        return e.type is pattern.type and bound.setdefault(pattern, e) is e
    if pattern is e:
        return True
    if (pattern.op, pattern.type, pattern.name, len(pattern.args)) != (e.op, e.type, e.name, len(e.args)):
        return False
    return bool(pattern.args) and all(_fits(p, a, holes, bound) for p, a in zip(pattern.args, e.args))


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
