"""Every rule is proved. The instances come from the rule table, so a new row is proved or fails here.

Rules on Ints and Bools by z3, on many instances each; where z3 gives up, on small values, all of them. Rules on
Floats on every combination of special values, bit for bit.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from support import z3_terms
from support.rule_cases import instances

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, walk
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.simplify import RULES

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan]
SMALL = [-9, -4, -3, -1, 0, 1, 2, 5, 8]
NATURAL = [0, 1, 2, 3, 5, 7, 8, 13]
# rules that z3 cannot be asked about, each with the reason; they are tested on values
NOT_FOR_Z3 = {
    "fold": "literals alone: the interpreter is the definition",
}
# rules that may change the sign of a zero, each with the reason
ZERO_SIGN = {
    "order-chain": "which of 0.0 and -0.0 min and max give is open on every backend",
    "min-self": "as above",
}


def all_rules():
    return pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.name} {r.op}")


def check(rule, many):
    rng = random.Random(f"{rule.name} {rule.op}")
    found = instances(rule, rng, many)
    assert found, "the row applies to nothing that rule_cases makes: add an atom there"
    outcomes = {on(rule, before, after) for before, after in found}
    if not any(float_inside(b, a) for b, a in found) and rule.name not in NOT_FOR_Z3:
        assert "proved" in outcomes
    return outcomes


def on(rule, before: Expr, after: Expr) -> str:
    assert before.type is after.type
    if z3_terms.provable(before, after):
        answer = z3_terms.prove(before, after)
        assert answer in ("proved", "unknown"), (show(before), show(after), answer)
        if answer == "proved":
            return answer
    compare(rule, before, after)
    return "compared"


def float_inside(*roots):
    return any(e.type is FLOAT for e in walk(*roots))


def values_of(e: Expr):
    if e.type is BOOL:
        return [False, True]
    if e.type is FLOAT:
        return FLOATS
    return NATURAL if e.op == "var" else SMALL


def compare(rule, before: Expr, after: Expr) -> None:
    """All values of the leaves at once, as the axes of one array."""
    leaves = sorted({e for e in walk(before, after) if e.op in ("var", "param")}, key=str)
    axes = np.meshgrid(*(np.array(values_of(e)) for e in leaves), indexing="ij", sparse=True)
    env = {e.name: axis for e, axis in zip(leaves, axes, strict=True)}
    tables = {"doc": np.array([0, 0, 1, 1, 2, 4, 4, -3]), "off": np.array([0, 2, 3, 8]), "seen": np.arange(8) % 3 == 1}
    try:
        want = evaluate(before, env, tables)
    except EvaluationError:
        return
    got = evaluate(after, env, tables)
    want, got = np.broadcast_arrays(want, got)
    same = want == got
    if want.dtype.kind == "f":
        same |= np.isnan(want) & np.isnan(got)
        if rule.name not in ZERO_SIGN:
            same &= (np.signbit(want) == np.signbit(got)) | np.isnan(want)
    assert same.all(), (show(before), show(after))


@all_rules()
def test_rule_is_proved(rule):
    check(rule, 6)


@pytest.mark.slow
@all_rules()
def test_rule_is_proved_on_many(rule):
    check(rule, 150)
