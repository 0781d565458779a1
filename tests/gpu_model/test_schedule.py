"""Schedules in the model: rows with known answers, and counts of tiles."""

import numpy as np
import pytest
from gpu_sim.full import Case
from gpu_sim.machine import H100
from gpu_sim.ours import KERNELS, Tile, chosen
from gpu_sim.report import GLOBAL
from gpu_sim.schedule import (
    SCHEDULES,
    Rows,
    counted,
    divided,
    in_order,
    longest_of_a_head,
    longest_of_all,
    ours_of,
    parts_of,
    persistent,
    split,
)

from frisket.runtime.backends.triton.grids import RowParts

FIXED = 1000.0


def rows(*tiles, groups=2, places=4):
    return Rows(FIXED + 1e6 * np.array(tiles, float), FIXED, groups, places, 0, H100)


def test_long_rows_of_all_heads_start_before_short_ones():
    x = rows(1, 1, 1, 1, 4, groups=2, places=4)  # 16 tiles on 4 places
    assert round(longest_of_all(x) / 1e6) == 4
    assert round(longest_of_a_head(x) / 1e6) == 5  # the second head's long row waits for places
    assert round(in_order(x) / 1e6) == 6


def test_rows_alike_have_one_time_in_any_order():
    x = rows(*[3] * 8)
    assert len({f(x) for f in (in_order, longest_of_a_head, longest_of_all, split)}) == 1


def test_a_persistent_grid_saves_the_start_of_a_block():
    """Four rows a place, so three starts."""
    x = rows(*[3] * 8)
    assert longest_of_a_head(x) - persistent(x) == 3 * H100.launch


def test_a_long_row_is_split_into_parts_of_the_mean():
    x = rows(12, 1, 1, 1, 1, groups=1, places=4)  # 16 tiles: 4 a place
    assert round(longest_of_all(x) / 1e6) == 12
    assert split(x) == pytest.approx(4e6 + 4 * FIXED + 3e-6 * H100.clock)  # and a launch that combines them


def test_a_launch_of_parts_takes_what_its_table_says():
    x = rows(12, 1, 1, 1, 1, groups=1, places=4)
    programs = np.array([[0, 0, 0, 4], [0, 1, 4, 8], [0, 2, 8, 12], *[[n, -1, 0, 1] for n in range(1, 5)]])[None]
    table = RowParts(programs, np.array([[[0, 0, 3]]]), np.zeros((1, 1)), 3, np.zeros((1, 1)))
    assert divided(x, table) == pytest.approx(4e6 + 4 * FIXED + 3e-6 * H100.clock)


# The parts of the long row of GLOBAL, 8,192 tokens in 16 heads, by the walked side of tiles whose own side is 64. With
# tiles of 64 x 64 a head has 128 rows: one of 128 tiles, 119 of 10, and two each of 6, 7, 8 and 9 at the ends, which
# are 1,378; the rows' first and last instructions count as 256 more. All heads have 16 * 1,634 = 26,144. Two programs
# run on each of 132 SMs at a time, and shares are a quarter of theirs: 26,144 / (4 * 264) = 24. A part has half of
# that, but 16 at least: 128 / 16 = 8 parts. With 64 x 32 a head has 256 + 119 * 20 + 2 * (12 + 14 + 16 + 18) = 2,756
# tiles, so a share is 16 * (2,756 + 256) / 1,056 = 45, a part 22, and 256 / 22 are 12 parts.
PARTS = {64: 8, 32: 12}


@pytest.mark.parametrize("kernel", KERNELS)
def test_long_rows_are_divided_as_launches_divide_them(kernel):
    case = Case(GLOBAL, length=8192)
    tile = chosen(ours_of(kernel, case))
    own, walked = (tile.block_k, tile.block_q) if kernel == "dkv" else (tile.block_q, tile.block_k)
    assert (own, tile.warps) == (64, 4)
    assert parts_of(kernel, case).rows[0].tolist() == [[0, 0, PARTS[walked]]]
    assert parts_of(kernel, Case("window 128", length=8192)) is None


def test_schedules_never_beat_the_mean_load():
    x = rows(*np.random.default_rng(0).integers(1, 50, 40), groups=3, places=7)
    mean = (x.all - H100.launch).sum() / x.places
    assert all(f(x) >= mean for f in SCHEDULES.values())


def test_packed_rows_have_fewer_queries():
    """A row of 16 queries of 8 heads ends with the tile of keys of its last query."""
    tile = Tile(128, 64, 8, 3)
    alone, together = (counted("forward", Case(length=2048), tile, n) for n in (1, 8))
    assert len(together.full) == 8 * len(alone.full)
    assert list((alone.border + alone.full)[:3]) == [2, 4, 6]
    assert list((together.border + together.full)[:9]) == [1] * 4 + [2] * 4 + [3]
