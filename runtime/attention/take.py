"""Rows of an array of any framework, in another order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.runtime.calls.arrays import framework_of


def take(x: Any, index: NDArray[np.int64], axis: int) -> Any:
    """`x` at `index` along an axis; gradients flow through."""
    if framework_of(x) == "torch":
        import torch

        return x.index_select(axis, torch.as_tensor(index, device=x.device))
    if framework_of(x) == "jax":
        from frisket.runtime.jax.take import take as take_of_jax

        return take_of_jax(x, index, axis)
    return np.take(x, index, axis=axis)
