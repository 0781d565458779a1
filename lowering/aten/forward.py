"""Runs a LoopPlan on torch's own library calls: nothing is compiled, no key or value is gathered or copied.

For each row of tiles and each run of keys one batched GEMM over heads (or over rows of equal relative spans).
The softmax is in float32, base 2; the mask is added on PARTIAL tiles only. Where the mask is a plain triangle and
there is no score mod, torch's built-in flash kernel does the block and the pieces are merged by their lse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from frisket.lowering.plan import KernelInputs

from .flash import FUSED, flash, fusible, sliding
from .steps import Block, chunks, cut, spread
from .tiles import LN2, LOG2E, AtenTiles, finite, tame

Tensor = Any
BUDGET = 1 << 20  # scores of one step: fewer, larger steps pay for their Python even out of the second-level cache
PARTS = 8  # of a row's keys, where there are fewer blocks than that: decode
LEAST = 1024  # keys of a part
TILE = 1 << 18  # numbers of stored keys that are converted together


def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> tuple[Any, ...]:
    """The forward: (out [batch, heads, q_len, v_dim], lse, top [batch, heads, q_len]) for q [batch, heads, q_len,
    head_dim] and k, v [batch, kv_heads, kv_len, dim]. Scores, lse and top are float32, float64 when q is float64.

    Sinks [heads] are logits without a value: they are part of lse, not of top. Without `top` the third result is
    None: the flash kernel, which does not tell the largest score, may then be used. With `softmax_stats` a fourth is
    the rounding error of lse, [batch, heads, q_len]."""
    import torch

    plan, sinks = inputs.plan, inputs.sinks
    with torch.no_grad():
        done = _Forward(inputs, (q, k, v), careful=not tame(plan.score))
        results = done.everything(sinks, top, softmax_stats)
        fused = softmax_stats and sinks is None and not top
        if fused and bool((done.lse.abs() > FUSED).logical_and(done.lse.isfinite()).any()):
            results = done.everything(None, True, True)  # the flash kernel does not say the rounding error
        # A NaN may come from a masked position. It is inf or NaN in K, where masks have to overwrite, not to be added,
        # or in V, as in a cache that is used again. A sum has it too, in a twentieth of the time of a look at every
        # element; infinities of both signs are no more than work done twice.
        if not (done.careful and done.clean) and plan.mask is not None and bool(results[0].sum().isnan()):
            done = _Forward(inputs, (q, k, v), careful=True)
            done.clean = True
            results = done.everything(sinks, top, softmax_stats)
    return results


class _Forward(AtenTiles):
    """The forward of one call."""

    unit = LOG2E

    def everything(self, sinks: Tensor | None, top: bool, softmax_stats: bool) -> tuple[Any, ...]:
        g, torch = self.geometry, self.torch
        shape = (g.batch, g.kv_heads, self.group, g.q_len)
        new = {"dtype": self.dtype, "device": self.q.device}
        self.out = torch.empty((*shape, g.v_dim), **new)
        self.lse = torch.empty(shape, **new)
        self.top = torch.empty(shape, **new) if top else None
        self.sinks = None if sinks is None else self.grouped(sinks.to(self.dtype).view(1, -1, 1)).expand(shape)
        # lse; where it is -inf, anything
        self.exact = torch.zeros(shape, dtype=torch.float64) if softmax_stats else None
        blocks = self._split(list(self._blocks()))
        blocks.sort(key=lambda x: x[0].cells)  # the largest go first: the last ones to end are short
        self.values = self.given_v if self.half or self.stored else self.v
        if self.values.stride(-1) != 1:
            self.values = self.values.contiguous()
        self.parts: dict[tuple[Block, int], tuple[Tensor, Tensor, Tensor]] = {}
        spread(self._attend, blocks)
        self._merge()
        largest = None if self.top is None else self.top.flatten(1, 2)
        results = self.out.flatten(1, 2).to(self.input_dtype), self.lse.flatten(1, 2), largest
        if self.exact is None:
            return results
        lse_residual = (self.exact - self.lse).to(self.dtype)
        return (*results, lse_residual.masked_fill_(~lse_residual.isfinite(), 0.0).flatten(1, 2))

    def _blocks(self) -> Iterator[Block]:
        rows = []
        for todo, members in self.steps():
            quick, rest = fusible(self, todo) if self.top is None else ([], todo)
            for part in quick:
                for place, out, lse in flash(self, part, members):
                    self._put_fused(place, out, lse)
            windows = sliding(self, rest, members) if self.top is None and rest else None
            if windows is not None:
                for place, out, lse in windows:
                    self._put_fused(place, out, lse)
                continue
            rows += [(step, member) for step in rest for member in members]
        cells = sum(s.width * s.height * s.count * m.count * (m.last - m.first) for s, m in rows)
        budget = min(BUDGET, max(BUDGET >> 3, cells // 16))  # enough blocks for every thread
        for step, member in rows:
            for block in cut(step, member, budget):
                if step.pieces:
                    yield block
                else:
                    self._put_nothing(block)

    def _split(self, blocks: list[Block]) -> list[tuple[Block, Block | None, int]]:
        """The blocks as (block, the whole block, which part); few blocks with many keys are split over keys."""
        work: list[tuple[Block, Block | None, int]] = []
        for block in blocks:
            parts = min(PARTS // len(blocks), block.step.width // LEAST)
            if parts < 2:
                work.append((block, None, 0))
                continue
            for i, pieces in enumerate(chunks(block.step.pieces, -(-block.step.width // parts))):
                work.append((replace(block, step=replace(block.step, pieces=tuple(pieces))), block, i))
        return work

    # -- one block --------------------------------------------------------------------------------------

    def _attend(self, what: tuple[Block, Block | None, int]) -> None:
        block, whole, part = what
        torch, step = self.torch, block.step
        query = self.rows(self.q, block)
        room = BUDGET // (block.batch * block.rows)
        if self.stored and not block.by_row:  # a tile of converted keys is to stay in the cache
            room = min(room, TILE // (block.batch * self.geometry.head_dim))
        todo = chunks(step.pieces, max(64, room))
        # Some row of these keys may show nothing finite: -inf - -inf is NaN.
        hollow = self._hollow or (self.mask is not None and (len(todo) > 1 or whole is not None))
        total: Any = None
        top = acc = None
        for chunk in todo:
            tiles = self.scores(block, query, chunk)
            peak = tiles[0].amax(-1, keepdim=True)
            for t in tiles[1:]:
                peak = torch.maximum(peak, t.amax(-1, keepdim=True))
            if top is not None:
                peak = torch.maximum(peak, top)
            base = finite(torch, peak) if hollow else peak
            if acc is not None:
                shrink = torch.exp2(top - base)
                total *= shrink
                acc *= shrink
            top = peak
            for t in tiles:
                t.sub_(base).exp2_()
                share = t.sum(-1, keepdim=True)
                total = share if total is None else total.add_(share)
            # A product of 16 bits is rounded: of weights that sum to 1 it is the result, which is not rounded again.
            unit = self._sum(block, top, total) if self.half and len(todo) == 1 else 1
            for t, piece in zip(tiles, chunk, strict=True):
                if self.keep_mask is not None:
                    self.cells(block, t).mul_(self.survivors(block, piece))
                hidden = t == 0 if self.careful and self.clean else None
                if self.weight is not None:
                    self.cells(block, t).mul_(self.at(self.weight, block, piece))
                value = self.keys(self.values, block, piece, self.input_dtype if self.half else self.dtype)
                if hidden is not None:
                    t.masked_fill_(hidden, 0.0)
                    # 0 times a NaN of a value that no query sees is NaN
                    value = value.masked_fill(hidden.all(1).unsqueeze(-1), 0.0)
                if self.half:
                    product = self.rough_product(self.rounded(t, "weights", unit), value).to(self.dtype).mul_(unit)
                    acc = product if acc is None else acc.add_(product)
                elif acc is None:
                    acc = self.buffer("acc", block.batch, block.rows, self.geometry.v_dim)
                    torch.bmm(t, value, out=acc)
                else:
                    acc.baddbmm_(t, value)
        assert acc is not None
        if whole is None:
            self._store(block, acc, top, total)
        else:
            self.parts[whole, part] = acc.clone(), top, total  # the thread's next block writes to the same buffer

    def _sum(self, block: Block, top: Tensor, total: Tensor) -> Tensor:
        """The divisor of weights at the end, at least 1 and at most 2^60: sums, sinks and dropout's factor."""
        if self.sinks is not None:
            sink = self.rows(self.sinks, block).unsqueeze(-1).double() * LOG2E
            share = self.torch.exp2((sink - top).clamp_(max=60)).nan_to_num_(0.0)  # both may be -inf
            total = total + share.to(self.dtype)
        return (total if self.keep_mask is None else total * self.keep).clamp(min=1.0)

    @property
    def _hollow(self) -> bool:
        """Whether a row may see no key with a finite score."""
        return self.plan.guard or self.careful

    def _merge(self) -> None:
        """Join parts of keys, in order: equal calls give equal bits, whichever thread was first."""
        torch = self.torch
        for whole in dict.fromkeys(block for block, _ in self.parts):
            parts = [self.parts[whole, i] for i in range(sum(block == whole for block, _ in self.parts))]
            top = torch.stack([t for _, t, _ in parts]).amax(0)
            base = finite(torch, top)
            factors = [torch.exp2(t - base) for _, t, _ in parts]
            acc = sum(a * f for (a, _, _), f in zip(parts, factors, strict=True))
            self._store(whole, acc, top, sum(n * f for (_, _, n), f in zip(parts, factors, strict=True)))

    # -- results ----------------------------------------------------------------------------------------

    def _store(self, block: Block, acc: Tensor, top: Tensor, total: Tensor) -> None:
        torch, base = self.torch, top
        if self.sinks is not None:
            # In float32 a large one would be off by percents of its weight, once it is in the unit of scores.
            sink = self.rows(self.sinks, block).unsqueeze(-1).double() * LOG2E
            above = (sink - top).masked_fill_((sink == -math.inf) & (top == -math.inf), -math.inf).to(self.dtype)
            shrink = torch.exp2((-above).clamp_(max=0))
            acc = acc.mul_(shrink)
            total = total * shrink + torch.exp2(above.clamp(max=0))
            base = torch.where(above > 0, sink, top)
        if self.exact is not None:
            self.put(self.exact, block, total.double().log2().add_(base).mul_(LN2).squeeze(-1))
        safe = torch.where(total == 0, 1.0, total) if self._hollow else total
        acc = acc.div_(safe if self.keep_mask is None else safe * self.keep)
        self.put(self.out, block, acc)
        self.put(self.lse, block, total.log2().add_(base.to(self.dtype)).mul_(LN2).squeeze(-1))
        if self.top is not None:
            self.put(self.top, block, top.mul(LN2).squeeze(-1))

    def _put_nothing(self, block: Block) -> None:
        place = block.place
        self.out[place] = 0
        self.lse[place] = -math.inf if self.sinks is None else self.sinks[place]
        if self.exact is not None:
            self.exact[place] = self.lse[place]
        if self.top is not None:
            self.top[place] = -math.inf

    def _put_fused(self, place: Any, out: Tensor, lse: Tensor) -> None:
        torch, exact = self.torch, lse
        if self.sinks is not None:
            sink = self.sinks[place]
            above = sink - lse
            exact = torch.logaddexp(lse.double(), sink.double())
            out, lse = out * above.neg().sigmoid().unsqueeze(-1), torch.logaddexp(lse, sink)
        if self.exact is not None:
            self.exact[place] = exact.double()
        if out.numel() == self.out.numel():  # the whole call: no copy
            self.out, self.lse = out[None, :, None], lse[None, :, None]
        else:
            self.out[place], self.lse[place] = out, lse
