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
from typing import Any

import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.attention.entry import attention_for
from frisket.runtime.caches import positions
from frisket.runtime.calls.options import Options
from frisket.runtime.masks.mask import mask as as_mask
from frisket.runtime.masks.mask import score as as_score

SLOPES = "alibi_slopes"
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
        """The batch of requests whose new tokens begin at `starts` int [requests + 1], the first `steps` of them with
        one, of `lengths` int [requests] tokens with those, in `blocks` int32 [requests, blocks] of `page` tokens."""
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
    """Attention of one layer: causal, and under a sliding `window` of so many tokens, or under `mask`. To scores a soft
    cap is applied, then ALiBi's `slopes` of heads, then `score`. `params` are values of names in the texts; lists are
    tables, brought to the device once; with `spare` there may be some that this layer does not read.

    `ParameterError` for a mask that no serving engine can run: one that is not causal, reads the batch or its lengths,
    or looks behind a sliding window, whose blocks are given to others."""

    mask: str | None = None
    score: str | None = None
    params: Mapping[str, Any] | None = None
    scale: float | None = field(default=None, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    slopes: Sequence[float] | None = field(default=None, kw_only=True)
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
        names = {*as_mask(text).unbound, *(as_score(mod).unbound if mod else ())}
        if missing := sorted(names - bindings.keys()):
            message = f"`{missing[0]}` of frisket_mask or frisket_score has no value; give "
            raise ParameterError(f'{message}frisket_params = {{"{missing[0]}": ...}}')
        values = {n: torch.tensor(x) if isinstance(x, list | tuple) else x for n, x in bindings.items()}
        self.values = {n: x for n, x in values.items() if n in names or not self.spare}
        self.attention = attention_for(text, mod, Options(self.scale), self.values)
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
            out = self._part(positions.APPENDED, q[:n, :, None], pool, batch, batch.decode, sinks)
            parts.append(out[:, :, 0])
        if batch.rest is not None:
            row = q[n : batch.tokens].transpose(0, 1)[None]
            out = self._part(positions.REQUESTS, row, pool, batch, batch.rest, sinks)
            parts.append(out[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(
        self, places: positions.PositionMap, q: Tensor, pool: Tensor, batch: PagedBatch, part: Part, sinks: Any
    ) -> Tensor:
        pages, tables = part
        paged_att, (n, heads, q_len, _) = positions.placed(self.attention, places), q.shape
        k, v = pool[..., : q.shape[-1]], pool[..., q.shape[-1] :]
        key = paged_att, heads, *((name, id(x)) for name, x in self.values.items())
        if key not in batch.plans:  # once for the layers that are alike
            read = {name: x for name, x in tables.items() if name in paged_att.program.names}
            values: dict[str, Any] = read | self.values
            batch.plans[key] = paged_att.plan(q_len, pages.shape[1] * k.shape[2], n, heads, **values)
        return paged_att(q, k, v, plan=batch.plans[key], pages=pages, sinks=sinks)


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
