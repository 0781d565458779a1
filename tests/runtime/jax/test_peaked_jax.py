"""Gradients of JAX arrays of 16 bits where the softmax is peaked: as close to float64 as dense attention's."""

from __future__ import annotations

import numpy as np
import pytest
from support import peaked

import frisket as fk
from frisket.runtime.machine import cpp_build as native_build

jax = pytest.importorskip("jax")
jnp = jax.numpy
CPP = pytest.param("cpp", marks=pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason()))
HALVES = ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)]


def gradients(att, dtype):
    back = jax.jit(lambda *x: jax.vjp(att, *x)[1](jnp.ones_like(x[2])))

    def run(*x):
        found = back(*(jnp.asarray(y.swapaxes(1, 2), dtype) for y in x))
        return [np.asarray(y.astype("float32")).swapaxes(1, 2) for y in found]

    return run


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", [CPP, "xla"])
def test_jax_gradients_of_peaked_rows_are_as_good_as_dense(backend, dtype):
    peaked.require(gradients(fk.compile("causal", backend=backend), dtype), dtype)


@pytest.mark.parametrize("backend", [CPP, pytest.param("xla", marks=pytest.mark.exhaustive)])
def test_mapped_gradients_of_peaked_rows_are_as_good(backend):
    att = jax.vmap(fk.compile("causal", backend=backend), axis_size=1)
    peaked.require(gradients(lambda *x: att(*(y[None] for y in x))[0], "bfloat16"), scales=(10,))


@pytest.mark.parametrize("size", [15, 16])
def test_rows_note_what_rounding_left_out_of_out(size):
    """The same bits as native kernels: numbers of 16 bits, two of them in a float32, behind two other entries."""
    from frisket.lowering.derive import norm_width
    from frisket.lowering.xla.forward import pack_out_residual, unpack_out_residual

    residual = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, size)), "bfloat16")
    stats = pack_out_residual(residual)
    assert stats.shape == (2, 3, 5, norm_width(residual.dtype, size))
    unpacked = unpack_out_residual(stats, residual)
    np.testing.assert_array_equal(*(np.asarray(x.astype("float32")) for x in (unpacked, residual)))


@pytest.mark.parametrize("backend", [CPP])
def test_notes_of_a_forward_are_never_nan(backend):
    """`jax_debug_nans` looks at all that a forward leaves for its backward."""
    x = jnp.asarray(peaked.arrays("bfloat16", 3, 0)[0].swapaxes(1, 2), "bfloat16")
    with jax.debug_nans(True):
        jax.vjp(fk.compile("causal", backend=backend), x, x, x)[1](x)
