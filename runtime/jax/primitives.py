"""Attention as JAX sees it: one primitive for the forward, one for the backward, lowered by each platform's backend.

Only the platform that is lowered is traced. Between `..._p` and `..._shard_p` there is automatic sharding: the first
is what calls bind, the second what a device has of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax._src.config import _check_vma as check_vma
from jax._src.config import traceback_in_locations_limit as without_locations
from jax._src.dispatch import prim_requires_devices_during_lowering as requires_devices
from jax._src.mesh import get_concrete_mesh as concrete_mesh
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from frisket.dsl.errors import BackwardError, FrisketError
from frisket.grammar.memo import memo
from frisket.runtime.backends.registry import platform_of

from .sharding import partitioned
from .task import AXES, NOWHERE, Task
from .vmap import mapped

NO_HESSIAN = BackwardError(
    "a gradient of a gradient of attention is asked for; there are first derivatives, by jax.grad and jax.vjp\n"
    "  where no second ones are needed wrap the gradient in jax.lax.stop_gradient"
)


def bound(task: Task, *operands: Any) -> tuple[Any, ...]:
    """The results of a task under a trace."""
    backward = int(bool(task.wanted))
    found: tuple[Any, ...] = tuple((LOCAL if _no_devices() else WHOLE)[backward].bind(*operands, task=task))
    return found


def _no_devices() -> bool:
    """Whether there is a mesh without devices, or all of it is manual already: then nothing is split automatically."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    return len(mesh.manual_axes) == len(mesh.axis_names) or concrete_mesh().empty


# -- rules ------------------------------------------------------------------------------------------


def _abstract(*operands: Any, task: Task) -> list[Any]:
    like = operands[0]
    shaped = task.shaped(operands)
    if like.sharding.mesh.empty:
        return [like.update(shape=shape, dtype=dtype, weak_type=False) for shape, dtype in shaped]
    return [
        like.update(shape=shape, dtype=dtype, weak_type=False, sharding=_sharding(task, name, like, len(shape)))
        for name, (shape, dtype) in zip(task.results, shaped, strict=True)
    ]


def _sharding(task: Task, name: str, q: Any, rank: int) -> NamedSharding:
    """The sharding of results under a mesh of explicit axes: as the queries are split, by batch and heads."""
    depth, spec = task.depth("q"), q.sharding.spec
    own = dict(zip("bshd", spec[depth:], strict=True))
    spec_of: Any = PartitionSpec  # JAX leaves some of its functions untyped
    front = (None,) * (rank - len(AXES.get(name, ())))
    axes = [own.get("h" if a == "n" else a) if a in "bhn" else None for a in AXES.get(name, "")]
    return NamedSharding(q.sharding.mesh, spec_of(*front, *axes))


def _impl(*operands: Any, task: Task) -> tuple[Any, ...]:
    if not all(isinstance(x, jax.Array) for x in operands):  # numpy's, given to `jax.grad`, arrive as they are
        operands = tuple(map(jax.numpy.asarray, operands))
    if len(operands[0].sharding.device_set) > 1:
        found: tuple[Any, ...] = _on_devices(task)(*operands)
        return found
    return task.run(platform_of(operands[0]), False, *operands)


@memo(group="kernels")
def _on_devices(task: Task) -> Callable[..., Any]:
    """A task as a function of its own, which JAX compiles once."""
    return jax.jit(partial(bound, task))


def _refused(*_: Any, **__: Any) -> Any:
    raise NO_HESSIAN


def _lowered(split: bool, platform: str, ctx: Any, *values: Any, task: Task) -> Any:
    module = ctx.module_context
    exported = module.lowering_parameters.for_export
    devices = getattr(module.axis_context, "device_assignment", None) or ()
    run: Callable[..., Any] = partial(task.run, platform, exported)
    shared = split and not exported and len(devices) > 1
    if shared:
        ctx = _on_mesh(ctx)
        run = partitioned(task, LOCAL[bool(task.wanted)])
    else:
        ctx, run = _without_mesh(ctx, run)
    try:
        with without_locations(0):  # kernels that are kept in a module as bytes would hold paths and lines of callers
            found = mlir.lower_fun(run, multiple_results=True)(ctx, *values)
    except FrisketError as error:
        error.add_note(task.said(ctx.avals_in, platform))
        raise
    if shared:
        _named(found[0].owner, task)
    return found


def _on_mesh(ctx: Any) -> Any:
    """JAX finds the mesh at the arguments of a jitted function: where none is split, it is that of `jax.set_mesh`."""
    module, mesh = ctx.module_context, jax.sharding.get_abstract_mesh()
    where = module.axis_context
    if mesh.empty or getattr(where, "abstract_mesh", mesh) is not None or mesh.size != len(where.device_assignment):
        return ctx
    return ctx.replace(module_context=module.replace(axis_context=replace(where, abstract_mesh=mesh)))


def _named(operation: Any, task: Task) -> None:
    """Name the work of each device in the module: caches of what is compiled tell one mask from another by this."""
    name = f"{task.call.digest} {task.names} {task.wanted} {task.levels} {task.low}"
    kind = "mhlo.frontend_attributes"
    have = {a.name: a.attr for a in operation.attributes[kind]} if kind in operation.attributes else {}
    operation.attributes[kind] = mlir.ir.DictAttr.get({**have, "frisket": mlir.ir.StringAttr.get(name)})


def _without_mesh(ctx: Any, run: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Executors know nothing of axes, explicit ones or those of shard_map: what they do is a device's own."""
    if jax.sharding.get_abstract_mesh().empty:
        return ctx, run

    def plain(*operands: Any) -> Any:
        with jax.sharding.use_abstract_mesh(NOWHERE), check_vma(False):  # Pallas calls would want to be told them
            return run(*operands)

    return ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]), plain


def _primitive(name: str, split: bool) -> Any:
    made: Any = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(_abstract)
    made.def_impl(_impl)
    ad.primitive_jvps[made] = _refused
    for platform in ("cpu", "tpu", "cuda", "rocm"):
        mlir.register_lowering(made, partial(_lowered, split, platform), platform=platform)
    mlir.register_lowering(made, partial(_lowered, split, "another platform"))
    return made


WHOLE: tuple[Any, Any] = _primitive("frisket_forward", True), _primitive("frisket_backward", True)
LOCAL: tuple[Any, Any] = _primitive("frisket_forward_shard", False), _primitive("frisket_backward_shard", False)


for _made in (*WHOLE, *LOCAL):
    batching.fancy_primitive_batchers[_made] = partial(mapped, _made)


requires_devices.update(WHOLE)  # JAX tells the rules of these which devices there are
