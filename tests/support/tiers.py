"""The tier of a case: in every run, or in `pytest -m exhaustive` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def default_only(cases: Iterable[str], *often: str) -> list[Any]:
    """The parameters of a test: `often` in every run, all other cases in `pytest -m exhaustive`."""
    names = list(cases)
    assert set(often) <= set(names), set(often) - set(names)
    return [n if n in often else pytest.param(n, marks=pytest.mark.exhaustive) for n in names]


def thinned(cases: Iterable[Any], step: int = 2) -> list[Any]:
    """The parameters of a test over a long list: every `step`-th in every run, from the first, the others in the
    exhaustive tier. A tuple is the values of several parameters."""
    rows = [pytest.param(*(x if isinstance(x, tuple) else (x,))) for x in cases]
    return [x if i % step == 0 else pytest.param(*x.values, marks=pytest.mark.exhaustive) for i, x in enumerate(rows)]
