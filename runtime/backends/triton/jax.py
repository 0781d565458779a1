"""Runs the Triton kernels on JAX arrays: those of torch, from the same plans and spans.

A call is a few custom calls of XLA, which jax-triton compiles for this machine's GPU, or for an H100 without one.

Gradients of captured tables and scalars come from the kernels' sums: by distance, by position, and from rows, columns
and heads to where a table was read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import LoweringError
from frisket.grammar.memo import memo
from frisket.lowering.aten.captured import BITS
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import cotangents as emit
from frisket.lowering.kernels.triton import decode as triton_decode
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.cotangents import Sum, sums, weights
from frisket.lowering.kernels.triton.writer import Dims, padded
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target
from frisket.lowering.xla.captured import folded as xla_folded

from . import grids as triton_grids
from . import tiles as triton_tiles
from .decode import INTERPRETED, NOTHING, shares
from .grids import backward_plan, forward_plan, of_backward, of_forward
from .jax_call import JaxTritonCall, architecture, gpu_here, interpreted, kernels_of, processors

if TYPE_CHECKING:
    import jax


Array = Any  # a jax.Array, traced or not
# These kernels replace Mosaic GPU's from SHORTEST queries on, where a query sees at most WINDOW keys (a window of 1024
# and half a tile) or there are at most KEYS keys.
SHORTEST, WINDOW, KEYS = 1024, 1088, 8192
GRID = 65_535  # the most programs that axes 1 and 2 of a grid have
TF32 = ("tensorfloat32", "high", "bfloat16", "bfloat16_3x")


def forward(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: jax.Array, k: jax.Array, v: jax.Array,
    slots: Mapping[str, Any], tables: Mapping[str, Any], target: Target, *, sinks: Any = None, platform: str = "cpu",
    lse_residual: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(out [batch, q_len, heads, v_dim], lse and top float32 [batch, heads, q_len]) from q [batch, q_len, heads, dim]
    and k, v [batch, kv_len, kv_heads, dim], as `lowering.xla.forward` has them, or where the plan has pages [pages,
    tokens of a page, kv_heads, dim]. With `lse_residual` a fourth array is the rounding error of lse.

    Anything that holds values may be traced; shapes are the host's. `spans` may be None where the plan has closed-form
    bounds. On the CPU the kernels run in Triton's interpreter; BackendError where that was not asked for.
    """
    import jax.numpy as jnp

    g = geometry
    dims = _fit(plan, g, str(q.dtype), str(k.dtype), tables)
    row = (g.batch, g.heads, g.q_len), np.float32
    results: dict[str, Any] = {"Out": ((g.batch, g.q_len, g.heads, g.v_dim), q.dtype), "Lse": row, "Top": row}
    results |= {"Low": row} if lse_residual else {}
    if 0 in (g.batch, g.q_len):
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in results.values())
    plan = forward_plan(plan, g)
    call = JaxTritonCall(plan, g, slots, tables, dims, platform)
    inputs = {"Q": q, "K": k, "V": v}
    last = {} if sinks is None else {"Sinks": jnp.asarray(sinks, np.float32)}
    few = shares(plan, None, g, target, dims, INTERPRETED if interpreted() else processors())
    if few is None:
        source = _forward(plan, target, dims, sinks=sinks is not None, top=True, low=lse_residual)
        outputs = call.run(
            source, "attention_forward", of_forward(g, target), target, inputs | last, results,
            None if spans is None else partial(spans.rows, (target.block_q, target.block_k)), pool=k.shape[0],
        )  # fmt: skip
        return tuple(outputs[n] for n in results)
    alone, decode_target = few.alone, few.target
    alike = replace(decode_target, splits=int(alone))
    flags = {"packs": few.pack > 1, "sinks": sinks is not None, "low": lse_residual, "balanced": few.balanced}
    source = _decode(plan, alike, dims, top=True, **flags)
    records = None if spans is None else partial(spans.rows, few.block)
    outputs = call.run(
        source, "attention_decode", few.grid(g), decode_target, inputs | last if alone else inputs,
        results if alone else few.results(g), records, splits=decode_target.splits, batches=g.batch, pool=k.shape[0],
    )  # fmt: skip
    if alone:
        return tuple(outputs[n] for n in results)
    numbers: dict[str, Any] = {**few.numbers(g)}
    grid, two = (g.q_len, g.heads, g.batch), replace(decode_target, num_warps=2)
    outputs = call.run(source, "attention_combine", grid, two, outputs | last, results, None, plan=NOTHING, **numbers)
    return tuple(outputs[n] for n in results)


def backward(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: jax.Array, k: jax.Array, v: jax.Array,
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None, slots: Mapping[str, Any],
    tables: Mapping[str, Any], target: Target, *, grad_names: frozenset[str], sinks: Any = None, platform: str = "cpu",
    lse_residual: jax.Array | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """The gradients of `grad_names`, as `lowering/xla/backward.py` has them. `lse` knows of the sinks, `lse_residual`
    is its rounding error. Equal calls give equal bits."""
    import jax.numpy as jnp

    g, arrays = geometry, {"q": q, "k": k, "v": v}
    dims = _fit(plan, g, str(q.dtype), str(k.dtype), tables)
    values = grad_names - arrays.keys()
    if 0 in (g.batch, g.q_len, g.kv_len):
        return {n: jnp.zeros_like(x) for n, x in arrays.items() if n in grad_names} | _zeros(values, tables)
    kernel_plan = backward_plan(plan, g)
    call = JaxTritonCall(kernel_plan, g, slots, tables, dims, platform)
    inputs = {"Q": q, "K": k, "V": v, "Out": out, "DOut": dout.astype(q.dtype), "Lse": lse.astype(np.float32)}
    inputs["Low"] = jnp.zeros_like(inputs["Lse"]) if lse_residual is None else lse_residual.astype(np.float32)
    if dlse is not None:
        inputs["DLse"] = dlse.astype(np.float32)
    source, totals = (
        _backward(kernel_plan, target, dims, grad_names, dlse=dlse is not None),
        sums(kernel_plan, grad_names),
    )
    names, dtypes = kernels_of(source), {n: x.dtype for n, x in arrays.items() if n in grad_names}
    results = _results(g, dtypes, totals, "attention_dv" in names)
    for step in of_backward(g, target, names):
        tile, plain = step.tile, None if step.side else triton_backward.bare(kernel_plan)
        records = partial(getattr(spans, step.side), (tile.block_q, tile.block_k)) if step.side and spans else None
        inputs |= call.run(source, step.name, step.grid, tile, inputs, results[step.name], records, plan=plain)
    grads = {n: inputs[f"D{n.upper()}"] for n in arrays if n in grad_names}
    if not values:
        return grads
    sums_of = {s.gradient: inputs[s.buffer] for s in totals}
    buffers: dict[Gradient, Array] = {s: x.sum(-1) if s.over == "head" else x for s, x in sums_of.items()}
    more = [x for x in backward_of(plan).gradients if x.source in grad_names and x.over in ("diagonal", "scatter")]
    buffers |= captured(call, spans, inputs, target, more)
    folds = folded(buffers, g, slots, tables, plan.int64)
    return grads | folds | _zeros(values - folds.keys(), tables)


def reason(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A reason why the kernels cannot run a call, or ""."""
    g = geometry
    try:
        Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype)
    except LoweringError as error:
        return str(error)
    for what, count, axis in (("heads", g.heads, 2), ("batch entries", g.batch, 0)):
        if count > GRID:
            return (
                f"a call of Triton's kernels has at most {GRID} {what}, this one {count}\n"
                f"  give it in parts of q, k and v along axis {axis}, with origin= and sizes= where the mask or score "
                "mod reads b or h"
            )
    for t in plan.every_table:
        if len(shape := shapes.get(t.name, (1,) * t.rank)) != t.rank or 0 in shape:
            return f"table `{t.source}` has {t.rank} axes of at least one entry, not shape {list(shape)}"
    return ""


def target(
    plan: LoopPlan, geometry: Geometry, dtype: str, tile: tuple[int, int] | None = None, narrow: bool = False
) -> Target:
    """The tiles of a call, for this machine's GPU; `narrow` says that rows see a few hundred keys at most."""
    if tile is not None:
        return _precise(triton_tiles.of_tile(tile, geometry, dtype, architecture()), dtype)
    chosen = triton_tiles.default_target(
        geometry, dtype, keys=_keys_seen(plan, narrow), curved=plan.score_class == "general",
        reads=triton_tiles.reads_of(plan.mask, plan.score), arch=architecture(),
        stored=geometry.kv_dtype != "" or plan.weight is not None or plan.pages is not None,
        paged=plan.pages is not None, unwritten=plan.unwritten, descriptors=False,  # jax-triton passes none
        limit=gpu_here()[2],
    )  # fmt: skip
    return _precise(chosen, dtype)


def _keys_seen(plan: LoopPlan, narrow: bool) -> float:
    """The keys that a query sees: as many as in a medium window where rows are narrow or no formula gives them."""
    if plan.mask is None:
        return math.inf
    literals = tuple((s.name, s.value) for s in plan.slots if s.value is not None)
    keys, _ = triton_tiles.keys_seen(plan.mask, literals)
    return min(keys, triton_tiles.MEDIUM) if narrow or plan.bounds is None else keys


def pays(plan: LoopPlan, g: Geometry, dtype: str, narrow: bool) -> bool:
    """Whether the forward is faster than Mosaic GPU's on Hopper at head size 64. On an H100 Mosaic's takes 1.12 to 1.16
    times as long under a window of 1024 keys, and under a causal mask 1.09 times at 2,048 tokens, 1.01 times at 8,192,
    and less time from 16,384 on. By the model of benchmarks/gpu_sim shorter windows and documents of 512 tokens gain
    more, because a program of Mosaic's takes thousands of cycles beside its tiles. At head size 128 Mosaic's is faster.
    Score mods, dropout, and calls without a mask have not been measured."""
    few = _keys_seen(plan, narrow) <= WINDOW or (plan.mask is not None and g.kv_len <= KEYS)
    short = few and g.q_len >= SHORTEST
    plain = plan.score is None and plan.keep_mask is None and not interpreted()
    return short and plain and max(padded(g.head_dim), padded(g.v_dim)) <= 64


def _precise(target: Target, dtype: str) -> Target:
    """Products of float32 exact, or in TF32 where `jax_default_matmul_precision` asks for no more than that; tanh of
    16-bit inputs exact where it is "highest"."""
    import jax

    precision = str(getattr(jax.config, "jax_default_matmul_precision"))  # noqa: B009 - mypy knows it not
    if dtype != "float32":
        return target if precision == "highest" else triton_tiles.with_tanh(target, architecture())
    return target.everywhere(precision="tf32") if precision in TF32 else target


# -- what kernels take and give -----------------------------------------------------------------------


def _fit(plan: LoopPlan, g: Geometry, dtype: str, keys: str, tables: Mapping[str, Any]) -> Dims:
    """The dimensions that the kernels' text takes from arrays; LoweringError where there are no such kernels."""
    if why := reason(plan, g, dtype, {n: np.shape(x) for n, x in tables.items()}):
        raise LoweringError(why)
    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, "" if keys == dtype else keys, by_length=True)


_forward, _decode, _backward = (memo(group="sources")(x.emit) for x in (triton_forward, triton_decode, triton_backward))


def _results(
    g: Geometry, dtypes: Mapping[str, Any], totals: Sequence[Sum], separate_dv: bool
) -> dict[str, dict[str, Any]]:
    """(shape, dtype) of what each kernel of a backward writes; `separate_dv`: values have one of their own."""
    rows, columns = ((g.batch, g.heads, n) for n in (g.q_len, g.kv_len))
    keys = g.batch, g.kv_len, g.kv_heads
    shapes = {"q": (g.batch, g.q_len, g.heads, g.head_dim), "k": (*keys, g.head_dim), "v": (*keys, g.v_dim)}
    arrays = {n: {f"D{n.upper()}": (shapes[n], dtype)} for n, dtype in dtypes.items()}
    along = {n: {s.buffer: (rows if n == "q" else columns, np.float32) for s in totals if s.along == n} for n in "qk"}
    return {
        "attention_delta": {"Stats": ((*rows, 4), np.float32)},
        "attention_dq": arrays.get("q", {}) | along["q"],
        "attention_dkv": arrays.get("k", {}) | ({} if separate_dv else arrays.get("v", {})) | along["k"],
        "attention_dv": arrays.get("v", {}),
    }


def _zeros(names: frozenset[str], tables: Mapping[str, Any]) -> dict[str, Array]:
    """Gradients of values without influence."""
    import jax.numpy as jnp

    return {n: jnp.zeros(np.shape(tables[n]) if n in tables else (), np.float32) for n in names}


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
    buffers: dict[Gradient, Array] = {}
    if by_distance := tuple(g for g in gradients if g.over == "diagonal"):
        buffers |= dict(zip(by_distance, _diagonals(call, run, tile, by_distance), strict=True))
    for g in gradients:
        if g.over == "scatter":
            buffers[g] = _scattered(call, run, tile, inputs, records, g)
    return buffers


def _diagonals(call: JaxTritonCall, run: Any, tile: Target, gradients: tuple[Gradient, ...]) -> list[Array]:
    import jax.numpy as jnp

    g, side, factors = call.geometry, tile.block_q, weights(gradients)
    grid = triton_grids.of_diagonals(g, side, len(factors))
    shape = g.batch, g.heads, len(factors), grid.parts, 2, grid.across, side
    sums = run(
        _diagonal(call.plan, tile, call.dims, gradients), "attention_diagonal",
        (grid.across * grid.parts, g.heads, g.batch), results={"Sums": (shape, np.float32)}, share=grid.share,
    )["Sums"].sum(3)  # fmt: skip
    low, high = sums[:, :, :, 0], sums[:, :, :, 1]  # diagonals c of a tile, and c - side: those of the next one up
    ends = [(0, 0)] * 3
    whole = jnp.pad(low, (*ends, (1, 0), (0, 0))) + jnp.pad(high, (*ends, (0, 1), (0, 0)))
    whole = whole.reshape(*whole.shape[:3], -1)
    first = triton_grids.tiles(g, side)[1] * side - g.kv_len + 1
    whole = whole[..., first : first + g.q_len + g.kv_len - 1]
    return [whole[:, :, factors.index(x.weight)] for x in gradients]


def _scattered(
    call: JaxTritonCall, run: Any, tile: Target, inputs: Mapping[str, Array], records: Any, gradient: Gradient
) -> Array:
    import jax
    from jax import lax

    g, table = call.geometry, call.tables[gradient.source].shape
    shared = triton_grids.plane(gradient, table, g, call.slots)
    if shared is not None:
        source = _plane(call.plan, tile, call.dims, gradient, shared)
        grid, into = triton_grids.of_plane(g, tile.block_q, shared), {"Into": (table, np.float32)}
        return run(source, "attention_plane", grid, results=into, zeroed=True, batches=g.batch)["Into"]
    rows = triton_grids.tiles(g, tile.block_q)[0]
    source, grid = _scatter(call.plan, tile, call.dims, gradient), (rows, g.heads, g.batch)
    total = run(source, "attention_total", grid, results={"Total": ((g.batch, g.heads, rows), np.float32)})["Total"]
    with jax.enable_x64(True):
        per = units(total.astype(np.float64).sum())
    counted = call.run(
        source, "attention_scatter", grid, tile, {**inputs, "PerUnit": per.reshape(1)},
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
        gradients = list(buffers)
        return xla_folded(gradients, [buffers[x] for x in gradients], geometry, slots, arrays, int64=int64, add=fixed)


# -- fixed point, as `lowering/aten/captured.py`; 64 bits are there whether or not JAX has them otherwise ------


def units(total: Array) -> Array:
    """How many units make 1, float32, from the sum of all magnitudes."""
    import jax.numpy as jnp

    _, exponent = jnp.frexp(total)
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
