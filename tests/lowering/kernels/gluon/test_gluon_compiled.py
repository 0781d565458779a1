"""Gluon kernels compiled for Hopper, by a compiler that is not an interpreter."""

from pathlib import Path

import pytest
from support.triton.triton_process import run

HERE = Path(__file__).parent


def test_some():
    run(HERE / "gluon_compiled.py", only="not test_rest")


@pytest.mark.slow
def test_rest():
    run(HERE / "gluon_compiled.py", only="test_rest", PYTEST_ADDOPTS="-m slow")
