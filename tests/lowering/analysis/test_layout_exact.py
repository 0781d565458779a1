"""Layouts are exact: every tile, forward and transposed, equals what looking at every element says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import masks
from support.lowering import brute
from support.tiers import thinned

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import lookup
from frisket.dsl.program import parse_expression
from frisket.dsl.sugar import k, q
from frisket.lowering.analysis import rows as closed_form
from frisket.lowering.analysis import runs, tiles
from frisket.lowering.analysis.runs import from_records
from frisket.lowering.analysis.table import Table
from frisket.lowering.simplify import simplify


def kinds(found, columns):
    runs = from_records(found.spans.bounds, found.spans.count)
    grid = np.zeros((*found.spans.count.shape, columns), np.uint8)
    for s, row, start, stop, kind in zip(runs.slice, runs.row, runs.start, runs.stop, runs.kind, strict=True):
        grid[s, row, start:stop] = kind
    return grid[found.spans.slice_of]


def check(case: masks.Case):
    want = brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)
    mask = simplify(case.mask)
    for transposed in (False, True):
        found = case.analysed(mask, transposed=transposed)
        rows = want.swapaxes(2, 3) if transposed else want
        np.testing.assert_array_equal(kinds(found, rows.shape[3]), rows)
        assert found.exact
        records(found)
        # without looking at elements, what is certain is still true
        blind = case.analysed(mask, 0, transposed=transposed)
        got = kinds(blind, rows.shape[3])
        assert ((got == rows) | (got == 1)).all()
    return found


def records(found):
    """lo <= full_lo <= full_hi <= hi, disjoint and in order; unused records are zero."""
    bounds, count = found.spans.bounds, found.spans.count
    assert (np.diff(bounds, axis=-1) >= 0).all()
    used = np.arange(bounds.shape[2]) < count[..., None]
    assert (bounds[~used] == 0).all()
    assert (bounds[used][:, 3] > bounds[used][:, 0]).all()
    later = used[..., 1:]
    assert (bounds[..., 1:, 0] >= bounds[..., :-1, 3])[later].all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(masks.written()))
def test_layout_of_written_masks_is_exact(name):
    rng = random.Random(name)
    for _ in range(3):
        check(masks.case(masks.written()[name], rng))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [n if n < 35 else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(500)])
def test_layout_of_random_masks_is_exact(seed):
    rng = random.Random(seed)
    one_random_mask(rng)


@pytest.mark.parametrize("block", [(1, 5), (2, 3), (5, 4), (3, 2)])
@pytest.mark.parametrize(
    "text",
    [
        "abs(q - k) < 20 & (q - k) % 5 == 0 ^ where(q // 4 == k // 4, k <= 27, k <= 28)",
        "(q - k) % 5 == 0 & q // 3 >= k // 6 & (q // 5 == k // 5 ^ q % 4 == 1)",
        "~(k % 2 != 0) ^ (k + 6) % 7 == 6",
    ],
)
def test_narrow_piece_of_a_tile_has_no_phase_wider_than_itself(text, block):
    check(masks.Case(parse_expression(text, {}), 17, 39, 1, 1, block))


@pytest.mark.parametrize(
    "seed", [n if n < 302 else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(290, 600)]
)
def test_tiles_smaller_than_the_periods(seed):
    rng = random.Random(seed)
    check(masks.small_tiles(masks.periodic_mask(rng), rng))


@pytest.mark.parametrize("ends", [(2**63 - 1, -(2**63)), (2**63 - 6, -7), (9, -(2**63))], ids=str)
@pytest.mark.parametrize("text", ["k <= lim[q]", "k >= lim[q] & q >= k", "k < lim[q] & q - k < 5"])
def test_limits_that_fall_by_more_than_an_integer_holds(text, ends):
    """Sentinels for no limit: a table that falls so far must not look as if it rose."""
    limit = np.where(np.arange(310) < 20, *ends)
    check(masks.Case(parse_expression(text, {"lim": limit}), 40, 40, 1, 1, (8, 8), tables={"lim": Table(limit)}))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint32"])
def test_differences_that_a_table_s_own_dtype_does_not_hold(dtype):
    """Ends of ranges are of the interpreter's numbers, as entries are."""
    ends = np.iinfo(dtype)
    table = np.array([ends.min, ends.max, 0, 1], dtype)[np.arange(40) % 4]
    for text in ("abs(t[q] - t[k]) < w", "t[q] * w > t[k] * w"):
        mask = parse_expression(f"param w: int\nmask = {text}", {"t": table})
        check(masks.Case(mask, 40, 40, 1, 1, (8, 8), params={"w": 1}, tables={"t": Table(table)}))


@pytest.mark.parametrize("name", ["document-starts", "early-documents", "per-query-window", "other-table"])
def test_queries_are_taken_in_batches(name, monkeypatch):
    monkeypatch.setattr(closed_form, "_BATCH", 1)
    rng = random.Random(name)
    for _ in range(5):
        check(masks.case(masks.written()[name], rng))


@pytest.mark.parametrize("work", [0, 10**4, 10**5, 10**6])
@pytest.mark.parametrize("transposed", [False, True])
def test_past_the_budget_tiles_are_partial(work, transposed, monkeypatch):
    monkeypatch.setattr(tiles, "_CHUNK", 16)
    case = masks.case(masks.written()["neighbourhood"], random.Random(1))
    case.block, case.q_len, case.kv_len = (4, 8), 150, 170
    found = case.analysed(case.mask, work, transposed=transposed)
    want = brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)
    want = want.swapaxes(2, 3) if transposed else want
    got = kinds(found, want.shape[3])
    assert not found.exact
    assert ((got == want) | (got == 1)).all()
    assert (got != want).any()


def test_very_many_runs_of_a_row_end_in_one_that_is_partial(monkeypatch):
    monkeypatch.setattr(runs, "_LEAST", 4)
    monkeypatch.setattr(runs, "_ROOM", 4)
    mask = parse_expression("(k // 8) % 2 == 0 & (q >= k | q < 30)", {})
    found = masks.Case(mask, 100, 200, 1, 1, (16, 8), sizes=None).analysed(simplify(mask))
    want = brute.kinds(mask, 100, 200, block=(16, 8))
    got = kinds(found, want.shape[3])
    assert not found.exact
    assert found.spans.bounds.shape[2] == 4
    assert ((got == want) | (got == 1)).all()
    records(found)


def test_an_end_beyond_64_bits_leaves_the_mask_alone():
    table = np.arange(100) // 90
    far = lookup("doc", (q,)) >= lookup("doc", (k // 10_000_000,))  # a run without end, times ten million
    options = {"block": (16, 16), "tables": {"doc": table}}
    found = masks.Case(far, 100, 90, 1, 1, sizes=None, **options).analysed(simplify(far))
    want = brute.kinds(far, 100, 90, **options)
    np.testing.assert_array_equal(kinds(found, want.shape[3]), want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_small_tiles(seed):
    rng = random.Random(f"small {seed}")
    for _ in range(500):
        check(masks.small_tiles(masks.periodic_mask(rng), rng))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_layout_of_many_random_masks_is_exact(seed):
    rng = random.Random(f"slow {seed}")
    for _ in range(1000):
        one_random_mask(rng)


def one_random_mask(rng):
    case = masks.case(masks.random_mask(rng), rng)
    try:
        check(case)
    except EvaluationError as error:  # products of products: refused, never wrong
        if "leaves 64 bits" not in str(error):
            raise
