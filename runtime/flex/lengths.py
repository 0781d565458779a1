"""Lengths, tile sizes and counts as people give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from frisket.dsl.errors import ShapeError


def pair(value: Any, name: str) -> tuple[int, int]:
    """Two positive lengths, from one or two."""
    found = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(found) != 2 or not all(map(is_count, found)):
        raise ShapeError(f"{name} is {value!r}\n  it is positive ints, (queries, keys), in tokens")
    return int(found[0]), int(found[1])


def is_count(n: Any) -> bool:
    """Whether n can count something. A size of an exported program is one: it becomes that number there."""
    return isinstance(n, int | np.integer | torch.SymInt) and not isinstance(n, bool) and bool(n > 0)
