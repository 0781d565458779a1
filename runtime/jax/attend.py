"""A call of attention on arrays that are not torch's, and the choice of a backend by the platform it is lowered for.

JAX is imported where there is something to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frisket.dsl.errors import BackendError, FrisketError, ParameterError, ShapeError
from frisket.dsl.ir import COORDINATES, SIZES, uses
from frisket.lowering.kernels.features import missing
from frisket.lowering.plan import Geometry, LoopPlan
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.backends.base import RECORDS, Backend, Shapes, backends_of, ranked
from frisket.runtime.backends.registry import ORDER, library, lowerable, warn_slow
from frisket.runtime.calls.arrays import named
from frisket.runtime.calls.options import CallArgs, Options
from frisket.runtime.machine.caller import warn_once
from frisket.runtime.machine.parameters import stacked, traced
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.host import Plan


@usual_promotion()
def attend(att: Any, request: CallArgs) -> tuple[Any, ...]:
    """(out, lse, top) of `att(q, k, v, ...)`."""
    try:
        if any(named(n) for x in request[:3] for n in getattr(x, "shape", ())):
            from .symbolic import attend

            return attend(att, request)
        att, request = at_traced_origin(att, request._replace(sinks=stacked("sinks", request.sinks)))
        call = att.call(request)
    except FrisketError as error:
        error.add_note(description(att, request))
        raise
    outputs = att.run(call)
    att.check_if_asked(call, outputs)
    return call.arrays.as_called(*outputs)  # type: ignore[no-any-return]


def at_traced_origin(att: Any, request: CallArgs) -> tuple[Any, CallArgs]:
    """The attention and the call, where the origin is known. A traced one is an operand: the attention at positions
    that are those of the arrays plus parameters, and the call with the values of these."""
    origin: Any = request.origin
    starts = tuple(origin) if hasattr(origin, "__len__") else ()
    if len(starts) != 4 or request.plan is not None or not any(map(traced, starts)):
        return att, request
    for c, x in zip(COORDINATES, starts, strict=True):
        shapes = [(), *([request.q.shape[:1]] if c in "qk" and request.q.ndim == 4 else ())]
        if np.shape(x) not in shapes or np.dtype(getattr(x, "dtype", type(x))).kind not in "iu":
            raise ShapeError(f"origin has {x}\n  it is (b, h, q, k), integers, q and k also one per batch entry")
    if att.options.tuning.invariant and traced(starts[3]):
        raise ParameterError(
            "origin's k is traced, and invariant=True sums keys up in parts that begin at known positions\n"
            "  give an integer, or keys from position 0 on"
        )
    # without sizes the whole problem ends where the arrays end, and a traced origin does not say where
    if request.sizes is None and any(uses(e) & {*SIZES} for e in att.program.exprs.parts):
        text = f"origin is traced by jax.jit or another transform, and the mask or score mod reads {', '.join(SIZES)}\n"
        raise ParameterError(f"{text}  give the lengths of the whole problem: sizes=(B, H, Q_LEN, KV_LEN)")
    name = "origin_"
    while any(n.startswith(name) for n in att.program.names):  # a parameter of the user may begin so
        name += "_"
    offsets = {c: x for c, x in zip(COORDINATES, starts, strict=True) if traced(x) or np.any(x)}
    texts = {c: f"{c} + {name}{c}{'[b]' if np.ndim(x) else ''}" for c, x in offsets.items()}
    values = {f"{name}{c}": x for c, x in offsets.items()}
    return att.at(**texts), request._replace(origin=None, params={**request.params, **values})


def description(att: Any, request: CallArgs) -> str:
    """The call in words, next to an error far from where it was written, as under `jax.jit`."""
    arrays = ((n, x) for n, x in zip("qkv", request[:3], strict=True) if hasattr(x, "dtype"))
    shapes = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in arrays)
    return f"in attention under {'; '.join(str(att.program).splitlines()) or 'everything visible'}\n  of {shapes}"


def executor(backend: str, direction: str) -> Callable[..., Any]:
    """`forward` or `backward` of a backend."""
    return RECORDS[backend].executor("jax", direction == "backward")


def check_platform(backend: str, platform: str, geometry: Geometry) -> None:
    """Raise where a call names a backend that does not run on a platform; warn where it runs slowly."""
    allowed = RECORDS[backend].lowered_for or (platform,)
    if platform not in allowed:
        text = f"backend {backend!r} runs on {' and '.join(allowed)}, and this is lowered for {platform}\n"
        raise BackendError(f"{text}  without a backend each platform takes its default")
    if platform == "cpu" and RECORDS[backend].interpreter:
        warn_slow(backend, geometry)


def backend_on(
    platform: str,
    plan: LoopPlan,
    geometry: Geometry,
    dtype: str,
    shapes: Shapes,
    exported: bool,
    names: frozenset[str],
    invariant: bool = False,
) -> str:
    """The backend that runs a call on a platform where it names none, or makes the gradients of `names`: the first that
    has all it takes. Where the call is `invariant`, that is one order of sums for each row. A backend that lacks
    something is named once in a warning."""
    lacks = []
    for backend in ranked("jax", platform):
        if backend.unfit() or (backend.optional and (exported or backend.reason("jax"))):
            continue  # kernels of this machine do not travel
        why = lowerable(backend.name) or missing(backend.features, needed=[ORDER] * invariant)
        why = why or _reason(backend, plan, geometry, dtype, shapes, names)
        if not why:
            name = backend.name
            break
        lacks.append(f"{backend.name}: {why}")
    else:
        name = library("jax")
        if why := missing(RECORDS[name].features, needed=[ORDER] * invariant):
            raise BackendError("\n  ".join([why, *lacks]))
    if lacks:
        warn_once(f"on {platform} this runs as backend {name!r}, for want of:\n  " + "\n  ".join(lacks))
    return name


def quickest(name: str, plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, narrow: bool) -> str:
    """The backend of a forward whose first choice is `name`, unless kernels or tiles are named: another one whose
    record says that it is faster. `narrow`: rows see few keys."""
    others = (b for b in backends_of("jax") if b.instead == name)
    faster = (b for b in others if b.pays is not None and b.pays(plan, geometry, dtype, narrow))
    fit = (b for b in faster if not (lowerable(b.name) or b.unfit()))
    return next((b.name for b in fit if not _reason(b, plan, geometry, dtype, shapes, frozenset())), name)


def quickest_of(name: str, plan: Plan, geometry: Geometry, dtype: str, options: Options) -> str:
    """`quickest` of the calls that a plan of the host is for."""
    named = options.backend or Settings.read().backend or options.tile
    if named or not any(b.instead == name for b in backends_of("jax")):
        return name
    tiled = plan.work((128, 128))  # the tile has no part in the choice
    return quickest(name, tiled.plan, geometry, dtype, {n: x.shape for n, x in tiled.tables.items()}, plan.narrow)


def _reason(backend: Backend, plan: LoopPlan, g: Geometry, dtype: str, shapes: Shapes, names: frozenset[str]) -> str:
    """A reason why a backend's kernels cannot run this call, or an empty text."""
    run = backend.executors["jax"]
    why: str = run.refuses(plan, g, dtype, shapes) if run.refuses else ""
    if names and not why and run.refuses_gradients:
        why = run.refuses_gradients(plan, g, dtype, shapes, names)
    return why
