"""frisket as an attention implementation of Hugging Face transformers.

>>> import frisket.integrations.transformers
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> frisket.integrations.transformers.register()
>>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="frisket")
>>> model.config.frisket_mask = "causal & window(256)"  # unless said, what the model has itself

The mask that transformers makes reaches the kernels as an expression: no dense mask is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from frisket.grammar.memo import cached_on
from frisket.runtime.machine.extras import extras, pip_install

with extras():
    import torch
    import transformers
    from torch import Tensor

from frisket.dsl.errors import MissingPackageError, ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention as called
from frisket.runtime.attention.entry import scaled_attention
from frisket.runtime.calls.arrays import in_graph, version_of
from frisket.runtime.calls.options import Options, rate_of

from .transformers_config import SLIDING, program
from .transformers_loading import eager_only, watch
from .transformers_masks import SymbolicMask, chosen, dense, symbolic
from .transformers_paged import allow, cache_of, kind_of, paged, refuse_tables, refuse_without_cache

NAME = "frisket"
OLDEST = 5, 19  # the oldest transformers: before it, caches of continuous batching do not name the kind of a layer


def register() -> None:
    """Make `attn_implementation="frisket"` known to transformers: for `from_pretrained`, `_from_config` and
    `model.set_attn_implementation`. Once is enough, more do no harm. Raises `MissingPackageError` where transformers is
    older than 5.19."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if (have := tuple(map(int, transformers.__version__.split(".")[:2]))) < OLDEST:
        old, oldest = (".".join(map(str, x)) for x in (have, OLDEST))
        raise MissingPackageError(
            f"transformers {old} is older than {oldest}: {pip_install('transformers')}", name="transformers"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, symbolic)
    watch(NAME)
    allow(NAME)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, sinks: Tensor | None = None, is_causal: bool | None = None,
    indices: Tensor | None = None, block_indices: Tensor | None = None,
    frisket_params: Mapping[str, Any] | None = None, **rest: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention of one layer, which models call: query [batch, heads, q_len, head_dim], key and value [batch,
    kv_heads, kv_len, head_dim] to (out [batch, q_len, heads, head_dim], None).

    `attention_mask` is what `symbolic` has made, a tensor of 4 axes that the call brings, or None: then it is causal
    if `is_causal`, or the module's own, is true. A module that has none sees all keys, as under eager attention, and
    so do models that are made for eager attention alone. `s_aux` [heads] are sinks, `sinks` [batch, heads, q_len, 1]
    those of every query. To scores `softcap` is applied first, then `position_bias` is added, then
    comes `frisket_score`. `frisket_params` are values of names in the texts, beside those of `config.frisket_params`.
    `indices` [batch, q_len, n] are the keys that a model has chosen for each query, `block_indices` [batch, groups of
    heads, q_len, n] blocks of keys, as long as `module.indexer.block_size`; of the mask, they alone are seen.
    """
    mask, result = _mask_of(module, query, key, attention_mask, is_causal), None
    if cache_of(rest) is not None:  # continuous batching
        if attention_mask is None:  # transformers says nothing else of requests: they are causal
            window = rest.get("sliding_window") if kind_of(module, rest) == SLIDING else None
            mask = replace(mask, structure=f"q >= k & q - k < {window}" if window else "q >= k")
        refuse_tables(mask, position_bias, indices, block_indices)
        options = Options(scaling, dropout=rate_of(dropout))
        result = paged(
            module, query, key, value, mask, rest, options, softcap, s_aux, frisket_params, sinks is not None
        )
        return _finished(result, sinks)
    refuse_without_cache()
    _refuse(rest, mask)
    if indices is not None:
        mask = chosen(mask, indices[:, None], 1, query.shape[1])
    if block_indices is not None:
        size: Any = module.indexer.block_size  # type: ignore[union-attr]
        mask = chosen(mask, block_indices, size, query.shape[1])
    text, score, values = program(module, mask, query.shape[1], softcap, position_bias, frisket_params)
    if in_graph(query):
        result = called(
            query, key, value, text, score, scaling, dropout=dropout, sinks=s_aux, origin=mask.origin,
            return_lse=sinks is not None, **values,
        )  # fmt: skip
    else:
        values = {n: x.to(query.device) if isinstance(x, Tensor) else x for n, x in values.items()}
        att, values = scaled_attention(text, score, Options(dropout=rate_of(dropout)), scaling, values)
        plan = _plan(att, mask, query, values)
        result = att(query, key, value, plan=plan, sinks=s_aux, return_lse=sinks is not None)
    return _finished(result, sinks)


def _finished(result: Any, sinks: Tensor | None) -> tuple[Tensor, None]:
    """The result of a layer; of the softmax, `sinks` (logits without values, one a query) leave the scores a share."""
    out = result if sinks is None else result[0] * torch.sigmoid(result[1][..., None] - sinks).to(result[0].dtype)
    return out.transpose(1, 2).contiguous(), None


def _plan(att: Attention, mask: SymbolicMask, query: Tensor, values: dict[str, Any]) -> Any:
    """Made once for all layers that are alike."""
    key = att, query.shape[1], *((n, id(x)) for n, x in values.items())
    versions = [version_of(x) for n, x in values.items() if isinstance(x, Tensor) and n not in mask.tables]
    if key not in mask.cached or mask.cached[key][2] != versions:
        plan = att.plan(mask.q_len, mask.kv_len, query.shape[0], query.shape[1], origin=mask.origin, **values)
        mask.cached[key] = plan, values, versions  # values live as long: no other one has their id
    return mask.cached[key][0]


# -- the mask ---------------------------------------------------------------------------------------------------------


def _mask_of(module: torch.nn.Module, q: Tensor, k: Tensor, mask: Any, causal: bool | None) -> SymbolicMask:
    """The mask of a layer, whatever stands for it."""
    if isinstance(mask, SymbolicMask):
        have, want = (mask.q_len, mask.kv_len), (q.shape[2], k.shape[2])
        if have != want and all(n in (1, m) for n, m in zip(have, want)) and mask.make is not None:
            return _dense(mask.array(), q, k)  # one row for all queries or keys, as an array of it would be
        if have != want:
            raise ShapeError(
                f"attention of {q.shape[2]} queries to {k.shape[2]} keys, under a mask of {mask.q_len} x "
                f"{mask.kv_len} that transformers has made\n  give every layer the mask made for its cache"
            )
        return mask
    if isinstance(mask, Tensor):
        return _dense(mask, q, k)
    if causal is None:
        causal = getattr(module, "is_causal", False) and not eager_only(type(module).__module__)
    return SymbolicMask("q >= k" if causal and q.shape[2] > 1 else "", q.shape[0], q.shape[2], k.shape[2])


def _dense(mask: Tensor, q: Tensor, k: Tensor) -> SymbolicMask:
    if in_graph(q) or mask.requires_grad:  # one that learns is another in every layer
        return dense(mask, q, k)
    key = q.shape[:3], k.shape[2]
    entries: dict[Any, tuple[Any, SymbolicMask]] = cached_on(mask, "symbolic", dict)  # for the layers to come
    if (version := version_of(mask)) != entries.get(key, (None,))[0]:
        entries.clear()
        entries[key] = version, dense(mask.detach(), q, k)  # another tensor, or it would hold itself
    return entries[key][1]


def _refuse(rest: Mapping[str, Any], mask: SymbolicMask) -> None:
    for name in ("head_mask", "layer_head_mask"):
        if rest.get(name) is not None and rest[name] is not False:
            raise ParameterError(
                f"attn_implementation='frisket' does not take {name}\n  prune heads with the model's own means, or "
                "leave out head_mask"
            )
    if rest.get("output_attentions"):
        warnings.warn(
            "attn_implementation='frisket' gives None for output_attentions=True: no weights are ever written out\n  "
            "load the model with attn_implementation='eager' to see them", stacklevel=2,
        )  # fmt: skip
    lengths = rest.get("cu_seq_lens_q")
    if lengths is not None and lengths.shape[0] > 2 and mask.structure and not mask.documents:
        raise ParameterError(
            "cu_seq_lens_q says that several documents are packed in a row, and the mask does not\n"
            "  give position_ids that begin at 0 with every document, use_cache=False, and no attention_mask"
        )
