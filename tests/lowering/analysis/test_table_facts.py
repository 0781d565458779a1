"""Facts of bound tables, and runs and ranks, against what a loop finds."""

from __future__ import annotations

import numpy as np
import pytest

from frisket.lowering.analysis.table import BEYOND, Table


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([0, 0, 1, 2, 2], "sorted, 3 runs, 0..2"),
        ([3, 1, 1, 2], "3 runs, 1..3"),
        ([0, 1, 0], "0..1"),
        ([2, 0, 1], "permutation, 0..2"),
        ([0, 1, 2], "sorted, permutation, 0..2"),
        ([0, 1, 1, 3], "sorted, 3 runs, 0..3"),
        ([5, 5], "constant, sorted, 1 run, 5..5"),
        ([True, False, True], "False..True"),
        ([0.5, np.nan], "2 runs, 0.5..0.5"),
        ([[0, 0, 1], [1, 1, 0]], "4 runs, 0..1"),
        ([[0, 1, 0], [1, 1, 0]], "0..1"),
    ],
)
def test_facts_as_text(entries, said):
    assert str(Table(np.array(entries)).facts) == said


def walked(row, at, end):
    """The run that holds a position, walked to; beyond the table every lookup is its first or last entry."""
    at, step = min(max(at, 0), len(row) - 1), -1 if end == "first" else 1
    while 0 <= at + step < len(row) and row[at + step] == row[at]:
        at += step
    return {0: -BEYOND if end == "first" else at, len(row) - 1: BEYOND if end == "last" else at}.get(at, at)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("end", ["first", "last"])
def test_runs_are_where_walking_ends(seed, end):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3, (3, rng.integers(1, 12)))
    at = np.arange(-2, rows.shape[1] + 3)
    for b, row in enumerate(rows):
        found = Table(rows).run(end, [np.array(b), at])
        assert found.tolist() == [walked(row, x, end) for x in at]
        assert Table(row).run(end, [at]).tolist() == found.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_the_positions_that_compare(seed):
    rng = np.random.default_rng(seed)
    entries = np.sort(rng.integers(-4, 9, rng.integers(1, 12)))
    table, reach = Table(entries), np.arange(-30, 50)
    for value in range(-6, 12):
        here = entries[np.clip(reach, 0, len(entries) - 1)]
        first, last = table.rank("first", np.array(value)), table.rank("last", np.array(value))
        assert ((reach >= first) == (here >= value)).all()
        assert ((reach <= last) == (here <= value)).all()


@pytest.mark.parametrize("offsets", [[0, 4, 9], [0, 9], [0, 3, 3, 7, 12], [2, 5, 8], [0, 0, 4, 4]])
def test_segments_are_what_lookups_say(offsets):
    reach = np.arange(-3, 20)
    inside = np.clip(np.searchsorted(offsets, reach, side="right") - 1, 0, len(offsets) - 2)
    table = Table(np.array(offsets))
    first, last = table.segment("first", reach), table.segment("last", reach)
    for i in range(len(reach)):
        assert ((inside == inside[i]) == ((reach >= first[i]) & (reach <= last[i]))).all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("kind", "of"), [("min", np.min), ("max", np.max)])
def test_extremes_of_boxes(seed, kind, of):
    """Extremes of aligned boxes are those that a loop finds; of others, those of a box that covers them."""
    rng = np.random.default_rng(seed)
    entries = rng.integers(0, 99, rng.integers(2, 40, 2 + seed % 2))
    sizes = 1 << rng.integers(0, 5, (entries.ndim, 30))
    start = (rng.integers(0, 40, sizes.shape) % np.array(entries.shape)[:, None]) // sizes * sizes
    for lows, highs, exact in ((start, start + sizes - 1, True), (start, start + sizes, False)):
        found = Table(entries).extreme(kind, list(lows), list(highs))
        for i in range(30):
            ends = [(a[i], min(z[i], n - 1)) for a, z, n in zip(lows, highs, entries.shape, strict=True)]
            want = of(entries[tuple(slice(a, z + 1) for a, z in ends)])
            assert found[i] == want if exact else (found[i] <= want if kind == "min" else found[i] >= want)
