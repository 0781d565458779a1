"""Gradients of a LoopPlan on torch's library calls: five GEMMs per block, scores computed again.

A GEMM of another shape has other last bits, and at large scores lse rounds away the difference. So the weights of a
row are normalised by their own sum, not by lse. The blocks are those of the forward (`lowering.aten`), the formulas
those of `lowering.derive`. A lane is a range of key heads, walked by one thread in one order, so that dk, dv and
captured gradients repeat bit for bit. Where there are fewer key heads than threads, a lane is a part of the rows with
separate sums, added in order at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frisket.dsl.ir import uses
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs

from .captured import LaneGradients
from .flash import FUSED, flash_backward, fusible
from .steps import Block, Heads, KeyPiece, chunks, cut, shares, spread
from .tiles import LOG2E, AtenTiles, finite, tame

Tensor = Any
BUDGET = 1 << 19  # scores of one step: their gradients want as much room again
WHOLE = 1 << 21  # scores of a block up to which its rows are computed whole: sums of their weights are then known
LARGE = 16.0  # |lse| from which on longer rows are worth a product more for their sums
PARTS = 8  # arrays of sums at most


def backward(
    inputs: KernelInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: ForwardResults,
    cotangents: Cotangents,
    *,
    grad_names: frozenset[str],
) -> dict[str, Tensor]:
    """Gradients of sum(dout * out) + sum(dlse * lse) by name, for the names in `grad_names`. "q", "k", "v" in the shape
    and dtype of the array. Tables and slots of the plan ("t0", "s1") in float32, float64 when q is float64.

    The gradient of the sinks is the caller's (`lowering.derive`)."""
    import torch

    with torch.no_grad():
        run = _Backward(inputs, (q, k, v), careful=not tame(inputs.plan.score))
        return run.everything(results, cotangents, grad_names, inputs.sinks)


@dataclass
class _Lane:
    """Blocks that are walked in order, and the buffers of their sums."""

    blocks: list[Block]
    sums: _Sums


@dataclass
class _Sums:
    dk: Tensor | None  # [batch, kv_heads, kv_len, dim]
    dv: Tensor | None
    captured: LaneGradients


class _Backward(AtenTiles):
    """The backward of one call."""

    def everything(
        self, results: ForwardResults, cotangents: Cotangents, grad_names: frozenset[str], sinks: Tensor | None
    ) -> dict[str, Tensor]:
        torch, out, lse, share = self.torch, results.out, results.lse, results.share
        dout, dlse = cotangents.dout, cotangents.dlse
        self.grad_names = grad_names
        self.part = None if share is None else self.grouped(share.to(self.dtype))
        self.sinks = None if sinks is None else self.grouped(sinks.to(self.dtype).view(1, -1, 1).expand(lse.shape))
        self.out, self.dout = (self.grouped(self.worked(x)) for x in (out, dout))
        # Sums, not isfinite: one pass without another array; where a sum overflows, careful is only slower.
        self.careful |= not all(bool(x.sum().isfinite()) for x in (self.q, self.k, self.v, self.dout))
        self.derived = backward_of(self.plan)
        self.guard = self.careful or self.derived.guard  # 0 * inf is NaN where nothing is seen
        self.slope = None if self.derived.slope is None else self.program(self.derived.slope)
        self.captured = captured = [x for x in self.derived.gradients if x.source in grad_names]
        self.inner = bool(grad_names - {"v"})  # more than P is needed
        parts = [x.weight for x in captured] + [e for x in captured for e in x.index]
        parts += [] if self.derived.slope is None else [self.derived.slope]
        self.reads_score = any("score" in uses(e) for e in parts)
        self.lse = self.grouped(lse.to(self.dtype))
        self.delta = (self.dout * self.out).sum(-1)
        self.dlse = None if dlse is None else self.grouped(dlse.to(self.dtype)).masked_fill(self.lse == -math.inf, 0.0)
        if self.dlse is not None:
            self.delta -= self.dlse
        self.delta.masked_fill_(self.lse == -math.inf, 0.0)  # whatever came for a row that sees nothing
        if self.careful:
            self.dout = self.dout.masked_fill((self.lse == -math.inf).unsqueeze(-1), 0.0)
        self.base = finite(torch, self.lse)
        self.hollow = bool((self.lse == -math.inf).any())
        largest = float(self.base.abs().max()) if lse.numel() else 0.0
        self.large = largest > LARGE
        # Infinity in a hidden key meets a 0 in ds, and 0 * inf is NaN.
        self.plain_k = self.k if not self.half or self.given_k.stride(-1) != 1 else self.given_k
        if self.careful:
            self.plain_k = self.plain_k.nan_to_num(0.0, 0.0, 0.0)
        if self.half:
            self.plain_k = self.plain_k.to(self.input_dtype)
        self.dq = torch.zeros_like(self.q, memory_format=torch.contiguous_format) if "q" in grad_names else None
        total = self._zeros()
        fused = LARGE if out.dtype.itemsize == 2 else FUSED  # the flash kernel takes delta from the rounded out
        fusible_too = dlse is None and not self.careful and largest <= fused and bool(grad_names & {"q", "k", "v"})
        lanes = self._lanes(total, fusible_too)
        if total.captured.scattered:  # one array of the table's shape, however large: one thread after the other
            for lane in lanes:
                self._walk(lane)
        else:
            spread(self._walk, list(lanes))
        # lanes of one part share their sums; added in the order of lanes, so that equal calls give equal bits
        for sums in {id(lane.sums): lane.sums for lane in lanes if lane.sums is not total}.values():
            for mine, theirs in ((total.dk, sums.dk), (total.dv, sums.dv)):
                if mine is not None:
                    mine += theirs
            total.captured.add(sums.captured)
        arrays = {"q": None if self.dq is None else self.dq.flatten(1, 2), "k": total.dk, "v": total.dv}
        return {
            **{n: x.to(self.input_dtype) for n, x in arrays.items() if x is not None},
            **total.captured.folded(grad_names - {"q", "k", "v"}),
        }

    def _zeros(self) -> _Sums:
        return _Sums(self._like(self.k, "k"), self._like(self.v, "v"), LaneGradients(self, self.captured))

    def _like(self, x: Tensor, name: str) -> Tensor | None:
        return self.torch.zeros(x.shape, dtype=self.dtype) if name in self.grad_names else None

    # -- lanes ------------------------------------------------------------------------------------------

    def _lanes(self, total: _Sums, fusible_too: bool) -> list[_Lane]:
        rows = []
        for todo, members in self.steps():
            quick, rest = fusible(self, todo) if fusible_too else ([], todo)
            for part in quick:
                flash_backward(self, part, members, (self.dout, self.out, self.lse), (self.dq, total.dk, total.dv))
            rows += [(step, member) for step in rest if step.pieces for member in members]
        g, threads = self.geometry, self.torch.get_num_threads()
        cells = sum(s.width * s.height * s.count * m.count * (m.last - m.first) for s, m in rows)
        budget = min(BUDGET, max(BUDGET >> 3, cells // 16))
        heads = g.batch * g.kv_heads
        parts = 1 if heads >= threads else min(PARTS, -(-2 * threads // heads))
        sums = [total, *(self._zeros() for _ in range(parts - 1))]
        lanes = []
        for lane in shares(heads, -(-heads // (2 * threads))):
            inside = [(step, some) for step, member in rows for some in _within(member, lane, g.kv_heads)]
            blocks = [block for step, some in inside for block in cut(step, some, budget)]
            lanes += [_Lane(some, sums[i]) for i, some in enumerate(_even(blocks, parts))]
        return [x for x in lanes if x.blocks]  # a lane without blocks would start a thread for nothing

    def _walk(self, lane: _Lane) -> None:
        for block in lane.blocks:
            self._block(block, lane.sums)

    # -- one block --------------------------------------------------------------------------------------

    def _block(self, block: Block, sums: _Sums) -> None:
        query, dout = self.rows(self.q, block), self.rows(self.dout, block)
        plain_query = query.nan_to_num(0.0, 0.0, 0.0) if self.careful else query
        rough_query, rough_dout = self.rounded(plain_query, "rough query"), self.rounded(dout, "rough dout")
        dq = self.buffer("dq", *query.shape).zero_() if self.dq is not None else None
        whole = block.cells <= WHOLE
        for pieces, tiles, raws in self._weights(block, query, whole):
            drops = [None if self.keep_mask is None else self.survivors(block, p).div_(self.keep) for p in pieces]
            for piece, p, some in zip(pieces, tiles, drops, strict=True):
                weights = p if some is None else (self.cells(block, p) * some).view(p.shape)
                self.add_keys(sums.dv, block, piece, self.rounded(weights, "weights"), rough_dout)
            if not self.inner:
                continue
            slopes = self._slopes(block, dout, pieces, tiles, drops, whole and not self.careful and self.part is None)
            for piece, p, raw, dm in zip(pieces, tiles, raws, slopes, strict=True):
                ds = self._score_cotangents(block, piece, p, raw, dm, sums.captured)
                self.add_keys(sums.dk, block, piece, ds, rough_query, self.geometry.scale)
                if dq is not None:
                    self._add_queries(dq, block, piece, ds)
        if dq is not None:
            self.put(self.dq, block, dq)

    def _weights(self, block: Block, query: Tensor, whole: bool) -> Iterator[tuple[Any, list[Tensor], list[Any]]]:
        """Yield (pieces, weights, scores before the score mod, or None where no derivative reads them).

        With `whole`, one item has all pieces of the block."""
        pieces, room = block.step.pieces, max(64, BUDGET // (block.batch * block.rows))
        todo = [list(pieces)] if whole else [[p] for chunk in chunks(pieces, room) for p in chunk]
        base, share = self.rows(self.base, block).unsqueeze(-1), None
        if not whole and self.large:
            base, share = self._sums_of(block, (self.scores(block, query, chunk) for chunk in todo))
        for chunk in todo:
            raws: list[Tensor] | None = [] if self.reads_score else None
            tiles = self.scores(block, query, chunk, raws)
            if whole and len(tiles) == 1 and self.sinks is None and self.part is None:
                self.torch.softmax(tiles[0], -1, out=tiles[0])
                if self.hollow:  # softmax gives NaN to a row of -inf alone
                    tiles[0].masked_fill_((self.rows(self.lse, block) == -math.inf).unsqueeze(-1), 0.0)
            else:
                if whole:
                    share = self._sums_of(block, [tiles])[1]
                for t in tiles:
                    if not whole:
                        _exp(t.sub_(base))
                    if share is not None:
                        t.mul_(share)
            if self.careful:
                for piece, t in zip(chunk, tiles, strict=True):
                    self.hide(block, piece, t, 0.0)
            yield chunk, tiles, raws or [None] * len(chunk)

    def _sums_of(self, block: Block, chunks: Iterable[list[Tensor]]) -> tuple[Tensor, Tensor]:
        """The (maximum, 1 / sum of exponentials) of each row, sinks too. Scores become exp(score - maximum so far)."""
        torch = self.torch
        top = torch.full((block.batch, block.rows, 1), -math.inf, dtype=self.dtype)
        total = torch.zeros_like(top)
        for tiles in chunks:
            peak = top
            for t in tiles:
                peak = torch.maximum(peak, t.amax(-1, keepdim=True))
            base = finite(torch, peak)
            total *= torch.exp(top - base)
            for t in tiles:
                total += _exp(t.sub_(base)).sum(-1, keepdim=True)
            top = peak
        base = finite(torch, top)
        if self.sinks is not None:
            total = total + torch.exp(self.rows(self.sinks, block).unsqueeze(-1) - base)
        share = torch.where(total == 0, 0.0, 1 / total)
        return base, share if self.part is None else share * self.rows(self.part, block).unsqueeze(-1)

    def _slopes(
        self, block: Block, dout: Tensor, pieces: Sequence[KeyPiece], tiles: list[Tensor], drops: list[Any], whole: bool
    ) -> list[Tensor]:
        """The cotangents of modified scores.

        With `whole`, the mean of a row is taken from the products themselves: where a row sees one key, the mean is
        exactly that product and the cotangent 0."""
        torch, size = self.torch, sum(t.numel() for t in tiles)
        room = self.buffer("products", size).split([t.numel() for t in tiles])
        products = []
        for piece, some, x, t in zip(pieces, drops, room, tiles, strict=True):
            dm = torch.bmm(dout, self.keys(self.v, block, piece).mT, out=x.view(t.shape))
            if some is not None:
                self.cells(block, dm).mul_(some)
            products.append(dm)
        dlse = None if self.dlse is None else self.rows(self.dlse, block).unsqueeze(-1)
        if whole and len(tiles) == 1:  # one pass over the tile in place of three
            dm, p = products[0], tiles[0]
            torch.ops.aten._softmax_backward_data.out(dm, p, -1, p.dtype, grad_input=dm)
            return [dm if dlse is None else dm.addcmul_(p, dlse)]
        delta = self.rows(self.delta, block).unsqueeze(-1)
        if whole:
            delta = sum((dm * p).sum(-1, keepdim=True) for dm, p in zip(products, tiles, strict=True))
            delta = delta if dlse is None else delta - dlse
        return [dm.sub_(delta).mul_(p) for dm, p in zip(products, tiles, strict=True)]

    def _score_cotangents(
        self, block: Block, piece: KeyPiece, p: Tensor, raw: Tensor | None, dm: Tensor, captured: LaneGradients
    ) -> Tensor:
        """The cotangents of a piece's scaled products, from `dm`, those of modified scores; adds to captured ones."""
        hidden = p == 0 if self.guard else None
        if hidden is not None:
            dm.masked_fill_(hidden, 0.0)
        captured.collect(block, piece, dm, raw, hidden)
        if self.slope is not None:
            self.cells(block, dm).mul_(self.at(self.slope, block, piece, raw))
            if hidden is not None:
                dm.masked_fill_(hidden, 0.0)
        return self.rounded(dm, "weights")

    def _add_queries(self, dq: Tensor, block: Block, piece: KeyPiece, ds: Tensor) -> None:
        keys, scale = self.keys(self.plain_k, block, piece), self.geometry.scale
        if self.half:
            dq.add_(self.rough_product(ds, keys), alpha=scale)
        else:
            dq.baddbmm_(ds, keys, alpha=scale)


def _exp(x: Tensor) -> Tensor:
    """The exponential, in place. torch's exp is five times slower on -inf."""
    return x.mul_(LOG2E).exp2_()


def _within(member: Heads, part: range, kv_heads: int) -> Iterator[Heads]:
    """The heads of `member` among key heads `part`, counted through the batch."""
    start = member.batch * kv_heads + member.kv
    lo, hi = max(start, part.start), min(start + member.count, part.stop)
    if hi > lo:
        yield replace(member, kv=member.kv + lo - start, count=hi - lo)


def _even(blocks: list[Block], parts: int) -> list[list[Block]]:
    """Consecutive blocks in lists of about equal work."""
    total, done = sum(b.cells for b in blocks), 0
    lanes: list[list[Block]] = [[] for _ in range(parts)]
    for b in blocks:
        lanes[min(done * parts // total, parts - 1)].append(b)
        done += b.cells
    return lanes
