"""The choice of a backend for a call of JAX, by the platform that the call is lowered for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.plan import Geometry, LoopPlan
from frisket.runtime.backends.base import RECORDS, Backend, backends_of, ranked
from frisket.runtime.backends.registry import library, lowerable, warn_slow
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.once import warn_once
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.host import Plan

Shapes = Mapping[str, tuple[int, ...]]


def executor(backend: str, direction: str) -> Callable[..., Any]:
    """`forward` or `backward` of a backend."""
    return RECORDS[backend].executor("jax", direction == "backward")


def backend_on(
    named: str, platform: str, plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, exported: bool,
    grad_names: frozenset[str],
) -> str:  # fmt: skip
    """The backend that runs a call on a platform, or makes its gradients where some are `grad_names`: the one that is
    named, or the first that has all it takes. A backend that lacks something is named once in a warning."""
    if named:
        allowed = RECORDS[named].lowered_for or (platform,)
        if platform not in allowed:
            raise BackendError(
                f"backend {named!r} runs on {' and '.join(allowed)}, and this is lowered for {platform}\n"
                "  without a backend each platform takes its default"
            )
        if platform == "cpu" and RECORDS[named].interpreter:
            warn_slow(named, geometry)
        return named
    lacks = []
    for backend in ranked("jax", platform):
        if backend.unfit() or (backend.optional and (exported or backend.reason("jax"))):
            continue  # kernels of this machine do not travel
        why = lowerable(backend.name) or _reason(backend, plan, geometry, dtype, shapes, grad_names)
        if not why:
            name = backend.name
            break
        lacks.append(f"{backend.name}: {why}")
    else:
        name = library("jax")
    if lacks:
        warn_once(f"on {platform} this runs as backend {name!r}, for want of:\n  " + "\n  ".join(lacks))
    return name


def quickest(name: str, plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, narrow: bool) -> str:
    """The backend of a forward whose first choice is `name`, where nobody asks for kernels or tiles: another one whose
    record says that it is faster. `narrow`: rows see few keys."""
    others = (b for b in backends_of("jax") if b.instead == name)
    faster = (b for b in others if b.pays is not None and b.pays(plan, geometry, dtype, narrow))
    fit = (b for b in faster if not (lowerable(b.name) or b.unfit()))
    none: frozenset[str] = frozenset()
    return next((b.name for b in fit if not _reason(b, plan, geometry, dtype, shapes, none)), name)


def quickest_of(name: str, plan: Plan, geometry: Geometry, dtype: str, options: Options) -> str:
    """`quickest` of the calls that a plan of the host is for."""
    named = options.backend or Settings.read().backend or options.tile
    if named or not any(b.instead == name for b in backends_of("jax")):
        return name
    tiled = plan.work((128, 128))  # the tile has no part in the choice
    return quickest(name, tiled.plan, geometry, dtype, {n: x.shape for n, x in tiled.tables.items()}, plan.narrow)


def _reason(
    backend: Backend, plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, grad_names: frozenset[str]
) -> str:
    """A reason why a backend's kernels cannot run this call, or an empty text."""
    run = backend.executors["jax"]
    why: str = run.refuses(plan, geometry, dtype, shapes) if run.refuses else ""
    if grad_names and not why and run.refuses_gradients:
        why = run.refuses_gradients(plan, geometry, dtype, shapes, grad_names)
    return why
