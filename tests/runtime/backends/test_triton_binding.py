"""Triton as a backend of torch: in its interpreter, and up to the launch as on a GPU."""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
def test_triton_binding_passes_in_the_interpreter():
    run(CHILDREN / "triton_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_triton_binding_launches_without_a_gpu():
    run(CHILDREN / "triton_launched.py")


@pytest.mark.exhaustive
def test_serving_launched_into_nothing():
    run(CHILDREN / "serving_launched.py")


@pytest.mark.exhaustive
def test_triton_serving_kernels_compile_without_a_gpu():
    run(CHILDREN / "serving_compiled.py")
