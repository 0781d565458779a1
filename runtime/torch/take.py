"""Tokens of a tensor of torch in another order. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from frisket.runtime.backends.cpp.torch import HUGE, LARGE, huge
from frisket.runtime.calls.arrays import TokenPermutation, in_graph

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
    permuted: Tensor = Moved.apply(x, index, inverse, axis, scratch)  # type: ignore[no-untyped-call]
    return permuted


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
    rows = empty(size, x.dtype, scratch)
    for at in np.ndindex(*lead):
        torch.index_select(x[at], 0, places, out=rows[at])
    return rows


def empty(size: torch.Size, dtype: torch.dtype, scratch: bool) -> Tensor:
    """A tensor in huge pages where it is large; of a `scratch` one, whose storage may be larger, every page is huge."""
    n = size.numel() * dtype.itemsize
    if scratch and n >= LARGE:
        memory = torch.empty(n + HUGE, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % HUGE :][:n]
        huge(memory)
        return memory.view(dtype).view(size)
    tensor = torch.empty(size, dtype=dtype)
    if n >= LARGE:
        huge(tensor)
    return tensor


# -- around executors that do not read rows by tables ----------------------------------------------


def with_permutation(
    forward: Callable[..., Any], rows: TokenPermutation, plan: Any, spans: Any, geometry: Any, q: Tensor, k: Tensor,
    v: Tensor, *rest: Any, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of a forward, whose arrays are put in order, and its results back."""
    q, (k, v) = _at(q, rows.queries), (_at(x, rows.keys) for x in (k, v))
    return tuple(_at(x, rows.back) for x in forward(plan, spans, geometry, q, k, v, *rest, **more))


def gradients_with_permutation(
    backward: Callable[..., Any], rows: TokenPermutation, plan: Any, spans: Any, geometry: Any, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any, *rest: Any, softmax_stats: Any = None,
    share: Any = None, **more: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients of a backward, whose arrays are put in order, and its gradients back."""
    q, out, lse, dout, dlse, softmax_stats, share = (
        _at(x, rows.queries) for x in (q, out, lse, dout, dlse, softmax_stats, share)
    )
    k, v = (_at(x, rows.keys) for x in (k, v))
    more |= {n: x for n, x in (("softmax_stats", softmax_stats), ("share", share)) if x is not None}
    grads: dict[str, Tensor] = backward(plan, spans, geometry, q, k, v, out, lse, dout, dlse, *rest, **more)
    back = {"q": rows.back, "k": rows.keys_back, "v": rows.keys_back}
    return {n: _at(x, back[n]) if n in back else x for n, x in grads.items()}


def _at(x: Any, index: NDArray[Any]) -> Any:
    return None if x is None else x.index_select(2, torch.as_tensor(index))
