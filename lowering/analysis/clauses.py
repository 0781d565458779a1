"""Splits a mask into clauses that can be solved for a row of queries: keys in a range, a residue, a set, a group.

Every clause of a conjunction is read, where that is possible, as one of

    QueryCondition(e)        a condition on the query alone
    Keys(e)                  a condition on the key alone
    Limit(of, side, fs)      what `of` gives for the key is at least ("low") or at most ("high") some f(q) of fs
    Equal(of, f), Unequal    it is, or is not, f(q)
    OnDistance(e)            a condition on q - k alone

where `of` is the key itself, a digit `k // step % base` of it, or any function of the key.

>>> from frisket.dsl.sugar import eq, k, q
>>> clause_disjuncts((q >= k) & eq((q - k) % 4, 1))
[(Limit(of=KeyPosition(), side='high', fs=(q,), rows=false), Equal(of=Digit(step=1, base=4), f=(q - 1) % 4))]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from frisket.dsl.ir import FALSE, TRUE, Expr, build, conj, disj, lit, substitute, var
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import Linear, is_int_comparison, linear, relation, write
from frisket.lowering.simplify.rules_boolean import negate

from .solve import SIDES, Isolated, K, as_logic, by_literal, depends, disjoined, isolate, on_key, sides_of_hole

D = var("d")  # q - k


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
    """A disjunction of limits on one side of one target, and of conditions on the query: the widest limit holds."""

    of: Target
    side: str  # "low" or "high", inclusive
    fs: tuple[Expr, ...]
    rows: Expr = FALSE


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


Clause = QueryCondition | Keys | Limit | Equal | Unequal | OnDistance
Conjunction = tuple[Clause, ...]


@memo(group="expressions")
def clause_disjuncts(e: Expr) -> list[Conjunction] | None:
    """The disjunction of conjunctions of clauses that equals `e`; None where a part is no clause, where there are more
    than MAX_DISJUNCTS of them, or where `e` is `beyond`."""
    return disjoined(e, _as_it_stands, _logic)


def _as_it_stands(e: Expr) -> list[Conjunction] | None:
    # before `or` is taken apart: limits of one target on one side are one clause
    conjunction = read(e)
    return None if conjunction is None else [conjunction]


def _logic(e: Expr) -> Expr | None:
    if e.op == "not" and (inner := as_logic(e.args[0])) is not None:
        return simplify(negate(inner))
    if not is_int_comparison(e):
        return as_logic(e)
    if e.op == "ne":  # a hole in a range is two ranges
        return disj(*sides_of_hole(e))
    op, form = relation(e.op, *e.args)
    lone = isolate(op, form, lambda a: depends(a) == {"q", "k"})
    if lone is None or op == "eq" or (lone.atom.op, lone.op) not in _EITHER:  # |x| >= y, max(x, y) >= z, min(x, y) <= z
        return None
    rest = -lone.value if lone.op == "ge" else lone.value
    factor = lone.factor if lone.op == "ge" else -lone.factor
    return disj(*(simplify(build("ge", write(linear(s).times(factor) + rest), lit(0))) for s in _sides(lone.atom)))


# bounds on an atom that hold where one of its sides meets them, and where both do
_EITHER = {("max", "ge"), ("min", "le"), ("abs", "ge")}
_BOTH = {("max", "le"), ("min", "ge"), ("abs", "le")}


def _sides(atom: Expr) -> tuple[Expr, Expr]:
    x, y = atom.args if len(atom.args) == 2 else (atom.args[0], -atom.args[0])
    return x, y


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
        limits = [c for c in clauses or () if isinstance(c, Limit | Equal) and not isinstance(c.of, OnKeyFunction)]
        # ranges and digits of the key are counted by arithmetic, other conditions on it as a set
        return clauses if clauses is not None and len(limits) == len(clauses) else (Keys(e),)
    return clauses if clauses is not None or e.op in ("and", "or") else _on_distance(e)


def _on_distance(e: Expr) -> Conjunction | None:
    # with q written as d + k, a condition on the distance has no k left
    shifted = simplify(substitute(e, {var("q"): D + K}))
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
    return (Limit(limits[0].of, limits[0].side, tuple(f for x in limits for f in x.fs), disj(*rows)),)


# -- comparisons ----------------------------------------------------------------------------------


def _comparison(e: Expr) -> Conjunction | None:
    op, form = relation(e.op, *e.args)
    if op != "ne":
        return _solved(op, form)
    match _solved("eq", form):
        case (Equal(of, f),):
            return (Unequal(of, f),)
        case _:
            return None


def _solved(op: str, form: Linear) -> Conjunction | None:
    """The clauses of `form op 0`, op one of `ge le eq`."""
    key = [t for t in form.terms if depends(t[0]) == {"k"}]
    moving = [t for t in form.terms if on_key(t[0])]
    if not moving:
        return (QueryCondition(build("ge" if op == "le" else op, write(-form if op == "le" else form), lit(0))),)
    solved = isolate(op, form)
    # of an equation with a factor, the value may be no multiple of it
    if key == moving and (solved is None or (op == "eq" and solved.factor > 1)):  # functions of the key add up to one
        sign = -1 if op == "le" else 1
        target = OnKeyFunction(write(Linear(tuple((a, f * sign) for a, f in key), 0)))
        value = write(form.without(*(a for a, _ in key)).times(-sign))
        return (Equal(target, value) if op == "eq" else Limit(target, "low", (value,)),)
    if solved is None or (op == "eq" and solved.factor > 1):
        return None
    quotient = by_literal("floordiv", solved.atom)
    if op != "eq" or solved.atom is K or quotient:
        return _joined(_limit(half, quotient) for half in solved.halves)
    return (Equal(_target(solved.atom), write(solved.value)),) if key else _residue(solved.atom, solved.value)


def _joined(parts: Iterable[Conjunction | None]) -> Conjunction | None:
    both = list(parts)
    return None if None in both else tuple(c for part in both for c in part or ())


def _limit(half: Isolated, quotient: bool) -> Conjunction | None:
    """The clauses of `atom >= value` or `atom <= value`."""
    atom, limit = half.atom, half.limit
    if quotient:
        return _solved(half.op, half.inside_quotient())
    if depends(atom) == {"k"}:
        return (Limit(KeyPosition() if atom is K else _target(atom), SIDES[half.op][0], (write(limit),)),)
    return _joined(_solved(half.op, linear(s) - limit) for s in _sides(atom)) if (atom.op, half.op) in _BOTH else None


def _residue(atom: Expr, f: Linear) -> Conjunction | None:
    """The clause `(g(q) + k) % n == f` or `(g(q) - k) % n == f`: a residue of the key."""
    if not by_literal("mod", atom):
        return None
    n = atom.args[1]
    # where the key stands alone in x, x == f is k == residue, which mod n holds too
    inner = isolate("eq", linear(atom.args[0]) - f)
    if inner is None or inner.atom is not K or inner.factor > 1:
        return None
    residue = inner.value
    # no key has a residue outside of 0..n - 1
    inside = simplify(conj(build("ge", write(f), lit(0)), build("lt", write(f), n)))
    return (
        *(() if inside is TRUE else (QueryCondition(inside),)),
        Equal(Digit(1, n.name), build("mod", write(residue), n)),
    )


def _target(atom: Expr) -> Target:
    if by_literal("mod", atom):
        inner, base = atom.args[0], atom.args[1].name
        if inner is K:
            return Digit(1, base)
        if by_literal("floordiv", inner) and inner.args[0] is K:
            return Digit(inner.args[1].name, base)
    return OnKeyFunction(atom)
