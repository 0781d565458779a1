"""Tests of Triton in a process of their own: it interprets or compiles, from the import of triton on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*tests: Path | str, only: str = "", **env: str) -> None:
    """`pytest tests -k only`, with these variables alone deciding on the interpreter. A test that is named runs
    whatever its tier."""
    kept = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    pytest_here = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*pytest_here, *map(str, tests), "-k", only, *(("-m", "") if "::" in str(tests[0]) else ())],
        env={**kept, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
