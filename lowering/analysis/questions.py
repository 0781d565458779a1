"""The three one-sided questions about a mask over a rectangle, answered by Exprs.

`always(m)`: true at every point. `never(m)`: true at none. `mixed(m)`: every tile inside holds a point of each.
They speak of `q0 q1 k0 k1` (inclusive), `b h`, sizes, parameters and table minima and maxima. `mixed` also reads
`single` (the rectangle is one tile, or less) and `tk` (no tile inside is narrower than this many keys).

>>> from frisket.dsl.sugar import q, k
>>> always(q >= k), never(q >= k)
(q0 >= k1, q1 < k0)

The mask is taken apart into a disjunction of conjunctions. Inside one conjunction, bounds on q, k and q - k are
solved together (a difference-bound system in two variables is exact on the integers), so `q >= k & q - k < w`
needs no luck. Everything else is judged alone, which is sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COMPARISONS, FALSE, Expr, build, clauses, conj, disj, lit, make, substitute, uses, var, walk
from frisket.dsl.sugar import eq
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import is_int_comparison, linear, relation, write
from frisket.lowering.simplify.rules_boolean import negate

from .intervals import ASK, K0, K1, Q0, Q1, Range, ends, table_box
from .solve import K, Q, System, beyond, by_literal, depends, disjuncts, isolated, system

SINGLE = var("single", BOOL)
TK = var("tk", INT)
_PERIODIC = frozenset({"abs", "min", "max", "mul", "where"})  # operators that repeat where their operands do
_PERIODS = 1 << 16  # positions enumerated to understand a periodic clause


def infeasible(s: System) -> Expr:
    """Whether no integer point of the rectangle meets the bounds of `s`, as a sufficient condition."""
    q_low, q_high = [Q0, *s.low["q"]], [Q1, *s.high["q"]]
    k_low, k_high = [K0, *s.low["k"]], [K1, *s.high["k"]]
    conflicts: list[Expr] = []
    for lows, highs in ((q_low, q_high), (k_low, k_high), (s.low["d"], s.high["d"])):
        # the rectangle itself is never empty
        conflicts += [lo > hi for lo in lows for hi in highs if (lo, hi) not in ((Q0, Q1), (K0, K1))]
    conflicts += [d > qh - kl for d in s.low["d"] for qh in q_high for kl in k_low]
    conflicts += [d < ql - kh for d in s.high["d"] for ql in q_low for kh in k_high]
    return disj(*conflicts)


# -- never and always -----------------------------------------------------------------------------


@memo(group="expressions")
def never(e: Expr) -> Expr:
    """The condition under which `e` is certainly false at every point of the rectangle."""
    if beyond(e):
        return _of_parts(e, never, "and")
    conjunctions = disjuncts(e)
    if conjunctions is None:  # too many conjunctions: judge the parts alone
        parts = [never(a) for a in e.args]
        return disj(*parts) if e.op == "and" else conj(*parts) if e.op == "or" else FALSE
    return simplify(conj(*(_never_term(t) for t in conjunctions)))


@memo(group="expressions")
def always(e: Expr) -> Expr:
    """The condition under which `e` is certainly true at every point of the rectangle."""
    return _of_parts(e, always, "or") if beyond(e) else never(simplify(negate(e)))


ASK.update(always=always, never=never)


def _of_parts(e: Expr, ask: Callable[[Expr], Expr], one: str) -> Expr:
    """The answer for an `and` or `or` that is `beyond`, from the parts that are not.

    Under the operator `one` a single part decides; under the other operator all parts must."""
    if e.op not in ("and", "or"):
        return FALSE
    parts = [FALSE if beyond(a) else ask(a) for a in e.args]
    return disj(*parts) if e.op == one else conj(*parts)


def _never_term(term: Expr) -> Expr:
    s = system(term)
    return disj(infeasible(s), *(negate(f) for f in s.fixed), *(_never_literal(r) for r in s.rest))


def _never_literal(e: Expr) -> Expr:
    return _NEVER[e.op](e) if e.op in _NEVER else FALSE


def _always_literal(e: Expr) -> Expr:
    """The condition under which a literal below a `not` always holds: Float comparisons and lookups."""
    return _ALWAYS[e.op](e) if e.op in _ALWAYS else FALSE


def _never_comparison(e: Expr) -> Expr:
    if e.args[0].type is INT:
        # one range for the difference keeps `q - k` exact
        op, form = relation(e.op, *e.args)
        x, y = ends(write(form)), Range(lit(0), lit(0))
    else:
        op, (x, y) = e.op, (ends(a) for a in e.args)
    if op == "ne":
        return conj(_same(x, y), _sane(x, y))
    if op == "eq":
        congruence = _congruent(e)
        missed = FALSE if congruence is None else build("not", congruence[0])
        return disj(_ahead("lt", x, y), _ahead("lt", y, x), missed)
    x, y = (x, y) if op in ("ge", "gt") else (y, x)
    return _ahead("lt" if op in ("ge", "le") else "le", x, y)


def _ahead(how: str, x: Range, y: Range) -> Expr:
    """The condition that every value of x is less than, or at most, every one of y."""
    return FALSE if x.hi is None or y.lo is None else build(how, x.hi, y.lo)


def _congruent(e: Expr) -> tuple[Expr, bool] | None:
    """The conditions of `x % n == c`: some integer between the ends of x is c modulo n, and each one is a value."""
    solved = isolated(e, depends)
    if solved is None or (solved.op, solved.factor) != ("eq", 1) or not by_literal("mod", solved.atom):
        return None
    r, n, c = ends(solved.atom.args[0]), solved.atom.args[1], write(solved.value)
    if r.lo is None or r.hi is None:
        return None
    return conj(c >= 0, c < n, (r.hi - c) // n * n + c >= r.lo), r.attained and r.dense


def _sane(x: Range, y: Range) -> Expr:
    return build("not", disj(x.nan, y.nan))


def _same(x: Range, y: Range) -> Expr:
    if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
        return FALSE
    return conj(eq(x.lo, x.hi), eq(y.lo, y.hi), eq(x.lo, y.lo))


def _always_comparison(e: Expr) -> Expr:
    if e.args[0].type is not FLOAT:  # comparisons of Bools have become `xor`
        return always(e) if e.args[0].type is INT else FALSE
    x, y = (ends(a) for a in e.args)
    if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
        return FALSE
    if e.op == "ne":
        return disj(x.hi < y.lo, y.hi < x.lo)  # NaN differs from everything, too
    above, below = build(e.op, x.lo, y.hi), build(e.op, x.hi, y.lo)
    return conj({"eq": _same(x, y), "ge": above, "gt": above, "le": below, "lt": below}[e.op], _sane(x, y))


def _extreme_entry(op: str, e: Expr) -> Expr:
    """The least or the greatest entry of a Bool table over the rectangle: whether all are true, or some."""
    lows, highs = table_box(e)
    return make(op, (*lows, *highs), e.name, BOOL)


def _always_finite(e: Expr) -> Expr:
    r = ends(e.args[0])
    if r.lo is None or r.hi is None:
        return FALSE
    return conj(build("isfinite", r.lo), build("isfinite", r.hi), build("not", r.nan))


_NEVER: dict[str, Callable[[Expr], Expr]] = {
    "lit": negate,
    "not": lambda e: _always_literal(e.args[0]),
    "lookup": lambda e: build("not", _extreme_entry("range_max", e)),
    **dict.fromkeys(COMPARISONS, _never_comparison),
}
_ALWAYS: dict[str, Callable[[Expr], Expr]] = {
    "lookup": lambda e: _extreme_entry("range_min", e),
    "isfinite": _always_finite,
    **dict.fromkeys(COMPARISONS, _always_comparison),
}


# -- mixed ----------------------------------------------------------------------------------------


@memo(group="expressions")
def mixed(e: Expr) -> Expr:
    """The condition under which every tile inside the rectangle certainly holds a true and a false point."""
    return FALSE if beyond(e) else simplify(conj(some(e), some(simplify(negate(e)))))


@memo(group="expressions")
def some(e: Expr) -> Expr:
    """The condition under which every tile inside the rectangle certainly holds a point where `e` is true."""
    if beyond(e):
        return FALSE
    conjunctions = disjuncts(e)
    if conjunctions is None:
        return disj(*(some(a) for a in e.args)) if e.op == "or" else always(e)
    return simplify(disj(*(_some_term(t) for t in conjunctions)))


def _some_term(term: Expr) -> Expr:
    s = system(term)
    bounds = [e for e in clauses(term) if depends(e) and e not in s.rest]
    certain = [always(r) for r in s.rest]
    inside = conj(SINGLE, build("not", infeasible(s)))
    condition = conj(inside, *certain)
    bounds_hold = conj(*map(always, bounds))
    for i, r in enumerate(s.rest):
        others = certain[:i] + certain[i + 1 :]
        condition = disj(condition, conj(bounds_hold, _some_literal(r), *others))
        if len(s.rest) == 1 and _apart(bounds, r):  # independent variables: both can be had at once
            condition = disj(condition, conj(inside, _some_literal(r)))
    return conj(*s.fixed, disj(bounds_hold if not s.rest else FALSE, condition))


def _apart(bounds: Iterable[Expr], r: Expr) -> bool:
    return not frozenset[str]().union(*(depends(x) for x in bounds)) & depends(r)


def _some_literal(e: Expr) -> Expr:
    return disj(always(e), conj(SINGLE, _some_attained(e)), _some_periodic(e))


def _some_attained(e: Expr) -> Expr:
    """The condition `some` for a single tile: the ends of an Int are values, so a comparison met by an end is met."""
    if not is_int_comparison(e):
        entry = e.args[0] if e.op == "not" else e
        if entry.op != "lookup" or not _sweeps(entry):
            return FALSE
        return _extreme_entry("range_max", e) if entry is e else build("not", _extreme_entry("range_min", entry))
    if (congruence := _congruent(e)) is not None and congruence[1]:
        return congruence[0]
    op, form = relation(e.op, *e.args)
    r = ends(write(form))
    if r.lo is None or r.hi is None or not r.attained:
        return FALSE
    if op == "ge":
        return r.hi >= 0
    if op == "le":
        return r.lo <= 0
    if op == "eq":
        return conj(r.lo <= 0, r.hi >= 0) if r.dense else disj(eq(r.lo, 0), eq(r.hi, 0))
    return build("not", conj(eq(r.lo, 0), eq(r.hi, 0)))


def _sweeps(e: Expr) -> bool:
    """Whether the one varying index of a lookup passes every position between its ends."""
    varying = [a for a in e.args if depends(a)]
    r = ends(varying[0]) if len(varying) == 1 else Range(None, None)
    return r.attained and r.dense


def _some_periodic(e: Expr) -> Expr:
    """The condition `some` for a clause that repeats along k: a tile as wide as the period holds every phase."""
    period = _truth(e)
    return FALSE if period is None else period <= TK


@memo(group="expressions")
def _truth(e: Expr) -> int | None:
    """A period along k in which `e` is true somewhere, for every q; None if there is none."""
    # a parameter or a table may change the truth at every position
    if uses(e) - {"q", "k"} or any(n.op in ("param", "lookup", "segment", "random") for n in walk(e)):
        return None
    if not is_int_comparison(e):
        return None
    form = linear(e.args[0]) - linear(e.args[1])
    shifted = simplify(substitute(e, {Q: Q + K}))
    if "k" not in uses(shifted) and is_int_comparison(shifted):  # a clause of q - k: one q is like another
        e = substitute(shifted, {Q: -K})
        form = linear(e.args[0]) - linear(e.args[1])
    along_k, along_q = (quasi_affine(write(form), x) for x in (K, Q))
    if along_k is None or along_q is None or along_k[1] or along_q[1] or along_k[0] * along_q[0] > _PERIODS:
        return None
    env = {"q": np.arange(along_q[0])[:, None], "k": np.arange(along_k[0])[None, :]}
    true = np.broadcast_to(evaluate(e, env), (along_q[0], along_k[0]))
    return along_k[0] if bool(true.any(axis=1).all()) else None


def quasi_affine(e: Expr, x: Expr) -> tuple[int, int] | None:
    """The (p, s) with e(x + p) == e(x) + s for every x; None where no such pair is found."""
    if e is x:
        return (1, 1)
    if x not in walk(e):
        return (1, 0)
    if e.op in ("floordiv", "mod"):
        inner, d = quasi_affine(e.args[0], x), e.args[1]
        if inner is None or not by_literal(e.op, e):
            return None
        repeat = d.name // math.gcd(d.name, inner[1])  # so many steps bring back the remainder
        p, s = inner[0] * repeat, inner[1] * repeat
        return (p, s // d.name) if e.op == "floordiv" else (p, 0)
    form = linear(e)
    if form.terms == ((e, 1),):
        parts = [t for a in e.args if (t := quasi_affine(a, x)) is not None]
        known = len(parts) == len(e.args) and all(t[1] == 0 for t in parts)
        return (math.lcm(*(t[0] for t in parts)), 0) if known and e.op in _PERIODIC else None
    steps = [(t, f) for a, f in form.terms if (t := quasi_affine(a, x)) is not None]
    if len(steps) < len(form.terms):
        return None
    p = math.lcm(*(t[0] for t, _ in steps))
    return (p, sum(f * t[1] * (p // t[0]) for t, f in steps))
