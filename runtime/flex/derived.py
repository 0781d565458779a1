"""Masks made of a BlockMask: parts of it, crops, the same elsewhere, two in one.

A slice is what `block_mask[batch, head, rows]` picks, and where that is in the whole mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import Expr, lit, var
from frisket.runtime.masks.mask import Mask

from .checks import ListError, OrderError, PickError
from .tensor_mask import TensorMask, Value, fresh, tensor_mask_of
from .tile_tensors import LISTS, PACKED, TENSORS, Lists, columns_of, with_columns, with_orders

if TYPE_CHECKING:
    from .block_mask import BlockMask


AXES = ("batch entry", "head", "row of tiles")


@dataclass(frozen=True)
class Pick:
    """Entries of one axis: `start .. start + count`, or the `count` entries `at`, from a tensor where `whole_rows`.
    `whole` is all of them in order."""

    start: int
    count: int
    of: int
    at: Tensor | None = None
    whole_rows: bool = False

    @property
    def whole(self) -> bool:
        return self.at is None and self.count == self.of

    def select(self, x: Tensor, axis: int) -> Tensor:
        if self.at is None:
            return x.narrow(axis, self.start, self.count)
        return x.index_select(axis, self.at.to(x.device))


def picks(index: Any, sizes: Sequence[int]) -> list[Pick]:
    """One pick for every axis: `sizes` are batch entries, heads (as far as there are any) and rows of tiles."""
    indices = index if isinstance(index, tuple) else (index,)
    dots = [i for i, x in enumerate(indices) if x is Ellipsis]
    if len(indices) - len(dots) > len(sizes) or len(dots) > 1:
        axes = ", ".join(AXES[-len(sizes) :])
        raise PickError(f"block_mask[...] with {len(indices)} indices\n  there are {len(sizes)}: [{axes}]")
    missing = [slice(None)] * (len(sizes) - len(indices) + len(dots))
    at = dots[0] if dots else len(indices)
    indices = (*indices[:at], *missing, *indices[at + 1 :])
    if sum(isinstance(x, Tensor | list) for x in indices) > 1:
        raise PickError(
            "block_mask[...] with two tensors\n  torch would pair them up, which is no mask of [batch, head, rows] any "
            "more: pick along one axis at a time, block_mask[first][:, second]"
        )
    return [_pick(x, n, name) for x, n, name in zip(indices, sizes, AXES[-len(sizes) :], strict=True)]


def _pick(index: Any, n: int, name: str) -> Pick:
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, Tensor) and index.ndim == 0 and index.dtype is not torch.bool:
        index = index.reshape(1) if torch.compiler.is_dynamo_compiling() else int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        if not -n <= index < n:
            raise PickError(f"{name} {index}\n  there are {n}: {-n}..{n - 1}")
        return Pick(index % n, 1, n)
    if isinstance(index, slice):
        entries = range(n)[index]
        if not entries:
            raise PickError(f"{name} {_text(index)} picks nothing of {n}")
        return Pick(
            entries[0], len(entries), n, None if entries.step == 1 or len(entries) == 1 else torch.tensor(entries)
        )
    if isinstance(index, Tensor) and index.ndim == 1 and not index.is_floating_point():
        return _entries(index, n, name)
    what = f"a tensor of {index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else repr(index)
    raise PickError(f"{name} {what}\n  an index is an int, a slice, or a tensor of one axis of ints or bools")


def _entries(at: Tensor, n: int, name: str) -> Pick:
    if at.dtype is torch.bool:
        if len(at) != n:
            raise PickError(f"{name}s by {len(at)} bools\n  there are {n}")
        at = at.nonzero()[:, 0]
    if not len(at):
        raise PickError(f"{name} [] picks nothing of {n}")
    if not torch.compiler.is_dynamo_compiling() and at.is_cpu and bool(((at < -n) | (at >= n)).any()):
        raise PickError(f"{name} {at.tolist()}\n  there are {n}: {-n}..{n - 1}")
    return Pick(0, len(at), n, torch.where(at < 0, at + n, at).long(), PACKED)


def _text(index: slice) -> str:
    return ":".join("" if x is None else str(x) for x in (index.start, index.stop))


def picked_mask(mod: TensorMask, picks: Sequence[Pick], q_len: int, block: int) -> tuple[TensorMask, int, bool]:
    """The mask in positions of what was picked, its queries, and whether some before the last are past the end."""
    places: dict[Expr, Expr] = {}
    values: dict[str, Value] = {}

    def table(name: str, at: Tensor, index: Expr) -> Expr:
        name = fresh(name, {*mod.values, *values})
        values[name] = at
        return ir.lookup(name, (index,))

    *batch, rows = picks
    for name, pick in zip("bh"[2 - len(batch) :], batch, strict=True):
        if pick.whole:
            continue
        if pick.at is not None:
            places[var(name)] = table(f"{name}_of", pick.at, ir.ZERO if pick.count == 1 else var(name))
        else:
            places[var(name)] = lit(pick.start) if pick.count == 1 else var(name) + pick.start
    if rows.whole:
        return mod.at(places, values), q_len, False
    q, size = var("q"), lit(block)
    if rows.at is None:
        places[q] = q + rows.start * block if rows.start else q
        return mod.at(places, values), min(rows.count * block, q_len - rows.start * block), False
    places[q] = table("row_of", rows.at, ir.build("floordiv", q, size)) * block + ir.build("mod", q, size)
    mask, length, cut = mod.at(places, values), rows.count * block, rows.of * block - q_len
    if not cut:
        return mask, length, False
    short = (rows.at == rows.of - 1).tolist()
    if short[-1] and not rows.whole_rows:
        length, short = length - cut, short[:-1]
    if not any(short):
        return mask, length, False
    inside = TensorMask(places[q] < q_len, {n: x for n, x in values.items() if n.startswith("row_of")})
    return mask.join("and", inside), length, True


def part(mask: BlockMask, index: Any) -> BlockMask:
    """`mask[index]`. Rows of the user's lists are selected, as in torch; other masks are laid out again."""
    mask._now()  # whether its lists were written to
    _check_order(mask, "indexed")
    user_lists, (q_len, kv_len) = mask._user_lists, mask._lengths
    rows = -(-q_len // mask._block[0]) if user_lists is None else mask.kv_indices.shape[-2]
    selection = picks(index, (*mask._batch, rows))
    mod, length, short = picked_mask(mask._mod.sized(mask._sizes), selection, q_len, mask._block[0])
    picked = mask.of(mod, (length, kv_len), mask._block, tuple(p.count for p in selection[:-1]), mask.device, mask)
    if user_lists is None:
        return picked
    if short and not selection[-1].whole_rows:
        raise ListError("the row of tiles that the lengths cut is picked before others\n  pick it last")
    lists: Lists = {**dict.fromkeys(TENSORS)}
    for name in LISTS[:4]:
        if (x := user_lists[name]) is not None:
            for axis, pick in enumerate(selection):
                x = pick.select(x, axis)
            lists[name] = x
    if user_lists["q_indices"] is not None:
        lists = with_columns(lists, columns_of(lists, kv_len, mask._block[1]), kv_len, mask._block[1])
    picked._hold(with_orders(lists, mask.dq_kv_order_spt) if mask._orders else lists)
    return picked


def crop(mask: BlockMask, lengths: tuple[int, int]) -> BlockMask:
    """The first queries and keys of it."""
    mask._now()
    _check_order(mask, "cut")
    mask._check_cover(lengths)
    cropped = mask.of(mask.tensor_mask.sized(mask._sizes), lengths, mask._block, mask._batch, mask.device, mask)
    cropped._fn = mask._fn if mask._user_lists is None else None
    return cropped


def there(mask: BlockMask, device: torch.device) -> BlockMask:
    """A copy of a mask on another device; what has been laid out is moved, not laid out again."""
    copy = mask.of(mask._mod.to(device), mask._lengths, mask._block, mask._batch, device, mask)
    if all(copy._mod.tensors[n] is x for n, x in mask._mod.tensors.items()):
        copy._fn = mask._fn
    lists = mask._now().get("lists") or mask._user_lists
    if lists is not None:
        lists = {n: x if x is None else x.to(device) for n, x in lists.items()}
        if mask._user_lists is None:
            copy._results = {"lists": lists}
        else:
            copy._user_lists = lists
    return copy


def joined(op: str, mask: BlockMask, other: Any) -> BlockMask:
    """Two of one shape in one, or one with a mask_mod."""
    mod, batch = tensor_mask_of(other), mask._batch
    if isinstance(other, type(mask)):
        if (mask._lengths, mask._block) != (other._lengths, other._block):
            raise ShapeError(
                f"masks of {mask._lengths} in tiles of {mask._block} and of {other._lengths} in tiles of "
                f"{other._block}\n  lay both out alike"
            )
        mod, batch = mod.sized(other._sizes), tuple(torch.broadcast_shapes(batch, other._batch))  # type: ignore[no-untyped-call]
    both = mask.tensor_mask.sized(mask._sizes).join(op, mod)
    return mask.of(both, mask._lengths, mask._block, batch, mask.device, mask)


def restored(kind: type[BlockMask], mod: Mask, values: dict[str, Any], state: dict[str, Any]) -> BlockMask:
    """A mask read from a pickle."""
    mask = kind.of(TensorMask(mod.expr, values), state["_lengths"], state["_block"], state["_batch"], state["_device"])
    mask.__dict__.update(state)
    return mask


def _check_order(mask: BlockMask, what: str) -> None:
    if (mask._user_lists or {}).get("dq_kv_order") is not None:
        raise OrderError(
            f"a BlockMask with a tensor dq_kv_order is {what}\n  the order is of these lists alone: make another "
            "BlockMask with the dq_write_order that belongs to it"
        )
