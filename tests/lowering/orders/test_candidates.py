"""Candidates by tables of coordinates: tiles are rectangles of images, one image after another."""

import numpy as np
import pytest

from frisket.dsl.program import parse_expression
from frisket.lowering.orders.candidates import candidates

SHAPES = (16, 32), (8, 64), (40, 24)
LENGTH = sum(rows * cols for rows, cols in SHAPES)
TABLES = {
    "img": np.concatenate([np.full(rows * cols, i) for i, (rows, cols) in enumerate(SHAPES)]),
    "row": np.concatenate([np.arange(rows * cols) // cols for rows, cols in SHAPES]),
    "col": np.concatenate([np.arange(rows * cols) % cols for rows, cols in SHAPES]) + 7,
}
NEAR = "img[q] == img[k] & abs(row[q] - row[k]) <= 4 & abs(col[q] - col[k]) <= 4"


def tiled(text, tables=TABLES, length=LENGTH):
    tables = {n: x for n, x in tables.items() if n in text}
    found = candidates(parse_expression(text, tables), tables, length)
    return [c for c in found if str(c).startswith("tiles of")]


@pytest.mark.parametrize("shuffled", [False, True])
def test_tiles_are_rectangles_of_one_image(shuffled):
    moved = np.random.default_rng(0).permutation(LENGTH) if shuffled else np.arange(LENGTH)
    tables = {n: x[moved] for n, x in TABLES.items()}
    (found,) = tiled(NEAR, tables)
    fast = "col x row" if shuffled and "col x row" in str(found) else "row x col"
    assert str(found) == f"tiles of 4 x 8, 8 x 8, 8 x 16 in {fast}, rising img"
    places = found.places(LENGTH)
    assert sorted(places.tolist()) == list(range(LENGTH))
    assert (np.diff(tables["img"][places]) >= 0).all()
    sides = {32: (4, 8), 64: (8, 8), 128: (8, 16)}
    for size in (32, 64, 128):  # the first two images are cut without a rest
        for tile in places[:1024].reshape(-1, size):
            spans = [int(np.ptp(tables[n][tile])) + 1 for n in fast.split(" x ")]
            assert tuple(spans) == sides[size]


def test_fewer_tables_and_longer_ones():
    (found,) = tiled("abs(row[q] - row[k]) <= 4 & abs(col[q] - col[k]) <= 4")
    assert "rising" not in str(found)
    assert tiled("img[q] == img[k] & abs(row[q] - row[k]) <= 4") == []
    assert tiled("img[q] == img[k] & row[q] <= 4 & col[k] <= 4") == []
    assert tiled(NEAR, length=LENGTH + 1) == []
    assert len(tiled(NEAR, length=LENGTH - 5)) == 1
