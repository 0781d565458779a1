"""Exact contents of a layout: the runs of keys of every query, and the elements of single tiles.

Both are what exports are made from and checked against. Work follows the tokens and the border of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ExportError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import SIZES, Expr
from frisket.lowering.analysis.layout import analyse, grid_of, swap
from frisket.lowering.analysis.rows import solved
from frisket.lowering.analysis.tiles import FULL, Grid, Scope
from frisket.lowering.simplify import simplify
from frisket.lowering.spans import Runs, from_records, merge
from frisket.runtime.layouts.tiling import Tiling

Array = NDArray[Any]
T = TypeVar("T")
BUDGET = 1 << 28  # elements, or entries of an array, an export may look at or hold
_STEP = 1 << 21
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
    grid, slice_of = grid_of(expr, layout.q_len, layout.kv_len, layout.batch, layout.heads, layout.block, layout.origin)
    if transposed:
        expr = simplify(swap(expr))
        grid = Grid(layout.kv_len, layout.q_len, layout.block[::-1], grid.b, grid.h, grid.k, grid.q)
    env = {**dict(zip(SIZES, layout.sizes, strict=True)), **layout.params}
    return expr, grid, slice_of, Scope(env, layout.tables)


def lines(layout: Tiling, *, most: int, too_many: TooMany, transposed: bool = False) -> VisibleRuns:
    """The runs of every line, none with more than `most`: the first that has more raises what `too_many` makes of
    it. Raises `ExportError`, too, where more than `BUDGET` elements would have to be looked at."""
    expr, grid, slice_of, scope = scene(layout, transposed)
    ways = solved(expr)
    ptr, starts, stops = [np.zeros(1, np.int64)], [], []
    for s in range(len(grid.b)):
        pieces = (
            _from_intervals(ways.yes, grid, s, scope)
            # for one query at a time the intervals of a row are right wherever its clauses are what they seem
            if ways is not None and scope.value(ways.needs, {"b": grid.b[s], "h": grid.h[s]}).all()
            else _from_tiles(layout, expr, grid, s, scope, transposed)
        )
        at = 0
        for count, start, stop in pieces:
            if count.max(initial=0) > most:
                line = int(np.argmax(count > most))
                first = int(count[:line].sum())
                found = slice(first, first + int(count[line]))
                runs = list(zip(start[found].tolist(), stop[found].tolist(), strict=True))
                raise too_many(*reader(slice_of, s), at + line, runs)
            at += len(count)
            ptr.append(ptr[-1][-1] + np.cumsum(count))
            starts.append(start)
            stops.append(stop)
    whole = VisibleRuns(
        np.concatenate(ptr), np.concatenate(starts), np.concatenate(stops), grid.q_len, grid.kv_len, slice_of
    )  # fmt: skip
    return whole if len(grid.b) == 1 else _distinct(whole, len(grid.b))


def _distinct(found: VisibleRuns, slices: int) -> VisibleRuns:
    """Equal slices once."""
    keep, place = distinct(map(found.of, range(slices)), lambda parts: parts)
    if len(keep) == slices:
        return found
    counts = np.concatenate([np.diff(p) for p, _, _ in keep])
    return VisibleRuns(
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        np.concatenate([a for _, a, _ in keep]), np.concatenate([b for _, _, b in keep]),
        found.length, found.width, place[found.slice_of],
    )  # fmt: skip


def distinct(things: Iterable[T], arrays: Callable[[T], Iterable[Array | None]]) -> tuple[list[T], NDArray[np.int64]]:
    """(The things with different arrays, in order; for every thing, the index of its equal among them.)"""
    seen: dict[bytes, tuple[int, T]] = {}
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
        if len(ends) == 2:
            seen = ends[1] >= ends[0]
            yield seen.astype(np.int64), ends[0][seen] - k0, ends[1][seen] + 1 - k0
            continue
        first = np.stack([*ends[0::2], np.full(q.shape, k0 + grid.kv_len)]) - k0  # the last is never reached
        last = np.stack([*ends[1::2], np.full(q.shape, k0 - 1)]) - k0
        none = last < first
        order = np.argsort(np.where(none, grid.kv_len, first), axis=0, kind="stable")
        first, last, none = (np.take_along_axis(x, order, 0).T for x in (first, last, none))
        reach = np.maximum.accumulate(np.where(none, -1, last), axis=1)
        before = np.concatenate([np.full((len(q), 1), -2), reach[:, :-1]], axis=1)
        opens = ~none & (first > before + 1)
        heads = np.flatnonzero(opens)
        # a run reaches as far as anything before the next one opens, on its own line
        ends_at = np.minimum(np.append(heads[1:], opens.size) - 1, heads // opens.shape[1] * opens.shape[1]
                             + opens.shape[1] - 1)  # fmt: skip
        yield opens.sum(axis=1), first[opens], reach.reshape(-1)[ends_at] + 1


def _from_tiles(layout: Tiling, expr: Expr, grid: Grid, s: int, scope: Scope, transposed: bool) -> Iterator[Piece]:
    """Any mask: fine tiles, and the elements of those the mask cuts."""
    small = Grid(grid.q_len, grid.kv_len, (_FINE, _FINE), *(x[s : s + 1] for x in (grid.b, grid.h, grid.q, grid.k)))
    origin = (small.b[0], small.h[0], small.q[0], small.k[0])
    b, h, q, k = (int(x) for x in origin)
    found = analyse(
        layout.mask, q_len=layout.q_len, kv_len=layout.kv_len, block=(_FINE, _FINE), look=False, params=layout.params,
        origin=(b, h, k, q) if transposed else (b, h, q, k), sizes=layout.sizes, tables=layout.tables,
        transposed=transposed,
    )  # fmt: skip
    runs = from_records(found.spans.bounds, found.spans.count)
    width = np.where(runs.kind == FULL, 0, runs.stop - runs.start)
    cost = np.cumsum(width) * _FINE**2
    if len(cost) and cost[-1] > BUDGET:
        row = int(runs.row[np.argmax(cost > BUDGET)])
        where = "key" if transposed else "query"
        raise ExportError(
            f"the border of the mask is {int(cost[-1]):,} elements, more than the {BUDGET:,} that an export looks at; "
            f"the limit is met at {where} {row * _FINE + int(small.q[0])}\n"
            "  ask for a smaller crop, or for to_block_mask() or to_fa4(), which hold tiles only"
        )
    per_row = np.bincount(runs.row, weights=width, minlength=small.rows).cumsum() * _FINE**2
    row = 0
    while row < small.rows:
        done = per_row[row - 1] if row else 0
        stop = max(row + 1, int(np.searchsorted(per_row, done + _STEP, side="right")))
        stop = min(stop, row + _STEP // 64)
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
    env = {
        "b": grid.b[slice][:, None, None], "h": grid.h[slice][:, None, None],
        "q": np.minimum(q, grid.q_len - 1) + grid.q[slice][:, None, None],
        "k": np.minimum(k, grid.kv_len - 1) + grid.k[slice][:, None, None],
    }  # fmt: skip
    inside = (q < grid.q_len) & (k < grid.kv_len)
    found = evaluate(expr, {**scope.env, **env}, scope.arrays, scope.hooks())
    return np.asarray(np.broadcast_to(found, inside.shape) & inside)


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
    text = ", ".join(f"{a}..{b - 1}" for a, b in runs[:most])
    return text + (", ..." if len(runs) > most else "")
