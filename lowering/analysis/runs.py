"""Tile ranges of one kind, and the records that kernels read of them.

>>> runs = Runs(*map(np.array, ([0, 0], [0, 0], [0, 2], [2, 3], [FULL, PARTIAL])))
>>> bounds, count = records(runs, 1, 1)
>>> bounds.tolist(), count.tolist()
([[[[0, 0, 2, 3]]]], [[1]])
>>> from_records(bounds, count).kind
array([2, 1])
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.lowering.plan import Spans

from .tiles import FULL, PARTIAL, Boxes

Array = NDArray[Any]
_AT_ONCE = 1 << 19  # runs made in one go
_ROOM, _LEAST = 1 << 22, 64  # records of a layout, and of one row


@dataclass(frozen=True)
class Runs:
    """Maximal runs of key tiles of one kind, sorted by slice, row, start: tiles [start, stop)."""

    slice: Array
    row: Array
    start: Array
    stop: Array
    kind: Array


def merge(slice: Array, row: Array, start: Array, stop: Array, kind: Array) -> Runs:
    """Sort pieces and join neighbours of one kind."""
    order = np.lexsort((start, row, slice))
    slice, row, start, stop, kind = (x[order] for x in (slice, row, start, stop, kind))
    if not len(start):
        return Runs(slice, row, start, stop, kind)
    new = np.ones(len(start), bool)
    new[1:] = (slice[1:] != slice[:-1]) | (row[1:] != row[:-1]) | (start[1:] != stop[:-1]) | (kind[1:] != kind[:-1])
    heads = np.flatnonzero(new)
    tails = np.append(heads[1:], len(start)) - 1
    return Runs(slice[heads], row[heads], start[heads], stop[tails], kind[heads])


def from_boxes(boxes: Boxes) -> Runs:
    """The runs of boxes: a box of several rows becomes one run in each row, some rows at a time."""
    height = (boxes.r1 - boxes.r0).astype(np.int64)
    order = np.lexsort((boxes.r0, boxes.slice))
    parts, n = [], int(height.sum())
    for mine in np.array_split(order, max(1, -(-n // _AT_ONCE))) if n > _AT_ONCE else [order]:
        index = np.repeat(mine, height[mine])
        offset = np.arange(len(index)) - np.repeat(np.cumsum(height[mine]) - height[mine], height[mine])
        c0, c1 = boxes.c0[index].astype(np.int64), boxes.c1[index].astype(np.int64)
        parts.append(merge(boxes.slice[index].astype(np.int64), boxes.r0[index] + offset, c0, c1, boxes.kind[index]))
    if len(parts) == 1:
        return parts[0]
    return merge(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Runs)))


def fitted(runs: Runs, lines: int, rows: int) -> tuple[Runs, int]:
    """(runs whose records take at most 64 MB, or 1 KB a row; the number of tiles widened for that limit).

    In a row with more runs, one PARTIAL run reaches from the last run that fits to the end of the row's runs."""
    most = max(_LEAST, _ROOM // max(lines, 1))
    line = runs.slice * rows + runs.row
    heads = np.flatnonzero(np.append(True, line[1:] != line[:-1])[: len(line)])
    length = np.diff(np.append(heads, len(line)))
    if not len(line) or length.max() <= most:
        return runs, 0
    place = np.arange(len(line)) - np.repeat(heads, length)
    last = np.repeat(runs.stop[heads + length - 1], length)
    over = (place == most - 1) & (np.repeat(length, length) > most)
    stop, kind = np.where(over, last, runs.stop), np.where(over, PARTIAL, runs.kind)
    within = place < most
    joined = int((last - runs.start)[over].sum())
    return Runs(*(x[within] for x in (runs.slice, runs.row, runs.start, stop, kind))), joined


def records(runs: Runs, slices: int, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The records of runs, (bounds [slices, rows, R, 4], count [slices, rows]): neighbouring runs partial, full,
    partial share one record; every other full run opens a new one."""
    n = len(runs.start)
    line = runs.slice * rows + runs.row
    chained = np.zeros(n, bool)
    chained[1:] = (line[1:] == line[:-1]) & (runs.start[1:] == runs.stop[:-1])
    link = np.arange(n)
    place = link - np.maximum.accumulate(np.where(chained, 0, link))  # position within the chain
    # kinds alternate along a chain: only in partial, full, partial does a full run continue a record
    opens = ~chained | ((runs.kind == FULL) & (place != 1))
    record = np.cumsum(opens) - 1
    total = int(record[-1]) + 1 if n else 0
    lo, hi = np.zeros(total, np.int64), np.zeros(total, np.int64)
    firsts = np.flatnonzero(opens)
    lasts = np.append(firsts[1:], n)[: len(firsts)] - 1
    lo, hi = runs.start[firsts], runs.stop[lasts]
    full_lo, full_hi = hi.copy(), hi.copy()  # without a full run the full part is empty, at the end
    full = runs.kind == FULL
    full_lo[record[full]], full_hi[record[full]] = runs.start[full], runs.stop[full]
    owner = line[firsts]
    count = np.bincount(owner, minlength=slices * rows)
    within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    most = max(1, int(count.max(initial=0)))
    bounds = np.zeros((slices * rows, most, 4), np.int32)
    bounds[owner, within] = np.stack([lo, full_lo, full_hi, hi], axis=1)
    return bounds.reshape(slices, rows, most, 4), count.reshape(slices, rows).astype(np.int32)


def from_records(bounds: Array, count: Array) -> Runs:
    """The runs that span records encode."""
    used = np.arange(bounds.shape[2]) < count[..., None]
    s, r, _ = np.nonzero(used)
    lo, full_lo, full_hi, hi = bounds[used].T
    pieces = [(lo, full_lo, PARTIAL), (full_lo, full_hi, FULL), (full_hi, hi, PARTIAL)]
    start, stop = (np.concatenate([p[i] for p in pieces]).astype(np.int64) for i in (0, 1))
    kind = np.repeat([k for _, _, k in pieces], len(lo))
    keep = stop > start
    return merge(np.tile(s, 3)[keep], np.tile(r, 3)[keep], start[keep], stop[keep], kind[keep])


def share(bounds: Array, count: Array, slice_of: Array) -> Spans:
    """Store equal slices of spans once."""
    if len(bounds) > 1:
        flat = np.concatenate([bounds.reshape(len(bounds), -1), count], axis=1)
        seen: dict[bytes, int] = {}
        place = np.array([seen.setdefault(f.tobytes(), len(seen)) for f in flat])
        if len(seen) < len(bounds):
            first = np.array([int(np.argmax(place == i)) for i in range(len(seen))])
            bounds, count, slice_of = bounds[first], count[first], place[slice_of]
    bounds, count = (np.ascontiguousarray(x, np.int32) for x in (bounds, count))  # kernels read both by pointer
    return Spans(bounds, count, slice_of.astype(np.int32))
