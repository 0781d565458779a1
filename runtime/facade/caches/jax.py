"""Caches of keys and values for JAX: pytrees, appended to in place under `jax.jit`.

>>> import frisket as fk, jax, jax.numpy as jnp
>>> from functools import partial
>>> from frisket.caches.jax import KVCache
>>> att = fk.compile("causal & window(64)")
>>> @partial(jax.jit, donate_argnums=0)  # the new cache is the old one's memory
... def step(cache, q, k, v):
...     out, cache = cache.attention(att, q, k, v)
...     return cache, out
>>> cache = KVCache.create(batch=2, capacity=128, kv_heads=2, head_dim=16)
>>> q, k, v = jnp.ones((2, 9, 4, 16)), jnp.ones((2, 9, 2, 16)), jnp.ones((2, 9, 2, 16))
>>> cache, out = step(cache, q, k, v)  # a prompt of nine tokens
>>> cache, out = step(cache, q[:, :1], k[:, :1], v[:, :1])  # a step of decoding, under the same mask
>>> out.shape, cache.lengths.tolist()
((2, 1, 4, 16), [10, 10])
"""

from frisket.runtime.machine.modules import extras

with extras():
    from frisket.runtime.caches.jax_plain import KVCache

from frisket.runtime.caches.jax_paged_ring import PagedKVCache, RingKVCache
from frisket.runtime.caches.jax_plain import ShardedKVCache, quantized

__all__ = ["KVCache", "PagedKVCache", "RingKVCache", "ShardedKVCache", "quantized"]
