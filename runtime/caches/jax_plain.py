"""The plain cache of JAX: one buffer for a batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.attention import Attention

from .jax_store import JaxCache, check_new, counted, empty, grown, pathed, read, slots, stored, written


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class KVCache(JaxCache):
    """Keys and values of a batch of sequences of different lengths, in one buffer of a fixed capacity.

    >>> import numpy as np, frisket as fk
    >>> att = fk.compile("causal & window(64)")
    >>> cache = KVCache.create(batch=2, capacity=128, kv_heads=2, head_dim=16)
    >>> q, k, v = (np.ones((2, 9, heads, 16), "float32") for heads in (4, 2, 2))
    >>> step = jax.jit(lambda cache, q, k, v: cache.attention(att, q, k, v))
    >>> out, cache = step(cache, q, k, v)  # the prompt; then a token a call, under the same mask
    >>> cache = jax.jit(lambda cache, k, v: cache.append(k, v))(cache, k[:, :3], v[:, :3])  # three drafts, a tree:
    >>> attend = jax.jit(lambda cache, q: cache.attend(att, q, tree=[-1, -1, 0]))  # two guesses, one after the first
    >>> attend(cache, q[:, :3]).shape
    (2, 3, 4, 16)
    >>> keep = jax.jit(lambda cache: cache.keep(np.array([[0, 2], [0, 2]]), drafted=3))  # the path that was accepted
    >>> keep(cache).lengths.tolist(), cache.truncate([4, 0]).lengths.tolist()
    ([11, 11], [4, 0])

    A pytree: `append` and `attention` return a new cache. Under `jax.jit` it takes the memory of the old one, if that
    is donated. Growing changes no shape and does not recompile. k [batch, capacity, kv_heads, head_dim], v likewise
    with v_dim; with 8 bits also `k_scale`, `v_scale` float32 [batch, capacity, kv_heads], one for every vector. Kernels
    apply scales as they load, so no dequantised copy is made. `lengths` int32 [batch], in tokens.

    Masks and score mods read positions in the sequence, from 0; `Q_LEN` and `KV_LEN` are the capacity.

    Where tokens do not fit, `append` raises `CapacityError`. Code under `jax.jit` cannot raise: the tokens are dropped
    and `overflowed` bool [batch] is True from then on, and results of that sequence are wrong.
    """

    lengths: jax.Array
    overflowed: jax.Array

    @classmethod
    def create(
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: Any = jnp.float32,
    ) -> Self:  # fmt: skip
        """An empty cache; `dtype` a float, or int8, float8_e4m3fn or float8_e5m2 for 8 bits with scales."""
        arrays = empty((batch, capacity, kv_heads), head_dim, v_dim, dtype)
        return cls(**arrays, lengths=jnp.zeros(batch, jnp.int32), overflowed=jnp.zeros(batch, bool))

    capacity = property(lambda self: self.k.shape[1], doc="The most tokens that a sequence may have.")

    @usual_promotion()
    def append(self, k: jax.Array, v: jax.Array, counts: Any = None) -> Self:
        """The cache with new tokens after those of every sequence: k [batch, new, kv_heads, head_dim], v likewise.
        `counts` int [batch] says how many of the new tokens are real, the first ones; None means all."""
        new = check_new(self.arrays, self.batch, k, v)
        counts = counted(counts, self.batch, new)
        lengths, over = grown(self.lengths, counts, self.capacity)
        at = slots(self.lengths, counts, new, self.capacity)
        arrays = written(self.arrays, stored(self.arrays, k, v), at)
        return replace(self, **arrays, lengths=lengths, overflowed=self.overflowed | over)

    @usual_promotion()
    def attend(self, att: Attention, q: jax.Array, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attention of the last tokens of every sequence: q [batch, new, heads, head_dim] are the queries of the last
        `counts` tokens (None: as many as q has); out likewise with v_dim, 0 at padding. `params` as in a call of `att`,
        `return_lse=True` among them.

        With `tree` the last tokens are a tree of drafts: parents, int [new] or [batch, new], -1 for a root. A draft
        sees the tokens before the tree, its ancestors and itself, as far as the mask allows. Its position is that of
        the first draft plus its depth."""
        return read(att, q, self.arrays, self.lengths, self.capacity, counts, tree, params)

    @usual_promotion()
    def keep(self, path: jax.Array, drafted: Any, counts: Any = None) -> Self:
        """Keep some of the last `drafted` tokens (a number, or int [batch]) of every sequence: those on `path` int
        [batch, m], nodes of the tree in the order of the tree. `counts` int [batch] says how many entries of the path
        are used."""
        path, start, counts = pathed(self, path, drafted, counts)
        rows = jnp.arange(self.batch)[:, None], start[:, None] + path
        kept = {n: None if x is None else x[rows] for n, x in self.arrays.items()}
        arrays = written(self.arrays, kept, slots(start, counts, path.shape[1], self.capacity))
        return replace(self, **arrays, lengths=start + counts)
