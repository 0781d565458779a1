"""Facts of a layout: visible pairs, rows without a key, runs per row. Exact, or an error that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BudgetError, EvaluationError
from frisket.dsl.ir import TRUE, Expr, substitute, var
from frisket.dsl.work import steps
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.spans import Runs

from .count import Rowwise
from .decide import first_empty_row
from .groups import Beyond
from .tiles import FULL, Grid, Scope, Spent

Array = NDArray[Any]
_BATCH = 1 << 18
_TILE = 64  # steps for a tile itself


@memo(group="expressions")
def sees_itself(mask: Expr) -> bool:
    """Whether every query provably sees the key at its own position, as under most causal masks: no row is empty, then,
    where that key is part of the call.

    >>> from frisket.dsl.sugar import q, k
    >>> sees_itself((q >= k) & (q - k < 256))
    True
    """
    return simplify(substitute(mask, {var("k"): var("q")})) is TRUE


def row_counts(mask: Expr, grid: Grid, scope: Scope, runs: Callable[[], Runs]) -> Array:
    """The number of keys each query sees, int64 [slices, q_len].

    Masks made of clauses that can be solved by row are counted without looking at pairs; others from their runs,
    looking only at PARTIAL tiles. Raises `BudgetError` when that takes more than `scope.work` steps.
    """
    try:
        return np.stack([r.counts() for r in _by_row(mask, grid, scope)])
    except (Beyond, EvaluationError, Spent):
        return _from_runs(mask, grid, scope, runs())


def pair_counts(mask: Expr, grid: Grid, scope: Scope, runs: Callable[[], Runs]) -> Array:
    """The number of visible pairs of each slice, int64 [slices]: sums of `row_counts`, if possible in closed form."""
    try:
        return np.array([r.total() for r in _by_row(mask, grid, scope)], np.int64)
    except (Beyond, EvaluationError, Spent):
        return np.asarray(_from_runs(mask, grid, scope, runs()).sum(axis=1))


def _by_row(mask: Expr, grid: Grid, scope: Scope) -> Iterator[Rowwise]:
    for s in range(len(grid.b)):  # one at a time: what is kept of a slice is O(queries + keys)
        yield Rowwise(mask, grid, scope, s)


def no_row_empty(mask: Expr, grid: Grid, scope: Scope) -> bool | None:
    """Whether every query sees a key; None where the answer takes more work than `scope.work`."""
    try:
        return first_empty_row(mask, grid, scope) is None
    except Spent:
        return None


def _from_runs(mask: Expr, grid: Grid, scope: Scope, runs: Runs) -> Array:
    bq, bk = grid.block
    out = np.zeros((len(grid.b), grid.rows, bq), np.int64)
    full = runs.kind == FULL
    np.add.at(out, (runs.slice[full], runs.row[full]), ((runs.stop - runs.start)[full] * bk)[:, None])
    width = np.where(full, 0, runs.stop - runs.start)
    tiles = int(width.sum())
    if tiles * (bq * bk * steps(mask) + _TILE) > scope.work:
        raise BudgetError(
            f"counting the visible pairs would look at {tiles * bq * bk:,} elements of {tiles:,} partial tiles\n"
            "  ask for a smaller crop, or for the tile counts, which are exact without it"
        )
    index = np.repeat(np.arange(len(width)), width)
    column = runs.start[index] + np.arange(tiles) - np.repeat(np.cumsum(width) - width, width)
    step = max(1, _BATCH // (bq * bk))
    for at in range(0, tiles, step):
        s, r, c = (x[at : at + step] for x in (runs.slice[index], runs.row[index], column))
        q, k = r[:, None, None] * bq + np.arange(bq)[:, None], c[:, None, None] * bk + np.arange(bk)
        inside = (q < grid.q_len) & (k < grid.kv_len)
        env = {
            "b": grid.b[s][:, None, None], "h": grid.h[s][:, None, None],
            "q": q + grid.q[s][:, None, None], "k": k + grid.k[s][:, None, None],
        }  # fmt: skip
        seen = np.broadcast_to(scope.value(mask, env), inside.shape) & inside
        np.add.at(out, (s, r), seen.sum(axis=2))
    return out.reshape(len(grid.b), -1)[:, : grid.q_len]
