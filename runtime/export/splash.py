"""JAX splash attention's `MaskInfo`, what `process_mask` and `process_mask_dkv` make of the dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.runtime.layouts.tiling import Tiling
from frisket.runtime.machine.extras import extras

from .bsr import BSR, to_bsr
from .visible import why

Array = NDArray[Any]
_MOST = 1 << 26


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
    holds them, shrunk to the read tiles where there is one mask (for dkv not where `fused`: the fused backward kernel
    walks every tile); `partial_mask_blocks` is bool [distinct cut tiles, block_q, block_kv], for dkv transposed.
    Batch is splash's `vmap`: the mask may not depend on it.

    Raises `ExportError` for lengths that tiles do not divide, masks that differ by batch entry, queries that see no
    key (splash attention would let them see keys it should hide), and more than 2**26 entries or 2**28 elements of
    cut tiles. Source: `splash_attention_mask_info` of JAX's Pallas operators.
    """
    with extras():
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    _check_lengths(layout)
    bsr = to_bsr(layout, bits=True)
    if (differ := (bsr.slice_of != bsr.slice_of[:1]).any(axis=1)).any():
        raise ExportError(
            "splash attention has one mask for all batch entries, and entry "
            f"{int(np.argmax(differ))} of the layout differs from the first\n"
            "  lay the entries out one by one: batch=1 with origin=(b, 0, 0, 0)"
        )
    tiles, partial = _tiles(layout, bsr)
    _no_empty_row(layout, tiles, partial)

    def info(dkv: bool, shrink: bool) -> Any:
        arrays = _walked(tiles, dkv, shrink and tiles.shape[0] == 1)
        data_next, mask_next, block_mask = (_small(x) for x in arrays)
        cut = np.ascontiguousarray(partial.swapaxes(-1, -2) if dkv else partial)
        return MaskInfo(
            data_next=data_next, mask_next=mask_next if len(cut) else None, block_mask=block_mask,
            partial_mask_blocks=cut if len(cut) else None, q_sequence=None,
        )  # fmt: skip

    return Splash(info(False, True), info(True, not fused), (int(layout.block[0]), int(layout.block[1])))


def _check_lengths(layout: Tiling) -> None:
    for name, n, tile in zip(("q_len", "kv_len"), (layout.q_len, layout.kv_len), layout.block, strict=True):
        if n % tile:
            raise ExportError(
                f"splash attention wants {name} to be whole tiles, and {n} is not a multiple of {tile}\n"
                "  pad the sequence and hide the padding in the mask, or choose another tile size"
            )


def _tiles(layout: Tiling, bsr: BSR) -> tuple[_Tiles, Array]:
    """The read tiles, and the distinct cut ones, bool [blocks, block_q, block_kv], in order of appearance."""
    masks = [bsr.slices[s] for s in bsr.slice_of[0]]
    masks = masks[:1] if all(m is masks[0] for m in masks) else masks
    blocks: dict[bytes, int] = {}
    ids = []
    for m in masks:
        found = np.full(len(m.kind), -1)
        if m.bits is not None:
            found[m.kind == PARTIAL] = [blocks.setdefault(x.tobytes(), len(blocks)) for x in m.bits]
        ids.append(found)
    area = layout.block[0] * layout.block[1]
    bits = np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, -(-area // 8))
    partial = np.unpackbits(bits, axis=1, count=area, bitorder="little").astype(bool).reshape(-1, *layout.block)
    tiles = _Tiles(
        (len(masks), layout.rows, layout.columns),
        np.repeat(np.arange(len(masks)), [len(m.kind) for m in masks]),
        np.concatenate([np.repeat(np.arange(layout.rows), np.diff(m.indptr)) for m in masks]),
        np.concatenate([m.indices for m in masks]).astype(np.int64),
        np.concatenate([m.kind for m in masks]), np.concatenate(ids),
    )  # fmt: skip
    return tiles, partial


def _no_empty_row(layout: Tiling, tiles: _Tiles, partial: Array) -> None:
    """Refuse a query that sees no key."""
    heads, rows, _ = tiles.shape
    seen = np.zeros((heads, rows, layout.block[0]), bool)
    full, cut = tiles.kind == FULL, tiles.kind == PARTIAL
    seen[tiles.head[full], tiles.row[full]] = True
    rows_of: Array = np.any(partial, axis=2)
    np.logical_or.at(seen, (tiles.head[cut], tiles.row[cut]), rows_of[tiles.block[cut]])
    if not seen.all():
        h, row, i = (int(x[0]) for x in np.nonzero(~seen))
        q = row * layout.block[0] + i
        raise ExportError(
            f"query {q} of the layout sees no key, and splash attention would give it a mean over hidden ones\n"
            f"  {why(layout, 0, h, q, 0)}\n  let every query see a key, or use to_block_mask() or to_fa4()"
        )


def _walked(tiles: _Tiles, dkv: bool, shrink: bool) -> tuple[Array, Array, Array]:
    """(data_next, mask_next, block_mask), int32: at every step of the grid the tile to fetch next, which is the first
    read one at or after it, around the end. Shrunk, rows keep their read tiles only, on the left; the columns of dkv
    theirs, at the bottom."""
    heads, rows, columns = tiles.shape
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
    found = out.swapaxes(1, 2)[:, None] if dkv else out[:, None]
    return found[0], found[1], found[2]


def _check_size(entries: int) -> None:
    if entries > _MOST:
        raise ExportError(
            f"MaskInfo holds three integers for every tile, in scalar memory, and {entries:,} are too many\n"
            f"  use larger tiles: {_MOST:,} entries are the most"
        )


def _small(x: Array) -> Array:
    """The smallest of int8, int16 and int32 that holds the values."""
    top = int(x.max(initial=0))
    return np.ascontiguousarray(x, np.int8 if top < 1 << 7 else np.int16 if top < 1 << 15 else np.int32)
