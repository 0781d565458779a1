"""Which cases of a test are in every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[str], *often: str) -> list[Any]:
    """The parameters of a test: `often` in every run, all other cases in `pytest -m matrix`."""
    names = list(cases)
    assert set(often) <= set(names), set(often) - set(names)
    return [n if n in often else pytest.param(n, marks=pytest.mark.matrix) for n in names]
