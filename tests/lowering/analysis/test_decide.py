"""The search for a visible position: rectangles are cut without loss."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frisket.lowering.analysis.decide import _halved

side = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)


@given(st.lists(st.tuples(side, side), min_size=1, max_size=4))
def test_a_cut_rectangle_is_all_there(boxes):
    cells, parts = np.zeros((41, 41), int), np.zeros((41, 41), int)
    for (q0, q1), (k0, k1) in boxes:
        cells[q0 : q1 + 1, k0 : k1 + 1] += 1
    made = _halved(np.array([[q0, q1, k0, k1] for (q0, q1), (k0, k1) in boxes]).T)
    for q0, q1, k0, k1 in made.T:
        assert q0 <= q1
        assert k0 <= k1
        parts[q0 : q1 + 1, k0 : k1 + 1] += 1
    np.testing.assert_array_equal(parts, cells)
    assert sorted(made[0].tolist()) == made[0].tolist()  # the earliest queries come first
