"""Tiles as torch tensors: a dense map of their kinds, and the ordered lists of a BlockMask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from frisket.lowering.analysis.tiles import FULL, PARTIAL

from .checks import ListError

SIDES = ("kv", "full_kv", "q", "full_q")
LISTS = tuple(f"{side}_{name}" for side in SIDES for name in ("num_blocks", "indices"))
TENSORS = (*LISTS, "dq_write_order", "dq_write_order_full", "dq_kv_order")

Lists = dict[str, Tensor | None]  # by the names of TENSORS
# torch 2.14 counts rows of tiles that a tensor picks as whole ones, and ends lists of columns with the keys
PACKED = hasattr(theirs.BlockMask, "_query_length_for_sliced_blocks")


def side(lists: Lists, name: str) -> tuple[Tensor, Tensor] | None:
    """(count, index) of one side, where there is one."""
    count, index = lists[f"{name}_num_blocks"], lists[f"{name}_indices"]
    return None if count is None or index is None else (count, index)


def kinds_of(lists: Lists, columns: int) -> Tensor:
    """uint8 [..., rows, columns]: 0 not listed, 1 listed, 2 listed as full. On the device, without waiting for it."""
    partial, full = side(lists, "kv"), side(lists, "full_kv")
    assert partial is not None
    kinds = PARTIAL * listed(*partial, columns)
    return kinds if full is None else torch.maximum(kinds, FULL * listed(*full, columns))


def columns_of(lists: Lists, kv_len: int | None, block: int) -> int:
    """How many columns of tiles there are. Lists are as long as there are columns, or, where `kv_len` says how many
    keys there are, as the longest row needs."""
    widths = [x.shape[-1] for x in (lists["kv_indices"], lists["full_kv_indices"]) if x is not None]
    return max(*widths, -(-(kv_len or 0) // block))


def listed(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """uint8 [..., rows, columns]: 1 where a row lists the column. What stands past the count is not read."""
    valid = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    at = torch.where(valid & (index < columns), index, columns).long()  # the rest goes one past the end
    grid = torch.zeros((*index.shape[:-1], columns + 1), dtype=torch.uint8, device=index.device)
    return grid.scatter_(-1, at, 1)[..., :columns].contiguous()


def ordered(grid: Tensor) -> tuple[Tensor, Tensor]:
    """(count, index), both int32: the columns where the grid is not 0, in order, and after them the others."""
    marks = (grid != 0).to(torch.int32)
    index = torch.argsort(marks, dim=-1, descending=True, stable=True)
    return marks.sum(dim=-1).to(torch.int32), index.to(torch.int32, memory_format=torch.contiguous_format)


def with_columns(lists: Lists, columns: int, kv_len: int | None = None, block: int = 1) -> Lists:
    """Lists of tiles by rows, and by columns, as many as torch makes of `kv_len` keys."""
    all_lists, columns = dict(lists), -(-kv_len // block) if PACKED and kv_len is not None else columns
    for mine, other in (("kv", "q"), ("full_kv", "full_q")):
        if (rows := side(lists, mine)) is not None:
            grid = listed(*rows, columns).transpose(-2, -1)
            all_lists[f"{other}_num_blocks"], all_lists[f"{other}_indices"] = ordered(grid)
    return all_lists


def with_orders(lists: Lists, descending: bool | None) -> Lists:
    """Lists of tiles, and the order in which columns of keys add to dQ."""
    all_lists = dict(lists)
    for name, of in (("dq_write_order", "q_indices"), ("dq_write_order_full", "full_q_indices")):
        if (index := lists[of]) is not None:
            read = (kinds_of(lists, index.shape[-2]) > 0).to(torch.int32)
            all_lists[name] = dq_write_order(read, index, bool(descending))
    return all_lists


def dq_write_order(read: Tensor, q_index: Tensor, descending: bool) -> Tensor:
    """int32, the shape of `q_index`: for every tile that a column of keys lists, which of its row's tiles it is in the
    order they add to dQ, from the first column or (`descending`) from the last. `read` [B, H, rows, columns] is 1
    where a tile is read."""
    upto = read.cumsum(dim=-1)
    rank = upto - read
    if descending:
        rank = upto[..., -1:] - 1 - rank
    rank = rank.transpose(-2, -1).expand(*q_index.shape[:2], -1, -1)
    return rank.gather(-1, q_index.long()).to(torch.int32)


def check_lists(lists: Lists, kv_len: int | None, block: int) -> None:
    """Refuse lists that do not fit together, and, where they are on the host, what they cannot mean."""
    count, index = lists["kv_num_blocks"], lists["kv_indices"]
    if index is None or count is None:
        raise ListError(f"{'kv_indices' if index is None else 'kv_num_blocks'} is None\n  both lists are needed")
    if index.dim() < 2:
        raise ListError(
            f"kv_indices has shape {tuple(index.shape)}\n"
            "  a BlockMask must have at least 2 dimensions: [B, H, rows, columns] of tiles, or [rows, columns]"
        )
    for axis in ("kv", "q"):
        n, i = (lists[f"full_{axis}_{name}"] for name in ("num_blocks", "indices"))
        if (n is None) != (i is None):
            raise ListError(
                f"full_{axis}_num_blocks and full_{axis}_indices must be both provided or omitted\n"
                f"  full_{axis}_{'num_blocks' if n is None else 'indices'} is missing"
            )
    columns = columns_of(lists, kv_len, block)
    for name in ("kv", "full_kv"):
        pair = side(lists, name)
        if pair is None:
            continue
        n, i = pair
        if i.shape[:-1] != index.shape[:-1] or n.shape != index.shape[:-1]:
            raise ListError(
                f"{name}_num_blocks has shape {tuple(n.shape)}, {name}_indices {tuple(i.shape)}\n"
                f"  for the rows of kv_indices, the first has {tuple(index.shape[:-1])}, the second one axis more"
            )
        if i.is_cpu and n.is_cpu and not torch.compiler.is_dynamo_compiling():
            _check_entries(name, n, i, columns)
    full = side(lists, "full_kv")
    if torch.compiler.is_dynamo_compiling():  # a graph has no values to look at
        return
    if full is not None and all(x.is_cpu for x in (count, index, *full)):
        both = (listed(count, index, columns) & listed(*full, columns)).nonzero()
        if len(both):
            *_, row, column = both[0].tolist()
            raise ListError(
                f"tile (row {row}, column {column}) is listed as partial and as full\n  its keys would count twice"
            )


def _check_entries(name: str, count: Tensor, index: Tensor, columns: int) -> None:
    width = index.shape[-1]
    if bool(((count < 0) | (count > width)).any()):
        raise ListError(f"{name}_num_blocks has entries outside 0..{width}, the length of a list")
    valid = torch.arange(width) < count[..., None]
    bad = valid & ((index < 0) | (index >= columns))
    if bool(bad.any()):
        raise ListError(
            f"{name}_indices lists column {int(index[bad][0])}\n  there are columns 0..{columns - 1}, of tiles"
        )
    if bool((listed(count, index, columns).sum(dim=-1) != count).any()):
        raise ListError(f"{name}_indices lists a column twice in one row\n  its keys would count twice")
