"""Masks made in a graph of torch: lists of tiles and a function, both of the graph. Traced by Dynamo, so plain Python.

What a mask shows is not read here as an expression: the operators of the graph do so when they are written, see
`graph`. A mask that leaves the graph is traced when somebody asks for its expression.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.runtime.masks.mask import program

from .checks import MaskModError
from .derived import Pick, picks
from .tensor_mask import TensorMask
from .tile_tensors import LISTS, TENSORS, Lists, ordered, with_columns, with_orders

if TYPE_CHECKING:
    from .block_mask import BlockMask

MaskMod = Callable[..., Any]


def function_or_text(mask_mod: Any) -> tuple[MaskMod | None, str | None]:
    """A mask_mod as a graph holds it."""
    if isinstance(mask_mod, str):
        return None, mask_mod
    if callable(mask_mod) and not isinstance(mask_mod, TensorMask):
        return mask_mod, None
    raise MaskModError(
        f"mask_mod is {type(mask_mod).__name__}, in a graph of torch\n  a graph takes a function "
        "`mask_mod(b, h, q_idx, kv_idx)` or a text: make masks of anything else outside"
    )


def function_of(text: str) -> MaskMod:
    """A text as a function of torch."""
    return getattr(_texts, _written(text))  # type: ignore[no-any-return]


_texts = ModuleType("frisket_masks_of_texts")  # where Dynamo finds them, as it finds any function of a module


def _written(text: str) -> str:
    name = f"text_{sha256(text.encode()).hexdigest()}"
    if not hasattr(_texts, name):
        mask = program(text).mask
        assert mask is not None
        far = 1 << 31
        setattr(_texts, name, TensorMask(mask.expr, {}).callable({}, (far, far, far, far), text, torch.device("cpu")))
    return name


_written._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is made, not in it


def lists_of(kinds: Tensor, separate_full: bool, columns: bool) -> Lists:
    """The lists of a map of tiles."""
    lists: Lists = dict.fromkeys(TENSORS)
    sides = {"kv": kinds == PARTIAL if separate_full else kinds > 0}
    if separate_full:
        sides["full_kv"] = kinds == FULL
    for name, grid in sides.items():
        lists[f"{name}_num_blocks"], lists[f"{name}_indices"] = ordered(grid)
    return with_columns(lists, kinds.shape[-1]) if columns else lists


def laid_out(mask: BlockMask) -> Lists:
    """The lists of a mask that a graph made of a function or text."""
    from .graph import tiles

    lists = lists_of(tiles(mask), mask._separate_full, mask._columns)
    return with_orders(lists, mask.dq_kv_order_spt) if mask._orders else lists


def visible(mask: BlockMask) -> MaskMod:
    """The whole mask as a function: its mask_mod, and the tiles of lists that a user gave."""
    mask_mod = mask.mask_mod
    if mask._user_lists is None:
        return mask_mod
    kinds, (rows, columns) = mask._kinds(), mask._block
    several = [n > 1 for n in (1, 1, *mask._batch)[-2:]]
    kinds = kinds.reshape((1, 1, *kinds.shape)[-4:])

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        kind = kinds[b if several[0] else 0, h if several[1] else 0, q // rows, k // columns]
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q, k))

    return shown


def joined(op: str, mask: BlockMask, other: Any) -> BlockMask:
    """The join of a mask with another mask or with a mask_mod."""
    mine, batch = visible(mask), mask._batch
    if isinstance(other, type(mask)):
        second, batch = visible(other), tuple(torch.broadcast_shapes(batch, other._batch))  # type: ignore[no-untyped-call]
    else:
        fn, text = function_or_text(other)
        second = function_of(text or "") if fn is None else fn

    def both(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        x, y = mine(b, h, q, k), second(b, h, q, k)
        return x & y if op == "and" else x | y

    return made_of(mask, both, mask._lengths, batch)


def inverted(mask: BlockMask) -> BlockMask:
    mine = visible(mask)
    return made_of(mask, lambda b, h, q, k: ~mine(b, h, q, k), mask._lengths, mask._batch)


def crop(mask: BlockMask, lengths: tuple[int, int]) -> BlockMask:
    """The first queries and keys of a mask."""
    cropped = made_of(mask, mask.mask_mod, lengths, mask._batch)
    if mask._user_lists is not None:
        mask._check_cover(lengths)
        rows, columns = (-(-n // size) for n, size in zip(lengths, mask._block, strict=True))
        cropped._hold(lists_of(mask._kinds()[..., :rows, :columns], mask._separate_full, mask._columns))
    return cropped


def there(mask: BlockMask, device: Any) -> BlockMask:
    """The mask with its lists on another device. Tensors of its function stay where they are, as in torch."""
    copy = made_of(mask, mask.mask_mod, mask._lengths, mask._batch)
    copy._device = torch.device(device)
    copy._hold({n: None if x is None else x.to(device) for n, x in mask._tensors().items()})
    return copy


def part(mask: BlockMask, index: Any) -> BlockMask:
    """`mask[index]`: its lists picked from, and a function of positions in what was picked."""
    lists, mask_mod, (q_len, kv_len), size = mask._tensors(), mask.mask_mod, mask._lengths, mask._block[0]
    count = lists["kv_indices"]
    assert count is not None
    selection = picks(index, (*mask._batch, count.shape[-2]))
    rows, entries = selection[-1], selection[:-1]

    def picked_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        at = [b, h]
        for i, pick in enumerate(entries, 2 - len(entries)):
            at[i] = _place(pick, at[i])
        if rows.whole:
            return mask_mod(*at, q, k)
        if rows.at is None:
            return mask_mod(*at, q + rows.start * size, k)
        place = rows.at[q // size] * size + q % size
        shown: Tensor = mask_mod(*at, place, k)
        return shown & (place < q_len) if q_len % size else shown

    length = rows.count * size
    if rows.whole:
        length = q_len
    elif rows.at is None:
        length = min(length, q_len - rows.start * size)
    picked = made_of(mask, picked_mod, (length, kv_len), tuple(p.count for p in entries))
    chosen: Lists = dict.fromkeys(TENSORS)
    for name in LISTS[:4]:
        x = lists[name]
        if x is not None:
            for axis, pick in enumerate(selection):
                x = pick.select(x, axis)
        chosen[name] = x
    if lists["q_indices"] is not None:
        chosen = with_columns(chosen, -(-kv_len // mask._block[1]))
    picked._hold(with_orders(chosen, mask.dq_kv_order_spt) if mask._orders else chosen)
    return picked


def _place(pick: Pick, x: Tensor) -> Any:
    if pick.whole:
        return x
    if pick.at is not None:
        return pick.at[x] if pick.count > 1 else pick.at[0]
    return x + pick.start if pick.count > 1 else torch.full_like(x, pick.start)


def made_of(mask: BlockMask, fn: MaskMod, lengths: tuple[int, int], batch: tuple[int, ...]) -> BlockMask:
    derived = mask.of(None, lengths, mask._block, batch, mask._device, mask)
    derived._fn = fn
    return derived


def packed(mask_mod: MaskMod, q_offsets: Tensor, kv_offsets: Tensor, q_len: int, kv_len: int) -> MaskMod:
    """The mask of nested sequences in packed positions."""
    of_q = torch.searchsorted(q_offsets, torch.arange(q_len, device=q_offsets.device), right=True) - 1
    of_k = torch.searchsorted(kv_offsets, torch.arange(kv_len, device=kv_offsets.device), right=True) - 1

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        mine, theirs = of_q[q], of_k[k]
        return (mine == theirs) & mask_mod(mine, h, q - q_offsets[mine], k - kv_offsets[theirs])

    return shown
