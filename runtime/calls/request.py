"""CallArgs: the arguments of a call of attention, as users write them; makers of attentions, by name.

`runtime/attention` registers two makers for modules below it. "program" takes a program and options. "texts" takes the
texts of a mask and a score mod, options and parameters, as `frisket.attention` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from frisket.lowering.plan import Origin, Sizes
from frisket.runtime import calls
from frisket.runtime.machine.parameters import stacked

CALLS = 256  # prepared calls and plans that an attention keeps, and prepared calls that a plan keeps


class CallArgs(NamedTuple):
    """The arguments of `Attention.__call__`, before anything is checked: every module that runs calls takes one.
    `params` hold the scales and pages of stored keys and values too."""

    q: Any
    k: Any
    v: Any
    plan: Any = None
    seed: Any = None
    sinks: Any = None
    top: bool = False  # whether the largest score of every row is asked for
    origin: Origin | None = None
    sizes: Sizes | None = None
    layout: str | None = None
    params: Mapping[str, Any] = MappingProxyType({})


def stacked_values(sinks: Any, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The sinks and parameters of a call, lists of traced numbers and of tensors as arrays."""
    return stacked("sinks", sinks), {n: stacked(n, x) for n, x in params.items()}


Maker = TypeVar("Maker", bound=Callable[..., Any])
_makers: dict[str, Callable[..., Any]] = {}


def register(name: str, make: Maker) -> Maker:
    """Add a maker of attentions."""
    _makers[name] = make
    return make


def attention_by(name: str) -> Callable[..., Any]:
    """The registered maker of attentions. A program of torch.export, or a graph of torch.fx, may run before any other
    call of frisket."""
    if name not in _makers:
        for load in calls.makers:
            load()
    return _makers[name]
