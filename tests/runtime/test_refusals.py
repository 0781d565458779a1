"""What later versions bring is refused in words: gradients, traced parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.dsl.errors import BackwardError, ParameterError

ONES = np.ones((1, 8, 2, 16), np.float32)


def test_torch_gradients():
    q = torch.from_numpy(ONES).requires_grad_()
    with pytest.raises(BackwardError) as caught:
        fk.attention(q, q, q, "causal")
    assert str(caught.value) == (
        "q, k or v requires a gradient; the backward comes with the native kernels, in a later version\n"
        "  for the forward alone write `with torch.no_grad():`, or detach the tensors"
    )
    with torch.no_grad():
        assert fk.attention(q, q, q, "causal").shape == q.shape


def test_masks_do_not_add():
    with pytest.raises(ParameterError) as caught:
        fk.mask("causal") + fk.mask("causal")
    assert str(caught.value) == (
        "masks are joined with `&`, `|`, `^` and `-`, and turned round with `~`; they do not add"
    )


@pytest.mark.parametrize("backend", ["xla", "pallas-tpu"])
def test_jax_gradients(backend):
    q = jnp.asarray(ONES)

    def loss(x):
        return fk.attention(x, x, x, "causal", backend=backend).sum()

    with pytest.raises(BackwardError) as caught:
        jax.grad(loss)(q)
    assert str(caught.value) == (
        "a gradient of attention is asked for; the backward comes with the native kernels, in a later version\n"
        "  for the forward alone wrap q, k and v in jax.lax.stop_gradient"
    )
    jax.grad(lambda x: (x * fk.attention(*[jax.lax.stop_gradient(x)] * 3, "causal", backend=backend)).sum())(q)


@pytest.mark.parametrize(("mask", "value"), [("same(doc)", {"doc": np.zeros(8, int)}), ("window(w)", {"w": 3})])
def test_parameters_under_jit(mask, value):
    q = jnp.asarray(ONES)
    ((name, given),) = value.items()
    with pytest.raises(ParameterError) as caught:
        jax.jit(lambda x, p: fk.attention(x, x, x, mask, **{name: p}))(q, given)
    assert str(caught.value) == (
        f"`{name}` is traced by jax.jit or another transform, and layouts are made from values; close over it, "
        "or mark its argument static"
    )
    closed = jax.jit(lambda x: fk.attention(x, x, x, mask, **value))(q)
    np.testing.assert_allclose(closed, fk.attention(q, q, q, mask, **value), atol=1e-6)
