"""How far the rules reach: the forms that are left of families of small expressions, and the operators in them.

A rule that no longer applies somewhere leaves more forms, or longer ones. The numbers are those of today's rules. Rules
that reach further make them smaller, and then the smaller ones belong here.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.lowering.expressions import Everything
from support.tiers import thinned

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, build, lit, lookup, param, segment, walk
from frisket.dsl.show import show
from frisket.dsl.sugar import k, q
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.simplify import simplify

X, U, V = param("x", INT), param("u", FLOAT), param("v", FLOAT)
INTS = [q, k, X, *map(lit, (-3, -1, 0, 1, 2, 4))]
FLOATS = [U, V, build("float", q), *map(lit, (-1.0, 0.0, 0.5, 1.0, 2.0))]
WHOLE = ("add", "sub", "mul", "floordiv", "mod", "min", "max")
BITS = ("bitand", "bitor", "bitxor")
REAL = ("add", "sub", "mul", "div", "min", "max")
RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")
SIDES = [
    (q, k), (k, q), (q - k, lit(3)), (q - k, lit(0)), (q, lit(3)), (q, lit(0)), (k, lit(2)), (2 * q, k),
    (q % 4, lit(1)), (q % 4, lit(0)), (q // 4, k // 4), (q, X), (X, lit(2)), (build("float", q), U), (U, lit(1.0)),
]  # fmt: skip
CLAUSES = [build(op, *side) for op in RELATIONS for side in SIDES]
CLAUSES += [param("flag", BOOL), param("other", BOOL), lit(True), lit(False)]
CLAUSES += [build("not", a) for a in CLAUSES]
ENV = {
    "q": np.arange(9)[:, None],
    "k": np.arange(7)[None, :],
    "x": 3,
    "u": 0.5,
    "v": -2.0,
    "flag": True,
    "other": False,
}
TABLES = {"t": np.array([4, -2, 7, 0, 0, -5, 1]), "off": np.array([0, 2, 3, 7])}


def of(rng: random.Random, ops: tuple[str, ...], *operands: Expr) -> Expr:
    """One of the operators on the operands, in either order."""
    return build(rng.choice(ops), *rng.sample(operands, len(operands)))


def whole(rng: random.Random) -> Expr:
    """An operator on whole numbers."""
    if rng.random() < 0.3:
        return build(rng.choice(("neg", "abs", "sign", "bitnot")), rng.choice(INTS))
    if rng.random() < 0.1:
        return build(rng.choice(("shl", "shr")), rng.choice(INTS), lit(rng.randrange(4)))
    return of(rng, (*WHOLE, *BITS), rng.choice(INTS), rng.choice(INTS))


def nested(rng: random.Random) -> Expr:
    """Operators on operators on whole numbers."""
    a = of(rng, (*WHOLE, *BITS), whole(rng), rng.choice((rng.choice(INTS), whole(rng))))
    return a if rng.random() < 0.7 else build(rng.choice(("neg", "abs", "sign", "bitnot")), a)


def tables(rng: random.Random) -> Expr:
    """A lookup, or the piece of an index, beside whole numbers."""
    read = lookup("t", (whole(rng),)) if rng.random() < 0.6 else segment("off", whole(rng))
    return of(rng, (*WHOLE, *RELATIONS), read, rng.choice(INTS))


def comparisons(rng: random.Random) -> Expr:
    """A comparison of whole numbers."""
    return of(rng, RELATIONS, whole(rng), rng.choice((rng.choice(INTS), whole(rng))))


def pairs(rng: random.Random) -> Expr:
    """Two clauses, and the operator that joins them."""
    return of(rng, ("and", "or", "xor", "eq", "ne"), rng.choice(CLAUSES), rng.choice(CLAUSES))


def threes(rng: random.Random) -> Expr:
    """Three clauses."""
    a, b, c = rng.choice(CLAUSES), rng.choice(CLAUSES), rng.choice((*CLAUSES, whole(rng) < rng.choice(INTS)))
    a = rng.choice((a, b, c, a))  # shared terms are what many rules are about
    if rng.random() < 0.2:
        return build("where", a, b, c)
    inner = of(rng, ("and", "or", "xor"), b, rng.choice((a, c)))
    return of(rng, ("and", "or"), a, inner, c) if rng.random() < 0.7 else of(rng, ("xor", "eq"), inner, a)


def choices(rng: random.Random) -> Expr:
    """A choice between whole numbers or a clause as a number, and what is done with it."""
    c = rng.choice((rng.choice(CLAUSES), pairs(rng)))
    chosen = build("where", c, whole(rng), rng.choice(INTS)) if rng.random() < 0.7 else build("int", c)
    other = build("where", rng.choice((c, rng.choice(CLAUSES))), rng.choice(INTS), rng.choice(INTS))
    return of(rng, (*WHOLE, *RELATIONS), chosen, rng.choice((rng.choice(INTS), whole(rng), other)))


def real(rng: random.Random) -> Expr:
    """An operator on Floats."""
    if rng.random() < 0.3:
        return build(rng.choice(("neg", "abs", "sign", "exp", "sqrt", "tanh")), rng.choice(FLOATS))
    return of(rng, REAL, rng.choice(FLOATS), rng.choice(FLOATS))


def floats(rng: random.Random) -> Expr:
    """Operators on operators on Floats, comparisons and roundings of them."""
    a = of(rng, (*REAL, *RELATIONS), real(rng), rng.choice((rng.choice(FLOATS), real(rng))))
    if a.type is BOOL:
        return a if rng.random() < 0.5 else build("not", a)
    return a if rng.random() < 0.8 else build(rng.choice(("isfinite", "int", "floor", "neg")), a)


def rounded(rng: random.Random) -> Expr:
    """Whole numbers as Floats: compared, divided, rounded."""
    a, b = (build("float", e) for e in (whole(rng), whole(rng)))
    c = lit(rng.choice((-2.5, -1.0, 0.0, 0.5, 1.0, 3.0, 3.5, 4.0, 2.0**40, float("inf"))))
    kind = rng.randrange(3)
    if kind == 0:
        return of(rng, RELATIONS, a, rng.choice((b, c)))
    if kind == 1:
        return build(rng.choice(("floor", "int")), build("div", a, c))
    choice = build("where", rng.choice(CLAUSES), c, rng.choice((c, U, lit(0.0))))
    return of(rng, (*REAL, *RELATIONS), rng.choice((choice, build("neg", choice))), rng.choice((a, c, V)))


def chains(rng: random.Random) -> Expr:
    """Three to eight operands of one operator, now and then seventy."""
    ops = rng.choice((("min", "max"), BITS, ("add", "sub"), ("mul",), ("and", "or"), ("xor",)))
    clauses = ops[0] in ("and", "xor")
    e = rng.choice(CLAUSES) if clauses else whole(rng)
    for _ in range(rng.randrange(60, 70) if rng.random() < 0.01 else rng.randrange(2, 8)):
        other = rng.choice(CLAUSES) if clauses else rng.choice((rng.choice(INTS), whole(rng)))
        e = of(rng, ops[:1] if rng.random() < 0.9 else ops, e, other)
    return e


def everything(rng: random.Random) -> Expr:
    """Every operator."""
    return Everything(rng).of(rng.choice((BOOL, INT, FLOAT)), rng.randrange(2, 5))


DRAWN = 600
MOST = {  # (forms, operators in all of them)
    nested: (337, 1535), tables: (523, 2382), comparisons: (209, 905), pairs: (496, 3571), threes: (466, 3928),
    choices: (496, 4868), floats: (463, 2288), rounded: (345, 2100), chains: (403, 3846), everything: (539, 4499),
}  # fmt: skip


@pytest.mark.parametrize("family", thinned(MOST), ids=lambda family: family.__name__)
def test_rules_leave_no_more_forms_and_keep_values(family):
    rng, forms = random.Random(family.__name__), set[Expr]()
    for _ in range(DRAWN):
        e = family(rng)
        forms.add(form := simplify(e))
        if family is not everything:  # its sizes and tables have a test of their own
            assert same(e, form), f"{show(e)} is not {show(form)}"
    found = len(forms), sum(1 for e in forms for _ in walk(e))
    assert found[0] <= MOST[family][0], found
    assert found[1] <= MOST[family][1], found


def same(e: Expr, form: Expr) -> bool:
    """Whether two expressions have equal values; also where the interpreter refuses one, which leaves 64 bits."""
    try:
        x, y = (np.broadcast_to(evaluate(a, ENV, TABLES), (9, 7)) for a in (e, form))
    except EvaluationError:
        return True
    return bool(((x == y) | ((x != x) & (y != y))).all())
