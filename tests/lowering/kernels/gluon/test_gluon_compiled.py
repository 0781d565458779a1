"""Gluon kernels compiled for Hopper, by a compiler that is not an interpreter."""

from pathlib import Path

import pytest
from support.triton.triton_process import run

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "only",
    ["test_some and causal",
     pytest.param("not test_rest and not (test_some and causal)", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_some(only):
    run(HERE / "gluon_compiled.py", only=only)


@pytest.mark.slow
def test_rest():
    run(HERE / "gluon_compiled.py", only="test_rest", PYTEST_ADDOPTS="-m slow")
