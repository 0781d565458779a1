"""Tiles as ordered lists: for every row of tiles how many it reads, and which, the read ones first.

The shape of torch's `BlockMask` and of FlashAttention 4's block-sparse tensors. Made from runs on the device
itself, without a dense tile map and without sorting tiles. Lists of a `BlockMask` are bit for bit those of
`create_block_mask`, and its `mask_mod` is made from the mask.

Both are what exports are made from and checked against. Work follows the tokens and the border of the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import SIZES, Expr, free_names, lit, lookup, param, renamed, substitute, var
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.lowering.analysis.layout import analyse, grid_of, swap
from frisket.lowering.analysis.rows import row_intervals
from frisket.lowering.analysis.runs import Runs, from_records, merge
from frisket.lowering.analysis.tiles import FULL, PARTIAL, WORK, Grid, Scope
from frisket.lowering.analysis.tiling import Array, RunTable, Tiling
from frisket.lowering.kernels.torch_mask_mod import mask_mod
from frisket.lowering.plan import ProgramFacts, Sizes, make_plan
from frisket.lowering.simplify import ProgramExprs, simplify
from frisket.runtime.machine.modules import extras, load_source

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


T = TypeVar("T")
Values = Mapping[str, Any]
BUDGET = 1 << 28  # elements, or entries of an array, an export may look at or hold
_STEP = 1 << 21  # elements looked at in one go
_FINE = 8  # tokens of a tile whose elements are looked at one by one

ANY = "to_block_mask(), to_fa4() and to_bsr() hold any mask"
TooMany = Callable[[int, int, int, list[tuple[int, int]]], ExportError]  # batch entry, head, line, its runs


@dataclass(frozen=True)
class VisibleRuns:
    """Runs of visible keys of every query: line `i = slice * length + query` has runs `ptr[i] .. ptr[i + 1]`, each
    keys `[start, stop)`, sorted and apart. Positions count from where the crop begins. Slices differ.

    Transposed, a line is a key and its runs are of queries.
    """

    ptr: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    length: int  # lines of a slice
    width: int  # positions along a line
    slice_of: NDArray[np.int64]  # [batch, heads]

    def of(self, slice: int) -> tuple[Array, Array, Array]:
        """(ptr, start, stop) of one slice, ptr from 0."""
        ptr = self.ptr[slice * self.length : (slice + 1) * self.length + 1]
        return ptr - ptr[0], self.start[ptr[0] : ptr[-1]], self.stop[ptr[0] : ptr[-1]]


def scene(layout: Tiling, transposed: bool = False) -> tuple[Expr, Grid, Array, Scope]:
    """The mask, its slices (one for every (b, h) it may tell apart), `slice_of` [batch, heads], and its values."""
    expr = layout.mask
    grid, slice_of = grid_of(expr, layout.problem, layout.block)
    # queries and keys change places, so that a line is a row of the grid either way
    if transposed:
        expr = simplify(swap(expr))
        grid = Grid(layout.kv_len, layout.q_len, layout.block[::-1], grid.b, grid.h, grid.k, grid.q)
    return expr, grid, slice_of, layout.scope(WORK)


def lines(layout: Tiling, *, most: int, too_many: TooMany, transposed: bool = False) -> VisibleRuns:
    """The runs of every line, none with more than `most`: the first that has more raises what `too_many` makes of
    it. Raises `ExportError`, too, where more than `BUDGET` elements would have to be looked at."""
    expr, grid, slice_of, scope = scene(layout, transposed)
    intervals = row_intervals(expr)
    ptr, starts, stops = [np.zeros(1, np.int64)], [], []
    for s in range(len(grid.b)):
        pieces = (
            _from_intervals(intervals.visible, grid, s, scope)
            # for one query at a time the intervals of a row are right wherever its clauses are what they seem
            if intervals is not None and scope.value(intervals.needs, {"b": grid.b[s], "h": grid.h[s]}).all()
            else _from_tiles(layout, expr, grid, s, scope, transposed)
        )
        at = 0
        for count, start, stop in pieces:
            if count.max(initial=0) > most:
                line = int(np.argmax(count > most))
                first = int(count[:line].sum())
                span = slice(first, first + int(count[line]))
                runs = list(zip(start[span].tolist(), stop[span].tolist(), strict=True))
                raise too_many(*reader(slice_of, s), at + line, runs)
            at += len(count)
            ptr.append(ptr[-1][-1] + np.cumsum(count))
            starts.append(start)
            stops.append(stop)
    rows, begins, ends = (np.concatenate(x) for x in (ptr, starts, stops))
    whole = VisibleRuns(rows, begins, ends, grid.q_len, grid.kv_len, slice_of)
    return whole if len(grid.b) == 1 else _distinct(whole, len(grid.b))


def _distinct(runs: VisibleRuns, slices: int) -> VisibleRuns:
    """Equal slices once."""
    keep, place = distinct(map(runs.of, range(slices)), lambda parts: parts)
    if len(keep) == slices:
        return runs
    counts = np.concatenate([np.diff(p) for p, _, _ in keep])
    ptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    start, stop = (np.concatenate([parts[i] for parts in keep]) for i in (1, 2))
    return VisibleRuns(ptr, start, stop, runs.length, runs.width, place[runs.slice_of])


def distinct(things: Iterable[T], arrays: Callable[[T], Iterable[Array | None]]) -> tuple[list[T], NDArray[np.int64]]:
    """(The things with different arrays, in order; for every thing, the index of its equal among them.)"""
    seen: dict[bytes, tuple[int, T]] = {}
    # bytes, as arrays have no hash
    names = ((t, b"".join(x.tobytes() for x in arrays(t) if x is not None)) for t in things)
    place = [seen.setdefault(name, (len(seen), t))[0] for t, name in names]
    return [t for _, t in seen.values()], np.array(place)


Piece = tuple[Array, Array, Array]  # runs of each of some neighbouring lines: their count, starts, stops


def _from_intervals(formulas: Any, grid: Grid, s: int, scope: Scope) -> Iterator[Piece]:
    """A mask made of bounds: one interval for each of its terms, united."""
    k0 = int(grid.k[s])
    parts = [e for pair in formulas for e in pair]
    for at in range(0, grid.q_len, _STEP):
        q = grid.q[s] + np.arange(at, min(at + _STEP, grid.q_len))
        env = {"b": grid.b[s], "h": grid.h[s], "q0": q, "q1": q, "k0": k0, "k1": k0 + grid.kv_len - 1}
        ends = [np.broadcast_to(x, q.shape) for x in scope.values(parts, env)] if parts else []
        if len(ends) == 2:  # one term: there is nothing to unite
            seen = ends[1] >= ends[0]  # an interval that ends before it begins shows nothing
            yield seen.astype(np.int64), ends[0][seen] - k0, ends[1][seen] + 1 - k0
            continue
        first = np.stack([*ends[0::2], np.full(q.shape, k0 + grid.kv_len)]) - k0  # the last is never reached
        last = np.stack([*ends[1::2], np.full(q.shape, k0 - 1)]) - k0
        none = last < first
        order = np.argsort(np.where(none, grid.kv_len, first), axis=0, kind="stable")
        first, last, none = (np.take_along_axis(x, order, 0).T for x in (first, last, none))
        reach = np.maximum.accumulate(np.where(none, -1, last), axis=1)
        # -2, so that a run may open at key 0
        before = np.concatenate([np.full((len(q), 1), -2), reach[:, :-1]], axis=1)
        opens = ~none & (first > before + 1)
        heads = np.flatnonzero(opens)
        # a run reaches as far as anything before the next one opens, on its own line
        width = opens.shape[1]
        ends_at = np.minimum(np.append(heads[1:], opens.size) - 1, heads // width * width + width - 1)
        yield opens.sum(axis=1), first[opens], reach.reshape(-1)[ends_at] + 1


def _from_tiles(layout: Tiling, expr: Expr, grid: Grid, s: int, scope: Scope, transposed: bool) -> Iterator[Piece]:
    """Any mask: fine tiles, and the elements of those the mask cuts."""
    small = Grid(grid.q_len, grid.kv_len, (_FINE, _FINE), *(x[s : s + 1] for x in (grid.b, grid.h, grid.q, grid.k)))
    b, h, q, k = (int(x) for x in (small.b[0], small.h[0], small.q[0], small.k[0]))
    origin = (b, h, k, q) if transposed else (b, h, q, k)
    piece = replace(layout.problem, batch=1, heads=1, origin=origin, sizes=layout.sizes)
    whole = layout.scope(WORK)
    analysis = analyse(layout.mask, piece, (_FINE, _FINE), whole, look=False, transposed=transposed)
    runs = from_records(analysis.spans.bounds, analysis.spans.count)
    width = np.where(runs.kind == FULL, 0, runs.stop - runs.start)  # no element of a full tile is looked at
    cost = np.cumsum(width) * _FINE**2
    if len(cost) and cost[-1] > BUDGET:
        row = int(runs.row[np.argmax(cost > BUDGET)])
        where = "key" if transposed else "query"
        text = f"the border of the mask is {int(cost[-1]):,} elements, more than the {BUDGET:,} that an export looks "
        text += f"at; the limit is met at {where} {row * _FINE + int(small.q[0])}\n  ask for a smaller crop, or for "
        raise ExportError(f"{text}to_block_mask() or to_fa4(), which hold tiles only")
    per_row = np.bincount(runs.row, weights=width, minlength=small.rows).cumsum() * _FINE**2
    row = 0
    while row < small.rows:
        done = per_row[row - 1] if row else 0
        # one row at least, whatever it costs
        stop = max(row + 1, int(np.searchsorted(per_row, done + _STEP, side="right")))
        stop = min(stop, row + _STEP // 64)  # rows without partial tiles take memory too
        lo, hi = np.searchsorted(runs.row, [row, stop])
        part = Runs(*(x[lo:hi] for x in (runs.slice, runs.row - row, runs.start, runs.stop, runs.kind)))
        yield _rows_of_tiles(expr, small, part, row, min(stop * _FINE, grid.q_len) - row * _FINE, scope)
        row = stop


def _rows_of_tiles(expr: Expr, grid: Grid, runs: Runs, row: int, n: int, scope: Scope) -> Piece:
    """The runs of `n` lines from tile row `row` on, of which `runs` (rows from 0) are the tiles."""
    full = runs.kind == FULL
    lines_of = (runs.row[full, None] * _FINE + np.arange(_FINE)).reshape(-1)
    starts, stops = (np.repeat(x[full] * _FINE, _FINE) for x in (runs.start, runs.stop))
    width = np.where(full, 0, runs.stop - runs.start)
    index = np.repeat(np.arange(len(width)), width)
    column = runs.start[index] + np.arange(len(index)) - np.repeat(np.cumsum(width) - width, width)
    seen = elements(expr, grid, scope, np.zeros_like(index), runs.row[index] + row, column)
    # a difference of Bools would be their xor
    edge = np.diff(np.pad(seen, ((0, 0), (0, 0), (1, 1))).astype(np.int8), axis=2)
    tile, i, opens = np.nonzero(edge == 1)
    closes = np.nonzero(edge == -1)[2]
    line = np.concatenate([lines_of, runs.row[index][tile] * _FINE + i])
    start = np.concatenate([starts, column[tile] * _FINE + opens])
    stop = np.concatenate([stops, column[tile] * _FINE + closes])
    joined = merge(np.zeros_like(line), line, start, stop, np.zeros_like(line))
    return np.bincount(joined.row, minlength=n), joined.start, joined.stop


def elements(expr: Expr, grid: Grid, scope: Scope, slice: Array, row: Array, column: Array) -> Array:
    """The mask on single tiles, bool [n, block_q, block_k]; outside the lengths it is False."""
    bq, bk = grid.block
    q, k = row[:, None, None] * bq + np.arange(bq)[:, None], column[:, None, None] * bk + np.arange(bk)
    b, h, q0, k0 = (x[slice][:, None, None] for x in (grid.b, grid.h, grid.q, grid.k))
    # a table has no entries beyond the lengths
    env = {"b": b, "h": h, "q": np.minimum(q, grid.q_len - 1) + q0, "k": np.minimum(k, grid.kv_len - 1) + k0}
    inside = (q < grid.q_len) & (k < grid.kv_len)
    visible = evaluate(expr, {**scope.env, **env}, scope.arrays, scope.hooks())
    return np.asarray(np.broadcast_to(visible, inside.shape) & inside)


def reader(slice_of: Array, slice: int) -> tuple[int, int]:
    """The first batch entry and head that read `slice`."""
    b, h = (int(x[0]) for x in np.nonzero(slice_of == slice))
    return b, h


def why(layout: Tiling, b: int, h: int, q: int, k: int) -> str:
    """A line that says which clause decides at a position of the crop, in global positions, for errors."""
    b0, h0, q0, k0 = layout.origin
    q_at, k_at = (int(np.broadcast_to(x, layout.batch)[b]) for x in (q0, k0))
    at = {"b": int(b0) + b, "h": int(h0) + h, "q": q_at + q, "k": k_at + k}
    where = ", ".join(f"{name} = {x}" for name, x in at.items())
    return f"at {where} the mask is {layout.explain(at['q'], at['k'], at['b'], at['h'])}"


def listed(runs: list[tuple[int, int]], most: int = 4) -> str:
    """`0..4, 9..12, ...`, ends inclusive."""
    return ", ".join(f"{a}..{b - 1}" for a, b in runs[:most]) + (", ..." if len(runs) > most else "")


Tensor = Any
MEMORY = 1 << 33  # bytes of lists that are still made


@dataclass(frozen=True)
class Lists:
    """`count` int32 [B, H, rows], `index` int32 [B, H, rows, capacity], on one device; B or H is 1 if all are alike."""

    count: Tensor
    index: Tensor


Tail = Literal["rest", "zero"]


def both_ways(
    layout: Tiling, device: Any, tail: Tail, name: str, *, compact: bool = False, separate: bool = True
) -> list[Lists]:
    """Lists of PARTIAL and of FULL tiles, forward and then transposed; of all together unless `separate`.

    Past the count an index list holds the `rest` of the columns in ascending order, or `zero`; `compact` cuts the
    zeros to the longest list.
    """
    kinds = ((PARTIAL,), (FULL,)) if separate else ((PARTIAL, FULL),)
    slices = _slices(layout)
    forward, transposed = layout.runs, layout.transposed.runs
    sides = [TileSide(forward, layout.rows, layout.columns), TileSide(transposed, layout.columns, layout.rows)]
    _check(sides, name)
    plans = [(x, kind, _longest(x.table, kind) if compact else x.columns) for x in sides for kind in kinds]
    cost = 4 * slices.size * sum(x.rows * width for x, _, width in plans)
    if cost > MEMORY:
        text = f"{name} stores a column index for every tile: {cost / 2**30:.1f} GiB for {slices.shape[0]} x "
        text += f"{slices.shape[1]} masks of {layout.rows} x {layout.columns} tiles\n  the most is "
        raise ExportError(f"{text}{MEMORY >> 30} GiB: use larger tiles, or to_bsr(), with only the tiles that are read")
    b, h = slices.shape
    return [_lists(x, kind, width, np.asarray(x.table.slice_of)[:b, :h], device, tail) for x, kind, width in plans]


Kind = tuple[int, ...]  # tiles of these kinds


class TileSide(NamedTuple):
    """The tiles of a layout read one way: their runs, and how many rows and columns of tiles there are."""

    table: RunTable
    rows: int
    columns: int


def _slices(layout: Tiling) -> Array:
    """[B, H] of the slices; B or H is 1 where all batch entries or heads have equal tiles."""
    slice_of = scene(layout)[2]
    nb = 1 if (slice_of == slice_of[:1]).all() else layout.batch
    nh = 1 if (slice_of == slice_of[:, :1]).all() else layout.heads
    return np.asarray(slice_of[:nb, :nh])


def _check(sides: list[TileSide], name: str) -> None:
    """Forward and transposed hold the same tiles: both prove FULL and EMPTY, so equal totals mean equal sets."""
    totals = []
    for t, rows, _ in sides:
        uses = np.bincount(np.asarray(t.slice_of).reshape(-1), minlength=(len(t.row_ptr) - 1) // rows)
        total = np.repeat(uses, rows)[_line(t)] * (t.stop.astype(np.int64) - t.start)
        totals.append([int(total[t.kind == kind].sum()) for kind in (PARTIAL, FULL)])
    if totals[0] != totals[1]:
        text = f"{name} needs the tiles by rows and by columns, and some were left undecided one way only ({totals[0]} "
        raise ExportError(f"{text}against {totals[1]} partial and full)\n  ask for a smaller crop, or for larger tiles")


def _line(t: RunTable) -> Array:
    return np.repeat(np.arange(len(t.row_ptr) - 1), np.diff(t.row_ptr))


def _counts(t: RunTable, kind: Kind) -> Array:
    mine = np.isin(t.kind, kind)
    width = t.stop[mine].astype(np.int64) - t.start[mine]
    return np.bincount(_line(t)[mine], weights=width, minlength=len(t.row_ptr) - 1).astype(np.int64)


def _longest(t: RunTable, kind: Kind) -> int:
    return max(1, int(_counts(t, kind).max(initial=0)))


def _lists(side: TileSide, kind: Kind, width: int, of: Array, device: Any, tail: Tail) -> Lists:
    import torch

    t, rows, columns = side
    count = _counts(t, kind)
    n = len(count)
    mine = np.isin(t.kind, kind)
    line, start, stop = _line(t)[mine], t.start[mine].astype(np.int64), t.stop[mine].astype(np.int64)
    if tail == "rest":
        # what lies between the runs opens at 0 and where one ends, closes where one starts and at the end
        at = np.concatenate([[0], np.cumsum(np.bincount(line, minlength=n))])
        free, until = np.insert(stop, at[:-1], 0), np.insert(start, at[1:], columns)
        rest = np.repeat([0, 1], [len(start), len(free)])
        line = np.concatenate([line, np.repeat(np.arange(n), np.diff(at) + 1)])
        start, stop = np.concatenate([start, free]), np.concatenate([stop, until])
        order = np.lexsort((start, rest, line))  # those that are read first
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

    The kernel's key tile must be the layout's. The layout's query tile is a multiple of the kernel's (twice
    `tile_m` where it keeps two query tiles in flight): choose `block` accordingly. `compact=True` cuts index lists to
    the longest, which present kernels take and long sequences need; the mask itself goes to the kernel as its own
    `mask_mod`, written in CuTe. A layout that is not exact fits: its undecided tiles are partial.

    Raises `ExportError` beyond 8 GiB. Source: FlashAttention's `flash_attn/cute/block_sparsity.py`.
    """
    partial, full, partial_q, full_q = both_ways(layout, device, "zero", "FA4", compact=compact)
    block = (int(layout.block[0]), int(layout.block[1]))
    forward = BlockSparseTensors(partial.count, partial.index, full.count, full.index, block)
    return FA4(forward, BlockSparseTensors(partial_q.count, partial_q.index, full_q.count, full_q.index, block))


def to_block_mask(layout: Tiling, device: Any = "cpu", separate_full_blocks: bool = True) -> BlockMask:
    """torch's `BlockMask`, as `create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=block)` makes it.

    >>> import frisket as fk
    >>> block_mask = fk.mask("causal & window(256)").layout(1024, 1024).to_block_mask()
    >>> block_mask.kv_num_blocks
    tensor([[[1, 1, 2, 2, 2, 2, 2, 2]]], dtype=torch.int32)

    With `separate_full_blocks=False` full tiles are among the partial ones and there are no full lists, as there.
    Shapes are [B, H, rows] and [B, H, rows, columns] of tiles, int32 on `device`. B is 1 unless the mask tells
    batch entries apart, H unless heads (`create_block_mask` does so where it is given None). Positions of a crop
    count from its first; `mask_mod` adds the origin. Its source is `block_mask.mask_mod.source`.

    Raises `ExportError` for a layout that is not exact (its lists would differ) and for lists beyond 8 GiB.
    """
    with extras():
        from torch.nn.attention.flex_attention import BlockMask

    lists = exact_lists(layout, device, separate=separate_full_blocks)
    none = Lists(None, None)
    partial, full, partial_q, full_q = lists if separate_full_blocks else (lists[0], none, lists[1], none)
    sides = {"kv": partial, "full_kv": full, "q": partial_q, "full_q": full_q}.items()
    arrays = {f"{n}_num_blocks": x.count for n, x in sides} | {f"{n}_indices": x.index for n, x in sides}
    block, lengths = (int(layout.block[0]), int(layout.block[1])), (layout.q_len, layout.kv_len)
    return BlockMask(seq_lengths=lengths, **arrays, BLOCK_SIZE=block, mask_mod=mask_mod_of(layout, device))


def exact_lists(layout: Tiling, device: Any, *, separate: bool) -> list[Lists]:
    """Lists of partial and of full tiles, by rows and then by columns; of all together unless `separate`."""
    if not layout.exact:
        text = "tiles were left undecided when the budget was spent (exact is False), so the lists would not be those "
        text += f"of create_block_mask: {layout.counts.partial:,} tiles are partial or not known\n"
        text += "  ask for layout(..., exact=True), a smaller crop or larger tiles; to_fa4() and to_bsr() "
        raise ExportError(f"{text}take it as it is")
    return both_ways(layout, device, "rest", "BlockMask", separate=separate)


def mask_mod_of(layout: Tiling, device: Any = "cpu") -> Callable[..., Any]:
    """`mask_mod(b, h, q_idx, kv_idx)` on torch tensors, in positions of the crop, its tables on `device`.

    The text is in its attribute `source` and where `inspect.getsource` looks.
    """
    e, tables = _local(layout)
    reach = dict(zip("bhqk", (layout.batch, layout.heads, layout.q_len, layout.kv_len), strict=True))
    return written(e, tables, reach, layout.sizes, show(layout.written), device)


def written(
    e: Expr, tables: Values, reach: Values, sizes: Sizes, title: str, device: Any, tensors: Values | None = None
) -> Callable[..., Any]:
    """The `mask_mod` of an Expr whose parameters and sizes are literals. `reach` are what its positions stay below,
    `sizes` describe the whole problem; `tensors` are those to look into, where torch can, in place of copies."""
    import torch

    arrays = {n: np.asarray(t) for n, t in tables.items()}
    limits: dict[str, float] = dict(zip("bhqk", (max(s, 1) for s in sizes), strict=True))
    limits |= {n: max(abs(int(t.max())), abs(int(t.min()))) for n, t in arrays.items() if t.dtype.kind in "iu"}
    plan = make_plan(ProgramExprs(e), facts=ProgramFacts(limits=limits))
    assert plan.mask is not None
    literal = {param(s.name, s.type): lit(s.value) for s in plan.slots if s.value is not None}
    names = {t.name: t.source + {"": "", "segment": "_of", "segment below": "_below"}[t.derived] for t in plan.tables}
    tensors = tensors or {}
    as_they_are = {names[t.name]: tensors[t.source] for t in plan.tables if not t.derived and t.source in tensors}
    mask = renamed(simplify(substitute(plan.mask, literal)), names)
    read = {names[n]: np.asarray(t) for n, t in plan.table_values(arrays).items()}
    kinds = free_names(mask)[1]
    read = {n: read[n] for n in kinds}  # the simplifier may have dropped some
    source = mask_mod(mask, {n: t.shape for n, t in read.items()}, reach=reach, int64=plan.int64, title=title)
    arguments = (_tensor(torch, t, kinds[n][1], device, as_they_are.get(n)) for n, t in read.items())
    function = load_source(source, importable=True, torch=torch, math=math)["make"](*arguments)
    function.source = source
    return function  # type: ignore[no-any-return]


def _local(layout: Tiling) -> tuple[Expr, dict[str, Any]]:
    """The mask in positions of the crop, with sizes and parameters written in."""
    tables: dict[str, Any] = {n: t.array for n, t in layout.tables.items()}
    values: dict[Expr, Expr] = {var(n): lit(int(s)) for n, s in zip(SIZES, layout.sizes, strict=True)}
    scalars, _ = free_names(layout.mask)
    values |= {param(n, t): lit(np.asarray(layout.params[n]).item()) for n, t in scalars.items()}
    for name, start in zip("bhqk", layout.origin, strict=True):
        if np.ndim(start):  # one for each batch entry
            tables[f"{name}_start"] = np.asarray(start)
            values[var(name)] = var(name) + lookup(f"{name}_start", (var("b"),))
        elif start:
            values[var(name)] = var(name) + int(start)
    return simplify(substitute(layout.mask, values)), tables


def _tensor(torch: Any, table: Any, type: Type, device: Any, tensor: Any = None) -> Any:
    """A table as torch can index and compare it: bool, int32, int64 or float64."""
    small = table.dtype.itemsize < 4 or table.dtype == np.int32
    dtype = {BOOL: np.bool_, FLOAT: np.float64}.get(type, np.int32 if small else np.int64)
    # the tensor itself, so that later writes to it count
    if tensor is not None and str(tensor.dtype) == f"torch.{np.dtype(dtype).name}":
        return tensor.to(device)
    return torch.from_numpy(np.array(table, dtype)).to(device)
