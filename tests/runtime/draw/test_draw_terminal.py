"""The tile picture: counts from runs equal counts from tiles, and the text is what people see."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lowering import brute

from frisket.dsl.sugar import k, q
from frisket.runtime.draw import terminal


def from_kinds(kinds, cells=terminal.CELLS):
    """Count tiles per cell in a grid of kinds, uint8 [q_tiles, k_tiles]."""
    grid = np.asarray(kinds)
    steps = terminal._steps(grid.shape, cells)
    rows, columns = (np.arange(0, n, s) for n, s in zip(grid.shape, steps, strict=True))

    def count(kind):
        by_row = np.add.reduceat((grid == kind).astype(np.int64), rows, axis=0)
        return np.add.reduceat(by_row, columns, axis=1)

    return terminal.CellCounts(count(2), count(1), terminal._sizes(grid.shape, steps), steps)


def runs_of(kinds):
    row_ptr, found = [0], []
    for row in kinds:
        edges = np.flatnonzero(np.diff(row.astype(int), prepend=-1, append=-1))
        found += [(i, j, row[i]) for i, j in pairwise(edges) if row[i]]
        row_ptr.append(len(found))
    start, stop, kind = np.array(found, int).reshape(-1, 3).T
    return row_ptr, start, stop, kind


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32), st.integers(2, 12))
def test_runs_and_tiles_draw_the_same(rows, columns, seed, cells):
    kinds = np.random.default_rng(seed).choice([0, 0, 1, 2, 2], (rows, columns)).astype(np.uint8)
    a = from_kinds(kinds, cells)
    b = terminal.from_runs(*runs_of(kinds), columns, cells)
    assert a.step == b.step
    assert max(a.full.shape) <= cells
    for mine, other in ((a.full, b.full), (a.partial, b.partial), (a.total, b.total)):
        np.testing.assert_array_equal(mine, other)
    assert a.full.sum() == (kinds == 2).sum()
    assert a.partial.sum() == (kinds == 1).sum()
    assert a.total.sum() == kinds.size


def test_a_million_rows_cost_nothing_much():
    n = 1_000_000
    row = np.arange(n)
    grid = terminal.from_runs(np.arange(n + 1), np.maximum(row - 4, 0), row + 1, np.full(n, 2), n)
    assert grid.full.sum() == 5 * n - 10
    assert grid.full.shape == (32, 32)


CAUSAL_WINDOW = """\
queries ╲ keys
        0       256
      0 ▒▒· · · · · · ·
     64 ██▒▒· · · · · ·
    128 ▒▒██▒▒· · · · ·
    192 · ▒▒██▒▒· · · ·
    256 · · ▒▒██▒▒· · ·
    320 · · · ▒▒██▒▒· ·
    384 · · · · ▒▒██▒▒·
    448 · · · · · ▒▒▒▒▒▒
        █ full  ▒ partial  · empty  one cell 64 × 64 tokens
"""


def test_terminal_picture_of_a_window_is_as_listed():
    kinds = brute.kinds((q >= k) & (q - k < 128), 500, 500, block=(64, 64))[0, 0]
    text = terminal.picture(from_kinds(kinds), (64, 64)).plain
    assert text + "\n" == CAUSAL_WINDOW


def test_ascii_and_a_drawing_of_many_tiles():
    kinds = brute.kinds(q >= k, 256, 256, block=(8, 8))[0, 0]
    grid = from_kinds(kinds, cells=8)
    assert terminal.picture(grid, (8, 8), ink=terminal.ASCII).plain.splitlines() == [
        "queries \\ keys",
        "        0       128",
        "      0 ++. . . . . . .",
        "     32 ##++. . . . . .",
        "     64 ####++. . . . .",
        "     96 ######++. . . .",
        "    128 ########++. . .",
        "    160 ##########++. .",
        "    192 ############++.",
        "    224 ##############++",
        "        # full  %+- part, by share  . empty  one cell 32 x 32 tokens",
    ]


@pytest.mark.parametrize("shape", [(1, 400), (400, 1), (33, 31), (1000, 1000)])
def test_terminal_picture_fits_eighty_columns(shape):
    text = terminal.picture(from_kinds(np.ones(shape, np.uint8)), (128, 128)).plain
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (512, "512"),
        (65536, "65536"),
        (131072, "128k"),
        (1 << 20, "1M"),
        (3 << 19, "1.5M"),
        (3_000_000, "3M"),
        (1_234_567, "1.2M"),
    ],
)
def test_positions_stay_short(n, text):
    assert terminal.tokens(n) == text


def test_positions_of_one_axis_have_one_unit():
    assert [terminal.tokens(n, 200 * 1024) for n in (0, 16384, 131072)] == ["0", "16k", "128k"]
