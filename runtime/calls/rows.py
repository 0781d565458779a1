"""Rows: where the arrays of a call hold the queries and keys of an attention in another order; rows of any array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.runtime.backends.base import Lazy
from frisket.runtime.calls.arrays import framework_of


@dataclass(frozen=True, eq=False)
class Rows:
    """The row of q and of the results for each query, and that of k and v for each key.

    >>> rows = Rows(np.array([2, 0, 1], np.int32), np.array([1, 0], np.int32))
    >>> rows.back, rows.padded(2)[1]
    (array([1, 2, 0]), array([1, 0, 0, 0], dtype=int32))

    Executors that take `rows` read and write through them; around others, arrays are put in order and back.
    """

    queries: NDArray[np.int32]
    keys: NDArray[np.int32]

    @cached_property
    def back(self) -> NDArray[Any]:
        """The query of each row."""
        return np.argsort(self.queries)

    @cached_property
    def keys_back(self) -> NDArray[Any]:
        return np.argsort(self.keys)

    def padded(self, more: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`queries` and `keys` with the last row `more` times behind it: kernels fetch rows before they read them."""
        queries, keys = (np.pad(x, (0, more), mode="edge").astype(np.int32) for x in (self.queries, self.keys))
        return queries, keys


Index = NDArray[np.int64]
TAKES = {name: Lazy(f"frisket.runtime.{name}.take:take") for name in ("torch", "jax")}


def take(x: Any, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> Any:
    """`x` at `index` along an axis, with gradients; `inverse` undoes `index`. `scratch`: the result stays inside."""
    found = TAKES.get(framework_of(x) or "numpy")
    return np.take(x, index, axis=axis) if found is None else found(x, index, axis, inverse, scratch)
