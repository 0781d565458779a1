"""Attention for flax: a layer of nnx, and `attention_fn` for flax's own layers, those of linen too.

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> layer = Attention(64, heads=4, kv_heads=2, mask="causal & window(256)", rngs=nnx.Rngs(0))
>>> layer(jnp.ones((2, 16, 64))).shape
(2, 16, 64)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from frisket.runtime.machine.extras import extras

with extras():
    import jax
    import jax.numpy as jnp
    from flax import nnx

import frisket.operations as operations
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.modeling import apply_rotary_pos_emb, rotary_tables
from frisket.runtime.caches.jax_plain import KVCache
from frisket.runtime.masks.mask import MaskLike, ScoreLike

from .flax_attention import AttentionFn, attention_fn

__all__ = ["Attention", "AttentionFn", "attention_fn"]


class Attention(nnx.Module):
    """Self-attention of [batch, length, features]: projections, rotary positions, attention by an operator's name.

    `mask` and `score` are what `fk.attention` takes; `operator` is a name of `AttentionRegistry`, `metadata` an
    `AttentionMetadata`, for a mesh, dtypes and tiles. `heads` query heads share `kv_heads` key heads (as many, unless
    said), of `head_dim` (features // heads). `rotary_base` None leaves positions to the mask and score. `linear` is for
    the four projections, `nnx.Linear`: `dtype`, what `get_dot_general_by_bits` gives, and others.
    """

    def __init__(
        self, features: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None, *,
        mask: MaskLike | None = "causal", score: ScoreLike | None = None, operator: str = "frisket",
        metadata: operations.AttentionMetadata | None = None, rotary_base: float | None = 10000.0,
        use_bias: bool = False, rngs: nnx.Rngs, **linear: Any,
    ) -> None:  # fmt: skip
        kv_heads = heads if kv_heads is None else kv_heads
        if min(heads, kv_heads) < 1 or heads % kv_heads or (head_dim is None and features % heads):
            raise ShapeError(
                f"{features} features in {heads} heads over {kv_heads} key heads; heads are a multiple of key heads, "
                "and divide the features, unless head_dim is given"
            )
        head_dim = features // heads if head_dim is None else head_dim
        self.heads, self.kv_heads, self.head_dim, self.rotary_base = heads, kv_heads, head_dim, rotary_base
        self.mask, self.score = mask, score
        self.operator = operations.AttentionRegistry.create(operator, metadata)
        projection: Any = partial(nnx.Linear, use_bias=use_bias, rngs=rngs, **linear)
        self.query = projection(features, heads * head_dim)
        self.key = projection(features, kv_heads * head_dim)
        self.value = projection(features, kv_heads * head_dim)
        self.out = projection(heads * head_dim, features)

    def empty_cache(self, batch: int, capacity: int, dtype: Any = None) -> KVCache:
        """A cache for `batch` sequences of up to `capacity` tokens, in the dtype of the projections unless given."""
        return KVCache.create(batch, capacity, self.kv_heads, self.head_dim, dtype=dtype or self.key.dtype or "float32")

    def __call__(
        self, x: jax.Array, *, positions: Any = None, cache: Any = None, counts: Any = None, **keywords: Any
    ) -> Any:  # fmt: skip
        """Attention of x [batch, length, features] to itself, or, with a `cache` of `frisket.caches.jax`, to what it
        holds and to x behind that: then (out, cache), with the same mask for prompts, chunks and single tokens.

        `positions` int [length] or [batch, length] are for the rotary tables: 0, 1, ... unless given, with a cache
        those behind what it holds. Masks speak of places in the sequence, whatever the rotary tables say. `counts` int
        [batch], with a cache, says how many tokens of x are real. `keywords` go to the operator: values of the mask's
        and score mod's names, and without a cache its other keywords, `segment_ids` for one.
        """
        if x.ndim != 3:
            raise ShapeError(f"x is {list(x.shape)}; it is [batch, length, features]")
        q, k, v = (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.query, self.key, self.value))
        if self.rotary_base is not None:
            if positions is None:
                positions = jnp.arange(x.shape[1], dtype=jnp.int32)
                positions = positions if cache is None else cache.lengths[:, None] + positions[None]
            tables = rotary_tables(jnp.asarray(positions), self.head_dim, self.rotary_base)
            q, k = (apply_rotary_pos_emb(y, *tables, layout="bshd") for y in (q, k))
        if name := next((n for n in ("mask", "score") if n in keywords), None):
            raise ParameterError(
                f"the {name} of this layer is fixed when it is made; a call may give segment_ids= or bias="
            )
        if cache is None:
            if counts is not None:
                raise ParameterError("counts are of new tokens for a cache; without one give segment_ids or a mask")
            return self._joined(self.operator(q, k, v, self.mask, score=self.score, **keywords).attention_outputs)
        out, cache = cache.attention(self.operator.compiled(self.mask, self.score), q, k, v, counts, **keywords)
        return self._joined(out), cache

    def _joined(self, heads: Any) -> Any:
        return self.out(heads.reshape(*heads.shape[:2], -1))
