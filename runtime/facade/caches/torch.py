"""Caches of keys and values for torch: modules whose buffers are written in place.

>>> import torch, frisket as fk
>>> from frisket.caches.torch import KVCache
>>> att = fk.compile("causal & window(64)")
>>> cache = KVCache.create(batch=2, capacity=128, kv_heads=2, head_dim=16)
>>> q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
>>> cache.attention(att, q, k, v).shape  # a prompt of nine tokens
torch.Size([2, 4, 9, 16])
>>> q, k, v = (x[:, :, :1] for x in (q, k, v))
>>> cache.attention(att, q, k, v).shape, cache.lengths.tolist()  # a step of decoding, under the same mask
(torch.Size([2, 4, 1, 16]), [10, 10])
"""

from frisket.runtime.machine.modules import extras

with extras():
    from frisket.runtime.caches.torch_plain import KVCache

from frisket.runtime.caches.torch_paged_ring import PagedKVCache, RingKVCache
from frisket.runtime.caches.torch_plain import quantized

__all__ = ["KVCache", "PagedKVCache", "RingKVCache", "quantized"]
