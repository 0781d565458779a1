"""Recognises jax.numpy's code for `//`, `%`, softplus and the like, and gives the one operator meant.

JAX has division towards zero and no softplus; jnp puts them together from smaller primitives. What it puts together
differs between versions, so the patterns are made by tracing jnp's own functions on holes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from frisket.dsl import ir
from frisket.dsl.functions import MADE_OF
from frisket.dsl.ir import Expr, build, lit, to_float
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
