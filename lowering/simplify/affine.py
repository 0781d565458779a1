"""The affine normal form of Int expressions and of their comparisons, and the Expr of a normal form.

>>> from frisket.dsl.sugar import q, k
>>> write_relation(*relation("lt", q - k, lit(256)))
q - k <= 255
>>> write_relation(*relation("ge", q + 1, k + 1))
q >= k
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from frisket.dsl.ir import COORDINATES, FALSE, TRUE, Expr, build, lit, walk
from frisket.dsl.types import INT
from frisket.grammar.memo import memo

from .order import sort_key

Terms = tuple[tuple[Expr, int], ...]  # (atom, coefficient), coefficients not 0, in canonical order
# the analysis writes rectangles in q0 q1 k0 k1 (first and last query and key)
MOVING = (*COORDINATES, "q0", "q1", "k0", "k1")


@dataclass(frozen=True)
class Linear:
    """The affine form `sum(coefficient * atom) + const`."""

    terms: Terms
    const: int

    def __neg__(self) -> Linear:
        return self.times(-1)

    def __add__(self, other: Linear) -> Linear:
        return _collect((*self.terms, *other.terms), self.const + other.const)

    def __sub__(self, other: Linear) -> Linear:
        return self + -other

    def times(self, factor: int) -> Linear:
        if factor == 0:
            return Linear((), 0)
        return Linear(tuple((a, f * factor) for a, f in self.terms), self.const * factor)

    @property
    def large(self) -> bool:
        """Whether numbers are so large that sums in another order may leave 64 bits."""
        return abs(self.const) >= _LARGEST or any(abs(f) >= _LARGEST for _, f in self.terms)

    def coefficient(self, atom: Expr) -> int:
        return next((f for a, f in self.terms if a is atom), 0)

    def without(self, *atoms: Expr) -> Linear:
        return Linear(tuple(t for t in self.terms if t[0] not in atoms), self.const)


def _collect(terms: Iterable[tuple[Expr, int]], const: int) -> Linear:
    total: dict[Expr, int] = {}
    for atom, factor in terms:
        total[atom] = total.get(atom, 0) + factor
    kept = [(a, f) for a, f in total.items() if f]
    if len(kept) > 1:
        kept.sort(key=lambda t: sort_key(t[0]))
    return Linear(tuple(kept), const)


_LARGEST = 2**61
_WIDEST = 64  # terms of one form: sums beyond are taken in parts, so that work grows with their length


@memo(group="expressions")
def linear(e: Expr) -> Linear:
    """The affine form of an Int expression; parts that are not affine, and sums of very many terms, become atoms."""
    if e.op == "lit":
        return Linear((), e.name)
    if e.op in ("add", "sub"):
        left, right = linear(e.args[0]), linear(e.args[1])
        if len(left.terms) + len(right.terms) > _WIDEST:
            return Linear(((e, 1),), 0)
        both = left + right if e.op == "add" else left - right
        return Linear(((e, 1),), 0) if both.large else both
    if e.op == "neg":
        return -linear(e.args[0])
    if e.op == "mul":
        for factor, other in (e.args, e.args[::-1]):
            if factor.op == "lit":
                many = linear(other).times(factor.name)
                return Linear(((e, 1),), 0) if many.large else many
    return Linear(((e, 1),), 0)


@memo(group="expressions")
def write(form: Linear) -> Expr:
    """The one expression for an affine form: positive terms first, the constant last."""
    ordered = sorted(form.terms, key=lambda t: t[1] < 0)
    result: Expr | None = None
    for atom, factor in ordered:
        term = atom if abs(factor) == 1 else build("mul", lit(abs(factor)), atom)
        if result is None:
            result = term if factor > 0 else build("neg", atom) if factor == -1 else build("mul", lit(factor), atom)
        else:
            result = build("add" if factor > 0 else "sub", result, term)
    if result is None:
        return lit(form.const)
    if form.const:
        result = build("add" if form.const > 0 else "sub", result, lit(abs(form.const)))
    return result


@memo(group="expressions")
def varies(e: Expr) -> bool:
    """Whether a value depends on b, h, q or k, or on the ends of a rectangle."""
    return any((n.op == "var" and n.name in MOVING) or n.op in ("bound", "hole") for n in walk(e))


# a comparison of Ints is `form REL 0` with REL one of ge, le, eq, ne
FLIP = {"ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}
NEGATE = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge", "eq": "ne", "ne": "eq"}


@memo(group="expressions")
def relation(op: str, left: Expr, right: Expr) -> tuple[str, Linear]:
    """The comparison `left op right` as (rel, form) meaning `form rel 0`, in canonical direction: the first varying
    atom has a positive coefficient, coefficients have no common divisor, bounds are not strict."""
    form = linear(left) - linear(right)
    if op in ("lt", "gt"):  # Int: x < 0 is x + 1 <= 0
        form = Linear(form.terms, form.const + (1 if op == "lt" else -1))
        op = "le" if op == "lt" else "ge"
    lead = next((f for a, f in form.terms if varies(a)), form.terms[0][1] if form.terms else 1)
    if lead < 0:
        op, form = FLIP[op], -form
    g = math.gcd(*(f for _, f in form.terms)) if form.terms else 1
    if g > 1 and (op not in ("eq", "ne") or form.const % g == 0):
        const = -(-form.const // g) if op == "le" else form.const // g
        form = Linear(tuple((a, f // g) for a, f in form.terms), const)
    return op, form


@memo(group="expressions")
def write_relation(op: str, form: Linear) -> Expr:
    if not form.terms:
        value = {"ge": form.const >= 0, "le": form.const <= 0, "eq": form.const == 0, "ne": form.const != 0}
        return TRUE if value[op] else FALSE
    g = math.gcd(*(f for _, f in form.terms))
    if op in ("eq", "ne") and form.const % g:
        return FALSE if op == "eq" else TRUE
    moving = tuple(t for t in form.terms if varies(t[0])) or form.terms
    fixed = tuple(t for t in form.terms if t not in moving)
    bound = -Linear(fixed, form.const)  # moving `op` bound
    strict = {"le": ("lt", -1), "ge": ("gt", 1)}.get(op)
    has_minus = any(f < 0 for _, f in moving)
    if not fixed and has_minus and strict and bound.const == strict[1]:
        op, bound = strict[0], Linear((), 0)
    if not fixed and has_minus and bound.const == 0:
        right = tuple((a, -f) for a, f in moving if f < 0)
        return build(op, write(Linear(tuple(t for t in moving if t[1] > 0), 0)), write(Linear(right, 0)))
    if fixed and strict and bound.const == strict[1]:
        op, bound = strict[0], Linear(bound.terms, 0)
    return build(op, write(Linear(moving, 0)), write(bound))


@memo(group="expressions")
def is_affine(e: Expr) -> bool:
    """Whether an Expr is made of variables, parameters and literals by sums and literal factors alone."""
    return all(a.op in ("var", "param", "extent", "bound") for a, _ in linear(e).terms)


def is_int_comparison(e: Expr) -> bool:
    return e.op in ("lt", "le", "gt", "ge", "eq", "ne") and e.args[0].type is INT
