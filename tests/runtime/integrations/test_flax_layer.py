"""The flax layer under every operator that runs here, with caches, packed sequences and gradients."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import frisket as fk
from frisket.integrations.flax import Attention
from frisket.modeling import get_dot_general_by_bits
from frisket.operations import AttentionMetadata, AttentionRegistry

rng = np.random.default_rng(5)
X = rng.standard_normal((2, 24, 32)).astype(np.float32)
SLOPE = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
HOW = {"mask": "causal & window(w)", "score": "score - slope[h] * (q - k)"}
VALUES = {"w": 9, "slope": SLOPE}
CPU = ["frisket", "frisket-xla", "frisket-cpp", "frisket-pallas-tpu", "ring"]  # differentiable, and here


def layer(operator="frisket-xla", **more):
    how = {**HOW, **more}
    return Attention(32, heads=4, kv_heads=2, operator=operator, rngs=nnx.Rngs(0), **how)


def turned(x, positions):
    """Rotary positions by complex numbers: x [batch, length, heads, dim]."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[..., None] * 10000.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle[..., None, :])
    return np.concatenate((z.real, z.imag), -1)


def by_hand(model, x, positions=None, mask=HOW["mask"], score=HOW["score"], **values):
    """The layer in float64 numpy, attention by the interpreter."""
    kernels = [np.asarray(p.kernel[...], np.float64) for p in (model.query, model.key, model.value, model.out)]
    q, k, v = ((x @ w).reshape(*x.shape[:2], -1, 8) for w in kernels[:3])
    positions = np.arange(x.shape[1]) if positions is None else positions
    q, k = turned(q, positions), turned(k, positions)
    out = fk.reference(q, k, v, mask, score, layout="bshd", **values)
    return out.reshape(*x.shape[:2], -1) @ kernels[3]


@pytest.mark.parametrize("taken", ["mask", "score", "weight", "divide"])
def test_calls_of_the_flax_layer_take_no_other_mask(taken):
    with pytest.raises(fk.ParameterError, match=f"the {taken} of this layer is fixed when it is made"):
        layer()(jnp.asarray(X), **{taken: "causal"}, **VALUES)


def test_flax_layer_takes_a_weight_and_a_divisor():
    how = {"score": None, "weight": "relu2", "divide": "count"}
    model, values = layer("dense", **how), {n: x for n, x in VALUES.items() if n in HOW["mask"]}
    wanted = by_hand(model, X, **how, **values)
    np.testing.assert_allclose(model(jnp.asarray(X), **values), wanted, atol=1e-5)
    whole, at = model.empty_cache(2, 32, jnp.float32), 0
    for n in (23, 1):
        found, whole = model(jnp.asarray(X[:, at : at + n]), cache=whole, **values)
        np.testing.assert_allclose(found, wanted[:, at : at + n], atol=1e-5)
        at += n


WANTED = by_hand(layer(), X, **VALUES)


USUAL = ("ring", "frisket-xla")


@pytest.mark.parametrize(
    "operator", [pytest.param(n, marks=() if n in USUAL else pytest.mark.exhaustive) for n in (*CPU, "dense")]
)
def test_flax_layer_runs_on_each_operator(operator):
    if why := fk.backends().get(operator.removeprefix("frisket-"), ""):
        pytest.skip(why)
    run = nnx.jit(lambda model, x: model(x, **VALUES))
    if operator == "dense":
        with pytest.raises(fk.BackendError, match="reads the values of q, k and v"):
            run(layer(operator), jnp.asarray(X))
        found = layer(operator)(jnp.asarray(X), **VALUES)
    else:
        found = run(layer(operator), jnp.asarray(X))
    np.testing.assert_allclose(found, WANTED, atol=1e-5)


def test_flax_layer_operators_run_or_are_refused():
    """Of the names there are, those that are not here are refused in words by their backend."""
    for name in AttentionRegistry.list_implementations():
        kind = AttentionRegistry.get(name)
        here = any(kind is AttentionRegistry.get(n) for n in [*CPU, "dense"])
        assert here or kind.backend in ("triton", "pallas-mosaic-gpu"), name


def gradients(model):
    def loss(model, x):
        return (model(x, **VALUES) ** 2).mean()

    return nnx.jit(nnx.grad(loss))(model, jnp.asarray(X))


@pytest.mark.exhaustive
def test_gradients_are_equal():
    found, wanted = (gradients(layer(n)) for n in ("ring", "frisket-xla"))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
        assert np.abs(y).max() > 1e-5


def cached(model, x, cache):
    return nnx.jit(lambda model, x, cache: model(x, cache=cache, **VALUES))(model, x, cache)


@pytest.mark.parametrize(
    "steps",
    [pytest.param((22, 1, 1), marks=pytest.mark.slow), pytest.param((10, 1, 1, 7, 5), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_with_a_cache(steps):
    model, at = layer(), 0
    cache = model.empty_cache(2, 32)
    for n in steps:
        found, cache = cached(model, jnp.asarray(X[:, at : at + n]), cache)
        np.testing.assert_allclose(found, WANTED[:, at : at + n], atol=1e-5)
        at += n
    assert cache.lengths.tolist() == [24, 24]


@pytest.mark.exhaustive
def test_ragged_sequences_in_a_cache():
    model, counts = layer(), np.array([24, 13])
    cache = model.empty_cache(2, 32)
    found, cache = model(jnp.asarray(X), cache=cache, counts=counts, **VALUES)
    np.testing.assert_allclose(found[1, :13], WANTED[1, :13], atol=1e-5)
    step = rng.standard_normal((2, 1, 32)).astype(np.float32)
    found, cache = model(jnp.asarray(step), cache=cache, **VALUES)
    for b, n in enumerate(counts):
        whole = np.concatenate((X[b : b + 1, :n], step[b : b + 1]), 1)
        np.testing.assert_allclose(found[b, 0], by_hand(model, whole, **VALUES)[0, -1], atol=1e-5)


@pytest.mark.exhaustive
def test_a_cache_where_jax_promotes_nothing():
    model = layer()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found, _ = cached(model, jnp.asarray(X), model.empty_cache(2, 32))
    np.testing.assert_allclose(found, WANTED, atol=1e-5)


def test_a_cache_of_the_layers_dtype():
    model = layer(dtype=jnp.bfloat16)
    cache = model.empty_cache(2, 32)
    assert cache.k.dtype == jnp.bfloat16
    found, _ = cached(model, jnp.asarray(X), cache)
    want = nnx.jit(lambda model, x: model(x, **VALUES))(model, jnp.asarray(X))
    np.testing.assert_allclose(*(np.asarray(x).astype(np.float32) for x in (found, want)), atol=1e-2)
    assert [x.empty_cache(2, 32, *given).k.dtype.name for x, given in ((model, ["int8"]), (layer(), []))] == [
        "int8", "float32",
    ]  # fmt: skip


def test_flax_layer_takes_packed_sequences():
    model = layer(mask="causal", score=None)
    segments = np.repeat([[0, 1, 2], [0, 0, 1]], 8, axis=1).astype(np.int32)
    positions = np.stack([np.arange(24) % 8, np.r_[np.arange(16), np.arange(8)]]).astype(np.int32)
    found = model(jnp.asarray(X), positions=positions, segment_ids=segments)
    for b, start, stop in ((0, 0, 8), (0, 8, 16), (0, 16, 24), (1, 0, 16), (1, 16, 24)):
        alone = by_hand(model, X[b : b + 1, start:stop], mask="causal", score=None)
        np.testing.assert_allclose(found[b, start:stop], alone[0], atol=1e-5)


@pytest.mark.exhaustive
def test_flax_layer_takes_scale_head_dim_and_bias():
    plain = layer(mask="causal", score=None, rotary_base=None, metadata=AttentionMetadata(softmax_scale=0.5))
    kernels = [np.asarray(p.kernel[...], np.float64) for p in (plain.query, plain.key, plain.value, plain.out)]
    q, k, v = ((X @ w).reshape(2, 24, -1, 8) for w in kernels[:3])
    wanted = fk.reference(q, k, v, "causal", scale=0.5, layout="bshd").reshape(2, 24, -1) @ kernels[3]
    np.testing.assert_allclose(plain(jnp.asarray(X)), wanted, atol=1e-5)
    wide = Attention(32, heads=3, head_dim=16, operator="frisket-xla", use_bias=True, rngs=nnx.Rngs(0))
    assert (wide.key.kernel.shape, wide.key.bias.shape, wide(jnp.asarray(X)).shape) == ((32, 48), (48,), X.shape)


@pytest.mark.exhaustive
def test_flax_layer_takes_quantized_products():
    pytest.importorskip("qwix")
    few = layer(**get_dot_general_by_bits(8, "convert"))
    found = few(jnp.asarray(X), **VALUES)
    assert 1e-4 < np.abs(found - WANTED).max() < 0.1 * np.abs(WANTED).max()


def test_flax_layer_refuses_bad_input():
    with pytest.raises(fk.ShapeError, match="32 features in 5 heads over 5 key heads"):
        Attention(32, heads=5, rngs=nnx.Rngs(0))
    for heads, kv_heads in ((0, None), (4, 0)):
        with pytest.raises(fk.ShapeError, match=f"32 features in {heads} heads over 0 key heads"):
            Attention(32, heads=heads, kv_heads=kv_heads, rngs=nnx.Rngs(0))
    with pytest.raises(fk.ShapeError, match=r"x is \[24, 32\]; it is \[batch, length, features\]"):
        layer()(jnp.asarray(X[0]), **VALUES)
    with pytest.raises(fk.ParameterError, match="did you mean 'frisket'"):
        Attention(32, heads=4, operator="friskett", rngs=nnx.Rngs(0))
    with pytest.raises(fk.ParameterError, match="counts are of new tokens for a cache"):
        layer()(jnp.asarray(X), counts=np.array([1, 2]), **VALUES)


@pytest.mark.exhaustive
def test_flax_layer_example_runs(capsys):
    path = Path(__file__).resolve().parents[3] / "examples" / "flax_layer.py"
    assert runpy.run_path(str(path))["main"]("ring") < 1e-5
    assert "ring gradients of 5 arrays\na prompt of 40 tokens and 8 steps differ" in capsys.readouterr().out
