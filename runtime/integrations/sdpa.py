"""torch's scaled_dot_product_attention, run by frisket: `sdpa` is called like it, `sdpa_for` puts it into models.

>>> import torch
>>> q, document = torch.randn(1, 2, 64, 16), torch.arange(64) // 16
>>> dense = (document[:, None] == document).tril()
>>> row_ranges(dense[None, None])[0]
'k >= first[0, 0, q] & q >= k'
>>> sdpa(q, q, q, attn_mask=dense).shape
torch.Size([1, 2, 64, 16])

A dense mask on the host is compared with those of earlier calls, bit for bit. So a mask that was written to, or another
one at the same address, is never taken for an earlier one. Equal masks share the tile ranges of the first. In large
masks, the keys of every query may be one range, as under causality, windows, documents and padding: two integers a row
then replace the entries. On a device a mask is remembered by its identity and its version. In a graph nothing is known
of its entries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.grammar.memo import Memo, cached_on, remember
from frisket.runtime.attention.entry import attention, scaled_attention
from frisket.runtime.calls.arrays import COPIED, in_graph, version_of
from frisket.runtime.calls.options import Options, flag, rate_of
from frisket.runtime.machine.modules import extras
from frisket.runtime.machine.parameters import has_tangent, learns

with extras():
    import torch
    from torch import Tensor
    from torch.nn import functional
    from torch.nn.attention.bias import CausalBias, CausalVariant

NAME = "scaled_dot_product_attention"
BUILTIN = getattr(torch._C._nn, NAME)
CAUSAL = "q >= k"  # from the top left, whatever the lengths, as torch
LATEST = 4  # masks of a shape that are remembered
attend: Any = attention  # of tensors and tables by name, for which it has no overload
LOOKED_AT = 1 << 20  # entries from which ranges cost less than planning by entries: benchmarks/sdpa.py
PROBED = 16  # rows that show most masks to be no ranges


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the arguments and results of torch's `scaled_dot_product_attention`.

    >>> import frisket, torch
    >>> q, k, v = torch.randn(3, 1, 8, 128, 16)
    >>> real = torch.arange(128) < 100  # the other keys are padding
    >>> frisket.sdpa(q, k, v, attn_mask=real.expand(1, 1, 128, 128)).shape
    torch.Size([1, 8, 128, 16])
    >>> torch.nn.functional.scaled_dot_product_attention = frisket.sdpa  # for every model
    >>> torch.nn.functional.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention  # undone

    query [..., heads, q_len, head_dim], key [..., kv_heads, kv_len, head_dim], value [..., kv_heads, kv_len, v_dim] to
    [..., heads, q_len, v_dim]. Two axes or more; the leading ones broadcast.

    - `attn_mask`: Bools, True where a key is visible, or Floats that are added to scores; it broadcasts to
      [..., heads, q_len, kv_len]. Gradients flow to Floats. A `CausalBias` of torch is read without its entries.
    - `is_causal`: query i sees keys 0 to i, also where lengths differ. With `attn_mask`, both apply.
    - `dropout_p`: the share of weights to drop, in training or not. `scale`: 1 / sqrt(head_dim) unless given.
    - `enable_gqa`: query heads share key heads, in groups.

    A query that sees no key has zeros. Nested tensors of layout torch.jagged work without `attn_mask`; `is_causal`
    counts positions inside a sequence. Raises `ShapeError` where shapes do not fit and `ParameterError` for other
    arguments that have no meaning. See docs/sdpa.md.
    """
    out: Tensor
    values: dict[str, Any] = {}
    rate, text = dropout_p, CAUSAL if flag(is_causal, "is_causal") else None
    if isinstance(attn_mask, CausalBias):
        text = CAUSAL
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            text, values = "q + shift >= k", {"shift": attn_mask.seq_len_kv - attn_mask.seq_len_q}
        attn_mask = None
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ParameterError(f"{name} is {type(x).__name__}; frisket.sdpa takes tensors of torch")
    if query.is_nested or key.is_nested or value.is_nested:
        if attn_mask is not None:
            words = "attn_mask is given, and q, k and v are nested tensors, which see their own sequence alone\n  "
            words += "leave it out, give is_causal=True, or write the mask as a text: frisket.attention(q, k, v, text)"
            raise ParameterError(words)
        return attend(query, key, value, text, None, scale, enable_gqa, dropout=rate, **values)  # type: ignore[no-any-return]
    q, k, v, lead = _four_axes(query, key, value, enable_gqa)
    if rate == 1:  # torch drops every weight, and frisket divides by the share that stays
        v, rate = v * 0.0, 0.0
    gqa = True if enable_gqa or k.shape[1] == 1 else False  # noqa: SIM210, a graph guards it
    if attn_mask is not None:
        mask = _four_axes_of_mask(attn_mask, (*lead, q.shape[1], q.shape[2], k.shape[2]))
    if attn_mask is None or 0 in (*q.shape, *k.shape):
        out = attend(q, k, v, text, None, scale, gqa, dropout=rate, **values)
    else:
        out = _masked((q, k, v), attn_mask, mask, text, rate, scale, gqa)
    if len(lead) == 1:
        return out
    # an axis of heads was added to arrays of 2 axes
    out = out.reshape(*lead, *out.shape[1:])
    return out if max(query.ndim, key.ndim, value.ndim) > 2 else out[0]


def _four_axes(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q, k and v [batch, heads, length, dim], and the axes that `batch` stands for."""
    # the usual call: no view is made
    alike = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and k.shape[:2] == v.shape[:2]
    if alike and (gqa or q.shape[1] == k.shape[1]):
        return q, k, v, (q.shape[0],)
    if min(q.ndim, k.ndim, v.ndim) < 2:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in zip(("query", "key", "value"), (q, k, v)))
        raise ShapeError(f"{shapes}: each has two axes or more, the last ones [length, head_dim]")
    most = max(q.ndim, k.ndim, v.ndim, 3)
    q, k, v = (x[(None,) * (most - x.ndim)] for x in (q, k, v))
    heads = [x.shape[-3] for x in (q, k, v)]
    if gqa and heads[1] != heads[2]:  # torch repeats keys and values each by themselves
        k, v = (x.repeat_interleave(heads[0] // x.shape[-3], -3) for x in (k, v))
    elif not gqa and len({*heads}) > 1:
        q = q.expand(*q.shape[:-3], max(heads), -1, -1) if heads[0] == 1 else q
        if not heads[1] == heads[2] == 1:  # such keys and values are read by all heads, which copies nothing
            k, v = (x.expand(*x.shape[:-3], max(heads), -1, -1) if x.shape[-3] == 1 else x for x in (k, v))
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])  # type: ignore[no-untyped-call]
    q, k, v = (x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:]) for x in (q, k, v))
    return q, k, v, tuple(lead)


def _four_axes_of_mask(mask: Tensor, whole: tuple[int, ...]) -> Tensor:
    """The mask as [batch or 1, heads or 1, q_len or 1, kv_len or 1]; `whole` is the shape it broadcasts to."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        text = f"attn_mask is {mask.dtype}; it is Bools, True where a key is visible, or Floats that are added to "
        raise ParameterError(f"{text}scores\n  attn_mask.bool() makes Bools of 0 and 1")
    if not 2 <= mask.ndim <= len(whole) or any(n not in (1, m) for n, m in zip(mask.shape[::-1], whole[::-1])):
        text = f"attn_mask has the shape {list(mask.shape)}; it broadcasts to [..., heads, q_len, kv_len] = "
        raise ShapeError(f"{text}{list(whole)}: give each axis its length there, or 1")
    mask = mask[(None,) * (len(whole) - mask.ndim)]
    if not learns(mask):  # the gradient of a leaf belongs to every entry
        # a step of 0: one entry stands for the axis
        for axis, step in enumerate(mask.stride()):
            mask = mask.narrow(axis, 0, 1) if step == 0 and mask.shape[axis] > 1 else mask
    if len(whole) != 4:
        lead = whole[:-3] if any(n > 1 for n in mask.shape[:-3]) else mask.shape[:-3]
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(math.prod(lead), *mask.shape[-3:])
    return mask


# -- what is known of a mask ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MaskFacts:
    """The texts of a mask and of what is added to scores, the tables they read, and attentions with their plans."""

    mask: str | None
    score: str | None
    tables: Mapping[str, Any]
    plans: dict[Any, Any] = field(default_factory=dict)


# (shape, dtype) -> the latest masks: (entries, facts)
_latest = Memo("integrations.sdpa.masks", 256, weigh=lambda key, known, _: 2 * sum(bits.nbytes for bits, _ in known))


def _masked(
    qkv: tuple[Tensor, ...], owner: Tensor, mask: Tensor, causal: str | None, rate: float, scale: Any, gqa: bool
) -> Tensor:
    """Attention under a mask of four axes, which is a view of the user's tensor, `owner`."""
    q, k, v = qkv
    graph = in_graph(q, k, v, mask)
    if graph or isinstance(scale, Tensor) or (mask.requires_grad and torch.is_grad_enabled()) or has_tangent(mask):
        text: str | None
        bias, score = None, None
        if mask.is_floating_point():
            score = f"score + attn_mask[{_index(mask)}]"
            mask, bias = parted(mask, graph)
        text, tables = f"seen[{_index(mask)}]", {"seen": mask}
        if not graph:
            facts = _facts_of(owner, mask)
            text, tables = facts.mask, dict(facts.tables)
        if bias is not None:
            tables["attn_mask"] = bias
        return attend(q, k, v, _both(text, causal), score, scale, gqa, dropout=rate, **tables)  # type: ignore[no-any-return]
    facts = _facts_of(owner, mask.detach())
    how = (*q.shape[:3], k.shape[2], causal, rate, scale, gqa)
    if how not in facts.plans:
        options, values = Options(None, gqa, dropout=rate_of(rate)), dict(facts.tables)
        att, values = scaled_attention(_both(facts.mask, causal), facts.score, options, scale, values)
        plan = att.plan(q.shape[2], k.shape[2], q.shape[0], q.shape[1], **values)
        remember(facts.plans, how, (att, plan), LATEST)
    att, plan = facts.plans[how]
    return att(q, k, v, plan=plan)  # type: ignore[no-any-return]


def _both(*texts: str | None) -> str | None:
    return " & ".join([f"({text})" for text in texts if text]) or None


def _index(mask: Tensor) -> str:
    return ", ".join([name if n > 1 else "0" for name, n in zip("bhqk", mask.shape)])


def parted(bias: Tensor, graph: bool = False) -> tuple[Tensor, Tensor]:
    """Bools, where Floats that are added to scores leave a weight, and the Floats.

    -inf leaves no weight; nor does half of the dtype's least number, where the query has a key with more. Such numbers
    in a whole row are raised to half of it: kernels take 1.44 times a score, which would be -inf. NaN counts as
    visible: it reaches the result, as in torch.
    """
    low = torch.finfo(bias.dtype).min / 2
    top = bias.detach().amax(-1, keepdim=True)
    far = (top <= low) & (top > -torch.inf)
    if graph or bool(far.any()):
        bias = bias - (top - low).masked_fill(~far, 0.0)
    return ~(bias.detach() <= torch.full_like(top, -torch.inf).masked_fill(top > low, low)), bias


def by_version(owner: Tensor, mask: Tensor) -> MaskFacts:
    """The facts of a mask on a device, until its tensor dies or torch counts a write to it."""
    known: dict[Any, MaskFacts] = cached_on(owner, ("sdpa", mask.dtype, tuple(mask.shape)), dict)
    if (version := version_of(owner)) not in known:
        known.clear()
        known[version] = _read(mask)
    return known[version]


def _facts_of(owner: Tensor, mask: Tensor) -> MaskFacts:
    """The facts of a mask; those of an earlier one where all entries are equal."""
    if not (mask.is_cpu and mask.layout is torch.strided):
        return by_version(owner, mask)
    flat = mask.resolve_neg().reshape(-1)
    # words of 8 bytes, where the address allows it, are fewer to compare
    words = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    bits, key = flat.view(torch.int64 if words else torch.uint8), (mask.shape, mask.dtype)
    latest = _latest.get(key) or ()
    for entries, facts in latest:
        if entries.dtype == bits.dtype and torch.equal(entries, bits):
            return facts  # type: ignore[no-any-return]
    snapshot = bits.clone()
    facts = _read(snapshot.view(mask.dtype).reshape(mask.shape), host=True)  # which no later write reaches
    _latest.put(key, ((snapshot, facts), *latest)[: max(1, min(LATEST, COPIED // (bits.nbytes + 1)))])
    return facts


def _read(mask: Tensor, host: bool = False) -> MaskFacts:
    """The facts of a mask; those of the `host` are read from its entries, and tables are arrays of numpy."""
    seen, bias = parted(mask) if mask.is_floating_point() else (mask, None)
    ranges = row_ranges(seen) if host and seen.numel() >= LOOKED_AT else None
    text, tables = ranges or (f"seen[{_index(mask)}]", {"seen": seen})
    score = None
    # Floats of hidden pairs are not 0. If all others are 0, the Floats say no more than the Bools
    if bias is not None and int(bias.count_nonzero()) != seen.numel() - int(seen.count_nonzero()):
        score = f"score + attn_mask[{_index(mask)}]"
        tables = {**tables, "attn_mask": bias if bias.dtype == torch.float64 or not host else bias.float()}
    if host:  # a plan of tensors would keep their gradients
        tables = {n: np.asarray(x) for n, x in tables.items()}
    return MaskFacts(text, score, tables)


def row_ranges(seen: Tensor) -> tuple[str | None, dict[str, Any]] | None:
    """The text and the tables of Bools whose rows each have one range of visible keys; None where a row has several.

    The four axes are those of a mask, or 1 long. Where everything is visible, the text is None.
    """
    keys, rows = seen.shape[3], seen.numpy()
    if keys < 2 or not rows.size:  # one entry may stand for any number of keys
        return (None, {}) if rows.all() else None
    for part in (rows[:, :, :: -(-rows.shape[2] // PROBED)], rows):
        count, first = part.sum(-1, dtype=np.int32), part.argmax(-1)
        last = keys - part[..., ::-1].argmax(-1)
        if not ((last - first == count) | (count == 0)).all():
            return None
    empty = count == 0
    first, last = np.where(empty, keys, first).astype(np.int32), np.where(empty, 0, last).astype(np.int32)
    for axis in (0, 1):
        if all((x == x.take([0], axis)).all() for x in (first, last)):
            first, last, empty = (x.take([0], axis) for x in (first, last, empty))
    index = ", ".join([name if n > 1 else "0" for name, n in zip("bhq", first.shape)])
    below = not ((first == 0) | empty).all()
    texts, tables = ([f"k >= first[{index}]"], {"first": first}) if below else ([], {})
    free = empty if below else np.zeros_like(empty)  # rows that the lower end hides already
    if ((last == keys) | free).all():
        pass
    elif first.shape[2] > 1 and ((last == np.minimum(np.arange(1, first.shape[2] + 1), keys)) | free).all():
        texts.append(CAUSAL)
    else:
        texts, tables = [*texts, f"k < last[{index}]"], {**tables, "last": last}
    return " & ".join(texts) or None, tables


# -- in models --------------------------------------------------------------------------------------------------------


@contextmanager
def sdpa_for(*models: torch.nn.Module) -> Iterator[list[str]]:
    """Inside the block, models call `frisket.sdpa` where they call torch's function. It gives the names that changed.

    >>> import frisket, torch
    >>> layer = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    >>> x = torch.randn(1, 64, 32)
    >>> with frisket.sdpa_for(layer) as places:
    ...     layer(x, x, x, need_weights=False)[0].sum().backward()
    >>> places
    ['torch.nn.functional.scaled_dot_product_attention']

    `torch.nn.functional.scaled_dot_product_attention` is replaced, for all threads, and so are the names under which
    the modules and classes of `models`, and the models themselves, hold torch's function since they were imported. All
    are put back where the block ends. Run the backward of checkpointed models inside the block: it calls attention
    again.
    """
    owners: dict[int, Any] = {id(functional): functional}
    for module in (part for model in models for part in model.modules()):
        for owner in (module, *type(module).__mro__, *(sys.modules.get(c.__module__) for c in type(module).__mro__)):
            owners[id(owner)] = owner
    before = getattr(functional, NAME)
    changed = []
    for owner in owners.values():
        for name, x in list(getattr(owner, "__dict__", {}).items()):
            plain = x.__func__ if isinstance(x, staticmethod) else x
            if plain is before or plain is BUILTIN:
                changed.append((owner, name, x))
    try:
        for owner, name, _ in changed:
            setattr(owner, name, staticmethod(sdpa) if isinstance(owner, type) else sdpa)
        yield [f"{getattr(owner, '__name__', type(owner).__name__)}.{name}" for owner, name, _ in changed]
    finally:
        for owner, name, x in changed:
            setattr(owner, name, x)
