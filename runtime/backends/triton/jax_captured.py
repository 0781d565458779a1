"""Gradients of captured tables and scalars on JAX arrays, from the Triton kernels' sums: by distance, by position, and
from rows, columns and heads to where a table was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from frisket.grammar.memo import memo
from frisket.lowering.aten.captured import BITS
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels.triton import captured as emit
from frisket.lowering.kernels.triton.cotangents import weights
from frisket.lowering.plan import Geometry, SpanSource, Target
from frisket.lowering.xla.captured import folded as xla_folded

from . import grids as triton_grids
from .jax_call import JaxTritonCall

Array = Any  # a jax.Array, traced or not
_diagonal, _plane = memo(group="sources")(emit.diagonal), memo(group="sources")(emit.plane)
_scatter = memo(group="sources")(partial(emit.scatter, fixed=True))


def captured(
    call: JaxTritonCall,
    spans: SpanSource | None,
    inputs: Mapping[str, Array],
    target: Target,
    gradients: Sequence[Gradient],
) -> dict[Gradient, Array]:
    """The buffers of gradients over "diagonal" and "scatter", as `derive.Gradient` describes them; `inputs` are arrays
    by the kernels' names, `Stats` as `attention_delta` writes it."""
    tile = emit.square(target)
    records = None if spans is None else partial(spans.rows, (tile.block_q, tile.block_k))
    run = partial(call.run, tile=tile, inputs=inputs, spans=records)
    found: dict[Gradient, Array] = {}
    if by_distance := tuple(g for g in gradients if g.over == "diagonal"):
        found |= dict(zip(by_distance, _diagonals(call, run, tile, by_distance), strict=True))
    for g in gradients:
        if g.over == "scatter":
            found[g] = _scattered(call, run, tile, inputs, records, g)
    return found


def _diagonals(call: JaxTritonCall, run: Any, tile: Target, gradients: tuple[Gradient, ...]) -> list[Array]:
    import jax.numpy as jnp

    g, side, made = call.geometry, tile.block_q, weights(gradients)
    own = triton_grids.of_diagonals(g, side, len(made))
    shape = g.batch, g.heads, len(made), own.parts, 2, own.across, side
    sums = run(
        _diagonal(call.plan, tile, call.dims, gradients), "attention_diagonal",
        (own.across * own.parts, g.heads, g.batch), results={"Sums": (shape, np.float32)}, share=own.share,
    )["Sums"].sum(3)  # fmt: skip
    low, high = sums[:, :, :, 0], sums[:, :, :, 1]  # diagonals c of a tile, and c - side: those of the next one up
    ends = [(0, 0)] * 3
    whole = jnp.pad(low, (*ends, (1, 0), (0, 0))) + jnp.pad(high, (*ends, (0, 1), (0, 0)))
    whole = whole.reshape(*whole.shape[:3], -1)
    first = triton_grids.tiles(g, side)[1] * side - g.kv_len + 1
    whole = whole[..., first : first + g.q_len + g.kv_len - 1]
    return [whole[:, :, made.index(x.weight)] for x in gradients]


def _scattered(
    call: JaxTritonCall, run: Any, tile: Target, given: Mapping[str, Array], records: Any, gradient: Gradient
) -> Array:
    import jax
    from jax import lax

    g, table = call.geometry, call.tables[gradient.source].shape
    shared = triton_grids.plane(gradient, table, g, call.slots)
    if shared is not None:
        source, grid = (
            _plane(call.plan, tile, call.dims, gradient, shared),
            triton_grids.of_plane(g, tile.block_q, shared),
        )
        into = {"Into": (table, np.float32)}
        return run(source, "attention_plane", grid, results=into, zeroed=True, batches=g.batch)["Into"]
    rows = triton_grids.tiles(g, tile.block_q)[0]
    source, grid = _scatter(call.plan, tile, call.dims, gradient), (rows, g.heads, g.batch)
    total = run(source, "attention_total", grid, results={"Total": ((g.batch, g.heads, rows), np.float32)})["Total"]
    with jax.enable_x64(True):
        per = units(total.astype(np.float64).sum())
    counted = call.run(
        source, "attention_scatter", grid, tile, {**given, "PerUnit": per.reshape(1)},
        {"Counted": ((*table, 2), np.int32)}, records, zeroed=True,
    )["Counted"]  # fmt: skip
    with jax.enable_x64(True):
        return amounts(lax.bitcast_convert_type(counted, np.int64), per)


def folded(
    buffers: Mapping[Gradient, Array], geometry: Geometry, slots: Mapping[str, Any], tables: Mapping[str, Any],
    int64: bool,
) -> dict[str, Array]:  # fmt: skip
    """The gradient of every table and slot, by its name in the plan; sums by place in fixed point."""
    import jax
    import jax.numpy as jnp

    arrays = {n: jnp.asarray(x) for n, x in tables.items()}
    with jax.enable_x64(True):
        made = list(buffers)
        return xla_folded(made, [buffers[x] for x in made], geometry, slots, arrays, int64=int64, add=fixed)


# -- fixed point, as `lowering/aten/captured.py`; 64 bits are there whether or not JAX has them otherwise ------


def units(total: Array) -> Array:
    """How many units make 1, float32, from the sum of all magnitudes."""
    import jax.numpy as jnp

    _, exponent = jnp.frexp(total)
    found = jnp.ldexp(jnp.ones_like(total), jnp.clip(BITS - exponent, -126, 126))
    return jnp.where(jnp.isfinite(total), found, np.nan).astype(np.float32)


def amounts(counted: Array, per: Array) -> Array:
    return (counted.astype(np.float64) / per.astype(np.float64)).astype(np.float32)


def fixed(places: tuple[Array, ...], values: Array, shape: tuple[int, ...]) -> Array:
    """`values` added up by place: integers have one sum in any order, and XLA's scatter on a GPU adds in any."""
    import jax.numpy as jnp

    values = values.astype(np.float64)
    per = units(jnp.abs(values).sum())
    counted = jnp.round(values * per.astype(np.float64)).astype(np.int64)
    return amounts(jnp.zeros(shape, np.int64).at[places].add(counted), per)
