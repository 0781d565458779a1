"""Captured gradients of the XLA backward: `dm * weight` of tiles in loops, summed where the table was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from frisket.lowering.derive import BITS, Gradient, by_source
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import KernelInputs

from .tiles import TileRow, XlaTiles, added

Array = Any  # a jax.Array, traced or not
LINES = ("head", "row")  # summed along a whole row of tiles before anything is written


Plane = tuple[tuple[str, int], ...]  # for each axis of a table the coordinate that indexes it, and the first entry


def plane_of(gradient: Gradient, inputs: KernelInputs, shape: tuple[int, ...]) -> Plane | None:
    """The layout of tiles in a table indexed by bare coordinates, as in bias[h, q, k], all inside it; else None."""
    geometry = inputs.geometry
    lengths = dict(zip("bhqk", (geometry.batch, geometry.heads, geometry.q_len, geometry.kv_len)))
    origin = dict(zip("bhqk", geometry.origin))
    axes: list[tuple[str, int]] = []
    for index, size in zip(gradient.index, shape, strict=True):
        name, shift = index.name if index.op == "var" else "", 0
        if index.op == "add" and [a.op for a in index.args] in (["var", "lit"], ["var", "param"]):
            name, by = index.args[0].name, index.args[1]
            shift = by.name if by.op == "lit" else inputs.slots[by.name]
        # traced places are not known to be inside
        if name not in lengths or name in dict(axes) or not all(isinstance(x, int) for x in (origin[name], shift)):
            return None
        first = origin[name] + shift
        # a clamped index would add several positions to one entry
        if not 0 <= first <= size - lengths[name]:
            return None
        axes.append((name, first))
    return tuple(axes)


class CapturedGradient:
    """The buffer of one gradient. Tiles are [batch, kv head, head of the group, query, key]."""

    def __init__(self, gradient: Gradient, t: XlaTiles, plane: Plane | None) -> None:
        self.gradient, self.over, self.t, self.plane = gradient, gradient.over, t, plane

    def buffer(self) -> Array:
        """A buffer of zeros; queries are padded to whole tiles."""
        t = self.t
        if self.plane is not None:
            sizes = t.tables[self.gradient.source].shape
            more = {"q": t.length - t.q_len}  # the last row of tiles reaches past the last query
            return t.full(tuple(n + more.get(name, 0) for n, (name, _) in zip(sizes, self.plane, strict=True)), 0.0)
        shape: tuple[int, ...] = {
            "head": (t.batch, t.heads),
            "row": (t.batch, t.heads, t.length),
            "column": (t.batch, t.heads, t.kv_len),
            "diagonal": (t.batch, t.heads, t.length + t.kv_len - 1),
            "scatter": t.tables[self.gradient.source].shape if self.gradient.index else (),
        }[self.over]
        return t.full(shape, 0.0)

    def whole(self, buffer: Array) -> Array:
        """The buffer without what lies beyond the last query."""
        if self.plane is not None:
            return buffer[tuple(slice(n) for n in self.t.tables[self.gradient.source].shape)]
        end = {"row": self.t.q_len, "diagonal": self.t.q_len + self.t.kv_len - 1}.get(self.over)
        return buffer if end is None else buffer[..., :end]

    # -- along a row of tiles --

    def start(self) -> Array | None:
        return self.t.full(self.t.part[: 3 if self.over == "head" else 4], 0.0) if self.over in LINES else None

    def line(self, part: Array | None, p: Array, dm: Array, env: dict[str, Array]) -> Array | None:
        if part is None:
            return None
        return part + self._terms(p, dm, env).sum((3, 4) if self.over == "head" else 4)

    def put(self, buffer: Array, part: Array | None, tile_row: TileRow) -> Array:
        """The buffer after a row of tiles is finished: sums along the row are added."""
        if part is None:
            return buffer
        if self.over == "row":
            return self.t.put_lines(buffer, part, tile_row)
        return added(buffer, part.reshape(part.shape[0], -1), (tile_row.b, tile_row.h))

    # -- tile by tile --

    def tile(self, buffer: Array, p: Array, dm: Array, env: dict[str, Array], tile_row: TileRow, start: Array) -> Array:
        """The buffer after a tile of keys that begins at `start` is added."""
        if self.over in LINES:
            return buffer
        terms = self._terms(p, dm, env)
        if self.plane is not None:
            return self._laid(buffer, terms, tile_row, start)
        if self.over == "scatter":
            return self._scattered(buffer, terms, env)
        width = terms.shape[4]
        if self.over == "column":
            tile, at = terms.sum(3), start
        else:
            flat = terms.reshape(-1, *terms.shape[3:])
            zeros = self.t.full((flat.shape[0], flat.shape[1] + width - 1), 0.0)
            tile, at = diagonals(flat, zeros), tile_row.start - start + self.t.kv_len - width
        return added(buffer, tile.reshape(terms.shape[0], -1, tile.shape[-1]), (tile_row.b, tile_row.h, at))

    def _terms(self, p: Array, dm: Array, env: dict[str, Array]) -> Array:
        import jax.numpy as jnp

        return jnp.where(p == 0, 0, dm * self.t.value(self.gradient.weight, env))  # 0 times an infinite weight is NaN

    def _laid(self, buffer: Array, terms: Array, tile_row: TileRow, start: Array) -> Array:
        """The buffer with a tile added at its place."""
        assert self.plane is not None
        names = [name for name, _ in self.plane]
        tile = terms.reshape(terms.shape[0], -1, *terms.shape[3:])
        tile = tile.sum(tuple(i for i, name in enumerate("bhqk") if name not in names))
        axes = [name for name in "bhqk" if name in names]
        tile = tile.transpose([axes.index(name) for name in names])
        starts = dict(zip("bhqk", (tile_row.b, tile_row.h, tile_row.start, start)))
        return added(buffer, tile, tuple(starts[name] + first for name, first in self.plane))

    def _scattered(self, buffer: Array, terms: Array, env: dict[str, Array]) -> Array:
        import jax.numpy as jnp

        if not self.gradient.index:
            return buffer + terms.sum()
        places = (self.t.value(i, env) for i in self.gradient.index)
        whole = tuple(
            jnp.broadcast_to(jnp.clip(i, 0, n - 1), terms.shape) for i, n in zip(places, buffer.shape, strict=True)
        )
        return buffer.at[whole].add(terms)


def diagonals(x: Array, zeros: Array) -> Array:
    """The sums along q - k of [n, rows, width], added to `zeros` [n, rows + width - 1]. Entry i is q - k = i - (width -
    1). Rows are added one by one, each one place further. XLA has no faster way: a skewed view takes ten times."""
    from jax import lax

    n, rows, width = x.shape

    def step(i: Array, sums: Array) -> Array:
        return added(sums, lax.dynamic_slice(x, (0, i, 0), (n, 1, width))[:, 0], (0, rows - 1 - i))

    return lax.fori_loop(0, rows, step, zeros)[:, ::-1]


Add = Callable[[tuple[Array, ...], Array, tuple[int, ...]], Array]  # of places, values and a shape


def folded(
    inputs: KernelInputs, gradients: Sequence[Gradient], buffers: Sequence[Array], int64: bool, add: Add | None = None
) -> dict[str, Array]:
    """`derive.by_source` on JAX; `int64` is the plan's. `add` is another sum by place, for devices where XLA's own adds
    in any order."""
    import jax.numpy as jnp

    tables = {t.name: jnp.asarray(inputs.tables[t.name]) for t in inputs.plan.tables}

    def along(start: Any, shape: tuple[int, ...]) -> Array:
        start = start if getattr(start, "ndim", 0) == 0 else jnp.asarray(start).reshape(-1, 1, 1)
        return jnp.arange(shape[0]).reshape(shape) + start

    def fold(gradient: Gradient, buffer: Array, shape: tuple[int, ...]) -> Array:
        """Sum `buffer` into an array of `shape`, the table's; 0-d for a slot."""
        if not gradient.index:
            return buffer.sum()
        if gradient.over == "scatter":
            return buffer
        env = {**gradient.coordinates(inputs.geometry, along), **inputs.slots}
        places = [evaluate(i, env, tables, int64=int64, float64=buffer.dtype == jnp.float64) for i in gradient.index]
        places = [jnp.clip(i, 0, n - 1) for i, n in zip(places, shape, strict=True)]
        if all(i.size == 1 for i in places):  # one entry: a scalar of an array
            return jnp.zeros(shape, buffer.dtype).at[tuple(i.reshape(()) for i in places)].add(buffer.sum())
        return (add or in_order)(tuple(jnp.broadcast_to(i, buffer.shape) for i in places), buffer, shape)

    return by_source(gradients, buffers, tables, fold)


def in_order(places: tuple[Array, ...], values: Array, shape: tuple[int, ...]) -> Array:
    """Add `values` by place. XLA's scatter on a CPU adds in order, so that equal calls give equal bits."""
    import jax.numpy as jnp

    return jnp.zeros(shape, values.dtype).at[places].add(values)


# -- fixed point, as `lowering/aten/captured.py`; 64 bits are there whether or not JAX has them otherwise ------------


def folded_in_fixed_point(inputs: KernelInputs, buffers: Mapping[Gradient, Array]) -> dict[str, Array]:
    """`folded` with sums by place in fixed point, for GPUs, where XLA's scatter adds in any order."""
    import jax
    import jax.numpy as jnp

    inputs = replace(inputs, tables={n: jnp.asarray(x) for n, x in inputs.tables.items()})
    with jax.enable_x64(True):
        return folded(inputs, list(buffers), list(buffers.values()), inputs.plan.int64, fixed)


def units(total: Array) -> Array:
    """How many units make 1, float32, from the sum of all magnitudes."""
    import jax.numpy as jnp

    _, exponent = jnp.frexp(total)
    # the exponents that float32 has without denormals, where a scale and its inverse are exact
    scale = jnp.ldexp(jnp.ones_like(total), jnp.clip(BITS - exponent, -126, 126))
    return jnp.where(jnp.isfinite(total), scale, np.nan).astype(np.float32)


def amounts(counted: Array, per: Array) -> Array:
    return (counted.astype(np.float64) / per.astype(np.float64)).astype(np.float32)


def fixed(places: tuple[Array, ...], values: Array, shape: tuple[int, ...]) -> Array:
    """`values` added up by place: integers have one sum in any order, and XLA's scatter on a GPU adds in any."""
    import jax.numpy as jnp

    values = values.astype(np.float64)
    per = units(jnp.abs(values).sum())
    counted = jnp.round(values * per.astype(np.float64)).astype(np.int64)
    return amounts(jnp.zeros(shape, np.int64).at[places].add(counted), per)
