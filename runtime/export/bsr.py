"""Block sparse rows: which tiles each row of tiles reads, and on request the bits of those the mask cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.lowering.analysis.tiles import EMPTY, FULL, PARTIAL
from frisket.lowering.aten.expr import distance_only
from frisket.runtime.layouts.tiling import Tiling

from .visible import BUDGET, distinct, elements, scene

Array = NDArray[Any]
_STEP = 1 << 21


@dataclass(frozen=True)
class BlockRows:
    """One mask in the CSR of its tiles: row i reads tiles `indices[indptr[i] : indptr[i + 1]]`, ascending.

    `indptr` int32 [rows + 1], `indices` int32 [tiles], `kind` uint8 [tiles]: 1 cut by the mask, 2 full. `bits` uint8
    [cut tiles, ceil(block_q * block_k / 8)] are the elements of the cut ones, in order, a row of a tile after the
    other, the first in the lowest bit; None unless asked for.
    """

    indptr: NDArray[np.int32]
    indices: NDArray[np.int32]
    kind: NDArray[np.uint8]
    bits: NDArray[np.uint8] | None
    block: tuple[int, int]

    def data(self) -> NDArray[np.bool_]:
        """Every tile's elements, bool [tiles, block_q, block_k]: `scipy.sparse.bsr_matrix((data, indices, indptr))`,
        `torch.sparse_bsr_tensor`, and the `mask` of FlashInfer's `BlockSparseAttentionWrapper.plan`."""
        if self.bits is None:
            raise ExportError("the tiles have no elements here\n  ask for to_bsr(bits=True)")
        area = self.block[0] * self.block[1]
        out = np.ones((len(self.kind), area), bool)
        out[self.kind == PARTIAL] = np.unpackbits(self.bits, axis=1, count=area, bitorder="little").astype(bool)
        return out.reshape(-1, *self.block)

    def packed_mask(self) -> NDArray[np.uint8]:
        """Every tile's elements in one row of bits, the first in the lowest: FlashInfer's `packed_mask`."""
        return np.packbits(self.data().reshape(-1), bitorder="little")


@dataclass(frozen=True)
class BSR:
    """`slices[slice_of[batch, head]]` is the mask of a batch entry and head. `shape` is that of the tiled matrix:
    whole tiles, what lies outside the lengths being hidden."""

    slices: tuple[BlockRows, ...]
    slice_of: NDArray[np.int32]
    shape: tuple[int, int]


def to_bsr(layout: Tiling, bits: bool = False) -> BSR:
    """Block sparse rows of the layout's tiles.

    >>> import frisket as fk
    >>> rows = fk.mask("causal & window(128)").layout(512, 512).to_bsr().slices[0]
    >>> rows.indptr.tolist(), rows.indices.tolist(), rows.kind.tolist()
    ([0, 1, 3, 5, 7], [0, 0, 1, 1, 2, 2, 3], [1, 1, 1, 1, 1, 1, 1])

    Any mask fits. Without `bits` the kinds are those of the layout: where it is not exact, undecided tiles are 1.
    With them every kind is true. Raises `ExportError` for more than 2**28 tiles, or elements of cut tiles. Source:
    `scipy.sparse.bsr_matrix` and FlashInfer's documentation of block sparse attention.
    """
    expr, grid, slice_of, scope = scene(layout)
    t = layout.runs
    if int((t.stop.astype(np.int64) - t.start).sum()) > BUDGET:
        raise ExportError(f"BSR lists more than {BUDGET:,} tiles here\n  use larger tiles, or to_slices()")
    if not bits:
        return _whole(layout, [_rows(layout, s) for s in range(len(layout.spans.count))], t.slice_of)
    # elements may differ where tiles do not: one set of rows for every slice of the mask
    index = np.zeros(len(grid.b), np.int64)
    index[slice_of.reshape(-1)] = layout.spans.slice_of.reshape(-1)
    tiles = [_rows(layout, int(i)) for i in range(len(layout.spans.count))]
    cost = sum(int((tiles[i].kind == PARTIAL).sum()) for i in index) * layout.block[0] * layout.block[1]
    if cost > BUDGET:
        raise ExportError(
            f"the cut tiles hold {cost:,} elements, more than the {BUDGET:,} that an export looks at\n"
            "  ask for to_bsr() without bits, a smaller crop, or smaller tiles"
        )

    alike = distance_only(expr)

    def seen(s: int, row: Array, column: Array) -> Array:
        if not alike or not len(row):
            return elements(expr, grid, scope, np.full_like(row, s), row, column)
        # only q - k counts: tiles as far from the diagonal hold the same, but for those the lengths cut
        last = 2 * (row == grid.rows - 1) + (column == grid.columns - 1)
        offset = np.stack([row * grid.block[0] - column * grid.block[1], last])
        _, first, which = np.unique(offset, axis=1, return_index=True, return_inverse=True)
        return elements(expr, grid, scope, np.full_like(first, s), row[first], column[first])[which.reshape(-1)]

    return _whole(layout, [_looked_at(tiles[i], partial(seen, s)) for s, i in enumerate(index)], slice_of)


def _whole(layout: Tiling, made: list[BlockRows], slice_of: Array) -> BSR:
    """Equal masks once."""
    kept, place = distinct(made, lambda m: () if len(made) == 1 else (m.indptr, m.indices, m.kind, m.bits))
    shape = (layout.rows * layout.block[0], layout.columns * layout.block[1])
    return BSR(tuple(kept), place.astype(np.int32)[slice_of], shape)


def _rows(layout: Tiling, s: int) -> BlockRows:
    """The rows of slice `s` of the spans."""
    t = layout.runs
    ptr = t.row_ptr[s * layout.rows : (s + 1) * layout.rows + 1]
    part = slice(int(ptr[0]), int(ptr[-1]))
    width = t.stop[part].astype(np.int64) - t.start[part]
    before = np.append(0, np.cumsum(width))
    column = np.repeat(t.start[part] - before[:-1], width) + np.arange(before[-1])
    block = (int(layout.block[0]), int(layout.block[1]))
    indptr = before[ptr - ptr[0]].astype(np.int32)
    return BlockRows(indptr, column.astype(np.int32), np.repeat(t.kind[part], width), None, block)


def _looked_at(m: BlockRows, seen: Callable[[Array, Array], Array]) -> BlockRows:
    """Block rows with the bits of cut tiles. Tiles that a budget left undecided get their kind: none, cut or full."""
    row = np.repeat(np.arange(len(m.indptr) - 1), np.diff(m.indptr))
    cut = np.flatnonzero(m.kind != FULL)
    area = m.block[0] * m.block[1]
    step = max(1, _STEP // area)
    bits = [np.zeros((0, -(-area // 8)), np.uint8)]
    kind = m.kind.copy()
    for at in np.split(cut, range(step, len(cut), step)):
        found = seen(row[at], m.indices[at]).reshape(-1, area)
        kind[at] = np.where(found.all(axis=1), FULL, np.where(found.any(axis=1), PARTIAL, EMPTY))
        bits.append(np.packbits(found[kind[at] == PARTIAL], axis=1, bitorder="little"))
    keep = kind != EMPTY
    indptr = np.append(0, np.cumsum(keep))[m.indptr].astype(np.int32)
    return BlockRows(indptr, m.indices[keep], kind[keep], np.concatenate(bits), m.block)
