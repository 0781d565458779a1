"""Folds captured gradients on torch: sums over rows, columns, diagonals or heads, added where the table was read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, by_source
from frisket.lowering.plan import Geometry

from .expr import TileProgram
from .sums import summed

Tensor = Any
_program = memo(group="programs")(TileProgram)


def folded(
    gradients: Sequence[Gradient], buffers: Sequence[Tensor], geometry: Geometry,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """`derive.by_source` on torch; `slots` and `tables` are those of the forward, by plan name."""
    return by_source(gradients, buffers, tables, lambda g, x, shape: fold(g, x, shape, geometry, slots, tables))


def fold(
    gradient: Gradient, buffer: Tensor, shape: Sequence[int], geometry: Geometry,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor],
) -> Tensor:  # fmt: skip
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
