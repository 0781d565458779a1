"""Counts and answers for every mask of the library, against its dense form."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from support.tiers import thinned

MASKS = {name: case for name, case in cases.masks(96).items() if case.fits}


@pytest.mark.parametrize("name", thinned(MASKS, 4))
def test_answers_about_library_masks_equal_the_dense_mask(name):
    case = MASKS[name]
    mask, lengths = case.mask, case.lengths
    seen = mask.dense(**lengths)
    made = mask.layout(**lengths, block=16)
    assert made.visible_pairs == mask.visible_pairs(**lengths) == seen.sum()
    np.testing.assert_array_equal(made.row_counts, seen.sum(axis=3))
    rows = mask.empty_rows(**lengths)
    assert rows.holds == (not seen.any(axis=3).all())
    if rows.witness is not None:
        assert not seen[rows.witness[:3]].any()
    ahead = mask.implies("causal", **lengths)
    future = seen & ~np.tri(*seen.shape[2:], dtype=bool)
    assert ahead.holds == (not future.any())
    assert ahead.holds or future[ahead.witness]
    assert all(one.proved for one in made.lookups)  # nothing in the library relies on clamping or wrapping
