"""Floats that are whole numbers compared, become Ints: values stay, and texts in either form meet."""

from __future__ import annotations

import numpy as np
import pytest

from frisket.dsl.evaluate import evaluate
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show
from frisket.lowering.simplify import canonical, simplify

BECOME = [
    ("abs(floor(q / 6) - k // 6) <= 1.0", "abs(q // 6 - k // 6) <= 1"),
    ("float(floor(q / 6)) >= float(k)", "q // 6 >= k"),
    ("float(q) - float(k) < 4.0", "q - k < 4"),
    ("(float(q) - float(k)) * (float(q) - float(k)) <= 25.0", "(q - k) * (q - k) <= 25"),
    ("-float(q) >= -float(k)", "-q >= -k"),
    ("min(float(q), 7.0) == float(k)", "min(q, 7) == k"),
]
STAY = [
    "floor(q / 6.5) >= k", "q / 6 >= k", "float(q) + 0.5 < 2.0 * k", "score + q > 1.0", "float(q) - k < inf",
]  # fmt: skip
Q, K = np.meshgrid(np.arange(40), np.arange(40), indexing="ij")
ENV = {"q": Q, "k": K, "score": np.sin(Q * 3.0 + K) * 9}


@pytest.mark.parametrize(("text", "ints"), BECOME)
def test_whole_floats_become_ints(text, ints):
    e = parse_expression(text)
    assert canonical(e).expr is canonical(parse_expression(ints)).expr
    assert not any(word in show(simplify(e)) for word in ("float", "floor", ".0"))
    np.testing.assert_array_equal(evaluate(e, ENV), evaluate(simplify(e), ENV))


@pytest.mark.parametrize("text", STAY)
def test_floats_that_are_not_whole_stay_floats(text):
    e = parse_expression(text)
    assert any(n in show(simplify(e)) for n in ("floor", "float", "/", ".", "inf"))
    np.testing.assert_array_equal(evaluate(e, ENV), np.broadcast_to(evaluate(simplify(e), ENV), Q.shape))
