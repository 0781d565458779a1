"""Gluon kernels compiled for Hopper and Blackwell, in a process that does not interpret; test_triton_slice.py compiles
two of them in every run."""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
def test_selected_gluon_kernels_compile_for_hopper():
    run(CHILDREN / "kernels_compiled.py", only="not test_remaining")


@pytest.mark.slow
def test_remaining_gluon_kernels_compile_for_hopper():
    run(CHILDREN / "kernels_compiled.py", only="test_remaining", PYTEST_ADDOPTS="-m slow")
