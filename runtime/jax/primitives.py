"""Attention as JAX sees it: one primitive for the forward, one for the backward, one for tangents.

Each platform's backend lowers them, or JAX's own operators where that has no kernel of tangents. `derivatives.py` has
the rules by which they are differentiated.

Only the platform that is lowered is traced. Between `..._p` and `..._shard_p` there is automatic sharding: the first
is what calls bind, the second the part on a device.

Batch entries and heads go over the devices of a mesh without a gather, heads as far as groups that share keys stay
whole. Lengths, sizes of heads, tables and numbers are on every device.
Scales of stored keys go with the keys; of a pool of pages every device of a batch has all pages, for its heads.

`jax.vmap` puts instances into one call where the mask cannot tell, otherwise it takes them in turn.
`jax.vmap` of the executors themselves would run every row as often as the longest and gather every slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import _check_vma as check_vma
from jax._src.config import traceback_in_locations_limit as without_locations
from jax._src.dispatch import prim_requires_devices_during_lowering as requires_devices
from jax._src.mesh import get_concrete_mesh as concrete_mesh
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, NamedSharding

from frisket.dsl.errors import FrisketError
from frisket.grammar.memo import memo
from frisket.lowering.derive import norm_width
from frisket.lowering.plan import FIRST, K_SCALE, PAGES, V_SCALE
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import platform_of
from frisket.runtime.sharding.partition import fitting, names_of, spec_of

from .call import RESULTS, SHARD, JaxCall
from .differentiable import gradients, tangent, tangent_by_kernel

Level = tuple[int, tuple[bool, ...]]  # of jax.vmap: instances, and which operands have an axis for them
# the axes of arrays: batch, query, key, head, kv head, sizes of heads, page of a sequence
AXES = {"q": "bshd", "k": "btnd", "v": "btne", "sinks": "h", "out": "bshe", "dout": "bshe", "softmax_stats": "bhsr"}
AXES |= dict.fromkeys(("lse", "lse_residual", "top", "dlse"), "bhs")
AXES |= {K_SCALE: "btn", V_SCALE: "btn", PAGES: "bc", FIRST: "b"}
TANGENT = "tangent "  # before the name of an array
AXES |= {TANGENT + n: AXES[n] for n in ("q", "k", "v", "sinks")}
POOLS = {"k": "ptnd", "v": "ptne", K_SCALE: "ptn", V_SCALE: "ptn"}  # page of the pool, in place of batch
NOWHERE = AbstractMesh((), ())


@dataclass(frozen=True)
class Task:
    """The work of a primitive with operands of these names: the forward, the backward where there are `grad_names`, or
    the tangents of out and lse given those of `tangents`. `levels` of jax.vmap are axes in front, the outermost first.
    `lse_residual` asks for what a backward takes besides lse. `parted`: out and lse that a backward takes are of more
    keys than the call's."""

    call: JaxCall
    names: tuple[str, ...]
    grad_names: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()
    lse_residual: bool = False
    tangents: tuple[str, ...] = ()
    parted: bool = False

    def __repr__(self) -> str:
        return f"({self.call})" + (f" -> {', '.join(self.grad_names)}" if self.grad_names else "")

    @property
    def kind(self) -> int:
        """The place of its primitive in `WHOLE` and `LOCAL`."""
        return 2 if self.tangents else int(bool(self.grad_names))

    @property
    def results(self) -> tuple[str, ...]:
        if self.tangents:
            return RESULTS[:2]
        return self.grad_names or (RESULTS if self.lse_residual else RESULTS[:3])

    def axes(self, name: str) -> str:
        """The axes of an array, without the mapped ones in front; empty for others."""
        return (POOLS.get(name) if PAGES in self.names else None) or AXES.get(name, "")

    def depth(self, name: str) -> int:
        """How many axes in front an operand has."""
        at = self.names.index(name)
        return sum(batched[at] for _, batched in self.levels)

    def shaped(self, operands: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
        """(shape, dtype) of every result."""
        shapes = {n: (x.shape[self.depth(n) :], x.dtype) for n, x in zip(self.names, operands, strict=True)}
        (batch, q_len, heads, _), dtype = shapes["q"]
        rows = (batch, heads, q_len), np.dtype(np.float64 if dtype == np.float64 else np.float32)
        if not self.grad_names:
            v_dim = shapes["v"][0][3]
            shapes |= {"out": ((batch, q_len, heads, v_dim), dtype), "lse": rows, "top": rows, "lse_residual": rows}
            shapes["softmax_stats"] = (*rows[0], norm_width(dtype, v_dim)), rows[1]
        front = tuple(n for n, _ in self.levels)
        return [((*front, *shapes[n][0]), shapes[n][1]) for n in self.results]

    def run(self, platform: str, exported: bool, *operands: Any) -> tuple[Any, ...]:
        """Run the task on a platform, in instances in turn where they are mapped; native kernels map themselves."""
        names = frozenset(self.tangents or self.grad_names)
        backend = self.call.backend_on(platform, str(operands[0].dtype), exported, names)

        def one(*operands: Any) -> tuple[Any, ...]:
            arrays = dict(zip(self.names, operands, strict=True))
            if self.tangents:
                tangents = {n: arrays[TANGENT + n] for n in self.tangents}
                return tangent_by_kernel(self.call, backend, platform, arrays, tangents)
            if not self.grad_names:
                return self.call.forward(backend, platform, arrays, lse_residual=self.lse_residual)
            gradients = self.call.backward(backend, platform, arrays, frozenset(self.grad_names))
            return tuple(gradients[n] for n in self.grad_names)

        if self.tangents:  # kernels of tangents map themselves, and so do operators
            return self.mapped(one)(*operands)  # type: ignore[no-any-return]
        run: Callable[..., tuple[Any, ...]] = one
        for _, batched in reversed(self.levels):
            if RECORDS[backend].executors["jax"].maps:
                run = jax.vmap(run, tuple(0 if m else None for m in batched))
            else:
                run = partial(_in_turn, run, batched)
        return run(*operands)

    def differentiable(self, *operands: Any) -> tuple[Any, ...]:
        """The results of a backward or of tangents in JAX's own operators."""

        def one(*operands: Any) -> tuple[Any, ...]:
            arrays = dict(zip(self.names, operands, strict=True))
            if self.tangents:
                return tangent(self.call, arrays, {n: arrays[TANGENT + n] for n in self.tangents})
            return gradients(self.call, arrays, self.grad_names)

        return self.mapped(one)(*operands)  # type: ignore[no-any-return]

    def mapped(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the operands of one instance, for all instances."""
        for _, batched in reversed(self.levels):
            one = jax.vmap(one, tuple(0 if m else None for m in batched))
        return one

    def description(self, operands: Sequence[Any], platform: str) -> str:
        """A description of the call, for errors."""
        where = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in zip(self.names[:3], operands))
        return f"in attention under {self.call}\n  of {where}, lowered for {platform}"


def _in_turn(run: Callable[..., Any], batched: tuple[bool, ...], *operands: Any) -> Any:
    some = [x for x, m in zip(operands, batched, strict=True) if m]

    def step(some: list[Any]) -> Any:
        rest = iter(some)
        return run(*(next(rest) if m else x for x, m in zip(operands, batched, strict=True)))

    return jax.lax.map(step, some)


UNSPLIT = ("s", "t", "d", "e", "g", "p", "c", "r")  # factors that are not split: lengths, sizes of heads, the heads of
# one group, pages, what is known of a row


_split: Any = custom_partitioning  # JAX leaves some of its functions untyped, and types others too narrowly
_psum: Any = jax.lax.psum
_sharding_rule: Any = SdyShardingRule


def partitioned(task: Task, primitive: Any) -> Callable[..., Any]:
    """`task` on many devices, each of which binds `primitive`."""

    def run(*operands: Any) -> Any:
        return tuple(primitive.bind(*operands, task=task))

    partition = partial(_partition, task, primitive)
    split = _split(run)
    split.def_partition(partition, lambda *shapes: partition(*shapes)[2], sharding_rule=partial(_rule, task))
    return split  # type: ignore[no-any-return]


def _rule(task: Task, _: Any, operands: Any, results: Any) -> SdyShardingRule:
    """The axes that operands and results share: batch, kv heads, and mapped ones, by names."""
    g = task.call.geometry
    group = g.heads // g.kv_heads
    heads: Any = "n" if group == 1 else "g" if g.kv_heads == 1 else ("n", "g")
    alone: list[str] = []

    def axes(name: str, front: list[str], rank: int) -> tuple[Any, ...]:
        labels = [heads if a == "h" else a for a in task.axes(name)]
        for _ in range(rank - len(front) - len(labels)):
            alone.append(f"x{len(alone)}")
            labels.append(alone[-1])
        return (*front, *labels)

    mapped = [f"l{i}" for i in range(len(task.levels))]
    fronts = [[m for m, (_, batched) in zip(mapped, task.levels) if batched[i]] for i in range(len(task.names))]
    operand_axes = tuple(axes(n, front, len(x.shape)) for n, front, x in zip(task.names, fronts, operands, strict=True))
    result_axes = tuple(axes(n, mapped, len(x.shape)) for n, x in zip(task.results, results, strict=True))
    met = [f for array in (*operand_axes, *result_axes) for a in array for f in ([a] if isinstance(a, str) else a)]
    fixed = tuple(f for f in dict.fromkeys(met) if f in UNSPLIT or f in alone)  # in the order they are met in
    sizes = {"g": group} if heads == ("n", "g") else {}
    return _sharding_rule(operand_axes, result_axes, need_replication_factors=fixed, **sizes)  # type: ignore[no-any-return]


def _partition(task: Task, primitive: Any, mesh: Any, operands: Any, results: Any) -> Any:
    """(mesh, what a device does, shardings of results, of operands)."""
    g, depth = task.call.geometry, task.depth("q")
    spec = (*operands[0].sharding.spec, *[None] * len(operands[0].shape))
    batch = fitting(mesh.shape, spec[depth], g.batch)
    heads = fitting(mesh.shape, spec[depth + 2], g.kv_heads)
    where = {"b": batch, "h": heads, "n": heads}
    instances = [_instances(mesh, task, i, operands) for i in range(len(task.levels))]

    def sharding(name: str, front: list[Any], rank: int) -> NamedSharding:
        entries = [where.get(a) for a in task.axes(name)]
        return NamedSharding(mesh, spec_of(*front, *entries, *[None] * (rank - len(front) - len(entries))))

    fronts = [[x for x, (_, batched) in zip(instances, task.levels) if batched[i]] for i in range(len(task.names))]
    in_shardings = tuple(sharding(n, f, len(x.shape)) for n, f, x in zip(task.names, fronts, operands, strict=True))
    out_shardings = tuple(sharding(n, instances, len(x.shape)) for n, x in zip(task.results, results, strict=True))
    parts = _parts(mesh, batch), _parts(mesh, heads)
    pairs = zip(instances, task.levels, strict=True)
    levels = tuple((n // _parts(mesh, x), (*batched, False, False)) for x, (n, batched) in pairs)
    mine = replace(task, call=task.call.shard(*parts), names=(*task.names, *SHARD), levels=levels)

    def run(*operands: Any) -> tuple[Any, ...]:
        named = ((axes, names_of(axes)) for axes in (batch, heads))
        at = (jax.numpy.int32(0) if a is None else jax.lax.axis_index(n).astype("int32") for a, n in named)
        outputs = primitive.bind(*operands, *at, task=mine)
        summed = (*names_of(batch), *names_of(heads))
        named_outputs = zip(task.results, outputs, strict=True)
        return tuple(_psum(x, summed) if summed and n not in AXES else x for n, x in named_outputs)

    def alone(*operands: Any) -> tuple[Any, ...]:
        with jax.sharding.use_abstract_mesh(NOWHERE):  # a device knows nothing of explicit axes
            return run(*operands)

    return mesh, alone, out_shardings, in_shardings


def _parts(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[a] for a in names_of(axes))


def _instances(mesh: Any, task: Task, level: int, operands: Any) -> Any:
    """How a mapped axis is split: as that of the first operand that has it."""
    n, batched = task.levels[level]
    first = batched.index(True)
    at = sum(m[first] for _, m in task.levels[:level])
    spec = (*operands[first].sharding.spec, *[None] * len(operands[first].shape))
    return fitting(mesh.shape, spec[at], n)


def bound(task: Task, *operands: Any) -> tuple[Any, ...]:
    """The results of a task under a trace."""
    return tuple((LOCAL if _no_devices() else WHOLE)[task.kind].bind(*operands, task=task))


def _no_devices() -> bool:
    """Whether there is a mesh without devices, or all of it is manual already: then nothing is split automatically."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and (len(mesh.manual_axes) == len(mesh.axis_names) or concrete_mesh().empty)


# -- rules ------------------------------------------------------------------------------------------


def _abstract(*operands: Any, task: Task) -> list[Any]:
    like = operands[0]
    shaped = task.shaped(operands)
    if like.sharding.mesh.empty:
        return [like.update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in shaped]
    return [
        like.update(shape=shape, dtype=dtype, weak_type=False, sharding=_sharding(task, name, operands, len(shape)))
        for name, (shape, dtype) in zip(task.results, shaped, strict=True)
    ]


def _sharding(task: Task, name: str, operands: Any, rank: int) -> NamedSharding:
    """The sharding of results under a mesh of explicit axes: as the queries are split, by batch and heads, and by
    mapped axes as the operands that have these."""
    mesh, depth = operands[0].sharding.mesh, task.depth("q")
    query_axes = dict(zip("bshd", operands[0].sharding.spec[depth:], strict=True))
    front = [_instances(mesh, task, i, operands) for i in range(len(task.levels))]
    axes = [query_axes.get("h" if a == "n" else a) if a in "bhn" else None for a in AXES.get(name, "")]
    return NamedSharding(mesh, spec_of(*front, *axes, *[None] * (rank - len(front) - len(axes))))


def _impl(*operands: Any, task: Task) -> tuple[Any, ...]:
    if not all(isinstance(x, jax.Array) for x in operands):  # numpy's, given to `jax.grad`, arrive as they are
        operands = tuple(map(jax.numpy.asarray, operands))
    if task.tangents or len(operands[0].sharding.device_set) > 1:
        return _on_devices(task)(*operands)  # type: ignore[no-any-return]
    return task.run(platform_of(operands[0]), False, *operands)


@memo(group="kernels")
def _on_devices(task: Task) -> Callable[..., Any]:
    """A task as a separate function, which JAX compiles once."""
    return jax.jit(partial(bound, task))


def _lowered(split: bool, platform: str, ctx: Any, *values: Any, task: Task) -> Any:
    module = ctx.module_context
    exported = module.lowering_parameters.for_export
    devices = getattr(module.axis_context, "device_assignment", None) or ()
    run: Callable[..., Any] = partial(task.run, platform, exported)
    shared = split and not exported and len(devices) > 1
    if shared:
        ctx = _on_mesh(ctx)
        run = partitioned(task, LOCAL[task.kind])
    else:
        ctx, run = _without_mesh(ctx, run)
    try:
        with without_locations(0):  # kernels that are kept in a module as bytes would hold paths and lines of callers
            results = mlir.lower_fun(run, multiple_results=True)(ctx, *values)
    except FrisketError as error:
        error.add_note(task.description(ctx.avals_in, platform))
        raise
    if shared:
        _named(results[0].owner, task)
    return results


def _on_mesh(ctx: Any) -> Any:
    """JAX finds the mesh at the arguments of a jitted function: where none is split, it is that of `jax.set_mesh`."""
    module, mesh = ctx.module_context, jax.sharding.get_abstract_mesh()
    where = module.axis_context
    if mesh.empty or getattr(where, "abstract_mesh", mesh) is not None or mesh.size != len(where.device_assignment):
        return ctx
    return ctx.replace(module_context=module.replace(axis_context=replace(where, abstract_mesh=mesh)))


def _named(operation: Any, task: Task) -> None:
    """Name the work of each device in the module: caches of what is compiled tell one mask from another by this."""
    name = f"{task.call.digest} {task.names} {task.grad_names} {task.levels} {task.lse_residual}"
    name += f" {task.tangents}" if task.tangents else ""
    kind = "mhlo.frontend_attributes"
    have = {a.name: a.attr for a in operation.attributes[kind]} if kind in operation.attributes else {}
    operation.attributes[kind] = mlir.ir.DictAttr.get({**have, "frisket": mlir.ir.StringAttr.get(name)})


def _without_mesh(ctx: Any, run: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Executors know nothing of axes, explicit ones or those of shard_map: what they do is a device's own."""
    if jax.sharding.get_abstract_mesh().empty and all(a.sharding.mesh.empty for a in ctx.avals_in):
        return ctx, run

    def plain(*operands: Any) -> Any:
        with jax.sharding.use_abstract_mesh(NOWHERE), check_vma(False):  # Pallas calls would want to be told them
            return run(*operands)

    return ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]), plain


def _primitive(name: str, split: bool) -> Any:
    primitive: Any = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract)
    primitive.def_impl(_impl)
    for platform in ("cpu", "tpu", "cuda", "rocm"):
        mlir.register_lowering(primitive, partial(_lowered, split, platform), platform=platform)
    mlir.register_lowering(primitive, partial(_lowered, split, "another platform"))
    return primitive


NAMES = "frisket_forward", "frisket_backward", "frisket_tangent"
WHOLE: tuple[Any, ...] = tuple(_primitive(n, True) for n in NAMES)
LOCAL: tuple[Any, ...] = tuple(_primitive(f"{n}_shard", False) for n in NAMES)


# where instances go in one call: into the batch, or among the heads.
# not sinks, page tables and first positions: `_fold` leaves calls that map these to the instances in turn
FOLDED = {n: axes for n, axes in AXES.items() if len(axes) > 2}
FOLDS = dict.fromkeys(FOLDED, 0), {n: axes.index("h" if "h" in axes else "n") for n, axes in FOLDED.items()}


def mapped(primitive: Any, axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, task: Task) -> Any:
    """The batching rule of a primitive."""
    where = {n: d for n, d in zip(task.names, dims, strict=True) if isinstance(d, int)}
    n = axis.size
    if not where:  # tangents alone are mapped by jax.jacfwd, and the forward is not
        results = primitive.bind(*operands, task=task)
        return results, [None] * len(results)
    if n and (fold := _fold(task, where)) is not None:
        return _in_one_call(primitive, fold, n, operands, where, task)
    front = [jnp.moveaxis(x, where[name], 0) if name in where else x for name, x in zip(task.names, operands)]
    level = n, tuple(name in where for name in task.names)
    results = primitive.bind(*front, task=replace(task, levels=(level, *task.levels)))
    return results, [0] * len(results)


def _fold(task: Task, where: dict[str, int]) -> int | None:
    """The place of mapped instances: 0, the batch; 1, the heads; None: they run one after another."""
    call, names = task.call, set(task.names)
    foldable = where.keys() <= FOLDS[0].keys() and {*task.grad_names} <= {"q", "k", "v"}
    if task.levels or task.tangents or {PAGES, FIRST} & names or not foldable:
        return None
    whole = {"q", "k", "v"} <= where.keys()
    near = all(where[n] in (2, 3) for n in ("q", "k", "v") if n in where)  # no array is turned round
    shared = not task.grad_names and call.geometry.kv_heads == 1 and where.keys() == {"q"}  # heads of one group more
    if (whole or shared) and near and call.alike(1) and "sinks" not in names:
        return 1
    return 0 if whole and call.alike(0) else None


def _in_one_call(
    primitive: Any, axis: int, n: int, operands: Sequence[Any], where: dict[str, int], task: Task
) -> tuple[list[Any], list[int]]:
    """One call with the mapped axis in another one; arrays that are not mapped are repeated, but for shared keys."""
    places, shared = FOLDS[axis], not {"k", "v"} & where.keys()

    def joined(name: str, x: Any) -> Any:
        if name not in places or (shared and name in ("k", "v", K_SCALE, V_SCALE)):
            return x
        at = places[name]
        if name in where:
            x = jnp.moveaxis(x, where[name], at)
        else:
            x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], n, *x.shape[at:]))
        return x.reshape(*x.shape[:at], n * x.shape[at + 1], *x.shape[at + 2 :])

    call = task.call.repeated(n, axis, shared)
    results = primitive.bind(*map(joined, task.names, operands), task=replace(task, call=call))
    back = [places[name] for name in task.results]
    return [x.reshape(*x.shape[:at], n, -1, *x.shape[at + 1 :]) for x, at in zip(results, back, strict=True)], back


for _one in (*WHOLE, *LOCAL):
    batching.fancy_primitive_batchers[_one] = partial(mapped, _one)


requires_devices.update(WHOLE)  # JAX tells the rules of these which devices there are
