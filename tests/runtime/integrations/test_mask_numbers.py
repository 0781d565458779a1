"""Mask arrays that are numbers: 1 and 0 say what is visible; 0 and negative ones, made to be added, are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.integrations.flax import attention_fn
from frisket.modeling import concatenate_to_cache, init_cache
from frisket.operations import AttentionRegistry

rng = np.random.default_rng(3)
LENGTH, HEADS, DIM = 6, 2, 8
Q, K, V = (jnp.asarray(rng.standard_normal((1, LENGTH, HEADS, DIM)), jnp.float32) for _ in range(3))
SEEN = np.tri(LENGTH, dtype=bool)
ADDED = np.where(SEEN, 0, -1e9).astype(np.float32)[None, None]
MESSAGE = r"the mask has negative numbers, as a bias that is added to scores; .* mask=bias == 0"
FN = attention_fn(backend="xla")

ENTRIES = {
    "flax": lambda mask: FN(Q, K, V, mask=mask),
    "flax, dict": lambda mask: FN(Q, K, V, mask={"mask": mask}),
    "flax, decode step": lambda mask: FN(Q[:, :1], K, V, mask=mask[..., 2:3, :]),
    "operator": lambda mask: AttentionRegistry.create("frisket-xla")(Q, K, V, mask),
    "ring": lambda mask: AttentionRegistry.create("ring")(Q, K, V, mask),
    "cache": lambda mask: concatenate_to_cache(init_cache(1, LENGTH, HEADS, DIM), K, V, mask),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "kind", ["numpy", *(pytest.param(n, marks=pytest.mark.sampled(3)) for n in ("jax", "least", "bfloat16", "ints"))]
)
def test_additive_mask_arrays_are_refused(entry, kind):
    """flax read 0, which is visible in them, as hidden."""
    mask = {
        "numpy": lambda: ADDED, "jax": lambda: jnp.asarray(ADDED), "bfloat16": lambda: jnp.asarray(ADDED, jnp.bfloat16),
        "least": lambda: np.where(SEEN, 0, -np.inf)[None, None], "ints": lambda: ADDED.astype(np.int32),
    }[kind]()  # fmt: skip
    with pytest.raises(fk.ParameterError, match=MESSAGE):
        ENTRIES[entry](mask)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32, np.float32])
def test_masks_of_ones_and_zeros_mean_the_same(dtype):
    want = fk.reference(Q, K, V, "causal", layout="bshd")
    mask = SEEN[None, None].astype(dtype)
    np.testing.assert_allclose(FN(Q, K, V, mask=mask), want, atol=2e-6)
    np.testing.assert_allclose(jax.jit(lambda m: FN(Q, K, V, mask=m))(mask), want, atol=2e-6)


def test_traced_additive_masks_of_flax_give_nan():
    """Nothing can be raised for a traced value; the complement of the mask was the result."""
    assert np.isnan(jax.jit(lambda m: FN(Q, K, V, mask=m))(ADDED)).all()
    both = jnp.asarray(np.stack([ADDED, SEEN[None, None]]))
    out = jax.jit(jax.vmap(lambda m: FN(Q, K, V, mask=m)))(both)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_traced_additive_masks_of_caches_hide_every_key():
    both = jax.jit(lambda m: concatenate_to_cache(init_cache(1, LENGTH, HEADS, DIM), K, V, m)[1])
    assert not both(ADDED).any()
    np.testing.assert_array_equal(both(SEEN.astype(np.float32)), SEEN[None, None])


def test_biases_of_bools_are_refused():
    for call in (FN, AttentionRegistry.create("frisket-xla")):
        with pytest.raises(fk.ParameterError, match=r"the bias is an array of bool, .* give Bools as mask="):
            call(Q, K, V, bias=SEEN[None, None])


def test_biases_in_lists_are_those_of_their_array():
    op, bias = AttentionRegistry.create("frisket-xla"), rng.standard_normal((1, 1, LENGTH, LENGTH))
    want = op(Q, K, V, bias=bias).attention_outputs
    np.testing.assert_array_equal(op(Q, K, V, bias=bias.tolist()).attention_outputs, want)


def test_operators_say_how_numbers_become_a_mask():
    with pytest.raises(fk.ParameterError, match=r"True is what is seen: mask != 0; or bias=mask"):
        jax.jit(lambda m: AttentionRegistry.create("frisket-xla")(Q, K, V, m).attention_outputs)(ADDED)


def test_known_mask_of_floats_is_read_inside_jit():
    x, mask = jnp.ones((1, 8, 2, 16)), jnp.tril(jnp.ones((1, 1, 8, 8)))
    attend = attention_fn()
    out = jax.jit(lambda x: attend(x, x, x, mask=mask))(x)
    np.testing.assert_allclose(out, attend(x, x, x, mask=mask > 0), atol=1e-6)
