"""Parameters of flax in a call: they are their arrays, under `jax.jit` and with gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.operations import AttentionRegistry

nnx = pytest.importorskip("flax.nnx")
Q = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
CALLS = {
    "sinks": lambda x: fk.attention(Q, Q, Q, "causal", sinks=x),
    "a table": lambda x: fk.attention(Q, Q, Q, "causal", "score + s[h] * (k - q)", s=x),
    "a table of a compiled one": lambda x: fk.compile("causal", "score + s[h] * (k - q)")(Q, Q, Q, s=x),
    "an operator's table": lambda x: (
        AttentionRegistry.create("frisket")(Q, Q, Q, "causal", score="score + s[h] * (k - q)", s=x).attention_outputs
    ),
    "an operator's sinks": lambda x: AttentionRegistry.create("frisket")(Q, Q, Q, softmax_aux=x).attention_outputs,
}


@pytest.mark.parametrize("name", CALLS)
def test_variables_of_flax_are_their_arrays(name):
    call, array = CALLS[name], jnp.asarray([0.5, -0.25])

    def loss(x):
        return (call(x) ** 2).sum()

    wanted = jax.jit(jax.value_and_grad(loss))(array)
    found = nnx.jit(nnx.value_and_grad(loss))(nnx.Param(array))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(call(nnx.Param(array)), jax.jit(call)(array), rtol=1e-5, atol=1e-6)
