"""Lookups: proved to stay inside their table, or the position where one does not and its answer counts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import masks

import frisket as fk
from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import TRUE, Expr, build, lookup, substitute, walk
from frisket.dsl.sugar import k, q, where
from frisket.dsl.types import BOOL
from frisket.lowering.analysis.decide import lookups
from frisket.lowering.analysis.layout import grid_of
from frisket.lowering.dense import coordinates


def found_in(case: masks.Case):
    grid, _ = grid_of(case.mask, case.problem, case.block)
    return lookups(case.mask, TRUE, grid, case.scope())


def values(e: Expr, case: masks.Case) -> np.ndarray:
    env = {**coordinates(case.problem), **case.params}
    return np.broadcast_to(evaluate(e, env, case.tables), case.problem.lengths)


def check(case: masks.Case) -> int:
    """What is proved is so; a witness is one; and where all is proved, what lies outside does not matter."""
    try:
        found = found_in(case)
        seen = values(case.mask, case)
    except EvaluationError as error:
        if "leaves 64 bits" not in str(error):
            raise
        return 0
    nodes = [(n, i) for n in walk(case.mask) if n.op in ("lookup", "segment") for i in range(len(n.args))]
    assert [(n.name, i) for n, i in nodes] == [(x.table, x.axis) for x in found]
    outside: dict[Expr, np.ndarray] = {}
    for (node, axis), one in zip(nodes, found, strict=True):
        index = values(node.args[axis], case)
        assert one.size == case.tables[node.name].shape[axis]
        assert one.lo is None or one.lo <= index.min()
        assert one.hi is None or one.hi >= index.max()
        start, stop = one.offsets or (0, one.size)
        beyond = (index < start) | (index >= stop)
        outside[node] = outside.get(node, False) | beyond
        if one.witness is not None:
            b, h, row, key = one.witness
            b, h = b - case.origin[0], h - case.origin[1]
            q0, k0 = (int(np.broadcast_to(x, (case.batch,))[b]) for x in case.origin[2:])
            assert index[b, h, row - q0, key - k0] == one.value
            assert beyond[b, h, row - q0, key - k0]
    proved = {n for n, _ in nodes if all(x.proved for (m, _), x in zip(nodes, found, strict=True) if m is n)}
    if len(proved) == len({n for n, _ in nodes}):
        # whatever is read outside, the mask is the same: each lookup answers True, or False, there
        for wrong in (True, False):
            changed = {n: _patched(n, wrong) for n in proved if n.type is BOOL}
            np.testing.assert_array_equal(values(substitute(case.mask, changed), case), seen)
    return len(found)


def _patched(node: Expr, wrong: bool) -> Expr:
    from frisket.dsl.ir import conj, disj, extent, lit

    inside = conj(*(conj(i >= 0, i < extent(node.name, a)) for a, i in enumerate(node.args)))
    return disj(conj(inside, node), conj(build("not", inside), lit(wrong)))


GUARDED = {
    "tree": (k < 10) | lookup("anc", (q, k - 10), BOOL),
    "both ways": lookup("anc", (q - 5, k), BOOL) & (q >= 5),
    "not": ~((q < 7) | lookup("glob", (q - 7,), BOOL)),
    "branch": where(q >= k, lookup("glob", (q - k,), BOOL), lookup("glob", (k - q,), BOOL)),
    "unguarded": lookup("glob", (q - k,), BOOL) | (q < k - 400),
    "guarded by a table": lookup("glob", (q,), BOOL) & lookup("glob", (q - k,), BOOL) & (q >= k),
    "each guards the other": lookup("glob", (q - 9,), BOOL) & lookup("glob", (k - 9,), BOOL),
    "nested": lookup("any", (lookup("any", (q,)) % 70,)) > 3,
    "in two places": (lookup("glob", (q - 4,), BOOL) & (q >= 4)) | (lookup("glob", (q - 4,), BOOL) & (k >= 50)),
}


@pytest.mark.parametrize("name", GUARDED)
def test_guarded_lookups_stay_inside_their_tables(name):
    rng = random.Random(name)
    for _ in range(6):
        assert check(masks.case(GUARDED[name], rng))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_lookups_of_random_masks_stay_inside_or_have_a_witness(seed):
    rng = random.Random(seed)
    mask = masks.random_mask(rng)
    table = lookup("glob", (masks.random_int(rng, 1),), BOOL)
    check(masks.case(rng.choice([mask, build("and", mask, table), build("or", table, mask)]), rng))


def test_a_table_guards_only_where_it_is_inside_itself():
    """`t[q - 9] & t[k - 9]`: neither hides the other's fault, as both may be at fault together."""
    made = fk.mask("t[q - 9] & t[k - 9]", t=np.zeros(20, bool)).layout(20, 20)
    assert [x.proved for x in made.lookups] == [False, False]
    made = fk.mask("k >= 9 & t[q - 9] & t[k - 9]", t=np.ones(20, bool)).layout(20, 20)
    assert [x.proved for x in made.lookups] == [False, True]


def test_layout_reports_the_reach_of_its_lookups():
    anc = np.ones((30, 30), bool)
    made = fk.mask("k < p | anc[q, k - p]", p=4, anc=anc).layout(30, 30)
    assert [str(x) for x in made.lookups] == [
        "anc[q, k - p] stays within 30 entries", "anc[q, k - p] stays within 30 entries on axis 1",
    ]  # fmt: skip
    assert str(made.facts).splitlines()[-1] == "lookups   all stay inside their tables"
    made = fk.mask("causal & anc[q, k - p]", p=4, anc=anc).layout(30, 30)
    one = made.lookups[1]
    assert (one.table, one.axis, one.index, one.lo, one.hi, one.size) == ("anc", 1, "k - p", -4, 25, 30)
    assert (one.proved, one.witness, one.value) == (False, (0, 0, 0, 0), -4)
    said = (
        "anc[q, k - p] leaves 30 entries on axis 1: k - p = -4 at query 0, key 0 (b 0, h 0), where it reads the first"
    )
    assert str(one) == said
    assert str(made.facts).splitlines()[-1] == f"lookups   {said}"
    doc = np.array([0, 1, 2, 7])
    made = fk.mask("off[doc[q]] <= k", off=np.arange(4), doc=doc).layout(4, 4)
    assert str(made.lookups[1]) == (
        "off[doc[q]] leaves 4 entries: doc[q] = 7 at query 3, key 0 (b 0, h 0), where it reads the last"
    )


def test_score_mods_are_asked_where_the_mask_shows():
    bias = fk.score("score + bias[q - k]", bias=np.zeros(64, np.float32))
    assert [x.proved for x in bias.lookups(64, 64, mask="causal")] == [True]
    assert [x.witness for x in bias.lookups(64, 64)] == [(0, 0, 0, 1)]
    assert [x.witness for x in bias.lookups(70, 70, mask="causal")] == [(0, 0, 64, 0)]
    assert bias.lookups(64, 70, mask="causal & window(64)", origin=(0, 0, 6, 0))[0].proved
    near = fk.score("where(w > 3, score + bias[k], score * t[k + w])", bias=np.zeros(9, np.float32), t=np.ones(9), w=2)
    assert [x.proved for x in near.lookups(9, 9)] == [True, False]
    late = fk.score("where(score > 0.0, score + t[k - 1], score)", t=np.ones(9))
    assert late.lookups(9, 9)[0].witness == (0, 0, 0, 0)  # a score is anything
    same = fk.score("score + t[q]", t=np.zeros(9, np.float32))  # another `t` than the mask's
    assert same.lookups(12, 12, mask=fk.mask("t[q]", t=np.arange(12) < 9))[0].proved


def test_an_index_nobody_can_bound_is_not_proved():
    made = fk.mask("t[(q ^ k) + (q & k) - (q | k)]", t=np.ones(1, bool)).layout(9000, 9000)
    assert (made.lookups[0].proved, made.lookups[0].witness) == (False, None)
    assert str(made.lookups[0]).endswith("is not proved to stay within 1 entry")


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("sum(j in 0..3000: t[h, j])", {"t[h, j]": [(0, 3), (0, 2999)]}),
        ("sum(j in 0..3000: t[h, j + 3000])", {"t[h, j + 3000]": [(0, 3), (3000, 5999)]}),
        ("sum(j in 0..3000: t[h, j + 3001])", {"t[h, j + 3001]": [(0, 3), None]}),
        ("sum(j1 in 0..4: sum(j in 0..600: t[j1, j]))", {"t[j1, j]": [(0, 3), (0, 599)]}),
        ("sum(j1 in 0..5: sum(j in 0..600: t[j1, j]))", {"t[j1, j]": [None, (0, 599)]}),
        ("sum(j in 0..3000: t[h, q * 10 + j])", {"t[h, q * 10 + j]": [(0, 3), (0, 3309)]}),
        ("max(j in 5..3000: t[h, j]) + min(j in 9..4000: t[0, j - 6])", {"t[h, j]": [(0, 3), (5, 3999)]}),
    ],
)
def test_lookups_in_long_reductions_are_proved(body, want):
    """They are not written out, and were a KeyError. Reductions of one height share the range of their variables."""
    score = fk.score(f"score * ({body})", t=np.zeros((4, 6000), np.float32))
    found = score.lookups(32, 32, heads=4)
    for text, axes in want.items():
        of_text = [x for x in found if x.text == text]
        assert [(x.lo, x.hi) if x.proved else None for x in of_text] == axes


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ("sum(i in 0..3000: u[i])", (5, 5, (0, 0, 0, 0), 5)),
        ("max(i in 0..3000: u[i]) + 4", (5, 5, (0, 0, 0, 0), 5)),
        ("sum(i in 0..3000: u[i]) + q", (5, 36, (0, 0, 0, 0), 5)),
    ],
)
def test_an_index_that_is_a_long_reduction_has_a_witness(index, found):
    """Its variable is bound inside, and no reduction around it counts."""
    u = np.zeros(3000, np.int32)
    u[:5] = 1
    score = fk.score(f"score + t[{index}] + sum(j in 0..3000: u[j])", u=u, t=np.zeros(5, np.float32))
    (one,) = (x for x in score.lookups(32, 32) if x.table == "t")
    assert (one.proved, one.lo, one.hi, one.witness, one.value) == (False, *found)
