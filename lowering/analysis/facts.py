"""What a layout is good for: visible pairs, rows without a key, runs per row. Exact, or an error that says so."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BudgetError
from frisket.dsl.ir import TRUE, Expr, substitute, var

from ..simplify import simplify
from .rows import intervals
from .spans import Runs
from .tiles import FULL, Grid, Scope

Array = NDArray[Any]
_BATCH = 1 << 21


def sees_itself(mask: Expr) -> bool:
    """Whether every query provably sees the key at its own position, as under most causal masks: no row is
    empty, then, where that key is part of the call.

    >>> from frisket.dsl.sugar import q, k
    >>> sees_itself((q >= k) & (q - k < 256))
    True
    """
    return simplify(substitute(mask, {var("k"): var("q")})) is TRUE


def row_counts(mask: Expr, grid: Grid, scope: Scope, runs: Runs) -> Array:
    """How many keys each query sees, int64 [slices, q_len].

    Masks made of bounds are counted in closed form; others from their runs, looking only at PARTIAL tiles.
    Raises `BudgetError` when that is more than `scope.work` elements.
    """
    yes = intervals(mask)
    return _from_intervals(yes, grid, scope) if yes is not None else _from_runs(mask, grid, scope, runs)


def _from_intervals(yes: tuple[tuple[Expr, Expr], ...], grid: Grid, scope: Scope) -> Array:
    out = np.zeros((len(grid.b), grid.q_len), np.int64)
    k0, k1 = grid.k[:, None], grid.k[:, None] + grid.kv_len - 1
    for start in range(0, grid.q_len, _BATCH):
        stop = min(start + _BATCH, grid.q_len)
        q = grid.q[:, None] + np.arange(start, stop)
        env = {"b": grid.b[:, None], "h": grid.h[:, None], "q0": q, "q1": q, "k0": k0, "k1": k1}
        ends = [[np.broadcast_to(scope.value(e, env), q.shape) for e in pair] for pair in yes]
        first = np.stack([p[0] for p in ends])
        last = np.maximum(np.stack([p[1] for p in ends]), first - 1)
        if len(yes) > 1:  # the length of a union: sorted by start, each adds what lies past all before
            order = np.argsort(first, axis=0)
            first, last = np.take_along_axis(first, order, 0), np.take_along_axis(last, order, 0)
            reach = np.maximum.accumulate(last, axis=0)
            first[1:] = np.maximum(first[1:], reach[:-1] + 1)
        out[:, start:stop] = np.maximum(last - first + 1, 0).sum(axis=0)
    return out


def _from_runs(mask: Expr, grid: Grid, scope: Scope, runs: Runs) -> Array:
    bq, bk = grid.block
    out = np.zeros((len(grid.b), grid.rows, bq), np.int64)
    full = runs.kind == FULL
    np.add.at(out, (runs.slice[full], runs.row[full]), ((runs.stop - runs.start)[full] * bk)[:, None])
    width = np.where(full, 0, runs.stop - runs.start)
    tiles = int(width.sum())
    if tiles * bq * bk > scope.work:
        raise BudgetError(
            f"counting the visible pairs would look at {tiles * bq * bk:,} elements of {tiles:,} border tiles\n"
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
