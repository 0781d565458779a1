"""Long rows of tiles: a row that sees many more tiles than the others is divided among several programs.

Some masks have a few long rows beside many short ones: global tokens beside a window, say. One program would walk a
long row while the rest of the GPU idles. The exact counts of a layout say which rows are long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.lowering.kernels.triton.rows import axes_of
from frisket.lowering.plan import Geometry, LoopPlan, Spans, SpanSource, Target
from frisket.runtime.calls.arrays import uploaded

from .arguments import GRID, Access, Bound, Launch, Made, Values, span_tables
from .decode import BLOCKS, NO_VALUES, NOTHING
from .grids import grid_of
from .tiles import of_kernel

Tensor = Any
# A row is divided where it has LONG times the tiles of a share: of what each program of those that run at a time has in
# the mean. The first and the last instructions of a program take as long as FIXED tiles. Parts are FINER than a share,
# as more programs may run at a time than the host takes for granted, and have some LEAST tiles. Where long rows of some
# heads start behind the rows of others, shares are LATER times smaller.
LONG, FIXED, FINER, LEAST, LATER = 1.25, 2, 2, 16, 4


@dataclass(frozen=True, eq=False)
class RowParts:
    """The programs of a launch, by the names of the kernels' parameters, and the number of places for their sums."""

    # [slices, programs, 4]: row (-1: none), the place of a part's sums (-1: a whole row), first tile, end of tiles
    programs: NDArray[np.int32]
    rows: NDArray[np.int32]  # [slices, rows in parts, 3]: row, the first place of its sums, parts
    at: NDArray[np.int32]  # [batch, heads]: the first place of a head
    places: int


def row_parts(spans: Spans, slots: int, group: int = 1, later: bool = False) -> RowParts | None:
    """The programs of every slice, those with the most tiles first, where `slots` programs run at a time; None where no
    row is long. A program walks its row for `group` heads, which see alike; `later` says that long rows of some heads
    start behind short ones of others."""
    tiles = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1, dtype=np.int64)
    slice_of = spans.slice_of[:, ::group]
    used = np.bincount(slice_of.ravel(), minlength=len(tiles))
    later = later and tiles.max() > 2 * tiles.mean()  # among rows alike none ends late
    share = max(LEAST, int(used @ (group * tiles + FIXED).sum(1)) // (slots * (LATER if later else 1)))
    of_part = -(-max(LEAST, share // FINER) // group)
    parts = np.where(group * tiles > LONG * share, -(-tiles // of_part), 1)
    if not (parts[used > 0] > 1).any() or (spans.slice_of != np.repeat(slice_of, group, 1)).any():
        return None
    slices = [_of_slice(*x) for x in zip(tiles, parts)]
    programs = np.full((len(tiles), max(len(x) for x, _ in slices), 4), -1, np.int32)
    rows = np.zeros((len(tiles), max(len(x) for _, x in slices), 3), np.int32)
    for one, (listed, divided) in enumerate(slices):
        programs[one, : len(listed)], rows[one, : len(divided)] = listed, divided
    places = rows[..., 2].sum(1)[slice_of].astype(np.int32)
    ends = places.cumsum(dtype=np.int32).reshape(places.shape)
    return RowParts(programs, rows, ends - places, int(ends[-1, -1]))


def _of_slice(tiles: NDArray[np.int64], parts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(programs, rows in parts) of one slice."""
    row = np.repeat(np.arange(len(tiles)), parts)
    part = np.arange(len(row)) - np.repeat(parts.cumsum() - parts, parts)
    divided = np.flatnonzero(parts > 1)
    first = np.zeros_like(parts)
    first[divided] = parts[divided].cumsum() - parts[divided]
    begin, end = (x * tiles[row] // parts[row] for x in (part, part + 1))
    programs = np.stack([row, np.where(parts[row] > 1, first[row] + part, -1), begin, end], 1)
    return programs[np.argsort(begin - end, kind="stable")], np.stack([divided, first[divided], parts[divided]], 1)


def of_call(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, processors: int, *, walked: bool = False
) -> RowParts | None:
    """The programs of a launch that walks rows of tiles, or `walked` columns, where some are long and the host knows
    their lengths; None where there is a program for each row."""
    if target.splits == 1 or target.order == "forward" or spans is None:
        return None
    if plan.mask is None or (plan.bounds is not None and not walked):
        return None
    records = (spans.columns if walked else spans.rows)((target.block_q, target.block_k))
    if not isinstance(records, Spans):
        return None
    group = g.heads // g.kv_heads if walked else 1
    later = g.batch > 1 or (g.heads > group and axes_of(target)[0] == 0)
    parts = row_parts(records, processors * (BLOCKS if target.num_warps == 4 else 1), group, later)
    return parts if parts is not None and parts.programs.shape[1] <= GRID else None


def walking_queries(target: Target) -> tuple[str, ...]:
    """The kernels of a target that own keys and walk tiles of queries."""
    return ("attention_dkv", "attention_dv") if target.dv else ("attention_dkv",)


def listed_kernels(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, processors: int
) -> frozenset[str]:
    """The kernels of a call for whose programs there is a table."""
    walked = walking_queries(target)
    names = "attention_forward", "attention_dq", *walked
    by_kernel = {n: of_call(plan, spans, g, of_kernel(n, target), processors, walked=n in walked) for n in names}
    return frozenset(n for n, parts in by_kernel.items() if parts is not None)


class RowLaunches:
    """The launches of a kernel whose programs share long rows: that of the programs, and that which combines the parts
    of rows."""

    def __init__(
        self, context: Bound, kernels: Made, names: tuple[str, str], target: Target, parts: RowParts,
        records: Callable[[tuple[int, int]], Any], inputs: dict[str, Access], sums: dict[str, tuple[int, ...]],
        results: dict[str, Access], device_slots: tuple[str, ...],
    ) -> None:  # fmt: skip
        """`names` are the kernels. `inputs` are the tensors that the first one reads, `results` those that both write,
        and `sums` the float32 arrays that hold what it leaves of parts, with the shapes of a query or key."""
        g, device = context.geometry, context.device
        walked = names[0] in ("attention_dkv", "attention_dv")
        rows, heads = (target.block_k, g.kv_heads) if walked else (target.block_q, g.heads)
        self.shapes = [(parts.places, rows, *shape) for shape in sums.values()]
        partial: dict[str, Access] = dict.fromkeys(sums, "")
        at = uploaded(parts.at, device)
        self.first = context.launch(
            kernels, names[0], grid_of(parts.programs.shape[1], heads, g.batch, target), target,
            inputs | results | partial, records=records, device_slots=device_slots,
            Parts=uploaded(parts.programs, device), At=at,
        )  # fmt: skip
        slices = span_tables(records(self.first.tile), device)["SliceOf"]
        listed = {"Rows": uploaded(parts.rows, device), "SliceOf": slices, "At": at}
        numbers = {"heads": g.heads, "q_len": g.q_len, "kv_len": g.kv_len, "queries": rows, "scale": g.scale}
        self.combine = Launch(
            kernels.kernels[names[1]], {}, NOTHING, (parts.rows.shape[1] * rows, heads, g.batch),
            replace(target, num_warps=2), device, numbers | listed, partial | results, (),
        )  # fmt: skip
        self.inputs = len(inputs)

    def __call__(self, values: Values, *tensors: Tensor) -> None:
        import torch

        sums = [torch.empty(shape, dtype=torch.float32, device=tensors[0].device) for shape in self.shapes]
        self.first(values, *tensors, *sums)
        self.combine(NO_VALUES, *sums, *tensors[self.inputs :])
