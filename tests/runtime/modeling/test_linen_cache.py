"""The cache of attention modules of flax linen, against dense arrays that hold all tokens."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket import modeling as m

nn = pytest.importorskip("flax.linen")
rng = np.random.default_rng(5)
CONFIGS = {
    "plain": SimpleNamespace(use_sharded_kv_caching=False),
    "int8": SimpleNamespace(quantize_kv_cache=True),
    "sharded": SimpleNamespace(
        use_sharded_kv_caching=True, quantize_kv_cache=False, jax_mesh=lambda: m.create_mesh((1, -1, 1, 1))
    ),
}


def layer(config):
    class Layer(m.BaseJAXAttentionModule):
        @nn.compact
        def __call__(self, key, value, mask=None):
            return self._concatenate_to_cache(key, value, key, mask)

    return Layer(config)


def tokens(n, dtype="float32"):
    return [jnp.asarray(rng.standard_normal((2, n, 2, 4)), dtype) for _ in range(2)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linen_cache_holds_all_tokens(name, dtype):
    model, room = layer(CONFIGS[name]), [jnp.zeros((2, 12, 2, 4), dtype)] * 2
    state = jax.jit(model.init)(jax.random.key(0), *room)
    scales = {"cached_key_scale", "cached_value_scale"} if name == "int8" else set()
    assert {*state["cache"]} == {"cached_key", "cached_value", "cache_index", *scales}
    assert state["cache"]["cached_key"].dtype == (jnp.int8 if name == "int8" else dtype)
    step = jax.jit(lambda state, *new: model.apply(state, *new, mutable="cache"), donate_argnums=0)
    seen, hidden = [], rng.random((2, 1, 1, 12)) < 0.3
    for n in (5, 1, 1):
        seen.append(tokens(n, dtype))
        (key, value, mask), state = step(state, *seen[-1], jnp.asarray(~hidden, "int32"))
        length = sum(one[0].shape[1] for one in seen)
        assert int(state["cache"]["cache_index"]) == length
        for found, parts in ((key, [k for k, _ in seen]), (value, [v for _, v in seen])):
            wanted = np.asarray(jnp.concatenate(parts, 1), "float32")
            assert (found.shape, found.dtype) == ((2, 12, 2, 4), dtype)
            error = np.abs(np.asarray(found, "float32")[:, :length] - wanted).max()
            assert error <= (np.abs(wanted).max() * (1 / 254 + (dtype == "bfloat16") / 256) if name == "int8" else 0)
        shown = np.broadcast_to((np.arange(12) < length) & ~hidden, (2, 1, n, 12))
        np.testing.assert_array_equal(mask, shown)
    assert step._cache_size() == 2  # the prompt, and a token


def test_linen_cache_leaves_arrays_and_mask_at_init():
    key, value = tokens(3)
    (found, _, mask), _ = layer(CONFIGS["plain"]).init_with_output(jax.random.key(0), key, value)
    assert mask is None
    np.testing.assert_array_equal(found, key)


def test_linen_cache_refuses_more_tokens_than_it_has():
    model = layer(CONFIGS["plain"])
    state = model.init(jax.random.key(0), *tokens(4))
    with pytest.raises(fk.CapacityError, match="0 tokens and 5 new ones"):
        model.apply(state, *tokens(5), mutable="cache")


def test_modeling_without_flax_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "frisket.integrations.flax", raising=False)
    for name in [n for n in sys.modules if n.startswith("flax.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(fk.MissingPackageError, match=r"\[flax\]"):
        _ = m.BaseJAXAttentionModule
    with pytest.raises(AttributeError, match="has no attribute 'BaseAttention'"):
        _ = m.BaseAttention
