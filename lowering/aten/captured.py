"""Gradients of captured tables and scalars: `dm * weight` of every piece, summed as `lowering.derive` says.

Many values are added to places of a table with the same bits on every run. On the CPU one thread adds in order. On a
device threads add with atomics in any order, so there numbers are added in fixed point: integers give one sum in any
order. The unit is a power of two, chosen on the device from the sum of all magnitudes, so that no sum leaves 64 bits:

    unit <= 2**-60 * sum(|values|);  the error of a place is at most a unit for every value added to it

A sum of float32 is wrong by up to 2**-24 of its partial sums for every value added. (Units stay in
2**-126..2**126, as float32 has them. A value that is not finite makes all places NaN.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from frisket.dsl.ir import Named
from frisket.grammar.memo import memo
from frisket.lowering.derive import BITS, Gradient, by_source
from frisket.lowering.plan import Geometry

from .expr import TileProgram
from .steps import Block, KeyPiece
from .tiles import AtenTiles

Tensor = Any
SMALL = 1 << 20  # entries of a table that many cells may be scattered to: summed in float64


class LaneGradients:
    """Buffers of one lane, one per gradient."""

    def __init__(self, tiles: AtenTiles, gradients: Sequence[Gradient]) -> None:
        self.tiles, self.gradients = tiles, gradients
        weights = [x.weight for x in gradients]
        # a factor of 1 would take a pass over every tile
        self.programs = [None if w.op == "lit" and w.name == 1 else tiles.program(w) for w in weights]
        self.indices = [[tiles.program(e) for e in x.index] if x.over == "scatter" else [] for x in gradients]
        self.buffers = [self._new(x) for x in gradients]

    @property
    def scattered(self) -> bool:
        return any(x.over == "scatter" for x in self.gradients)

    def _new(self, gradient: Gradient) -> Tensor:
        """A buffer of zeros, [batch, kv_heads, group, ...]; columns as [batch, kv_heads, kv_len, group], as dk is."""
        t, g = self.tiles, self.tiles.geometry
        torch, heads = t.torch, (g.batch, g.kv_heads, t.group)
        if gradient.over == "scatter":
            shape = t.tables[gradient.source].shape
            return torch.zeros(shape, dtype=torch.float64 if shape.numel() <= SMALL else t.dtype)
        if gradient.over == "column":
            return torch.zeros((g.batch, g.kv_heads, g.kv_len, t.group), dtype=t.dtype)
        lengths = {"head": (), "row": (g.q_len,), "diagonal": (g.q_len + g.kv_len - 1,)}
        return torch.zeros((*heads, *lengths[gradient.over]), dtype=t.dtype)

    def collect(self, block: Block, piece: KeyPiece, dm: Tensor, raw: Tensor | None, hidden: Tensor | None) -> None:
        """Add the share of a piece. `hidden`: where dm is 0 whatever the weight is."""
        t = self.tiles
        for gradient, program, indices, buffer in zip(
            self.gradients, self.programs, self.indices, self.buffers, strict=True
        ):
            part = t.cells(block, dm)
            if program is not None:
                # a program may overwrite its score
                part = part * t.at(program, block, piece, None if raw is None else raw.clone())
                if hidden is not None:
                    part.masked_fill_(t.cells(block, hidden), 0.0)
            if gradient.over == "head":
                _heads(block, buffer, part.sum((2, 3)))
            elif gradient.over == "row":
                t.put(buffer, block, part.sum(3).flatten(1, 2), add=True)
            elif gradient.over == "column":
                for rows, place in t.disjoint_views(buffer[..., block.heads.first : block.heads.last], block, piece):
                    place.add_(part[rows].sum(2).mT)
            elif gradient.over == "diagonal":
                self._diagonals(block, piece, buffer, part)
            else:
                self._scatter(block, piece, buffer, part, raw, indices)

    def _diagonals(self, block: Block, piece: KeyPiece, buffer: Tensor, part: Tensor) -> None:
        """The sums along diagonals: each row of the turned block moves one place more, so diagonals become columns."""
        t, height, width = self.tiles, block.step.height, piece.width
        wide = part.new_zeros(block.batch, block.group, height, width + height)
        wide[..., :width] = part.flip(-1)
        length = width + height - 1
        sums = wide.flatten(-2)[..., : height * length].unflatten(-1, (height, length)).sum(-2)
        first = block.step.start - piece.start + t.geometry.kv_len - width
        if block.slides(piece) and block.by_row:  # all rows have the same diagonals
            sums = sums.sum(0, keepdim=True)
        m = block.heads
        if not block.by_row or len(sums) == 1:
            buffer[m.batch, m.kv : m.kv + m.count, m.first : m.last, first : first + length] += sums
            return
        row, inner, at = t.torch.arange(len(sums)), t.torch.arange(block.group), t.torch.arange(length)
        place = row.view(-1, 1, 1) * (height - piece.stride) + inner.view(-1, 1) * buffer.shape[-1] + at + first
        buffer[m.batch, m.kv, m.first : m.last].view(-1).index_add_(0, place.flatten(), sums.flatten())

    def _scatter(
        self, block: Block, piece: KeyPiece, buffer: Tensor, part: Tensor, raw: Tensor | None, indices: list[Any]
    ) -> None:
        place = self.tiles.torch.zeros(part.shape, dtype=self.tiles.torch.int64)
        for program, size in zip(indices, buffer.shape, strict=True):
            at = self.tiles.at(program, block, piece, None if raw is None else raw.clone())
            place.mul_(size).add_(at.clamp(0, size - 1))
        # With one axis index_add_ is a plain loop: always in one order.
        buffer.view(-1).index_add_(0, place.flatten(), part.flatten().to(buffer.dtype))

    def add(self, other: LaneGradients) -> None:
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine += theirs

    def folded(self, grad_names: frozenset[str]) -> dict[str, Tensor]:
        """The gradients by name, in the shape of the table, or 0-d; 0 where the score mod does not depend on it."""
        t = self.tiles
        buffers = []
        for gradient, buffer in zip(self.gradients, self.buffers, strict=True):
            if gradient.over == "scatter":
                buffers.append(buffer.to(t.dtype))
            else:
                buffers.append((buffer.mT if gradient.over == "column" else buffer).flatten(1, 2))
        arrays = folded(self.gradients, buffers, t.geometry, t.env, t.tables)
        shapes = {name: t.tables[name].shape if name in t.tables else () for name in grad_names}
        return {n: arrays[n] if n in arrays else t.torch.zeros(shapes[n], dtype=t.dtype) for n in sorted(grad_names)}


def _heads(block: Block, buffer: Tensor, sums: Tensor) -> None:
    m = block.heads
    buffer[m.batch, m.kv : m.kv + m.count, m.first : m.last] += sums.sum(0, keepdim=True) if block.by_row else sums


def units(total: Tensor) -> Tensor:
    """The number of fixed-point units that make 1, float32, a power of two, from the sum of all magnitudes or from a
    little less; shaped and placed as `total`. NaN where the sum is not finite."""
    import torch

    total = total.double()
    _, exponent = torch.frexp(total)
    per = torch.ldexp(torch.ones_like(total), (BITS - exponent).clamp(-126, 126))
    return torch.where(total.isfinite(), per, torch.nan).float()


def amounts(counted: Tensor, per: Tensor) -> Tensor:
    """The Float64 amounts of integers in units of which there are `per` to 1."""
    return counted.double() / per


def summed(place: Tensor, values: Tensor, size: int) -> Tensor:
    """The sums of `values` by `place`, Float64 [size]; both of one shape, 0 <= place < size."""
    import torch

    place, values = place.flatten(), values.flatten().double()
    if values.device.type == "cpu":
        # With one axis index_add_ is a plain loop. index_put_ adds with atomics, in any order.
        return torch.zeros(size, dtype=torch.float64).index_add_(0, place, values)
    return fixed(place, values, size)


def fixed(place: Tensor, values: Tensor, size: int) -> Tensor:
    """The sums of `summed` in fixed point."""
    import torch

    per = units(values.abs().sum())
    counted = torch.zeros(size, dtype=torch.int64, device=values.device)
    counted.index_add_(0, place, (values * per).round().long())
    return amounts(counted, per)


_program = memo(group="programs")(TileProgram)


def folded(
    gradients: Sequence[Gradient], buffers: Sequence[Tensor], geometry: Geometry, slots: Named, tables: Named
) -> dict[str, Tensor]:
    """`derive.by_source` on torch; `slots` and `tables` are those of the forward, by plan name."""
    return by_source(gradients, buffers, tables, lambda g, x, shape: fold(g, x, shape, geometry, slots, tables))


def fold(
    gradient: Gradient, buffer: Tensor, shape: Sequence[int], geometry: Geometry, slots: Named, tables: Named
) -> Tensor:
    """Sum `buffer` into an array of `shape`, the table's; 0-d for a slot. In float64 or better (`sums`), equal calls
    give equal bits; the result has the buffer's dtype and device."""
    import torch

    if not gradient.index:
        return buffer.sum(dtype=torch.float64).to(buffer.dtype)
    if gradient.over == "scatter":
        return buffer
    device = buffer.device

    def along(start: Any, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(start, int):
            start = torch.as_tensor(start).to(device, torch.int64, non_blocking=True).view(-1, 1, 1)
        return torch.arange(shape[0], device=device).view(shape) + start

    env = {**gradient.coordinates(geometry, along), **slots}
    place = torch.zeros(buffer.shape, dtype=torch.int64, device=device)
    for index, size in zip(gradient.index, shape, strict=True):
        place.mul_(size).add_(_program(index, buffer.dtype)(env, tables).clamp(0, size - 1))
    return summed(place, buffer, math.prod(shape)).view(tuple(shape)).to(buffer.dtype)
