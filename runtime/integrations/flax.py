"""Attention for flax: a layer of nnx, `attention_fn` for flax's own layers, those of linen too. Also the base of
attention modules of linen that keep their cache in the collection "cache".

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> layer = Attention(64, heads=4, kv_heads=2, mask="causal & window(256)", rngs=nnx.Rngs(0))
>>> layer(jnp.ones((2, 16, 64))).shape
(2, 16, 64)

`attention_fn` is attention under a mask in text, and what a layer of flax's own passes besides:

>>> attend = attention_fn("causal & window(w)", w=256)
>>> layer = nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
>>> layer(jnp.ones((2, 16, 64))).shape
(2, 16, 64)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from frisket.runtime.machine.modules import extras

with extras():
    import jax
    import jax.numpy as jnp
    from flax import linen, nnx

import frisket.operations as operations
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.entry import scaled_attention
from frisket.runtime.backends.registry import check_name
from frisket.runtime.caches.jax_plain import KVCache, ShardedKVCache
from frisket.runtime.calls.arrays import scale_of
from frisket.runtime.calls.options import Options, rate_and_seed
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine.parameters import call_value, refuse_additive, traced
from frisket.runtime.masks.mask import Divide, Mask, MaskLike, ScoreLike, ScoreMod, Weight, WeightLike
from frisket.runtime.masks.mask import mask as as_mask
from frisket.runtime.masks.mask import score as as_score
from frisket.runtime.modeling.layers import apply_rotary_pos_emb, concatenate_to_cache, rotary_tables

__all__ = ["Attention", "AttentionFn", "attention_fn"]

MASK, BIAS, STEP = "flax_mask", "flax_bias", "flax_step"  # names of what a layer passes


class Attention(nnx.Module):
    """Self-attention of [batch, length, features]: projections, rotary positions, attention by an operator's name.

    `mask`, `score`, `weight` and `divide` are what `fk.attention` takes; `operator` is a name of `AttentionRegistry`,
    `metadata` an `AttentionMetadata`, for a mesh, dtypes and tiles. `heads` query heads share `kv_heads` key heads (as
    many, unless said), of `head_dim` (features // heads). `rotary_base` None leaves positions to the mask and score.
    `linear` is for the four projections, `nnx.Linear`: `dtype`, what `get_dot_general_by_bits` gives, and others.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mask: MaskLike | None = "causal",
        score: ScoreLike | None = None,
        weight: WeightLike | None = None,
        divide: Any = None,
        operator: str = "frisket",
        metadata: operations.AttentionMetadata | None = None,
        rotary_base: float | None = 10000.0,
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **linear: Any,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        if min(heads, kv_heads) < 1 or heads % kv_heads or (head_dim is None and features % heads):
            text = f"{features} features in {heads} heads over {kv_heads} key heads; heads are a multiple of key "
            raise ShapeError(f"{text}heads, and divide the features, unless head_dim is given")
        head_dim = features // heads if head_dim is None else head_dim
        self.heads, self.kv_heads, self.head_dim, self.rotary_base = heads, kv_heads, head_dim, rotary_base
        self.mask, self.score, self.weight, self.divide = mask, score, weight, divide
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
    ) -> Any:
        """Attention of x [batch, length, features] to itself, or, with a `cache` of `frisket.caches.jax`, to what it
        holds and to x behind that. Then it returns (out, cache), with the same mask for prompts, chunks and single
        tokens.

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
        if name := next((n for n in ("mask", "score", "weight", "divide") if n in keywords), None):
            text = f"the {name} of this layer is fixed when it is made; a call may give segment_ids= or bias="
            raise ParameterError(text)
        if cache is None:
            if counts is not None:
                raise ParameterError("counts are of new tokens for a cache; without one give segment_ids or a mask")
            parts = {"score": self.score, "weight": self.weight, "divide": self.divide}
            return self._joined(self.operator(q, k, v, self.mask, **parts, **keywords).attention_outputs)
        att = self.operator.compiled(self.mask, self.score, self.weight, self.divide)
        out, cache = cache.attention(att, q, k, v, counts, **keywords)
        return self._joined(out), cache

    def _joined(self, heads: Any) -> Any:
        return self.out(heads.reshape(*heads.shape[:2], -1))


# -- for layers of flax ------------------------------------------------------------------------------------------------


def attention_fn(
    mask: MaskLike | None = None,
    score: ScoreLike | None = None,
    *,
    weight: WeightLike | None = None,
    divide: Any = None,
    scale: Any = None,
    backend: str | None = None,
    decode: bool = True,
    **params: Any,
) -> AttentionFn:
    """`attention_fn("causal & window(w)", w=256)`: for `attention_fn=` of `nnx.MultiHeadAttention` and of linen's
    `MultiHeadDotProductAttention`.

    `mask`, `score`, `weight`, `divide`, `scale` (1 / sqrt(head_dim) unless given), `backend` and `params` are those of
    `fk.attention`.
    Equal ones make equal functions, so that models made of them are equal to `nnx.jit`. `decode=False` is for layers
    that attend from a single query to several keys and do not decode: see `AttentionFn.__call__`.
    """
    check_name(backend)  # an unknown name is an error before a layer calls
    _refuse_traced(params)
    program = program_of(mask, score, params, weight=weight, divide=divide)
    _refuse_traced(program.captured)  # what a function of the mask captured outlives a trace as little
    return AttentionFn(*program.every_part, Options(scale_of(scale), backend=backend), decode)


def _refuse_traced(values: Mapping[str, Any]) -> None:
    for name in (n for n, x in values.items() if traced(x)):
        text = f"`{name}` is traced by jax.jit or another transform, and a layer outlives that; name it in the text "
        text += "and give the array with every call of the layer: "
        raise ParameterError(f'{text}layer(x, mask={{"{name}": {name}}})')


@dataclass(frozen=True)
class AttentionFn:
    """Attention as a layer of flax calls it; made by `attention_fn`."""

    mask: Mask | None
    score: ScoreMod | None
    weight: Weight | None
    divide: Divide | None
    options: Options
    decode: bool

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        """Attention of query [batch..., q_len, heads, dim] over key and value [batch..., kv_len, kv_heads, dim], with
        any number of batch axes; to masks and score mods they are one, b.

        `mask`, which `layer(x, mask=...)` passes on, is joined to this function's own:

        - an array, broadcast to [batch..., heads, q_len, kv_len] as in flax; a key is visible where it is above 0. It
          is read as a table, tile by tile, and never copied to that shape. Negative numbers are those of a bias: an
          error, and under `jax.jit`, where nothing can be raised, the result is NaN;
        - a dict of values for names in this function's texts, `mask={"doc": doc}`: other ones at every step. With
          "mask" it may hold one of these masks too, with "sinks" attention sinks [heads];
        - a text, a function or an `fk.Mask`.

        One query over several keys and an array of a mask are a step of flax's cache. Its position is that of the last
        key that the array shows, unless `decode=False`. Otherwise queries and keys both count from 0, as `is_causal`
        does. A query that sees no key gives 0, in flax the mean of all values.

        `bias` is added behind the score mod. Dropout is drawn from the key for every position, batch entry and head,
        `broadcast_dropout` or not: no random numbers are stored that sharing would save. Softmax is in float32 and
        products of float32 are as precise, whatever `force_fp32_for_softmax` and `precision` say. Attention weights are
        never made, so `sow_weights` is refused, and so are einsums of the caller's.
        """
        _refuse(module, "sow_weights=True", "attention weights are never made, so that there is nothing to sow")
        fused = "the products are part of one kernel, not a separate einsum"
        _refuse(einsum_dot_general, "einsum_dot_general", fused)
        _refuse(qk_attn_weights_einsum, "qk_attn_weights_einsum", fused)
        _refuse(attn_weights_value_einsum, "attn_weights_value_einsum", fused)
        query, key, value = _promoted(dtype, query, key, value)
        lead, lengths = _lengths(query, key, value)
        values = dict(mask) if isinstance(mask, Mapping) else {"mask": mask}
        layer_mask, sinks = values.pop("mask", None), values.pop("sinks", None)
        values = {n: call_value(n, x) for n, x in values.items()}
        # texts, functions and masks have no shape
        array = jnp.asarray(layer_mask) if hasattr(layer_mask, "shape") else None
        step = self.decode and array is not None and lengths[2] == 1 < lengths[3]
        text = _both(self.mask, "causal" if is_causal else None)
        text = _both(text, layer_mask if array is None else None)
        mod, weight, divide = self.score, self.weight, self.divide
        self._check_names((text, mod, weight, divide), values)
        tables: dict[str, Any] = {}
        if step:
            tables[STEP] = _last_seen(array)
            there = f"q + {STEP}"
            placed: Any = (None if x is None else x.at(q=there) for x in (text, mod, weight, divide))
            text, mod, weight, divide = placed
            # a table that no text reads would be an unknown name
            if not any(x is not None and STEP in x.unbound for x in (text, mod, weight, divide)):
                del tables[STEP]
        if array is not None:
            refuse_additive(array)
            where, tables[MASK] = _table(MASK, array > 0, lead, lengths)
            text = _both(text, where)
        if bias is not None:
            refuse_additive(None, bias := jnp.asarray(bias))
            where, tables[BIAS] = _table(BIAS, bias, lead, lengths)
            added = as_score(f"score + {where}")
            mod = added if mod is None else mod.then(added)
        rate, seed = rate_and_seed(0.0 if deterministic else dropout_rate, dropout_rng)
        options = Options(backend=self.options.backend, dropout=rate)
        att, values = scaled_attention(text, mod, options, self.options.scale, {**values, **tables}, weight, divide)
        batch, heads, _, kv_len = lengths
        q, k, v = (x.reshape(batch, *x.shape[-3:]) for x in (query, key, value))
        places = (batch, heads, kv_len, kv_len) if step else None  # the query is one of kv_len positions
        out: jax.Array = att(q, k, v, seed=seed, sinks=sinks, layout="bshd", sizes=places, **values)
        if array is not None and traced(array) and array.dtype != bool:  # nothing can be raised for its values
            out = jnp.where((array < 0).any(), jnp.asarray(jnp.nan, out.dtype), out)
        return out.reshape(*lead, *out.shape[1:])

    def _check_names(self, parts: Iterable[Any], values: Mapping[str, Any]) -> None:
        """Raise for names without a value, in the words of a layer."""
        for part in parts:
            for n in () if part is None else part.unbound:
                if n in (MASK, BIAS, STEP):
                    raise ParameterError(f"`{n}` is the name of what a layer passes as an array; call it otherwise")
                if n not in values:
                    message = f"`{n}` has no value; give it once, attention_fn(..., {n}=...), or with every call "
                    raise ParameterError(f'{message}of the layer: layer(x, mask={{"{n}": ...}})')


def _refuse(x: Any, name: str, why: str) -> None:
    if x is not None:
        raise ParameterError(f"{name} is for flax's own dot_product_attention: here {why}")


def _both(mask: Mask | None, other: MaskLike | None) -> Mask | None:
    if mask is None or other is None:
        return mask if other is None else as_mask(other)
    return mask & other


def _promoted(dtype: Any, *arrays: Any) -> list[jax.Array]:
    """Arrays in one dtype, promoted like flax's layers: that of the computation, or of all of them."""
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32
    return [jnp.asarray(x, dtype) for x in arrays]


def _lengths(query: Any, key: Any, value: Any) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
    """The batch axes, and (batch, heads, q_len, kv_len)."""
    lead = query.shape[:-3]
    if min(x.ndim for x in (query, key, value)) < 3 or not lead == key.shape[:-3] == value.shape[:-3]:
        text = f"query, key and value are {list(query.shape)}, {list(key.shape)} and {list(value.shape)}; they are "
        raise ShapeError(f"{text}[batch..., length, heads, dim], with the same batch axes")
    return lead, (math.prod(lead), query.shape[-2], query.shape[-3], key.shape[-3])


def _last_seen(mask: Any) -> jax.Array:
    """The last key that an array of a mask shows to anybody: in flax's cache, the one just written."""
    seen = (mask > 0).any(tuple(range(mask.ndim - 1)))
    return seen.shape[0] - 1 - jnp.argmax(seen[::-1]).astype(jnp.int32)  # type: ignore[no-any-return]


def _table(name: str, x: Any, lead: tuple[int, ...], lengths: tuple[int, int, int, int]) -> tuple[str, Any]:
    """A lookup that reads an array broadcast to [batch..., heads, q_len, kv_len] at b, h, q and k, and its array."""
    full = (*lead, *lengths[1:])
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) > len(full) or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        text = f"the {name.removeprefix('flax_')} is {list(x.shape)} for [batch..., heads, q_len, kv_len] = "
        raise ShapeError(f"{text}{list(full)}; it is broadcast to that, each axis of its length or 1")
    rest, batch_shape = shape[len(lead) :], shape[: len(lead)]
    index = ["0" if n == 1 else c for c, n in zip("hqk", rest, strict=True)]
    if batch_shape == lead or math.prod(batch_shape) == 1:
        x = x.reshape(math.prod(batch_shape), *rest)
        index.insert(0, "0" if x.shape[0] == 1 else "b")
    else:  # b counts the batch axes in a row
        strides = np.cumprod((1, *lead[:0:-1]))[::-1]
        x = x.reshape(shape)
        index[:0] = ["0" if n == 1 else f"b // {s} % {n}" for n, s in zip(batch_shape, strides, strict=True)]
    return f"{name}[{', '.join(index)}]", x


# -- for modules of linen ----------------------------------------------------------------------------------------------


class BaseJAXAttentionModule(linen.Module):
    """A linen module with `_concatenate_to_cache(key, value, query_states, attention_mask)`, called once a step.

    >>> import jax
    >>> from types import SimpleNamespace
    >>> class Keys(BaseJAXAttentionModule):
    ...     @linen.compact
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

    @linen.compact
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
