"""Runs a call on JAX arrays, with gradients: `attend` of `attend.py` checks it, `execute` runs it.

1. `prepared` takes the call apart: a `JaxCall` without arrays, the arrays that gradients flow to, and the others.
   A plan of the host keeps all three in `plan.calls` for later calls.
2. `_run`, of arrays with values on one device: `JaxCall.forward` calls the kernel at once.
3. `_run`, under a transform (jit, grad, vmap) or on several devices: a primitive holds the `JaxCall` in a `Task`
   (`primitives.py`) and is differentiated (`derivatives.py`) and mapped as a whole. When JAX lowers it, `Task.run`
   asks for the platform's backend (`attend.py`) and calls the forward or the backward of the `JaxCall`.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any

import jax
from jax import lax

from frisket.dsl.errors import BackendError
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import differentiable_names
from frisket.lowering.kernels.features import missing
from frisket.lowering.plan import KV_INPUTS, RATE, SEED, Geometry, LoopPlan
from frisket.lowering.xla.promotion import usual_promotion
from frisket.lowering.xla.tiles import varying_axes
from frisket.runtime.backends.base import RECORDS, Shapes
from frisket.runtime.backends.registry import platform_of, target_on
from frisket.runtime.backends.stages import compiled, record
from frisket.runtime.calls.arrays import turn
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.cpp_build import kernel_step
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.device import CheckedCall

from .attend import quickest
from .call import Arrays, JaxCall, narrowed
from .derivatives import Task, bound

ANY = (128, 128)  # a tile, where only what all have in common is asked for


def execute(call: CheckedCall, att: Any) -> tuple[Any, Any, Any]:
    """(out, lse, top) of a checked call."""
    # reset: `record` reads what this call sets, "built" or "loaded", and nothing of the call before
    began, _, options = perf_counter(), kernel_step.set(""), att.options
    if Settings.read().show:
        compiled(call, options)
    if call.top and "max" in (lacks := RECORDS[call.backend].features):
        raise BackendError(missing(lacks, needed=["max"], name=call.backend))
    plan, (q, k, v) = call.plan, call.arrays.transposed("bshd")
    named = _named(call, options)
    g = call.geometry
    kind: tuple[Any, ...] = g.kv_heads, g.head_dim, g.v_dim, g.scale, g.kv_dtype, named, options.tile, options.rows
    kind += call.arrays.dtype, options.tuning.invariant
    keeps = not plan.on_device and not call.rate  # a seed and tables of a device are others at the next call
    known = plan.calls.get(kind) if keeps else None
    if new := known is None:
        known = prepared(call, options)
        if keeps:
            plan.calls[kind] = known
    inner, learned, fixed = known
    arrays = {"q": q, "k": k, "v": v} | ({} if call.sinks is None else {"sinks": call.sinks})
    out, lse, top = _run(inner, arrays | learned, {**fixed, **call.kv_inputs}, plan)
    if new:
        record(att, call, began, call.backend)
    return turn(out, "bshd", call.arrays.layout), lse, top


def _named(call: CheckedCall, options: Options) -> str:
    """The backend that is asked for, empty where the platform chooses."""
    return call.backend if options.backend or Settings.read().backend else ""


def prepared(call: CheckedCall, options: Options) -> tuple[JaxCall, Arrays, Arrays]:
    """A call without its arrays, and its arrays besides q, k, v and sinks, with gradients and without: `bound` of
    `primitives` takes all three."""
    plan: Any = call.plan
    named = _named(call, options)
    numbers: dict[str, Any] = {"drawn": {SEED: call.seed, RATE: call.rate} if call.rate else {}}
    if not plan.on_device:
        tiled = plan.work(ANY)
        shapes = {n: tuple(x.shape) for n, x in tiled.tables.items()} | _shapes(tiled.plan, call)
        return _divided(tiled.plan, plan, call.geometry, numbers, shapes, named, options)
    kernel, planner, spans = plan.static.plan, plan.static.planner, dict(plan.spans_by_tile)
    tables = plan.tables()
    known = [t for t in kernel.every_table if t.source not in KV_INPUTS]
    tables = {t.name: narrowed(t.source, t.type is FLOAT, tables[t.name], kernel.int64) for t in known}
    shapes = {n: tuple(x.shape) for n, x in tables.items()} | _shapes(kernel, call)
    if planner is not None:
        inputs = (*planner.tables, *planner.scalars)
        numbers["given"] = {n: x for n, x in plan.device_values.items() if n in inputs}
        of = kernel, call.geometry, call.arrays.dtype
        fixed = named or options.tile or options.tuning.invariant
        chosen = call.backend if fixed else quickest(call.backend, *of, shapes, plan.narrow)
        target = target_on(chosen, *of, options.tile, plan.narrow, options.tuning.invariant)
        block = target.block_q, target.block_k  # of the forward here; gradients with another tile plan again
        rows: Any = plan.rows(block)
        spans[block, False] = rows.bounds, rows.count, rows.overflow, rows.order
    numbers |= {"slots": plan.slots(), "tables": tables, "spans": spans}
    return _divided(kernel, plan.key, call.geometry, numbers, shapes, named, options)


def _shapes(plan: LoopPlan, call: CheckedCall) -> dict[str, tuple[int, ...]]:
    return {t.name: tuple(call.kv_inputs[t.source].shape) for t in plan.tables if t.source in call.kv_inputs}


def _divided(
    plan: LoopPlan, source: Any, geometry: Geometry, numbers: Arrays, shapes: Shapes, backend: str, options: Options
) -> tuple[JaxCall, Arrays, Arrays]:
    """A call without arrays, the arrays that gradients flow to, and those they do not."""
    empty: Arrays = {kind: {} for kind in ("slots", "tables", "drawn", "spans", "given")}
    numbers = empty | numbers | {"origin": geometry.origin, "sizes": geometry.full}
    tree: Any
    leaves, tree = jax.tree.flatten(numbers)
    numbered = tree.unflatten(range(len(leaves)))
    flow = differentiable_names(plan)
    places = {n: i for kind in ("slots", "tables") for n, i in numbered[kind].items() if n in flow}
    inside = [isinstance(x, jax.Array) for x in leaves]
    learned = {n: leaves[i] for n, i in places.items() if inside[i]}
    fixed = {str(i): x for i, x in enumerate(leaves) if inside[i] and i not in places.values()}
    static = tuple(None if inside[i] else x for i, x in enumerate(leaves))
    bare = replace(geometry, origin=(0, 0, 0, 0), sizes=None)  # both are leaves: calls that differ in them share a text
    leaf_places = static, tree, places, tuple(shapes.items())
    call = JaxCall(
        plan, source, bare, backend, options.tile, *leaf_places, rows=options.rows, invariant=options.tuning.invariant
    )
    return call, learned, fixed


def _run(call: JaxCall, learned: Arrays, fixed: Arrays, source: Any) -> tuple[Any, Any, Any]:
    """Outside of JAX's transforms at once, on the platform where q is; a primitive otherwise."""
    q = learned["q"]
    traced = any(isinstance(x, jax.core.Tracer) for x in (*learned.values(), *fixed.values()))
    if not traced and len(q.sharding.device_set) == 1:
        platform = platform_of(q)
        backend = call.backend_on(platform, str(q.dtype))
        return call.forward(backend, platform, learned | fixed, source)
    learned, fixed = varying_alike(learned, fixed)
    arrays = {n: learned[n] for n in "qkv"} | learned | fixed
    with usual_promotion():
        return bound(Task(call, tuple(arrays)), *arrays.values())


def varying_alike(*groups: Arrays) -> tuple[Arrays, ...]:
    """Arrays under `jax.shard_map`, all varying over the same mesh axes, as the carry of a loop must be."""
    axes = {a for arrays in groups for x in arrays.values() for a in varying_axes(x)}

    def varying(x: Any) -> Any:
        missing = tuple(sorted(axes - {*varying_axes(x)}))
        return lax.pcast(x, missing, to="varying") if missing else x

    return tuple({n: varying(x) for n, x in arrays.items()} for arrays in groups)
