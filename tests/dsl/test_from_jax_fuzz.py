"""Random masks and score mods written as JAX functions are traced to the Expr they were written from."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.lowering import brute, expressions
from support.tiers import thinned

from frisket.dsl import ir
from frisket.dsl.evaluate import unroll
from frisket.dsl.from_python.trace import trace
from frisket.dsl.ir import Expr, lit
from frisket.dsl.sugar import maximum
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.simplify import canonical

jax = pytest.importorskip("jax")
jnp = jax.numpy
TWO = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "bitand": "&", "bitor": "|",
    "bitxor": "^", "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^", "pow": "**",
}  # fmt: skip
CALLS = {
    **{n: f"jnp.{n}" for n in "exp exp2 log log2 log1p tanh sin cos tan sqrt isfinite sign where abs".split()},
    "min": "jnp.minimum", "max": "jnp.maximum", "sigmoid": "jax.nn.sigmoid", "rsqrt": "lax.rsqrt", "erf": "lax.erf",
}  # fmt: skip
ONE = {
    "neg": "(-{})", "not": "(~{})", "bitnot": "(~{})", "int": "({}).astype(jnp.int32)",
    "float": "({}).astype(jnp.float32)", "floor": "jnp.floor({}).astype(jnp.int32)",
    "segment": "(jnp.searchsorted({table}, {}, side='right') - 1)",
}  # fmt: skip
NUMBER = {BOOL: "jnp.bool_({})", INT: "jnp.int32({})", FLOAT: "jnp.float32('{!r}')"}  # ~True is -2 in Python


def python(e: Expr) -> str:
    """`e` as a JAX user writes it."""
    if e.op == "lit":
        return NUMBER[e.type].format(e.name)
    if e.op == "reduce":
        low, high, body = e.args
        own = ir.make("bound", (), e.name[1])
        terms = [python(ir.substitute(body, {own: lit(j)})) for j in range(low.name, high.name)]
        return f"jnp.{e.name[0]}(jnp.stack([{', '.join(terms)}]))"
    args = [python(a) for a in e.args]
    if e.op == "pow" and e.type is INT:
        args[1] = str(e.args[1].name)
    if e.op in TWO:
        return f"({f' {TWO[e.op]} '.join(args)})"
    if e.op in CALLS:
        return f"{CALLS[e.op]}({', '.join(args)})"
    if e.op == "lookup":
        return f"{e.name}[{', '.join(args)}]"
    return ONE[e.op].format(*args, table=e.name) if args else str(e.name)


def varies(*parts: Expr) -> bool:
    return any(n.op in ("var", "lookup", "param", "segment") for n in ir.walk(*parts))


def sayable(e: Expr) -> Expr:
    """What JAX has a word for. A negative number as an index counts from the end in Python and is clamped here; a
    number cast to int32 wraps there."""
    if e.op == "lookup":
        return ir.lookup(e.name, tuple(a if varies(a) else maximum(a, 0) for a in e.args), e.type)
    if e.op in ("int", "floor") and e.args[0].type is FLOAT and not varies(e):
        return lit(2)
    if e.op == "lit" and e.type is INT and abs(e.name) > 2**20:
        return lit(1000)
    if e.op == "var" and e.name in ir.SIZES:
        return lit(9)
    return {"random": lit(0.5), "extent": lit(3)}.get(e.op, e)


def written(seed: int) -> tuple[expressions.Case, Expr, object]:
    """A random mask, with its lengths put in, and the function that says the same."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 24), rng.randint(1, 24), rng.randint(1, 2), rng.randint(1, 2)]
    case = expressions.random_mask(rng, *sizes, depth=rng.randint(0, 3))
    e = ir.substitute(case.expr, {ir.Q_LEN: lit(case.q_len), ir.KV_LEN: lit(case.kv_len)})
    e = ir.transform(e, sayable)
    return case, e, function("b, h, q, k", e, {**case.tables, **case.params})


def function(parameters: str, e: Expr, values: dict):
    scope = {n: jnp.asarray(v) for n, v in values.items()}
    return eval(f"lambda {parameters}: {python(e)}", {"jax": jax, "jnp": jnp, "lax": jax.lax, **scope})


VALUES = {
    **{n: {INT: 3, FLOAT: np.float32(1.5), BOOL: True}[t] for n, t in expressions.SCALARS.items()},
    **{n: np.ones((5,) * r, {INT: int, FLOAT: np.float32, BOOL: bool}[t]) for n, (r, t) in expressions.TABLES.items()},
}


def check_score(seed: int) -> None:
    rng = random.Random(f"score {seed}")
    e = expressions.Everything(rng).of(FLOAT, rng.randint(1, 4))
    e = ir.transform(e, lambda x: x.args[0] if x.op == "segment" else sayable(x))
    if len(python(e)) < 20_000:
        traced = trace(function("score, b, h, q, k", e, VALUES), "score").expr
        assert canonical(traced).expr is canonical(unroll(e)).expr, python(e)


def check(seed: int) -> None:
    case, e, fn = written(seed)
    found = trace(fn, "mask")
    if not any(n.op == "segment" for n in ir.walk(e)):  # jnp knows places before and after all segments
        assert canonical(found.expr).expr is canonical(unroll(e)).expr, python(e)
    scalars = ir.free_names(found.expr)[0]
    values = {n: np.asarray(v) for n, v in found.tables.items()}
    options = {"batch": case.batch, "heads": case.heads}
    np.testing.assert_array_equal(
        brute.dense(
            found.expr, case.q_len, case.kv_len, params={n: values[n] for n in scalars}, tables=values, **options
        ),
        brute.dense(e, case.q_len, case.kv_len, params=case.params, tables=case.tables, **options),
    )


@pytest.mark.parametrize("part", thinned(range(10), 5))
def test_random_masks_written_for_jax(part):
    for seed in range(10):
        check(1000 * part + seed)
        check_score(1000 * part + seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_masks_written_for_jax(part):
    for seed in range(100):
        check(100_000 + 1000 * part + seed)
        check_score(100_000 + 1000 * part + seed)
