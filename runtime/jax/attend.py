"""A call of attention on arrays that are not torch's: JAX is imported where there is something to run."""

from __future__ import annotations

from typing import Any

from frisket.dsl.errors import FrisketError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.calls.arrays import named
from frisket.runtime.calls.request import Request


@usual_promotion()
def attend(att: Any, request: Request) -> tuple[Any, Any, Any]:
    """(out, lse, top) of `att(q, k, v, ...)`."""
    try:
        if any(named(n) for x in request[:3] for n in getattr(x, "shape", ())):
            from .symbolic import attend

            return attend(att, request)
        call = att.call(request)
    except FrisketError as error:
        error.add_note(_asked(att, request))
        raise
    found: tuple[Any, Any, Any] = att.run(call)
    att.check_if_asked(call, found)
    return found


def _asked(att: Any, request: Request) -> str:
    """The call in words, beside an error far from where it was written, as under `jax.jit`."""
    arrays = ((n, x) for n, x in zip("qkv", request[:3], strict=True) if hasattr(x, "dtype"))
    shapes = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in arrays)
    return f"in attention under {'; '.join(str(att.program).splitlines()) or 'everything visible'}\n  of {shapes}"
