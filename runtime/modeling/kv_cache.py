"""The cache of a model's layer as model code has it: append at the running index, mask what is not written yet."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.caches.jax_plain import Axes, KVCache, ShardedKVCache
from frisket.runtime.machine.parameters import refuse_additive

Cache = TypeVar("Cache", KVCache, ShardedKVCache)


def init_cache(
    batch: int, capacity: int, kv_heads: int, head_dim: int, v_dim: int | None = None, dtype: Any = jnp.float32,
    mesh: Any = None, axis: Axes = "sp", batch_axis: Axes = None, head_axis: Axes = None,
) -> Any:  # fmt: skip
    """`cache = init_cache(2, 1024, 8, 128, dtype="int8")`: an empty cache of `capacity` tokens.

    >>> cache = init_cache(2, 1024, 8, 128, dtype="int8")
    >>> cache.k.shape, cache.k.dtype, cache.k_scale.shape
    ((2, 1024, 8, 128), dtype('int8'), (2, 1024, 8))

    A `frisket.caches.jax.KVCache`; with int8 (or float8_e4m3fn, float8_e5m2) one float32 scale per (batch, position,
    head) vector is stored, too. With a mesh a `ShardedKVCache`: positions are split over its `axis`, and only the
    device that owns a position writes it; `batch_axis=("dp", "fsdp"), head_axis="tp"` split batch and heads besides."""
    if mesh is None:
        if batch_axis or head_axis:
            raise ParameterError("batch_axis and head_axis are axes of a mesh; give mesh= too")
        return KVCache.create(batch, capacity, kv_heads, head_dim, v_dim, dtype)
    return ShardedKVCache.create(
        batch, capacity, kv_heads, head_dim, v_dim, dtype, mesh=mesh, axis=axis, batch_axis=batch_axis,
        head_axis=head_axis,
    )  # fmt: skip


@usual_promotion()
def concatenate_to_cache(
    cache: Cache, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> tuple[Cache, jax.Array]:
    """`cache, mask = concatenate_to_cache(cache, key, value, mask)`: new tokens at the running index of every sequence.

    >>> tokens = jnp.ones((2, 3, 1, 4))
    >>> cache, mask = concatenate_to_cache(init_cache(2, 8, 1, 4), tokens, tokens)
    >>> cache.lengths.tolist(), mask[0, 0, 0].astype(int).tolist()
    ([3, 3], [1, 1, 1, 0, 0, 0, 0, 0])

    key [batch, new, kv_heads, head_dim], value likewise. The cache that comes back is whole: `cache.k`, `cache.v`
    [batch, capacity, kv_heads, dim], their scales, and `cache.lengths`, the running index. The mask is bool [batch, 1,
    new, capacity], or as `mask` broadcasts with that: True where a token is written and `mask` is above 0. `mask` is
    what flax's `combine_masks` takes: of any dtype, 0 where a key is hidden, and it broadcasts with [batch, heads, new,
    capacity]. With the cache donated under `jax.jit` nothing is copied, and no step recompiles.

    For an attention of frisket there is no such array: `cache.attend(att, query)` reads the same mask text at every
    step. Raises `ShapeError` for a mask of other lengths and `CapacityError` for tokens without room."""
    new, capacity = key.shape[1], cache.capacity
    cache = cache.append(key, value)
    seen = jnp.arange(capacity) < cache.lengths[:, None, None, None]
    seen = jnp.broadcast_to(seen, (cache.batch, 1, new, capacity))
    if mask is None:
        return cache, seen
    mask = jnp.asarray(mask)
    axes = zip(mask.shape[::-1], (capacity, new, None, cache.batch), strict=False)
    if mask.ndim > 4 or any(n != 1 and most not in (None, n) for n, most in axes):
        raise ShapeError(
            f"the mask is {mask.dtype}{list(mask.shape)}; it is [batch, heads, {new}, {capacity}], axes of 1 "
            "broadcast: of the whole capacity of the cache"
        )
    refuse_additive(mask)
    return cache, jnp.logical_and(seen, mask > 0)  # traced numbers of a bias, 0 and below, hide every key
