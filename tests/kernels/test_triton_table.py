"""Registers, spills and shared memory of Triton's default tiles, by a compiler that is not an interpreter."""

import pytest
from kernels.test_triton_interpret import run


@pytest.mark.parametrize("part", ["test_some and sm_90", "test_some and not sm_90"])
def test_some(part):
    run("triton_table.py", part)


@pytest.mark.slow
def test_rest():
    run("triton_table.py", "test_rest", PYTEST_ADDOPTS="-m slow")
