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

The fields of a config are `frisket_mask`, `frisket_score`, `frisket_weight`, `frisket_divide` and `frisket_params`.
`frisket_columns` says what `output_attentions=True` gives. With `frisket_invariant` a token has the same bits in any
batch, in a prompt and in decoding (docs/invariant.md).

>>> config = LlamaConfig(frisket_mask="causal & q - k < w", frisket_params={"w": 256})
>>> config.to_diff_dict()["frisket_mask"]
'causal & q - k < w'

transformers checks the name of an implementation and nothing more: not whether a model asks for one at all. A model
that looks classes up by that name ends in a KeyError; a model that never asks for an implementation ignores it, and the
masks of its config. `watch` mends both: such a model gets the implementation that transformers would choose without a
name, with a warning. A mask that no attention reads is an error when the model is called.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

from frisket.grammar.memo import cached_on
from frisket.runtime.machine.modules import extras, pip_install

with extras():
    import torch
    import transformers
    from torch import Tensor

from frisket.dsl.errors import FrisketError, MissingPackageError, ParameterError, ShapeError, nearest
from frisket.dsl.program import ROOTS, read
from frisket.lowering.plan import whole
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention as called
from frisket.runtime.attention.entry import attention_for, scaled_attention
from frisket.runtime.caches.positions import AT, HIGH, LOW, REQUESTS, SHIFT, STEPS, no_room, not_served, placed
from frisket.runtime.calls.arrays import in_graph, version_of
from frisket.runtime.calls.options import Options, flag, rate_of, tuning_of
from frisket.runtime.machine.parameters import learns
from frisket.runtime.masks.mask import for_one_call
from frisket.runtime.masks.mask import mask as as_mask

from . import transformers_masks as masks
from .transformers_masks import SymbolicMask, constant

NAME = "frisket"
FULL, SLIDING = "full_attention", "sliding_attention"
TEXTS = "frisket_mask", "frisket_score", "frisket_weight", "frisket_divide"
INVARIANT = "frisket_invariant"
FIELDS = *TEXTS, "frisket_params", INVARIANT
COLUMNS = "frisket_columns"
OLDEST = 5, 19  # the oldest transformers: before it, caches of continuous batching do not name the kind of a layer
ELSEWHERE = "use `generate`, or attn_implementation='sdpa' for `generate_batch`"


def register() -> None:
    """Make `attn_implementation="frisket"` known to transformers: for `from_pretrained`, `_from_config` and
    `model.set_attn_implementation`. Once is enough, more do no harm. Raises `MissingPackageError` where transformers is
    older than 5.19."""
    if (have := tuple(map(int, transformers.__version__.split(".")[:2]))) < OLDEST:
        old, oldest = (".".join(map(str, x)) for x in (have, OLDEST))
        text = f"transformers {old} is older than {oldest}: {pip_install('transformers')}"
        raise MissingPackageError(text, name="transformers")
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, masks.symbolic)
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
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, which models call: query [batch, heads, q_len, head_dim], key and value [batch,
    kv_heads, kv_len, head_dim] to (out [batch, q_len, heads, head_dim], None). With `output_attentions` and
    `config.frisket_columns`, columns [batch, kv_heads, kv_len] stand in place of None. They are the weights of a key,
    summed over the queries and the query heads that read it.

    `attention_mask` is what `symbolic` has made, a tensor of 4 axes that the call brings, or None: then it is causal
    if `is_causal`, or the module's own, is true. A module that has none sees all keys, as under eager attention, and
    so do models that are made for eager attention alone. `s_aux` [heads] are sinks, `sinks` [batch, heads, q_len, 1]
    those of every query. To scores `softcap` is applied first, then `position_bias` is added, then comes
    `frisket_score`. `frisket_weight` and `frisket_divide` replace the softmax. `frisket_params` are values of names in
    the texts, besides those of `config.frisket_params`.
    `indices` [batch, q_len, n] are the keys that a model has chosen for each query, `block_indices` [batch, groups of
    heads, q_len, n] blocks of keys, as long as `module.indexer.block_size`. The mask shows these alone.
    """
    mask, result = _mask_of(module, query, key, attention_mask, is_causal), None
    invariant = flag(getattr(getattr(module, "config", None), INVARIANT, False), f"config.{INVARIANT}")
    if cache_of(rest) is not None:  # continuous batching
        if attention_mask is None:  # transformers says nothing else of requests: they are causal
            window = rest.get("sliding_window") if kind_of(module, rest) == SLIDING else None
            mask = replace(mask, structure=f"q >= k & q - k < {window}" if window else "q >= k")
        refuse_tables(mask, position_bias, indices, block_indices)
        if invariant:
            reason = "continuous batching lays requests in one row of keys, where each begins anywhere: config."
            raise ParameterError(f"{reason}{INVARIANT} has no effect there\n  use `generate`, or leave it out")
        options = Options(scaling, dropout=rate_of(dropout))
        layer = PagedLayer(mask, options, softcap, s_aux, frisket_params, sinks is not None)
        return _finished(paged(module, query, key, value, layer, rest), sinks)
    refuse_without_cache()
    columns = _columns_asked(module, rest)
    _refuse(rest, mask, columns)
    if indices is not None:
        mask = masks.chosen(mask, indices[:, None], 1, query.shape[1])
    if block_indices is not None:
        size: Any = module.indexer.block_size  # type: ignore[union-attr]
        mask = masks.chosen(mask, block_indices, size, query.shape[1])
    parts, values = program(module, mask, query.shape[1], softcap, position_bias, frisket_params)
    text, score, weight, divide = parts
    if columns and (weight is not None or in_graph(query)):
        text = "frisket_weight replaces the softmax" if weight is not None else "torch.compile has no form of them"
        raise ParameterError(f"config.frisket_columns: {text}\n  leave out output_attentions=True")
    if in_graph(query):
        how: dict[str, Any] = {"dropout": dropout, "sinks": s_aux, "origin": mask.origin, **values}
        how |= {"weight": weight, "divide": divide, "invariant": invariant}
        result = called(query, key, value, text, score, scaling, return_lse=sinks is not None, **how)
    else:
        values = {n: x.to(query.device) if isinstance(x, Tensor) else x for n, x in values.items()}
        options = Options(dropout=rate_of(dropout), tuning=tuning_of(invariant, weight is not None))
        att, values = scaled_attention(text, score, options, scaling, values, weight, divide)
        plan = _plan(att, mask, query, values)
        result = att(query, key, value, plan=plan, sinks=s_aux, return_lse=sinks is not None or columns)
        if columns:
            out, lse = result
            # sinks of every query leave the keys smaller weights
            of_keys = lse if sinks is None else torch.logaddexp(lse, sinks[..., 0].to(lse.dtype))
            result = result if sinks is not None else out
            statistics = att.statistics(query, key, value, lse=of_keys, sinks=s_aux, plan=plan, columns=True)
            return _finished(result, sinks)[0], statistics.columns
    return _finished(result, sinks)


def _columns_asked(module: torch.nn.Module, rest: Mapping[str, Any]) -> bool:
    """Whether a layer gives its columns."""
    columns = getattr(getattr(module, "config", None), COLUMNS, None)
    if columns not in (None, True, False):
        raise ParameterError(f"config.frisket_columns is {columns!r}; it is True or False")
    return bool(columns and rest.get("output_attentions"))


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
    if in_graph(q) or learns(mask):  # one that learns is another in every layer
        return masks.dense(mask, q, k)
    key = q.shape[:3], k.shape[2]
    entries: dict[Any, tuple[Any, SymbolicMask]] = cached_on(mask, "symbolic", dict)  # for the layers to come
    if (version := version_of(mask)) != entries.get(key, (None,))[0]:
        entries.clear()
        entries[key] = version, masks.dense(mask.detach(), q, k)  # another tensor, or it would hold itself
    return entries[key][1]


def _refuse(rest: Mapping[str, Any], mask: SymbolicMask, columns: bool) -> None:
    for name in ("head_mask", "layer_head_mask"):
        if rest.get(name) is not None and rest[name] is not False:
            text = f"attn_implementation='frisket' does not take {name}\n  prune heads with the model's own means, or "
            raise ParameterError(f"{text}leave out head_mask")
    if rest.get("output_attentions") and not columns:
        text = "attn_implementation='frisket' gives None for output_attentions=True: no weights are ever written out\n"
        text += "  load the model with attn_implementation='eager' to see them, or set config.frisket_columns = True "
        warnings.warn(f"{text}for the weights of each key, summed over queries", stacklevel=2)
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
    return str(cache_of(rest).layer_to_allocator[module.layer_idx].layer_type)


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
    """Attention of one layer: query [1, heads, tokens, head_dim] of all requests. key and value are [1, kv_heads,
    tokens, head_dim], and are written to the pages of the cache unless the layer has done so. The result is that of a
    call of attention, in the order of the queries; with `layer.lse` that of the scores, too.

    `rest` has what transformers prepares at every step: where keys are written and read, and where requests end among
    queries and keys, `cu_seq_lens_q` and `cu_seq_lens_k`."""
    mask, options, softcap, sinks, params, lse = layer
    tokens, kind = query.shape[2], kind_of(module, rest)
    if (cache := rest.pop("cache", None)) is not None:
        key, value = cache.update(key, value, module.layer_idx, rest)
    steps = tokens == rest["cu_seq_lens_q"].shape[0] - 1 and rest["max_length_q"] == 1
    batch, q_len = (tokens, 1) if steps else (1, tokens)
    symbolic = SymbolicMask(mask.structure, batch, q_len, key.shape[2])
    (text, score, *weights), values = program(module, symbolic, query.shape[1], softcap, None, params)
    att = attention_for(text, score, options, values, *weights)
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
    [tokens] what place queries have in their requests. Without them all keys of a request are there. Queries behind the
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
    has_texts = any(getattr(config, n, None) is not None for n in TEXTS)
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
            raise ParameterError(f"{text}first ones: the texts of the config cannot be placed\n  {ELSEWHERE}")


# -- fields of configs ------------------------------------------------------------------------------------------------


@constant
def canonical(text: str, kind: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """A user's program as one expression: its text, the names it reads, and the values it gives some of them."""
    try:
        parts = read(text, kind=kind)  # type: ignore[arg-type]
        parsed = for_one_call(text, kind, {})
    except FrisketError as error:
        error.add_note(f"in config.frisket_{kind}")  # the reader of a text does not know where it is from
        raise
    if other := next((n for n in ROOTS if n != kind and getattr(parts, n) is not None), None):
        text = f"config.frisket_{kind} has a line `{other} = ...`, which it does not read\n"
        raise ParameterError(f"{text}  write that text as config.frisket_{other}")
    return str(parsed), (*parsed.unbound, *parsed.params), tuple(parsed.params.items())


def program(
    module: Any, mask: SymbolicMask, heads: int, softcap: float | None, bias: Any, params: Mapping[str, Any] | None
) -> tuple[tuple[str | None, ...], dict[str, Any]]:
    """The texts of a layer's mask, score mod, weight and divisor, and values for the names in them."""
    config = getattr(module, "config", None)  # layers of some models have none
    steps = [f"softcap({float(softcap)!r})"] if softcap is not None else []
    if mask.bias:
        steps.append(f"score + {mask.bias}")
    places: dict[str, Any] = {}
    if bias is not None:
        index = ", ".join(["0" if n == 1 else x for x, n in zip(masks.POSITIONS, bias.shape[:2])])
        # a bias counts from the first query and key of the call, a mask from those of the sequence
        steps.append(f"score + position_bias[{index}, q - q_start, k - k_start]")
        places = {"position_bias": bias, "q_start": mask.origin[2], "k_start": mask.origin[3]}
    names: list[str] = []
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for field in TEXTS:
        if (theirs := _config_text(config, module, field)) is not None:
            texts[field], used, defaults = canonical(theirs, field.removeprefix("frisket_"))
            names.extend(used)
            values.update(defaults)
    user_mask, weight, divide = (texts.get(n) for n in ("frisket_mask", "frisket_weight", "frisket_divide"))
    if weight is None and divide is not None:
        raise ParameterError("config.frisket_divide is set without config.frisket_weight, such as 'exp(score)'")
    structure = mask.structure if user_mask is None else user_mask
    steps += [texts[n] for n in ("frisket_score",) if n in texts]
    values.update(_values(config, params, names))  # after the defaults in the texts, which they replace
    if missing := [n for n in names if n not in values]:
        text = f"`{missing[0]}` of the config's texts has no value; give it there, "
        text += f'config.frisket_params = {{"{missing[0]}": ...}}, or to the call: '
        raise ParameterError(f"{text}model(..., frisket_params={{...}})")
    shown = mask.text(structure)
    tables = {**mask.read_by(shown), **places}
    if mask.bias:
        tables.update(mask.tables)
    if clashes := [n for n in names if n in tables]:
        raise ParameterError(f"`{clashes[0]}` is a name of the plug-in's own here; call yours something else")
    if user_mask is not None:
        _check_place(user_mask, values, mask, heads)
    return (shown or None, masks.joined(steps, " then ") or None, weight, divide), {**tables, **values}


def _config_text(config: Any, module: torch.nn.Module, name: str) -> str | None:
    """The config's text for a layer: a text for all, or texts by the type of layer."""
    text = getattr(config, name, None)
    if isinstance(text, dict):
        types = getattr(config, "layer_types", None)
        known = {FULL, SLIDING} if types is None else set(types)
        for kind in text:
            if kind not in known:
                message = f"config.{name} names {kind!r}; the layers of this model are {', '.join(sorted(known))}"
                raise ParameterError(message)
        if types is not None:
            text = text.get(types[module.layer_idx])
        else:
            # without layer_types all layers are of one kind
            text = text.get(FULL if getattr(config, "sliding_window", None) is None else SLIDING)
    if text is not None and not isinstance(text, str):
        message = f"config.{name} is {text!r}; it is a text, or a dict of texts by type of layer, which configs can "
        raise ParameterError(f"{message}save\n  the text of a mask, score mod or weight of frisket is str(it)")
    if text is not None and getattr(config, "is_encoder_decoder", False):
        raise ParameterError(f"config.{name} is set, and an encoder-decoder has three kinds of attention: leave it out")
    return text


def _values(config: Any, params: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    """Values of the user's names: those of the config, and of the call."""
    values = {**(getattr(config, "frisket_params", None) or {}), **(params or {})}
    unused = [n for n in values if n not in names]
    if unused and not isinstance(getattr(config, "frisket_mask", None), dict):  # another layer's may read it
        text = f"`{unused[0]}` is in frisket_params, and no text of the config reads "
        raise ParameterError(f"{text}it; the names there are {', '.join(sorted(names)) or 'none'}")
    return {n: x for n, x in values.items() if n in names}


def _check_place(text: str, values: Mapping[str, Any], symbolic: SymbolicMask, heads: int) -> None:
    """Refuse a user's mask where it has no meaning, or shows keys that the cache of a sliding window has dropped."""
    if "attention_mask" in symbolic.tables:
        message = "config.frisket_mask is set, and this call brings an attention_mask of 4 axes: leave out one of them"
        raise ParameterError(message)
    if symbolic.chosen:
        raise ParameterError("config.frisket_mask is set, and this model chooses keys under its own mask: leave it out")
    if not symbolic.kv_offset:  # a cache from key 0 on has dropped nothing
        return
    user_mask = as_mask(text, **{n: x for n, x in values.items() if n in canonical(text, "mask")[1]})
    _, _, q, k = symbolic.origin
    full = whole((0, 0, q, k), (symbolic.batch, heads, symbolic.q_len, symbolic.kv_len))
    if user_mask.layout(symbolic.q_len, k, symbolic.batch, heads, origin=(0, 0, q, 0), sizes=full).visible_pairs:
        message = f"config.frisket_mask shows query {q} keys before {k}, which the cache of this sliding-window layer "
        message += f"has dropped: {text}\n  give past_key_values=transformers.DynamicCache(), which keeps all, or "
        raise ParameterError(f"{message}raise config.sliding_window")


def check_fields(names: Iterable[str], where: str, fields: tuple[str, ...] = FIELDS) -> None:
    """Raise `ParameterError` for a name that begins as a field does and is none: configs take any.

    >>> check_fields(["frisket_masks", "dtype"], "config.")
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: config.frisket_masks is not read; did you mean `frisket_mask`?
      the fields are frisket_mask, frisket_score, frisket_weight, frisket_divide, frisket_params, frisket_invariant
    """
    if wrong := [n for n in names if str(n).startswith("frisket") and n not in fields]:
        near = nearest(wrong[0], fields)
        text = f"{where}{wrong[0]} is not read{f'; did you mean `{near}`?' if near else ''}\n"
        raise ParameterError(f"{text}  the fields are {', '.join(fields)}")


# -- when a model is made ----------------------------------------------------------------------------------------------


def watch(name: str) -> None:
    """Look at every model that is made with the implementation `name`. A second call changes nothing."""
    plain = transformers.PreTrainedModel.get_correct_attn_implementation
    if hasattr(plain, "frisket"):
        return

    @wraps(plain)
    def correct(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention == name:
            if _check_read not in self._forward_pre_hooks.values():  # one hook, however often the implementation is set
                self.register_forward_pre_hook(_check_read)
            if computes_itself(type(self)):
                fallback = plain(self, None, is_init_check)
                _warn(type(self), name, f"it has taken {fallback!r}")
                return fallback
            tables = _by_name(type(self))
            # a model that computes with its mask expects Bools, as under sdpa
            if self._supports_sdpa and all(other == "sdpa" for _, other in tables):
                masks.expect_bools(self.config)
            for classes, other in tables:
                # the model looks its class up by the name, and would end in a KeyError
                layer_class = classes.setdefault(name, classes[other])
                _warn(type(self), name, f"its {layer_class.__name__} computes what {other!r} does")
        return plain(self, requested_attention, is_init_check)

    correct.frisket = True  # type: ignore[attr-defined]
    transformers.PreTrainedModel.get_correct_attn_implementation = correct  # type: ignore[method-assign]


def _warn(kind: type, name: str, instead: str) -> None:
    text = f"attn_implementation={name!r} is not used by {kind.__name__}, which computes attention itself: {instead}"
    warnings.warn(text, stacklevel=2)


def _check_read(module: Any, *_: Any) -> None:
    """Refuse texts of a config that no attention of the model reads, and a field that is none."""
    config = module.config
    if not torch.compiler.is_compiling():
        check_fields(vars(config), "config.", (*FIELDS, COLUMNS))
    for what in TEXTS:
        value = getattr(config, what, None)
        if value is not None and not torch.compiler.is_compiling() and not _is_read(module, what, value):
            parts = ", ".join([f"config.{n}" for n in config.sub_configs])
            way_out = f"set it on the part that has attention: {parts}" if parts else "leave it out"
            text = f"config.{what} is set, and no attention of {type(module).__name__} reads it\n  {way_out}"
            raise ParameterError(text)


def _is_read(module: Any, what: str, value: Any) -> bool:
    """Whether some layer that asks for an implementation finds that value in its config."""
    return any(
        getattr(getattr(m, "config", None), what, None) == value and _asks(vars(sys.modules[type(m).__module__]))
        for m in module.modules()
        if m is not module  # the model has its config anyway
    )


def _asks(names: dict[str, Any]) -> bool:
    return any(isinstance(x, transformers.AttentionInterface) for x in names.values())


def _modules(kind: type) -> list[dict[str, Any]]:
    """The namespaces of the Python modules that define a model's class and its bases among models."""
    base = transformers.PreTrainedModel
    bases = [c for c in kind.__mro__ if issubclass(c, base) and c is not base]
    return [vars(sys.modules[n]) for n in dict.fromkeys(c.__module__ for c in bases) if n in sys.modules]


def computes_itself(kind: type) -> bool:
    """Whether a model has attention, and no implementation from outside ever comes into it."""
    known = _modules(kind)
    if any(map(_asks, known)):
        return False
    # imported classes are those of other models
    classes = [x for names in known for x in names.values() if inspect.isclass(x) and x.__module__ == names["__name__"]]
    return any(issubclass(x, torch.nn.Module) and "attention" in x.__name__.lower() for x in classes)


def _by_name(kind: type) -> list[tuple[dict[str, Any], str]]:
    """Tables of classes by implementation, in models that ask for implementations elsewhere, and the entry to take."""
    tables = []
    for names in _modules(kind):
        for n, x in names.items():
            # models in the older style have such tables
            if n.endswith("ATTENTION_CLASSES") and isinstance(x, dict) and "eager" in x:
                tables.append((x, "sdpa" if "sdpa" in x else "eager"))
    return tables


# a constant of a graph, in which Dynamo does not read namespaces
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def eager_only(place: str) -> bool:
    """Whether the models of a Python module are said to work under eager attention alone. There `is_causal` of a layer
    may say anything, and no mask means that all is seen."""
    classes = [x for x in vars(sys.modules[place]).values() if inspect.isclass(x) and x.__module__ == place]
    models = [x for x in classes if issubclass(x, transformers.PreTrainedModel)]
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    return bool(models) and not any(getattr(x, flag, False) for x in models for flag in flags)
