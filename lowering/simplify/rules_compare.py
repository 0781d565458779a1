"""Rules for comparisons of Ints in one canonical direction, and of operators that a bound sees through."""

from __future__ import annotations

import math
from itertools import islice

from frisket.dsl.ir import FALSE, ONE, TRUE, ZERO, Expr, build, conj, disj, lit, walk
from frisket.dsl.sugar import eq, maximum, minimum, ne, where
from frisket.dsl.transfer import interval
from frisket.dsl.types import BOOL, INT

from .affine import Linear, relation, write, write_relation
from .pattern import m, n, p, rule, x, y
from .rules_division import recombined
from .rules_order import comparison_in_order


def normal(node: Expr) -> Expr | None:
    """The canonical form of a comparison, or a constant where signs decide."""
    op, form = relation(node.op, *node.args)
    # sums of such numbers in another order may leave 64 bits
    if form.large:
        return comparison_in_order(node)
    again = recombined(form)
    if again is not None:
        return build(op, write(again), ZERO)
    lo, hi = interval(write(form))
    if (op == "ge" and lo is not None and lo >= 0) or (op == "le" and hi is not None and hi <= 0):
        return TRUE
    if (op == "ge" and hi is not None and hi < 0) or (op == "le" and lo is not None and lo > 0):
        return FALSE
    if op in ("eq", "ne") and ((lo is not None and lo > 0) or (hi is not None and hi < 0)):
        return FALSE if op == "eq" else TRUE
    return write_relation(*_tight(op, form, lo, hi))


_STEPS = frozenset({"mod", "sign", "bitxor", "bitor", "bitand"})  # operators whose least and greatest values are cases


def _tight(op: str, form: Linear, lo: int | None, hi: int | None) -> tuple[str, Linear]:
    """Tight bounds: q % 4 <= 0 is q % 4 == 0, q % 4 != 0 is q % 4 >= 1, and q % 2 != 0 is q % 2 == 1."""
    if len(form.terms) != 1 or form.terms[0][0].op not in _STEPS:
        return op, form
    if {"le": lo, "ge": hi}.get(op) == 0:  # the form lies in lo..hi
        return "eq", form
    if op == "ne" and (lo, hi) in ((0, 1), (-1, 0)):  # two values: not the one is the other
        return "eq", Linear(form.terms, form.const - (1 if lo == 0 else -1))
    if op == "ne" and 0 in (lo, hi):
        return ("ge", Linear(form.terms, form.const - 1)) if lo == 0 else ("le", Linear(form.terms, form.const + 1))
    return op, form


def through(node: Expr) -> Expr | None:
    """Bounds on `abs min max // where` with a literal factor +-1 become bounds on their arguments."""
    op, form = relation(node.op, *node.args)
    if form.large or all(a.op not in _SEEN for a, _ in form.terms) or _splits(form) > _SPLITS:
        return None
    choices = sum(a.op == "where" or _of_bool(a) for a, _ in form.terms)
    for atom, factor in form.terms:
        if choices > _CHOICES and (atom.op == "where" or _of_bool(atom)):
            continue
        if abs(factor) != 1:
            if _of_bool(atom):
                return _cases(op, form, atom, factor)
            continue
        # factor * atom + rest REL 0  is  atom REL' other
        rest = form.without(atom)
        other = write(-rest if factor == 1 else rest)
        rel = op if factor == 1 else {"ge": "le", "le": "ge"}.get(op, op)
        comparison = _see_through(rel, atom, other, alone=len(form.terms) == 1)
        if comparison is not None:
            return comparison
    return None


_SEEN = frozenset({"abs", "min", "max", "floordiv", "where", "int", "sign", "mul"})
_DOUBLING = frozenset({"abs", "min", "max", "where", "int"})
_SPLITS = 8  # operators seen through in one comparison: each one may double it
_CHOICES = 4  # each one doubles the comparison


def _splits(form: Linear) -> int:
    nodes = (n for n in walk(*(a for a, _ in form.terms)) if n.op in _DOUBLING)
    return sum(1 for _ in islice(nodes, _SPLITS + 1))


def _of_bool(e: Expr) -> bool:
    return e.op == "int" and e.args[0].type is BOOL


def _cases(op: str, form: Linear, atom: Expr, factor: int) -> Expr:
    """A comparison of int(p), by cases: one comparison where p holds, one where it does not."""
    rest = form.without(atom)
    yes, no = (
        write_relation(*relation(op, write(Linear(rest.terms, c)), ZERO)) for c in (rest.const + factor, rest.const)
    )
    return where(atom.args[0], yes, no)


def _see_through(rel: str, atom: Expr, other: Expr, alone: bool) -> Expr | None:
    args = atom.args
    if atom.op == "abs" and rel in ("le", "ge"):
        inner = args[0]
        return conj(inner <= other, inner >= -other) if rel == "le" else disj(inner >= other, inner <= -other)
    if atom.op == "abs" and alone and other.op == "lit":
        return _absolute_equal(rel, args[0], other)
    if atom.op in ("min", "max") and rel in ("le", "ge"):
        both = (atom.op == "max") == (rel == "le")
        pair = (build(rel, args[0], other), build(rel, args[1], other))
        return conj(*pair) if both else disj(*pair)
    if atom.op == "floordiv" and alone and args[1].op == "lit" and args[1].name > 0 and other.op == "lit":
        return _quotient(rel, args[0], args[1].name, other.name)
    if atom.op == "where" and (other.op == "lit" or any(a.op == "lit" for a in args[1:])):
        return where(args[0], build(rel, args[1], other), build(rel, args[2], other))
    if _of_bool(atom):
        return where(args[0], build(rel, ONE, other), build(rel, ZERO, other))
    return _see_through_number(rel, atom, other) if alone and args and other.op == "lit" else None


def _see_through_number(rel: str, atom: Expr, value: Expr) -> Expr | None:
    """Comparisons with a number of a sign, a square, or a minimum or maximum with a number."""
    x, y = atom.args[0], atom.args[-1]
    if atom.op == "sign":
        return _sign_is(rel, x, value.name)
    if atom.op == "mul" and x is y and rel in ("le", "ge"):
        return _square_is(rel, x, value.name)
    if atom.op == "mul" and x is y and value is ZERO:
        return build(rel, x, ZERO)
    if atom.op in ("min", "max") and y.op == "lit":
        return _extreme_is(rel, atom.op, x, y.name, value.name)
    return None


def _square_is(rel: str, x: Expr, value: int) -> Expr:
    if rel == "le":
        return abs(x) <= math.isqrt(value) if value >= 0 else FALSE
    return abs(x) > math.isqrt(value - 1) if value > 0 else TRUE


def _sign_is(rel: str, x: Expr, value: int) -> Expr | None:
    if rel == "ge":
        return {0: x >= 0, 1: x >= 1}.get(value)
    if rel == "le":
        return {0: x <= 0, -1: x <= -1}.get(value)
    hit = {-1: x <= -1, 0: eq(x, 0), 1: x >= 1}.get(value, FALSE)
    return hit if rel == "eq" else build("not", hit)


def _extreme_is(rel: str, op: str, x: Expr, limit: int, value: int) -> Expr:
    """The bounds equivalent to min(x, limit) == value."""
    if value > limit if op == "min" else value < limit:
        return FALSE if rel == "eq" else TRUE
    if value != limit:
        return build(rel, x, lit(value))
    hit = x >= limit if op == "min" else x <= limit
    return hit if rel == "eq" else build("not", hit)


def _absolute_equal(rel: str, inner: Expr, value: Expr) -> Expr:
    if value.name < 0:
        return FALSE if rel == "eq" else TRUE
    hit = disj(eq(inner, value), eq(inner, -value))
    return hit if rel == "eq" else build("not", hit)


def _quotient(rel: str, a: Expr, d: int, bound: int) -> Expr:
    first, stop = lit(bound * d), lit((bound + 1) * d)
    return {"ge": a >= first, "le": a < stop, "eq": conj(a >= first, a < stop), "ne": disj(a < first, a >= stop)}[rel]


RULES = [
    *(rule("see-through", op, through, of=INT) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    *(rule("affine-comparison", op, normal, of=INT) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    rule("min-is-argument", eq(minimum(x, y), x), x <= y),
    rule("min-is-argument", ne(minimum(x, y), x), x > y),
    rule("min-is-argument", eq(minimum(y, x), x), x <= y),
    rule("min-is-argument", ne(minimum(y, x), x), x > y),
    rule("max-is-argument", eq(maximum(x, y), x), x >= y),
    rule("max-is-argument", ne(maximum(x, y), x), x < y),
    rule("max-is-argument", eq(maximum(y, x), x), x >= y),
    rule("max-is-argument", ne(maximum(y, x), x), x < y),
    rule("mod-bound", eq(x % m, n), FALSE, lambda x, m, n: m.name > 0 and not 0 <= n.name < m.name),
    rule("mod-bound", ne(x % m, n), TRUE, lambda x, m, n: m.name > 0 and not 0 <= n.name < m.name),
    rule("bool-eq-self", eq(p, p), TRUE),
    rule("bool-ne-self", ne(p, p), FALSE),
    rule("bool-eq", "eq", lambda e: build("not", build("xor", *e.args)), of=BOOL),
    rule("bool-ne", "ne", lambda e: build("xor", *e.args), of=BOOL),
]
