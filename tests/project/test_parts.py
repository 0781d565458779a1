"""`pytest --part I/N`: parts of the tests, which together are all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "tests/dsl/test_bad_text.py"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "::" in line], done.stderr


@pytest.mark.exhaustive
def test_parts_are_all_tests_once():
    first, second, every = (collected("--part", part)[0] for part in ("1/2", "2/2", "1/1"))
    assert sorted(first + second) == sorted(every)
    assert min(len(first), len(second)) > len(every) // 3


@pytest.mark.parametrize("part", ["3/2", "half"])
def test_a_part_that_is_none(part):
    assert f"--part {part}: it is I/N, the I-th of N parts, 1/2 or 2/2" in collected("--part", part)[1]
