"""Tiles as ordered lists: for every row of tiles how many it reads, and which, the read ones first.

The shape of torch's `BlockMask` and of FlashAttention 4's block-sparse tensors. Made from runs on the device
itself, without a dense tile map and without sorting tiles. Lists of a `BlockMask` are bit for bit those of
`create_block_mask`, and its `mask_mod` is made from the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.dsl.ir import SIZES, Expr, free_names, lit, lookup, param, renamed, substitute, var
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.lowering.kernels.torch_mask_mod import mask_mod
from frisket.lowering.plan import Sizes, make_plan
from frisket.lowering.simplify import simplify
from frisket.runtime.layouts.tiling import RunTable, Tiling
from frisket.runtime.machine.extras import extras
from frisket.runtime.machine.generated import load

from .visible import scene

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


Array = NDArray[Any]
Tensor = Any
MEMORY = 1 << 33  # bytes of lists that are still made


@dataclass(frozen=True)
class Lists:
    """`count` int32 [B, H, rows], `index` int32 [B, H, rows, capacity], on one device; B or H is 1 if all are alike."""

    count: Tensor
    index: Tensor


Tail = Literal["rest", "zero"]


def both_ways(
    layout: Tiling, device: Any, tail: Tail, name: str, *, compact: bool = False, apart: bool = True
) -> list[Lists]:
    """Lists of PARTIAL and of FULL tiles, forward and then transposed; of all together unless `apart`.

    Past the count an index list holds the `rest` of the columns in ascending order, or `zero`; `compact` cuts the
    zeros to the longest list.
    """
    kinds = ((PARTIAL,), (FULL,)) if apart else ((PARTIAL, FULL),)
    slices = _slices(layout)
    sides = [(layout.runs, layout.rows, layout.columns), (layout.transposed.runs, layout.columns, layout.rows)]
    _check(sides, name)
    widest = [_longest(table, kind) if compact else columns for table, _, columns in sides for kind in kinds]
    lines = [rows for _, rows, _ in sides for _ in kinds]
    cost = 4 * slices.size * sum(n * m for n, m in zip(lines, widest, strict=True))
    if cost > MEMORY:
        raise ExportError(
            f"{name} stores a column index for every tile: {cost / 2**30:.1f} GiB for {slices.shape[0]} x "
            f"{slices.shape[1]} masks of {layout.rows} x {layout.columns} tiles\n"
            f"  the most is {MEMORY >> 30} GiB: use larger tiles, or to_bsr(), with only the tiles that are read"
        )
    out = []
    for table, rows, columns in sides:
        of = np.asarray(table.slice_of)[: slices.shape[0], : slices.shape[1]]
        for kind in kinds:
            width = _longest(table, kind) if compact else columns
            out.append(_lists(table, kind, rows, columns, width, of, device, tail))
    return out


Kind = tuple[int, ...]  # tiles of these kinds


def _slices(layout: Tiling) -> Array:
    """[B, H] of the slices; B or H is 1 where all batch entries or heads have equal tiles."""
    slice_of = scene(layout)[2]
    nb = 1 if (slice_of == slice_of[:1]).all() else layout.batch
    nh = 1 if (slice_of == slice_of[:, :1]).all() else layout.heads
    return np.asarray(slice_of[:nb, :nh])


def _check(sides: list[tuple[RunTable, int, int]], name: str) -> None:
    """Forward and transposed hold the same tiles: both prove FULL and EMPTY, so equal totals mean equal sets."""
    totals = []
    for t, rows, _ in sides:
        uses = np.bincount(np.asarray(t.slice_of).reshape(-1), minlength=(len(t.row_ptr) - 1) // rows)
        total = np.repeat(uses, rows)[_line(t)] * (t.stop.astype(np.int64) - t.start)
        totals.append([int(total[t.kind == kind].sum()) for kind in (PARTIAL, FULL)])
    if totals[0] != totals[1]:
        raise ExportError(
            f"{name} needs the tiles by rows and by columns, and some were left undecided one way only "
            f"({totals[0]} against {totals[1]} partial and full)\n  ask for a smaller crop, or for larger tiles"
        )


def _line(t: RunTable) -> Array:
    return np.repeat(np.arange(len(t.row_ptr) - 1), np.diff(t.row_ptr))


def _counts(t: RunTable, kind: Kind) -> Array:
    mine = np.isin(t.kind, kind)
    width = t.stop[mine].astype(np.int64) - t.start[mine]
    return np.bincount(_line(t)[mine], weights=width, minlength=len(t.row_ptr) - 1).astype(np.int64)


def _longest(t: RunTable, kind: Kind) -> int:
    return max(1, int(_counts(t, kind).max(initial=0)))


def _lists(t: RunTable, kind: Kind, rows: int, columns: int, width: int, of: Array, device: Any, tail: Tail) -> Lists:
    import torch

    count = _counts(t, kind)
    n = len(count)
    mine = np.isin(t.kind, kind)
    line, start, stop = _line(t)[mine], t.start[mine].astype(np.int64), t.stop[mine].astype(np.int64)
    if (
        tail == "rest"
    ):  # what lies between the runs opens at 0 and where one ends, closes where one starts and at the end
        at = np.concatenate([[0], np.cumsum(np.bincount(line, minlength=n))])
        free, until = np.insert(stop, at[:-1], 0), np.insert(start, at[1:], columns)
        rest = np.repeat([0, 1], [len(start), len(free)])
        line = np.concatenate([line, np.repeat(np.arange(n), np.diff(at) + 1)])
        start, stop = np.concatenate([start, free]), np.concatenate([stop, until])
        order = np.lexsort((start, rest, line))
        order = order[(stop > start)[order]]
        line, start, stop = line[order], start[order], stop[order]
    size = stop - start
    fresh = np.append(True, line[1:] != line[:-1])[: len(line)]
    place = np.cumsum(size) - size
    place += line * width - np.repeat(place[fresh], np.diff(np.append(np.flatnonzero(fresh), len(line))))
    # a list climbs by one but where a stretch begins: there it jumps from the end of the one before
    jump = np.where(fresh, start, start - np.append(0, stop[:-1] - 1)[: len(stop)])
    index = torch.ones(n * width, dtype=torch.int32, device=device)
    index[torch.from_numpy(place).to(device)] = torch.from_numpy(jump.astype(np.int32)).to(device)
    index = index.view(n, width)
    torch.cumsum(index, dim=1, dtype=torch.int32, out=index)
    counts = torch.from_numpy(count.astype(np.int32)).to(device)
    if tail == "zero":
        index *= torch.arange(width, device=device) < counts[:, None]
    pick = torch.from_numpy(of.astype(np.int64)).to(device)
    counts, index = counts.view(-1, rows), index.view(-1, rows, width)
    if len(counts) == 1 == pick.numel():
        return Lists(counts[None], index[None])
    return Lists(counts[pick], index[pick])


class BlockSparseTensors(NamedTuple):
    """One direction, with the field names of `flash_attn.cute.block_sparsity.BlockSparseTensorsTorch`:
    `BlockSparseTensorsTorch(**tensors._asdict())` makes theirs.

    Counts are int32 [B, H, rows], indices int32 [B, H, rows, columns] of tiles; B or H is 1 where the mask does not
    depend on it. An index list is strictly ascending up to its count and 0 after it; no tile is in both lists.
    `mask_*` are the tiles where `mask_mod` runs, `full_*` those where it need not.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]  # queries, keys


@dataclass(frozen=True)
class FA4:
    """`forward` lists key tiles for every tile of queries, `backward` query tiles for every tile of keys."""

    forward: BlockSparseTensors
    backward: BlockSparseTensors


def to_fa4(layout: Tiling, device: Any = "cpu", compact: bool = False) -> FA4:
    """Block-sparse tensors for FlashAttention 4, forward and backward.

    >>> import frisket as fk
    >>> tensors = fk.mask("causal").layout(512, 512).to_fa4().forward
    >>> tensors.mask_block_idx[0, 0].tolist(), tensors.full_block_cnt[0, 0].tolist()
    ([[0, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0]], [0, 1, 2, 3])

    The kernel's key tile must be the layout's, and the layout's query tile a multiple of the kernel's (twice
    `tile_m` where it keeps two query tiles in flight): choose `block` accordingly. `compact=True` cuts index lists to
    the longest, which present kernels take and long sequences need; the mask itself goes to the kernel as its own
    `mask_mod`, written in CuTe. A layout that is not exact fits: its undecided tiles are partial.

    Raises `ExportError` beyond 8 GiB. Source: FlashAttention's `flash_attn/cute/block_sparsity.py`.
    """
    partial, full, partial_q, full_q = both_ways(layout, device, "zero", "FA4", compact=compact)
    block = (int(layout.block[0]), int(layout.block[1]))
    return FA4(
        BlockSparseTensors(partial.count, partial.index, full.count, full.index, block),
        BlockSparseTensors(partial_q.count, partial_q.index, full_q.count, full_q.index, block),
    )


def to_block_mask(layout: Tiling, device: Any = "cpu", separate_full_blocks: bool = True) -> BlockMask:
    """torch's `BlockMask`, as `create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=block)` makes it.

    >>> import frisket as fk
    >>> block_mask = fk.mask("causal & window(256)").layout(1024, 1024).to_block_mask()
    >>> block_mask.kv_num_blocks
    tensor([[[1, 1, 2, 2, 2, 2, 2, 2]]], dtype=torch.int32)

    With `separate_full_blocks=False` full tiles are among the partial ones and there are no full lists, as there.
    Shapes are [B, H, rows] and [B, H, rows, columns] of tiles, int32 on `device`; B is 1 unless the mask tells
    batch entries apart, H unless heads (`create_block_mask` does so where it is given None). Positions of a crop
    count from its first; `mask_mod` adds the origin. Its source is `block_mask.mask_mod.source`.

    Raises `ExportError` for a layout that is not exact (its lists would differ) and for lists beyond 8 GiB.
    """
    with extras():
        from torch.nn.attention.flex_attention import BlockMask

    lists = exact_lists(layout, device, apart=separate_full_blocks)
    none = Lists(None, None)
    partial, full, partial_q, full_q = lists if separate_full_blocks else (lists[0], none, lists[1], none)
    return BlockMask(
        seq_lengths=(layout.q_len, layout.kv_len),
        kv_num_blocks=partial.count, kv_indices=partial.index,
        full_kv_num_blocks=full.count, full_kv_indices=full.index,
        q_num_blocks=partial_q.count, q_indices=partial_q.index,
        full_q_num_blocks=full_q.count, full_q_indices=full_q.index,
        BLOCK_SIZE=(int(layout.block[0]), int(layout.block[1])), mask_mod=mask_mod_of(layout, device),
    )  # fmt: skip


def exact_lists(layout: Tiling, device: Any, *, apart: bool) -> list[Lists]:
    """Lists of partial and of full tiles, by rows and then by columns; of all together unless `apart`."""
    if not layout.exact:
        raise ExportError(
            f"tiles were left undecided when the budget was spent (exact is False), so the lists would not be those of "
            f"create_block_mask: {layout.counts.partial:,} tiles are partial or not known\n"
            "  ask for layout(..., exact=True), a smaller crop or larger tiles; to_fa4() and to_bsr() take it as it is"
        )
    return both_ways(layout, device, "rest", "BlockMask", apart=apart)


def mask_mod_of(layout: Tiling, device: Any = "cpu") -> Callable[..., Any]:
    """`mask_mod(b, h, q_idx, kv_idx)` on torch tensors, in positions of the crop, its tables on `device`.

    The text is in its attribute `source` and where `inspect.getsource` looks.
    """
    e, tables = _local(layout)
    reach = dict(zip("bhqk", (layout.batch, layout.heads, layout.q_len, layout.kv_len), strict=True))
    return written(e, tables, reach, layout.sizes, show(layout.written), device)


def written(
    e: Expr, tables: Mapping[str, Any], reach: Mapping[str, int], sizes: Sizes, title: str, device: Any,
    own: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The `mask_mod` of an Expr whose parameters and sizes are literals. `reach` are what its positions stay below,
    `sizes` the same of the whole problem; `own` are tensors to look into, where torch can, in place of copies."""
    import torch

    arrays = {n: np.asarray(t) for n, t in tables.items()}
    limits: dict[str, float] = dict(zip("bhqk", (max(s, 1) for s in sizes), strict=True))
    limits |= {n: max(abs(int(t.max())), abs(int(t.min()))) for n, t in arrays.items() if t.dtype.kind in "iu"}
    plan = make_plan(e, None, limits=limits)
    assert plan.mask is not None
    literal = {param(s.name, s.type): lit(s.value) for s in plan.slots if s.value is not None}
    wanted = {t.name: t.source + {"": "", "segment": "_of", "segment below": "_below"}[t.derived] for t in plan.tables}
    as_they_are = {
        wanted[t.name]: x for t in plan.tables if not t.derived and (x := (own or {}).get(t.source)) is not None
    }
    mask = renamed(simplify(substitute(plan.mask, literal)), wanted)
    read = {wanted[n]: np.asarray(t) for n, t in plan.table_values(arrays).items()}
    kinds = free_names(mask)[1]
    read = {n: read[n] for n in kinds}  # the simplifier may have dropped some
    source = mask_mod(mask, {n: t.shape for n, t in read.items()}, reach=reach, int64=plan.int64, title=title)
    arguments = (_tensor(torch, t, kinds[n][1], device, as_they_are.get(n)) for n, t in read.items())
    made = load(source, importable=True, torch=torch, math=math)["make"](*arguments)
    made.source = source
    return made  # type: ignore[no-any-return]


def _local(layout: Tiling) -> tuple[Expr, dict[str, Any]]:
    """The mask in positions of the crop, with sizes and parameters written in."""
    tables: dict[str, Any] = {n: t.array for n, t in layout.tables.items()}
    values: dict[Expr, Expr] = {var(n): lit(int(s)) for n, s in zip(SIZES, layout.sizes, strict=True)}
    scalars, _ = free_names(layout.mask)
    values |= {param(n, t): lit(np.asarray(layout.params[n]).item()) for n, t in scalars.items()}
    for name, start in zip("bhqk", layout.origin, strict=True):
        if np.ndim(start):
            tables[f"{name}_start"] = np.asarray(start)
            values[var(name)] = var(name) + lookup(f"{name}_start", (var("b"),))
        elif start:
            values[var(name)] = var(name) + int(start)
    return simplify(substitute(layout.mask, values)), tables


def _tensor(torch: Any, table: Any, type: Type, device: Any, own: Any = None) -> Any:
    """A table as torch can index and compare it: bool, int32, int64 or float64."""
    small = table.dtype.itemsize < 4 or table.dtype == np.int32
    dtype = {BOOL: np.bool_, FLOAT: np.float64}.get(type, np.int32 if small else np.int64)
    if own is not None and str(own.dtype) == f"torch.{np.dtype(dtype).name}":
        return own.to(device)
    return torch.from_numpy(np.array(table, dtype)).to(device)
