"""Intervals of keys for a row of queries, without reading a table: the starting point of the device planner.

Every literal of a term is read as bounds on k whose ends are the ends of some Expr over the queries `q0..q1`, so
the interval of a term holds every key that some query of the row sees, whatever the tables hold. Keys are found
in sorted tables by search (`at_least above at_most under`), in offsets by lookup; no key is visited.

>>> from frisket.dsl.ir import lookup
>>> from frisket.dsl.sugar import eq, k, q
>>> seen, hidden = intervals((q >= k) & eq(lookup("doc", (q,)), lookup("doc", (k,))), frozenset({"doc"}))
>>> seen  # at_least(doc[q0]): the first position of doc that holds at least doc[q0]
((max(k0, at_least(doc[q0])), min(min(q1, k1), at_most(doc[q1]))),)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from frisket.dsl.ir import FALSE, ONE, ZERO, Expr, disj, extent, lit, lookup, make, rebuild, transform, var
from frisket.dsl.sugar import maximum, minimum, where
from frisket.dsl.types import INT
from frisket.lowering.analysis.intervals import BEYOND_INTS, K0, K1, Q0, Q1, ends
from frisket.lowering.analysis.questions import System, disjuncts, never, system
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import FLIP, Linear, is_int_comparison, linear, relation, write
from frisket.lowering.simplify.curves import depends
from frisket.lowering.simplify.rules_boolean import negate

Interval = tuple[Expr, Expr]  # first and last key, inclusive; empty where last < first
MOST = 16  # intervals of a mask; beyond, tiles are asked one by one
BEYOND_POSITIONS = lit(1 << 30)  # beyond every position
_K = var("k")


def intervals(mask: Expr, sorted_: frozenset[str]) -> tuple[tuple[Interval, ...], tuple[Interval, ...]] | None:
    """The intervals (of the keys some query of the row sees, of the keys some query does not), or None where a literal
    bounds neither side. `sorted_` names the tables that never decrease along their last axis."""
    seen = _sides(mask, sorted_)
    hidden = None if seen is None else _sides(simplify(negate(mask)), sorted_)
    # hidden keys tell which tiles are FULL: one side alone is no layout
    return None if seen is None or hidden is None or len(seen) + len(hidden) > MOST else (seen, hidden)


def _sides(mask: Expr, sorted_: frozenset[str]) -> tuple[Interval, ...] | None:
    clauses = disjuncts(mask)
    sides = [_interval(system(t), sorted_) for t in clauses] if clauses is not None else [None]
    known = tuple(s for s in sides if s is not None)
    return known if len(known) == len(sides) else None


def _interval(s: System, sorted_: frozenset[str]) -> Interval | None:
    start, stop = reduce(maximum, s.low["q"], Q0), reduce(minimum, s.high["q"], Q1)
    lows = [K0, *s.low["k"], *(start - d for d in s.high["d"])]
    highs = [K1, *s.high["k"], *(stop - d for d in s.low["d"])]
    nothing = [negate(f) for f in s.fixed]
    nothing += [lo > hi for lo in s.low["d"] for hi in s.high["d"]]
    nothing += [x > stop for x in s.low["q"]] + [x < Q0 for x in s.high["q"]]
    for e in s.rest:
        if "k" not in depends(e):
            nothing.append(never(e))
        elif (pair := _keys(e, sorted_)) is not None:
            lows += [x for x in pair[:1] if x is not None]
            highs += [x for x in pair[1:] if x is not None]
        else:
            return None
    empty = simplify(disj(*nothing))
    last = reduce(minimum, highs)
    last = last if empty is FALSE else where(empty, K0 - 1, last)
    return points(simplify(reduce(maximum, lows)), sorted_), points(simplify(last), sorted_)


def _keys(e: Expr, sorted_: frozenset[str]) -> tuple[Expr | None, Expr | None] | None:
    """The first and last key that some query of the row can see by this literal; None for an unbounded end."""
    if not is_int_comparison(e) or e.op == "ne":
        return None
    op, form = relation(e.op, *e.args)
    moving = [(a, f) for a, f in form.terms if "k" in depends(a)]
    if len(moving) != 1 or abs(moving[0][1]) != 1:  # k has to stand alone, with factor 1 or -1, to be searched for
        return None
    atom, factor = moving[0]
    rest = form.without(atom)
    other = ends(write(-rest if factor > 0 else rest))  # factor * atom + rest `op` 0 is atom `op` other
    if factor < 0:
        op = FLIP[op]
    if not (atom is _K or (atom.op in _SEARCH and _searched(atom, sorted_))):
        return None
    first, last = _SEARCH[atom.op]
    return (
        first(atom, other.lo) if op in ("ge", "eq") and other.lo is not None else None,
        last(atom, other.hi) if op in ("le", "eq") and other.hi is not None else None,
    )


def _searched(atom: Expr, sorted_: frozenset[str]) -> bool:
    """Whether a function of k is known never to decrease."""
    if atom.args[0] is not _K:
        return False
    if atom.op == "floordiv":
        return atom.args[1].op == "lit" and bool(atom.args[1].name > 0)
    return atom.op == "segment" or (len(atom.args) == 1 and atom.name in sorted_)


def _first_of_segment(e: Expr, v: Expr) -> Expr:
    """The first key whose segment is at least `v`: segments are 0..n - 2, for n offsets."""
    count = extent(e.name, 0) - 1
    return where(v <= ZERO, K0, where(v >= count, BEYOND_POSITIONS, lookup(e.name, (v,))))


def _last_of_segment(e: Expr, v: Expr) -> Expr:
    count = extent(e.name, 0) - 1
    return where(v < ZERO, lit(-1), where(v + 1 >= count, BEYOND_POSITIONS, lookup(e.name, (v + ONE,)) - 1))


def _search(e: Expr, v: Expr, of: str, beyond: str, by: int) -> Expr:
    """The search for v in a table: "at least v + 1" is "above v", whose integers are no larger than the table's."""
    form = linear(v)
    if form.const == by:
        return make(beyond, (write(Linear(form.terms, 0)),), e.name, INT)
    return make(of, (v,), e.name, INT)


# the first key whose value is at least v, and the last whose value is at most v
_SEARCH: dict[str, tuple[Callable[[Expr, Expr], Expr], Callable[[Expr, Expr], Expr]]] = {
    "var": (lambda e, v: v, lambda e, v: v),
    "floordiv": (lambda e, v: v * e.args[1], lambda e, v: v * e.args[1] + (e.args[1] - 1)),
    "lookup": (lambda e, v: _search(e, v, "at_least", "above", 1), lambda e, v: _search(e, v, "at_most", "under", -1)),
    "segment": (_first_of_segment, _last_of_segment),
}


def points(e: Expr, sorted_: frozenset[str]) -> Expr:
    """The intervals with the least and the greatest entry of a sorted table over a range of its last axis read at the
    range's ends, and no index of a range farther than any table goes."""

    def change(n: Expr) -> Expr:
        if n.op not in ("range_min", "range_max"):
            return n
        half = len(n.args) // 2
        if n.name in sorted_ and n.args[: half - 1] == n.args[half:-1]:  # over the last axis alone
            return lookup(n.name, (*n.args[: half - 1], n.args[-1 if n.op == "range_max" else half - 1]), n.type)
        return rebuild(n, tuple(BEYOND_POSITIONS if a.op == "lit" and a.name == BEYOND_INTS else a for a in n.args))

    return transform(e, change)
