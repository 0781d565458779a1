"""The keys that one query sees, as the first and last key of an interval and the conditions that are left.

Kernels compute the two ends once per query and compare every key of a border tile with them, instead of evaluating the
whole mask for every pair. With `axis="q"` the interval is that of the queries which see one key.

>>> from frisket.dsl.sugar import eq, k, q
>>> found = ends_of((q >= k) & (q - k < 256) & eq(k % 4, 1))
>>> found.first, found.last, found.rest
(q - 255, q, k % 4 == 1)
>>> ends_of(q >= k, axis="q").first
k

Some masks have ends only by a fact of a table: `doc[q] == doc[k]` shows one interval where equal entries are adjacent.

>>> from frisket.dsl.ir import lookup
>>> same = eq(lookup("doc", (q,)), lookup("doc", (k,)))
>>> sorted(facts_of(same)), ends_of(same)
([('has_runs', 'doc'), ('is_sorted', 'doc')], None)
>>> ends_of(same, facts=frozenset({("has_runs", "doc")})).last
run_last(q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce

from frisket.dsl.ir import FALSE, TRUE, Expr, build, conj, disj, substitute, uses, var, walk
from frisket.dsl.sugar import where
from frisket.grammar.memo import memo

from .affine import linear
from .curves import Curve, solve, together
from .facts import interval

Fact = tuple[str, str]  # one of FACTS, or "segment" for offsets, and the name of the table
FACTS = ("has_runs", "is_sorted")
_Q, _K = var("q"), var("k")
ENDS_OF_RUNS = ("run_first", "run_last", "segment_first", "segment_last")  # kernels read these from a derived table
_TURN = {_Q: _K, _K: _Q}


@dataclass(frozen=True)
class Ends:
    """The positions that one row (a query, or a key with `axis="q"`) sees: from `first` to `last`, inclusive, where
    `rest` holds. `first` and `last` are Exprs in the row's coordinate, None where there is no bound. `asks` is a
    condition on the row alone: a row that fails it sees nothing."""

    first: Expr | None
    last: Expr | None
    asks: Expr
    rest: Expr


@memo(group="expressions")
def ends_of(mask: Expr, axis: str = "k", facts: frozenset[Fact] = frozenset()) -> Ends | None:
    """The ends of a simplified mask along an axis, None where no term is a bound. `facts` are the facts of `facts_of`
    that hold; a term that needs another one stays in `rest`."""
    lows: list[Curve] = []
    highs: list[Curve] = []
    asks, rest = TRUE, TRUE
    for term in _terms(mask):
        e = term if axis == "k" else substitute(term, _TURN)
        found = next((curves for curves in _solved(e) if _needs(curves) <= facts), None)
        if "k" not in uses(e):
            asks = conj(asks, term)
        elif found is None:
            rest = conj(rest, term)
        else:
            lows += [c for c in found if c.side == "low"]
            highs += [c for c in found if c.side == "high"]
    if not (lows or highs):
        return None
    first, last = (_one(_decisive(curves), op, axis) for curves, op in ((lows, "max"), (highs, "min")))
    return Ends(first, last, asks, rest)


@memo(group="expressions")
def facts_of(mask: Expr) -> frozenset[Fact]:
    """The facts of tables that would turn more terms of a mask into ends, along either axis."""
    turned = substitute(mask, _TURN)
    found = (_needs(curves) for e in (*_terms(mask), *_terms(turned)) if "k" in uses(e) for curves in _solved(e))
    return frozenset(f for needs in found if _UNKNOWN not in needs for f in needs)


_UNKNOWN: Fact = ("", "")  # stands for a condition that is no fact of a table, which no call knows to hold


def _terms(mask: Expr) -> tuple[Expr, ...]:
    return mask.args if mask.op == "and" else (mask,)


def _solved(e: Expr) -> Iterator[tuple[Curve, ...]]:
    """The bounds on k that each way to solve a term finds."""
    for way in (solve, together, _either):
        if (found := way(e)) is not None:
            yield found


def _either(e: Expr) -> tuple[Curve, ...] | None:
    """The bound of a disjunction of bounds on the same side: `q >= k | k < n` is `k <= max(q, n - 1)`. A term that does
    not read k lifts a lower bound to 0: `k >= q | q < n` is `k >= where(q < n, 0, q)`."""
    found = [solve(a) for a in e.args if "k" in uses(a)] if e.op == "or" else []
    curves = [c for x in found for c in x or ()]
    if not found or None in found or len(curves) != len(found) or len({c.side for c in curves}) != 1:
        return None
    side, alone = curves[0].side, [a for a in e.args if "k" not in uses(a)]
    if alone and side == "high":  # no number is known to be at or past every position
        return None
    value = reduce(partial(build, "max" if side == "high" else "min"), (c.value for c in curves))
    value = where(disj(*alone), 0, value) if alone else value
    return (Curve(side, value, None, FALSE, conj(*(c.needs for c in curves))),)


def _needs(curves: tuple[Curve, ...]) -> frozenset[Fact]:
    """The facts of tables that some bounds need; `_UNKNOWN` among them where they need something else."""
    conditions = {n for c in curves for n in _terms(c.needs)} - {TRUE}
    found = {(n.op, n.name) if n.op in FACTS and isinstance(n.name, str) else _UNKNOWN for n in conditions}
    for n in walk(*(c.value for c in curves)):
        if n.op.startswith("segment_"):  # a table of segments counts positions from 0
            least, _ = interval(n.args[0])
            found.add(("segment", n.name) if least is not None and least >= 0 else _UNKNOWN)
        elif n.op.startswith("rank_"):
            found.add(_UNKNOWN)
    return frozenset(found)


def _decisive(curves: list[Curve]) -> list[Curve]:
    """The bounds that no other one implies: beside `k <= q`, `k <= last(q)` says nothing, as q's run ends no sooner."""
    return [c for c in curves if not any(c is not other and _implied(c, other) for other in curves)]


def _implied(c: Curve, other: Curve) -> bool:
    if c.near is None or c.near is c.value:
        return False
    gap = linear(other.value) - linear(c.near)
    return not gap.terms and (gap.const >= 0 if c.side == "low" else gap.const <= 0)


def _one(curves: list[Curve], op: str, axis: str) -> Expr | None:
    values = [c.value if axis == "k" else substitute(c.value, _TURN) for c in curves]
    return reduce(partial(build, op), values) if values else None
