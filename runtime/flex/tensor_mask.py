"""A mask over tensors that are the user's own: read when they are needed, as they are then.

torch calls a mask_mod again at every use; its tensors may change in place between two calls. A TensorMask
keeps the expression and the tensors themselves, copies nothing, and says when one of them has changed.

Below it are tiles as tensors: a dense map of their kinds, and the ordered lists of a BlockMask, a picture.

>>> import torch
>>> print(tile_string(torch.tensor([[1, 0, 0], [2, 1, 0], [2, 2, 1]], dtype=torch.uint8)))
()
▒▒
██▒▒
████▒▒
<BLANKLINE>
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.functional import pad

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, TraceError
from frisket.dsl.from_python.trace import Kind, trace
from frisket.dsl.ir import Expr
from frisket.grammar.memo import memo
from frisket.lowering.analysis.layout import bind
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.lowering.plan import Sizes
from frisket.lowering.simplify import simplify
from frisket.runtime.calls.arrays import version_of
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.export.tile_lists import written
from frisket.runtime.machine.parameters import BoundExpr, as_value, kind_of
from frisket.runtime.masks.mask import Mask, MaskLike, mask, only
from frisket.runtime.torch.spec import text_of

from .checks import ListError, MaskModError

Value = bool | int | float | torch.Tensor


@dataclass(frozen=True, eq=False)
class TensorMask:
    """`values` hold a tensor for every table and captured scalar of `expr`, numbers for the other parameters. `read`
    are tensors whose values went into `expr` when it was traced, with the versions they had."""

    expr: Expr
    values: Mapping[str, Value]
    read: tuple[tuple[torch.Tensor, Any], ...] = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: x for n, x in self.values.items() if isinstance(x, torch.Tensor)}

    @property
    def numbers(self) -> dict[str, bool | int | float]:
        return {n: x for n, x in self.values.items() if not isinstance(x, torch.Tensor)}

    @property
    def versions(self) -> tuple[Any, ...]:
        """A key that changes with the tensors: equal as long as nothing was written to them."""
        for x, version in self.read:
            if version_of(x, wait=True) != version:
                text = f"a tensor of {x.dtype} {list(x.shape)} has changed since the mask was traced, and its values "
                text += "are part of the traced expression\n  make the mask again; lookups, `x[q_idx]`, are read at "
                raise ParameterError(f"{text}every use")
        return tuple(map(version_of, self.tensors.values()))

    @property
    def text(self) -> str:
        """The mask as a program without its tensors: what a graph of torch holds, and guards."""
        # kinds: 1, 1.0 and True are equal keys
        return _text(self.expr, tuple((n, kind_of(x), x) for n, x in self.numbers.items()))

    @cached_property
    def formula(self) -> Mask:
        """The mask with its tensors left open: nothing is read, nothing copied."""
        return Mask(self.expr, self.numbers)

    def mask(self) -> Mask:
        """The mask with its values as they are now, copied to the host."""
        return Mask(self.expr, {**self.numbers, **{n: as_value(n, x) for n, x in self.tensors.items()}})

    def to(self, device: torch.device) -> TensorMask:
        return replace(self, values={**self.numbers, **{n: x.to(device) for n, x in self.tensors.items()}})

    def at(self, places: Mapping[Expr, Expr], values: Mapping[str, Value] | None = None) -> TensorMask:
        """A mask with other expressions for its variables; expressions may read `values`."""
        return only_read(ir.substitute(self.expr, places), {**self.values, **(values or {})}, self.read)

    def sized(self, sizes: Sizes) -> TensorMask:
        """A mask with the lengths of the whole problem written in."""
        return self.at({ir.var(n): ir.lit(int(s)) for n, s in zip(ir.SIZES, sizes, strict=True)})

    def within(self, kinds: torch.Tensor, batch: tuple[int, ...], block: tuple[int, int]) -> TensorMask:
        """The positions visible by lists of tiles: all of a full one, and what the mask shows of a partial one. `kinds`
        [*batch, rows, columns] are 0 empty, 1 partial, 2 full."""
        name = fresh("tiles", {*self.values})
        # a B or H of 1 serves every index
        at = [ir.ZERO if n == 1 else ir.var(x) for x, n in zip("bh"[2 - len(batch) :], batch, strict=True)]
        q, k = (ir.build("floordiv", ir.var(x), ir.lit(size)) for x, size in zip("qk", block, strict=True))
        kind = ir.lookup(name, (*at, q, k))
        full, partial = (ir.build("eq", kind, ir.lit(n)) for n in (FULL, PARTIAL))
        expr = ir.disj(full, ir.conj(partial, self.expr))
        return replace(self, expr=expr, values={**self.values, name: kinds})

    def plainly_inside(self, sizes: Sizes) -> bool:
        """Whether every lookup is at bare coordinates that its table reaches: no value is needed to say so."""
        reach = dict(zip("bhqk", sizes, strict=True))
        for node in ir.walk(self.expr):
            if node.op != "lookup":
                continue
            table = self.values[node.name]
            assert isinstance(table, torch.Tensor)
            for index, size in zip(node.args, table.shape, strict=True):
                if index.op != "var" or reach.get(index.name, size + 1) > size:  # a name of unknown reach is outside
                    return False
        return True

    def join(self, op: str, other: TensorMask) -> TensorMask:
        """One mask made of two; a name that stands for two things is numbered on the right."""
        names: dict[str, str] = {}
        used = {*self.values, *other.values}
        for name in sorted(self.values.keys() & other.values.keys()):
            if not _same(self.values[name], other.values[name]):
                names[name] = fresh(name, used)
                used.add(names[name])
        right = {names.get(n, n): x for n, x in other.values.items()}
        expr = ir.build(op, self.expr, ir.renamed(other.expr, names))
        return TensorMask(expr, {**self.values, **right}, self.read + other.read)

    def callable(self, reach: Mapping[str, int], sizes: Sizes, title: str, device: Any) -> Callable[..., Any]:
        """`mask_mod(b, h, q_idx, kv_idx)`, which looks into the tensors themselves where torch can."""
        places: dict[Expr, Expr] = {}
        for name, type in ir.free_names(self.expr)[0].items():
            x = self.values[name]  # a captured scalar is read as a table of one entry
            number = ir.lookup(name, (ir.ZERO,), type) if isinstance(x, torch.Tensor) else ir.lit(x)
            places[ir.param(name, type)] = number
        # detached, or a function that stays would hold the graph of a gradient
        tensors = {n: x.detach() if x.ndim else x.detach().reshape(1) for n, x in self.tensors.items()}
        tables = {n: as_value(n, x) for n, x in tensors.items()}
        e = simplify(bind(ir.substitute(self.sized(sizes).expr, places), tables))
        return written(e, tables, reach, sizes, title, device, tensors)


@memo(group="sources")
def _text(e: Expr, numbers: tuple[tuple[str, Any, Any], ...]) -> str:
    return text_of(CallProgram(Mask(e, {n: x for n, _, x in numbers}), None), ())


def only_read(expr: Expr, values: Mapping[str, Value], read: tuple[tuple[torch.Tensor, Any], ...] = ()) -> TensorMask:
    """A mask with those of the values that it reads."""
    return TensorMask(expr, only(values, expr), read)


def fresh(name: str, used: set[str]) -> str:
    """The name, or the same with a number where it is taken."""
    candidate, number = name, 1
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _same(x: Value, y: Value) -> bool:
    return x is y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else type(x) is type(y) and x == y


def tensor_mask_of(source: MaskLike | TensorMask) -> TensorMask:
    """A mask from a mask_mod, which is traced, a text, an Expr or a `frisket.Mask`, whose arrays become tensors."""
    if isinstance(source, TensorMask):
        return source
    if isinstance(attached := getattr(source, "tensor_mask", None), TensorMask):  # of `and_masks`, or a BlockMask
        return attached
    if callable(source):
        return of_function(source, "mask")
    if not isinstance(source, str | Expr | Mask):
        text = f"mask_mod is {type(source).__name__}\n  it is a function `mask_mod(b, h, q_idx, kv_idx)`, a text as "
        raise MaskModError(f'{text}"causal & window(256)", or a frisket.Mask')
    return of_bound(mask(source))


def of_bound(bound: BoundExpr) -> TensorMask:
    """A mask from one of frisket's own; a captured tensor stays, other arrays become tensors."""
    bound.require_bound()
    captured = {n: x for n, x in bound.origin.captured.items() if isinstance(x, torch.Tensor)}
    # the user's tensors replace the copies in `tables`
    return TensorMask(bound.expr, {**bound.scalars, **{n: _tensor(x) for n, x in bound.tables.items()}, **captured})


def of_function(fn: Callable[..., Any], kind: Kind | None) -> TensorMask:
    """A mask from a function of torch; `MaskModError` where it is none. With no `kind`, a score mod's score, too."""
    recorded = torch.compiler.is_compiling()  # by an export that runs Python: tensors have no values there
    try:
        traced = trace(fn, kind, valueless=recorded, by_place=True)
    except TraceError as error:
        raise MaskModError(str(error)) from error
    values = {n: _tensor(x) for n, x in traced.tables.items()}
    return only_read(traced.expr, values, tuple((x, version_of(x, wait=True)) for x in traced.read))


def _tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    x = as_value("table", x)
    if not isinstance(x, np.ndarray):
        return torch.tensor(x)
    try:
        return torch.from_numpy(x.copy())  # from_numpy shares memory, and warns of read-only arrays
    except TypeError:
        raise ParameterError(f"torch has no tensors of {x.dtype}; give the table as int64, float32 or bool") from None


# -- tiles as tensors -----------------------------------------------------------------------------------

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
    index = torch.argsort(marks, dim=-1, descending=True, stable=True)  # stable: columns ascend
    # the grid may be transposed, and `to` would give index its strides
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
    """int32, the shape of `q_index`. For every tile that a column of keys lists: which of its row's tiles it is in the
    order they add to dQ. It counts from the first column or (`descending`) from the last. `read` [B, H, rows, columns]
    is 1 where a tile is read."""
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
        text = f"kv_indices has shape {tuple(index.shape)}\n  a BlockMask "
        raise ListError(f"{text}must have at least 2 dimensions: [B, H, rows, columns] of tiles, or [rows, columns]")
    for axis in ("kv", "q"):
        n, i = (lists[f"full_{axis}_{name}"] for name in ("num_blocks", "indices"))
        if (n is None) != (i is None):
            text = f"full_{axis}_num_blocks and full_{axis}_indices must be both provided or omitted\n"
            raise ListError(f"{text}  full_{axis}_{'num_blocks' if n is None else 'indices'} is missing")
    columns = columns_of(lists, kv_len, block)
    for name in ("kv", "full_kv"):
        pair = side(lists, name)
        if pair is None:
            continue
        n, i = pair
        if i.shape[:-1] != index.shape[:-1] or n.shape != index.shape[:-1]:
            text = f"{name}_num_blocks has shape {tuple(n.shape)}, {name}_indices {tuple(i.shape)}\n  for the rows "
            raise ListError(f"{text}of kv_indices, the first has {tuple(index.shape[:-1])}, the second one axis more")
        if i.is_cpu and n.is_cpu and not torch.compiler.is_dynamo_compiling():  # values on a device are not waited for
            _check_entries(name, n, i, columns)
    full = side(lists, "full_kv")
    if torch.compiler.is_dynamo_compiling():  # a graph has no values to look at
        return
    if full is not None and all(x.is_cpu for x in (count, index, *full)):
        both = (listed(count, index, columns) & listed(*full, columns)).nonzero()
        if len(both):
            *_, row, column = both[0].tolist()
            text = f"tile (row {row}, column {column}) is listed as partial and as full\n  its keys would count twice"
            raise ListError(text)


def _check_entries(name: str, count: Tensor, index: Tensor, columns: int) -> None:
    width = index.shape[-1]
    if bool(((count < 0) | (count > width)).any()):
        raise ListError(f"{name}_num_blocks has entries outside 0..{width}, the length of a list")
    bad = (torch.arange(width) < count[..., None]) & ((index < 0) | (index >= columns))
    if bool(bad.any()):
        text = f"{name}_indices lists column {int(index[bad][0])}\n  there are columns 0..{columns - 1}, of tiles"
        raise ListError(text)
    if bool((listed(count, index, columns).sum(dim=-1) != count).any()):
        raise ListError(f"{name}_indices lists a column twice in one row\n  its keys would count twice")


LEGEND = "█ full, ▒ partial (█ or ▒: every tile of the cell is computed), ░ some of the cell, blank none"


def tile_string(kinds: Tensor, grid_size: int | tuple[int, int] | None = (20, 20), limit: int = 4) -> str:
    """`kinds` uint8 [..., rows, columns]: 0 empty, 1 partial, 2 full. A cell stands for the tiles of a rectangle, as
    many as make the picture fit `grid_size` = (rows, columns); None or -1 draws every tile."""
    *batch, rows, columns = kinds.shape
    fit = (-1, -1) if grid_size is None else (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    step = tuple(max(1, -(-n // m)) if m > 0 else 1 for n, m in zip((rows, columns), fit, strict=True))
    pictures = []
    for index in islice(product(*map(range, batch)), limit):
        lines = ["".join(2 * c for c in line) + "\n" for line in _cells(kinds[index], step)]
        pictures.append(f"{index}\n{''.join(lines)}")
    if math.prod(batch) > limit:
        pictures += [
            "...",
            "To print out more, set BlockMask.to_string(limit=N)",
            "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
        ]
    return "\n".join(pictures)


def _cells(kinds: Tensor, step: tuple[int, ...]) -> list[str]:
    """A character for every cell of one picture."""
    kinds = kinds.cpu()  # one copy, not one for every cell
    rows, columns = kinds.shape
    inside = torch.ones_like(kinds)

    def total(x: Tensor) -> Tensor:
        # of what lies past the edge nothing is counted, not even as a tile
        x = pad(x.long(), (0, -columns % step[1], 0, -rows % step[0]))
        return x.view(-1, step[0], x.shape[1] // step[1], step[1]).sum(dim=(1, 3))

    tiles, read, full = total(inside), total(kinds > 0), total(kinds == FULL)
    marks = torch.where(full == tiles, 3, torch.where(read == tiles, 2, (read > 0).long()))
    return ["".join(" ░▒█"[c] for c in line) for line in marks.tolist()]
