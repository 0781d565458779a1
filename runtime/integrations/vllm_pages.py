"""Attention of a step of vLLM: requests of any lengths over keys and values in pages, planned once for all layers.

vLLM packs the new tokens of all requests in one row, those that decode first. Keys and values lie in blocks of a pool,
found by a block table. Requests that decode are a batch of one query each, every one over its own blocks. The others,
prompts and chunks of prompts, are one row of queries over one row of blocks.

>>> import torch
>>> pool = torch.zeros(6, 2, 16, 2 * 8)  # blocks, key heads, tokens of a block, keys then values
>>> starts, lengths = torch.tensor([0, 1, 21]), torch.tensor([40, 20])  # a step behind 39 tokens, a prompt of 20
>>> blocks, slots = torch.tensor([[3, 0, 4], [5, 1, 0]]), torch.arange(21) + 16
>>> batch = PagedBatch.of(1, starts, lengths, blocks, slots, tokens=21)
>>> q, k, v = (torch.randn(21, heads, 8) for heads in (4, 2, 2))
>>> write(pool, k, v, batch.slots)
>>> ServedLayer(window=32, softcap=50.0).attend(q, pool, batch).shape
torch.Size([21, 4, 8])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import uses
from frisket.runtime.attention.entry import attention_for
from frisket.runtime.caches import positions
from frisket.runtime.calls.options import Options
from frisket.runtime.masks.mask import Mask
from frisket.runtime.masks.mask import mask as as_mask
from frisket.runtime.masks.mask import score as as_score
from frisket.runtime.masks.mask import weight as as_weight
from frisket.runtime.select.papers import quest

SLOPES = "alibi_slopes"
KEEP, ALWAYS = "keep", "always"  # of a selection
Part = tuple[Tensor, dict[str, Tensor]]  # pages and tables of some requests


@dataclass(eq=False)
class PagedBatch:
    """The requests of one step, and what the layers share: tables of positions and plans.

    `steps` requests in front have one new token each. `decode` are their tables, `rest` those of the other requests'
    tokens, each with the blocks that its call reads. Nothing of it is looked at on the host."""

    tokens: int
    steps: int
    slots: Tensor  # int64 [tokens]: where new keys are written, negative for padding
    decode: Part | None
    rest: Part | None
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, steps: int, starts: Tensor, lengths: Tensor, blocks: Tensor, slots: Tensor, tokens: int, page: int = 16
    ) -> PagedBatch:
        """The batch of requests whose new tokens begin at `starts` int [requests + 1]; the first `steps` of them have
        one. They have `lengths` int [requests] tokens with the new ones, in `blocks` int32 [requests, blocks] of `page`
        tokens."""
        lengths, blocks = lengths.to(torch.int32), blocks.to(torch.int32)
        decode = rest = None
        if steps:
            # the query of a step is the last token
            decode = blocks[:steps], {positions.START: lengths[:steps] - 1, positions.END: lengths[:steps]}
        if tokens > steps:
            rest = _row(starts[steps:], lengths[steps:], blocks[steps:], steps, tokens, page)
        return cls(tokens, steps, slots[:tokens], decode, rest)


def steps_in_front(starts: Tensor) -> int:
    """How many requests in front have one new token, of starts int [requests + 1] on the host.

    >>> steps_in_front(torch.tensor([0, 1, 2, 9, 10]))
    2
    """
    # cumprod: only up to the first request with more tokens
    return int((starts.diff() == 1).to(torch.int8).cumprod(0).sum())


def _row(starts: Tensor, lengths: Tensor, blocks: Tensor, first: int, tokens: int, page: int) -> Part:
    """The used blocks of all requests, one request behind another, int32 [1, requests * width], and the tables of the
    batch's tokens from `first` up to `tokens`, exclusive. Places behind the last used block are read by no token."""
    n, width = blocks.shape
    if n * width * page >= positions.LONGEST:
        text = f"{n} requests of up to {width * page} tokens read at once are {n * width * page} places, of at most "
        raise ShapeError(f"{text}{positions.LONGEST - 1}\n  lower vLLM's max_num_seqs or max_model_len")
    used = (lengths + (page - 1)) // page  # a block that is used in part counts
    ends = used.cumsum(0, dtype=torch.int32)
    begins = ends - used
    place = torch.arange(n * width, dtype=torch.int32, device=blocks.device)
    # behind the last used block any request does: no token reads there
    owner = torch.searchsorted(ends, place, right=True).clamp_max(n - 1)
    row = blocks[owner, (place - begins[owner]).clamp_max(width - 1)]
    token = torch.arange(first, tokens, dtype=torch.int32, device=blocks.device)
    # searchsorted warns of boundaries that are not contiguous
    request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_max(n - 1)
    low, length = begins[request] * page, lengths[request]
    at = length - (starts[request + 1] - token)
    bounds = {positions.LOW: low, positions.HIGH: low + length, positions.SHIFT: low, positions.AT: at}
    return row[None], {name: x.to(torch.int32) for name, x in bounds.items()}


@dataclass(eq=False, repr=False)
class ServedLayer:
    """Attention of one layer: causal, and under a sliding `window` of so many tokens, or under `mask`.

    To scores a soft cap is applied, then ALiBi's `slopes` of heads, then `score`. `weight` and `divide` replace the
    softmax. `params` are values of names in the texts; lists are tables, brought to the device once; with `spare` there
    may be some that this layer does not read.

    `select` is {"keep": n} or {"keep": n, "always": mask}. In a step of one token the query heads of a key head read n
    blocks of the request, chosen by `frisket.select.quest` from the bounds of blocks that `add_bounds` stores.

    `ParameterError` for a mask that no serving engine can run. Such a mask is not causal, reads the batch or its
    lengths, or looks behind a sliding window, whose blocks are given to others."""

    mask: str | None = None
    score: str | None = None
    weight: str | None = None
    divide: str | None = None
    params: Mapping[str, Any] | None = None
    scale: float | None = field(default=None, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    slopes: Sequence[float] | None = field(default=None, kw_only=True)
    select: Mapping[str, Any] | None = field(default=None, kw_only=True)
    bounds: Tensor | None = field(default=None, init=False)  # [2, blocks + 1, kv_heads, head_dim]; the last is no block
    spare: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        mask, score, window, slopes, softcap = self.mask, self.score, self.window, self.slopes, self.softcap
        steps = [f"softcap({float(softcap)!r})"] if softcap else []  # 0 is none, too, in vLLM
        if slopes is not None:
            steps.append(f"score + {SLOPES}[h] * (k - q)")
        if score is not None:
            steps.append(f"({score})")
        default_mask = "q >= k" if window is None else f"q >= k & q - k < {window}"
        bindings = {**(self.params or {}), **({} if slopes is None else {SLOPES: slopes})}
        text, mod = default_mask if mask is None else mask, " then ".join(steps) or None
        if self.weight is None and self.divide is not None:
            raise ParameterError("frisket_divide is set without frisket_weight, such as 'exp(score)'")
        weights = {} if self.weight is None else as_weight(self.weight, self.divide).by_name
        read = [as_mask(text), *([as_score(mod)] if mod else []), *weights.values()]
        names = {n for part in read for n in part.unbound}
        if missing := sorted(names - bindings.keys()):
            message = f"`{missing[0]}` of the frisket_ fields has no value; give "
            raise ParameterError(f'{message}frisket_params = {{"{missing[0]}": ...}}')
        values = {n: torch.tensor(x) if isinstance(x, list | tuple) else x for n, x in bindings.items()}
        self.values = {n: x for n, x in values.items() if n in names or not self.spare}
        self.attention = attention_for(text, mod, Options(self.scale), self.values, self.weight, self.divide)
        self.keep, always = _selection(self.select)
        self.always = None if always is None else always.at(q=positions.APPENDED.q)
        if self.keep and self.weight is not None:
            text = "frisket_select chooses blocks by their share of a softmax, which frisket_weight replaces"
            raise ParameterError(f"{text}\n  leave one of them out")
        if why := positions.not_served(self.attention, self.values):
            raise ParameterError(why)
        if mask is None or window is None:
            return
        if why := positions.no_room(self.attention, window, 1, self.values):
            message = f"the mask looks behind the sliding window of this layer: {why.splitlines()[0]}\n  add "
            raise ParameterError(f"{message}`& window({window})`")

    def attend(self, q: Tensor, pool: Tensor, batch: PagedBatch, sinks: Tensor | None = None) -> Tensor:
        """Attention of the new tokens q [tokens, heads, head_dim] to the keys of their requests in the pool [blocks,
        kv_heads, page, head_dim + v_head_dim], keys then values, of any strides. Out is [tokens, heads, v_head_dim]."""
        for name, x in self.values.items():
            if isinstance(x, Tensor) and x.device != q.device:
                self.values[name] = x.to(q.device)
        n, parts = batch.steps, []
        if batch.decode is not None:
            parts.append(self._step(q[:n], pool, batch, sinks))
        if batch.rest is not None:
            row = q[n : batch.tokens].transpose(0, 1)[None]
            out = self._part(positions.REQUESTS, row, pool, batch, batch.rest, sinks=sinks)
            parts.append(out[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _step(self, q: Tensor, pool: Tensor, batch: PagedBatch, sinks: Tensor | None) -> Any:
        """Attention [requests, heads, v_head_dim] of one query [requests, heads, head_dim] of each request, to chosen
        blocks where the layer selects."""
        assert batch.decode is not None
        (blocks, tables), (n, heads, dim), (kv_heads, page) = batch.decode, q.shape, pool.shape[1:3]
        if not self.keep or blocks.shape[1] <= self.keep:  # all blocks are chosen
            return self._part(positions.APPENDED, q[:, :, None], pool, batch, batch.decode, sinks=sinks)[:, :, 0]
        mask = positions.placed(self.attention, positions.APPENDED).mask
        assert mask is not None  # places are masked
        assert self.bounds is not None  # `add_bounds` comes first
        # index_select of a vector copies whole rows, and an index of two axes entries
        rows = blocks.flatten()
        low, high = (x.index_select(0, rows).unflatten(0, blocks.shape).transpose(1, 2) for x in self.bounds)
        choice = {"keep": self.keep, "mask": mask, "always": self.always, "kv_len": blocks.shape[1] * page}
        choice |= {name: x for name, x in (tables | self.values).items() if name in mask.unbound}
        group = heads // kv_heads
        chosen = quest(q[:, :, None], low, high, page, scale=self.scale, axes="bhsd", **choice)[:, ::group, 0]
        # where the mask shows fewer than `keep`, others follow, which it hides
        block = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., : self.keep]
        heads_pool, entries = _by_head(pool, blocks)
        pages = entries.gather(2, block).flatten(0, 1)
        tables = {name: x.repeat_interleave(kv_heads) for name, x in tables.items()}
        tables[positions.BLOCK] = block.to(torch.int32).flatten(0, 1)
        places, part = positions.of_blocks(page, kv_heads, group), (pages, tables)
        grouped = q.reshape(n * kv_heads, group, 1, dim)
        if sinks is None:
            return self._part(places, grouped, heads_pool, batch, part).reshape(n, heads, -1)
        # sinks are those of all heads, and a row of this call has a few
        out, lse = self._part(places, grouped, heads_pool, batch, part, return_lse=True)
        share = torch.sigmoid(lse.reshape(n, heads) - sinks)
        return out.reshape(n, heads, -1) * share[..., None].to(out.dtype)

    def _part(
        self, places: positions.PositionMap, q: Tensor, pool: Tensor, batch: PagedBatch, part: Part, **how: Any
    ) -> Any:
        pages, tables = part
        paged_att, (n, heads, q_len, _) = positions.placed(self.attention, places), q.shape
        k, v = pool[..., : q.shape[-1]], pool[..., q.shape[-1] :]
        key = paged_att, heads, *((name, id(x)) for name, x in self.values.items())
        plan = None if positions.BLOCK in tables else batch.plans.get(key)  # each layer chooses other blocks
        if plan is None:  # once for the layers that are alike
            read = {name: x for name, x in tables.items() if name in paged_att.program.names}
            values: dict[str, Any] = read | self.values
            batch.plans[key] = plan = paged_att.plan(q_len, pages.shape[1] * k.shape[2], n, heads, **values)
        return paged_att(q, k, v, plan=plan, pages=pages, **how)

    def add_bounds(self, pool: Tensor, k: Tensor, slots: Tensor) -> None:
        """Widen the bounds of blocks by new keys [tokens, kv_heads, head_dim] in `slots`, as of `write`. A block whose
        first slot is written begins again: what it held belongs to no request any more."""
        if not self.keep:
            return
        blocks, page, k = pool.shape[0], pool.shape[2], k[: len(slots)].to(pool.dtype)
        if self.bounds is None or self.bounds.shape[1] != blocks + 1:
            self.bounds = k.new_zeros(2, blocks + 1, *k.shape[1:])
        block = torch.where(slots >= 0, slots // page, blocks)  # padding: behind the blocks
        first = torch.where(slots % page == 0, block, blocks)
        at = block[:, None, None].expand_as(k)
        for bounds, start, least in zip(self.bounds, (torch.inf, -torch.inf), ("amin", "amax"), strict=True):
            bounds.index_fill_(0, first, start).scatter_reduce_(0, at, k, least)


def _by_head(pool: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The pool with one head in a block, a view, and the blocks of each head in it: int32 [requests, kv_heads, blocks]
    of int32 [requests, blocks]."""
    (many, kv_heads, *sizes), (outer, inner, *strides) = pool.shape, pool.stride()
    unit = gcd(outer, inner)
    entries = ((many - 1) * outer + (kv_heads - 1) * inner) // unit + 1
    if entries >= 1 << 31:
        raise ShapeError(f"a pool of {many} blocks, {outer} entries apart, and heads, {inner} apart, is beyond int32")
    heads = torch.arange(kv_heads, dtype=torch.int32, device=blocks.device)[:, None]
    view = pool.as_strided((entries, 1, *sizes), (unit, unit, *strides))
    return view, blocks[:, None] * (outer // unit) + heads * (inner // unit)


def _selection(select: Any) -> tuple[int, Mask | None]:
    """How many blocks a selection keeps, 0 for all, and the mask of those that it always keeps."""
    if select is None:
        return 0, None
    if not isinstance(select, Mapping) or KEEP not in select or select.keys() - {KEEP, ALWAYS}:
        text = f'it is {{"{KEEP}": 8}}, or {{"{KEEP}": 8, "{ALWAYS}": "sinks(4) | window(64)"}}'
        raise ParameterError(f"frisket_select is {select!r}; {text}")
    keep, always = select[KEEP], select.get(ALWAYS)
    if type(keep) is not int or keep < 1:
        raise ParameterError(f"{KEEP} of frisket_select is {keep!r}; it is a number of blocks, 1 or more")
    if always is None:
        return keep, None
    mask = as_mask(always)
    if mask.unbound:
        raise ParameterError(f"`{mask.unbound[0]}` in {ALWAYS} of frisket_select has no value: write a number")
    if "h" in uses(mask.expr):
        raise ParameterError(f"{ALWAYS} of frisket_select reads h; heads that share a key head read the same blocks")
    if why := positions.not_served(attention_for(mask & "q >= k", None, Options(), {}), {}):
        raise ParameterError(f"{ALWAYS} of frisket_select: {why}")
    return keep, mask


def require_room(select: Any, page: int, longest: int) -> None:
    """Raise `ParameterError` where a selection always keeps more blocks of `page` tokens than it keeps, at some
    position of a request of up to `longest` tokens."""
    keep, always = _selection(select)
    if always is None:
        return
    att = attention_for(always & "q >= k", None, Options(), {})
    ranges = att.plan(longest, longest).rows((1, page)).bounds
    if (most := int((ranges[..., 3] - ranges[..., 0]).sum(-1).max())) > keep:
        text = f"{KEEP} of frisket_select is {keep}, and `{always}` is up to {most} blocks of {page} tokens"
        raise ParameterError(f"{text}\n  keep {most} or more")


def write(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write new keys and values [tokens, kv_heads, head_dim] to their slots, block * page + token, of a pool [blocks,
    kv_heads, page, head_dim + v_head_dim]. Negative slots are padding: nothing is written for them."""
    page, n = pool.shape[2], len(slots)
    if not n:
        return
    real = slots >= 0
    some = torch.where(real, torch.arange(n, device=slots.device), real.to(torch.int8).argmax())  # padding: a real one
    slot = slots[some].clamp_min(0)
    block, token = slot // page, slot % page
    new = torch.cat([k[:n], v[:n]], -1)[some].to(pool.dtype)
    # without any real token the places get what they hold
    pool[block, :, token] = torch.where(real.any(), new, pool[block, :, token])
