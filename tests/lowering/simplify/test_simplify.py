"""Every row of the rule table keeps values; the whole keeps them too, settles, and says what it did."""

from __future__ import annotations

import random
from functools import reduce

import numpy as np
import pytest
from support import masks
from support.lowering import expressions

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import NEG_INF, SCORE, TRUE, build, lookup
from frisket.dsl.program import read
from frisket.dsl.show import show
from frisket.dsl.sugar import b, eq, function, h, k, ne, q, score, where
from frisket.dsl.transfer import finite
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.simplify import RULES, ProgramExprs, Simplifier, hoist, prepare, simplify
from frisket.lowering.simplify.rules_order import LONGEST, chain


def same(x, y):
    """Equal, with NaN equal to itself and 0.0 told from -0.0."""
    x, y = np.broadcast_arrays(x, y)
    if x.dtype.kind != "f":
        return bool((x == y).all())
    alike = (x == y) & (np.signbit(x) == np.signbit(y))
    return bool((alike | (np.isnan(x) & np.isnan(y))).all())


def grid():
    at = np.ogrid[:3, :3, :24, :24]
    return dict(zip("bhqk", at, strict=True)) | {"B": 3, "H": 3, "Q_LEN": 24, "KV_LEN": 24, "w": 7, "p": -3}


def tables():
    rng = random.Random(3)
    return masks.case(TRUE, rng).tables


def test_random_expressions_keep_their_values():
    """Whole masks, by brute force."""
    fired = Simplifier()
    env, bound = grid(), tables()
    for seed in range(400):
        mask = masks.random_mask(random.Random(f"simplify {seed}"), depth=4)
        try:
            before = evaluate(mask, env, bound)
        except ValueError:
            continue
        after = fired(mask)
        assert same(before, evaluate(after, env, bound)), show(mask)
        assert fired(after) is after
        assert simplify(mask) is after, "the order of work must not matter"
    for e in (
        ((q >= k) & (h > 1)) | ((q >= k) & (b > 0)), eq(q // 8 * 8 + q % 8, k), eq(q >= k, h > 1), ne(q >= k, h > 1),
    ):  # fmt: skip
        assert same(evaluate(e, env), evaluate(fired(e), env)), show(e)


@pytest.mark.slow
def test_many_random_expressions_keep_their_values():
    env, bound, refused = grid(), tables(), 0
    for seed in range(20_000):
        mask = masks.random_mask(random.Random(f"slow simplify {seed}"), depth=4)
        try:
            before = evaluate(mask, env, bound)
        except ValueError:
            continue
        try:
            after = evaluate(simplify(mask), env, bound)
        except EvaluationError:  # sums in another order may leave 64 bits on the way: refused, never wrong
            refused += 1
        else:
            assert same(before, after), show(mask)
    assert refused < 20


def test_simplification_of_each_operator_reaches_a_fixpoint():
    """Expressions of every type and operator: the rules reach a fixpoint and it is one."""
    rng = random.Random(11)
    for _ in range(300):
        e = expressions.Everything(rng).of(rng.choice([BOOL, INT, FLOAT]), 5)
        once = simplify(e)
        assert simplify(once) is once
        assert once.type is e.type


TEXTS = {
    "q >= k & q - k < 256 & q - k < 512": "q >= k & q - k <= 255",
    "q + 1 >= k + 1": "q >= k",
    "abs(q - k) < w": "q - k > -w & q - k < w",
    "~(q >= k & k < 5)": "q < k | k >= 5",
    "q >= k | q < k": "true",
    "q >= k & q < k": "false",
    "q >= k & (q >= k | doc[q] == 0)": "q >= k",
    "q >= k & (q < k | doc[q] == 0)": "q >= k & doc[q] == 0",
    "q >= k & (abs(q - k) < 256 | k < 64)": "q >= k & (q - k <= 255 | k <= 63)",
    "k < 9 | q >= k & (k < 4 | doc[q] == 0)": "k <= 8 | q >= k & doc[q] == 0",
    "q >= k & doc[q] == doc[k] | q >= k & k < 4": "q >= k & (k <= 3 | doc[q] == doc[k])",
    "q // 128 == k // 128": "q // 128 == k // 128",
    "(q * 8 + 3) // 8 >= k": "q >= k",
    "q % 8 % 4 >= 2": "q % 4 >= 2",
    "q // 4 // 8 >= k": "k <= q // 32",
    "q // 8 * 8 + q % 8 >= k": "q >= k",
    "q // 4 >= 2": "q >= 8",
    "max(q - 5, 0) <= k": "q - k <= 5",
    "q >= 0 & k >= 0": "true",
    "(q & 7) >= (k >> 3)": "q % 8 >= k // 8",
    "(q - k < 4 | q - k < 9) & q >= k": "q >= k & q - k <= 8",
    "k < where(q >= 4, 10, 20)": "k <= 9 if q >= 4 else k <= 19",
    "where(q >= k, k < 5, false)": "q >= k & k <= 4",
    "2 * q >= 2 * k + 1": "q > k",
    "2 * q == 2 * k + 1": "false",
    "abs(k - q) % 3 == 0": "(q - k) % 3 == 0",
    "q + KV_LEN - Q_LEN >= k": "q - k >= Q_LEN - KV_LEN",
    "(q >= k) ^ true": "q < k",
    "(q - k) % 4 == 0 & q % 4 == k % 4": "(q - k) % 4 == 0",
    "k >= q - q % 4 & k < q - q % 4 + 4": "k >= 4 * (q // 4) & k - 4 * (q // 4) <= 3",
    "q // 4 * 4 == q": "q % 4 == 0",
    "(q % 4 - k % 4) % 4 == 0": "(q - k) % 4 == 0",
    "4 * q % 8 // 4 == 1": "q % 2 == 1",
    "(q // 4 * 2) // 8 >= k": "k <= q // 16",
    "(q // 4 + 1) // 2 >= k": "k <= (q + 4) // 8",
    "-(-q // 4) >= k": "k <= (q + 3) // 4",
    "q // -1 >= k": "q + k <= 0",
    "(q & ~7) == (k & ~7)": "q // 8 == k // 8",
    "(q & 8) != 0": "q // 8 % 2 == 1",
    "(q >> 2 << 2) == k": "k == 4 * (q // 4)",
    "(q ^ k) < 1": "q == k",
    "(q ^ 5) == 6": "q == 3",
    "q % 2 != 0": "q % 2 == 1",
    "sign(q - k) > -1": "q >= k",
    "(q - k) ** 2 <= 10": "q - k >= -3 & q - k <= 3",
    "max(q, q - k) >= 3": "q >= 3",
    "min(q, k) == q": "q <= k",
    "min(max(q, 3), 7) == 3": "q <= 3",
    "int(q > k) + int(k > 3) > 0": "q > k | k >= 4",
    "int(q > k) * int(k > 3) == 1": "q > k & k >= 4",
    "int(q > k) == int(k > 3)": "q > k ^ k <= 3",
    "(int(q > k) & int(k > 3)) != 0": "q > k & k >= 4",
    "where(q > k, k > 3, k > 3 & q > 9)": "k >= 4 & (q > k | q >= 10)",
    "where(q >= k & k > 3, q >= k, q > 9)": "q >= 10 | q >= k & k >= 4",
    "where(q > 5, k > 2, k <= 2)": "q >= 6 ^ k <= 2",
    "~((q > 4) ^ (k > 4))": "q >= 5 ^ k <= 4",
    "floor(q / 128) == floor(k / 128)": "q // 128 == k // 128",
    "float(q) >= 3.5": "q >= 4",
    "where(q > k, 1.0, 0.0) > 0.5": "q > k",
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_simplify_to_the_listed_text(text):
    mask = read(text, kind="mask").mask
    assert show(simplify(mask)) == show(read(TEXTS[text], kind="mask").mask)


def test_untouched_is_the_same_object():
    for text in ("q >= k", "q >= k & q - k <= 255", "doc[q] == doc[k]", "q // 30 == k // 30"):
        mask = read(text, kind="mask").mask
        assert simplify(mask) is mask


def test_rows_have_names_origins_and_a_switch():
    assert len(RULES) > 100
    assert all(r.name and ".rules_" in r.origin and int(r.origin.rsplit(":")[-1]) for r in RULES)
    e = (q + 1) >= (k + 1)
    assert simplify(e, off=("affine-comparison", "affine")) is e
    assert simplify(e) is (q >= k)


def test_counts_say_which_rules_fired():
    run = Simplifier()
    run(~((q >= k) & (k < 5)))
    assert run.counts["push-not"] == 2
    assert run.counts["affine-comparison"] >= 1


# -- hoisting -------------------------------------------------------------------------------------

BIAS = lookup("bias", (h, q - k), FLOAT)
HIDDEN = {
    "branch": (where(q >= k, score, NEG_INF), "q >= k", None),
    "other branch": (where(q < k, NEG_INF, score * 2.0), "q >= k", "score * 2.0"),
    "added": (score + where(q >= k, 0.0, NEG_INF), "q >= k", None),
    "nested": (where(q >= k, where(k < 5, score, NEG_INF), NEG_INF) + 3.0, "q >= k & k <= 4", "score + 3.0"),
    "scaled": (where(q >= k, score, NEG_INF) * 0.5, "q >= k", "score * 0.5"),
    "two": (where(q >= k, score, NEG_INF) + where(k < 9, 1.0, NEG_INF), "q >= k & k <= 8", "score + 1.0"),
    "both branches": (where(q >= 5, where(q >= k, score, NEG_INF), score), "q >= k | q <= 4", "score"),
    "everything": (NEG_INF, "false", None),
}
KEPT = {
    "tanh": 50.0 * function("tanh", where(q >= k, score, NEG_INF) / 50.0),
    "negated": -where(q >= k, score, NEG_INF),
    "unknown factor": where(q >= k, score, NEG_INF) * (score + 1.0),
    "unknown summand": where(q >= k, score, NEG_INF) + BIAS,
    "negative factor": where(q >= k, score, NEG_INF) * -2.0,
    "what a score decides": where(score > 0.0, score, NEG_INF),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_masks_are_hoisted(name):
    mod, mask, rest = HIDDEN[name]
    found = prepare(ProgramExprs(score=mod))
    assert found.mask is simplify(read(mask, kind="mask").mask)
    assert found.score is (None if rest in (None, "score") else simplify(read(rest, kind="score").score))


@pytest.mark.parametrize("name", KEPT)
def test_score_mods_that_lose_minus_infinity_are_not_hoisted(name):
    assert hoist(simplify(KEPT[name]), {})[0] is TRUE
    assert prepare(ProgramExprs(score=KEPT[name])).mask is None


def test_a_finite_table_may_stand_beside_a_hidden_mask():
    mod = where(q >= k, score, NEG_INF) + BIAS
    assert prepare(ProgramExprs(score=mod), {"bias": True}).mask is (q >= k)
    assert finite(BIAS, {"bias": True})
    assert not finite(BIAS, {})


@pytest.mark.parametrize("name", sorted(set(HIDDEN) - {"everything"} | set(KEPT)))
def test_hoisting_keeps_scores(name):
    """where(mask, rest, -inf) is the score mod, wherever scores are finite."""
    mod = HIDDEN[name][0] if name in HIDDEN else KEPT[name]
    exprs = prepare(ProgramExprs(score=mod))
    env = grid() | {"score": np.linspace(-3, 3, 24)}
    bound = {"bias": np.random.default_rng(0).standard_normal((3, 24))}
    left = evaluate(SCORE if exprs.score is None else exprs.score, env, bound)
    seen = evaluate(exprs.visible, env, bound)
    want = evaluate(mod, env, bound)
    np.testing.assert_array_equal(*np.broadcast_arrays(np.where(seen, left, -np.inf), want))


@pytest.mark.parametrize("n", [-1, 64, 100])
def test_shifts_outside_64_bits_are_0(n):
    """Attention with `h << 64` was refused for an Int that may leave 64 bits."""
    for e in (h << n, h >> n):
        assert simplify(e >= k) is simplify(k <= 0)


def test_very_long_chains_are_taken_in_part():
    """The last operands and the rest as one, so that work grows with the length."""
    e = reduce(lambda x, y: build("bitxor", x, y), (q + i * k for i in range(3 * LONGEST)))
    parts = chain(e)
    assert len(parts) == LONGEST + 1
    assert [p.op == "bitxor" for p in parts] == [True] + [False] * LONGEST
