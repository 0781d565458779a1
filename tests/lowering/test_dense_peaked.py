"""The dense reference in 16 bits, beside jax.nn's dense attention, where the softmax is peaked."""

from __future__ import annotations

import numpy as np
import pytest
from support import peaked


@pytest.mark.parametrize("scale", peaked.SCALES)
def test_dense_gradients_in_bfloat16_are_those_of_jax_nn(scale):
    """Neither takes delta from a rounded out, whose error is 100 times larger at scale 30."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def run(*x):
        return jax.vjp(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True), *x)[1](jnp.ones_like(x[2]))

    found = peaked.errors(in_bfloat16(jax, jax.jit(run)), "bfloat16", scale)
    ours, theirs = np.median(peaked.baseline("bfloat16", scale), 0), np.median(found, 0)
    assert (ours <= 1.2 * theirs).all(), (ours, theirs)
    assert (theirs <= 1.5 * ours).all(), (ours, theirs)


def in_bfloat16(jax, run):
    """`run` of JAX arrays [batch, length, heads, dim], as a function of numpy's [batch, heads, length, dim]."""
    return lambda *x: [
        np.asarray(y.astype("float32")).swapaxes(1, 2)
        for y in run(*(jax.numpy.asarray(y.swapaxes(1, 2), "bfloat16") for y in x))
    ]
