"""Random masks written as JAX functions are traced to the Expr they were written from."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import brute, expressions

from frisket.dsl import ir
from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import Expr, lit
from frisket.dsl.trace import trace
from frisket.dsl.types import BOOL
from frisket.lowering.simplify import canonical

jax = pytest.importorskip("jax")
jnp = jax.numpy
TWO = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "bitand": "&", "bitor": "|", "bitxor": "^",
    "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
CALLS = {"min": "jnp.minimum", "max": "jnp.maximum", "where": "jnp.where", "abs": "abs"}


def python(e: Expr) -> str:
    """`e` as a JAX user writes it."""
    args = [python(a) for a in e.args]
    if e.op in TWO:
        return f"({f' {TWO[e.op]} '.join(args)})"
    if e.op in CALLS:
        return f"{CALLS[e.op]}({', '.join(args)})"
    if e.op == "lit":  # ~True is -2 in Python, and True.astype is nothing
        return f"jnp.bool_({e.name})" if e.type is BOOL else f"jnp.int32({e.name})"
    if e.op == "reduce":
        low, high, body = e.args
        terms = [
            python(ir.substitute(body, {ir.make("bound", (), e.name[1]): lit(j)})) for j in range(low.name, high.name)
        ]
        return f"jnp.{e.name[0]}(jnp.stack([{', '.join(terms)}]))"
    if e.op == "lookup":
        return f"{e.name}[{', '.join(args)}]"
    if e.op == "segment":
        return f"(jnp.searchsorted({e.name}, {args[0]}, side='right') - 1)"
    if e.op == "int":
        return f"({args[0]}).astype(jnp.int32)"
    return {"neg": "(-{})", "not": "(~{})"}[e.op].format(*args) if args else str(e.name)


def from_the_front(e: Expr) -> Expr:
    """No negative numbers as indices: they count from the end in Python, and are clamped here."""
    numbers = e.op == "lookup" and not any(n.op in ("var", "lookup", "param", "segment") for n in ir.walk(*e.args))
    return ir.lookup(e.name, (lit(0),) * len(e.args), e.type) if numbers else e


def written(seed: int) -> tuple[expressions.Case, Expr, object]:
    """A random mask, with its lengths put in, and the function that says the same."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 24), rng.randint(1, 24), rng.randint(1, 2), rng.randint(1, 2)]
    case = expressions.random_mask(rng, *sizes, depth=rng.randint(0, 3))
    e = ir.substitute(case.expr, {ir.Q_LEN: lit(case.q_len), ir.KV_LEN: lit(case.kv_len)})
    e = ir.transform(e, from_the_front)
    scope = {n: jnp.asarray(v) for n, v in {**case.tables, **case.params}.items()}
    return case, e, eval(f"lambda b, h, q, k: {python(e)}", {"jnp": jnp, **scope})


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


@pytest.mark.parametrize("part", range(10))
def test_random_masks_written_for_jax(part):
    for seed in range(15):
        check(1000 * part + seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_masks_written_for_jax(part):
    for seed in range(100):
        check(100_000 + 1000 * part + seed)
