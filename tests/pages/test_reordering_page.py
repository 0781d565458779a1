"""The table of docs/reordering.md is what the library's masks give."""

import pytest
from support.pages import script

OFTEN = ("natten2d(rows, cols, kernel_rows, kernel_cols)", "global_window(t, w)", "causal", "qk_sparse(kept_q, kept_k)")


def test_rows_of_the_table():
    made = script("reordering")
    page = made.PAGE.read_text(encoding="utf-8")
    found = made.orders(*OFTEN)
    assert len(found) == 3
    assert "causal" not in found
    for name, order in found.items():
        assert made.row(name, order) in page, "run `python docs/reordering.py`"


def test_rows_of_the_papers():
    made = script("reordering")
    page = made.PAGE.read_text(encoding="utf-8")
    for mask in ("natten2d(32, 128, 13, 13)", "natten3d(16, 16, 16, 7, 7, 7)", "sta2d(32, 128, 24, 48, 8, 16)"):
        assert made.of_paper(mask) in page, "run `python docs/reordering.py`"


@pytest.mark.parametrize(("axis", "groups"), [("32, 13", 1), ("60, 7, 2, 1, false", 2), ("61, 5, 3, 2, true", 3)])
def test_tiles_of_a_halo_are_counted_as_on_the_page(axis, groups):
    """Tiles of one query and one key are the visible pairs; tiles of a whole axis are its remainders."""
    made = script("reordering")
    size = int(axis.partition(",")[0])
    assert made.halo(axis, 1, 1) == made.fk.mask(f"natten1d({axis})").visible_pairs(size, size)
    assert made.halo(axis, size, size) == groups
    assert made.halo(axis, 4, 4) >= made.halo(axis, 1, 1) / 16


@pytest.mark.exhaustive
def test_reordering_page_is_up_to_date():
    made = script("reordering")
    text = made.PAGE.read_text(encoding="utf-8")
    assert made.page(text) == text, "run `python docs/reordering.py`"
