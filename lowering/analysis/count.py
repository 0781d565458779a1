"""Counts the keys each query sees, without looking at pairs: clauses solved a row of queries at a time.

A conjunction leaves each query one range of keys and, in it, residues, a set or a group of equal keys. Digits are
counted by arithmetic, sets and functions of q - k by prefix sums, groups by their sorted members. Ranges are
united by a sweep; what is not a range joins by inclusion and exclusion in the gaps between them.

Work is O(queries + keys) per slice and conjunction, up to a sort; nothing grows with their product.

An Int of the query is quasi-affine when `f(q + p) == f(q) + s` for every q. If all ends of a mask's clauses are,
with a common period, the number of keys a query sees is quasi-affine too, except near queries where two ends
cross. Cut there; on a piece, two periods tell all others (as for Ehrhart's quasi-polynomials).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import COMPARISONS, COORDINATES, FALSE, Expr, build, conj, lit, substitute, var, walk
from frisket.dsl.types import INT
from frisket.dsl.work import steps
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import linear, write

from .clauses import (
    Clause,
    Conjunction,
    Digit,
    KeyPosition,
    Keys,
    Limit,
    OnDistance,
    OnKeyFunction,
    QueryCondition,
    Unequal,
    clause_disjuncts,
)
from .groups import Beyond, Groups, KeyFunction, below, chain, chained
from .questions import quasi_affine
from .tiles import Grid, Scope

Array = NDArray[Any]
ROWS = 1 << 16  # queries solved in one go
_JOINT = 5  # conjunctions that are no ranges, joined by inclusion and exclusion
_UNEQUAL = 3
_ROW = 100  # steps for a clause of a query, besides those of its functions


@dataclass(frozen=True)
class KeyInterval:
    """A conjunction over some queries: keys `lo..hi` (inclusive), and further conditions on the keys."""

    lo: Array
    hi: Array
    digits: Mapping[Digit, tuple[Array, Array]] = field(default_factory=dict)  # least and greatest
    keys: frozenset[Expr] = frozenset()
    groups: Mapping[Expr, Array] = field(default_factory=dict)  # function of the key: its value
    distances: frozenset[Expr] = frozenset()
    unequal: tuple[tuple[OnKeyFunction | Digit, Array], ...] = ()

    @property
    def plain(self) -> bool:
        return not (self.digits or self.keys or self.groups or self.distances or self.unequal)

    def within(self, lo: Array, hi: Array) -> KeyInterval:
        return replace(self, lo=np.maximum(self.lo, lo), hi=np.minimum(self.hi, hi))

    def digit(self, of: Digit, least: Array, greatest: Array) -> KeyInterval:
        a, b = self.digits.get(of, (np.asarray(0), np.asarray(of.base - 1)))
        return replace(self, digits={**self.digits, of: (np.maximum(a, least), np.minimum(b, greatest))})

    def group(self, of: Expr, value: Array) -> KeyInterval:
        if of not in self.groups:
            return replace(self, groups={**self.groups, of: value})
        return self.where(self.groups[of] == value)

    def where(self, rows: Array) -> KeyInterval:
        return replace(self, hi=np.where(rows, self.hi, self.lo - 1))  # an empty range where the condition fails

    def both(self, other: KeyInterval) -> KeyInterval:
        keys, distances = self.keys | other.keys, self.distances | other.distances
        inside, unequal = self.within(other.lo, other.hi), self.unequal + other.unequal
        out = replace(inside, keys=keys, distances=distances, unequal=unequal)
        for of, (least, greatest) in other.digits.items():
            out = out.digit(of, least, greatest)
        for e, value in other.groups.items():
            out = out.group(e, value)
        return out


class Rowwise:
    """The rows of one slice of a grid: `Rowwise(mask, grid, scope, slice)`; raises `Beyond` where it cannot."""

    def __init__(self, mask: Expr, grid: Grid, scope: Scope, slice: int) -> None:
        self.mask = literal(mask, scope.env)
        disjuncts = clause_disjuncts(self.mask)
        if disjuncts is None:
            raise Beyond
        self.disjuncts, self.scope = disjuncts, scope
        self.each = sum(_ROW + sum(map(steps, _reads(c))) for one in disjuncts for c in one) + _ROW
        self.at = {"b": int(grid.b[slice]), "h": int(grid.h[slice])}
        self.q0, self.q_len = int(grid.q[slice]), grid.q_len
        self.k0, self.k1 = int(grid.k[slice]), int(grid.k[slice]) + grid.kv_len - 1
        self._on_distance: dict[frozenset[Expr], Array] = {}
        self._sets: dict[frozenset[Expr], Array] = {}
        self._functions: dict[Expr, KeyFunction] = {}
        self._groups: dict[tuple[tuple[Expr, ...], frozenset[Expr]], Groups] = {}

    # -- what is asked ----------------------------------------------------------------------------

    @cached_property
    def pieces(self) -> list[Piece] | None:
        """The pieces of queries on which the count is affine, if there are any."""

        def value(e: Expr, q: Array) -> Array:
            return np.broadcast_to(self.scope.value(e, {**self.at, "q": q}), q.shape)

        return pieces(self.disjuncts, self.q0, self.q0 + self.q_len, (self.k0, self.k1), value)

    def chunks(self, first: int = ROWS) -> Iterator[Array]:
        """The queries, in global positions, in chunks: a few at first and more later."""
        start, width = 0, first
        while start < self.q_len:
            stop = min(start + width, self.q_len)
            yield np.arange(self.q0 + start, self.q0 + stop)
            # a witness is often among the first, and a large chunk costs less a query
            start, width = stop, min(4 * width, ROWS)

    def telling(self) -> Iterator[Array]:
        """Queries in order, of which some sees no key (or some key) if any query at all does."""
        if self.pieces is None:
            yield from self.chunks(ROWS // 16)
        else:
            yield from (p.samples() for p in self.pieces)

    def counts(self) -> Array:
        """The number of keys each query of the slice sees, int64 [q_len]."""
        return np.concatenate([self._paid(q) for q in self.chunks()])

    def total(self) -> int:
        """The number of visible pairs of all queries."""
        if self.pieces is None:
            return sum(int(self._paid(q).sum()) for q in self.chunks())
        return sum(p.total(self._paid(p.samples())) for p in self.pieces)

    def _paid(self, q: Array) -> Array:
        self.scope.spend(len(q) * self.each)
        return self.count(q)

    def sees_a_key(self, q: Array) -> Array:
        """Whether each query sees a key: bool [queries]."""
        out = np.zeros(len(q), bool)
        for p in self._parts(q):
            out |= self._count(p, q) > 0
        return out

    def count(self, q: Array) -> Array:
        """The number of keys each query sees, int64 [queries]."""
        parts = self._parts(q)
        plain, rest = [p for p in parts if p.plain], [p for p in parts if not p.plain]
        if len(rest) > _JOINT:  # inclusion and exclusion takes 2**n counts
            raise Beyond
        covered, gaps = self._union(plain, len(q))
        for n in range(1, len(rest) + 1):
            for some in combinations(rest, n):
                joint = some[0]
                for p in some[1:]:
                    joint = joint.both(p)
                for lo, hi in gaps:
                    covered = covered + (-1) ** (n + 1) * self._count(joint.within(lo, hi), q)
        return covered

    def _union(self, plain: Sequence[KeyInterval], n: int) -> tuple[Array, list[tuple[Array, Array]]]:
        """The keys that ranges cover together, and the gaps between the ranges."""
        if not plain:
            return np.zeros(n, np.int64), [(np.asarray(self.k0), np.asarray(self.k1))]
        ends = [self._ends(p) for p in plain]
        first = np.stack([np.broadcast_to(lo, (n,)) for lo, _ in ends])
        last = np.stack([np.broadcast_to(hi, (n,)) for _, hi in ends])
        if len(plain) > 1:  # the sweep takes ranges by their first key
            order = np.argsort(first, axis=0)
            first, last = np.take_along_axis(first, order, 0), np.take_along_axis(last, order, 0)
        reach = np.concatenate([np.full((1, n), self.k0 - 1), np.maximum.accumulate(last, axis=0)])
        total = np.maximum(last - np.maximum(first, reach[:-1] + 1) + 1, 0).sum(axis=0)
        gaps = [(reach[i] + 1, first[i] - 1) for i in range(len(plain))]
        return total, [*gaps, (reach[-1] + 1, np.asarray(self.k1))]

    # -- clauses over some queries ----------------------------------------------------------------

    def _parts(self, q: Array) -> list[KeyInterval]:
        functions = dict.fromkeys(e for c in self.disjuncts for one in c for e in _reads(one))
        arrays = self.scope.values(list(functions), {**self.at, "q": q}) if functions else []
        values = dict(zip(functions, arrays, strict=True))
        whole = KeyInterval(np.asarray(self.k0), np.asarray(self.k1))
        return [self._part(c, whole, values) for c in self.disjuncts]

    def _part(self, clauses: Conjunction, part: KeyInterval, values: Mapping[Expr, Array]) -> KeyInterval:
        for c in clauses:
            if isinstance(c, QueryCondition):
                part = part.where(values[c.e])
            elif isinstance(c, Keys):
                part = replace(part, keys=part.keys | {c.e})
            elif isinstance(c, OnDistance):
                part = replace(part, distances=part.distances | {c.e})
            elif isinstance(c, Limit):
                pick = np.minimum if c.side == "low" else np.maximum
                f = pick.reduce(np.broadcast_arrays(*(values[f] for f in c.fs)))
                if c.rows is not FALSE:
                    far = -(2**62) if c.side == "low" else 2**62  # past every key, and sums with it fit 64 bits
                    f = np.where(values[c.rows], far, f)
                part = self._limited(part, c.of, c.side, f)
            elif isinstance(c.of, KeyPosition):
                raise Beyond
            elif isinstance(c, Unequal):
                part = replace(part, unequal=(*part.unequal, (c.of, values[c.f])))
            else:
                part = self._equal(part, c.of, values[c.f])
        return part

    def _limited(self, part: KeyInterval, of: KeyPosition | Digit | OnKeyFunction, side: str, f: Array) -> KeyInterval:
        low = side == "low"
        if isinstance(of, KeyPosition):
            return part.within(f, np.asarray(self.k1)) if low else part.within(np.asarray(self.k0), f)
        if isinstance(of, Digit):
            return part.digit(of, f, np.asarray(of.base - 1)) if low else part.digit(of, np.asarray(0), f)
        return part.within(*self._function(of.e).range(f if low else None, None if low else f))

    def _equal(self, part: KeyInterval, of: OnKeyFunction | Digit, f: Array) -> KeyInterval:
        if isinstance(of, Digit):
            return part.digit(of, f, f)
        known = self._function(of.e)
        return part.within(*known.range(f, f)) if known.direction else part.group(of.e, f)

    def _function(self, e: Expr) -> KeyFunction:
        if e not in self._functions:
            self._functions[e] = KeyFunction(self._over_keys(e), self.k0)
        return self._functions[e]

    def _over_keys(self, e: Expr) -> Array:
        k = np.arange(self.k0, self.k1 + 1)
        self.scope.spend(len(k) * steps(e))
        return np.broadcast_to(self.scope.value(e, {**self.at, "k": k}), k.shape)

    # -- counting one conjunction -----------------------------------------------------------------

    def _ends(self, p: KeyInterval) -> tuple[Array, Array]:
        """The ends `lo..hi` of a range within the keys; an empty range has hi = lo - 1."""
        lo = np.clip(p.lo, self.k0, self.k1 + 1)
        return lo, np.maximum(np.minimum(p.hi, self.k1), lo - 1)

    def _count(self, p: KeyInterval, q: Array) -> Array:
        if p.unequal:
            return self._count_unequal(p, q)
        if not chained(p.digits):  # `k % 2` and `k % 4` are no digits of one number
            p = _folded(p)
        if p.digits and (p.groups or p.keys or not chained(p.digits)):
            p = self._digits_spread(p)
        lo, hi = self._ends(p)
        if p.distances:
            if p.keys or p.groups or p.digits:
                raise Beyond  # a set of distances and a set of keys meet pair by pair
            sums, first = self._distance_sums(p.distances), self.q0 - self.k1
            return np.asarray(np.where(hi < lo, 0, sums[q - lo - first + 1] - sums[np.minimum(q - hi, q - lo) - first]))
        if p.groups:
            return self._grouped(p).count(list(p.groups.values()), lo - self.k0, hi - self.k0)
        if p.keys:
            sums = self._set_sums(p.keys)
            return np.asarray(sums[hi - self.k0 + 1] - sums[lo - self.k0])
        if p.digits:
            order = chain(p.digits)
            return np.asarray(below(hi + 1, order, p.digits) - below(lo, order, p.digits))
        return np.broadcast_to(hi - lo + 1, q.shape)

    def _count_unequal(self, p: KeyInterval, q: Array) -> Array:
        """The number of keys that differ: all keys less the equal ones."""
        if len(p.unequal) > _UNEQUAL:
            raise Beyond
        (of, f), rest = p.unequal[0], replace(p, unequal=p.unequal[1:])
        return self._count(rest, q) - self._count(self._equal(rest, of, f), q)

    def _digits_spread(self, p: KeyInterval) -> KeyInterval:
        """Digits with a set or a group: a digit that is the same for every query is a set, one value a group."""
        out = replace(p, digits={})
        for of, (least, greatest) in p.digits.items():
            digit = build("mod", build("floordiv", var("k"), lit(of.step)), lit(of.base))
            if least.size == greatest.size == 1:
                condition = conj(digit >= int(least.flat[0]), digit <= int(greatest.flat[0]))
                out = replace(out, keys=out.keys | {condition})
            elif np.any(least < greatest):
                raise Beyond
            else:
                out = out.where(least == greatest).group(digit, least)
        return out

    def _distance_sums(self, terms: frozenset[Expr]) -> Array:
        """The number of distances below each of q0 - k1 .. q1 - k0 + 1 at which the conditions on d hold."""
        if terms not in self._on_distance:
            d = np.arange(self.q0 - self.k1, self.q0 + self.q_len - self.k0)
            self.scope.spend(len(d) * sum(map(steps, terms)))
            # sorted: a set of terms has another order in every process
            self._on_distance[terms] = _sums(self.scope.value(conj(*sorted(terms, key=str)), {**self.at, "d": d}), d)
        return self._on_distance[terms]

    def _set_sums(self, keys: frozenset[Expr]) -> Array:
        if keys not in self._sets:
            self._sets[keys] = _sums(self._over_keys(conj(*sorted(keys, key=str))), np.empty(self.k1 - self.k0 + 1))
        return self._sets[keys]

    def _grouped(self, p: KeyInterval) -> Groups:
        name = tuple(p.groups), p.keys
        if name not in self._groups:
            counted = self._over_keys(conj(*sorted(p.keys, key=str))) if p.keys else None
            self._groups[name] = Groups([self._over_keys(e) for e in p.groups], counted)
        return self._groups[name]


def _folded(p: KeyInterval) -> KeyInterval:
    """The part with conditions on `k % 2` turned into conditions on the query where `k % 4` is given."""
    digits, rows = dict(p.digits), np.asarray(True)
    for x in p.digits:
        for y, (least, greatest) in p.digits.items():
            finer = x in digits and x.step == y.step and x.base < y.base and y.base % x.base == 0
            if finer and np.all(least >= greatest):
                lo, hi = digits.pop(x)
                rows = rows & (lo <= least % x.base) & (least % x.base <= hi)
    return replace(p, digits=digits).where(rows)


def literal(mask: Expr, values: Mapping[str, Any]) -> Expr:
    """The mask with the values of sizes and parameters written in."""
    known = {
        n: lit(x.item() if hasattr(x := values[n.name], "item") else x)
        for n in walk(mask)
        if n.op in ("param", "var") and n.name in values and n.name not in COORDINATES
    }
    return simplify(substitute(mask, known)) if known else mask


def _reads(c: Clause) -> tuple[Expr, ...]:
    """The functions of the query in a clause."""
    if isinstance(c, QueryCondition):
        return (c.e,)
    if isinstance(c, Limit):
        return c.fs if c.rows is FALSE else (*c.fs, c.rows)
    return () if isinstance(c, Keys | OnDistance) else (c.f,)


def _sums(truth: Array, like: Array) -> Array:
    out = np.zeros(like.shape[0] + 1, np.int64)
    np.cumsum(np.broadcast_to(truth, like.shape), out=out[1:])
    return out


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

    def samples(self) -> Integers:
        """The queries that determine the piece: the first two periods and the last, and the remainder."""
        if not self.periods or not self.period:
            return np.arange(self.start, self.stop)
        two, tail = self.start + 2 * self.period, self.start + (self.periods - 1) * self.period
        return np.concatenate([np.arange(self.start, two), np.arange(tail, self.stop)])

    def total(self, count: Integers) -> int:
        """The sum over the piece, from the counts of the `samples`."""
        if not self.periods or not self.period:
            return int(count.sum())
        p, n = self.period, self.periods
        first, second = int(count[:p].sum()), int(count[p : 2 * p].sum())
        return n * first + (second - first) * (n * (n - 1) // 2) + int(count[3 * p :].sum())


def pieces(
    disjuncts: list[Conjunction], start: int, stop: int, ends: tuple[int, int], value: Value
) -> list[Piece] | None:
    """The pieces of queries `start..stop - 1` over keys `ends`, or None where the clauses are not quasi-affine or
    looking at every query is less work. `value(e, q)` is an Int of the query at queries q."""
    periodic = _ends(disjuncts)
    if periodic is None:
        return None
    period, edges, signs = periodic
    if period > min(_LONGEST, (stop - start) // 8):  # too few periods to leave any out
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
    return out if sum(len(p.samples()) for p in out) <= (stop - start) // 2 else None


class _Line:
    """A quasi-affine Int: the values over one period, and the gain per period."""

    def __init__(self, e: Expr, period: int, value: Value) -> None:
        known = quasi_affine(e, _Q)
        assert known is not None
        self.period, self.gain = period, known[1] * (period // known[0])
        self.values = value(e, np.arange(period))

    def near(self, other: _Line) -> tuple[int, int] | None:
        """The first and last + 1 of the queries where two lines may be close; None if they keep their distance."""
        gain, distance = self.gain - other.gain, self.values - other.values
        if gain == 0:
            return None
        if gain < 0:
            gain, distance = -gain, -distance
        first = (-_NEAR - int(distance.max())) // gain
        last = -((int(distance.min()) - _NEAR) // gain)
        return first * self.period, (last + 1) * self.period


def _ends(disjuncts: list[Conjunction]) -> tuple[int, list[Expr], list[Expr]] | None:
    """(common period, ends of ranges of keys, Ints whose sign matters) of a clause; None if not quasi-affine."""
    edges, signs, turning = dict[Expr, None](), dict[Expr, None](), dict[Expr, None]()
    turn = 1  # every digit of a key comes back after so many keys
    for clause in (c for one in disjuncts for c in one):
        for form in _forms(_condition(clause)):
            if form is None:
                return None
            signs[form] = None
        read = _limits(clause)
        if read is None:
            return None  # a set of keys or of distances has no ends that repeat
        of, fs = read
        (edges if isinstance(of, KeyPosition) else turning).update(dict.fromkeys(fs))
        turn = turn if isinstance(of, KeyPosition) else math.lcm(turn, of.step * of.base)
    known = {e: quasi_affine(e, _Q) for e in (*edges, *signs, *turning)}
    if any(pair is None or (e in turning and pair[1]) for e, pair in known.items()):
        return None
    period = math.lcm(turn, *(pair[0] for pair in known.values() if pair is not None))
    # the ends, too, are to come back to the same digits
    again = [turn // math.gcd(turn, g[1] * (period // g[0])) for g in [known[e] for e in edges] if g is not None]
    period *= math.lcm(1, *again)
    return period, list(edges), list(signs)


def _condition(clause: Clause) -> Expr:
    return clause.e if isinstance(clause, QueryCondition) else clause.rows if isinstance(clause, Limit) else FALSE


def _limits(clause: Clause) -> tuple[KeyPosition | Digit, tuple[Expr, ...]] | None:
    """The key or digit that a clause limits, and the Ints of the query it is compared with."""
    if isinstance(clause, QueryCondition):
        return KeyPosition(), ()
    if isinstance(clause, Keys | OnDistance) or isinstance(clause.of, OnKeyFunction):
        return None
    return clause.of, clause.fs if isinstance(clause, Limit) else (clause.f,)


def _forms(rows: Expr) -> Iterator[Expr | None]:
    """The Ints compared with 0 in a condition on the query; None for a condition that compares no Ints."""
    if rows.op in ("and", "or", "not"):
        for a in rows.args:
            yield from _forms(a)
    elif rows.op in COMPARISONS and rows.args[0].type is INT:
        yield write(linear(rows.args[0]) - linear(rows.args[1]))
    elif "q" in {n.name for n in walk(rows) if n.op == "var"}:
        yield None
