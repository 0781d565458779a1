"""The table of docs/reordering.md is what the library's masks give."""

import pytest
from support.scripts import script

OFTEN = ("natten2d(rows, cols, kernel_rows, kernel_cols)", "global_window(t, w)", "causal", "qk_sparse(kept_q, kept_k)")


def test_rows_of_the_table():
    made = script("reordering")
    page = made.PAGE.read_text(encoding="utf-8")
    found = made.orders(*OFTEN)
    assert len(found) == 3
    assert "causal" not in found
    for name, order in found.items():
        assert made.row(name, order) in page, "run `python docs/reordering.py`"


@pytest.mark.matrix
def test_the_page_is_what_the_script_writes():
    made = script("reordering")
    text = made.PAGE.read_text(encoding="utf-8")
    assert made.page(text) == text, "run `python docs/reordering.py`"
