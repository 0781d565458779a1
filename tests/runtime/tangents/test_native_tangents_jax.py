"""Native kernels of tangents on JAX arrays, compared with dense attention and with the kernels of XLA."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import default_only

import frisket as fk
from frisket.runtime.jax import primitives
from runtime.jax import test_derivatives_jax as derivatives

pytestmark = pytest.mark.skipif(bool(fk.backends()["cpp"]), reason="no compiler")

MASK, SCORE = "causal & window(7)", "softcap(2)"
ATT = fk.compile(MASK, SCORE, backend="cpp", tile=(16, 16))


def of(attention, arrays, which=1):
    return lambda x: jnp.square(attention(*arrays[:which], x, *arrays[which + 1 :])).sum()


@pytest.mark.parametrize("name", default_only(derivatives.TRANSFORMS, "grad(jvp)"))
def test_jax_derivatives_of_native_tangents_equal_dense(name):
    with warnings.catch_warnings(), jax.enable_x64(True):
        warnings.simplefilter("ignore")
        arrays = derivatives.drawn(20, heads=4, kv_heads=2)
        got, want = (derivatives.TRANSFORMS[name](of(f, arrays), arrays[1]) for f in (ATT, derivatives.dense))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), got, want)


def dense(q, k, v):
    """(out, lse) of causal attention to the last 7 keys, its scores capped at 2, written with all pairs."""
    at, kv = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = 2 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 / 2)
    m = jnp.where((at >= kv) & (at - kv < 7), s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(m), v), jax.nn.logsumexp(m, -1)


@pytest.mark.parametrize("dtype", default_only(["float64", "float32", "bfloat16", "float16"], "float32"))
def test_jax_native_tangents_of_some_arrays_equal_dense(dtype, monkeypatch):
    """Tangents of out and lse, also where these are sums of 16 bits. JAX's operators compute none."""
    monkeypatch.setattr("frisket.runtime.jax.differentiable.tangent", None)
    draws = np.random.default_rng(0)
    with jax.enable_x64(True):
        shapes = (2, 70, 4, 20), (2, 83, 2, 20), (2, 83, 2, 33)  # tiles and kernels of test_native_tangents.py
        arrays = [jnp.asarray(draws.standard_normal(shape)).astype(dtype) for shape in shapes]
        along = [np.flip(x, 1) for x in arrays]

        @partial(jax.jit, static_argnums=0)
        def tangents_of(attention, arrays, along):
            def of_some(some):
                def call(*varying):
                    both = dict(enumerate(arrays)) | dict(zip(some, varying, strict=True))
                    return attention(*(both[i] for i in range(3)))

                return jax.jvp(call, [arrays[i] for i in some], [along[i] for i in some])[1]

            return [of_some(some) for some in ((0,), (2,), (0, 1, 2))]

        want = tangents_of(dense, *([x.astype("float64") for x in xs] for xs in (arrays, along)))
        bound = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 3e-3}[dtype]
        got = tangents_of(partial(fk.compile(MASK, SCORE, backend="cpp"), return_lse=True), arrays, along)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.abs(np.asarray(x, np.float64) - y).max() <= bound * max(1, np.abs(y).max())


def test_jax_first_gradients_of_native_calls_run_no_tangents(monkeypatch):
    monkeypatch.setattr(primitives, "tangent_by_kernel", None)
    with jax.enable_x64(True):
        arrays = derivatives.drawn(20, heads=4, kv_heads=2)
        got, want = (jax.grad(of(f, arrays))(arrays[1]) for f in (ATT, derivatives.dense))
        np.testing.assert_allclose(got, want, rtol=1e-9)
