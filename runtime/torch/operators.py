"""Attention as operators of torch, for graphs: torch.compile, torch.export, torch.func, fake and meta tensors.

`frisket::attend(q, k, v, sinks, values, numbers, spec, names)` has the gradients of `frisket::attend_backward`;
`frisket::attend_alone` has none, and returns the output alone. A graph holds nothing but them. `spec` is the attention
as a text, and its layout is planned when the operator runs, from the shapes it then gets, so one graph serves many
lengths. `import frisket` after torch registers them, and what runs them is imported when one runs. Imports torch.

CUDA graphs may hold these operators. What they copy from the host they copy in their first run, and `calls.arrays`
keeps it for graphs that read it. `frisket::attend_reads_host` and its like are the same operators for calls that read
numbers or tables on the host (`graph.written` says which). Those have the tag `cudagraph_unsafe`, and
torch.compile(mode="reduce-overhead") runs them between its graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("frisket", "DEF")  # type: ignore[no-untyped-call]
READS_HOST = "_reads_host"  # ends the names of operators that no CUDA graph may hold
UNSAFE = (torch.Tag.cudagraph_unsafe,)
_HEAD = "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] values, SymInt[] numbers, str spec, str names)"
_SCHEMAS = {
    "attend": f"{_HEAD} -> (Tensor out, Tensor lse, Tensor top, Tensor norm)",
    "attend_alone": f"{_HEAD} -> Tensor",
    "attend_backward": "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] values, "
    "Tensor out, Tensor lse, Tensor norm, SymInt[] numbers, str spec, str names, bool[] needed) -> Tensor[]",
}
LIBRARY.define(  # counts tiles on the host, in every call
    "tiles(Tensor like, Tensor[] values, SymInt[] numbers, SymInt[] sizes, SymInt[] block, str spec, str names)"
    " -> Tensor",
    tags=UNSAFE,
)


def _late(name: str, *first: str, below_autograd: bool = False) -> Callable[..., Any]:
    """A function of `running`, imported when one runs: `import frisket` costs little next to torch. One that stands
    `below_autograd` runs without gradients, which are those of another operator."""
    function: Callable[..., Any] | None = None

    def run(*arguments: Any, **named: Any) -> Any:
        nonlocal function
        if function is None:
            from . import running

            function = partial(getattr(running, name), *first)
        if below_autograd and torch.is_grad_enabled():  # no_grad takes a microsecond: graphs mostly are in one
            with torch.no_grad():
                return function(*arguments, **named)
        return function(*arguments, **named)

    return run


def _implement(name: str, function: str) -> None:
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, _late(function, below_autograd=True), key)
    torch.library.register_fake(f"frisket::{name}", _late(f"fake_{function}"), lib=LIBRARY)


_implement("tiles", "tiles")
for _host in ("", READS_HOST):
    for _name, _schema in _SCHEMAS.items():
        LIBRARY.define(f"{_name}{_host}{_schema}", tags=UNSAFE if _host else ())
        _implement(f"{_name}{_host}", _name)
        # torch.func, vmap and graphs around them; torch's own rules for operators know no function with setup_context.
        LIBRARY.impl(f"{_name}{_host}", _late("transformed", _name, _host), "FuncTorchDynamicLayerFrontMode")
    _of_attend, _of_backward = f"frisket::attend{_host}", f"frisket::attend_backward{_host}"
    LIBRARY.impl(f"attend_backward{_host}", _late("mapped_backward"), "Batched")  # of is_grads_batched
    torch.library.register_autograd(_of_attend, _late("gradient"), setup_context=_late("setup_context"), lib=LIBRARY)
    torch.library.register_autograd(
        _of_backward, _late("second_gradient"), setup_context=_late("setup_second"), lib=LIBRARY
    )
