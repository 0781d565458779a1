"""The tables of facts in dsl/transfer.py: each operator has a row or needs none, and each row is true of values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from frisket.dsl import ir, transfer
from frisket.dsl.evaluate import OPERATORS, evaluate
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.dsl.widths import Widths

Q, K, SCORE = ir.var("q"), ir.var("k"), ir.SCORE
SCORES = [0.0, 1.0, -2.5, 0.125, 3e4]
INTS = [Q, K - 3, Q - K, -K, K % 7 - 3, ir.lit(4), ir.lit(-3), ir.lit(0), ir.lit(2), Q * 0 + 3]
FLOATS = [
    SCORE,
    SCORE * 0.0 + 2.0,
    *map(ir.lit, (0.5, 0.0, -1.5, math.inf)),
    *(ir.to_float(e) for e in (Q + 1, Q, K - Q)),
]
ARGUMENTS = {INT: INTS, FLOAT: FLOATS, BOOL: [Q >= K, K < 4, ir.TRUE]}
GRID = dict(zip(("q", "k", "score"), np.meshgrid(np.arange(9), np.arange(11), SCORES, indexing="ij"), strict=True))
UNARY = {*"neg abs sign not bitnot int float floor isfinite".split(), *ir.FLOAT_FUNCTIONS}
ON_FLOATS = {*ir.FLOAT_FUNCTIONS, "div", "isfinite"}
# the operators of each table that need no row, and why
SPARED = {
    "INTERVAL": "pow shl shr bitnot floor random float and or xor not lt le gt ge eq ne",  # no ends, or no Int
    "MAGNITUDE": "sign min max where random float and or xor not lt le gt ge eq ne",  # of the largest argument
    "DRIFT": "abs sign pow floordiv mod bitand bitor bitxor bitnot shl shr wrap and or xor not where int float floor "
    "random",  # no fixed step
    "FINITE": "pow floordiv mod bitand bitor bitxor bitnot shl shr wrap and or xor not lt le gt ge eq ne int floor exp "
    "exp2 log log2 log1p sqrt rsqrt tan isfinite",  # may overflow, or have poles, or give no Float
    "POSITIVE": "neg abs sign sub min max pow floordiv mod bitand bitor bitxor bitnot shl shr wrap lt le gt ge eq ne "
    "and or xor not where int floor random",  # 0 or negative, or too rare beside -inf
}


def spared(table):
    words = {*SPARED[table].split()}
    return words if table == "FINITE" else words | ON_FLOATS - getattr(transfer, table).keys()


@pytest.mark.parametrize("table", SPARED)
def test_operators_have_a_transfer_row_or_need_none(table):
    rows = getattr(transfer, table)
    assert not spared(table) & rows.keys()
    assert OPERATORS.keys() <= spared(table) | rows.keys()


def nodes(op):
    """An operator over arguments of each type that it takes."""
    several = [(x,) for x in INTS + FLOATS + ARGUMENTS[BOOL]] if op in UNARY else []
    several += [] if op in UNARY else [(x, y) for of in ARGUMENTS.values() for x in of for y in of]
    for args in [(Q < K, *args) for args in several] if op == "where" else several:
        if op == "random" and args[0].type is INT:
            yield ir.random(*args)
        elif op != "random" and ir.result_type(op, tuple(a.type for a in args)):
            yield ir.build(op, *args)


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_facts_hold_at_every_value(op):
    seen = 0
    for e in nodes(op):
        try:
            x = np.broadcast_to(evaluate(e, GRID), GRID["q"].shape)
        except ValueError:  # an Int leaves 64 bits
            continue
        seen += 1
        if e.type is INT:
            low, high = transfer.interval(e)
            assert low is None or low <= x.min(), e
            assert high is None or x.max() <= high, e
            if op in ("int", "floor"):  # which kernels clamp
                continue
            sizes = ir.fold(e, lambda n, args: transfer.magnitude(n, args, {"q": 8.0, "k": 10.0}))
            # the size is that of the largest number, the least one may be one further from 0; 0 ** 0 has the size of 0
            assert -max(sizes[e], 1) - 1 <= x.min(), e
            assert x.max() <= max(sizes[e], 1), e
        if e.type is FLOAT and transfer.positive(e):
            assert x.min() > 0, e
        if e.type is FLOAT and (transfer.finite(e, {}) or transfer.positive(e)):
            assert np.isfinite(x).all(), e
        step = transfer.drift(e)[e]
        if step is not None and "score" not in ir.uses(e) and np.isfinite(x).all():
            assert np.array_equal(x[1:, 1:], x[:-1, :-1] + step if step else x[:-1, :-1]), e
    assert seen


def test_a_row_that_claims_too_much_is_caught(monkeypatch):
    monkeypatch.setitem(transfer.DRIFT, "neg", lambda e, x: x)
    with pytest.raises(AssertionError):
        test_facts_hold_at_every_value("neg")


def test_widths_read_the_tables_of_facts(monkeypatch):
    e = Q * 2**62
    assert Widths({}).wrapped(e) is not e
    monkeypatch.setitem(transfer.MAGNITUDE, "mul", lambda e, x, y: 1.0)
    monkeypatch.setitem(transfer.INTERVAL, "mul", lambda e, x, y: (0, 1))
    assert Widths({}).wrapped(e) is e
