"""Comparisons of Ints in one canonical direction, and comparisons of operators that a bound sees through."""

from __future__ import annotations

from frisket.dsl.ir import FALSE, TRUE, Expr, build, conj, disj, lit
from frisket.dsl.sugar import eq, ne, where
from frisket.dsl.types import BOOL

from .affine import is_int_comparison, relation, write, write_relation
from .facts import interval
from .pattern import m, n, p, rule, x


def normal(node: Expr) -> Expr | None:
    """The canonical form, or a constant where signs decide."""
    if not is_int_comparison(node):
        return None
    op, form = relation(node.op, *node.args)
    lo, hi = interval(write(form))
    if (op == "ge" and lo is not None and lo >= 0) or (op == "le" and hi is not None and hi <= 0):
        return TRUE
    if (op == "ge" and hi is not None and hi < 0) or (op == "le" and lo is not None and lo > 0):
        return FALSE
    if op in ("eq", "ne") and ((lo is not None and lo > 0) or (hi is not None and hi < 0)):
        return FALSE if op == "eq" else TRUE
    return write_relation(op, form)


def through(node: Expr) -> Expr | None:
    """`abs min max // where` with a literal factor +-1 in a bound become bounds of their arguments."""
    if not is_int_comparison(node):
        return None
    op, form = relation(node.op, *node.args)
    for atom, factor in form.terms:
        if abs(factor) != 1:
            continue
        # factor * atom + rest REL 0  is  atom REL' other
        rest = form.without(atom)
        other = write(-rest if factor == 1 else rest)
        rel = op if factor == 1 else {"ge": "le", "le": "ge"}.get(op, op)
        found = _see_through(rel, atom, other, alone=len(form.terms) == 1)
        if found is not None:
            return found
    return None


def _see_through(rel: str, atom: Expr, other: Expr, alone: bool) -> Expr | None:
    args = atom.args
    if atom.op == "abs" and rel in ("le", "ge"):
        inner = args[0]
        return conj(inner <= other, inner >= -other) if rel == "le" else disj(inner >= other, inner <= -other)
    if atom.op == "abs" and alone and other.op == "lit" and rel in ("eq", "ne"):
        return _absolute_equal(rel, args[0], other)
    if atom.op in ("min", "max") and rel in ("le", "ge"):
        both = (atom.op == "max") == (rel == "le")
        pair = (build(rel, args[0], other), build(rel, args[1], other))
        return conj(*pair) if both else disj(*pair)
    if atom.op == "floordiv" and alone and args[1].op == "lit" and args[1].name > 0 and other.op == "lit":
        return _quotient(rel, args[0], args[1].name, other.name)
    if atom.op == "where" and (other.op == "lit" or any(a.op == "lit" for a in args[1:])):
        return where(args[0], build(rel, args[1], other), build(rel, args[2], other))
    if atom.op == "int" and args[0].type is BOOL and alone and other.op == "lit":
        return where(args[0], build(rel, lit(1), other), build(rel, lit(0), other))
    return None


def _absolute_equal(rel: str, inner: Expr, value: Expr) -> Expr:
    if value.name < 0:
        return FALSE if rel == "eq" else TRUE
    hit = disj(eq(inner, value), eq(inner, -value))
    return hit if rel == "eq" else build("not", hit)


def _quotient(rel: str, a: Expr, d: int, bound: int) -> Expr:
    first, stop = lit(bound * d), lit((bound + 1) * d)
    return {
        "ge": a >= first,
        "le": a < stop,
        "eq": conj(a >= first, a < stop),
        "ne": disj(a < first, a >= stop),
    }[rel]


RULES = [
    *(rule("see-through", op, through) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    *(rule("affine-comparison", op, normal) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    rule("abs-divides", eq(abs(x) % n, 0), lambda x, n: eq(x % n, 0), lambda x, n: n.name > 0),
    rule("abs-divides", ne(abs(x) % n, 0), lambda x, n: ne(x % n, 0), lambda x, n: n.name > 0),
    rule("mod-bound", eq(x % m, n), FALSE, lambda x, m, n: m.name > 0 and not 0 <= n.name < m.name),
    rule("mod-bound", ne(x % m, n), TRUE, lambda x, m, n: m.name > 0 and not 0 <= n.name < m.name),
    rule("bool-eq-self", eq(p, p), TRUE),
    rule("bool-ne-self", ne(p, p), FALSE),
    rule("bool-eq", "eq", lambda e: build("not", build("xor", *e.args)) if e.args[0].type is BOOL else None),
    rule("bool-ne", "ne", lambda e: build("xor", *e.args) if e.args[0].type is BOOL else None),
]  # fmt: skip
