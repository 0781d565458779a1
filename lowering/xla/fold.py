"""Folds captured gradients on JAX: sums over rows, columns, diagonals or heads, added where the table was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frisket.lowering.derive import Gradient, by_source
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Geometry

Array = Any  # a jax.Array, traced or not
Add = Callable[[tuple[Array, ...], Array, tuple[int, ...]], Array]  # of places, values and a shape


def folded(
    gradients: Sequence[Gradient], buffers: Sequence[Array], geometry: Geometry, slots: Mapping[str, Any],
    tables: Mapping[str, Array], *, int64: bool = False, add: Add | None = None,
) -> dict[str, Array]:  # fmt: skip
    """`derive.by_source` on JAX; `slots` and `tables` are those of the forward, by plan name; `int64` is the plan's.
    `add` is another sum by place, for devices where XLA's own adds in any order."""
    more = geometry, slots, tables, int64, add or in_order
    return by_source(gradients, buffers, tables, lambda g, x, shape: fold(g, x, shape, *more))


def fold(
    gradient: Gradient, buffer: Array, shape: Sequence[int], geometry: Geometry, slots: Mapping[str, Any],
    tables: Mapping[str, Array], int64: bool, add: Add,
) -> Array:  # fmt: skip
    """Sum `buffer` into an array of `shape`, the table's; 0-d for a slot."""
    import jax.numpy as jnp

    if not gradient.index:
        return buffer.sum()
    if gradient.over == "scatter":
        return buffer

    def along(start: Any, shape: tuple[int, ...]) -> Array:
        start = start if getattr(start, "ndim", 0) == 0 else jnp.asarray(start).reshape(-1, 1, 1)
        return jnp.arange(shape[0]).reshape(shape) + start

    env = {**gradient.coordinates(geometry, along), **slots}
    places = [evaluate(i, env, tables, int64=int64, float64=buffer.dtype == jnp.float64) for i in gradient.index]
    places = [jnp.clip(i, 0, n - 1) for i, n in zip(places, shape, strict=True)]
    if all(i.size == 1 for i in places):  # one entry: a scalar of an array
        return jnp.zeros(shape, buffer.dtype).at[tuple(i.reshape(()) for i in places)].add(buffer.sum())
    return add(tuple(jnp.broadcast_to(i, buffer.shape) for i in places), buffer, tuple(shape))


def in_order(places: tuple[Array, ...], values: Array, shape: tuple[int, ...]) -> Array:
    """Add `values` by place. XLA's scatter on a CPU adds in order, so that equal calls give equal bits."""
    import jax.numpy as jnp

    return jnp.zeros(shape, values.dtype).at[places].add(values)
