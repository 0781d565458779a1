"""Tokens of a tensor of torch in another order. Imports torch."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from frisket.runtime.backends.cpp.torch import HUGE, LARGE, huge
from frisket.runtime.calls.arrays import in_graph

Index = NDArray[np.int64]
APART = 1 << 16  # bytes of a batch entry or head from which it is worth a call of its own


def take(x: Tensor, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> Tensor:
    """`x` at `index` along an axis; with the index that puts rows back, gradients are gathered by it: torch's own
    gradient adds rows to zeros, and takes three times as long. `scratch`: no user sees the tensor."""
    if in_graph(x) or not x.is_cpu or x.is_neg() or forward_ad._current_level >= 0:
        return x.index_select(axis, torch.as_tensor(index, device=x.device))
    if not (torch.is_grad_enabled() and x.requires_grad):
        return gathered(x, index, axis, scratch)
    if inverse is None:
        return x.index_select(axis, torch.as_tensor(index))
    moved: Tensor = Moved.apply(x, index, inverse, axis, scratch)  # type: ignore[no-untyped-call]
    return moved


class Moved(torch.autograd.Function):
    """`x` in another order: of (x, index, inverse, axis, scratch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Index, inverse: Index, axis: int, scratch: bool) -> Tensor:
        ctx.back = inverse, axis, index, not scratch
        return gathered(x, index, axis, scratch)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return take(cotangents[0], *ctx.back), None, None, None, None


def gathered(x: Tensor, index: Index, axis: int, scratch: bool) -> Tensor:
    """`x` at `index` along an axis, a batch entry and head at a time, which torch copies in half the time."""
    places, lead = torch.as_tensor(index), x.shape[:axis]
    size = torch.Size((*lead, len(index), *x.shape[axis + 1 :]))
    if x.nbytes < APART * prod(lead):
        return x.index_select(axis, places)
    found = empty(size, x.dtype, scratch)
    for at in np.ndindex(*lead):
        torch.index_select(x[at], 0, places, out=found[at])
    return found


def empty(size: torch.Size, dtype: torch.dtype, scratch: bool) -> Tensor:
    """A tensor in huge pages where it is large; of a `scratch` one, whose storage may be larger, every page is huge."""
    n = size.numel() * dtype.itemsize
    if scratch and n >= LARGE:
        memory = torch.empty(n + HUGE, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % HUGE :][:n]
        huge(memory)
        return memory.view(dtype).view(size)
    found = torch.empty(size, dtype=dtype)
    if n >= LARGE:
        huge(found)
    return found
