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


def every_other(cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test over a long list: the first, the third and so on in every run, the others in the matrix.
    A tuple is the values of several parameters."""
    found = [pytest.param(*(x if isinstance(x, tuple) else (x,))) for x in cases]
    return [x if i % 2 == 0 else pytest.param(*x.values, marks=pytest.mark.matrix) for i, x in enumerate(found)]
