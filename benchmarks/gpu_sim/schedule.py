"""Orders of programs, persistent grids, split rows and packed heads: what they could save, and what launches do.

A block takes what `full` says of it. Orders differ in which block starts next where a place is free. A persistent grid
has as many blocks as places, each of which takes the next row when it is done: it saves the start of a block, not its
prologue and tail. A row that is split leaves parts of at most the mean of a place, whose float32 sums are written, read
and combined by a second launch. Packed heads share a tile: rows of tiles have fewer queries and more heads. These
figures are bounds of what is saved: what a schedule costs in the kernel is left out. `launched` is what launches do:
their own order and table of parts, with the cycles of the kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from frisket.lowering.plan import Geometry, Spans
from frisket.runtime.backends.triton.grids import RowParts, of_call
from frisket.runtime.backends.triton.tiles import of_kernel

from . import full
from . import ours as our_kernels
from .full import SECONDS_A_LAUNCH, Case, Kernel, Work, makespan
from .loops import figures
from .machine import GPUS, Gpu, resident
from .ours import Ours, Tile

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """The blocks of one kernel: cycles of those of a head in the order of rows, `fixed` of them beside tiles, the
    groups of heads that have them, places, and what the sums of a part take, in bytes."""

    cycles: Times
    fixed: float
    groups: int
    places: int
    sums: int
    gpu: Gpu

    @property
    def all(self) -> Times:
        """Head by head."""
        return np.tile(self.cycles, self.groups)


def ours_of(kernel: str, case: Case) -> Ours:
    return Ours(kernel, case.mask, case.dim, case.dtype, case.group, case.arch)


def rows_of(kernel: str, case: Case, work: Work | None = None, listed: bool = False) -> Rows:
    """The rows of tiles of a kernel with the tile that frisket chooses, in the order of rows; `work` has other counts
    of them. `listed` takes the kernel whose programs a table lists."""
    gpu = GPUS[case.arch]
    one = replace(ours_of(kernel, case), listed=listed)
    tile = our_kernels.chosen(one)
    made = our_kernels.compiled(one, tile)
    border, rest = full.loop_numbers(made, made.sass.products)
    x = Kernel(made, border, rest, tile.block_q * tile.block_k, one.flops)
    walked = kernel == "dkv"
    work = work or counted(kernel, case, tile).grouped(case.group, walked)
    groups = case.heads // case.group
    fit = resident(gpu, made.warps, made.registers, made.shared)
    fit = max(1, min(fit, -(-len(work.border) * groups // gpu.processors)))
    each, fixed = figures(made, gpu, fit), gpu.launch + full.overhead(x, gpu)
    cycles = fixed + work.border * each[border].cycles + work.full * each[rest].cycles
    own, arrays = (tile.block_k, 2) if walked else (tile.block_q, 1)
    return Rows(cycles, fixed, groups, gpu.processors * fit, 8 * own * arrays * case.dim, gpu)


def counted(kernel: str, case: Case, tile: Tile, heads: int = 1) -> Work:
    """(border, full) tiles in the order of rows, where tiles hold the queries of so many heads."""
    block = tile.block_q // heads, tile.block_k
    found = full.layout(case.mask, case.length, block)
    kinds = (found.transposed if kernel == "dkv" else found).spans
    lo, full_lo, full_hi, hi = (kinds.bounds[0][..., i].astype(np.int64) for i in range(4))
    inner = (full_hi - full_lo).sum(1)
    return Work((hi - lo).sum(1) - inner, inner)


# -- schedules --------------------------------------------------------------------------------------------


def longest_of_a_head(x: Rows) -> float:
    """Heads one after another, the longest rows of each first: what most launches do."""
    return makespan(np.tile(np.sort(x.cycles)[::-1], x.groups), x.places)[0]


def in_order(x: Rows) -> float:
    return makespan(x.all, x.places)[0]


def longest_of_all(x: Rows) -> float:
    """On an H100, rows of a head that run at a time share keys in L2, more than this order saves at the end."""
    return makespan(np.sort(x.all)[::-1], x.places)[0]


def persistent(x: Rows) -> float:
    """Rows as launches have them, without the start of a block but the first of a place."""
    rows = np.tile(np.sort(x.cycles)[::-1], x.groups)
    return makespan(rows - x.gpu.launch, x.places)[0] + x.gpu.launch


def split(x: Rows) -> float:
    """Rows of more than the mean of a place in parts, the longest first; a second launch combines them."""
    mean = float(x.all.sum()) / x.places
    parts = np.maximum(1, np.ceil((x.cycles - x.fixed) / max(mean, x.fixed)))
    if parts.max() == 1:
        return longest_of_a_head(x)
    pieces = np.repeat(x.fixed + (x.cycles - x.fixed) / parts, parts.astype(int))
    end, _ = makespan(np.sort(np.tile(pieces, x.groups))[::-1], x.places)
    sums = float(parts[parts > 1].sum()) * x.groups * x.sums / x.gpu.hbm
    return end + (sums + SECONDS_A_LAUNCH) * x.gpu.clock


SCHEDULES: dict[str, Callable[[Rows], float]] = {
    "rows in order": in_order, "longest of a head first": longest_of_a_head, "longest of all first": longest_of_all,
    "persistent": persistent, "long rows split, at most": split,
}  # fmt: skip


def launched(kernel: str, case: Case) -> float:
    """What launches do: long rows in parts, by frisket's own table, and the order of heads and rows."""
    table = parts_of(kernel, case)
    if table is not None:
        return divided(rows_of(kernel, case, listed=True), table)
    x = rows_of(kernel, case)
    group = our_kernels.together(ours_of(kernel, case), case.length, x.groups)
    return makespan(np.tile(np.repeat(np.sort(x.cycles)[::-1], group), x.groups // group), x.places)[0]


def divided(x: Rows, table: RowParts) -> float:
    """The programs of a table of one slice, in its order, and the launch that combines them."""
    row, place, begin, end = table.programs[0].T
    of_row = np.zeros(len(x.cycles))
    np.add.at(of_row, row, end - begin)
    pieces = x.fixed + (x.cycles[row] - x.fixed) * (end - begin) / np.maximum(of_row, 1)[row]
    time, _ = makespan(np.tile(pieces, x.groups), x.places)
    sums = float((place >= 0).sum()) * x.groups * x.sums / x.gpu.hbm
    return time + (sums + SECONDS_A_LAUNCH) * x.gpu.clock


@dataclass(frozen=True)
class OneSlice:
    """A SpanSource whose heads see alike."""

    case: Case

    def rows(self, block: tuple[int, int]) -> Spans:
        return self._shared(full.layout(self.case.mask, self.case.length, block).spans)

    def columns(self, block: tuple[int, int]) -> Spans:
        return self._shared(full.layout(self.case.mask, self.case.length, block).transposed.spans)

    def _shared(self, found: Spans) -> Spans:
        return replace(found, slice_of=np.zeros((1, self.case.heads), np.int32))


def parts_of(kernel: str, case: Case) -> RowParts | None:
    """The table that a launch makes of the case."""
    one = ours_of(kernel, case)
    plan, target = our_kernels.planned(one)
    mine = of_kernel(f"attention_{kernel}", target)
    shape = (1, case.heads, case.heads // case.group, case.length, case.length, case.dim, case.dim, 1.0)
    return of_call(plan, OneSlice(case), Geometry(*shape), mine, GPUS[case.arch].processors, walked=kernel == "dkv")


def packed(kernel: str, case: Case) -> float:
    """What rows of one head take over rows of all heads of a group, both the longest of all first."""
    tile = our_kernels.chosen(Ours(kernel, case.mask, case.dim, case.dtype, case.group, case.arch))
    together = rows_of(kernel, case, counted(kernel, case, tile, case.group))
    return longest_of_all(rows_of(kernel, case)) / longest_of_all(together)
