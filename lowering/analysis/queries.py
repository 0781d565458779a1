"""The layout of masks whose terms bound the keys of each query, in any order of bounds, query by query.

Where the keys of a row of tiles are not one interval per term (documents of queries beside documents of keys,
windows from a table), the intervals of its queries are written down and united. O(queries x terms), no tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import EvaluationError
from frisket.dsl.work import steps
from frisket.lowering.spans import Runs, merge

from .rows import Solved, sweep
from .tiles import Grid, Scope, outside

Array = NDArray[Any]
_QUERY = 60  # steps for an interval of a query, beside those of its ends
_PIECES = 64  # runs of tiles a row may have before tiles are asked instead
_BATCH = 1 << 19  # intervals held at a time


def by_query(ways: Solved, grid: Grid, scope: Scope) -> Runs | None:
    """The runs of a mask from the intervals of its queries; None where they take too much work."""
    each = sum(_QUERY + steps(e) for pair in ways.yes for e in pair)
    if not scope.afford(len(grid.b) * grid.q_len * each):
        return None
    bq = grid.block[0]
    step = max(1, _BATCH // (bq * (2 * len(ways.yes) + 1)))
    edge = outside(grid).reshape(len(grid.b), grid.rows, 2)
    parts = []
    for s in range(len(grid.b)):
        for r0 in range(0, grid.rows, step):
            r1 = min(r0 + step, grid.rows)
            try:
                seen, hidden = _tiles(ways, grid, scope, s, np.arange(r0 * bq, min(r1 * bq, grid.q_len)))
            except EvaluationError:
                return None
            yes, no = _united(seen, bq), _united(hidden, bq)
            if yes is None or no is None:
                return None
            row, start, stop, kind = sweep(yes, np.concatenate([no, edge[s, r0:r1, None]], axis=1), grid.columns)
            parts.append((np.full(len(row), s), row + r0, start, stop, kind))
    return merge(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def _tiles(ways: Solved, grid: Grid, scope: Scope, s: int, at: Array) -> tuple[Array, Array]:
    """The tiles [start, stop) with a key the query sees, and with a key it does not see: [terms, queries, 2] each."""
    q, k0, bk = grid.q[s] + at, grid.k[s], grid.block[1]
    k1 = k0 + grid.kv_len - 1
    env = {"b": grid.b[s], "h": grid.h[s], "q0": q, "q1": q, "k0": k0, "k1": k1}
    flat = scope.values([e for pair in ways.yes for e in pair], env)
    ends = np.stack([np.broadcast_to(x, q.shape) for x in flat]).reshape(len(ways.yes), 2, -1)
    first, last = np.maximum(ends[:, 0], k0), np.minimum(ends[:, 1], k1)
    first = np.where(first <= last, first, k1 + 1)  # terms that show nothing go behind all keys
    if len(first) > 1:
        order = np.argsort(first, axis=0)
        first, last = np.take_along_axis(first, order, 0), np.take_along_axis(last, order, 0)
    reach = np.maximum.accumulate(np.where(first <= k1, last, k0 - 1), axis=0)
    hidden = [np.vstack([np.full_like(q, k0), reach + 1]), np.vstack([first, np.full_like(q, k1 + 1)])]
    return _in_tiles(first, np.where(first <= k1, last, 0), k0, bk), _in_tiles(hidden[0], hidden[1] - 1, k0, bk)


def _in_tiles(first: Array, last: Array, k0: int, bk: int) -> Array:
    start = (first - k0) // bk
    return np.stack([start, np.where(first <= last, (last - k0) // bk + 1, start)], axis=-1)


def _united(tiles: Array, bq: int) -> Array | None:
    """The union over each row of tiles, term by term, as disjoint pieces [rows, pieces, 2]; empty pieces are 0, 0."""
    terms, queries, _ = tiles.shape
    rows = -(-queries // bq)
    tiles = np.where(tiles[..., :1] < tiles[..., 1:], tiles, -1)  # empty: before all others, and opens no piece
    tiles = np.pad(tiles, ((0, 0), (0, rows * bq - queries), (0, 0)), mode="edge").reshape(terms, rows, bq, 2)
    found = [_pieces(t[..., 0], t[..., 1]) for t in tiles]
    if any(f.shape[1] > _PIECES for f in found):
        return None
    return np.concatenate(found, axis=1)


def _pieces(start: Array, stop: Array) -> Array:
    if (start[:, 1:] < start[:, :-1]).any():
        order = np.argsort(start, axis=1, kind="stable")
        start, stop = np.take_along_axis(start, order, 1), np.take_along_axis(stop, order, 1)
    reach = np.maximum.accumulate(stop, axis=1)
    opens = np.empty(start.shape, bool)
    opens[:, 0] = start[:, 0] >= 0
    np.greater(start[:, 1:], reach[:, :-1], out=opens[:, 1:])
    row, place = np.nonzero(opens)
    count = np.bincount(row, minlength=len(start))
    last = np.append(row[1:] != row[:-1], True) if len(row) else np.zeros(0, bool)
    ends = np.where(last, start.shape[1], np.append(place[1:], 0)) - 1  # a piece reaches to the next
    out = np.zeros((len(start), max(int(count.max(initial=0)), 1), 2), np.int64)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    out[row, within, 0], out[row, within, 1] = start[row, place], reach[row, ends]
    return out
