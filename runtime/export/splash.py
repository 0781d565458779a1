"""JAX splash attention's `MaskInfo`, what `process_mask` and `process_mask_dkv` make of the dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.lowering.analysis.tiles import EMPTY, FULL, PARTIAL

from ..layout import Layout
from .bsr import to_bsr
from .visible import why

Array = NDArray[Any]
_TILES = 1 << 26


@dataclass(frozen=True)
class Splash:
    """`MaskInfo`s for `SplashAttentionKernel(forward, dq, dkv, ...)`, with `block` = (block_q, block_kv): `forward`
    serves dq too, where its block sizes are the same. `dkv` is for the kernel of its own; `dkv_fused` for the fused
    backward kernel, which does not shrink its grid."""

    forward: Any
    dkv: Any
    dkv_fused: Any
    block: tuple[int, int]


def to_splash(layout: Layout) -> Splash:
    """Splash attention's `MaskInfo`, forward and transposed, equal to `process_mask` of the dense mask.

    >>> import frisket as fk
    >>> info = fk.mask("causal & window(128)").layout(512, 512).to_splash().forward
    >>> info.block_mask[0].tolist(), info.partial_mask_blocks.shape
    ([[1, 0], [1, 1], [1, 1], [1, 1]], (2, 128, 128))

    `data_next`, `mask_next` and `block_mask` are integers [1 or heads, q tiles, k tiles] of the smallest type that
    holds them, shrunk to the read tiles where there is one mask; `partial_mask_blocks` is bool [distinct cut tiles,
    block_q, block_kv] ([.., block_kv, block_q] for dkv). Batch is splash's `vmap`: the mask may not depend on it.

    Raises `ExportError` for lengths that tiles do not divide, masks that differ by batch entry, queries that see no
    key (splash attention would let them see keys it should hide), and more than 2**26 tiles or
    2**28 elements of cut tiles. Source: `splash_attention_mask_info` of JAX's Pallas operators.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    _check(layout)
    bsr = to_bsr(layout, bits=True)
    if (differ := (bsr.slice_of != bsr.slice_of[:1]).any(axis=1)).any():
        raise ExportError(
            "splash attention has one mask for all batch entries, and entry "
            f"{int(np.argmax(differ))} of the layout differs from the first\n"
            "  lay the entries out one by one: batch=1 with origin=(b, 0, 0, 0)"
        )
    masks = [bsr.slices[s] for s in bsr.slice_of[0]]
    rows, columns = layout.rows, layout.columns
    kinds = np.full((len(masks), rows, columns), EMPTY, np.int8)
    which = np.zeros((len(masks), rows, columns), np.int32)
    blocks: dict[bytes, int] = {}
    for h, m in enumerate(masks):
        row = np.repeat(np.arange(rows), np.diff(m.indptr))
        kinds[h, row, m.indices] = m.kind
        cut = m.kind == PARTIAL
        assert m.bits is not None
        which[h, row[cut], m.indices[cut]] = [blocks.setdefault(x.tobytes(), len(blocks)) for x in m.bits]
    if all((kinds[h] == kinds[0]).all() and (which[h] == which[0]).all() for h in range(len(masks))):
        kinds, which = kinds[:1], which[:1]
    area = layout.block[0] * layout.block[1]
    bits = np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, -(-area // 8))
    partial = np.unpackbits(bits, axis=1, count=area, bitorder="little").astype(bool).reshape(-1, *layout.block)
    _no_empty_row(layout, kinds, which, partial)

    def info(dkv: bool, shrink: bool) -> Any:
        arrays = _steps(kinds, which, dkv)
        if shrink and len(kinds) == 1:
            arrays = _shrunk(arrays, dkv)
        cut = partial.swapaxes(-1, -2) if dkv else partial
        data_next, mask_next, block_mask = (_small(x) for x in arrays)
        return MaskInfo(
            data_next=data_next, mask_next=mask_next if len(cut) else None, block_mask=block_mask,
            partial_mask_blocks=np.ascontiguousarray(cut) if len(cut) else None, q_sequence=None,
        )  # fmt: skip

    block = (int(layout.block[0]), int(layout.block[1]))
    return Splash(info(False, True), info(True, True), info(True, False), block)


def _check(layout: Layout) -> None:
    for name, n, tile in zip(("q_len", "kv_len"), (layout.q_len, layout.kv_len), layout.block, strict=True):
        if n % tile:
            raise ExportError(
                f"splash attention wants {name} to be whole tiles, and {n} is not a multiple of {tile}\n"
                "  pad the sequence and hide the padding in the mask, or choose another tile size"
            )
    tiles = layout.rows * layout.columns * layout.heads
    if tiles > _TILES:
        raise ExportError(
            f"MaskInfo holds three integers for every tile, in scalar memory, and {tiles:,} tiles are too many\n"
            f"  use larger tiles: {_TILES:,} are the most"
        )


def _no_empty_row(layout: Layout, kinds: Array, which: Array, partial: Array) -> None:
    any_of = np.concatenate([partial.any(axis=2), np.zeros((1, layout.block[0]), bool)])
    for h in range(len(kinds)):
        for row in range(layout.rows):
            mine = kinds[h, row]
            if (mine == FULL).any():
                continue
            seen = any_of[which[h, row][mine == PARTIAL]].any(axis=0) if (mine == PARTIAL).any() else any_of[-1]
            if not seen.all():
                q = row * layout.block[0] + int(np.argmin(seen))
                raise ExportError(
                    f"query {q} of the layout sees no key, and splash attention would give it a mean over hidden ones\n"
                    f"  {why(layout, 0, h, q, 0)}\n  let every query see a key, or use to_block_mask() or to_fa4()"
                )


def _steps(kinds: Array, which: Array, dkv: bool) -> tuple[Array, Array, Array]:
    """(data_next, mask_next, block_mask), int32: at every step of the grid the tile to fetch next, which is the
    first read at or after it, around the end."""
    turn = (2, 0, 1) if dkv else (0, 1, 2)  # the grid walks keys, heads, queries there
    back = np.argsort(turn)
    walked, ids = kinds.transpose(turn), which.transpose(turn)
    inner = np.broadcast_to(np.arange(walked.shape[2]), walked.shape)

    def following(wanted: Array, value: Array) -> Array:
        at = np.flatnonzero(wanted)
        if not len(at):
            return np.zeros(kinds.shape, np.int32)
        ahead = np.searchsorted(at, np.arange(wanted.size)) % len(at)
        found: Array = value.reshape(-1)[at[ahead]].reshape(walked.shape).transpose(back).astype(np.int32)
        return found

    return following(walked != EMPTY, inner), following(walked == PARTIAL, ids), kinds.astype(np.int32)


def _shrunk(arrays: tuple[Array, Array, Array], dkv: bool) -> tuple[Array, Array, Array]:
    """Only the read tiles: moved to the left of their row, or for dkv to the bottom of their column."""
    axis = 1 if dkv else 2
    read = arrays[2] != EMPTY
    order = np.argsort(read if dkv else ~read, axis=axis, kind="stable")
    most = int(read.sum(axis=axis).max())
    keep = slice(-most, None) if dkv else slice(0, most)
    cut = (slice(None), keep) if dkv else (slice(None), slice(None), keep)
    there = np.take_along_axis(read, order, axis)[cut]
    data_next, mask_next, block_mask = (np.take_along_axis(x, order, axis)[cut] * there for x in arrays)
    return data_next, mask_next, block_mask


def _small(x: Array) -> Array:
    """The smallest of int8, int16 and int32 that holds the values."""
    top = int(x.max(initial=0))
    return x.astype(np.int8 if top < 1 << 7 else np.int16 if top < 1 << 15 else np.int32)
