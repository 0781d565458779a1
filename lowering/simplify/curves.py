"""Bounds on k that vary with q: `k >= A(q)` and `k <= B(q)`, the curves of a mask.

`q // n >= k // n` is `k <= q // n * n + n - 1`. `doc[q] == doc[k]` is `first(q) <= k <= last(q)`, the run of equal
entries that holds q, where the equal entries of the table are adjacent.

Where curves never decrease, the queries of a row of tiles may together see one interval of keys, as they do under
bounds on q - k. They do if, for one offset o, all lower bounds are at most `q + o` and all upper bounds at least
`q + o`. Every key between the ends of the row is then seen by query `k - o`, or by the first or last query of the row.

>>> from frisket.dsl.sugar import eq, k, q
>>> [(c.side, c.value) for c in solve(eq(q // 8, k // 8))]
[('low', 8 * (q // 8)), ('high', 8 * (q // 8) + 7)]

The keys that one query sees have a first and a last key, and conditions that are left (`ends_of`). Kernels compute the
two ends once per query and compare every key of a border tile with them, instead of evaluating the
whole mask for every pair. With `axis="q"` the interval is that of the queries which see one key.

>>> from frisket.dsl.sugar import eq, k, q
>>> ends = ends_of((q >= k) & (q - k < 256) & eq(k % 4, 1))
>>> ends.first, ends.last, ends.rest
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
from typing import Literal

from frisket.dsl.ir import FALSE, TRUE, Expr, build, conj, disj, lit, make, substitute, uses, var, walk
from frisket.dsl.sugar import where
from frisket.dsl.transfer import interval
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import memo

from .affine import FLIP, Linear, is_int_comparison, linear, relation, write

_Q, _K = var("q"), var("k")


def depends(e: Expr) -> frozenset[str]:
    """The coordinates among q and k that an Expr reads."""
    return uses(e) & {"q", "k"}


@dataclass(frozen=True)
class Curve:
    """A bound `k >= value` (low) or `k <= value` (high), provided `needs` holds. `value` may vary with q, and never
    decreases where `rising` holds (FALSE: not known). `near` is an affine Expr that is never below the value of a low
    bound and never above that of a high one; None: not known."""

    side: Literal["low", "high"]
    value: Expr
    near: Expr | None
    rising: Expr
    needs: Expr


def solve(e: Expr) -> tuple[Curve, ...] | None:
    """The bounds on k that are equivalent to an Int comparison, or None."""
    if not is_int_comparison(e):
        return None
    op, form = relation(e.op, *e.args)
    return None if op == "ne" else _solve(form, op, Linear((), 0), TRUE)


def _solve(form: Linear, op: str, other: Linear, needs: Expr) -> tuple[Curve, ...] | None:
    """The bounds on k of `form op other`, where `other` does not vary with k."""
    moving = [(a, f) for a, f in form.terms if "k" in depends(a)]
    if len(moving) != 1:
        return None
    atom, factor = moving[0]
    other = other - form.without(atom)
    if factor < 0:
        op, factor, other = FLIP[op], -factor, -other
    if op == "eq":
        # an equation is a bound on either side
        halves = [_at(atom, factor, half, other, needs) for half in ("ge", "le")]
        return None if halves[0] is None or halves[1] is None else halves[0] + halves[1]
    return _at(atom, factor, op, other, needs)


def _at(atom: Expr, factor: int, op: str, other: Linear, needs: Expr) -> tuple[Curve, ...] | None:
    """The bounds on k of `factor * atom op other` with factor > 0 and op `ge` or `le`."""
    if factor > 1:  # other / factor, rounded up for `ge` and down for `le`
        sign = -1 if op == "ge" else 1
        other = linear(write(other.times(sign)) // lit(factor)).times(sign)
    if atom is _K:
        value = write(other)
        return (Curve("low" if op == "ge" else "high", value, _near(other, op, needs), rising(value), needs),)
    if atom.op == "floordiv" and not depends(atom.args[1]):
        return _of_quotient(atom, op, other, needs)
    if atom.op in ("lookup", "segment"):
        return _of_table(atom, op, other, needs)
    return None


def _near(form: Linear, op: str, needs: Expr) -> Expr | None:
    """An affine Expr never below (ge) or above (le) a form, if `needs` holds; None if an atom has no affine bound."""
    conditions = needs.args if needs.op == "and" else (needs,)
    total = Linear((), form.const)
    for a, f in form.terms:
        if "q" not in depends(a) or a is _Q:  # exact: such a term bounds itself
            total += Linear(((a, f),), 0)
        elif f == 1 and a.op in _RUNS and (a.op in _FIRST) == (op == "ge"):
            total += linear(a.args[-1])  # a run's first is at or before the position, its last at or after it
        elif a.op == "floordiv" and a.args[1].op == "lit" and f == a.args[1].name > 0:
            total += linear(a.args[0]) - Linear((), 0 if op == "ge" else f - 1)  # x - n + 1 <= x // n * n <= x
        elif f == 1 and a.op == "mul" and a.args[0].op == "floordiv" and a.args[0].args[1] is (n := a.args[1]):
            if (n > 0) not in conditions and (interval(n)[0] or 0) <= 0:
                return None  # x // n * n is above x where n < 0
            total += linear(a.args[0].args[0]) - (Linear((), 0) if op == "ge" else linear(n) - Linear((), 1))
        else:
            return None
    return write(total)


def _of_quotient(atom: Expr, op: str, other: Linear, needs: Expr) -> tuple[Curve, ...] | None:
    """Bounds on x from bounds on x // n, n > 0: `x // n >= y` is `x >= y n`, `x // n <= y` is `x <= y n + n - 1`."""
    x, n = atom.args
    if n.op == "lit":
        if n.name <= 0:
            return None
        scaled = other.times(n.name)
        size = Linear((), n.name)
    else:
        needs = conj(needs, n > 0)
        size = linear(n)
        scaled = sum((linear(a * n).times(f) for a, f in other.terms), size.times(other.const))
    return _solve(linear(x), op, scaled if op == "ge" else scaled + size - Linear((), 1), needs)


_FIRST = ("run_first", "segment_first")
_RUNS = {"run_first", "run_last", "segment_first", "segment_last"}


def _of_table(atom: Expr, op: str, other: Linear, needs: Expr) -> tuple[Curve, ...] | None:
    """Bounds on the position x from bounds on the entry `T[.., x]`, for tables that never decrease. That is a fact of
    the table, so it becomes a condition; offsets of segments have it."""
    *fixed, x = atom.args
    if any(depends(a) for a in fixed):  # with another index that moves, an entry is no function of k alone
        return None
    kind = "segment" if atom.op == "segment" else "run"
    mate = other.terms[0][0] if len(other.terms) == 1 and other.terms[0][1] == 1 else None
    if mate is not None and mate.op == atom.op and mate.name == atom.name and mate.args[:-1] == atom.args[:-1]:
        if kind == "run":
            needs = conj(needs, make("is_sorted", (), atom.name, BOOL))
        first, last = (linear(make(f"{kind}_{end}", mate.args, atom.name, INT)) for end in ("first", "last"))
        one = Linear((), 1)
        # entries are Ints: one that is larger by 1 or more is past the run
        known = {("ge", 0): first, ("ge", 1): last + one, ("le", 0): last, ("le", -1): first - one}
        bound = known.get((op, other.const))
        return None if bound is None else _solve(linear(x), op, bound, needs)
    if kind == "segment" or fixed:  # a table of several axes has no rank of a value
        return None
    needs = conj(needs, make("is_sorted", (), atom.name, BOOL))
    rank = make("rank_first" if op == "ge" else "rank_last", (write(other),), atom.name, INT)
    return _solve(linear(x), op, linear(rank), needs)


def solve_equal_entries(e: Expr, condition: Expr = TRUE) -> tuple[Curve, ...] | None:
    """The bounds of `T[.., x(q)] == T[.., x(k)]` where equal entries are adjacent, in any order of values. Where the
    mask also has a condition on the query alone, such as `image[q] > 0`, `condition` is that one. Entries that no query
    has which meets it may be anywhere."""
    if e.op != "eq" or any(a.op != "lookup" for a in e.args) or e.args[0].name != e.args[1].name:
        return None
    mine, theirs = sorted(e.args, key=lambda a: "k" in depends(a))
    # the other indices have to name one row of the table
    if depends(mine) - {"q"} or depends(theirs) - {"k"} or mine.args[:-1] != theirs.args[:-1]:
        return None
    plain = mine.args == (_Q,) and condition is not TRUE
    needs = make("has_runs", (), (mine.name, condition) if plain else mine.name, BOOL)
    low, high = (
        _solve(linear(theirs.args[-1]), op, linear(make(f"run_{end}", mine.args, mine.name, INT)), needs)
        for op, end in (("ge", "first"), ("le", "last"))
    )
    return None if low is None or high is None else low + high


@memo(group="expressions")
def rising(e: Expr) -> Expr:
    """A condition under which `e` never decreases in q; FALSE where none is known."""
    if "q" not in depends(e) or e is _Q:
        return TRUE
    form = linear(e)
    if form.terms != ((e, 1),):
        # a sum rises where its parts do, and a falling part may undo that
        return conj(*(rising(a) if f > 0 or "q" not in depends(a) else FALSE for a, f in form.terms))
    if e.op in ("min", "max"):
        return conj(*(rising(a) for a in e.args))
    if e.op in ("mul", "floordiv") and "q" not in depends(e.args[1]):  # a factor or divisor of the query may fall
        return conj(rising(e.args[0]), e.args[1] > 0)
    if e.op in _RUNS or e.op == "segment":
        return FALSE if any(depends(a) for a in e.args[:-1]) else rising(e.args[-1])
    if e.op in ("rank_first", "rank_last"):
        return rising(e.args[0])
    if e.op == "lookup" and len(e.args) == 1:
        return conj(rising(e.args[0]), make("is_sorted", (), e.name, BOOL))
    return FALSE


Fact = tuple[str, str]  # one of FACTS, or "segment" for offsets, and the name of the table
FACTS = ("has_runs", "is_sorted")
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
        bounds = next((curves for curves in _solved(e) if _needs(curves) <= facts), None)
        if "k" not in uses(e):  # a condition on the query alone bounds no key
            asks = conj(asks, term)
        elif bounds is None:
            rest = conj(rest, term)
        else:
            lows += [c for c in bounds if c.side == "low"]
            highs += [c for c in bounds if c.side == "high"]
    if not (lows or highs):
        return None
    first, last = (_one(_decisive(curves), op, axis) for curves, op in ((lows, "max"), (highs, "min")))
    return Ends(first, last, asks, rest)


@memo(group="expressions")
def facts_of(mask: Expr) -> frozenset[Fact]:
    """The facts of tables that would turn more terms of a mask into ends, along either axis."""
    turned = substitute(mask, _TURN)
    fact_sets = (_needs(curves) for e in (*_terms(mask), *_terms(turned)) if "k" in uses(e) for curves in _solved(e))
    return frozenset(f for needs in fact_sets if _UNKNOWN not in needs for f in needs)


_UNKNOWN: Fact = ("", "")  # stands for a condition that is no fact of a table, which no call knows to hold


def _terms(mask: Expr) -> tuple[Expr, ...]:
    return mask.args if mask.op == "and" else (mask,)


def _solved(e: Expr) -> Iterator[tuple[Curve, ...]]:
    """The bounds on k that each way to solve a term finds."""
    for way in (solve, solve_equal_entries, _either):
        if (curves := way(e)) is not None:
            yield curves


def _either(e: Expr) -> tuple[Curve, ...] | None:
    """The bound of a disjunction of bounds on the same side: `q >= k | k < n` is `k <= max(q, n - 1)`. A term that does
    not read k lifts a lower bound to 0: `k >= q | q < n` is `k >= where(q < n, 0, q)`."""
    solutions = [solve(a) for a in e.args if "k" in uses(a)] if e.op == "or" else []
    curves = [c for x in solutions for c in x or ()]
    if not solutions or None in solutions or len(curves) != len(solutions) or len({c.side for c in curves}) != 1:
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
    facts = {(n.op, n.name) if n.op in FACTS and isinstance(n.name, str) else _UNKNOWN for n in conditions}
    for n in walk(*(c.value for c in curves)):
        if n.op.startswith("segment_"):  # a table of segments counts positions from 0
            least, _ = interval(n.args[0])
            facts.add(("segment", n.name) if least is not None and least >= 0 else _UNKNOWN)
        elif n.op.startswith("rank_"):
            facts.add(_UNKNOWN)
    return frozenset(facts)


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
