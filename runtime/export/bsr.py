"""Block sparse rows: which tiles each row of tiles reads, and on request the bits of those the mask cuts.

Also JAX splash attention's `MaskInfo`, what `process_mask` and `process_mask_dkv` make of the dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.dsl.transfer import distance_only
from frisket.lowering.analysis.tiles import EMPTY, FULL, PARTIAL
from frisket.lowering.analysis.tiling import Array, Tiling
from frisket.runtime.machine.modules import extras

from .tile_lists import BUDGET, distinct, elements, scene, why

_STEP = 1 << 21  # elements looked at in one go


@dataclass(frozen=True)
class BlockRows:
    """One mask in the CSR of its tiles: row i reads tiles `indices[indptr[i] : indptr[i + 1]]`, ascending.

    `indptr` int32 [rows + 1], `indices` int32 [tiles], `kind` uint8 [tiles]. Kinds are 1 cut by the mask, 2 full.
    `bits` uint8 [cut tiles, ceil(block_q * block_k / 8)] are the elements of the cut ones, in order: a row of a tile
    after the other. The first is in the lowest bit. None unless asked for.
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
        text = f"the cut tiles hold {cost:,} elements, more than the {BUDGET:,} that an export looks at\n"
        raise ExportError(f"{text}  ask for to_bsr() without bits, a smaller crop, or smaller tiles")

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


def _whole(layout: Tiling, rows: list[BlockRows], slice_of: Array) -> BSR:
    """Equal masks once."""
    # a single mask has nothing to be compared with
    slices, place = distinct(rows, lambda m: () if len(rows) == 1 else (m.indptr, m.indices, m.kind, m.bits))
    shape = (layout.rows * layout.block[0], layout.columns * layout.block[1])
    return BSR(tuple(slices), place.astype(np.int32)[slice_of], shape)


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
    step = max(1, _STEP // area)  # bounds the memory of a look
    bits = [np.zeros((0, -(-area // 8)), np.uint8)]  # for a mask that cuts no tile
    kind = m.kind.copy()
    for at in np.split(cut, range(step, len(cut), step)):
        visible = seen(row[at], m.indices[at]).reshape(-1, area)
        kind[at] = np.where(visible.all(axis=1), FULL, np.where(visible.any(axis=1), PARTIAL, EMPTY))
        bits.append(np.packbits(visible[kind[at] == PARTIAL], axis=1, bitorder="little"))
    keep = kind != EMPTY
    indptr = np.append(0, np.cumsum(keep))[m.indptr].astype(np.int32)
    return BlockRows(indptr, m.indices[keep], kind[keep], np.concatenate(bits), m.block)


_MOST = 1 << 26  # entries of MaskInfo, which lies in scalar memory


@dataclass(frozen=True)
class Splash:
    """`MaskInfo`s for `SplashAttentionKernel(forward, dq, dkv, ...)` of blocks `block` = (block_q, block_kv).
    `forward` serves dq too, where its block sizes are the same."""

    forward: Any
    dkv: Any
    block: tuple[int, int]


@dataclass(frozen=True)
class _Tiles:
    """The read tiles of all heads, in the order of heads, rows, columns; `block` numbers the distinct cut ones."""

    shape: tuple[int, int, int]
    head: Array
    row: Array
    column: Array
    kind: Array
    block: Array


def to_splash(layout: Tiling, fused: bool = False) -> Splash:
    """Splash attention's `MaskInfo`, forward and transposed, equal to `process_mask` of the dense mask.

    >>> import frisket as fk
    >>> info = fk.mask("causal & window(128)").layout(512, 512).to_splash().forward
    >>> info.block_mask[0].tolist(), info.partial_mask_blocks.shape
    ([[1, 0], [1, 1], [1, 1], [1, 1]], (2, 128, 128))

    `data_next`, `mask_next` and `block_mask` are integers [1 or heads, q tiles, k tiles] of the smallest type that
    holds them. They are shrunk to the read tiles where there is one mask (for dkv not where `fused`: the fused backward
    kernel walks every tile). `partial_mask_blocks` is bool [distinct cut tiles, block_q, block_kv], for dkv transposed.
    Batch is splash's `vmap`: the mask may not depend on it.

    Raises `ExportError` for lengths that tiles do not divide and masks that differ by batch entry. So do queries that
    see no key (splash attention would let them see keys it should hide), and more than 2**26 entries or 2**28 elements
    of cut tiles. Source: `splash_attention_mask_info` of JAX's Pallas operators.
    """
    with extras():
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    _check_lengths(layout)
    bsr = to_bsr(layout, bits=True)
    if (differ := (bsr.slice_of != bsr.slice_of[:1]).any(axis=1)).any():
        text = "splash attention has one mask for all batch entries, and entry "
        text += f"{int(np.argmax(differ))} of the layout differs from the first\n"
        raise ExportError(f"{text}  lay the entries out one by one: batch=1 with origin=(b, 0, 0, 0)")
    tiles, partial = _tiles(layout, bsr)
    _no_empty_row(layout, tiles, partial)

    def info(dkv: bool, shrink: bool) -> Any:
        arrays = _walked(tiles, dkv, shrink and tiles.shape[0] == 1)
        data_next, mask_next, block_mask = (_small(x) for x in arrays)
        cut = np.ascontiguousarray(partial.swapaxes(-1, -2) if dkv else partial)
        blocks, ids = (cut, mask_next) if len(cut) else (None, None)
        walk: dict[str, Any] = {"data_next": data_next, "mask_next": ids, "block_mask": block_mask}
        return MaskInfo(**walk, partial_mask_blocks=blocks, q_sequence=None)

    return Splash(info(False, True), info(True, not fused), (int(layout.block[0]), int(layout.block[1])))


def _check_lengths(layout: Tiling) -> None:
    for name, n, tile in zip(("q_len", "kv_len"), (layout.q_len, layout.kv_len), layout.block, strict=True):
        if n % tile:
            text = f"splash attention wants {name} to be whole tiles, and {n} is not a multiple of {tile}\n"
            raise ExportError(f"{text}  pad the sequence and hide the padding in the mask, or choose another tile size")


def _tiles(layout: Tiling, bsr: BSR) -> tuple[_Tiles, Array]:
    """The read tiles, and the distinct cut ones, bool [blocks, block_q, block_kv], in order of appearance."""
    masks = [bsr.slices[s] for s in bsr.slice_of[0]]  # all batch entries are alike
    masks = masks[:1] if all(m is masks[0] for m in masks) else masks  # one for all heads
    blocks: dict[bytes, int] = {}
    ids = []
    for m in masks:
        block_ids = np.full(len(m.kind), -1)
        if m.bits is not None:
            block_ids[m.kind == PARTIAL] = [blocks.setdefault(x.tobytes(), len(blocks)) for x in m.bits]
        ids.append(block_ids)
    area = layout.block[0] * layout.block[1]
    bits = np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, -(-area // 8))
    partial = np.unpackbits(bits, axis=1, count=area, bitorder="little").astype(bool).reshape(-1, *layout.block)
    head = np.repeat(np.arange(len(masks)), [len(m.kind) for m in masks])
    row = np.concatenate([np.repeat(np.arange(layout.rows), np.diff(m.indptr)) for m in masks])
    column, kind = np.concatenate([m.indices for m in masks]).astype(np.int64), np.concatenate([m.kind for m in masks])
    return _Tiles((len(masks), layout.rows, layout.columns), head, row, column, kind, np.concatenate(ids)), partial


def _no_empty_row(layout: Tiling, tiles: _Tiles, partial: Array) -> None:
    """Refuse a query that sees no key."""
    heads, rows, _ = tiles.shape
    seen = np.zeros((heads, rows, layout.block[0]), bool)
    full, cut = tiles.kind == FULL, tiles.kind == PARTIAL
    seen[tiles.head[full], tiles.row[full]] = True
    rows_of: Array = np.any(partial, axis=2)
    # `|=` would count one of several tiles in a row
    np.logical_or.at(seen, (tiles.head[cut], tiles.row[cut]), rows_of[tiles.block[cut]])
    if not seen.all():
        h, row, i = (int(x[0]) for x in np.nonzero(~seen))
        q = row * layout.block[0] + i
        text = f"query {q} of the layout sees no key, and splash attention would give it a mean over hidden ones\n"
        text += f"  {why(layout, 0, h, q, 0)}\n  let every query see a key, or use to_block_mask() or to_fa4()"
        raise ExportError(text)


def _walked(tiles: _Tiles, dkv: bool, shrink: bool) -> tuple[Array, Array, Array]:
    """(data_next, mask_next, block_mask), int32: at every step of the grid the tile to fetch next, which is the first
    read one at or after it, around the end. Shrunk, rows keep their read tiles only, on the left; the columns of dkv
    theirs, at the bottom."""
    heads, rows, columns = tiles.shape
    # the grid of dkv walks columns, then heads, then rows
    order = np.lexsort((tiles.row, tiles.head, tiles.column)) if dkv else np.arange(len(tiles.kind))
    head, row, column, kind, block = (x[order] for x in (tiles.head, tiles.row, tiles.column, tiles.kind, tiles.block))
    step = (column * heads + head) * rows + row if dkv else (head * rows + row) * columns + column
    inner = row if dkv else column
    cut = np.flatnonzero(kind == PARTIAL)

    def ahead(steps: Array) -> tuple[Array, Array]:
        data = inner[np.searchsorted(step, steps) % len(step)]
        if not len(cut):
            return data, np.zeros_like(data)
        return data, block[cut[np.searchsorted(step[cut], steps) % len(cut)]]

    if not shrink:
        _check_size(heads * rows * columns)
        data, mask = ahead(np.arange(heads * rows * columns))
        kinds = np.zeros(len(data), np.int32)
        kinds[step] = kind
        turn = ((columns, heads, rows), (1, 2, 0)) if dkv else ((heads, rows, columns), (0, 1, 2))
        return tuple(x.astype(np.int32).reshape(turn[0]).transpose(turn[1]) for x in (data, mask, kinds))  # type: ignore
    line = column if dkv else row
    count = np.bincount(line, minlength=columns if dkv else rows)
    most = int(count.max())
    _check_size(most * len(count))
    at = np.arange(len(line)) - np.repeat(np.cumsum(count) - count, count) + (most - count[line] if dkv else 0)
    data, mask = ahead(step)
    out = np.zeros((3, len(count), most), np.int32)
    out[:, line, at] = data, mask, kind
    grid = out.swapaxes(1, 2)[:, None] if dkv else out[:, None]
    return grid[0], grid[1], grid[2]


def _check_size(entries: int) -> None:
    if entries > _MOST:
        text = f"MaskInfo holds three integers for every tile, in scalar memory, and {entries:,} are too many\n"
        raise ExportError(f"{text}  use larger tiles: {_MOST:,} entries are the most")


def _small(x: Array) -> Array:
    """The smallest of int8, int16 and int32 that holds the values."""
    top = int(x.max(initial=0))
    return np.ascontiguousarray(x, np.int8 if top < 1 << 7 else np.int16 if top < 1 << 15 else np.int32)
