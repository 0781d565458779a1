"""Rows of an array of any framework, in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.runtime.backends.base import Lazy
from frisket.runtime.calls.arrays import framework_of

Index = NDArray[np.int64]
TAKES = {name: Lazy(f"frisket.runtime.{name}.take:take") for name in ("torch", "jax")}


def take(x: Any, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> Any:
    """`x` at `index` along an axis, with gradients; `inverse` undoes `index`. `scratch`: the result stays inside."""
    found = TAKES.get(framework_of(x) or "numpy")
    return np.take(x, index, axis=axis) if found is None else found(x, index, axis, inverse, scratch)
