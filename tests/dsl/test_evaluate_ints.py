"""Int arithmetic of the interpreter beside Python's own integers: ends of 64 bits, divisors of every kind, shapes."""

import itertools

import numpy as np
import pytest

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import OPERATORS

EDGES = [0, 1, 2, 3, 7, 8, 1000, 2**31, 2**53 + 1, 2**61, 2**62, 2**63 - 2048]
INTS = sorted({*EDGES, *(-x for x in EDGES), -(2**63)})
MEANINGS = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "floordiv": lambda x, y: x // y if y else 0, "mod": lambda x, y: x % y if y else 0,
}  # fmt: skip


@pytest.mark.parametrize("op", MEANINGS)
def test_of_pairs_and_of_arrays(op):
    """An array that holds one pair out of range is refused, whatever stands beside it."""
    fits, refused = [], []
    for x, y in itertools.product(INTS, INTS):
        want = MEANINGS[op](x, y)
        if abs(want) < 2**63 - 2048:  # the check in floating point rounds the last 1,024 up
            fits.append((x, y, want))
        elif abs(want) >= 2**63:
            refused.append((x, y, want))
    for shape in ((), (1,), (2, 1)):
        for x, y, want in fits:
            found = OPERATORS[op](np.full(shape, x), np.asarray(y))
            assert found.dtype == np.int64
            assert found.shape == shape
            assert (found == want).all(), (x, y)
    x, y, want = (np.array(a) for a in zip(*fits, strict=True))
    np.testing.assert_array_equal(OPERATORS[op](x, y), want)
    for x, y, _ in refused if op in ("add", "sub", "mul") else ():
        for first, second in ((np.asarray(x), np.asarray(y)), (np.array([1, x]), np.array([1, y]))):
            with pytest.raises(EvaluationError, match="leaves 64 bits"):
                OPERATORS[op](first, second)


@pytest.mark.parametrize(("op", "meaning"), [("neg", lambda x: -x), ("abs", abs)])
def test_unary_int_operators_are_those_of_python(op, meaning):
    for x in INTS[1:]:
        assert OPERATORS[op](np.array([x, 5]))[0] == meaning(x)
    with pytest.raises(EvaluationError, match="leaves 64 bits"):
        OPERATORS[op](np.array([-(2**63), 5]))


@pytest.mark.parametrize("op", MEANINGS)
def test_int_operators_on_empty_arrays_keep_the_shape(op):
    assert OPERATORS[op](np.zeros((0, 3), np.int64), np.arange(3)).shape == (0, 3)
    assert OPERATORS[op](np.zeros((0, 3), np.int64), np.asarray(4)).shape == (0, 3)
