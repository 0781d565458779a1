"""The closed-form layout of masks whose terms are bounds on q, k, q - k and on k by curves of q, row by row of tiles.

For a conjunction of such bounds and a row of queries `q0..q1`, the keys that some query sees are one interval.
So are the keys that every query sees: four formulas, no search. For a disjunction the intervals of its terms
(and of the terms of its negation, for the tiles that hold an invisible point) are united by a sweep.

Terms that bound the keys of each query in any order are laid out query by query. Where the keys of a row of tiles are
not one interval per term, the intervals of its
queries are written down and united. O(queries x terms), no tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import FALSE, TRUE, Expr, conj, disj, substitute, uses, walk
from frisket.dsl.sugar import maximum, minimum, where
from frisket.dsl.work import steps
from frisket.grammar.memo import memo
from frisket.lowering.plan import Bounds
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.rules_boolean import negate

from .intervals import K0, K1, Q0, Q1
from .runs import Runs, merge
from .solve import Curve, K, Q, System, depends, disjuncts, solve, solve_equal_entries, system
from .tiles import Grid, Scope, outside

Array = NDArray[Any]
Interval = tuple[Expr, Expr]


@dataclass(frozen=True)
class DiagonalCondition:
    """A condition on all queries of the call: every `lows` stays at or below every `highs`. Exprs are distances from q;
    distances that still vary with q have to be evaluated, query by query."""

    lows: tuple[Expr, ...]
    highs: tuple[Expr, ...]


@dataclass(frozen=True)
class Term:
    """A conjunction of bounds: `system` has nothing left over, curves bound k by q."""

    system: System
    curves: tuple[Curve, ...]
    asks: tuple[Expr, ...]  # other conditions on q alone
    needs: Expr  # facts of tables and parameters that make it so

    def values(self, side: str, at: Expr) -> list[Expr]:
        return [substitute(c.value, {Q: at}) for c in self.curves if c.side == side]

    @property
    def diagonal(self) -> DiagonalCondition | None:
        """The condition under which the keys of a row are one interval; None where they always are."""
        lows = [c for c in self.curves if c.side == "low"]
        highs = [c for c in self.curves if c.side == "high"]
        flat = [-d for d in self.system.high["d"]], [-d for d in self.system.low["d"]]
        if not self.curves or not (lows or flat[0]) or not (highs or flat[1]):
            return None
        return DiagonalCondition((*map(_distance, lows), *flat[0]), (*map(_distance, highs), *flat[1]))


def _distance(c: Curve) -> Expr:
    if c.near is not None and "q" not in depends(near := simplify(c.near - Q)):
        return near
    return simplify(c.value - Q)


@dataclass(frozen=True)
class RowIntervals:
    """A mask as intervals of keys, in the first and last query of a row of tiles and the first and last key of the
    call. The intervals hold for single queries where `needs` holds. They hold for rows under three more
    conditions. No condition reads a query alone (`rowwise`). No value of `rises` decreases over the queries of the
    call: its own condition proves that, and where it fails the values are looked at. Every diagonal condition holds."""

    visible: tuple[Interval, ...]
    hidden: tuple[Interval, ...] | None  # of the negation, where that is made of bounds too
    full: Interval | None  # the keys that every query sees, of a mask with one term
    needs: Expr
    rowwise: bool
    rises: tuple[tuple[Expr, Expr], ...]
    diagonals: tuple[DiagonalCondition, ...]

    @cached_property
    def formula(self) -> Bounds | None:
        """The intervals for kernels, whose prologues read no tables by query."""
        if self.full is None or not self.rowwise or any(map(_reads, walk(*self.visible[0], *self.full))):
            return None
        return Bounds(self.visible[0][0], *self.full, self.visible[0][1])


def _reads(e: Expr) -> bool:
    known = e.op in ("lookup", "segment") and not uses(e) & {"q0", "q1"}
    return not known and isinstance(e.name, str) and e.op not in ("var", "param")


@memo(group="expressions")
def row_intervals(mask: Expr) -> RowIntervals | None:
    """The intervals of `mask`, or None where a term is not made of bounds."""
    mine = _terms(mask)
    if mine is None:
        return None
    if len(mine) == 1:
        return _intervals(mine, [], _everywhere(mine[0]))
    theirs = _terms(simplify(negate(mask)))
    return _intervals(mine, theirs or [], None, rowwise=theirs is not None)


def _intervals(
    mine: Sequence[Term], theirs: Sequence[Term], full: Interval | None, rowwise: bool = True
) -> RowIntervals:
    both = [*mine, *theirs]
    curves = [c for t in both for c in t.curves]
    return RowIntervals(
        tuple(_visible(t) for t in mine),
        None if full is not None or not rowwise else tuple(_visible(t) for t in theirs),
        full,
        simplify(conj(*(t.needs for t in both))),
        # a condition on a query alone leaves gaps between the queries of a row
        rowwise and all(not t.asks for t in both),
        tuple(dict.fromkeys((c.value, simplify(c.rising)) for c in curves)),
        tuple(dict.fromkeys(a for a in (t.diagonal for t in both) if a is not None)),
    )


def _terms(mask: Expr) -> list[Term] | None:
    conjunctions = disjuncts(mask)
    parts = [_term(t) for t in conjunctions] if conjunctions is not None else [None]
    known = [p for p in parts if p is not None]
    return known if len(known) == len(parts) else None


@memo(group="expressions")
def _term(term: Expr) -> Term | None:
    s = system(term)
    low, high = ({n: list(x) for n, x in side.items()} for side in (s.low, s.high))
    curves: list[Curve] = []
    asks: list[Expr] = []
    needs = TRUE
    query_conditions = conj(*(e for e in s.rest if "k" not in depends(e)))
    for e in s.rest:
        which = "k" if "k" in depends(e) else "q"  # a bound on q is one on k with the names exchanged
        solution = solve_equal_entries(e, query_conditions) or solve(e if which == "k" else substitute(e, {Q: K}))
        if which == "q" and (solution is None or any(c.needs is not TRUE for c in solution)):
            asks.append(e)
            continue
        if solution is None:
            return None
        needs = conj(needs, *(c.needs for c in solution))
        for c in solution:
            if "q" in depends(c.value):
                curves.append(c)
            else:
                (low if c.side == "low" else high)[which].append(c.value)
    return Term(System(low, high, s.fixed, []), tuple(curves), tuple(asks), needs)


def _everywhere(t: Term) -> Interval:
    """The keys that every query of q0..q1 sees: past the last of the rising lower ends, up to the first upper end."""
    s = t.system
    first = reduce(maximum, (K0, *s.low["k"], *(Q1 - d for d in s.high["d"]), *t.values("low", Q1)))
    last = reduce(minimum, (K1, *s.high["k"], *(Q0 - d for d in s.low["d"]), *t.values("high", Q0)))
    outside = disj(*(x > Q0 for x in s.low["q"]), *(x < Q1 for x in s.high["q"]), *(negate(f) for f in s.fixed))
    return simplify(first), simplify(where(outside, K0 - 1, last) if outside is not FALSE else last)


def _visible(t: Term) -> Interval:
    """The first and last key that some query of q0..q1 sees under `t`; last < first when there is none."""
    start, stop = ends_of_rows(t.system)
    lows, highs = t.values("low", start), t.values("high", stop)
    return visible_keys(t.system, lows, highs, [negate(substitute(a, {Q: Q0})) for a in t.asks])


def ends_of_rows(s: System) -> Interval:
    """The first and the last query of q0..q1 that meets the bounds on q."""
    return reduce(maximum, s.low["q"], Q0), reduce(minimum, s.high["q"], Q1)


def visible_keys(s: System, lows: Sequence[Expr], highs: Sequence[Expr], nothing: Sequence[Expr]) -> Interval:
    """The first and last key that some query of q0..q1 sees under the bounds of a conjunction and further bounds on k.
    Last < first where there is none, and where some condition of `nothing` holds."""
    start, stop = ends_of_rows(s)
    first = reduce(maximum, (K0, *s.low["k"], *(start - d for d in s.high["d"]), *lows))
    last = reduce(minimum, (K1, *s.high["k"], *(stop - d for d in s.low["d"]), *highs))
    empty = disj(
        *(negate(f) for f in s.fixed),
        *nothing,
        *(lo > hi for lo in s.low["d"] for hi in s.high["d"]),
        *(x > stop for x in s.low["q"]),
        *(x < Q0 for x in s.high["q"]),
    )
    empty = simplify(empty)
    return simplify(first), simplify(last if empty is FALSE else where(empty, K0 - 1, last))


def sweep(seen: Array, hidden: Array, columns: int) -> tuple[Array, Array, Array, Array]:
    """Unite intervals of tiles: `seen` and `hidden` are [n, terms, 2], half-open, empty where stop <= start.
    Returns (row, start, stop, kind) of the maximal runs, kind 1 where hidden reaches, else 2."""
    n = len(seen)
    cuts = np.sort(np.clip(np.concatenate([seen.reshape(n, -1), hidden.reshape(n, -1)], axis=1), 0, columns), axis=1)
    start, stop = cuts[:, :-1], cuts[:, 1:]

    def covered(parts: Array) -> Array:
        hit = np.zeros(start.shape, bool)
        for t in range(parts.shape[1]):
            hit |= (parts[:, t, :1] <= start) & (start < parts[:, t, 1:])
        return hit

    visible = (start < stop) & covered(seen)
    kind = np.where(covered(hidden), 1, 2)
    row, at = np.nonzero(visible)
    return row, start[row, at], stop[row, at], kind[row, at]


_QUERY = 60  # steps for an interval of a query, besides those of its ends
_PIECES = 64  # tile ranges a row may have before tiles are asked instead
_BATCH = 1 << 19  # intervals held at a time


def by_query(intervals: RowIntervals, grid: Grid, scope: Scope) -> Runs | None:
    """The runs of a mask from the intervals of its queries; None where they take too much work."""
    if not scope.afford(len(grid.b) * grid.q_len * sum(_QUERY + steps(e) for pair in intervals.visible for e in pair)):
        return None
    bq = grid.block[0]
    step = max(1, _BATCH // (bq * (2 * len(intervals.visible) + 1)))
    edge = outside(grid).reshape(len(grid.b), grid.rows, 2)
    parts = []
    for s in range(len(grid.b)):
        for r0 in range(0, grid.rows, step):
            r1 = min(r0 + step, grid.rows)
            try:
                seen, hidden = _tiles(intervals, grid, scope, s, np.arange(r0 * bq, min(r1 * bq, grid.q_len)))
            except EvaluationError:
                return None
            yes, no = _united(seen, bq), _united(hidden, bq)
            if yes is None or no is None:
                return None
            row, start, stop, kind = sweep(yes, np.concatenate([no, edge[s, r0:r1, None]], axis=1), grid.columns)
            parts.append((np.full(len(row), s), row + r0, start, stop, kind))
    return merge(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def _tiles(intervals: RowIntervals, grid: Grid, scope: Scope, s: int, at: Array) -> tuple[Array, Array]:
    """The tiles [start, stop) with a key the query sees, and with a key it does not see: [terms, queries, 2] each."""
    q, k0, bk = grid.q[s] + at, grid.k[s], grid.block[1]
    k1 = k0 + grid.kv_len - 1
    env = {"b": grid.b[s], "h": grid.h[s], "q0": q, "q1": q, "k0": k0, "k1": k1}
    flat = scope.values([e for pair in intervals.visible for e in pair], env)
    ends = np.stack([np.broadcast_to(x, q.shape) for x in flat]).reshape(len(intervals.visible), 2, -1)
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
    pieces = [_pieces(t[..., 0], t[..., 1]) for t in tiles]
    return None if any(f.shape[1] > _PIECES for f in pieces) else np.concatenate(pieces, axis=1)


def _pieces(start: Array, stop: Array) -> Array:
    if (start[:, 1:] < start[:, :-1]).any():  # sorted rows need no second sort
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
