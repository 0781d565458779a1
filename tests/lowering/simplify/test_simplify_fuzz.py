"""Random typed expressions over all operators and tables: the simplifier keeps values, settles, says what it did,
and does without any of its rules."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from support import masks
from support.lowering import expressions
from support.lowering.expressions import Everything

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate, unroll
from frisket.dsl.ir import Expr, walk
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.simplify import RULES, Simplifier, simplify

SEED = np.random.default_rng(5)
TABLES = {
    "doc": np.array([0, 3, 4, 9, 9, 12]), "pair": SEED.integers(-9, 9, (5, 4)),
    "slope": np.array([0.5, np.nan, -np.inf, -0.0, 3.0]), "bias": SEED.standard_normal((2, 2, 3, 3)),
    "seen": np.arange(7) % 3 == 0, "near": SEED.random((4, 5)) < 0.5,
}  # fmt: skip
AT = np.ogrid[:2, :2, :7, :6]
ENV = dict(zip("bhqk", AT, strict=True)) | {
    "B": 2, "H": 2, "Q_LEN": 7, "KV_LEN": 6, "w": 3, "n": -2, "p": 0.75, "x": -1.5, "flag": True, "deep": False,
    "score": np.array([-np.inf, -2.0, -0.0, 0.5, np.nan, np.inf]),
}  # fmt: skip


def values(e: Expr):
    """The value everywhere, or None where the interpreter refuses (64 bits; an empty minimum)."""
    try:
        return np.broadcast_to(evaluate(e, ENV, TABLES), (2, 2, 7, 6))
    except EvaluationError:
        return None


def alike(x, y) -> bool:
    """Equal, NaN with NaN. A zero of either sign is a zero: min and max leave that open."""
    return bool(((x == y) | ((x != x) & (y != y))).all())


def keeps_values(e: Expr, refused: Counter[str]) -> None:
    run = Simplifier()
    after = run(e)
    assert after.type is e.type
    assert run(after) is after
    assert simplify(after) is after, show(e)
    assert (after is e) == (not run.counts) or after is e
    before, now = values(e), values(after)
    if before is None:
        refused["before"] += 1
    elif now is None:  # sums in another order may leave 64 bits on the way: refused, never wrong
        refused["after"] += 1
    elif not alike(before, now):  # 1 / min(0.0, -0.0): the one rule that may choose another zero
        assert alike(before, values(simplify(e, off=("order-chain",)))), (show(e), show(after))


def one(seed: object, refused: Counter[str]) -> None:
    rng = random.Random(f"fuzz {seed}")
    if rng.random() < 0.4:
        keeps_values(masked(rng), refused)
    else:
        keeps_values(Everything(rng).of(rng.choice((BOOL, INT, FLOAT)), rng.randrange(2, 6)), refused)


def masked(rng: random.Random) -> Expr:
    """A mask as people write them, in the names of this file."""
    e = expressions.random_mask(rng, 7, 6, 2, 2, depth=4).expr
    return e if not {n.name for n in walk(e) if n.op in ("lookup", "segment", "param")} - ENV.keys() - {"doc"} else (
        Everything(rng, with_score=False).of(BOOL, 4)
    )  # fmt: skip


@pytest.mark.parametrize("part", range(5))
def test_values_are_kept(part):
    refused: Counter[str] = Counter()
    for seed in range(100):
        one((part, seed), refused)
    assert refused["after"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_values_are_kept_often(part):
    refused: Counter[str] = Counter()
    for seed in range(1000):
        one(("slow", part, seed), refused)
    assert refused["after"] <= 5


@settings(max_examples=100, deadline=None, derandomize=True)
@given(expressions.any_expression(depth=4))
def test_simplification_of_random_expressions_keeps_values(e):
    keeps_values(e, Counter())


@pytest.mark.exhaustive
def test_simplification_works_without_any_single_rule():
    """Without any one rule the rest still settle and keep values; the rule is not counted."""
    rng = random.Random("off")
    cases = [masks.random_mask(rng, depth=4) for _ in range(3)] + [Everything(rng).of(t, 4) for t in (BOOL, INT, FLOAT)]
    for name in sorted({r.name for r in RULES}):
        run = Simplifier(tuple(r for r in RULES if r.name != name))
        for e in cases:
            after = run(e)
            assert simplify(e, off=(name,)) is after
            before, now = values(e), values(after)
            assert before is None or now is None or alike(before, now), (name, show(e))
        assert name not in run.counts


def test_rules_are_counted_where_people_look():
    import frisket as fk
    from frisket.lowering.simplify import ProgramExprs
    from frisket.runtime.backends.stages import Stages

    written = fk.mask("~(q < k) & q - k < 256 & q - k < 512").expr
    run = Simplifier()
    pair = ProgramExprs(run(written))
    assert "rules: " in Stages(pair, pair, "", None, None, None, "", run.counts).text("simplified")
    assert run.counts["merge-bounds"] >= 1
    assert run.counts["push-not"] >= 1


def test_written_out_reductions_say_the_same():
    rng = random.Random("reductions")
    for _ in range(60):
        e = Everything(rng, with_score=False).reduction(rng.choice((BOOL, INT, FLOAT)), 3)
        before = values(e)
        if before is not None and not any(n.op == "extent" for n in walk(e)):
            assert alike(before, values(unroll(simplify(e)))), show(e)
