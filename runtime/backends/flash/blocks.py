"""Block-sparse tensors of FlashAttention 4 from the records of rows of tiles, on the device that has them.

The engine walks a row's partial tiles and then its full ones, each from the last to the first, and looks at the ends of
the sequences in the first tile of each walk only: lists ascend, and a last tile that is ragged is partial.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from frisket.lowering.plan import Spans
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.export.fa4 import BlockSparseTensors

Tensor = Any


def tensors_of(spans: Spans | DeviceSpans, columns: int, block: tuple[int, int], device: Any) -> BlockSparseTensors:
    """The lists of partial and full tiles in each row, of `columns` tiles at most; B or H is 1 where all batch entries
    or heads have the same. Records that live on the device are never looked at from here."""
    import torch

    bounds, count = (on_device(x, device) for x in (spans.bounds, spans.count))
    used = torch.arange(bounds.shape[2], device=device) < count.unsqueeze(-1)
    lo, full_lo, full_hi, hi = (torch.where(used, x, 0) for x in bounds.long().unbind(-1))
    partial = _inside([(lo, full_lo), (full_hi, hi)], columns)
    full = _inside([(full_lo, full_hi)], columns)
    pick = on_device(told_apart(spans.slice_of).astype(np.int64), device)
    every = [x for kind in (partial, full) for x in _listed(kind)]
    lists = [x.index_select(0, pick.flatten()).view(*pick.shape, *x.shape[1:]) for x in every]
    return BlockSparseTensors(lists[0], lists[1], lists[2], lists[3], block)


def on_device(x: Any, device: Any) -> Tensor:
    """A tensor of an array of the host, or of a tensor."""
    import torch

    return (torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x).to(device)


def told_apart(slice_of: Any) -> Any:
    """The slices of batch entries and heads, [B, H]: 1 where all are equal."""
    found = np.asarray(slice_of)
    found = found[:1] if (found == found[:1]).all() else found
    return found[:, :1] if (found == found[:, :1]).all() else found


def _inside(runs: list[tuple[Tensor, Tensor]], columns: int) -> Tensor:
    """Whether a tile is in one of the runs [start, stop): bool [slices, rows, columns]."""
    import torch

    first = runs[0][0]
    steps = torch.zeros((*first.shape[:2], columns + 1), dtype=torch.int32, device=first.device)
    for start, stop in runs:
        one = (stop > start).int()
        steps.scatter_add_(-1, start.clamp(max=columns), one)
        steps.scatter_add_(-1, stop.clamp(max=columns), -one)
    return steps.cumsum(-1).narrow(-1, 0, columns) > 0


def _listed(kind: Tensor) -> tuple[Tensor, Tensor]:
    """(how many tiles each row has, which ones, ascending, then 0)."""
    import torch

    count = kind.int().sum(-1).int()
    index = kind.int().sort(dim=-1, descending=True, stable=True).indices.int()
    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    return count, torch.where(listed, index, 0)


def write_order(tensors: BlockSparseTensors, columns: int) -> tuple[Tensor, Tensor]:
    """The turn of each listed tile of a backward list among those that add to the same queries: those of earlier keys
    come first, so sums have one order. For the partial and the full lists."""
    import torch

    mask, full = (
        _marked(c, i, columns)
        for c, i in ((tensors.mask_block_cnt, tensors.mask_block_idx), (tensors.full_block_cnt, tensors.full_block_idx))
    )
    either = (mask | full).int()
    turn = (either.cumsum(-2) - either).int()  # of [B, H, key tiles, query tiles]
    first, second = (torch.gather(turn, -1, i.long()) for i in (tensors.mask_block_idx, tensors.full_block_idx))
    return first, second


def _marked(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """Whether a row lists a tile: bool [B, H, rows, columns]."""
    import torch

    listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    found = torch.zeros((*index.shape[:-1], columns + 1), dtype=torch.bool, device=index.device)
    return found.scatter_(-1, torch.where(listed, index.long(), columns), True).narrow(-1, 0, columns)
