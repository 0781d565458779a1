"""Triton's kernels with `invariant=True`, in its interpreter."""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


def test_tiles_and_products_of_triton_have_one_order():
    pytest.importorskip("triton")
    run(CHILDREN / "invariant_interpreted.py", TRITON_INTERPRET="1")
