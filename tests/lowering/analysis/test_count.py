"""Counting by row is counting: every row, the total, the first row with and without a key."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import masks
from support.lowering import brute
from support.tiers import thinned

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import build
from frisket.dsl.sugar import eq, h, k, maximum, ne, q
from frisket.lowering.analysis.clauses import clause_disjuncts
from frisket.lowering.analysis.count import Rowwise
from frisket.lowering.analysis.groups import Beyond, Groups, KeyFunction
from frisket.lowering.analysis.layout import grid_of
from frisket.lowering.simplify import simplify

BEYOND = {"tile-map", "nan-bias", "random", "bits", "tree"}  # read q and k together, in no shape that is counted


def rows_of(case: masks.Case) -> list[Rowwise]:
    mask = simplify(case.mask)
    grid, slice_of = grid_of(mask, case.problem, case.block)
    scope = case.scope()
    made = [Rowwise(mask, grid, scope, s) for s in range(len(grid.b))]
    return [made[s] for s in slice_of.reshape(-1)]


def check(case: masks.Case) -> Counter[str]:
    """What was compared; nothing where the mask is beyond counting."""
    try:
        want = brute.dense(case.mask, case.q_len, case.kv_len, **case.options).sum(axis=3).reshape(-1, case.q_len)
        found = rows_of(case)
        got = [np.concatenate([r.count(x) for x in r.chunks(16)]) for r in found]
    except Beyond:
        return Counter(beyond=1)
    except EvaluationError as error:
        if "leaves 64 bits" not in str(error):
            raise
        return Counter(overflow=1)
    np.testing.assert_array_equal(got, want)
    for one, row in zip(found, want, strict=True):
        assert one.total() == row.sum()
        asked = np.concatenate(list(one.telling()))
        seen = np.concatenate([one.sees_a_key(x) for x in one.telling()])
        np.testing.assert_array_equal(seen, row[asked - one.q0] > 0)
        for truth in (True, False):  # the first of each kind is among those asked
            first = asked[seen == truth][:1] - one.q0
            assert first.tolist() == np.flatnonzero((row > 0) == truth)[:1].tolist()
    return Counter(counted=1, pieces=sum(r.pieces is not None for r in found))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(masks.written()))
def test_counts_of_written_masks_equal_brute_force(name):
    rng = random.Random(f"count {name}")
    stat = sum((check(masks.case(masks.written()[name], rng)) for _ in range(4)), Counter())
    assert bool(stat["beyond"]) == (name in BEYOND)


QUASI_AFFINE = {
    "half": (q // 2 >= k) & eq(k % 16, 3),  # the end comes back to the same residue after 32 queries
    "triple": (3 * q >= k) & eq((q - k) % 5, 1),
    "between": (q // 3 >= k) & (k > q // 7) & eq(k % 4, 1),
    "two periods": eq((q - k) % 6, 0) & eq((q - k) % 4, 0) & (q >= k),
    "two thirds": (k <= (q * 2) // 3) | eq((q - k) % 4, 2),
    "rows apart": (q >= k) & (q - k < 50) & ((q < 100) | (q > 300) | eq(k % 3, 0)),
    "sum": eq((q + k) % 5, 2) & (k - q < 90),
    "far": (abs(q - k) > q // 3) & (k < 700),
    "either far": 2 * maximum(q - k, k - 40) >= q // 4,
    "from half": abs(q // 2 - k) * 2 >= q // 3,
    "periods within": eq((q - k) % 12, 5) & eq(k % 4, 1),
    "unequal": (q >= k) & ne((q - k) % 7, 2),
    "digits": (build("floordiv", k, q * 0 + 9) % 5 <= (q // 9) % 5) & (k % 9 >= q % 9) & (q - k < 200),
    "heads": (q >= k) & (q - k < 40 * h + 3) & eq(k % 2, 0),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", QUASI_AFFINE)
def test_quasi_affine_masks_are_counted_in_pieces(name):
    """Long enough that most queries are not asked."""
    stat: Counter[str] = Counter()
    for seed in range(2):
        case = masks.case(QUASI_AFFINE[name], random.Random(seed))
        if not np.ndim(case.origin[2]):
            case.batch, case.heads = 1, 2
        case.q_len, case.kv_len, case.sizes = 1900 - seed, 900 + 31 * seed, (5, 6, 2100, 1200)
        stat += check(case)
    assert stat["counted"] == 2
    assert stat["pieces"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_counts_of_random_masks_equal_brute_force(seed):
    rng = random.Random(seed)
    check(masks.case(masks.random_mask(rng), rng))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_counts_of_many_random_masks_equal_brute_force(seed):
    rng = random.Random(f"count slow {seed}")
    stat = sum((check(masks.case(masks.random_mask(rng), rng)) for _ in range(500)), Counter())
    assert stat["counted"] > 300
    assert stat["pieces"] > 100


def test_clauses_of_a_neighbourhood():
    """Both axes of an image, clamped at its edges, are one conjunction: no alternatives to join."""
    found = clause_disjuncts(simplify(masks.written()["neighbourhood"]))
    assert [len(c) for c in found] == [5]


@pytest.mark.parametrize("of", [np.arange(9), np.arange(9)[::-1], np.repeat([2**63 - 3, 2**63 - 1], 4)], ids=str)
@pytest.mark.parametrize("far", [-(2**63), 2**63 - 1])
def test_limits_at_the_ends_of_64_bits(of, far):
    """A sentinel that stands for no limit."""
    limit = np.array([far, 3, 2**63 - 2])
    for name, held in (("at least", of >= limit[:, None]), ("at most", of <= limit[:, None])):
        first, last = KeyFunction(of, 0).range(*((limit, None) if name == "at least" else (None, limit)))
        np.testing.assert_array_equal(last - first + 1, held.sum(axis=1), err_msg=name)


def test_functions_that_fall_and_that_do_neither():
    falling = KeyFunction(np.array([9, 9, 4, 1]), 100)
    assert [x.tolist() for x in falling.range(np.array([4]), np.array([9]))] == [[100], [102]]
    assert [x.tolist() for x in falling.range(np.array([2]), np.array([3]))] == [[103], [102]]  # none
    with pytest.raises(Beyond):
        KeyFunction(np.array([1, 2, 1]), 0).range(np.array([1]), None)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_members_of_a_group_between_positions_are_counted(seed):
    """Members of a group between two positions, for values near and far apart, present and absent."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    spread = int(rng.choice([1, 50, 10**6]))
    values = [rng.integers(-3, 4, n) * spread for _ in range(int(rng.integers(1, 4)))]
    held = rng.random(n) < 0.6 if rng.random() < 0.5 else None
    asked = [rng.integers(-4, 5, 40) * spread for _ in values]
    lo = rng.integers(0, n + 1, 40)
    hi = np.minimum(lo + rng.integers(-1, n + 1, 40), n - 1)
    hi = np.maximum(hi, lo - 1)
    same = np.all([a[:, None] == v for a, v in zip(asked, values, strict=True)], axis=0)
    at = np.arange(n)
    inside = same & (at >= lo[:, None]) & (at <= hi[:, None])
    want = (inside if held is None else inside & held).sum(axis=1)
    np.testing.assert_array_equal(Groups(values, held).count(asked, lo, hi), want)
