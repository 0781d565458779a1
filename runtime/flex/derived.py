"""Masks made of a BlockMask: parts of it, crops, the same elsewhere, two in one.

A slice is what `block_mask[batch, head, rows]` picks, and where that is in the whole mask.

In a graph of torch a mask holds lists of tiles and a function, both of the graph. The functions for that are the last
ones; Dynamo traces them, so they are plain Python. What a mask shows is not read there as an expression: the operators
of the graph do so when they are written, see `graph`. A mask that leaves the graph is traced when somebody asks for its
expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import Expr, lit, var
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.runtime.masks.mask import Mask, program

from . import tensor_mask
from .checks import ListError, MaskModError, OrderError, PickError
from .tensor_mask import LISTS, TENSORS, Lists, TensorMask, Value

if TYPE_CHECKING:
    from .block_mask import BlockMask


MaskMod = Callable[..., Any]
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
        text = "block_mask[...] with two tensors\n  torch would pair them up, which is no mask of [batch, head, rows] "
        raise PickError(f"{text}any more: pick along one axis at a time, block_mask[first][:, second]")
    return [_pick(x, n, name) for x, n, name in zip(indices, sizes, AXES[-len(sizes) :], strict=True)]


def _pick(index: Any, n: int, name: str) -> Pick:
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, Tensor) and index.ndim == 0 and index.dtype is not torch.bool:
        # int() of it would break the graph
        index = index.reshape(1) if torch.compiler.is_dynamo_compiling() else int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        if not -n <= index < n:
            raise PickError(f"{name} {index}\n  there are {n}: {-n}..{n - 1}")
        return Pick(index % n, 1, n)
    if isinstance(index, slice):
        entries = range(n)[index]
        if not entries:
            raise PickError(f"{name} {_text(index)} picks nothing of {n}")
        # a step of 1 needs no tensor: `narrow` is a view
        at = None if entries.step == 1 or len(entries) == 1 else torch.tensor(entries)
        return Pick(entries[0], len(entries), n, at)
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
    # values on a device are not waited for
    if not torch.compiler.is_dynamo_compiling() and at.is_cpu and bool(((at < -n) | (at >= n)).any()):
        raise PickError(f"{name} {at.tolist()}\n  there are {n}: {-n}..{n - 1}")
    return Pick(0, len(at), n, torch.where(at < 0, at + n, at).long(), tensor_mask.PACKED)


def _text(index: slice) -> str:
    return ":".join("" if x is None else str(x) for x in (index.start, index.stop))


def picked_mask(mod: TensorMask, picks: Sequence[Pick], q_len: int, block: int) -> tuple[TensorMask, int, bool]:
    """The mask in positions of what was picked, its queries, and whether some before the last are past the end."""
    places: dict[Expr, Expr] = {}
    values: dict[str, Value] = {}

    def table(name: str, at: Tensor, index: Expr) -> Expr:
        name = tensor_mask.fresh(name, {*mod.values, *values})
        values[name] = at
        return ir.lookup(name, (index,))

    *batch, rows = picks
    for name, pick in zip("bh"[2 - len(batch) :], batch, strict=True):
        if pick.whole:
            continue
        if pick.at is not None:
            # one entry serves every b
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
    # only the last row of tiles reaches past the end: without it there is nothing to hide
    short = (rows.at == rows.of - 1).tolist()
    if short[-1] and not rows.whole_rows:  # up to torch 2.13 a cut row that is picked last ends the mask
        length, short = length - cut, short[:-1]
    if not any(short):
        return mask, length, False
    inside = TensorMask(places[q] < q_len, {n: x for n, x in values.items() if n.startswith("row_of")})
    return mask.join("and", inside), length, True


def part(mask: BlockMask, index: Any) -> BlockMask:
    """`mask[index]`. Rows of the user's lists are selected, as in torch; other masks are laid out again."""
    if torch.compiler.is_dynamo_compiling():
        return _part_in_graph(mask, index)
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
    _hold_picked(picked, user_lists, selection)
    return picked


def _hold_picked(mask: BlockMask, lists: Lists, selection: Sequence[Pick]) -> None:
    """Give a mask the lists of the batch entries, heads and rows of tiles that are picked of `lists`."""
    picked: Lists = dict.fromkeys(TENSORS)
    for name in LISTS[:4]:
        if (x := lists[name]) is not None:
            for axis, pick in enumerate(selection):
                x = pick.select(x, axis)
            picked[name] = x
    if lists["q_indices"] is not None:
        kv_len, block = mask._lengths[1], mask._block[1]
        picked = tensor_mask.with_columns(picked, tensor_mask.columns_of(picked, kv_len, block), kv_len, block)
    mask._hold(tensor_mask.with_orders(picked, mask.dq_kv_order_spt) if mask._orders else picked)


def crop(mask: BlockMask, lengths: tuple[int, int]) -> BlockMask:
    """The first queries and keys of it."""
    if torch.compiler.is_dynamo_compiling():
        return _crop_in_graph(mask, lengths)
    mask._now()  # lists that were written to become the user's
    _check_order(mask, "cut")
    mask._check_cover(lengths)
    cropped = mask.of(mask.tensor_mask.sized(mask._sizes), lengths, mask._block, mask._batch, mask.device, mask)
    # the user's function does not know of lists, which are part of the expression by then
    cropped._fn = mask._fn if mask._user_lists is None else None
    return cropped


def on_device(mask: BlockMask, device: torch.device) -> BlockMask:
    """A copy of a mask on another device; what has been laid out is moved, not laid out again."""
    if torch.compiler.is_dynamo_compiling():
        return _on_device_in_graph(mask, device)
    copy = mask.of(mask._mod.to(device), mask._lengths, mask._block, mask._batch, device, mask)
    # nothing moved: the user's function still reads the right tensors
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
    if torch.compiler.is_dynamo_compiling():
        return _joined_in_graph(op, mask, other)
    mod, batch = tensor_mask.tensor_mask_of(other), mask._batch
    if isinstance(other, type(mask)):
        if (mask._lengths, mask._block) != (other._lengths, other._block):
            text = f"masks of {mask._lengths} in tiles of {mask._block} and of {other._lengths} in tiles of "
            raise ShapeError(f"{text}{other._block}\n  lay both out alike")
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
        text = f"a BlockMask with a tensor dq_kv_order is {what}\n  the order is of these lists alone: make another "
        raise OrderError(f"{text}BlockMask with the dq_write_order that belongs to it")


# -- in a graph of torch -------------------------------------------------------------------------------


def function_or_text(mask_mod: Any) -> tuple[MaskMod | None, str | None]:
    """A mask_mod as a graph holds it."""
    if isinstance(mask_mod, str):
        return None, mask_mod
    if callable(mask_mod) and not isinstance(mask_mod, TensorMask):
        return mask_mod, None
    text = f"mask_mod is {type(mask_mod).__name__}, in a graph of torch\n  a graph takes a function "
    raise MaskModError(f"{text}`mask_mod(b, h, q_idx, kv_idx)` or a text: make masks of anything else outside")


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
        # a text has no tensors, so that any device does
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
        lists[f"{name}_num_blocks"], lists[f"{name}_indices"] = tensor_mask.ordered(grid)
    return tensor_mask.with_columns(lists, kinds.shape[-1]) if columns else lists


def laid_out(mask: BlockMask) -> Lists:
    """The lists of a mask that a graph made of a function or text."""
    from .graph import tiles  # imports torch._dynamo, which few programs need

    lists = lists_of(tiles(mask), mask._separate_full, mask._columns)
    return tensor_mask.with_orders(lists, mask.dq_kv_order_spt) if mask._orders else lists


def visible(mask: BlockMask) -> MaskMod:
    """The whole mask as a function: its mask_mod, and the tiles of lists that a user gave."""
    mask_mod = mask.mask_mod
    if mask._user_lists is None:
        return mask_mod
    kinds, (rows, columns) = mask._kinds(), mask._block
    several = [n > 1 for n in (1, 1, *mask._batch)[-2:]]  # a B or H of 1 serves every index
    kinds = kinds.reshape((1, 1, *kinds.shape)[-4:])  # B and H, which lists may lack

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        kind = kinds[b if several[0] else 0, h if several[1] else 0, q // rows, k // columns]
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q, k))

    return shown


def _joined_in_graph(op: str, mask: BlockMask, other: Any) -> BlockMask:
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

    return _with_function(mask, both, mask._lengths, batch)


def inverted(mask: BlockMask) -> BlockMask:
    mine = visible(mask)
    return _with_function(mask, lambda b, h, q, k: ~mine(b, h, q, k), mask._lengths, mask._batch)


def _crop_in_graph(mask: BlockMask, lengths: tuple[int, int]) -> BlockMask:
    """The first queries and keys of a mask."""
    cropped = _with_function(mask, mask.mask_mod, lengths, mask._batch)
    if mask._user_lists is not None:
        mask._check_cover(lengths)
        rows, columns = (-(-n // size) for n, size in zip(lengths, mask._block, strict=True))
        cropped._hold(lists_of(mask._kinds()[..., :rows, :columns], mask._separate_full, mask._columns))
    return cropped


def _on_device_in_graph(mask: BlockMask, device: Any) -> BlockMask:
    """The mask with its lists on another device. Tensors of its function stay where they are, as in torch."""
    copy = _with_function(mask, mask.mask_mod, mask._lengths, mask._batch)
    copy._device = torch.device(device)
    copy._hold({n: None if x is None else x.to(device) for n, x in mask._tensors().items()})
    return copy


def _part_in_graph(mask: BlockMask, index: Any) -> BlockMask:
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
        return shown & (place < q_len) if q_len % size else shown  # only the last row of tiles reaches past the end

    length = rows.count * size
    if rows.whole:
        length = q_len
    elif rows.at is None:
        length = min(length, q_len - rows.start * size)
    picked = _with_function(mask, picked_mod, (length, kv_len), tuple(p.count for p in entries))
    _hold_picked(picked, lists, selection)
    return picked


def _place(pick: Pick, x: Tensor) -> Any:
    if pick.whole:
        return x
    if pick.at is not None:
        return pick.at[x] if pick.count > 1 else pick.at[0]
    return x + pick.start if pick.count > 1 else torch.full_like(x, pick.start)  # mask_mod expects a tensor


def _with_function(mask: BlockMask, fn: MaskMod, lengths: tuple[int, int], batch: tuple[int, ...]) -> BlockMask:
    """A mask of a graph with another function, and the tiles and device of `mask`."""
    other = mask.of(None, lengths, mask._block, batch, mask._device, mask)
    other._fn = fn
    return other


def packed_in_graph(mask_mod: MaskMod, q_offsets: Tensor, kv_offsets: Tensor, q_len: int, kv_len: int) -> MaskMod:
    """The mask of nested sequences in packed positions."""
    # right: behind empty sequences that begin at the same token
    of_q = torch.searchsorted(q_offsets, torch.arange(q_len, device=q_offsets.device), right=True) - 1
    of_k = torch.searchsorted(kv_offsets, torch.arange(kv_len, device=kv_offsets.device), right=True) - 1

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        mine, theirs = of_q[q], of_k[k]
        return (mine == theirs) & mask_mod(mine, h, q - q_offsets[mine], k - kv_offsets[theirs])

    return shown
