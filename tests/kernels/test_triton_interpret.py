"""The Triton kernel in Triton's interpreter.

A process is in one mode, interpreted or compiled, from the import of triton on: each half runs in its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(file: str, only: str, **env: str) -> None:
    kept = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    pytest_here = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*pytest_here, str(HERE / file), "-k", only],
        env={**kept, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, cwd=HERE.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("part", ["every_case", "tensors", "operators", "launch"])
def test_interpreted(part):
    run("triton_interpreted.py", part, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_interpreted_in_other_tiles():
    run("triton_interpreted.py", "tensors", TRITON_INTERPRET="1", PYTEST_ADDOPTS="-m slow")


EVERY = pytest.param("of_every_case", marks=pytest.mark.slow)


@pytest.mark.parametrize("part", ["parts and not of_every_case", "keys_and_values", EVERY])
def test_interpreted_few_queries(part):
    run("triton_interpreted_decode.py", part, TRITON_INTERPRET="1")


@pytest.mark.parametrize("part", ["every_case", "captured or wanted", "not every_case and not captured and not wanted"])
def test_interpreted_backward(part):
    run("triton_backward_interpreted.py", part, TRITON_INTERPRET="1")


@pytest.mark.parametrize("part", ["spill", "not spill"])
def test_compiled(part):
    run("triton_compiled.py", part)
