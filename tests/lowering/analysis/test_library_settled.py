"""No tile of a library mask is decided by looking at its elements, with reasons for those that are."""

from __future__ import annotations

import cases
import pytest
from support.tiers import thinned

FIRST_KEYS = "the first keys of a document are told by a table at each query"
REASONS = {
    "same_by_batch(t, start, m)": FIRST_KEYS,
    "document_by_batch(off, m)": FIRST_KEYS,
    "natten1d(size, n, dilation, stride, is_causal)": "visible keys lie a dilation apart, at the corner of a tile",
    "tiled_natten(rows, cols, kernel_rows, kernel_cols, q_tile_rows, q_tile_cols, k_tile_rows, k_tile_cols)": (
        "tiles of queries and of keys have different sides: a corner of one image tile in one tile of the layout"
    ),
}
WIDE = {  # past the budget at a million tokens: the border itself is a share of all tiles
    "random_keep(seed, p)": "every tile is partial, each on its own",
    "eviction(stop)": "every key stops being seen at a query of its own",
    "qk_sparse(kept_q, kept_k)": "queries and keys dropped at random in every tile",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(cases.masks(64)))
def test_at_four_thousand_tokens(name):
    case = cases.masks(4096)[name]
    if not case.fits:
        pytest.skip(case.data)
    made = case.mask.layout(**case.lengths)
    assert made.exact
    assert (made.analysis.settled > 0) == (name in REASONS), made.analysis


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.masks(64))
def test_at_a_million(name):
    case = cases.masks(1 << 20)[name]
    if not case.fits:
        pytest.skip(case.data)
    made = case.mask.layout(**case.lengths)
    assert made.exact == (name not in WIDE)
    assert made.analysis.settled == 0 or name in REASONS, made.analysis
