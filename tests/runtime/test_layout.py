"""Layout: what users see of it is what the dense mask says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import brute, masks

import frisket as fk
from frisket.dsl.errors import BudgetError, ParameterError, ShapeError
from frisket.runtime.layout import Layout


def layout(case: masks.Case) -> Layout:
    used = {**case.params, **case.tables}
    mask = fk.Mask(case.mask, {n: used[n] for n in names(case.mask)})
    return mask.layout(
        case.q_len, case.kv_len, batch=case.batch, heads=case.heads, block=case.block, origin=case.origin,
        sizes=case.sizes,
    )  # fmt: skip


def names(e):
    from frisket.dsl.ir import free_names

    scalars, tables = free_names(e)
    return {*scalars, *tables}


@pytest.mark.parametrize("name", masks.written())
def test_what_a_layout_says_is_what_the_mask_does(name):
    rng = random.Random(f"layout {name}")
    for _ in range(3):
        case = masks.case(masks.written()[name], rng)
        made = layout(case)
        kinds = brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)
        np.testing.assert_array_equal(made.kinds(), kinds)
        np.testing.assert_array_equal(np.bincount(kinds.reshape(-1), minlength=3), list(vars(made.counts).values()))
        dense = brute.dense(case.mask, case.q_len, case.kv_len, **case.options)
        np.testing.assert_array_equal(made.row_counts, dense.sum(axis=3))
        assert made.visible_pairs == dense.sum()
        assert made.facts.rows_nonempty is bool(dense.any(axis=3).all())
        assert made.facts.flops == 4 * dense.sum()
        assert made.density == pytest.approx((kinds > 0).mean())
        check_runs(made.runs, kinds)
        check_runs(made.transposed.runs, kinds.swapaxes(2, 3))
        check_contiguous(made, kinds)


def check_runs(runs, kinds):
    """CSR runs cover exactly what is not empty, in order, each maximal."""
    batch, heads, rows, columns = kinds.shape
    for b in range(batch):
        for h in range(heads):
            for row in range(rows):
                line = runs.slice_of[b, h] * rows + row
                found = np.zeros(columns, np.uint8)
                last = (-1, 0)
                for i in range(runs.row_ptr[line], runs.row_ptr[line + 1]):
                    start, stop, kind = runs.start[i], runs.stop[i], runs.kind[i]
                    assert start < stop
                    assert start > last[0] or (start == last[0] and kind != last[1])
                    found[start:stop] = kind
                    last = (stop, kind)
                np.testing.assert_array_equal(found, kinds[b, h, row])


def check_contiguous(made, kinds):
    changes = np.diff((kinds > 0).astype(int), axis=3, prepend=0, append=0)
    assert made.facts.contiguous == bool(((changes == 1).sum(axis=3) <= 1).all())


def test_equal_slices_are_stored_once():
    mask = fk.mask(lambda h, q, k: (q >= k) & (q - k < 200 + 200 * (h % 2)))
    made = mask.layout(512, 512, heads=8)
    assert len(made.spans.count) == 2
    assert made.spans.slice_of.tolist() == [[0, 1] * 4]
    assert len(fk.mask("causal").layout(512, 512, batch=4, heads=8).spans.count) == 1


def test_a_crop_is_part_of_the_whole():
    """A layout in global coordinates is the same tiles, wherever the crop falls on them."""
    mask = fk.mask("causal & window(100)")
    whole = mask.layout(1024, 1024, block=64)
    crop = mask.layout(256, 512, block=64, origin=(0, 0, 512, 384), sizes=(1, 1, 1024, 1024))
    np.testing.assert_array_equal(crop.kinds(), whole.kinds()[:, :, 8:12, 6:14])
    step = mask.layout(1, 701, block=64, origin=(0, 0, 700, 0))
    seen = np.add.reduceat(mask.dense(1024, 1024)[0, 0, 700, :701], np.arange(0, 701, 64))
    np.testing.assert_array_equal(step.kinds()[0, 0, 0] > 0, seen > 0)


def test_explain_names_the_clause():
    mask = fk.mask("causal & (window(4) | sinks(2)) & same(doc)", doc=np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 1]))
    made = mask.layout(10, 10, block=4)
    assert str(made.explain(2, 5)) == "hidden: q >= k is false: q = 2, k = 5"
    assert str(made.explain(9, 3)) == (
        "hidden: abs(q - k) < 4 is false: abs(q - k) = 6; k < 2 is false: k = 3"
    )  # fmt: skip
    assert str(made.explain(4, 1)) == "hidden: doc[q] == doc[k] is false: doc[q] = 1, doc[k] = 0"
    assert made.explain(5, 4).visible
    for q in range(10):
        for k in range(10):
            assert made.explain(q, k).visible == bool(mask.dense(10, 10)[0, 0, q, k])
    with pytest.raises(ShapeError, match="q = 10 is outside"):
        made.explain(10, 0)


def test_counting_has_a_budget():
    made = fk.mask("random(1, q, k) < 0.5").layout(20_000, 20_000, exact=False)
    assert not made.exact
    assert made.facts.visible_pairs is None
    with pytest.raises(BudgetError, match="counting the visible pairs would look at"):
        _ = made.visible_pairs


BAD = {
    "q_len is 0\n  lengths and counts are positive integers, in tokens": {"q_len": 0},
    "kv_len is -4\n  lengths and counts are positive integers, in tokens": {"kv_len": -4},
    "heads is 0\n  lengths and counts are positive integers, in tokens": {"heads": 0},
    "block is (0, 64)\n  tile sizes are two positive integers (queries, keys), in tokens": {"block": (0, 64)},
    "block is (64,)\n  tile sizes are two positive integers (queries, keys), in tokens": {"block": (64,)},
    "origin is (0, 0, -1, 0)\n  it is (b, h, q, k), none negative, in global positions": {"origin": (0, 0, -1, 0)},
    "origin has 3 entries for 1 batch entries\n  give one int, or one per batch entry": {
        "origin": (0, 0, np.array([1, 2, 3]), 0)
    },
    "the crop ends at 80 but Q_LEN is 64\n  `sizes` are the lengths of the whole problem: (B, H, Q_LEN, KV_LEN)": {
        "origin": (0, 0, 16, 0), "sizes": (1, 1, 64, 64),
    },
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_laid_out_is_refused(text):
    arguments = {"q_len": 64, "kv_len": 64, **BAD[text]}
    with pytest.raises(ShapeError) as caught:
        fk.mask("causal").layout(**arguments)
    assert str(caught.value) == text


def test_a_table_too_short_for_the_length_is_refused():
    mask = fk.mask("same(doc)", doc=np.zeros(10, int))
    with pytest.raises(ParameterError, match=r"table `doc` has 10 entries on axis 0 and is read at `q` = 0..63"):
        mask.layout(64, 64)
    fk.mask("q < 10 & k < 10 & same(doc)", doc=np.zeros(10, int)).layout(64, 64)


def test_layouts_are_drawn():
    text = str(fk.mask("causal & window(256)").layout(1024, 1024))
    assert "█" in text
    assert repr(fk.mask("causal").layout(256, 256)) == (
        "Layout('q >= k', 256 x 256, block 128 x 128: 1 full, 2 partial, 1 empty)"
    )
