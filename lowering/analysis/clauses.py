"""Splits a mask into clauses that can be solved for a row of queries: keys in a range, a residue, a set, a group.

Every clause of a conjunction is read, where that is possible, as one of

    QueryCondition(e)        a condition on the query alone
    Keys(e)                  a condition on the key alone
    Limit(of, side, f)       what `of` gives for the key is at least ("low") or at most ("high") f(q)
    Equal(of, f), Unequal    it is, or is not, f(q)
    OnDistance(e)            a condition on q - k alone

where `of` is the key itself, a digit `k // step % base` of it, or any function of the key.

>>> from frisket.dsl.sugar import eq, k, q
>>> clause_disjuncts((q >= k) & eq((q - k) % 4, 1))
[(Limit(of=KeyPosition(), side='high', f=q), Equal(of=Digit(step=1, base=4), f=(q - 1) % 4))]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from frisket.dsl.ir import TRUE, Expr, build, conj, disj, lit, substitute, var
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import Linear, is_int_comparison, linear, relation, write
from frisket.lowering.simplify.curves import depends
from frisket.lowering.simplify.rules_boolean import negate

from .questions import beyond

MAX_DISJUNCTS = 24  # conjunctions a mask may be a disjunction of
D = var("d")  # q - k
_K = var("k")


@dataclass(frozen=True)
class KeyPosition:
    """The key position, as the target of a clause."""


@dataclass(frozen=True)
class Digit:
    """The digit `k // step % base` of the key, as the target of a clause."""

    step: int
    base: int


@dataclass(frozen=True)
class OnKeyFunction:
    """Any function of the key, as the target of a clause."""

    e: Expr


Target = KeyPosition | Digit | OnKeyFunction


@dataclass(frozen=True)
class QueryCondition:
    e: Expr


@dataclass(frozen=True)
class Keys:
    e: Expr


@dataclass(frozen=True)
class Limit:
    of: Target
    side: str  # "low" or "high", inclusive
    f: Expr


@dataclass(frozen=True)
class Widest:
    """A disjunction of limits on one side of one target, and of conditions on the query: the widest limit holds."""

    of: Target
    side: str
    fs: tuple[Expr, ...]
    rows: Expr


@dataclass(frozen=True)
class Equal:
    of: Target
    f: Expr


@dataclass(frozen=True)
class Unequal:
    of: Target
    f: Expr


@dataclass(frozen=True)
class OnDistance:
    e: Expr  # of d = q - k


Clause = QueryCondition | Keys | Limit | Widest | Equal | Unequal | OnDistance
Conjunction = tuple[Clause, ...]


@memo(group="expressions")
def clause_disjuncts(e: Expr) -> list[Conjunction] | None:
    """The disjunction of conjunctions of clauses that equals `e`; None where a part is no clause, where there are more
    than MAX_DISJUNCTS of them, or where `e` is `beyond`."""
    if beyond(e):
        return None
    # before `or` is taken apart: limits of one target on one side are one clause
    clauses = read(e)
    if clauses is not None:
        return [clauses]
    if e.op == "or":
        parts = [clause_disjuncts(a) for a in e.args]
        joined = [c for p in parts if p is not None for c in p]
        return None if any(p is None for p in parts) or len(joined) > MAX_DISJUNCTS else joined
    if e.op == "and":
        out: list[Conjunction] = [()]
        for a in e.args:
            options = clause_disjuncts(a)
            if options is None or len(out) * len(options) > MAX_DISJUNCTS:
                return None
            out = [x + y for x, y in product(out, options)]
        return out
    other = _as_logic(e)
    return None if other is None else clause_disjuncts(other)


def _as_logic(e: Expr) -> Expr | None:
    """An equivalent Expr with `and` and `or` on top, for operators that hide them; None for others."""
    if e.op == "where" and e.type is BOOL:
        c, x, y = e.args
        return disj(conj(c, x), conj(negate(c), y))
    if e.op == "xor" or (e.op in ("eq", "ne") and e.args[0].type is BOOL):
        x, y = e.args
        one = disj(conj(x, negate(y)), conj(negate(x), y))
        return simplify(negate(one) if e.op == "eq" else one)
    if e.op == "not" and e.args[0].op in ("xor", "where", "eq", "ne"):
        inner = _as_logic(e.args[0])
        return None if inner is None else simplify(negate(inner))
    if not is_int_comparison(e):
        return None
    if e.op == "ne":  # a hole in a range is two ranges
        return disj(simplify(build("lt", *e.args)), simplify(build("gt", *e.args)))
    op, form = relation(e.op, *e.args)
    form = -form if op == "le" else form
    lone = [(a, f) for a, f in form.terms if depends(a) == {"q", "k"}]
    if len(lone) == 1 and op != "eq":  # |x| >= y, max(x, y) >= z, min(x, y) <= z
        (atom, f), rest = lone[0], form.without(lone[0][0])
        if (atom.op, f > 0) in (("max", True), ("min", False), ("abs", True)):
            sides = atom.args if atom.op != "abs" else (atom.args[0], -atom.args[0])
            return disj(*(simplify(build("ge", write(linear(s).times(f) + rest), lit(0))) for s in sides))
    return None


@memo(group="expressions")
def read(e: Expr) -> Conjunction | None:
    """One clause of a mask, as a conjunction of clauses solved by row."""
    variables = depends(e)
    if "k" not in variables:
        return () if e is TRUE else (QueryCondition(e),)
    clauses: Conjunction | None = None
    if is_int_comparison(e):
        clauses = _comparison(e)
    elif e.op == "or":
        clauses = _widest([read(a) if depends(a) <= {"q"} or is_int_comparison(a) else None for a in e.args])
    if variables == {"k"}:
        limits = [
            c for c in clauses or () if isinstance(c, Limit | Widest | Equal) and not isinstance(c.of, OnKeyFunction)
        ]
        # ranges and digits of the key are counted by arithmetic, other conditions on it as a set
        return clauses if clauses is not None and len(limits) == len(clauses) else (Keys(e),)
    return clauses if clauses is not None or e.op in ("and", "or") else _on_distance(e)


def _on_distance(e: Expr) -> Conjunction | None:
    # with q written as d + k, a condition on the distance has no k left
    shifted = simplify(substitute(e, {var("q"): D + _K}))
    return None if "k" in depends(shifted) else (OnDistance(shifted),)


def _widest(parts: list[Conjunction | None]) -> Conjunction | None:
    limits: list[Limit] = []
    rows: list[Expr] = []
    for part in parts:
        if part is None or len(part) != 1:
            return None
        one = part[0]
        if isinstance(one, QueryCondition):
            rows.append(one.e)
        elif isinstance(one, Limit) and not isinstance(one.of, OnKeyFunction):
            limits.append(one)
        else:
            return None
    # limits of several targets or sides have no widest one
    if len({(x.of, x.side) for x in limits}) != 1:
        return None
    return (Widest(limits[0].of, limits[0].side, tuple(x.f for x in limits), disj(*rows)),)


# -- comparisons ----------------------------------------------------------------------------------


def _comparison(e: Expr) -> Conjunction | None:
    op, form = relation(e.op, *e.args)
    if op == "eq":
        return _zero(form)
    if op == "ne":
        same = _zero(form)
        one = same[0] if same is not None and len(same) == 1 else None
        return (Unequal(one.of, one.f),) if isinstance(one, Equal) else None
    return _at_least(form if op == "ge" else -form)


def _parts(form: Linear) -> tuple[Linear, Linear, list[tuple[Expr, int]]]:
    """(terms without a key, terms of the key alone, [(atom, factor)] of atoms that read query and key) of a form."""
    key = [t for t in form.terms if depends(t[0]) == {"k"}]
    both = [t for t in form.terms if depends(t[0]) == {"q", "k"}]
    return form.without(*(a for a, _ in key), *(a for a, _ in both)), Linear(tuple(key), 0), both


def _over(f: Linear, n: int) -> Expr:
    return write(f) if n == 1 else build("floordiv", write(f), lit(n))


def _at_least(form: Linear) -> Conjunction | None:
    """The clauses of `form >= 0`."""
    rest, key, both = _parts(form)
    if not both and not key.terms:
        return (QueryCondition(build("ge", write(rest), lit(0))),)
    if not both and len(key.terms) > 1:  # a sum of functions of the key is itself one
        return (Limit(OnKeyFunction(write(key)), "low", write(-rest)),)
    if len(both) + len(key.terms) > 1:  # two atoms that move with the key cannot be solved for either
        return None
    ((atom, factor),) = both or key.terms
    if factor > 0:  # factor * atom + rest >= 0
        return _limit(atom, "low", -linear(_over(rest, factor)))
    return _limit(atom, "high", linear(_over(rest, -factor)))


def _limit(atom: Expr, side: str, f: Linear) -> Conjunction | None:
    """The clause `atom >= f` ("low") or `atom <= f` ("high")."""
    if atom is _K:
        return (Limit(KeyPosition(), side, write(f)),)
    if atom.op == "floordiv" and _positive(atom.args[1]):
        x, n = linear(atom.args[0]), atom.args[1].name
        return _at_least(x - f.times(n) if side == "low" else f.times(n) + Linear((), n - 1) - x)
    if depends(atom) == {"k"}:
        return (Limit(_target(atom), side, write(f)),)
    if (atom.op, side) in (("abs", "high"), ("max", "high"), ("min", "low")):
        sides = atom.args if atom.op != "abs" else (atom.args[0], -atom.args[0])
        limits = [_at_least(linear(s) - f if side == "low" else f - linear(s)) for s in sides]
        return None if any(c is None for c in limits) else tuple(c for part in limits if part is not None for c in part)
    return None


def _zero(form: Linear) -> Conjunction | None:
    """The clauses of `form == 0`."""
    rest, key, both = _parts(form)
    if not both and not key.terms:
        return (QueryCondition(build("eq", write(rest), lit(0))),)
    if not both and (len(key.terms) > 1 or abs(key.terms[0][1]) > 1):  # with a factor, f may be no multiple of it
        return (Equal(OnKeyFunction(write(key)), write(-rest)),)
    if len(both) + len(key.terms) > 1 or (both and abs(both[0][1]) > 1):
        return None
    ((atom, factor),) = both or key.terms
    f = rest if factor < 0 else -rest  # atom == f
    if atom is _K or (atom.op == "floordiv" and _positive(atom.args[1])):
        sides = _limit(atom, "low", f), _limit(atom, "high", f)
        return None if sides[0] is None or sides[1] is None else sides[0] + sides[1]
    return (Equal(_target(atom), write(f)),) if not both else _residue(atom, f)


def _residue(atom: Expr, f: Linear) -> Conjunction | None:
    """The clause `(g(q) + k) % n == f` or `(g(q) - k) % n == f`: a residue of the key."""
    if atom.op != "mod" or not _positive(atom.args[1]):
        return None
    rest, key, both = _parts(linear(atom.args[0]))
    if both or key.terms not in (((_K, 1),), ((_K, -1),)):
        return None
    n = atom.args[1]
    residue = f - rest if key.terms[0][1] > 0 else rest - f
    # no key has a residue outside of 0..n - 1
    inside = simplify(conj(build("ge", write(f), lit(0)), build("lt", write(f), n)))
    return (
        *(() if inside is TRUE else (QueryCondition(inside),)),
        Equal(Digit(1, n.name), build("mod", write(residue), n)),
    )


def _target(atom: Expr) -> Target:
    if atom.op == "mod" and _positive(atom.args[1]):
        inner, base = atom.args[0], atom.args[1].name
        if inner is _K:
            return Digit(1, base)
        if inner.op == "floordiv" and inner.args[0] is _K and _positive(inner.args[1]):
            return Digit(inner.args[1].name, base)
    return OnKeyFunction(atom)


def _positive(e: Expr) -> bool:
    return e.op == "lit" and e.type is INT and e.name > 0
