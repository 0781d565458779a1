"""Printing and parsing are inverse; the printed form is the one people would write."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.lowering import expressions

from frisket.dsl import ir
from frisket.dsl.errors import BudgetError
from frisket.dsl.ir import build, lit, param, var
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show
from frisket.dsl.sugar import k, q, score
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.runtime.masks.mask import Mask


def quick(n):
    return settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck))


def test_a_float_to_a_whole_number_is_declared():
    """`p ** 2` alone is a power of an Int."""
    e = ir.make("pow", (ir.param("p", FLOAT), ir.make("float", (ir.lit(2),), None, FLOAT)), None, FLOAT)
    assert show(e) == "param p: float\np ** 2"
    assert parse_expression(show(e)) is e


FLAG, OTHER = ir.param("flag", BOOL), ir.param("other", BOOL)


@pytest.mark.parametrize(
    "e",
    [
        ir.build("eq", ir.build("not", FLAG), FLAG),
        ir.build("ne", ir.build("not", FLAG), ir.build("not", OTHER)),
        ir.build("eq", ir.build("xor", FLAG, OTHER), FLAG),
        ir.build("where", FLAG, ir.build("not", OTHER), OTHER),
    ],
    ids=repr,
)
def test_bools_whose_operators_bits_have_too_are_declared(e):
    """`(~flag) == flag` alone reads as one of Ints."""
    assert "param " in show(e)
    assert parse_expression(show(e)) is e


@quick(150)
@given(expressions.any_expression())
def test_parse_of_show_is_the_same_node(e):
    assert parse_expression(show(e)) is e, show(e)


@quick(60)
@given(expressions.mask_case())
def test_masks_print_back_with_their_parameters(case):
    m = Mask(case.expr, {**case.params, **case.tables})
    assert parse_expression(str(m), dict(m.params)) is m.expr
    assert parse_expression(show(m.expr)) is m.expr


@pytest.mark.slow
def test_parse_of_show_on_many():
    rng = random.Random(3)
    for _ in range(20_000):
        e = expressions.Everything(rng).of(rng.choice((BOOL, INT, FLOAT)), rng.randrange(7))
        try:
            text = show(e)
        except BudgetError:
            continue
        if len(text) < 50_000:
            assert parse_expression(text) is e, text


w, p, x, flag = param("w"), param("p", FLOAT), param("x", FLOAT), param("flag", BOOL)

PRINTED = [
    ((q >= k) & (q - k < w), "q >= k & q - k < w"),
    ((q >= k) & ((q < 3) | (k < 4)), "q >= k & (q < 3 | k < 4)"),
    ((q & 3) >= k, "(q & 3) >= k"),
    (build("eq", q >= k, q < 3), "(q >= k) == (q < 3)"),
    (~(q >= k), "~(q >= k)"),
    (q - (k - 1), "q - (k - 1)"),
    (q - k - 1, "q - k - 1"),
    (q - lit(-1), "q - -1"),
    (build("neg", lit(1)), "-(1)"),
    (build("neg", lit(-1)), "-(-1)"),
    (build("neg", build("neg", q)), "--q"),
    (build("pow", lit(-2), lit(2)), "(-2) ** 2"),
    (build("neg", build("pow", lit(2), lit(2))), "-2 ** 2"),
    (q * (k + 1) // 2, "q * (k + 1) // 2"),
    (q * (k // 2), "q * (k // 2)"),
    (score * 2, "score * 2"),
    (score * 2.0, "score * 2.0"),
    (score + (k - q), "score + (k - q)"),
    (build("add", build("float", q), build("float", k)), "float(q) + k"),
    (q / k, "q / k"),
    (build("exp", build("float", q)), "exp(q)"),
    (build("floor", build("float", q)), "floor(float(q))"),
    (build("add", score, build("float", w)), "score + float(w)"),
    (p >= x, "param p: float\nparam x: float\np >= x"),
    (build("eq", flag, q >= k), "param flag: bool\nflag == (q >= k)"),
    (flag & (q >= k), "flag & q >= k"),
    (build("bitand", w, param("n")), "param w: int\nparam n: int\nw & n"),
    (param("causal") + q, "param causal: int\ncausal + q"),
    (build("where", q >= k, score, ir.NEG_INF), "where(q >= k, score, -inf)"),
    (build("where", q >= k, score, build("float", lit(0))), "where(q >= k, score, 0)"),
    (ir.lookup("doc", (ir.lookup("off", (q,)), k), FLOAT) * 1.5, "doc[off[q], k] * 1.5"),
    (ir.reduce("any", lit(0), lit(3), lambda j: var("q") >= j), "any(j in 0..3: q >= j)"),
    (ir.reduce("any", lit(0), lit(3), lambda j: param("j") >= j), "any(j_ in 0..3: j >= j_)"),
    (
        ir.reduce("any", lit(0), lit(3), lambda i: ir.reduce("all", lit(1), lit(2), lambda j: i * j >= q)),
        "any(j1 in 0..3: all(j in 1..2: j1 * j >= q))",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("e", "text"), PRINTED, ids=[t for _, t in PRINTED])
def test_printed_expression_reads_back_as_itself(e, text):
    assert show(e) == text
    assert parse_expression(text) is e


def test_a_shared_graph_that_would_print_forever_is_refused():
    e = q
    for _ in range(30):
        e = e + e
    with pytest.raises(BudgetError, match=r"this expression prints as 2,147,483,647 nodes, more than 20,000"):
        show(e)
    assert "nodes" in repr(e)


def test_known_names_are_not_declared():
    assert show(p >= x, {"p", "x"}) == "p >= x"
    assert parse_expression("p >= x", {"p": 1.0, "x": np.float32(2)}) is (p >= x)
