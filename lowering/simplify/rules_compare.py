"""Rules for comparisons of Ints in one canonical direction, and of operators that a bound sees through."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from frisket.dsl.ir import FALSE, ONE, TRUE, ZERO, Expr, build, conj, connect, disj, lit, literal_value, walk
from frisket.dsl.sugar import eq, ne, where
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
    choices = [a for a, _ in form.terms if a.op == "where" or _of_bool(a)]
    for atom, factor in form.terms:
        if atom.op not in _SEEN or (len(choices) > _CHOICES and atom in choices):
            continue
        if abs(factor) != 1:
            if _of_bool(atom):
                return _cases(op, form, atom, factor)
            continue
        # factor * atom + rest REL 0  is  atom REL' other
        rest = form.without(atom)
        other = write(-rest if factor == 1 else rest)
        rel = op if factor == 1 else {"ge": "le", "le": "ge"}.get(op, op)
        comparison = _SEEN[atom.op](rel, atom, other, literal_value(other) if len(form.terms) == 1 else None)
        if comparison is not None:
            return comparison
    return None


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


def _equation(rel: str, hit: Expr) -> Expr:
    """The equation that holds where `hit` does, or for `ne` where it does not."""
    return hit if rel == "eq" else TRUE if hit is FALSE else build("not", hit)


def _through_abs(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    inner = e.args[0]
    if rel == "le":
        return conj(inner <= other, inner >= -other)
    if rel == "ge":
        return disj(inner >= other, inner <= -other)
    if value is None:
        return None
    return _equation(rel, disj(eq(inner, other), eq(inner, -other)) if value >= 0 else FALSE)


def _through_extreme(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    x, limit = e.args
    if rel in ("le", "ge"):
        both = (e.op, rel) in (("max", "le"), ("min", "ge"))
        return connect("and" if both else "or", (build(rel, x, other), build(rel, limit, other)))
    if value is None or limit.op != "lit":
        return None
    if value == limit.name:
        return _equation(rel, x >= limit if e.op == "min" else x <= limit)
    beyond = value > limit.name if e.op == "min" else value < limit.name
    return _equation(rel, FALSE) if beyond else build(rel, x, other)


def _through_quotient(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    divisor = literal_value(e.args[1], 0)
    return _quotient(rel, e.args[0], divisor, value) if value is not None and divisor > 0 else None


def _through_choice(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    cond, yes, no = e.args
    if all(literal_value(a) is None for a in (other, yes, no)):
        return None
    return where(cond, build(rel, yes, other), build(rel, no, other))


def _through_bool(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    return where(e.args[0], build(rel, ONE, other), build(rel, ZERO, other)) if _of_bool(e) else None


def _through_square(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    x, y = e.args
    if x is not y or value is None:
        return None
    return _square_is(rel, x, value) if rel in ("le", "ge") else build(rel, x, ZERO) if value == 0 else None


def _through_sign(rel: str, e: Expr, other: Expr, value: int | None) -> Expr | None:
    x = e.args[0]
    if rel == "ge":
        return {0: x >= 0, 1: x >= 1}.get(value)  # type: ignore[arg-type]
    if rel == "le":
        return {0: x <= 0, -1: x <= -1}.get(value)  # type: ignore[arg-type]
    return None if value is None else _equation(rel, {-1: x <= -1, 0: eq(x, 0), 1: x >= 1}.get(value, FALSE))


# The operators that a bound sees through, from the relation, the node, what it is compared with, and the number that
# this is where the node stands alone.
_SEEN: dict[str, Callable[[str, Expr, Expr, int | None], Expr | None]] = {
    "abs": _through_abs,
    "min": _through_extreme,
    "max": _through_extreme,
    "floordiv": _through_quotient,
    "where": _through_choice,
    "int": _through_bool,
    "sign": _through_sign,
    "mul": _through_square,
}


def _square_is(rel: str, x: Expr, value: int) -> Expr:
    if rel == "le":
        return abs(x) <= math.isqrt(value) if value >= 0 else FALSE
    return abs(x) > math.isqrt(value - 1) if value > 0 else TRUE


def _quotient(rel: str, a: Expr, d: int, bound: int) -> Expr:
    first, stop = lit(bound * d), lit((bound + 1) * d)
    return {"ge": a >= first, "le": a < stop, "eq": conj(a >= first, a < stop), "ne": disj(a < first, a >= stop)}[rel]


RULES = [
    *(rule("see-through", op, through, of=INT) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    *(rule("affine-comparison", op, normal, of=INT) for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    *(
        rule(f"{op}-is-argument", build(is_, build(op, *either), x), build(holds, x, y))
        for op, signs in (("min", ("le", "gt")), ("max", ("ge", "lt")))
        for either in ((x, y), (y, x))
        for is_, holds in zip(("eq", "ne"), signs)
    ),
    rule("mod-bound", eq(x % m, n), FALSE, lambda x, m, n: m.name > 0 and not 0 <= n.name < m.name),
    rule("mod-bound", ne(x % m, n), TRUE, lambda x, m, n: m.name > 0 and not 0 <= n.name < m.name),
    rule("bool-eq-self", eq(p, p), TRUE),
    rule("bool-ne-self", ne(p, p), FALSE),
    rule("bool-eq", "eq", lambda e: build("not", build("xor", *e.args)), of=BOOL),
    rule("bool-ne", "ne", lambda e: build("xor", *e.args), of=BOOL),
]
