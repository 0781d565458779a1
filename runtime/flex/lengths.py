"""Lengths, tile sizes and counts as people give them."""

from __future__ import annotations

from typing import Any

import torch

from frisket.dsl.errors import ShapeError
from frisket.runtime.machine.integers import as_int


def pair(value: Any, name: str, least: int = 1) -> tuple[int, int]:
    """(queries, keys) from one length or two, each at least `least`."""
    given = tuple(value) if isinstance(value, tuple | list) else (value, value)
    found = tuple([count_of(n) for n in given])
    if len(found) != 2 or not all(is_count(n, least) for n in found):
        what = "positive ints" if least else "ints, 0 or more"
        raise ShapeError(f"{name} is {value!r}\n  it is {what}, (queries, keys), in tokens")
    return int(found[0]), int(found[1])


def count_of(n: Any) -> Any:
    """The int that a numpy int or a tensor without axes stands for; anything else as it is."""
    return n if isinstance(n, int | torch.SymInt) else as_int(n)


def is_count(n: Any, least: int = 1) -> bool:
    """Whether n can count something. A size of an exported program is one: it becomes that number there."""
    return isinstance(n, int | torch.SymInt) and not isinstance(n, bool) and bool(n >= least)
