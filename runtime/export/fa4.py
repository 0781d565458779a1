"""FlashAttention 4's block-sparse tensors (flash_attn.cute, `BlockSparseTensorsTorch`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from frisket.runtime.layouts.tiling import Tiling

from .tile_lists import both_ways

Tensor = Any  # torch is imported only when asked for


class BlockSparseTensors(NamedTuple):
    """One direction, with the field names of `flash_attn.cute.block_sparsity.BlockSparseTensorsTorch`:
    `BlockSparseTensorsTorch(**tensors._asdict())` makes theirs.

    Counts are int32 [B, H, rows], indices int32 [B, H, rows, columns] of tiles; B or H is 1 where the mask does not
    depend on it. An index list is strictly ascending up to its count and 0 after it; no tile is in both lists.
    `mask_*` are the tiles where `mask_mod` runs, `full_*` those where it need not.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]  # queries, keys


@dataclass(frozen=True)
class FA4:
    """`forward` lists key tiles for every tile of queries, `backward` query tiles for every tile of keys."""

    forward: BlockSparseTensors
    backward: BlockSparseTensors


def to_fa4(layout: Tiling, device: Any = "cpu", compact: bool = False) -> FA4:
    """Block-sparse tensors for FlashAttention 4, forward and backward.

    >>> import frisket as fk
    >>> tensors = fk.mask("causal").layout(512, 512).to_fa4().forward
    >>> tensors.mask_block_idx[0, 0].tolist(), tensors.full_block_cnt[0, 0].tolist()
    ([[0, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0]], [0, 1, 2, 3])

    The kernel's key tile must be the layout's, and the layout's query tile a multiple of the kernel's (twice
    `tile_m` where it keeps two query tiles in flight): choose `block` accordingly. `compact=True` cuts index lists to
    the longest, which present kernels take and long sequences need; the mask itself goes to the kernel as its own
    `mask_mod`, written in CuTe. A layout that is not exact fits: its undecided tiles are partial.

    Raises `ExportError` beyond 8 GiB. Source: FlashAttention's `flash_attn/cute/block_sparsity.py`.
    """
    partial, full, partial_q, full_q = both_ways(layout, device, "zero", "FA4", compact=compact)
    block = (int(layout.block[0]), int(layout.block[1]))
    return FA4(
        BlockSparseTensors(partial.count, partial.index, full.count, full.index, block),
        BlockSparseTensors(partial_q.count, partial_q.index, full_q.count, full_q.index, block),
    )
