"""Masks made of a BlockMask: parts of it, crops, the same elsewhere, two in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from frisket.dsl.errors import ShapeError
from frisket.runtime.masks.mask import Mask

from .errors import ListError, OrderError
from .live_mask import LiveMask, live_mask
from .slicing import moved, picks
from .tile_tensors import LISTS, TENSORS, Lists, columns_of, with_columns, with_orders

if TYPE_CHECKING:
    from .block_mask import BlockMask


def part(mask: BlockMask, index: Any) -> BlockMask:
    """`mask[index]`. Rows of the user's lists are selected, as in torch; other masks are laid out again."""
    mask._now()  # whether its lists were written to
    _check_order(mask, "indexed")
    given, (q_len, kv_len) = mask._given, mask._lengths
    rows = -(-q_len // mask._block[0]) if given is None else mask.kv_indices.shape[-2]
    found = picks(index, (*mask._batch, rows))
    mod, length, short = moved(mask._mod.sized(mask._sizes), found, q_len, mask._block[0])
    batch = tuple(p.count for p in found[:-1])
    made = mask.of(mod, (length, kv_len), mask._block, batch, mask.device, mask)
    if given is None:
        return made
    if short:
        raise ListError("the row of tiles that the lengths cut is picked before others\n  pick it last")
    lists: Lists = {**dict.fromkeys(TENSORS)}
    for name in LISTS[:4]:
        if (x := given[name]) is not None:
            for axis, pick in enumerate(found):
                x = pick.select(x, axis)
            lists[name] = x
    if given["q_indices"] is not None:
        lists = with_columns(lists, columns_of(lists, kv_len, mask._block[1]))
    made._hold(with_orders(lists, mask.dq_kv_order_spt) if mask._orders else lists)
    return made


def crop(mask: BlockMask, lengths: tuple[int, int]) -> BlockMask:
    """The first queries and keys of it."""
    mask._now()
    _check_order(mask, "cut")
    mask._check_cover(lengths)
    made = mask.of(mask.live.sized(mask._sizes), lengths, mask._block, mask._batch, mask.device, mask)
    made._fn = mask._fn if mask._given is None else None
    return made


def there(mask: BlockMask, device: torch.device) -> BlockMask:
    """A copy of a mask on another device; what has been laid out is moved, not laid out again."""
    made = mask.of(mask._mod.to(device), mask._lengths, mask._block, mask._batch, device, mask)
    if all(made._mod.tensors[n] is x for n, x in mask._mod.tensors.items()):
        made._fn = mask._fn
    lists = mask._now().get("lists") or mask._given
    if lists is not None:
        lists = {n: x if x is None else x.to(device) for n, x in lists.items()}
        if mask._given is None:
            made._made = {"lists": lists}
        else:
            made._given = lists
    return made


def joined(op: str, mask: BlockMask, other: Any) -> BlockMask:
    """Two of one shape in one, or one with a mask_mod."""
    mod, batch = live_mask(other), mask._batch
    if isinstance(other, type(mask)):
        if (mask._lengths, mask._block) != (other._lengths, other._block):
            raise ShapeError(
                f"masks of {mask._lengths} in tiles of {mask._block} and of {other._lengths} in tiles of "
                f"{other._block}\n  lay both out alike"
            )
        mod, batch = mod.sized(other._sizes), tuple(torch.broadcast_shapes(batch, other._batch))  # type: ignore[no-untyped-call]
    both = mask.live.sized(mask._sizes).join(op, mod)
    return mask.of(both, mask._lengths, mask._block, batch, mask.device, mask)


def restored(kind: type[BlockMask], mod: Mask, values: dict[str, Any], state: dict[str, Any]) -> BlockMask:
    """A mask read from a pickle."""
    made = kind.of(LiveMask(mod.expr, values), state["_lengths"], state["_block"], state["_batch"], state["_device"])
    made.__dict__.update(state)
    return made


def _check_order(mask: BlockMask, what: str) -> None:
    if (mask._given or {}).get("dq_kv_order") is not None:
        raise OrderError(
            f"a BlockMask with a tensor dq_kv_order is {what}\n  the order is of these lists alone: make another "
            "BlockMask with the dq_write_order that belongs to it"
        )
