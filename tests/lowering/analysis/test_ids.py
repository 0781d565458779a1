"""Documents that return: boxes whose queries and keys have no entry in common hold nothing."""

import numpy as np
import pytest

import frisket as fk
from frisket.lowering.analysis import table as analysis_table
from frisket.lowering.analysis.tiles import Grid

MASKS = {
    "same(t)": 1, "causal & same(t)": 1, "t[q] == u[k] & q != k": 1,
    "t[q] == t[k] & u[q] == u[k]": 1, "t[b, q] == t[b, k]": 2, "t[h, k] == t[h, q] & causal": 2,
    "window(60) & same(t)": 1, "t[q] == t[k] | k < 9": 1, "causal | same(t) & t[q] > 60": 1,
    "k < 9 | t[q] == u[k] & q % 3 == 0 & u[k] < 40": 1, "(causal | same(t) | same(u) & k < 100) & window(150)": 1,
    "same(t) & u[q] < 9 | same(u) & t[k] < 9 & 1000 // (k - 40) > 12": 1,
    "t[b, q] == t[b, k] & t[b, k] > b * 70 | q < 3": 2,
}  # fmt: skip


GRID = Grid(200, 200, (16, 16), *(np.zeros(1, np.int64),) * 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len", "q", "k"), [(200, 200, 0, 0), (90, 333, 100, 3), (333, 50, 3, 280)])
def test_tiles_are_those_of_the_elements(text, q_len, kv_len, q, k):
    rank = MASKS[text]
    rng = np.random.default_rng(q_len)
    tables = {n: rng.permutation(np.repeat(rng.integers(-5, 90, 48), 7))[:336] for n in "tu"}
    if rank == 2:
        tables = {n: np.stack([x, rng.permutation(x)]) for n, x in tables.items()}
    mask = fk.mask(text, **{n: x for n, x in tables.items() if f"{n}[" in text or f"({n})" in text})
    made = mask.layout(q_len, kv_len, batch=2, heads=2, block=(16, 16), origin=(0, 0, q, k))
    other = mask.at(q="k", k="q").layout(kv_len, q_len, batch=2, heads=2, block=(16, 16), origin=(0, 0, k, q))
    seen = mask.dense(q + q_len, k + kv_len, batch=2, heads=2)[..., q:, k:]
    whole = np.zeros((2, 2, made.kinds().shape[2] * 16, made.kinds().shape[3] * 16), bool)
    whole[..., :q_len, :kv_len] = seen
    tiles = whole.reshape(2, 2, -(-q_len // 16), 16, -(-kv_len // 16), 16)
    want = np.where(tiles.all((3, 5)), 2, np.where(tiles.any((3, 5)), 1, 0))
    assert made.exact
    np.testing.assert_array_equal(made.kinds(), want)
    np.testing.assert_array_equal(other.kinds().swapaxes(2, 3), want)
    found, read = made.transposed.spans, want.swapaxes(2, 3) > 0
    for b, h, row in np.ndindex(2, 2, read.shape[2]):
        runs = found.bounds[found.slice_of[b, h], row, : found.count[found.slice_of[b, h], row]]
        assert [n for lo, _, _, hi in runs for n in range(lo, hi)] == list(np.flatnonzero(read[b, h, row]))


def test_documents_that_return_are_exact():
    """Minima and maxima of 512 tiles of 37 documents overlap almost everywhere: the budget ended there."""
    length = 1 << 15
    doc = np.repeat(np.random.default_rng(0).permutation(length // 64) % 37, 64)
    made = fk.mask("same(doc)", doc=doc).layout(length, length)
    assert made.exact
    held = np.zeros((length // 128, 37), int)
    np.add.at(held, (np.arange(length) // 128, doc), 1)
    assert made.counts.empty == int((held @ held.T == 0).sum())


def test_tokens_that_see_their_image_are_exact():
    """All tokens of text have the same entry, which the mask leaves out; what is left of the diagonal is causal."""
    length = 1 << 15
    kind = np.repeat(np.where(np.arange(length // 64) % 3 == 1, 1 + np.arange(length // 64), 0), 64)
    made = fk.mask("causal | same(kind) & kind[q] > 0", kind=kind).layout(length, length)
    assert made.exact
    tiles = length // 128
    assert made.counts.empty == tiles * (tiles - 1) // 2
    assert made.counts.partial == tiles


def test_keys_with_an_entry_that_returns_are_seen():
    """Queries that met a condition had one run of their entry, and keys of another run of it were hidden."""
    mark, doc = np.arange(8) < 2, np.array([0, 1, 1, 0, 2, 2, 1, 3])
    for text in ("mark[q] & doc[q] == doc[k]", "causal | same(doc) & mark[q]"):
        mask = fk.mask(text, mark=mark, doc=doc)
        np.testing.assert_array_equal(mask.layout(8, 8, block=1).kinds()[0, 0] > 0, mask.dense(8, 8)[0, 0])


def test_a_condition_without_values_is_left_out():
    text, t = "causal | same(t) & q * 9223372036854775807 > 3", np.repeat(np.random.default_rng(0).permutation(40), 5)
    assert analysis_table.common_ids(fk.mask(text, t=t).expr, {"t": t}, GRID, lambda condition, env: None)
    with pytest.raises(fk.EvaluationError, match="64 bits"):  # of an element, as without sets
        fk.mask(text, t=t).layout(200, 200, block=16)


def test_tables_of_many_entries_are_left_alone(monkeypatch):
    length = 2000
    table = np.random.default_rng(0).permutation(length)
    want = fk.mask("t[q] == t[k]", t=table).layout(length, length, block=16).kinds()
    assert (want.sum(axis=(2, 3)) > 0).all()
    monkeypatch.setattr(analysis_table, "BYTES", 0)
    np.testing.assert_array_equal(fk.mask("t[q] == t[k]", t=table).layout(length, length, block=16).kinds(), want)


def test_boxes_share_an_id_where_their_entries_do():
    rng = np.random.default_rng(0)
    tables = {"t": rng.integers(0, 400, 85), "u": rng.integers(0, 400, 101)}
    zero = np.zeros(1, np.int64)
    grid = Grid(85, 101, (8, 8), zero, zero, zero, zero)
    (clause,) = analysis_table.common_ids(
        fk.mask("t[q] == u[k]", **tables).expr, tables, grid, lambda condition, env: None
    )
    assert clause.rest is None
    runs = [[(a, b) for b in range(n + 1) for a in range(b)] for n in (grid.rows, grid.columns)]
    boxes = np.array([(0, *rows, *columns) for rows in runs[0] for columns in runs[1]]).T
    held = [{n: set(x[8 * n[0] : 8 * n[1]]) for n in run} for run, x in zip(runs, tables.values(), strict=True)]
    want = [bool(held[0][r0, r1] & held[1][c0, c1]) for _, r0, r1, c0, c1 in boxes.T]
    assert 0 < sum(want) < len(want)
    np.testing.assert_array_equal(clause.shared(boxes), want)
