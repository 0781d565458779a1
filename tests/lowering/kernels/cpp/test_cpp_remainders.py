"""Quotients and remainders of q - k in the C++ kernels: those of the query and of the key give equal results."""

import numpy as np
import pytest

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import build, lit, lookup, param, substitute
from frisket.dsl.sugar import eq, h, k, ne, q, score
from frisket.dsl.types import INT
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.kernels.cpp.expr import parted
from frisket.lowering.kernels.expr import POSITION, levels
from frisket.lowering.plan import Target, make_plan
from frisket.lowering.simplify import ProgramExprs

n, r = param("n"), param("r")
POSITIONS = dict(zip("qk", np.meshgrid(np.arange(-9, 23), np.arange(-8, 21), indexing="ij"), strict=True))
STEPS = {"steps": np.array([2, 5])}
# an Expr, and how many of its quotients and remainders are still worked out for every position
EXPRS = {
    "is 0": (eq((q - k) % n, 0), 0),
    "is not 0": (ne((q - k) % n, 0), 0),
    "is r": (eq((q - k) % n, r), 0),
    "r on the left": (eq(r, (k - q - 2) % n), 0),
    "is not r": (ne((k - q + 5) % n, r), 0),
    "a value": ((q - k) % n, 0),
    "a quotient": ((q - k + 1) // n, 0),
    "multiples": ((3 * k - 2 * q + r) % n, 0),
    "two remainders": (eq((q - k) % n, (q + k) % n), 0),
    "by head": (eq((q - k) % lookup("steps", (h,), INT), 1), 0),
    "of a square": ((q * q - k) % n, 0),
    "of a quotient": ((q - k) // n % 3, 1),
    "of a remainder": (((q - k) % n + q) % 5, 1),
    "of a product": (q * k % n, 1),
    "divided by the query": ((q - k) % (q + n), 1),
}


def at(e, **values):
    return np.broadcast_to(evaluate(e, POSITIONS | {"h": np.array(1), **values}, STEPS), POSITIONS["q"].shape)


def by_position(e):
    return [x for x, level in levels(e).items() if x.op in ("mod", "floordiv") and level == POSITION]


@pytest.mark.parametrize("name", EXPRS)
def test_equal_at_every_position(name):
    e, left = EXPRS[name]
    assert len(by_position(parted(e))) == left
    for divisor in (-7, -3, -1, 0, 1, 2, 3, 4, 7):
        literal = substitute(e, {n: lit(divisor)})
        for rest in (-8, -1, 0, 1, 2, 6, 9):  # some are no remainder
            want = at(e, n=divisor, r=rest)
            np.testing.assert_array_equal(at(parted(e), n=divisor, r=rest), want, f"{divisor} {rest}")
            np.testing.assert_array_equal(at(parted(literal), r=rest), want, f"{divisor} {rest}")


@pytest.mark.parametrize(
    "e",
    [(q - k) % 4, (k - q) // 8, q % n, (k + r) % n, eq(q % n, k % n), (q - build("int", score)) % n, q - k],
    ids=str,
)
def test_expressions_without_a_costly_remainder_are_not_split(e):
    """A shift or an `and` is one instruction; what only one of the two decides is known early as it is."""
    assert parted(e) is e


def test_remainders_of_a_distance_are_computed_by_row_and_column():
    made = make_plan(ProgramExprs(eq((q - k) % 3, 0) & eq((q - k) % param("g"), 1)), "x")
    text = cpp.CppKernel(made, Target("cpp", 96, 64), cpp.CppArrays(64, 64, "float32")).expressions()
    assert "row.x0 = modulo(row.q, 3);" in text
    assert "column.x1 = modulo(column.k, ints(3));" in text
    visible = text[text.index("Bits visible") :]
    assert "modulo" not in visible[: visible.index("}")]
