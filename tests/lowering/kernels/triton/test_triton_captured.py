"""Gradients of tables read by distance and by position, on Triton: interpreted, and compiled."""

from pathlib import Path

import pytest
from support.triton.triton_process import run

HERE = Path(__file__).parent


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["every_table", "not every_table"])
def test_interpreted(part):
    run(HERE / "triton_captured_interpreted.py", only=part, TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_compiled():
    run(HERE / "triton_captured_compiled.py", only="not slow")


@pytest.mark.slow
def test_compiled_for_every_machine():
    run(HERE / "triton_captured_compiled.py", only="slow")
