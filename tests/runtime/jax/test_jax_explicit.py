"""Values that jax.vmap maps on a mesh of explicit axes, which JAX checks on one device too; test_jax_automatic.py has
them on four."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import frisket as fk

MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
Q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 16, 2, 8)), jnp.float32)
CALLS = {
    "a table": ("causal & same(doc)", {}, "doc", jnp.arange(32).reshape(2, 16) // 5),
    "a window": ("causal & window(w)", {}, "w", jnp.asarray([3, 9])),
    "offsets": ("causal_document(off)", {}, "off", jnp.asarray([[0, 3, 16], [0, 9, 16]])),
    "sinks": ("causal", {}, "sinks", jnp.asarray([[0.0, 1], [2, 3]])),
    "seeds": ("causal", {"dropout": 0.5}, "seed", jnp.arange(2)),
}


@pytest.mark.parametrize("call", CALLS)
def test_mapped_values_on_an_explicit_mesh_leave_results_split(call):
    mask, options, name, values = CALLS[call]
    att = fk.compile(mask, backend="xla", **options)
    run = jax.jit(jax.vmap(lambda q, x: att(q, q, q, **{name: x})))
    out = run(*(jax.device_put(x, NamedSharding(MESH, PartitionSpec("x"))) for x in (Q, values)))
    assert out.sharding.spec == PartitionSpec("x", None, None, None, None)
    np.testing.assert_allclose(out, run(Q, values), rtol=1e-5, atol=1e-6)


def test_second_derivatives_by_a_table_of_split_heads():
    """JAX does not know how the entries of a table that is split by heads are split."""
    att = fk.compile("causal & window(9)", "score + t[h, q - k]", backend="xla")

    def loss(q, k, t):
        return jnp.square(att(q, k, k, t=t)).sum()

    @jax.jit
    def products(q, k, t):
        return jax.jvp(jax.grad(loss, (0, 1, 2)), (q, k, t), (q[::-1], k, t))[1]

    arrays = jnp.concatenate([Q[:, 0], -Q[:, 0]], 2), Q[:, 0], jnp.cos(jnp.arange(64.0)).reshape(4, 16)
    specs = [PartitionSpec(*x) for x in ((None, None, "x", None), (None, None, "x", None), ("x", None))]
    found = products(*(jax.device_put(x, NamedSharding(MESH, s)) for x, s in zip(arrays, specs, strict=True)))
    assert [x.sharding.spec for x in found] == specs
    for x, y in zip(found, products(*arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
