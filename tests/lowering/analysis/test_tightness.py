"""How tight the ranges over rectangles are, and how often the questions about masks decide: each number is today's.

A range that grows, or a question that no longer decides somewhere, is sound and shows in time alone. Ranges and answers
that improve change the numbers, and then the better ones belong here.
"""

from __future__ import annotations

import itertools
import random
from contextlib import suppress

import numpy as np
import pytest

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import FLOAT_FUNCTIONS, Expr, build, lit, lookup, segment
from frisket.dsl.sugar import k, minimum, q
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.analysis.intervals import TRANSFER, ends
from frisket.lowering.analysis.questions import always, mixed, never, some
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.simplify import simplify
from lowering.analysis.test_transfer import (
    BOOLS,
    FLOAT_ATOMS,
    INT_ATOMS,
    TABLES,
    clause,
    contains,
    corners,
    dense_values,
    expressions_of,
)  # fmt: skip

WIDE = 100.0  # what a missing end counts, and the most that an end counts
RANGES = {  # what `looseness` gives, over the expressions of the operator
    "neg": (0, 3528, 2205, 210), "add": (1890, 14553, 4410, 2646), "sub": (30829, 14553, 10143, 2646),
    "mul": (40694, 8820, 882, 2646), "div": (1058400, 441, 441, 5670), "floordiv": (31528, 9261, 6615, 0),
    "mod": (23952, 6615, 2646, 0), "abs": (441, 2205, 2205, 210), "sign": (264600, 3087, 2205, 1323),
    "min": (426, 8820, 7497, 1470), "max": (460, 8820, 7497, 1470), "where": (7871, 0, 0, 0),
    "int": (25200, 441, 1764, 0), "float": (0, 2646, 441, 0), "floor": (25200, 441, 441, 0),
    "exp": (0, 441, 441, 210), "exp2": (0, 441, 441, 210), "log": (0, 441, 441, 1029), "log2": (0, 441, 441, 1029),
    "log1p": (0, 441, 441, 861), "sqrt": (0, 441, 441, 1029), "tanh": (0, 441, 441, 210),
    "sigmoid": (0, 441, 441, 210), "lookup": (3468, 2205, 441, 210), "segment": (0, 2646, 441, 0),
    "bitand": (3092440, 882, 882, 0), "shl": (0, 7938, 2646, 0), "shr": (0, 7938, 5292, 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def scope():
    return Scope({}, {n: Table(t) for n, t in TABLES.items()})


def looseness(e: Expr, scope: Scope) -> np.ndarray:
    """(how far the ends are from the values, rectangles with attained ends, with dense values, that may hold NaN)"""
    r, (value, inside) = ends(e), dense_values(e)
    n = len(value)
    inside = inside & ~np.isnan(value)
    far = 0.0
    for end, start, pick, sign in ((r.lo, np.inf, np.min, 1), (r.hi, -np.inf, np.max, -1)):
        true = pick(np.where(inside, value, start), axis=(1, 2))
        if end is None:
            far += WIDE * n
            continue
        try:
            held = np.broadcast_to(scope.value(end, corners()), n).astype(float)
        except EvaluationError:  # it leaves 64 bits
            held = np.full(n, -np.inf * sign)
        with np.errstate(invalid="ignore"):
            away = sign * (true - held)
        far += np.where(np.isnan(away), 0, np.clip(away, 0, WIDE)).sum()
    nan = np.broadcast_to(scope.value(r.nan, corners()), n).sum() if e.type is FLOAT else 0
    return np.array([round(far), n * r.attained, n * r.dense, nan], int)


@pytest.mark.parametrize("op", TRANSFER)
def test_ranges_are_no_looser(op, scope):
    found = sum(looseness(e, scope) for e in expressions_of(op))
    assert tuple(found) == RANGES[op]


def halves(type: Type) -> list[Expr]:
    """Numbers of which no end is known, the upper one, and the lower one."""
    wild = build("sin", build("float", q))
    if type is INT:
        wild = build("int", wild)
    return [wild, minimum(wild, k if type is INT else lit(2.5)), abs(wild)]


def number(rng: random.Random, type: Type, depth: int) -> Expr:
    """Operators on operators on the atoms."""
    if not depth or rng.random() < 0.1:
        return rng.choice([*(INT_ATOMS if type is INT else FLOAT_ATOMS), *rng.sample(halves(type), 1)])
    a, b = (number(rng, type, depth - 1) for _ in range(2))
    op = rng.choice(ON_INTS if type is INT else ON_FLOATS)
    if op in ("neg", "abs", "sign", *FLOAT_FUNCTIONS):
        return build(op, a)
    if op == "where":
        return build(op, clause(rng, 0), a, b)
    if op == "float":
        return build(op, number(rng, INT, depth - 1))
    if op == "int":
        return build(op, clause(rng, 0) if rng.random() < 0.5 else number(rng, FLOAT, depth - 1))
    if op == "lookup":
        return lookup("t", (a,)) if rng.random() < 0.7 else lookup("g", (a, b))
    if op == "segment":
        return segment("off", a)
    if op in ("shl", "shr", "div"):
        b = lit(rng.choice((0, 1, 3)) if type is INT else rng.choice((-2.0, 0.0, 0.5)))
    if op in ("floordiv", "mod") and rng.random() < 0.7:
        b = lit(rng.choice((-3, -1, 0, 1, 2, 5)))
    return build(op, a, b)


ON_INTS = ("neg", "abs", "sign", "add", "sub", "mul", "floordiv", "mod", "min", "max", "bitand", "where", "shl", "shr",
           "lookup", "segment", "int")  # fmt: skip
ON_FLOATS = ("neg", "abs", "add", "sub", "mul", "div", "min", "max", "where", "float", "exp", "log", "sqrt", "tanh",
             "sign")  # fmt: skip
NESTED = {
    (INT, 2): (1480506, 11907, 7497, 0),
    (INT, 3): (1251784, 7497, 5292, 0),
    (FLOAT, 2): (2240438, 5292, 3528, 19698),
}


@pytest.mark.parametrize(("type", "depth"), NESTED)
def test_ranges_of_nested_operators_contain_and_are_no_looser(type, depth, scope):
    rng, found = random.Random(f"{type.value} {depth}"), 0
    for _ in range(80):
        e = number(rng, type, depth)
        with suppress(EvaluationError):  # an end leaves 64 bits
            contains(e, scope)
        found = found + looseness(e, scope)
    assert tuple(found) == NESTED[type, depth]


# -- questions ---------------------------------------------------------------------------------------------------


def compared(rng: random.Random) -> Expr:
    """A comparison of the atoms and operators of transfer functions, or an operator of truths over such."""
    return clause(rng, 1)


def joined(rng: random.Random) -> Expr:
    """Up to eight comparisons under and, or, xor and not."""
    return clause(rng, 3)


FORMS = (q, k, q - k, q + k, 2 * q - k, q % 3, k % 2, (q - k) % 3, q // 2, q // 2 - k // 2, abs(q - k), q % 3 + k % 2,
         k % 3 - q, minimum(q % 4, k), (2 * k - q) % 3, (k // 2) % 2, *halves(INT))  # fmt: skip
RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")


def bounds(rng: random.Random) -> Expr:
    """Bounds of q, k and q - k, remainders and quotients of them, in conjunctions and disjunctions."""
    e = build(rng.choice(RELATIONS), rng.choice(FORMS), lit(rng.randrange(-3, 6)))
    if rng.random() < 0.15:
        e = rng.choice((*BOOLS, lookup("s", (k,), BOOL), lookup("m", (q, k), BOOL), lookup("s", (q - k,), BOOL)))
    elif rng.random() < 0.15:
        e = build(rng.choice(RELATIONS), *rng.sample([*FLOAT_ATOMS, *halves(FLOAT)], 2))
    if rng.random() < 0.15:
        e = build("not", e)
    return e if rng.random() < 0.4 else build(rng.choice(("and", "and", "or", "xor")), e, bounds(rng))


def chosen(rng: random.Random) -> Expr:
    """A choice between masks, or a comparison of a choice between numbers."""
    c = bounds(rng)
    if rng.random() < 0.5:
        return build("where", c, bounds(rng), bounds(rng))
    return build(rng.choice(("lt", "ge", "eq")), build("where", c, *rng.sample(INT_ATOMS, 2)), rng.choice(INT_ATOMS))


def answers(mask: Expr, scope: Scope) -> np.ndarray:
    """On how many rectangles each question is answered yes: always, never; some and mixed as a tile, and as tiles that
    are at least one, two and three keys wide. Each yes is true."""
    value, inside = dense_values(mask)
    n, (_, _, k0, k1) = len(value), (corners()[x] for x in ("q0", "q1", "k0", "k1"))

    def asked(question: Expr, **more: object) -> np.ndarray:
        return np.broadcast_to(scope.value(question, {**corners(), **more}), n)

    yes, no = asked(always(mask)), asked(never(mask))
    all_true, any_true = (value | ~inside).all(axis=(1, 2)), (value & inside).any(axis=(1, 2))
    assert not (yes & ~all_true).any(), mask
    assert not (no & any_true).any(), mask
    counts = [yes, no]
    for width in (0, 1, 2, 3):
        tiles, at = inside, value[:1]
        if width:  # the narrowest tiles: one query and `width` keys
            at = np.lib.stride_tricks.sliding_window_view(value[0], width, axis=1)
            tiles = np.lib.stride_tricks.sliding_window_view(inside, width, axis=2).all(axis=-1)
        fits = k1 - k0 + 1 >= width
        more = {"single": np.full(n, not width), "tk": np.full(n, width) if width else k1 - k0 + 1}
        for question, truths in ((some, (True,)), (mixed, (True, False))):
            found = asked(question(mask), **more) & fits
            for truth in truths:
                if width:
                    held = ((at == truth).any(axis=-1) | ~tiles).all(axis=(1, 2))
                else:
                    held = ((at == truth) & inside).any(axis=(1, 2))
                assert not (found & ~held).any(), (mask, width)
            counts.append(found)
    return np.array([c.sum() for c in counts])


DECIDED = {
    compared: (5984, 3743, 7825, 1309, 5984, 0, 3665, 0, 2239, 0),
    joined: (3669, 5462, 5181, 1119, 3497, 0, 2121, 4, 1283, 0),
    bounds: (1983, 6473, 5633, 3114, 1983, 0, 1997, 776, 1114, 439),
    chosen: (2541, 4625, 3970, 1045, 2527, 0, 1707, 57, 1065, 35),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in (joined, bounds) else pytest.mark.exhaustive) for f in DECIDED],
    ids=lambda family: family.__name__,
)
def test_questions_decide_as_often_and_are_right(family, scope):
    rng = random.Random(family.__name__)
    masks = [family(rng) for _ in range(40)]
    assert tuple(sum(answers(simplify(m) if i % 2 else m, scope) for i, m in enumerate(masks))) == DECIDED[family]


def test_negated_comparisons_of_floats_are_answered_right(scope):
    """NaN is on neither side of a comparison. The simplifier would turn some of these round."""
    pairs = list(itertools.combinations((*FLOAT_ATOMS, lit(9.0), lit(-9.0)), 2))
    found = sum(answers(build("not", build(op, x, y)), scope) for op in RELATIONS for x, y in pairs)
    assert tuple(found)[:4] == (14365, 14260, 14365, 0)
