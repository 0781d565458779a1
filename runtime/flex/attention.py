"""flex_attention, with torch's arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, FlexKernelOptions, noop_mask
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from frisket.dsl.errors import ParameterError
from frisket.grammar.memo import cached_on
from frisket.runtime.calls.arrays import in_graph, version_of
from frisket.runtime.machine.parameters import learns
from frisket.runtime.torch.jagged import closed_all, opened

from . import score_mod as score_mods
from .block_mask import BlockMask
from .checks import ArrayError, alike, check_arrays, check_block_mask, check_device, options_of, read
from .tensor_mask import LISTS, columns_of, kinds_of


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: Literal[False] = ..., kernel_options: FlexKernelOptions | None = None, *, return_aux: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: Literal[False] = ..., kernel_options: FlexKernelOptions | None = None, *, return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: Literal[True], kernel_options: FlexKernelOptions | None = None, return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: FlexKernelOptions | None = None, *, return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:  # fmt: skip
    """`flex_attention(query, key, value, score_mod, block_mask)`: torch's flex_attention, run by frisket.

    >>> import torch
    >>> from frisket.flex import create_block_mask, flex_attention
    >>> q = torch.randn(1, 2, 64, 16, requires_grad=True)
    >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 64, 64, device="cpu")
    >>> flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx), causal).shape
    torch.Size([1, 2, 64, 16])

    query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev); out (B, Hq, L, Ev). The batch of key and value may
    be 1, and with `enable_gqa` query head h reads their head h // (Hq // Hkv). `score_mod(score, b, h, q_idx, kv_idx)`
    changes scores in float32; `block_mask` says what is visible; `scale` is 1 / sqrt(E) unless given. `return_lse`
    gives (out, lse). `return_aux=AuxRequest(lse=True, max_scores=True)` gives (out, AuxOutput): float32 (B, Hq, L), the
    natural log of the sum that the softmax divides by, and the largest visible score, without a gradient. A query that
    sees no key has out 0 and lse -inf.

    Gradients flow to query, key, value, a learned `scale`, and every Float tensor that score_mod captured, on CPUs too.
    Traces are kept: a score_mod of the same code and numbers is not traced again, also with other captured tensors.

    Raises `ShapeError` (a ValueError) where shapes, or the mask's lengths, B and H do not fit; `ScoreModError` for a
    function that is no score_mod; `GatherError` (an IndexError) where it reads outside a table at a visible position,
    below 0 too; `KernelOptionError` for options that are unknown, impossible, or false of the mask. See docs/flex.md.
    """
    if return_lse and return_aux is not None:
        raise ParameterError("return_lse and return_aux are both given\n  return_aux=AuxRequest(lse=True) has both")
    if not isinstance(return_aux, AuxRequest | None):
        raise ParameterError(
            f"return_aux is {return_aux!r}\n  it says what else to return: AuxRequest(lse=True, max_scores=True)"
        )
    if isinstance(scale, Tensor) and (learns(scale) or in_graph(scale)) and not scale.ndim:
        score_mod, scale = _scaled(scale, score_mod), 1.0
    top = return_aux is not None and return_aux.max_scores
    if torch.compiler.is_dynamo_compiling():
        results: tuple[Tensor, Any, Any] = compiled(
            query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, top,
            top or return_lse or (return_aux is not None and return_aux.lse),
        )  # fmt: skip
    else:
        results = attend(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, top)
    out, lse, largest = results
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, largest if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def _scaled(scale: Tensor, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """A score mod of scores times a factor that learns, or that is a value of the current graph."""

    def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return score * scale if score_mod is None else score_mod(score * scale, b, h, q_idx, kv_idx)

    return scaled


def compiled(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None, gqa: bool,
    kernel_options: Any, top: bool, rows: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(out, lse, max) in a graph; without `rows`, lse and max may be None. Traced by Dynamo, so plain Python."""
    from .graph import call, unchanged

    nested, ragged = query, None
    if query.is_nested:
        (query, key, value), ragged = opened(query, key, value, score_mods.NAMES, ArrayError)
        score_mods.check_total(block_mask, query, key)
    check_arrays(query, key, value, gqa)
    dtype = query.dtype
    query, key, value = alike(query, key, value)
    request: dict[str, Any] = {
        "scale": scale, "gqa": gqa, "top": top, "rows": rows or ragged is not None,
        "kernel": dict(kernel_options or {}), "text": None, "values": {}, "tiles": None, "block": None,
        "ragged": None if ragged is None else ragged.tensors, "pattern": None if ragged is None else ragged.pattern,
    }  # fmt: skip
    mask_mod = noop_mask
    if block_mask is not None:
        check_block_mask(block_mask, query, key)
        ours = isinstance(block_mask, BlockMask)
        if ours and block_mask._text is not None:
            request["text"] = block_mask._text
            request["values"] = {} if block_mask._traced is None else dict(block_mask._traced.values)
        else:
            mask_mod = block_mask.mask_mod
        if not ours or block_mask._user_lists is not None:
            lists = {n: getattr(block_mask, n) for n in LISTS[:4]}
            kinds = kinds_of(lists, columns_of(lists, block_mask.seq_lengths[1], block_mask.BLOCK_SIZE[1]))
            request["tiles"], request["block"] = kinds, block_mask.BLOCK_SIZE
    if key.shape[0] != query.shape[0]:
        key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    # `or` would not do: torch 2.11 cannot ask a nested function for its truth in a graph
    score = unchanged if score_mod is None else score_mod
    results = call(query, key, value, score, (mask_mod,), None, request)
    results = results[0] if query.dtype == dtype else results[0].to(dtype), results[1], results[2]
    return results if ragged is None else closed_all(results, nested)


def attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None, gqa: bool,
    kernel_options: Any, top: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(out, lse, max) of a call in eager mode."""
    ragged = nested = words = None
    if isinstance(query, Tensor) and query.is_nested:
        nested = query
        (query, key, value), ragged = opened(query, key, value, score_mods.NAMES, ArrayError)
        score_mods.check_total(block_mask, query, key)
    check_arrays(query, key, value, gqa)
    dtype = query.dtype
    query, key, value = alike(query, key, value)
    if block_mask is not None:
        check_block_mask(block_mask, query, key)
        if not isinstance(block_mask, BlockMask):
            block_mask = _ours(block_mask)
        check_device(block_mask, query)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    requests = read(kernel_options)
    options = options_of(scale, gqa, requests, query.device.type)
    visible = None if block_mask is None else block_mask.tensor_mask
    if ragged is not None:
        visible = score_mods.visible_inside(visible, ragged)
    watched = in_graph(query, key, value)
    mod, tensors = (None, {}) if watched or score_mod is None else score_mods.scored(score_mod)
    if watched or in_graph(query, *tensors.values()):
        from .graph import operator

        score = None if score_mod is None else score_mods.traced(score_mod, valueless=True)[0]
        score = score if score is None or ragged is None else score_mods.local_in_graph(score, ragged)
        results: tuple[Tensor, Tensor | None, Tensor | None] = operator(query, key, value, score, visible, options, top)
    else:
        if mod is not None and ragged is not None:
            mod, names = score_mods.local(mod, ragged)
            tensors = {**tensors, **score_mods.values_of(names, ragged)}
            words = partial(score_mods.in_sequences, names, ragged)
        pair = score_mods.pair_of(mod, visible, options, tensors)
        pair.check(query, key, tensors, requests, block_mask, words)
        results = pair(query, key, value, tensors, top)
    results = results[0] if query.dtype == dtype else results[0].to(dtype), results[1], results[2]
    return results if nested is None else closed_all(results, nested)


def _ours(theirs: TorchBlockMask) -> BlockMask:
    """torch's BlockMask as one of ours: a position is visible in a full tile, and in a partial one where mask_mod shows
    it. Kept with it, until an attribute is replaced or mask_mod reads something else."""
    fields, (mod_state, tensors) = vars(theirs), score_mods.state_of(theirs.mask_mod) or (object(), [])
    state = (
        mod_state,
        *map(id, tensors),
        *((id(x), version_of(x) if isinstance(x, Tensor) else 0) for x in fields.values()),
    )
    masks: dict[Any, tuple[BlockMask, Any]] = cached_on(theirs, "ours", dict)
    if state not in masks:
        masks.clear()
        masks[state] = BlockMask(**fields), (*fields.values(), *tensors)  # live as long: no other object has their id
    return masks[state][0]
