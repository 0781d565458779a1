"""frisket as an attention implementation of Hugging Face transformers.

>>> import frisket.integrations.transformers
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> frisket.integrations.transformers.register()
>>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="frisket")
>>> model.config.frisket_mask = "causal & window(256)"  # unless said, what the model has itself

The mask that transformers makes reaches the kernels as an expression: no dense mask is made.

transformers' continuous batching, `model.generate_batch` and its managers, packs the new tokens of all requests of a
step in one row, prompts, chunks of prompts and steps of decoding alike. Keys and values lie in pages that transformers
owns; its cache writes the new ones and reads those of every request, one request behind another. The mask of the model
is read at the positions that tokens have in their requests. transformers makes no mask here: where requests begin and
end are four small tables, computed on the device of the tokens.

>>> from transformers import GenerationConfig
>>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
>>> config = LlamaConfig(vocab_size=64, eos_token_id=None, pad_token_id=0, **sizes)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="frisket")
>>> how = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
>>> found = model.generate_batch([[5, 7, 9, 11], [6, 8]], generation_config=how)
>>> [len(x.generated_tokens) for x in found.values()]
[3, 3]
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

from frisket.grammar.memo import cached_on
from frisket.runtime.machine.modules import extras, pip_install

with extras():
    import torch
    import transformers
    from torch import Tensor

from frisket.dsl.errors import MissingPackageError, ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention as called
from frisket.runtime.attention.entry import attention_for, scaled_attention
from frisket.runtime.caches.positions import AT, HIGH, LOW, REQUESTS, SHIFT, STEPS, no_room, not_served, placed
from frisket.runtime.calls.arrays import in_graph, version_of
from frisket.runtime.calls.options import Options, rate_of

from .transformers_config import SLIDING, eager_only, program, watch
from .transformers_masks import SymbolicMask, chosen, dense, symbolic

NAME = "frisket"
OLDEST = 5, 19  # the oldest transformers: before it, caches of continuous batching do not name the kind of a layer
ELSEWHERE = "use `generate`, or attn_implementation='sdpa' for `generate_batch`"


def register() -> None:
    """Make `attn_implementation="frisket"` known to transformers: for `from_pretrained`, `_from_config` and
    `model.set_attn_implementation`. Once is enough, more do no harm. Raises `MissingPackageError` where transformers is
    older than 5.19."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if (have := tuple(map(int, transformers.__version__.split(".")[:2]))) < OLDEST:
        old, oldest = (".".join(map(str, x)) for x in (have, OLDEST))
        text = f"transformers {old} is older than {oldest}: {pip_install('transformers')}"
        raise MissingPackageError(text, name="transformers")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, symbolic)
    watch(NAME)
    allow(NAME)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    frisket_params: Mapping[str, Any] | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
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
        layer = PagedLayer(mask, options, softcap, s_aux, frisket_params, sinks is not None)
        return _finished(paged(module, query, key, value, layer, rest), sinks)
    refuse_without_cache()
    _refuse(rest, mask)
    if indices is not None:
        mask = chosen(mask, indices[:, None], 1, query.shape[1])
    if block_indices is not None:
        size: Any = module.indexer.block_size  # type: ignore[union-attr]
        mask = chosen(mask, block_indices, size, query.shape[1])
    text, score, values = program(module, mask, query.shape[1], softcap, position_bias, frisket_params)
    if in_graph(query):
        how: dict[str, Any] = {"dropout": dropout, "sinks": s_aux, "origin": mask.origin, **values}
        result = called(query, key, value, text, score, scaling, return_lse=sinks is not None, **how)
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
            text = f"attention of {q.shape[2]} queries to {k.shape[2]} keys, under a mask of {mask.q_len} x "
            text += f"{mask.kv_len} that transformers has made\n  give every layer the mask made for its cache"
            raise ShapeError(text)
        return mask
    if isinstance(mask, Tensor):
        return _dense(mask, q, k)
    if causal is None:
        causal = getattr(module, "is_causal", False) and not eager_only(type(module).__module__)
    # a single query is the last one, and sees every key
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
            text = f"attn_implementation='frisket' does not take {name}\n  prune heads with the model's own means, or "
            raise ParameterError(f"{text}leave out head_mask")
    if rest.get("output_attentions"):
        text = "attn_implementation='frisket' gives None for output_attentions=True: no weights are ever written out"
        warnings.warn(f"{text}\n  load the model with attn_implementation='eager' to see them", stacklevel=2)
    lengths = rest.get("cu_seq_lens_q")
    if lengths is not None and lengths.shape[0] > 2 and mask.structure and not mask.documents:
        text = "cu_seq_lens_q says that several documents are packed in a row, and the mask does not\n"
        text += "  give position_ids that begin at 0 with every document, use_cache=False, and no attention_mask"
        raise ParameterError(text)


# -- continuous batching -----------------------------------------------------------------------------------------------


def allow(name: str) -> None:
    """Make the implementation `name` known to transformers' continuous batching. A second call changes nothing."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    plain = Manager.switch_to_cb_friendly_attn
    if hasattr(plain, "frisket"):
        return

    @wraps(plain)
    def switch(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        if model.config._attn_implementation != name:  # other implementations are left to transformers
            plain(self, model, auto_switch_to_flash)
        elif not hasattr(model, "frisket_serving"):
            before = model.register_forward_pre_hook(_begins, with_kwargs=True)
            model.frisket_serving = before, model.register_forward_hook(_ends, always_call=True)

    switch.frisket = True  # type: ignore[attr-defined]
    Manager.switch_to_cb_friendly_attn = switch  # type: ignore[method-assign]


_step = threading.local()  # `cache`: that of continuous batching, in a step of a model


def _begins(_: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    _step.cache = cache if hasattr(cache := kwargs.get("cache"), "layer_to_allocator") else None


def _ends(*_: Any) -> None:
    _step.cache = None


def cache_of(rest: Mapping[str, Any]) -> Any:
    """The cache of continuous batching whose pages a layer attends to; None where it was given none. Since transformers
    5.24 layers write keys and values to it themselves, and hand on those of all requests with their lengths."""
    if hasattr(cache := rest.get("cache"), "layer_to_allocator"):
        return cache
    written = "write_index" in rest and isinstance(rest.get("cu_seq_lens_k"), Tensor)
    return getattr(_step, "cache", None) if written else None


def kind_of(module: Any, rest: Mapping[str, Any]) -> str:
    """The kind of pages that a layer has: those of a sliding window keep no more than it."""
    kind: str = cache_of(rest).layer_to_allocator[module.layer_idx].layer_type
    return kind


def refuse_without_cache() -> None:
    """Refuse a layer without cache or lengths in a step of continuous batching: requests would share keys."""
    if not torch.compiler.is_compiling() and getattr(_step, "cache", None) is not None:
        text = "this model does not hand the cache of continuous batching to its attention layers\n  use `generate`"
        raise ParameterError(text)


class PagedLayer(NamedTuple):
    """Attention of a layer in continuous batching: its mask, options, soft cap, sinks and values of names; whether the
    lse is returned."""

    mask: SymbolicMask
    options: Options
    softcap: float | None
    sinks: Tensor | None
    params: Mapping[str, Any] | None
    lse: bool


# transformers' cache is written in place, through views that a graph would copy
@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged(module: Any, query: Tensor, key: Tensor, value: Tensor, layer: PagedLayer, rest: dict[str, Any]) -> Any:
    """Attention of one layer: query [1, heads, tokens, head_dim] of all requests, key and value [1, kv_heads, tokens,
    head_dim], which are written to the pages of the cache unless the layer has done so. The result is that of a call of
    attention, in the order of the queries; with `layer.lse` that of the scores, too.

    `rest` has what transformers prepares at every step: where keys are written and read, and where requests end among
    queries and keys, `cu_seq_lens_q` and `cu_seq_lens_k`."""
    mask, options, softcap, sinks, params, lse = layer
    tokens, kind = query.shape[2], kind_of(module, rest)
    if (cache := rest.pop("cache", None)) is not None:
        key, value = cache.update(key, value, module.layer_idx, rest)
    steps = tokens == rest["cu_seq_lens_q"].shape[0] - 1 and rest["max_length_q"] == 1
    batch, q_len = (tokens, 1) if steps else (1, tokens)
    symbolic = SymbolicMask(mask.structure, batch, q_len, key.shape[2])
    text, score, values = program(module, symbolic, query.shape[1], softcap, None, params)
    att = attention_for(text, score, options, values)
    _check(att, module, kind, rest, values)
    known = "requests", kind, key.shape[2]
    if known not in mask.cached:
        mask.cached[known] = where(rest["cu_seq_lens_q"], rest["cu_seq_lens_k"], tokens, _positions(rest))
    tables = {**values, **mask.cached[known]}
    paged_att = placed(att, STEPS if steps else REQUESTS)
    tables = {n: x for n, x in tables.items() if n in paged_att.program.names}
    if steps:  # every request is an entry of the batch, and reads its part of the one row of keys
        query = query.transpose(0, 2)
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    planned = paged_att, query.shape[1]
    if planned not in mask.cached:  # once for the layers that are alike
        mask.cached[planned] = paged_att.plan(q_len, key.shape[2], batch, query.shape[1], **tables)
    result: Any = paged_att(query, key, value, plan=mask.cached[planned], sinks=sinks, return_lse=lse)
    if not steps:
        return result
    return tuple(x.transpose(0, 2) for x in result) if lse else result.transpose(0, 2)


def where(ends_q: Tensor, ends_k: Tensor, tokens: int, positions: Tensor | None) -> dict[str, Tensor]:
    """The place of every query's request, int32 [tokens] each, on the device of the ends; nothing waits for it.

    `ends_q` and `ends_k` int32 [requests + 1] are where requests begin and end among queries and keys, `positions` int
    [tokens] what place queries have in their requests; without them all keys of a request are there. Queries behind the
    last request are padding and see nothing."""
    n, place = ends_q.shape[0] - 1, torch.arange(tokens, dtype=torch.int32, device=ends_q.device)
    request = torch.searchsorted(ends_q[1:], place, right=True)  # right: behind requests without new tokens
    behind = (request + 1).clamp_max(n)  # of padding: the last end, and so no keys
    low, high = ends_k[request.clamp_max(n)], ends_k[behind]
    last = ends_q[behind] - 1  # the last query of the request stands where its last key does
    stop = high - low if positions is None else positions.to(torch.int32)[last.clamp_min(0)] + 1
    bounds = {LOW: low, HIGH: high, SHIFT: high - stop, AT: stop - 1 - (last - place)}
    return {n: x.to(torch.int32) for n, x in bounds.items()}


def _positions(rest: Mapping[str, Any]) -> Tensor | None:
    positions = rest.get("position_ids")
    # 3 axes are positions in images and videos
    return positions[0] if isinstance(positions, Tensor) and positions.ndim == 2 else None


def refuse_tables(mask: SymbolicMask, *extras: Tensor | None) -> None:
    """Refuse a mask of more than positions, and `extras` that a call brings: later steps lack the tables."""
    tables = sorted({*mask.read_by(mask.structure), *(mask.tables if mask.bias else ())})
    if tables or any(x is not None for x in extras):
        of = f"the table {tables[0]!r} of the tokens of a call" if tables else "a bias, or keys chosen by the model"
        raise ParameterError(f"attention of this model reads {of}, and continuous batching keeps none\n  {ELSEWHERE}")


def _check(att: Attention, module: Any, kind: str, rest: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse texts of the config that have no meaning for requests in a row, or look behind a sliding cache."""
    config, has_positions = module.config, _positions(rest) is not None
    window = getattr(config, "sliding_window", None)
    has_texts = any(getattr(config, n, None) is not None for n in ("frisket_mask", "frisket_score"))
    if why := not_served(att, values):
        raise ParameterError(f"continuous batching, `generate_batch`: {why}")
    if kind == SLIDING:
        if why := no_room(att, window or 0, 1, values):
            mask, way_out = "the mask of this model", ELSEWHERE
            if has_texts:
                way_out = f"raise config.sliding_window, or add `& window({window})` to the mask"
                mask = "config.frisket_mask"
            text = f"{mask} looks behind the cache of a sliding-window layer: {why.splitlines()[0]}\n  {way_out}"
            raise ParameterError(text)
        if has_texts and not has_positions:
            text = "this model does not tell its attention the positions of tokens, and a sliding-window cache has no "
            raise ParameterError(f"{text}first ones: a mask or score mod of the config cannot be placed\n  {ELSEWHERE}")
