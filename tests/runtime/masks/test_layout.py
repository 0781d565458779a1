"""Layout: what users see of it is what the dense mask says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import masks
from support.lowering import brute
from support.tiers import thinned

import frisket as fk
from frisket.dsl.errors import BudgetError, ParameterError, ShapeError
from frisket.runtime.masks.layout import Layout


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(masks.written()))
def test_layout_figures_equal_the_dense_mask(name):
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
    assert str(made.explain(2, 5)) == "hidden: in causal, q >= k is false: q = 2, k = 5"
    assert str(made.explain(9, 3)) == (
        "hidden: in window(4), abs(q - k) < 4 is false: abs(q - k) = 6; in sinks(2), k < 2 is false: k = 3"
    )  # fmt: skip
    assert str(made.explain(4, 1)) == "hidden: in same(doc), doc[q] == doc[k] is false: doc[q] = 1, doc[k] = 0"
    assert made.explain(5, 4).visible
    for q in range(10):
        for k in range(10):
            assert made.explain(q, k).visible == bool(mask.dense(10, 10)[0, 0, q, k])
    with pytest.raises(ShapeError, match="q = 10 is outside"):
        made.explain(10, 0)


def test_a_constant_is_explained_as_what_it_is():
    """Whatever stands before it."""
    for text, visible in (("full", True), ("~full", False), ("causal & ~full", False)):
        layout = fk.mask(text).layout(8, 8, block=(4, 4))
        assert str(layout.explain(q=3, k=1)) == f"{'visible' if visible else 'hidden'}: the constant is true"
        assert str(layout.explain(tile=(1, 0))) == f"{'full' if visible else 'empty'}: the constant is true"


def test_a_tile_is_explained():
    doc = np.repeat(np.arange(4), 300)
    made = fk.mask("causal & (window(256) | sinks(4)) & same(doc)", doc=doc).layout(1100, 1100)
    ahead = made.explain(tile=(0, 3))
    assert (ahead.kind, ahead.visible_at) == ("empty", None)
    assert str(ahead) == "empty: in causal, q >= k is false throughout: q = 0..127, k = 384..511"
    assert str(made.explain(tile=(5, 0))) == (
        "empty: in same(doc), doc[q] == doc[k] is false throughout: doc[q] = 2, doc[k] = 0"
    )
    assert made.explain(tile=(8, 2)).because == (
        "in window(256), abs(q - k) < 256 is false throughout: abs(q - k) = 641..843; "
        "in sinks(4), k < 4 is false throughout: k = 256..383"
    )
    mixed = made.explain(tile=(4, 2))
    assert (mixed.kind, mixed.visible_at, mixed.hidden_at) == ("partial", (0, 0, 512, 300), (0, 0, 512, 256))
    assert mixed.because == (
        "query 512 sees key 300, as in causal, q >= k is true: q = 512, k = 300; "
        "in window(256), abs(q - k) < 256 is true: abs(q - k) = 212; "
        "in same(doc), doc[q] == doc[k] is true: doc[q] = 1, doc[k] = 1\n"
        "query 512 does not see key 256, as in window(256), abs(q - k) < 256 is false: abs(q - k) = 256; "
        "in sinks(4), k < 4 is false: k = 256"
    )
    full = fk.mask("causal").layout(300, 300)
    assert str(full.explain(tile=(1, 0))) == "full: in causal, q >= k is true throughout: q = 128..255, k = 0..127"
    assert str(full.explain(tile=(2, 0))) == (
        "partial: it reaches past the last query or key; before that, "
        "in causal, q >= k is true throughout: q = 256..299, k = 0..127"
    )
    together = fk.mask("q < k & k < 129 - q & k >= h").layout(256, 256, heads=2, block=64).explain(tile=(1, 1), h=1)
    assert str(together) == "empty: q < k, k < 129 - q are never true together here"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(masks.written()))
def test_explained_tile_is_of_the_stated_kind(name):
    rng = random.Random(f"tile {name}")
    for _ in range(3):
        case = masks.case(masks.written()[name], rng)
        try:
            made = layout(case)
        except ParameterError:  # a table that ends before the lengths
            continue
        kinds = brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)
        for _ in range(8):
            b, h, i, j = (rng.randrange(n) for n in kinds.shape)
            found = made.explain(tile=(i, j), b=b + case.origin[0], h=h + case.origin[1])
            assert found.kind == ("empty", "partial", "full")[kinds[b, h, i, j]]
            assert found.because
            for at, truth in ((found.visible_at, True), (found.hidden_at, False)):
                if at is not None:
                    assert made.explain(at[2], at[3], at[0], at[1]).visible is truth
            assert (found.kind == "empty") == (found.visible_at is None)


def test_explain_refuses_bad_positions_and_tiles():
    made = fk.mask("causal").layout(300, 300, batch=2, origin=(3, 0, 0, 0))
    assert made.explain(q=5, k=4).visible
    assert made.explain(tile=(0, 0)).visible_at == (3, 0, 0, 0)
    for call, text in {
        lambda: made.explain(q=3): "explain takes a position or a tile: explain(q=300, k=17), explain(tile=(2, 0))",
        lambda: made.explain(q=3, k=3, tile=(0, 0)): "explain takes a position or a tile",
        lambda: made.explain(q="a", k=3): "q = a is outside 0..299",
        lambda: made.explain(q=1.5, k=3): "q = 1.5 is outside 0..299",
        lambda: made.explain(tile=3): "tile is 3",
        lambda: made.explain(tile=(3, 0)): "tile row 3 is outside this layout, which has 0..2",
        lambda: made.explain(tile=(0, -1)): "tile column -1 is outside this layout, which has 0..2",
        lambda: made.explain(tile=(0, 0), b=0): "b 0 is outside this layout, which has 3..4",
    }.items():
        with pytest.raises((ShapeError, ParameterError)) as error:
            call()
        assert str(error.value).startswith(text)
    with pytest.raises(BudgetError, match="more than explain looks at, 4,194,304"):
        fk.mask("causal").layout(9000, 9000, block=4096).explain(tile=(0, 0))


def test_counting_waits_to_be_asked():
    """Facts of a layout that cannot be counted cheaply are there at once."""
    made = fk.mask("(q ^ k) % 97 < 50 & causal").layout(4096, 4096)
    facts = made.facts
    assert facts.max_runs_per_row == 1
    assert "visible_pairs" not in vars(made)
    assert facts.visible_pairs == made.visible_pairs
    assert "visible_pairs" in vars(made)


def test_counting_has_a_budget():
    made = fk.mask("random(1, q, k) < 0.00001").layout(20_000, 20_000, exact=False)
    assert made.facts.visible_pairs is None
    with pytest.raises(BudgetError, match="counting the visible pairs would look at"):
        _ = made.visible_pairs


BAD = {
    "q_len is -1\n  lengths are integers, 0 or more, in tokens": {"q_len": -1},
    "kv_len is -4\n  lengths are integers, 0 or more, in tokens": {"kv_len": -4},
    "heads is 0\n  counts are positive integers": {"heads": 0},
    "block is (0, 64)\n  tile sizes are two positive integers (queries, keys), in tokens": {"block": (0, 64)},
    "block is (64,)\n  tile sizes are two positive integers (queries, keys), in tokens": {"block": (64,)},
    "origin is (0, 0, -1, 0)\n  it is (b, h, q, k), none negative, in global positions": {"origin": (0, 0, -1, 0)},
    "origin has 3 entries for 1 batch entries\n  give one int, or one per batch entry": {
        "origin": (0, 0, np.array([1, 2, 3]), 0)
    },
    "q_len is 1.5\n  lengths are integers, 0 or more, in tokens": {"q_len": 1.5},
    "q_len is None\n  lengths are integers, 0 or more, in tokens": {"q_len": None},
    "q_len is an array of shape (2, 3)\n  lengths are integers, 0 or more, in tokens": {"q_len": np.ones((2, 3))},
    "batch is True\n  counts are positive integers": {"batch": True},
    "block is (8.0, 8.0)\n  tile sizes are two positive integers (queries, keys), in tokens": {"block": 8.0},
    "kv_len is 1,000,000,000,000,000, 281,474,976,710,656 or more\n  positions are computed in 64 bits": {
        "kv_len": 10**15
    },
    "1,099,511,627,776 tokens in tiles of 128 are 8,589,934,592 tiles\n  take larger tiles": {"kv_len": 1 << 40},
    "origin is (0, 0, 1.5, 0)\n  it is (b, h, q, k), none negative, in global positions": {"origin": (0, 0, 1.5, 0)},
    "sizes is 64\n  it is (B, H, Q_LEN, KV_LEN), the lengths of the whole problem": {"sizes": 64},
    "the crop ends at 80 but Q_LEN is 64\n  `sizes` are the lengths of the whole problem: (B, H, Q_LEN, KV_LEN)": {
        "origin": (0, 0, 16, 0), "sizes": (1, 1, 64, 64),
    },
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_layout_refuses_bad_lengths_and_blocks(text):
    arguments = {"q_len": 64, "kv_len": 64, **BAD[text]}
    with pytest.raises(ShapeError) as caught:
        fk.mask("causal").layout(**arguments)
    assert str(caught.value) == text


def test_integers_of_numpy_are_lengths():
    """Narrow ones do not wrap, and what comes back is Python's."""
    i = np.int8
    made = fk.mask("causal").layout(np.int32(100), i(100), i(1), i(1), block=i(7), origin=(0, 0, np.int64(1), 0))
    like = fk.mask("causal").layout(100, 100, block=7, origin=(0, 0, 1, 0))
    assert (made.counts, made.visible_pairs, made.sizes) == (like.counts, like.visible_pairs, like.sizes)
    assert repr(made.counts) == repr(like.counts)
    long = fk.mask("causal").layout(1000, 1000, block=(i(100), i(100)))
    assert long.counts == fk.mask("causal").layout(1000, 1000, block=100).counts


def test_a_table_too_short_for_the_length_is_refused():
    mask = fk.mask("same(doc)", doc=np.zeros(10, int))
    with pytest.raises(ParameterError, match=r"table `doc` has 10 entries on axis 0 and is read at `q` = 0..63"):
        mask.layout(64, 64)
    fk.mask("q < 10 & k < 10 & same(doc)", doc=np.zeros(10, int)).layout(64, 64)


def test_layouts_are_drawn():
    text = str(fk.mask("causal & window(256)").layout(1024, 1024))
    assert "█" in text
    assert repr(fk.mask("causal").layout(256, 256)) == (
        "Layout('causal', 256 x 256, block 128 x 128: 1 full, 2 partial, 1 empty)"
    )
