"""Bounds on k that vary with q: `k >= A(q)` and `k <= B(q)`, the curves of a mask.

`q // n >= k // n` is `k <= q // n * n + n - 1`. `doc[q] == doc[k]` is `first(q) <= k <= last(q)`, the run of equal
entries that holds q, where the equal entries of the table are adjacent.

Where curves never decrease, the queries of a row of tiles may together see one interval of keys, as they do under
bounds on q - k. They do if, for one offset o, all lower bounds are at most `q + o` and all upper bounds at least
`q + o`. Every key between the ends of the row is then seen by query `k - o`, or by the first or last query of the row.

>>> from frisket.dsl.sugar import eq, k, q
>>> [(c.side, c.value) for c in solve(eq(q // 8, k // 8))]
[('low', 8 * (q // 8)), ('high', 8 * (q // 8) + 7)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from frisket.dsl.ir import FALSE, TRUE, Expr, conj, lit, make, uses, var
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import memo

from .affine import FLIP, Linear, is_int_comparison, linear, relation, write
from .facts import interval

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
        if "q" not in depends(a) or a is _Q:
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
    if any(depends(a) for a in fixed):
        return None
    kind = "segment" if atom.op == "segment" else "run"
    mate = other.terms[0][0] if len(other.terms) == 1 and other.terms[0][1] == 1 else None
    if mate is not None and mate.op == atom.op and mate.name == atom.name and mate.args[:-1] == atom.args[:-1]:
        if kind == "run":
            needs = conj(needs, make("is_sorted", (), atom.name, BOOL))
        first, last = (linear(make(f"{kind}_{end}", mate.args, atom.name, INT)) for end in ("first", "last"))
        one = Linear((), 1)
        known = {("ge", 0): first, ("ge", 1): last + one, ("le", 0): last, ("le", -1): first - one}
        bound = known.get((op, other.const))
        return None if bound is None else _solve(linear(x), op, bound, needs)
    if kind == "segment" or fixed:
        return None
    needs = conj(needs, make("is_sorted", (), atom.name, BOOL))
    rank = make("rank_first" if op == "ge" else "rank_last", (write(other),), atom.name, INT)
    return _solve(linear(x), op, linear(rank), needs)


def together(e: Expr, asked: Expr = TRUE) -> tuple[Curve, ...] | None:
    """The bounds of `T[.., x(q)] == T[.., x(k)]` where equal entries are adjacent, in any order of values. Where the
    mask also has a condition on the query alone, such as `image[q] > 0`, `asked` is that condition: entries of queries
    that do not meet it may be anywhere."""
    if e.op != "eq" or any(a.op != "lookup" for a in e.args) or e.args[0].name != e.args[1].name:
        return None
    mine, theirs = sorted(e.args, key=lambda a: "k" in depends(a))
    if depends(mine) - {"q"} or depends(theirs) - {"k"} or mine.args[:-1] != theirs.args[:-1]:
        return None
    plain = mine.args == (_Q,) and asked is not TRUE
    needs = make("has_runs", (), (mine.name, asked) if plain else mine.name, BOOL)
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
        return conj(*(rising(a) if f > 0 or "q" not in depends(a) else FALSE for a, f in form.terms))
    if e.op in ("min", "max"):
        return conj(*(rising(a) for a in e.args))
    if e.op in ("mul", "floordiv") and "q" not in depends(e.args[1]):
        return conj(rising(e.args[0]), e.args[1] > 0)
    if e.op in _RUNS or e.op == "segment":
        return FALSE if any(depends(a) for a in e.args[:-1]) else rising(e.args[-1])
    if e.op in ("rank_first", "rank_last"):
        return rising(e.args[0])
    if e.op == "lookup" and len(e.args) == 1:
        return conj(rising(e.args[0]), make("is_sorted", (), e.name, BOOL))
    return FALSE
