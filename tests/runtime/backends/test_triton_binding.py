"""Triton as a backend of torch: in its interpreter, and up to the launch as on a GPU."""

from pathlib import Path

import pytest
from support.triton.triton_process import run

HERE = Path(__file__).parent


@pytest.mark.exhaustive
def test_triton_binding_passes_in_the_interpreter():
    run(HERE / "triton_binding_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_triton_binding_launches_without_a_gpu():
    run(HERE / "triton_binding_launched.py")


@pytest.mark.exhaustive
def test_serving_launched_into_nothing():
    run(HERE / "triton_serving_launched.py")


@pytest.mark.exhaustive
def test_triton_serving_kernels_compile_without_a_gpu():
    run(HERE / "triton_serving_compiled.py")
