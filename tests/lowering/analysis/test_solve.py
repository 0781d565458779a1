"""Solved comparisons: each says the same as the comparison, at every query and key."""

from itertools import product

import numpy as np
import pytest

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COMPARISONS, Expr, build, conj, lit
from frisket.dsl.sugar import k, q
from frisket.lowering.analysis.solve import isolated, position_bound
from frisket.lowering.simplify.affine import write

GRID = {"q": np.arange(-20, 21)[:, None], "k": np.arange(-20, 21)}


def truth(e: Expr) -> np.ndarray:
    return np.broadcast_to(evaluate(e, GRID), (41, 41))


@pytest.mark.parametrize("op", sorted(COMPARISONS - {"ne"}))
def test_isolated_comparisons_say_the_same(op: str) -> None:
    for factor, by, shift in product((-3, -1, 1, 2), (-2, 0, 1, 4), (-5, 0, 3)):
        for atom in (k, k // 4, (k + q) // 3):
            e = build(op, factor * atom + shift, by * q + 1)
            solved = isolated(e)
            assert solved is not None
            np.testing.assert_array_equal(
                truth(build(solved.op, solved.factor * solved.atom, write(solved.value))), truth(e)
            )
            halves = [build(half.op, half.atom, write(half.limit)) for half in solved.halves]
            np.testing.assert_array_equal(truth(conj(*halves)), truth(e))
            if atom is not k:
                inside = [build(half.op, write(half.inside_quotient()), lit(0)) for half in solved.halves]
                np.testing.assert_array_equal(truth(conj(*inside)), truth(e))


@pytest.mark.parametrize("op", sorted(COMPARISONS))
def test_bounds_of_positions_say_the_same(op: str) -> None:
    sides = {"q": q, "k": k, "d": q - k}
    for (name, side), factor, shift in product(sides.items(), (-2, -1, 1, 3), (-7, 0, 4)):
        e = build(op, factor * side, lit(shift))
        bound = position_bound(e)
        if bound is None:  # a hole, or an equation that no position meets
            assert op == "ne" or (op == "eq" and shift % factor)
            continue
        axis, rel, value = bound
        assert axis == name
        np.testing.assert_array_equal(truth(build(rel, side, write(value))), truth(e))
