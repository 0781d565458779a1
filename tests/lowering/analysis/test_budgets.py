"""Whatever the mask, an analysis, a question and an evaluation end: after so many steps, the same on every machine."""

from __future__ import annotations

import random
import signal
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from support import masks
from support.lowering.effort import at_most
from support.tiers import thinned

import frisket as fk
from frisket.dsl.errors import BudgetError, EvaluationError, LoweringError, Undecided
from frisket.dsl.evaluate import evaluate, unrolled
from frisket.dsl.ir import lit, reduce, substitute
from frisket.dsl.sugar import k, q
from frisket.dsl.types import INT
from frisket.dsl.work import steps
from frisket.grammar.memo import clear as forget
from frisket.lowering.analysis.tiles import WORK
from frisket.lowering.simplify import simplify

MILLION = 1 << 20
CHAIN = " & ".join(f"(q * {p} + k) % {p + 2} != 1" for p in range(3, 60, 4))
PRIMES = " & ".join(f"k % {p} != 1" for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))
LONG = "any(i in 0..4096: (q * i) % 4099 == k)"
NESTED = "any(i in 0..4096: any(j in 0..4096: q * i + k * j == 9))"
IRREGULAR = {
    "hash": "(q * 2654435761 ^ k * 40503) % 97 < 3", "random": "causal & random(7, b, h, q, k) < 0.01",
    "moduli": CHAIN, "primes": PRIMES, "product": "(q * k) % 7 == 0", "one product": "(q * k) % 1000003 == 1",
    "reduction": LONG, "nested": NESTED,
}  # fmt: skip


@contextmanager
def watched(seconds):
    """Raises in the body once it has taken so much processor time."""

    def ring(*_):
        raise TimeoutError(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- layouts ----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n if n == "hash" else pytest.param(n, marks=pytest.mark.slow) for n in IRREGULAR])
def test_irregular_masks_at_a_million_tokens(name, transposed):
    mask = fk.mask(IRREGULAR[name])
    tracemalloc.start()
    try:
        with watched(20):  # about a second, tracing aside
            made = mask.layout(MILLION, MILLION)
            found = made.transposed if transposed else made
            found.spans  # noqa: B018
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not made.exact
    assert made.analysis.steps < 1.2 * WORK
    assert peak < 64 << 20
    assert made.analysis.undecided > 0
    if name == "random":
        assert made.counts.empty > 0.49 * 8192**2  # what causal hides is known all the same


KINDS = np.random.default_rng(0).integers(0, 1500, MILLION, dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "most", "tables"),
    [
        ("block_diffusion(524288, 32)", 14, {}),
        pytest.param("causal | same(kind) & kind[q] > 0", 100, {"kind": KINDS}, marks=pytest.mark.exhaustive),
    ],
)
def test_memory_of_layouts_at_a_million_tokens(text, most, tables):
    """Megabytes: positions are held one by one where a table asks for it, and then in parts."""
    mask = fk.mask(text, **tables)
    tracemalloc.start()
    try:
        mask.layout(MILLION, MILLION)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most << 20


def test_small_grids_are_looked_at():
    for text in (LONG, "sum(i in 0..40: sum(j in 0..40: (q * i + k * j) % 7)) > 4790"):
        mask = fk.mask(text)
        made = mask.layout(64, 64, block=(16, 16))
        dense = mask.dense(64, 64)[0, 0].reshape(4, 16, 4, 16).sum((1, 3))
        assert made.exact
        np.testing.assert_array_equal(made.kinds()[0, 0], np.where(dense == 256, 2, np.where(dense > 0, 1, 0)))


@pytest.mark.parametrize("text", [IRREGULAR["hash"], PRIMES, "natten2d(32, 32, 7, 7)", LONG])
def test_a_mask_has_the_same_layout_whatever_was_asked_before(text):
    """Other ranks have other caches: steps are those of the mask."""

    def made():
        found = fk.mask(text).layout(1024, 1024, block=(32, 32), budget=1 << 24)
        return found.analysis.steps, found.spans.bounds.tobytes()

    first = made()
    assert made() == first
    forget()
    assert made() == first


def test_a_budget_is_a_setting():
    mask = fk.mask(IRREGULAR["hash"])
    facts = mask.layout(4096, 4096, budget=1 << 14).facts
    assert not facts.exact
    assert "exact     no: 1,024 tiles count as partial without being looked at" in str(facts)
    found = [mask.layout(4096, 4096, budget=n).analysis for n in (1 << 14, 1 << 16, 1 << 32)]
    assert [x.exact for x in found] == [False, False, True]
    assert found[0].steps < found[1].steps < found[2].steps


@pytest.mark.exhaustive
def test_masks_nested_deeper_than_pythons_stack():
    mask = fk.mask("causal")
    for i in range(350):
        mask = ~(mask | f"k == {i}")
    made = mask.layout(1200, 1200)
    dense = mask.dense(1200, 1200)[0, 0]
    grid = np.zeros((10 * 128, 10 * 128), bool)
    grid[:1200, :1200] = dense
    count = grid.reshape(10, 128, 10, 128).sum((1, 3))
    np.testing.assert_array_equal(made.kinds()[0, 0], np.where(count == 128**2, 2, np.where(count > 0, 1, 0)))
    assert mask.implies(mask, 100, 100)


def test_masks_joined_one_by_one():
    def joined(n):
        mask = fk.mask("causal")
        for i in range(n):
            mask = ~(mask | f"k == {i}")

    joined(3)
    with at_most(400_000):  # 6 million where every step walks through all before it
        joined(300)


def test_long_chains_are_simplified():
    chain = unrolled(fk.mask("min(i in 0..90: abs(q - i * k)) < 9").expr, {}, {})
    with watched(20):
        simplify(chain)


# -- questions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n == "nested" else pytest.param(n, marks=pytest.mark.slow) for n in IRREGULAR])
def test_questions_at_a_million_tokens(name):
    mask = fk.mask(IRREGULAR[name])
    for ask in (mask.is_empty, mask.empty_rows, mask.visible_pairs, lambda *n: mask.implies("causal", *n),
                lambda *n: mask.equivalent("causal", *n)):  # fmt: skip
        with watched(30):
            try:
                ask(MILLION, MILLION)
            except (Undecided, BudgetError) as error:
                assert "budget" in str(error) or "would look at" in str(error)  # noqa: PT017


# -- reductions -------------------------------------------------------------------------------------


def test_dense_reductions_are_bounded():
    assert fk.mask(LONG).dense(64, 64).sum() == 4033
    with pytest.raises(BudgetError, match=r"`any` over 4,096 values would take 687,\d+,\d+,\d+ steps at 4,096"):
        fk.mask(NESTED).dense(64, 64)
    assert fk.mask(NESTED.replace("4096", "16")).dense(64, 64).any()
    by_table = NESTED.replace("4096", "extent(t, 0)") + " & t[0] == 0"
    assert fk.mask(by_table, t=np.zeros(16, int)).dense(64, 64).any()
    with pytest.raises(BudgetError, match=r"`any` over 4,096 values"):
        fk.mask(by_table, t=np.zeros(4096, int)).dense(64, 64)


def test_kernels_say_what_they_cannot_write_out():
    with pytest.raises(LoweringError, match=r"the reductions here, written out, are .* steps at every position"):
        fk.compile(NESTED).stages(q_len=64)


def test_reductions_are_what_they_are_written_out():
    rng = random.Random(5)
    i, axis = np.arange(17)[:, None], np.arange(23)
    for _ in range(60):
        e = _reduction(rng, 2)
        mask = e >= lit(rng.randrange(-9, 60)) if e.type is INT else e
        found = evaluate(mask, {"q": i, "k": axis})
        want = evaluate(unrolled(mask, {}, {}), {"q": i, "k": axis})
        np.testing.assert_array_equal(np.broadcast_to(found, (17, 23)), np.broadcast_to(want, (17, 23)))


def _reduction(rng, depth):
    """An Int: a reduction over others."""
    lo = rng.randrange(-3, 4)
    kind = rng.choice(["sum", "min", "max"])

    def body(j):
        inner = _reduction(rng, depth - 1) if depth and rng.random() < 0.6 else rng.choice([q, k, q - k, q * k])
        inner = substitute(inner, {q: q + j}) if rng.random() < 0.5 else inner
        return rng.choice([inner + j, inner * j, (inner - j) % 7, abs(inner - 3 * j), inner])

    return reduce(kind, lit(lo), lit(lo + rng.randrange(1, 9)), body)


def test_steps_of_nested_reductions_multiply():
    inner = reduce("sum", lit(0), lit(10), lambda j: q + j)
    assert steps(reduce("max", lit(0), lit(20), lambda i: substitute(inner, {q: i * q}) + k)) > 200
    assert steps(inner) < 60


# -- fuzz -------------------------------------------------------------------------------------------


def irregular(rng):
    """A mask that no analysis knows by heart, as text."""
    x = ["q", "k", "q - k", "q * k", "(q ^ k)", "(q & 255) * k", "q * 40503 + k", "(q >> 3) * (k >> 2)", "q * q + k"]

    def one():
        a, b, n = rng.choice(x), rng.choice(x), rng.choice([2, 3, 7, 97, 128, 1009, 65537])
        return rng.choice([
            f"({a}) % {n} {rng.choice(['==', '<', '!='])} {rng.randrange(n)}", f"({a}) % {n} == ({b}) % {n + 1}",
            f"random({n}, q, k) < 0.{rng.randrange(10)}", f"abs({a} - {n * 10}) < {n * 3}",
            f"({a}) // {n} >= ({b}) // {n}", f"any(i in 0..{n % 300 + 1}: ({a}) % (i + 2) == ({b}) % {n})",
            f"sum(i in 0..{n % 50 + 1}: abs({a} - i * k) % {n}) < {n * 9}", f"causal & window({n})",
            f"min(i in 0..{n % 90 + 1}: abs(({a}) - i * ({b}))) < {n}", f"(q // {n}) % 3 == (k // {n}) % 3",
        ])  # fmt: skip

    text = f"({one()})"
    for _ in range(rng.choice([0, 1, 2, 2, 5, 14])):
        text = rng.choice([f"{text} & ({one()})", f"{text} | ({one()})", f"({text} ^ ({one()}))", f"~({text})"])
    return text


def one_irregular(seed, budget, seconds):
    rng = random.Random(seed)
    text = irregular(rng)
    mask = fk.mask(text)
    n, m = (rng.randrange(1, 1 << rng.randrange(4, 21)) for _ in "qk")
    with watched(seconds):
        try:
            made = mask.layout(n, m, block=rng.choice([(128, 128), (64, 32), (16, 128)]), budget=budget)
            assert made.analysis.steps <= budget * 1.5 + 10**8, text
            made.transposed  # noqa: B018
            mask.empty_rows(n, m, budget=budget)
            mask.implies("causal", n, m, budget=budget)
        except (Undecided, BudgetError):
            pass
        except EvaluationError as error:
            if "leaves 64 bits" not in str(error):
                raise


@pytest.mark.parametrize("seed", thinned(range(12), 4))
def test_irregular_masks_stay_within_the_budget_of_steps(seed):
    one_irregular(seed, 1 << 26, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_irregular_masks(seed):
    one_irregular(seed, WORK, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_masks_end(seed):
    rng = random.Random(seed)
    case = masks.case(masks.random_mask(rng, 5), rng)
    case.q_len = case.kv_len = 1 << 18
    case.batch = case.heads = 1
    with watched(30):
        try:
            case.analysed(simplify(case.mask))
        except EvaluationError as error:
            if "leaves 64 bits" not in str(error):
                raise
