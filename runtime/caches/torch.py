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

from .torch_paged import PagedKVCache as PagedKVCache
from .torch_plain import KVCache as KVCache
from .torch_ring import RingKVCache as RingKVCache
from .torch_store import quantized as quantized

__all__ = ["KVCache", "PagedKVCache", "RingKVCache", "quantized"]
