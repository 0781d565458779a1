"""The Triton kernel in Triton's interpreter.

A process is in one mode, interpreted or compiled, from the import of triton on: each half runs in its own.
test_triton_slice.py runs some of this in every run.
"""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["triton_cases", "not triton_cases"])
def test_triton_forward_passes_in_the_interpreter(part):
    run(CHILDREN / "forward_interpreted.py", only=part, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_interpreted_in_other_tiles():
    run(CHILDREN / "forward_interpreted.py", only="tensors", TRITON_INTERPRET="1", PYTEST_ADDOPTS="-m slow")


@pytest.mark.exhaustive
def test_interpreted_few_queries():
    run(CHILDREN / "decode_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_interpreted_latent_attention_is_right():
    run(CHILDREN / "latent_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_interpreted_stored_keys_and_values():
    run(CHILDREN / "stored_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_interpreted_bytes_of_few_queries():
    run(CHILDREN / "bytes_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_interpreted_score_mods():
    run(CHILDREN / "scores_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_interpreted_weights_equal_the_reference():
    run(CHILDREN / "weights_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_interpreted_large_scores():
    run(CHILDREN / "large_scores_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_triton_numerics_pass_in_the_interpreter():
    run(CHILDREN.parents[3] / "runtime/bench/test_numerics.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["gradient_cases", "not gradient_cases"])
def test_triton_backward_passes_in_the_interpreter(part):
    run(CHILDREN / "backward_interpreted.py", only=part, TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_triton_kernels_compile_without_a_gpu():
    run(CHILDREN / "kernels_compiled.py")


@pytest.mark.exhaustive
def test_triton_views_pass_in_the_interpreter():
    run(CHILDREN / "views_interpreted.py", TRITON_INTERPRET="1")
