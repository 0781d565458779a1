"""Orders of a grid of tokens behind others: text before an image or a video, a class token."""

from __future__ import annotations

import numpy as np
import pytest

import frisket as fk
from frisket.lowering.orders.candidates import candidates, starts

GRID, LENGTH = "natten2d(32, 32, 5, 5{})", 32 * 32
BLOCK = {"block": (32, 16), "moving": 0}


def behind(c: int | str) -> str:
    return f"{GRID.format(f', q = q - {c}, k = k - {c}')} & q >= {c} & k >= {c} | q < {c} | k < {c}"


@pytest.mark.parametrize("c", [13, 45])
def test_grid_behind_a_prefix_is_tiled_with_the_prefix_last(c):
    n = LENGTH + c
    found = fk.reorder(behind("c"), n, **BLOCK, c=c)
    assert f"positions below {c} last" in str(found.queries)
    assert found.positions[-c:].tolist() == list(range(c))
    assert found.by_table
    seen, p = fk.mask(behind(c)).dense(n, n)[0, 0], found.positions
    np.testing.assert_array_equal(found.moved.dense(n, n)[0, 0], seen[p][:, p])
    np.testing.assert_array_equal(found.undo(found.apply(np.arange(n), axis=0), axis=0), np.arange(n))


def test_prefix_of_text_costs_no_more_tiles_than_text_behind():
    last = f"{GRID.format('')} & q < {LENGTH} & k < {LENGTH} | q >= {LENGTH} | k >= {LENGTH}"
    after = fk.reorder(last, LENGTH + 13, **BLOCK).after.visited
    assert fk.reorder(behind(13), LENGTH + 13, **BLOCK).after.visited <= after


def test_orders_with_a_start_rank_and_list_the_same_positions():
    e, n = fk.mask(behind(7)).expr, LENGTH + 7
    assert starts(e) == {7}
    some = [one for one in candidates(e, {}, n) if one.start]
    assert some
    for one in some:
        places = one.places(n)
        np.testing.assert_array_equal(np.sort(places), np.arange(n))
        ranks = one.rank(places, n)
        assert (np.diff(ranks) >= 0).all()
        for p in (0, 6, 7, n - 1):
            start = one.rank(np.array([p]), n)[0] // 32 * 32
            want = places[(ranks >= start) & (ranks < start + 32)]
            np.testing.assert_array_equal(np.sort(one.tile_at(p, 32, n)), np.sort(want))


def test_starts_are_those_of_quotients_and_remainders():
    assert starts(fk.mask("(q - 3) // 4 == (k - 8) // 4 & (q + 2) % 3 == k % 3 & (q - k - 1) % 2 == 0").expr) == {3, 8}
    assert not starts(fk.mask("q - 3 >= k").expr)
