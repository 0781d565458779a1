"""Rows of an array of any framework, in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.runtime.calls.arrays import framework_of

Index = NDArray[np.int64]


def take(x: Any, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> Any:
    """`x` at `index` along an axis; gradients flow through, by `inverse` where `index` has one. `scratch`: no user sees
    the array."""
    if framework_of(x) == "torch":
        from frisket.runtime.torch.take import take as take_of_torch

        return take_of_torch(x, index, axis, inverse, scratch)
    if framework_of(x) == "jax":
        from frisket.runtime.jax.take import take as take_of_jax

        return take_of_jax(x, index, axis, inverse)
    return np.take(x, index, axis=axis)
