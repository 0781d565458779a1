"""Pieces of a row of queries on which a count is quasi-affine: the count of a query repeats with a shift.

An Int of the query is quasi-affine when `f(q + p) == f(q) + s` for every q. If all ends of a mask's clauses are,
with a common period, the number of keys a query sees is quasi-affine too, except near queries where two ends
cross. Cut there; on a piece, two periods tell all others (as for Ehrhart's quasi-polynomials).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import COMPARISONS, TRUE, Expr, lit, var, walk
from frisket.dsl.types import INT
from frisket.lowering.simplify.affine import linear, write

from .clauses import Along, Clause, Conjunction, Digit, KeyPosition, Keys, Of, QueryCondition, Widest
from .questions import _period

Integers = NDArray[np.int64]
Value = Callable[[Expr, Integers], Integers]
_NEAR = 2  # ends this near each other may change places by the ones that bounds add and take away
_LONGEST = 1 << 16  # periods
_Q = var("q")


@dataclass(frozen=True)
class Piece:
    """Queries `start..stop - 1`, on which the count repeats with a shift; no period: on which it may not."""

    start: int
    stop: int
    period: int | None

    @property
    def periods(self) -> int:
        """The number of whole periods, where there are enough to leave some out."""
        whole = (self.stop - self.start) // self.period if self.period else 0
        return whole if whole > 3 else 0

    def asked(self) -> Integers:
        """The queries that determine the piece: the first two periods and the last, and the remainder."""
        if not self.periods or not self.period:
            return np.arange(self.start, self.stop)
        two, tail = self.start + 2 * self.period, self.start + (self.periods - 1) * self.period
        return np.concatenate([np.arange(self.start, two), np.arange(tail, self.stop)])

    def total(self, count: Integers) -> int:
        """The sum over the piece, from the counts of the queries `asked`."""
        if not self.periods or not self.period:
            return int(count.sum())
        p, n = self.period, self.periods
        first, second = int(count[:p].sum()), int(count[p : 2 * p].sum())
        return n * first + (second - first) * (n * (n - 1) // 2) + int(count[3 * p :].sum())


def pieces(
    conjunctions: list[Conjunction], start: int, stop: int, ends: tuple[int, int], value: Value
) -> list[Piece] | None:
    """The pieces of queries `start..stop - 1` over keys `ends`, or None where the clauses are not quasi-affine or
    looking at every query is less work. `value(e, q)` is an Int of the query at queries q."""
    found = _ends(conjunctions)
    if found is None:
        return None
    period, edges, signs = found
    if period > min(_LONGEST, (stop - start) // 8):
        return None
    lines = {e: _Line(e, period, value) for e in {*edges, *signs, *map(lit, ends)}}
    crossings = [(lines[x], lines[y]) for x, y in combinations([*edges, *map(lit, ends)], 2)]
    crossings += [(lines[e], _Line(lit(0), period, value)) for e in signs]
    near = sorted(n for n in (x.near(y) for x, y in crossings) if n is not None)
    out, at = list[Piece](), start
    for first, last in [*near, (stop, stop)]:
        a, b = min(max(first, at), stop), min(max(last, at), stop)
        out += [Piece(at, a, period), Piece(a, b, None)]
        at = b
    out = [p for p in out if p.start < p.stop]
    return out if sum(len(p.asked()) for p in out) <= (stop - start) // 2 else None


class _Line:
    """A quasi-affine Int: the values over one period, and the gain per period."""

    def __init__(self, e: Expr, period: int, value: Value) -> None:
        known = _period(e, _Q)
        assert known is not None
        self.period, self.gain = period, known[1] * (period // known[0])
        self.values = value(e, np.arange(period))

    def near(self, other: _Line) -> tuple[int, int] | None:
        """The first and last + 1 of the queries where two lines may be close; None if they keep their distance."""
        gain, apart = self.gain - other.gain, self.values - other.values
        if gain == 0:
            return None
        if gain < 0:
            gain, apart = -gain, -apart
        first = (-_NEAR - int(apart.max())) // gain
        last = -((int(apart.min()) - _NEAR) // gain)
        return first * self.period, (last + 1) * self.period


def _ends(conjunctions: list[Conjunction]) -> tuple[int, list[Expr], list[Expr]] | None:
    """(common period, ends of ranges of keys, Ints whose sign matters) of a clause; None if not quasi-affine."""
    edges, signs, turning = dict[Expr, None](), dict[Expr, None](), dict[Expr, None]()
    turn = 1  # every digit of a key comes back after so many keys
    for clause in (c for one in conjunctions for c in one):
        for form in _forms(_condition(clause)):
            if form is None:
                return None
            signs[form] = None
        read = _limits(clause)
        if read is None:
            return None
        of, fs = read
        (edges if isinstance(of, KeyPosition) else turning).update(dict.fromkeys(fs))
        turn = turn if isinstance(of, KeyPosition) else math.lcm(turn, of.step * of.base)
    known = {e: _period(e, _Q) for e in (*edges, *signs, *turning)}
    if any(found is None or (e in turning and found[1]) for e, found in known.items()):
        return None
    period = math.lcm(turn, *(found[0] for found in known.values() if found is not None))
    gains = [known[e] for e in edges]
    # the ends, too, are to come back to the same digits
    again = [turn // math.gcd(turn, g[1] * (period // g[0])) for g in gains if g is not None]
    period *= math.lcm(1, *again)
    return period, list(edges), list(signs)


def _condition(clause: Clause) -> Expr:
    return clause.e if isinstance(clause, QueryCondition) else clause.rows if isinstance(clause, Widest) else TRUE


def _limits(clause: Clause) -> tuple[KeyPosition | Digit, tuple[Expr, ...]] | None:
    """The key or digit that a clause limits, and the Ints of the query it is compared with."""
    if isinstance(clause, QueryCondition):
        return KeyPosition(), ()
    if isinstance(clause, Keys | Along) or isinstance(clause.of, Of):
        return None
    return clause.of, clause.fs if isinstance(clause, Widest) else (clause.f,)


def _forms(rows: Expr) -> Iterator[Expr | None]:
    """The Ints compared with 0 in a condition on the query; None for a condition that compares no Ints."""
    if rows.op in ("and", "or", "not"):
        for a in rows.args:
            yield from _forms(a)
    elif rows.op in COMPARISONS and rows.args[0].type is INT:
        yield write(linear(rows.args[0]) - linear(rows.args[1]))
    elif "q" in {n.name for n in walk(rows) if n.op == "var"}:
        yield None
