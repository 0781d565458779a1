"""`pytest --part I/N`: parts of the tests, which together are all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = str(ROOT / "tests" / "conftest.py")


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "tests/dsl/test_bad_text.py"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.exhaustive
def test_parts_are_all_tests_once():
    first, second, every = (collected("--part", part) for part in ("1/2", "2/2", "1/1"))
    assert sorted(first + second) == sorted(every)
    assert min(len(first), len(second)) > len(every) // 3


@pytest.mark.parametrize("part", ["3/2", "half"])
def test_a_part_that_is_none(part, request):
    (options,) = (x for x in request.config.pluginmanager.get_plugins() if getattr(x, "__file__", "") == OPTIONS)
    config = SimpleNamespace(getoption=lambda name: part if name == "--part" else None)
    with pytest.raises(pytest.UsageError, match=f"--part {part}: it is I/N, the I-th of N parts, 1/2 or 2/2"):
        options.pytest_collection_modifyitems(config, [])
