"""Gradients of tables read by distance and by position, on Triton: interpreted, and compiled."""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["captured_tables", "not captured_tables"])
def test_captured_gradients_pass_in_the_triton_interpreter(part):
    run(CHILDREN / "captured_interpreted.py", only=part, TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_captured_gradients_compile_for_hopper():
    run(CHILDREN / "captured_compiled.py", only="not slow")


@pytest.mark.slow
def test_compiled_for_every_machine():
    run(CHILDREN / "captured_compiled.py", only="slow")
