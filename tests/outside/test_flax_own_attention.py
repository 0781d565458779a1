"""What flax's tests ask of its attention, written anew: `dot_product_attention` and `MultiHeadAttention` of flax.nnx
beside the same with `frisket.integrations.flax.attention_fn`, results and gradients, decoding and dropout.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from frisket.integrations.flax import attention_fn

LENGTH, HEADS, SIZE, FEATURES = 12, 4, 8, 32
RNG = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


REAL = jnp.asarray([[1.0] * LENGTH, [1.0] * 7 + [0.0] * 5])
SEGMENTS = jnp.asarray([[0] * 5 + [1] * 7, [0] * 3 + [1] * 4 + [2] * 5])
MASKS = {
    "none": None,
    "causal": nnx.make_causal_mask(jnp.ones((2, LENGTH))),
    "padding": nnx.make_attention_mask(jnp.ones((2, LENGTH)), REAL),
    "segments": nnx.make_attention_mask(SEGMENTS, SEGMENTS, jnp.equal),
    "combined": nnx.combine_masks(
        nnx.make_causal_mask(jnp.ones((2, LENGTH))), nnx.make_attention_mask(SEGMENTS, SEGMENTS, jnp.equal)
    ),
    "bool": nnx.make_causal_mask(jnp.ones((2, LENGTH)), dtype=bool),
    "of every head": jnp.asarray(RNG.random((2, HEADS, LENGTH, LENGTH)) < 0.6).at[..., 0].set(True),
    "of all": jnp.asarray(RNG.random((1, 1, LENGTH, LENGTH)) < 0.6).at[..., 0].set(True),
}


def close(found, want, much=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=20 * much, atol=much), found, want
    )


@pytest.mark.parametrize("lead", [(2,), (2, 3)], ids=["one batch axis", "two batch axes"])
@pytest.mark.parametrize("name", MASKS)
def test_flax_attention_fn_equals_flax_with_masks(name, lead):
    mask = MASKS[name]
    if mask is not None and len(lead) == 2:
        mask = jnp.broadcast_to(mask[:, None], (mask.shape[0], 3, *mask.shape[1:]))
        mask = jnp.broadcast_to(mask, (2, *mask.shape[1:]))
    q, k, v, weights = (normal(*lead, LENGTH, HEADS, SIZE) for _ in range(4))

    def loss(run):
        return lambda q, k, v: (run(q, k, v, mask=mask) * weights).sum()

    close(attention_fn()(q, k, v, mask=mask), nnx.dot_product_attention(q, k, v, mask=mask))
    close(*(jax.grad(loss(run), (0, 1, 2))(q, k, v) for run in (attention_fn(), nnx.dot_product_attention)))


@pytest.mark.parametrize("shape", [(2, HEADS, LENGTH, LENGTH), (1, HEADS, LENGTH, LENGTH), (2, 1, 1, LENGTH)])
def test_biases_and_their_gradients(shape):
    q, k, v, weights = (normal(2, LENGTH, HEADS, SIZE) for _ in range(4))
    bias = normal(*shape)

    def loss(run):
        return lambda q, bias: (run(q, k, v, bias=bias, mask=MASKS["causal"]) * weights).sum()

    close(
        *(jax.value_and_grad(loss(run), (0, 1))(q, bias) for run in (attention_fn(), nnx.dot_product_attention)), 1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_flax_attention_fn_keeps_dtypes_of_flax(dtype):
    q, k, v = (normal(2, LENGTH, HEADS, SIZE, dtype=dtype) for _ in range(3))
    found, want = (run(q, k, v, mask=MASKS["causal"]) for run in (attention_fn(), nnx.dot_product_attention))
    assert found.dtype == want.dtype
    close(found, want, 1e-5 if dtype == "float32" else 2e-2)
    mixed = attention_fn()(q.astype("float32"), k, v, dtype=dtype)
    assert mixed.dtype == dtype


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_flax_attention_fn_takes_grouped_heads(kv_heads):
    q, k, v = normal(2, LENGTH, HEADS, SIZE), *(normal(2, LENGTH, kv_heads, SIZE) for _ in "kv")
    wide = (jnp.repeat(x, HEADS // kv_heads, 2) for x in (k, v))
    close(attention_fn("causal")(q, k, v), nnx.dot_product_attention(q, *wide, is_causal=True))


def layers(**options):
    """Two layers of equal parameters, frisket's attention in the second."""
    made = [
        nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), decode=False, **{**options, **more})
        for more in ({}, {"attention_fn": attention_fn()})
    ]
    nnx.update(made[1], nnx.state(made[0], nnx.Param))
    return made


@pytest.mark.parametrize("options", [{}, {"normalize_qk": True}, {"use_bias": False}, {"qkv_features": 16}], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "combined"])
def test_flax_layer_and_its_gradients_equal_flax(name, options):
    x, weights = normal(2, LENGTH, FEATURES), normal(2, LENGTH, FEATURES)

    def of(layer):
        return nnx.value_and_grad(lambda layer, x: (layer(x, mask=MASKS[name]) * weights).sum())(layer, x)

    (want, theirs), (found, ours) = map(of, layers(**options))
    close(found, want, 1e-4)
    close(nnx.to_pure_dict(ours), nnx.to_pure_dict(theirs), 1e-4)


def test_keys_of_another_sequence():
    x, other = normal(2, LENGTH, FEATURES), normal(2, 7, FEATURES)
    mask = nnx.make_attention_mask(jnp.ones((2, LENGTH)), jnp.asarray([[1.0] * 7, [1.0] * 4 + [0.0] * 3]))
    want, found = (layer(x, other, mask=mask) for layer in layers())
    close(found, want)


@pytest.mark.parametrize("lead", [(2,), (2, 3)], ids=["one batch axis", "two batch axes"])
def test_decoding_is_the_causal_prompt(lead):
    x = normal(*lead, LENGTH, FEATURES)
    for layer in layers():
        whole = layer(x, mask=nnx.make_causal_mask(jnp.ones((*lead, LENGTH))))
        layer.init_cache(x.shape)
        steps = [layer(x[..., i : i + 1, :], decode=True) for i in range(LENGTH)]
        close(jnp.concatenate(steps, -2), whole)


def test_dropout_draws_by_its_key_and_keeps_the_mean():
    q, k = (normal(2, LENGTH, HEADS, SIZE) for _ in "qk")
    ones = jnp.ones((2, LENGTH, HEADS, SIZE))
    run = attention_fn()
    found = [run(q, k, ones, dropout_rng=jax.random.key(i), dropout_rate=0.4) for i in (1, 1, 2)]
    close(found[0], found[1])
    assert float(jnp.abs(found[0] - found[2]).max()) > 0.1
    many = jnp.stack([run(q, k, ones, dropout_rng=jax.random.key(i), dropout_rate=0.4).mean() for i in range(40)])
    assert abs(float(many.mean()) - 1) < 0.05
    close(run(q, k, ones, dropout_rng=jax.random.key(1), dropout_rate=0.4, deterministic=True), ones)


def test_flax_layer_has_no_gradient_from_hidden_tokens():
    """A token that no query sees changes nothing, as flax's tests of causal masks look at it."""
    x = normal(2, LENGTH, FEATURES)
    for layer in layers():
        influence = jax.jacrev(lambda x, layer=layer: layer(x, mask=MASKS["causal"])[0, :, 0])(x)[:, 0].sum(-1)
        assert bool((jnp.triu(jnp.abs(influence), 1) == 0).all())
        assert bool((jnp.tril(jnp.abs(influence)) > 0).any())
