"""The operators of the language in JAX: one table of text, for the Pallas printer and the XLA executor.

>>> operators()["floordiv"](-7, 2)
Array(-4, dtype=int32)

Rows are as in `kernels.language`. Names that are not of JAX are functions of `LANGUAGE`, which a generated module
carries above its kernel; `Int` and `Float` are its dtypes. Meanings are those of `dsl.evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np

from frisket.dsl.ir import Expr, fold
from frisket.dsl.types import FLOAT, INT
from frisket.grammar.memo import memo

from .expr import machine
from .language import SHARED, SHIFTS, Language, calls
from .legalise import legalise
from .text import parts

_OF_TWO = "min:jnp.minimum max:jnp.maximum pow:jnp.power floordiv:floordiv mod:mod"
_OF_ONE = """
abs:jnp.abs exp:jnp.exp exp2:jnp.exp2 log:jnp.log log2:jnp.log2 log1p:jnp.log1p tanh:jnp.tanh sigmoid:lax.logistic
sin:jnp.sin cos:jnp.cos tan:jnp.tan sqrt:jnp.sqrt rsqrt:lax.rsqrt erf:lax.erf isfinite:jnp.isfinite
"""
JNP: dict[str, str] = SHARED | SHIFTS | calls("{}", _OF_ONE) | calls("{}, {}", _OF_TWO)
JNP |= {"not": "jnp.logical_not({})", "where": "jnp.where({}, {}, {})", "random": "random(*)"}
JNP |= {"int": "to_int({})", "float": "{}.astype(Float)", "floor": "to_int(jnp.floor({}))"}
LANGUAGE = Language(
    "JAX",
    JNP,
    infinity="jnp.inf",
    nan="jnp.nan",
    functions=parts(__package__, "jnp"),
    constants={"LARGEST": "LARGEST = 2147483520.0  # the greatest float32 below 2**31"},
)
WIDE = replace(LANGUAGE, bits=64, constants={"LARGEST": "LARGEST = 4611686018427387904.0"})


@memo(group="once")
def operators(int64: bool = False, float64: bool = False) -> dict[str, Callable[..., Any]]:
    """The operator table as functions of JAX arrays."""
    import jax.numpy as jnp
    from jax import lax

    largest = 2.0**62 if int64 else 2147483520.0
    Int, Float = jnp.int64 if int64 else jnp.int32, jnp.float64 if float64 else jnp.float32
    names: dict[str, Any] = {"jnp": jnp, "lax": lax, "Int": Int, "Float": Float, "LARGEST": largest}
    for definition in LANGUAGE.functions.values():
        exec(definition, names)

    functions: dict[str, Callable[..., Any]] = {}
    for op, row in JNP.items():
        formals = [f"x{i}" for i in range(row.count("{}"))] or ["*x"]
        body = row.format(*formals) if "{}" in row else row.replace("*", "*x")
        functions[op] = eval(f"lambda {', '.join(formals)}: {body}", names)
    for op in ("and", "or"):  # rows take two operands, a node may have more
        functions[op] = partial(_joined, functions[op])
    return functions


def _joined(pair: Callable[[Any, Any], Any], *args: Any) -> Any:
    return reduce(pair, args)


def evaluate(
    root: Expr, env: Mapping[str, Any], tables: Mapping[str, Any], *, int64: bool, float64: bool, rounded: bool = False
) -> Any:
    """The value of `root` over JAX arrays, traced or not; lookups clamp. Reductions and segments are the planner's.
    `rounded`: every product is a float before it is added, so equal Exprs have equal bits in all programs."""
    import jax.numpy as jnp

    table = operators(int64, float64)
    Int, Float = (jnp.int64 if int64 else jnp.int32), (jnp.float64 if float64 else jnp.float32)
    dtypes = {INT: Int, FLOAT: Float}
    root = legalise(machine(root), WIDE if int64 else LANGUAGE)

    def value(node: Expr, args: list[Any]) -> Any:
        dtype = dtypes.get(node.type, jnp.bool_)
        if node.op == "lit":
            return jnp.asarray(node.name, dtype)
        if node.op in ("var", "param"):
            return jnp.asarray(env[node.name]).astype(dtype)
        if node.op == "lookup":
            array = tables[node.name]
            return array[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(args, array.shape, strict=True))].astype(dtype)
        x = table[node.op](*args)
        if rounded and node.op == "mul" and node.type is FLOAT:  # no compiler looks through this for a sum to fuse
            return jnp.where(x < float(np.finfo(np.float64 if float64 else np.float32).min), -jnp.inf, x)
        return x

    return fold(root, value)[root]
