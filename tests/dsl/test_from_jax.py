"""JAX functions through their jaxpr: the masks and mods of other libraries give the Expr that the text gives."""

from __future__ import annotations

import functools
import inspect
import re

import numpy as np
import pytest
from support.jax.callables import MASKS, MODS, B, H, S, arrays, tables
from support.tiers import thinned

from frisket.dsl.evaluate import evaluate
from frisket.dsl.from_python.trace import trace
from frisket.dsl.ir import free_names
from frisket.dsl.program import read
from frisket.lowering.simplify import canonical

jax = pytest.importorskip("jax")
jnp = jax.numpy
CASES = [*MASKS, *MODS]
VALUES = tables()
JAX = arrays(jnp, VALUES)
NUMPY = {n: v if np.ndim(v) else v.item() for n, v in VALUES.items()}


def from_text(case):
    used = {n: v for n, v in NUMPY.items() if re.search(rf"\b{n}\b", case.text)}
    found = read(case.text, kind=case.kind, params=used)
    return found.mask if case.kind == "mask" else found.score


@functools.cache
def from_jax(case):
    return trace(case.over(jnp, JAX, jax=jax), case.kind)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_jax_function_gives_the_expr_of_the_text(case):
    assert canonical(from_jax(case).expr).expr is canonical(from_text(case)).expr


@pytest.mark.parametrize("case", [c for c in CASES if not c.jax_only], ids=lambda c: c.name)
def test_jax_function_gives_the_expr_of_its_numpy_form(case):
    over_numpy = trace(case.over(np, NUMPY), case.kind)
    assert canonical(over_numpy.expr).expr is canonical(from_jax(case).expr).expr


@pytest.mark.parametrize("case", thinned(CASES), ids=lambda c: c.name)
def test_traced_jax_function_has_the_values_of_jax(case):
    found = from_jax(case)
    rng = np.random.default_rng(1)
    env = dict(zip("bhqk", (g.ravel() for g in np.indices((B, H, S, S)))))
    env["score"] = rng.normal(size=env["q"].size).astype(np.float32)
    fn = case.over(jnp, JAX, jax=jax)
    names = [n for n in inspect.signature(fn).parameters if n in env]
    want = np.asarray(jax.jit(jax.vmap(lambda *xs: fn(*xs)))(*(jnp.asarray(env[n]) for n in names)))
    scalars, _ = free_names(found.expr)
    env |= {n: np.asarray(found.tables[n]) for n in scalars}
    got = evaluate(found.expr, env, {n: np.asarray(t) for n, t in found.tables.items()})
    got = np.broadcast_to(got, want.shape)
    if case.kind == "mask":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
