"""A call of attention on arrays that are not torch's: JAX is imported where there is something to run."""

from __future__ import annotations

from typing import Any

import numpy as np

from frisket.dsl.errors import FrisketError, ParameterError, ShapeError
from frisket.dsl.ir import COORDINATES, SIZES, uses
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.calls.arrays import named
from frisket.runtime.calls.request import Request
from frisket.runtime.machine.parameters import stacked, traced


@usual_promotion()
def attend(att: Any, request: Request) -> tuple[Any, ...]:
    """(out, lse, top) of `att(q, k, v, ...)`."""
    try:
        if any(named(n) for x in request[:3] for n in getattr(x, "shape", ())):
            from .symbolic import attend

            return attend(att, request)
        att, request = _at_traced_origin(att, request._replace(sinks=stacked("sinks", request.sinks)))
        call = att.call(request)
    except FrisketError as error:
        error.add_note(_asked(att, request))
        raise
    outputs = att.run(call)
    att.check_if_asked(call, outputs)
    results: tuple[Any, ...] = call.arrays.as_called(*outputs)
    return results


def _at_traced_origin(att: Any, request: Request) -> tuple[Any, Request]:
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
    if request.sizes is None and any(uses(e) & {*SIZES} for e in att.program.exprs if e is not None):
        raise ParameterError(
            f"origin is traced by jax.jit or another transform, and the mask or score mod reads {', '.join(SIZES)}\n"
            "  give the lengths of the whole problem: sizes=(B, H, Q_LEN, KV_LEN)"
        )
    name = "origin_"
    while any(n.startswith(name) for n in att.program.names):
        name += "_"
    offsets = {c: x for c, x in zip(COORDINATES, starts, strict=True) if traced(x) or np.any(x)}
    texts = {c: f"{c} + {name}{c}{'[b]' if np.ndim(x) else ''}" for c, x in offsets.items()}
    values = {f"{name}{c}": x for c, x in offsets.items()}
    return att.at(**texts), request._replace(origin=None, params={**request.params, **values})


def _asked(att: Any, request: Request) -> str:
    """The call in words, beside an error far from where it was written, as under `jax.jit`."""
    arrays = ((n, x) for n, x in zip("qkv", request[:3], strict=True) if hasattr(x, "dtype"))
    shapes = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in arrays)
    return f"in attention under {'; '.join(str(att.program).splitlines()) or 'everything visible'}\n  of {shapes}"
