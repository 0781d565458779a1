"""Orders of the library's masks: the mask that moves is the mask, tiles are those of the permuted mask, words."""

import json
from pathlib import Path

import cases
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiers import default_only

import frisket as fk
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.kernels.cpp.tiles import tiles as tiles_of
from frisket.lowering.plan import Geometry
from frisket.runtime.attention import order as orders
from frisket.runtime.attention import ordered as cpu_time

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "reorder.json"
LENGTH = 64
ENTRIES = cases.masks(LENGTH)
BLOCK = (16, 8)


def permuted(mask, order, batch=1, heads=1):
    dense = mask.dense(order.q_len, order.kv_len, batch, heads)
    return dense[:, :, order.positions][..., order.kv_positions]


def tiles(dense, block):
    rows = [dense[:, :, i : i + block[0]].any(axis=2) for i in range(0, dense.shape[2], block[0])]
    return sum(row[..., j : j + block[1]].any() for row in rows for j in range(0, dense.shape[3], block[1]))


@pytest.mark.parametrize("name", ENTRIES)
def test_candidate_orders_permute_the_library_masks(name):
    case = ENTRIES[name]
    for queries, keys in orders._ways(case.mask, case.q_len, case.kv_len):
        made = orders.Order(case.mask, case.q_len, case.kv_len, queries, keys, BLOCK, None, None, 1.0)
        got = made.moved.dense(case.q_len, case.kv_len, case.batch, case.heads)
        assert np.array_equal(got, permuted(case.mask, made, case.batch, case.heads)), (queries, keys)


WANTED = {
    "causal & dilated(64, 4)": (256, "queries and keys: remainders by 4", 2.0),
    "causal & k % 4 == 0": (256, "keys: remainders by 4", 2.5),
    "(q - k) % 7 == 0": (250, "queries and keys: remainders by 7", 3.0),
    "natten2d(64, 64, 13, 13)": (4096, "queries and keys: tiles of 4 x 8, 8 x 8, 8 x 16 in a grid of 64 x 64", 1.3),
    "causal & same(doc)": (256, "queries and keys: rising doc", 4.0),
    "p[q] >= p[k]": (256, "queries and keys: rising p", 1.7),
    "keep[k]": (256, "queries and keys: rising keep", 5.0),
    "blocks[q // 8, k // 8]": (1024, "queries and keys: reverse Cuthill-McKee of blocks", 3.5),
    "img[q] == img[k] & abs(row[q] - row[k]) <= 4 & abs(col[q] - col[k]) <= 4": (
        3840,
        "queries and keys: tiles of 4 x 8, 8 x 8, 8 x 16 in row x col, rising img",
        1.5,
    ),
    "pairs[q, k]": (512, "queries and keys: reverse Cuthill-McKee of pairs", 5.0),
}


SHAPES = (16, 96), (13, 128), (40, 16)  # of images, one after another
IMAGES = {
    "img": np.concatenate([np.full(rows * cols, i) for i, (rows, cols) in enumerate(SHAPES)]),
    "row": np.concatenate([np.arange(rows * cols) // cols for rows, cols in SHAPES]),
    "col": np.concatenate([np.arange(rows * cols) % cols for rows, cols in SHAPES]),
}


def given_to(text, length):
    """The tables of a text: shuffled documents and numbers, a tenth of all keys, shuffled bands, and three images."""
    rng = np.random.default_rng(0)
    n = length // 8 if "blocks" in text else length
    band = abs(np.arange(n)[:, None] - np.arange(n)) <= n // 64
    shuffled = rng.permutation(n)
    made = {
        "doc": rng.permutation(np.arange(length) % 16), "p": rng.permutation(length), "keep": rng.random(length) < 0.1,
        **IMAGES, "blocks": band[shuffled][:, shuffled], "pairs": band[shuffled][:, shuffled],
    }  # fmt: skip
    return {name: table for name, table in made.items() if name in fk.mask(text).unbound}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", default_only(WANTED, *[x for x in WANTED if "img" not in x]))
def test_orders_that_pay(text):
    length, said, gain = WANTED[text]
    given = given_to(text, length)
    block = (64, 32) if any(n in text for n in ("natten", "blocks", "img")) else BLOCK
    found = fk.reorder(text, length, block=block, moving=0, **given)
    assert str(found).startswith(said + "\n")
    assert found.gain >= gain
    mask = fk.mask(text, **given)
    seen = tiles(mask.dense(length, length), block), tiles(permuted(mask, found), block)
    for counts, least in zip((found.before, found.after), seen, strict=True):  # some undecided tiles count
        assert least <= counts.visited <= 1.01 * least


def test_sorted_numbers_and_kept_keys():
    """Half of the tiles are empty where numbers rise, and most of them where keys that none sees are last."""
    rng, length = np.random.default_rng(0), 4096
    found = fk.reorder("p[q] >= p[k]", length, moving=0, p=rng.permutation(length))
    assert (found.before.visited, found.after.visited) == (2048, 1056)
    keep = rng.permutation(length) < 410
    found = fk.reorder("keep[k]", length, moving=0, keep=keep)
    assert (found.before.visited, found.after.visited) == (2048, 32 * -(-410 // 64))


def band_tiles(tiles, first, last, size, length):
    """The tiles of `size` keys between the first and the last key of each tile of queries, cut at both ends."""
    at = np.arange(tiles)
    return (np.minimum(last(at), length - 1) // size - np.maximum(first(at), 0) // size + 1).sum()


def neighbourhood(length, kernel, queries, keys):
    """Pairs of tiles along an axis that a window moved inside it visits."""

    def start(q):
        return np.clip(q - kernel // 2, 0, length - kernel)

    return band_tiles(
        length // queries, lambda i: start(i * queries), lambda i: start(i * queries + queries - 1) + kernel - 1,
        keys, length,
    )  # fmt: skip


MILLION = {  # tiles of 128 x 64 in order, by arithmetic
    "causal & dilated(1024, 4)": lambda: (
        4 * band_tiles(2**18 // 128, lambda i: 128 * i - 256, lambda i: 128 * i + 127, 64, 2**18)
    ),
    "natten2d(1024, 1024, 13, 13)": lambda: neighbourhood(1024, 13, 8, 8) * neighbourhood(1024, 13, 16, 8),
}


@pytest.mark.parametrize(
    "text", [t if "dilated" in t else pytest.param(t, marks=pytest.mark.exhaustive) for t in MILLION]
)
def test_a_million_tokens_have_a_formula(text):
    order = fk.reorder(text, 2**20, moving=0)
    assert not order.by_table
    assert order.after.visited == MILLION[text]()
    assert order.gain > 3
    assert not order.moved.tables


@pytest.mark.parametrize("text", ["causal", "causal & window(64)", "true", "causal & chunked(64)"])
def test_masks_that_stay(text):
    found = fk.reorder(text, 256, block=BLOCK)
    assert (found.queries, found.keys, found.gain, found.coordinates) == (None, None, 1.0, {})
    assert str(found).startswith("no order is cheaper: ")
    x = np.arange(256)
    assert found.apply(x, 0) is x
    assert np.array_equal(found.positions, x)


def test_reorder_weighs_the_cost_of_moving_rows():
    """Rows that take long to move are left where they are."""
    assert fk.reorder("causal & dilated(64, 4)", 256, block=BLOCK, moving=0).gain > 2
    assert fk.reorder("causal & dilated(64, 4)", 256, block=BLOCK, moving=1e6).queries is None


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, jnp.asarray])
def test_apply_and_undo(make):
    order = fk.reorder("causal & k % 4 == 0", 250, block=BLOCK, moving=0)
    x = make(np.arange(2 * 250 * 3).reshape(2, 250, 3))
    moved = order.apply(x, keys=True)
    assert type(moved) is type(x)
    assert np.array_equal(np.asarray(moved), np.asarray(x)[:, order.kv_positions])
    assert np.array_equal(np.asarray(order.undo(moved, 1, keys=True)), np.asarray(x))
    with pytest.raises(ShapeError, match=r"axis 0 is to have 250 places"):
        order.apply(x, 0, keys=True)


def test_pictures_before_and_after(tmp_path):
    pytest.importorskip("matplotlib")
    order = fk.reorder("causal & dilated(64, 4)", 256, block=BLOCK, moving=0)
    for name, mask, before in (("before", order.mask, True), ("after", order.moved, False)):
        order.plot(tmp_path / f"{name}.svg", before=before)
        mask.layout(256, 256, block=BLOCK).plot(tmp_path / "layout.svg")
        assert (tmp_path / f"{name}.svg").read_bytes() == (tmp_path / "layout.svg").read_bytes()
    assert (tmp_path / "before.svg").read_bytes() != (tmp_path / "after.svg").read_bytes()


@pytest.mark.parametrize("rounds", [orders.ROUNDS, ((1, 4, 1),), ((9, 999, 1),)])
def test_sampled_orders_permute_the_whole_mask(rounds, monkeypatch):
    """However few queries a candidate is judged by, the order that is found shows what the mask shows."""
    monkeypatch.setattr(orders, "ROUNDS", rounds)
    order = fk.reorder("causal & (q - k) % 7 == 0", 700, block=BLOCK, moving=0)
    assert order.gain > 3
    assert np.array_equal(order.moved.dense(700, 700), permuted(order.mask, order))


def test_lengths_of_queries_and_keys_may_differ():
    order = fk.reorder("k % 4 == q % 4", 64, 128, block=BLOCK, moving=0)
    mask = fk.mask("k % 4 == q % 4")
    assert order.gain > 2
    assert np.array_equal(order.moved.dense(64, 128), permuted(mask, order))


def test_random_tables_keep_their_order():
    blocks = np.random.default_rng(0).random((128, 128)) < 0.2
    found = fk.reorder("blocks[q // 8, k // 8]", 1024, block=(64, 32), moving=0, blocks=blocks)
    assert (found.queries, found.gain) == (None, 1.0)


def test_a_table_of_two_axes_is_in_the_order_of_its_mask():
    """Blocks stay blocks, so that kernels read one number per block, and layouts are as quick as before."""
    text, given = "causal & blocks[q // 8, k // 8]", given_to("blocks[q // 8, k // 8]", 512)
    order = fk.reorder(text, 512, block=BLOCK, moving=0, **given)
    assert "at_1[q // 8, k // 8]" in str(order.moved.expr)
    blocks = order.positions[::8] // 8, order.kv_positions[::8] // 8
    assert np.array_equal(order.moved.tables["at_1"], given["blocks"][np.ix_(*blocks)])


def test_a_parameter_without_a_value():
    with pytest.raises(ParameterError, match="`w` has no value"):
        fk.reorder("causal & dilated(64, w)", 256)


@pytest.mark.parametrize(("lengths", "block"), [((-5,), 64), ((64, -1), 64), ((64,), 0), ((64,), (64, 0))])
def test_lengths_and_tiles_that_make_no_sense(lengths, block):
    with pytest.raises(ShapeError):
        fk.reorder("causal & k % 4 == 0", *lengths, block=block)


def test_reorder_of_empty_sizes_changes_nothing():
    assert fk.reorder("causal & k % 4 == 0", 0).gain == 1
    assert fk.reorder("causal & k % 4 == 0", 64, 0).queries is None


def test_times_are_those_that_were_measured():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"]["costs"]["rows"]
    assert rows.keys() == cpu_time.TIMES.keys()
    for variant, row in rows.items():
        assert [round(x["ns"], 2) for x in row["figures"].values()] == [*cpu_time.TIMES[variant]]


@pytest.mark.parametrize(
    "text", ["causal", "full", "causal & k % 4 == 0", "natten2d(16, 32, 5, 5)", "(q - k) % 7 == 0"]
)
@pytest.mark.parametrize("length", [500, 512])
def test_work_of_a_call(text, length, monkeypatch):
    """Against the dense mask, cell by cell: every border tile is in the sample."""
    mask = fk.mask(text)
    seen = mask.dense(length, length)[0, 0]
    rows, columns = tiles_of(Geometry(1, 1, 1, length, length, 64, 64, 1.0), "float32", False)[0], cpu_time.KEYS
    full = border = scores = values = 0
    for i in range(0, length, rows):
        for j in range(0, length, columns):
            tile = seen[i : i + rows, j : j + columns]
            if tile.all() and tile.shape == (rows, columns):
                full += tile.size
            elif tile.any():
                border += 1
                for g in range(0, len(tile), 6):
                    keys = tile[g : g + 6].any(0)
                    values += 6 * keys.sum()
                    scores += 6 * 16 * sum(keys[c : c + 16].any() for c in range(0, len(keys), 16))
    monkeypatch.setattr(cpu_time, "SAMPLE", border + 1)
    np.testing.assert_allclose(cpu_time.work(mask, length, length), [full, border, scores, values], rtol=1e-9)
