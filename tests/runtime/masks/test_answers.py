"""Answers are what looking at every position says; a witness is one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import masks
from support.lowering import brute
from support.tiers import thinned

import frisket as fk
from frisket.dsl.errors import EvaluationError, ParameterError, ShapeError, Undecided
from frisket.dsl.ir import build, free_names


def bound(e, case: masks.Case) -> fk.Mask:
    scalars, tables = free_names(e)
    values = {**case.params, **case.tables}
    return fk.Mask(e, {n: values[n] for n in (*scalars, *tables)})


def place(case: masks.Case) -> dict:
    return {n: getattr(case, n) for n in ("batch", "heads", "origin", "sizes")}


def dense(e, case: masks.Case) -> np.ndarray:
    return brute.dense(e, case.q_len, case.kv_len, **case.options)


def at(seen: np.ndarray, witness, case: masks.Case) -> np.ndarray:
    """The mask at a witness; all keys of its row where there is no key."""
    b, h, q, k = witness
    b, h = b - case.origin[0], h - case.origin[1]
    q0, k0 = (int(np.broadcast_to(x, (case.batch,))[b]) for x in case.origin[2:])
    assert 0 <= b < case.batch
    assert 0 <= h < case.heads
    assert 0 <= q - q0 < case.q_len
    return seen[b, h, q - q0] if k is None else seen[b, h, q - q0, k - k0]


def check(e, f, case: masks.Case) -> None:
    try:
        x, y = dense(e, case), dense(f, case)
        m, n = bound(e, case), bound(f, case)
        made = ask(m, n, case)
    except (EvaluationError, ParameterError, Undecided) as error:
        # products of products; a table that ends before the lengths, refused as by layouts; too much to look at
        if not any(t in str(error) for t in ("leaves 64 bits", "entries on axis", "is not decided within")):
            raise
        return
    implied, same, empty, rows = made
    assert implied.holds == (not (x & ~y).any())
    assert same.holds == (not (x ^ y).any())
    assert empty.holds == (not x.any())
    assert rows.holds == (not x.any(axis=3).all())
    for answer, truth in ((implied, x & ~y), (same, x ^ y), (empty, x)):
        assert (answer.witness is None) == answer.holds
        assert answer.holds or at(truth, answer.witness, case)
    assert (rows.witness is None) == (not rows.holds)
    assert not rows.holds or not at(x, rows.witness, case).any()


def ask(m: fk.Mask, n: fk.Mask, case: masks.Case, **more) -> tuple[fk.Answer, ...]:
    where = {**place(case), **more}
    return (
        m.implies(n, case.q_len, case.kv_len, **where), m.equivalent(n, case.q_len, case.kv_len, **where),
        m.is_empty(case.q_len, case.kv_len, **where), m.empty_rows(case.q_len, case.kv_len, **where),
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(masks.written()))
def test_answers_about_written_masks_equal_brute_force(name):
    rng = random.Random(f"answers {name}")
    e, others = masks.written()[name], list(masks.written().values())
    for other in (rng.choice(others), build("and", e, masks.random_mask(rng, 1)), build("or", e, rng.choice(others))):
        check(e, other, masks.case(e, rng))
        check(other, e, masks.case(e, rng))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_answers_about_random_masks_equal_brute_force(seed):
    rng = random.Random(seed)
    check(masks.random_mask(rng), masks.random_mask(rng), masks.case(masks.random_mask(rng), rng))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_answers_about_many_random_masks_equal_brute_force(seed):
    rng = random.Random(f"answers slow {seed}")
    for _ in range(200):
        e = masks.random_mask(rng)
        f = rng.choice([masks.random_mask(rng), build("and", e, masks.random_mask(rng)), build("or", e, e)])
        check(e, f, masks.case(e, rng))


def test_answers_read_well():
    causal, near = fk.mask("causal"), fk.mask("causal & window(256)")
    assert str(near.implies(causal, 512, 512)) == "yes: every position the first mask shows, the second shows"
    no = causal.implies(near, 2048, 2048)
    assert (bool(no), no.witness) == (False, (0, 0, 256, 0))
    assert str(no) == "no: query 256 sees key 0 under the first mask and not under the second (b 0, h 0)"
    assert str(near.equivalent("sliding(255, 0)", 512, 512)) == "yes: both show the same positions"
    assert str(near.equivalent(causal, 512, 512)) == (
        "no: query 256 sees key 0 under the second mask and not under the first (b 0, h 0)"
    )
    assert str(causal.equivalent(near, 512, 512)) == (
        "no: query 256 sees key 0 under the first mask and not under the second (b 0, h 0)"
    )
    assert str(fk.mask("window(4) & q - k > 8").is_empty(99, 99)) == "yes: no query sees a key"
    assert str(causal.is_empty(4, 4)) == "no: query 0 sees key 0 (b 0, h 0)"
    assert str(causal.empty_rows(4, 4)) == "no: every query sees a key"
    late = fk.mask("causal & k >= 3 + h").empty_rows(2000, 2000, heads=2)
    assert (bool(late), late.witness, str(late)) == (True, (0, 0, 0, None), "yes: query 0 sees no key (b 0, h 0)")


def test_masks_that_give_one_name_two_values():
    a = fk.mask("same(doc)", doc=np.array([0, 0, 1, 1]))
    b = fk.mask("same(doc)", doc=np.array([0, 1, 1, 2]))
    assert a.implies(b, 4, 4).witness == (0, 0, 0, 1)
    assert b.implies(a, 4, 4).witness == (0, 0, 1, 2)
    assert a.equivalent(fk.mask("same(doc)", doc=np.array([7, 7, 2, 2])), 4, 4)
    assert fk.mask("window(w)", w=3).implies(fk.mask("window(w)", w=4), 99, 99)
    assert not fk.mask("window(w)", w=4).implies(fk.mask("window(w)", w=3), 99, 99)


def test_answers_cover_each_batch_entry_and_head():
    length = fk.mask("k < len[b]", len=np.array([9, 9, 5, 9]))
    assert length.implies("k < 9", 9, 12, batch=4)
    assert fk.mask("k < 9").implies(length, 9, 12, batch=4).witness == (2, 0, 0, 5)
    assert fk.mask("causal & q - k < 8 - h").equivalent("causal & window(8)", 20, 20, heads=4).witness == (0, 1, 7, 0)
    by = fk.mask("k < len[b]", len=np.array([9, 0, 5, 9]))
    assert by.empty_rows(9, 12, batch=4).witness == (1, 0, 0, None)
    assert not by.empty_rows(9, 12, batch=1, origin=(2, 0, 0, 0))


def test_where_is_a_crop_in_global_positions():
    m, n = fk.mask("causal"), fk.mask("window(100)")
    assert m.implies(n, 50, 50, origin=(0, 0, 40, 20))
    assert m.implies(n, 50, 50, origin=(0, 0, 100, 0)).witness == (0, 0, 100, 0)
    assert fk.mask("bottom_right").empty_rows(10, 4).witness == (0, 0, 0, None)
    assert not fk.mask("bottom_right").empty_rows(4, 10)


NOWHERE = "(q ^ k) + (q & k) > (q | k)"  # no analysis of ours knows that these are equal


def test_past_the_budget_nothing_is_guessed():
    never = fk.mask(NOWHERE)
    assert never.is_empty(300, 300)
    with pytest.raises(Undecided) as error:
        never.is_empty(300, 300, budget=100_000)
    assert str(error.value) == (
        "is_empty is not decided within a budget of 100,000 steps\n"
        "  ask about a part (shorter lengths, `origin`, `sizes`), or allow more: budget=268435456"
    )
    with pytest.raises(Undecided, match="implies is not decided within a budget of 1,000 "):
        fk.mask("causal").implies(~never, 300, 300, budget=1000)
    with pytest.raises(Undecided, match="equivalent is not decided"):
        never.equivalent("k < 0 * q", 300, 300, budget=1000)
    with pytest.raises(Undecided, match="empty_rows is not decided within a budget of 10 "):
        never.empty_rows(300, 300, budget=10)
    with pytest.raises(Undecided, match="empty_rows"):
        fk.mask("causal & window(5)").empty_rows(300, 300, budget=10)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 299), st.integers(0, 398), st.integers(0, 2))
def test_a_lone_position_is_found(query, key, head):
    """Where only a search will do, it passes nothing by."""
    m = fk.mask(f"{NOWHERE} | (q == {query} & k == {key} & h == {head})")
    assert m.is_empty(300, 399, heads=3).witness == (0, head, query, key)
    assert (~m).equivalent("true", 300, 399, heads=3).witness == (0, head, query, key)
    full = fk.mask(f"({NOWHERE} | q != {query}) & (k == (q * 7 + 3) % 399)")  # no likely key
    assert full.empty_rows(300, 399).witness == (0, 0, query, None)


def test_mask_answers_refuse_bad_arguments():
    m = fk.mask("causal")
    with pytest.raises(ParameterError, match="`w` has no value"):
        m.implies("window(w)", 4, 4)
    with pytest.raises(ShapeError, match="q_len is -1"):
        m.is_empty(-1, 4)
    with pytest.raises(ParameterError, match="table `doc` has 3 entries on axis 0"):
        m.implies(fk.mask("same(doc)", doc=np.arange(3)), 4, 4)


LONG = 1 << 20


@pytest.mark.parametrize(
    ("first", "second", "holds"),
    [
        ("causal & window(1024)", "causal", True), ("causal", "causal & window(1024)", False),
        ("causal & same(doc)", "window(9000)", True), ("causal & same(doc)", "window(100)", False),
        ("dilated(100, 4)", "(q - k) % 2 == 0", True), ("causal & chunked(4096)", "window(4096)", True),
        ("q // 16 >= k // 16", "causal(14)", False), ("sinks(4) | causal", "causal(3)", True),
    ],
)  # fmt: skip
def test_a_million_tokens(first, second, holds):
    """Of 10^12 positions, what is looked at is some for every token at most: the budget says so."""
    doc = np.repeat(np.arange(LONG // 4096), 4096)
    m, n = (fk.mask(t, doc=doc) if "doc" in t else fk.mask(t) for t in (first, second))
    assert bool(m.implies(n, LONG, LONG, budget=1000 * LONG)) is holds
    assert m.empty_rows(LONG, LONG, budget=1000 * LONG).holds is False
    if "doc" not in first:
        assert bool(m.implies(n, LONG, LONG, budget=100 * LONG)) is holds
        assert m.empty_rows(LONG, LONG, budget=100 * LONG).holds is False


@pytest.mark.parametrize("question", ["visible_pairs", "is_empty", "empty_rows", "implies", "equivalent"])
def test_questions_with_values_of_names_are_refused(question):
    m, more = fk.mask("causal & same(doc)"), ("causal",) if question in ("implies", "equivalent") else ()
    with pytest.raises(fk.ParameterError, match=r"give the values of names to the mask: mask\(..., doc=...\)"):
        getattr(m, question)(*more, 8, 8, doc=np.zeros(8, int))
