"""Gluon kernels compiled for Hopper, by a compiler that is not an interpreter."""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.parametrize(
    "only",
    ["test_selected and causal",
     pytest.param("not test_remaining and not (test_selected and causal)", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_selected_gluon_kernels_compile_for_hopper(only):
    run(CHILDREN / "kernels_compiled.py", only=only)


@pytest.mark.slow
def test_remaining_gluon_kernels_compile_for_hopper():
    run(CHILDREN / "kernels_compiled.py", only="test_remaining", PYTEST_ADDOPTS="-m slow")
