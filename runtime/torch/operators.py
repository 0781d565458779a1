"""Attention as operators of torch, for graphs: torch.compile, torch.export, torch.func, fake and meta tensors.

`frisket::attend(q, k, v, sinks, values, numbers, spec, names)` has the gradients of `frisket::attend_backward`;
`frisket::attend_alone` has none, and returns the output alone. A graph holds nothing but them: `spec` is the attention
as a text, and its layout is planned when the operator runs, from the shapes it then gets, so one graph serves many
lengths. `import frisket` beside torch registers them, and what runs them is imported when one runs. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("frisket", "DEF")  # type: ignore[no-untyped-call]
_HEAD = "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] values, SymInt[] numbers, str spec, str names)"
for _schema in (
    f"attend{_HEAD} -> (Tensor out, Tensor lse, Tensor top, Tensor norm)",
    f"attend_alone{_HEAD} -> Tensor",
    "attend_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] values, "
    "Tensor out, Tensor lse, Tensor norm, SymInt[] numbers, str spec, str names, bool[] needed) -> Tensor[]",
    "tiles(Tensor like, Tensor[] values, SymInt[] numbers, SymInt[] sizes, SymInt[] block, str spec, str names)"
    " -> Tensor",
):
    # Operators read a seed, and keep what they upload and plan for later calls: torch.compile records no CUDA graph of
    # them, in any mode.
    LIBRARY.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))


def _late(name: str, *first: str, below_autograd: bool = False) -> Callable[..., Any]:
    """A function of `running`, imported when one runs: `import frisket` costs little beside torch. One that stands
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


for _name in ("attend", "attend_alone", "attend_backward", "tiles"):
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _late(_name, below_autograd=True), _key)
    torch.library.register_fake(f"frisket::{_name}", _late(f"fake_{_name}"), lib=LIBRARY)
for _name in ("attend", "attend_alone", "attend_backward"):
    # torch.func, vmap and graphs around them; torch's own rules for operators know no function with setup_context.
    LIBRARY.impl(_name, _late("transformed", _name), "FuncTorchDynamicLayerFrontMode")
LIBRARY.impl("attend_backward", _late("mapped_backward"), "Batched")  # of is_grads_batched
torch.library.register_autograd("frisket::attend", _late("gradient"), setup_context=_late("setup_context"), lib=LIBRARY)
torch.library.register_autograd("frisket::attend_backward", _late("no_second"), lib=LIBRARY)
