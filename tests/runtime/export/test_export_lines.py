"""FlashMask, varlen and slices: what is exported is the mask, and what does not fit says why."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import formats, masks
from support.lowering import brute

import frisket as fk
from frisket.dsl.errors import ExportError
from frisket.runtime.export import tile_lists
from frisket.runtime.export.tile_lists import lines

DOC = np.repeat(np.arange(5), [7, 1, 20, 12, 8]).astype(np.int32)


def cases(seed: str, extra: int = 20):
    rng = random.Random(seed)
    for name, mask in [*masks.written().items(), *((f"random {i}", masks.random_mask(rng)) for i in range(extra))]:
        yield name, masks.case(mask, rng)


def refuse(*_):
    return AssertionError("no line has too many runs")


def square(text: str, n: int = 48, **params):
    return fk.mask(text, **params).layout(n, n, block=16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fine", [8, 3])
def test_lines_of_a_layout_are_its_rows_and_columns(fine, monkeypatch):
    monkeypatch.setattr(tile_lists, "_FINE", fine)
    monkeypatch.setattr(tile_lists, "_STEP", 700)
    for name, case in [*cases("lines")][fine % 2 :: 2]:
        layout, dense = formats.laid_out(case)
        for transposed in (False, True):
            found = lines(layout, most=10**9, too_many=refuse, transposed=transposed)
            line = np.repeat(np.arange(len(found.ptr) - 1), np.diff(found.ptr))
            edge = np.zeros((len(found.ptr) - 1, found.width + 1), int)
            np.add.at(edge, (line, found.start), 1)
            np.add.at(edge, (line, found.stop), -1)
            seen = np.cumsum(edge, axis=1)[:, :-1].reshape(-1, found.length, found.width)
            want = dense.swapaxes(2, 3) if transposed else dense
            np.testing.assert_array_equal(seen[found.slice_of], want, err_msg=name)
            touch = (line[1:] == line[:-1]) & (found.start[1:] <= found.stop[:-1])
            assert not touch.any(), name
            assert len({x.tobytes() for x in seen}) == len(seen), "equal slices are kept once"


def test_flashmask_exports_equal_the_mask():
    held = 0
    for name, case in cases("flashmask"):
        layout, dense = formats.laid_out(case)
        few = np.diff(np.pad(~dense, ((0, 0), (0, 0), (1, 1), (0, 0))).astype(np.int8), axis=2) == 1
        try:
            found = layout.to_flashmask()
        except ExportError:
            assert few.sum(axis=2).max() > 2, name
            continue
        held += 1
        assert found.startend_row_indices.dtype == np.int32
        seen = formats.flashmask(found.startend_row_indices, found.causal, case.q_len)
        np.testing.assert_array_equal(np.broadcast_to(seen, dense.shape), dense, err_msg=name)
    assert held > 30


@pytest.mark.parametrize(
    ("text", "columns", "causal"),
    [
        ("causal", 1, True), ("causal & window(9)", 1, True), ("causal & same(doc)", 1, True), ("false", 1, True),
        ("causal & (window(9) | sinks(3))", 1, True), ("causal & !(q - k > 4 & q - k < 20)", 2, True),
        ("causal & (window(9) | q >= 40)", 2, True), ("causal & (window(9) | q >= 47)", 2, True),
        ("same(doc)", 2, False), ("window(9)", 2, False), ("k >= q", 2, False), ("true", 2, False),
        ("prefix(9) | causal", 2, False), ("window(9) | k < 3 | q < 3", 4, False), ("q != k", 4, False),
    ],
)  # fmt: skip
def test_flashmask_takes_the_fewest_columns(text, columns, causal):
    layout = square(text, **({"doc": DOC} if "doc" in text else {}))
    found = layout.to_flashmask()
    assert (found.startend_row_indices.shape, found.causal) == ((1, 1, 48, columns), causal)
    dense = np.asarray(fk.mask(text, **({"doc": DOC} if "doc" in text else {})).dense(48, 48))
    np.testing.assert_array_equal(formats.flashmask(found.startend_row_indices, causal, 48), dense)


@pytest.mark.parametrize("lengths", [(48, 40), (40, 48)])
def test_flashmask_trusts_the_diagonal_of_squares_only(lengths):
    found = fk.mask("causal").layout(*lengths).to_flashmask()
    assert (found.startend_row_indices.shape[3], found.causal) == (2, False)
    dense = np.asarray(fk.mask("causal").dense(*lengths))
    np.testing.assert_array_equal(formats.flashmask(found.startend_row_indices, False, lengths[0]), dense)


def test_flashmask_with_heads_and_batch():
    layout = fk.mask("causal & q - k < 4 * (h + 1) + b").layout(32, 32, batch=2, heads=3)
    assert layout.to_flashmask().startend_row_indices.shape == (2, 3, 32, 1)
    assert layout.to_flashmask().startend_row_indices[1, 2, 0, 0] == 13
    one = fk.mask("causal & q - k < 4 + b").layout(32, 32, batch=2, heads=3)
    assert one.to_flashmask().startend_row_indices.shape == (2, 1, 32, 1)


def test_flashmask_refusal_names_the_key_and_why():
    with pytest.raises(ExportError) as e:
        square("causal & (q - k) % 4 == 0").to_flashmask()
    assert str(e.value) == (
        "FlashMask hides at most two runs of queries from a key, and key 0 of the layout is hidden from 12: "
        "1..3, 5..7, 9..11, 13..15, ...\n"
        "  at b = 0, h = 0, q = 5, k = 0 the mask is hidden: (q - k) % 4 == 0 is false: (q - k) % 4 = 1\n"
        "  to_block_mask(), to_fa4() and to_bsr() hold any mask"
    )


def test_varlen_exports_equal_the_mask():
    held = 0
    for name, case in cases("varlen"):
        layout, dense = formats.laid_out(case)
        total_q, total_k = case.batch * case.q_len, case.batch * case.kv_len
        try:
            found = layout.to_varlen()
        except ExportError:
            continue
        held += 1
        assert (dense == dense[:, :1]).all(), name
        np.testing.assert_array_equal(formats.varlen(found, total_q, total_k), formats.packed(dense), err_msg=name)
        for cu, total, longest in (
            (found.cu_seqlens_q, total_q, found.max_seqlen_q), (found.cu_seqlens_k, total_k, found.max_seqlen_k),
        ):  # fmt: skip
            assert cu.dtype == np.int32
            assert (cu[0], cu[-1], np.diff(cu).max()) == (0, total, longest)
    assert held > 12


@pytest.mark.parametrize(
    ("text", "documents", "causal", "window"),
    [
        ("true", 1, False, (-1, -1)), ("causal", 1, True, (-1, -1)), ("causal & window(9)", 1, True, (8, 0)),
        ("window(9)", 1, False, (8, 8)), ("q - k <= 3 & k - q <= 7", 1, False, (3, 7)), ("k >= q", 1, False, (0, -1)),
        ("same(doc)", 5, False, (-1, -1)), ("causal & same(doc)", 5, True, (-1, -1)),
        ("causal & same(doc) & window(5)", 5, True, (4, 0)), ("same(doc) & window(5)", 5, False, (4, 4)),
        ("q > k", 3, True, (-1, -1)), ("q < 20 & k < 30", 3, False, (-1, -1)), ("false", 2, False, (-1, -1)),
        ("chunked(10)", 5, False, (-1, -1)),
    ],
)  # fmt: skip
def test_varlen_finds_documents_and_flags(text, documents, causal, window):
    layout = square(text, **({"doc": DOC} if "doc" in text else {}))
    found = layout.to_varlen()
    assert (len(found.cu_seqlens_q) - 1, found.causal, found.window_size) == (documents, causal, window)


def test_varlen_aligns_to_the_last_key():
    found = fk.mask("bottom_right & window(9)").layout(7, 30).to_varlen()
    assert (found.cu_seqlens_k.tolist(), found.causal, found.window_size) == ([0, 15, 30], True, (8, 0)) or (
        formats.varlen(found, 7, 30) == brute.dense(fk.mask("bottom_right & window(9)").expr, 7, 30)[0, 0]
    ).all()
    decode = fk.mask("causal & same(doc)", doc=DOC).layout(1, 48, origin=(0, 0, 30, 0), sizes=(1, 1, 48, 48))
    assert decode.to_varlen().cu_seqlens_k.tolist() == [0, 28, 31, 48]


@pytest.mark.parametrize(
    ("text", "first", "why"),
    [
        (
            "prefix(5) | causal",
            "query 1 of the layout sees keys 0..4, and a window of -1 to the left and 4 to the right shows it 0..5",
            "at b = 0, h = 0, q = 1, k = 5 the mask is hidden: in prefix(5), k < 5 is false: k = 5; "
            "in causal, q >= k is false: q = 1, k = 5",
        ),
        (
            "causal & (window(5) | sinks(2))",
            "varlen attention shows a query one run of keys, and query 7 of the layout sees 2: 0..1, 3..7",
            "at b = 0, h = 0, q = 7, k = 2 the mask is hidden: in window(5), abs(q - k) < 5 is false: abs(q - k) = 5; "
            "in sinks(2), k < 2 is false: k = 2",
        ),
        (
            "q < 9 & k >= 30 | q >= 9 & k < 30",
            "query 8 of the layout sees keys 30..47, and a later query sees keys before the end of these, so they are "
            "not documents one after another",
            "at b = 0, h = 0, q = 8, k = 30 the mask is visible: q < 9 is true: q = 8; k >= 30 is true: k = 30",
        ),
    ],
)
def test_varlen_refuses_with_a_position(text, first, why):
    with pytest.raises(ExportError) as e:
        square(text).to_varlen()
    assert str(e.value).split("\n  ")[:2] == [first, why]
    assert "to_slices()" in str(e.value)


def test_slice_exports_equal_the_mask():
    held = 0
    for name, case in cases("slices"):
        layout, dense = formats.laid_out(case)
        try:
            found = layout.to_slices()
        except ExportError:
            continue
        held += 1
        seen = formats.slices(found, case.batch * case.q_len, case.batch * case.kv_len)
        np.testing.assert_array_equal(seen, formats.packed(dense), err_msg=name)  # counts: no position twice
        assert len(found) <= case.batch * case.q_len
    assert held > 40


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("true", [0]), ("causal", [1]), ("k >= q", [2]), ("causal & window(9)", [1, 3]), ("window(9)", [1, 3, 2]),
        ("prefix(9) | causal", [0, 1]), ("causal & (window(9) | sinks(3))", [1, 0, 3]), ("q < 20 & k < 30", [0]),
        ("same(doc)", [0, 0, 0, 0, 0]), ("causal & same(doc)", [1, 0, 1, 1, 1]), ("q == k", [3]), ("false", []),
        ("k < 3 | causal & same(doc)", [0, 0, 0, 1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_slices_are_few(text, kinds):
    found = square(text, **({"doc": DOC} if "doc" in text else {})).to_slices()
    assert sorted(found.attn_type_map.tolist()) == sorted(kinds)


def test_single_elements_are_no_slices():
    with pytest.raises(ExportError) as e:
        square("causal & (q - k) % 3 == 0", 256).to_slices()
    assert str(e.value) == (
        "slices are long trapezoids, and query 192 of the layout alone sees 65 runs of keys: "
        "0..0, 3..3, 6..6, 9..9, ...\n"
        "  at b = 0, h = 0, q = 192, k = 1 the mask is hidden: (q - k) % 3 == 0 is false: (q - k) % 3 = 2\n"
        "  to_block_mask(), to_fa4() and to_bsr() hold any mask"
    )
    with pytest.raises(ExportError) as e:
        fk.mask("q * k % 7 < 3").layout(40, 40).to_slices()
    assert str(e.value) == (
        "slices are long trapezoids, and this mask falls into more of them than its 40 queries; query 4 of the layout "
        "sees 18 runs of keys: 0..0, 2..2, 4..4, 7..7, ...\n"
        "  at b = 0, h = 0, q = 4, k = 1 the mask is hidden: q * k % 7 < 3 is false: q * k % 7 = 4\n"
        "  to_block_mask(), to_fa4() and to_bsr() hold any mask"
    )


def test_a_border_of_single_elements_is_not_walked():
    with pytest.raises(ExportError) as e:
        fk.mask("k % 2 == 0 & causal").layout(2**20, 2**20).to_slices()
    assert str(e.value) == (
        "the border of the mask is 549,760,008,192 elements, more than the 268,435,456 that an export looks at; "
        "the limit is met at query 23160\n"
        "  ask for a smaller crop, or for to_block_mask() or to_fa4(), which hold tiles only"
    )


def test_heads_that_differ():
    layout = fk.mask("causal & q - k < 4 * (h + 1)").layout(32, 32, heads=2)
    for export, name in ((layout.to_varlen, "varlen attention"), (layout.to_slices, "a list of slices")):
        with pytest.raises(ExportError) as e:
            export()
        assert str(e.value) == (
            f"{name} has one mask for all heads, and heads 0 and 1 of the layout differ\n"
            "  at b = 0, h = 0, q = 4, k = 0 the mask is hidden: q - k < 4 * (h + 1) is false: "
            "q - k = 4, 4 * (h + 1) = 4\n"
            "  at b = 0, h = 1, q = 4, k = 0 the mask is visible: in causal, q >= k is true: q = 4, k = 0; "
            "q - k < 4 * (h + 1) is true: q - k = 4, 4 * (h + 1) = 8\n"
            "  lay heads out one by one, or: to_block_mask(), to_fa4() and to_bsr() hold any mask"
        )


@pytest.mark.parametrize(("text", "q", "k"), [("q < 47", 47, 0), ("k < 46", 46, 46), ("q != 20 | k != 3", 20, 3)])
def test_where_heads_first_differ(text, q, k):
    with pytest.raises(ExportError, match=f"at b = 0, h = 1, q = {q}, k = {k} the mask is hidden"):
        fk.mask(f"causal & (h == 0 | {text})").layout(48, 48, heads=2).to_slices()
