"""The base of attention modules of flax linen that keep their cache in the collection "cache"."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.caches.jax_plain import KVCache, ShardedKVCache

from .layers import concatenate_to_cache


class BaseJAXAttentionModule(nn.Module):
    """A linen module with `_concatenate_to_cache(key, value, query_states, attention_mask)`, called once a step.

    >>> import jax
    >>> from types import SimpleNamespace
    >>> class Keys(BaseJAXAttentionModule):
    ...     @nn.compact
    ...     def __call__(self, x, mask):
    ...         return self._concatenate_to_cache(x, x, x, mask)
    >>> model = Keys(SimpleNamespace(quantize_kv_cache=True))
    >>> cache = model.init(jax.random.key(0), jnp.ones((2, 8, 1, 4)), None)  # room for 8 tokens
    >>> (key, _, mask), cache = model.apply(cache, jnp.ones((2, 3, 1, 4)), None, mutable="cache")
    >>> key.shape, mask[0, 0, 0].astype(int).tolist(), int(cache["cache"]["cache_index"])
    ((2, 8, 1, 4), [1, 1, 1, 0, 0, 0, 0, 0], 3)

    `init` makes the cache, of as many tokens as it gets. Every call after it appends key [batch, new, kv_heads,
    head_dim] and value, and returns the whole cache in their dtypes, and the mask of `concatenate_to_cache`.

    `config` may have `quantize_kv_cache`: int8, with a float32 scale for each vector. With `use_sharded_kv_caching`
    positions are split over the axis "sp" of `jax_mesh()`, batches over "dp" and "fsdp", heads over "tp". The
    collection "cache" has `cached_key`, `cached_value`, their `..._scale` if quantized, and `cache_index`, the number
    of tokens.
    """

    config: Any

    @nn.compact
    @usual_promotion()
    def _concatenate_to_cache(
        self, key: Any, value: Any, query_states: Any, attention_mask: Any
    ) -> tuple[Any, Any, Any]:
        few = getattr(self.config, "quantize_kv_cache", False)
        has_cache = self.has_variable("cache", "cached_key")  # before `self.variable` makes it
        variables = {}  # by the name that a KVCache has for them
        for n, x in (("key", key), ("value", value)):
            variables[n[0]] = self.variable("cache", f"cached_{n}", jnp.zeros, x.shape, jnp.int8 if few else x.dtype)
            if few:
                scale = self.variable("cache", f"cached_{n}_scale", jnp.zeros, x.shape[:-1], jnp.float32)
                variables[f"{n[0]}_scale"] = scale
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        if not has_cache:
            return key, value, attention_mask
        kind: Any = KVCache
        fields: dict[str, Any] = {"k_scale": None, "v_scale": None} | {n: x.value for n, x in variables.items()}
        # one index for all sequences
        fields |= {"lengths": jnp.full(len(key), index.value), "overflowed": jnp.zeros(len(key), bool)}
        if getattr(self.config, "use_sharded_kv_caching", False):
            kind = ShardedKVCache
            fields |= {"mesh": self.config.jax_mesh(), "axis": "sp", "batch_axis": ("dp", "fsdp"), "head_axis": "tp"}
        cache, mask = concatenate_to_cache(kind(**fields), key, value, attention_mask)
        for n, variable in variables.items():
            variable.value = getattr(cache, n)
        index.value += key.shape[1]
        if not few:
            return cache.k, cache.v, mask
        key = (cache.k * cache.k_scale[..., None]).astype(key.dtype)
        return key, (cache.v * cache.v_scale[..., None]).astype(value.dtype), mask
