"""Makers of attentions, by name, for modules below `runtime/attention`: a graph of torch holds an attention as a text.

`runtime/attention` registers two makers. "program" takes a program and options. "texts" takes a mask's text, a score
mod's text, options and parameters, as `frisket.attention` does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Maker = TypeVar("Maker", bound=Callable[..., Any])
_makers: dict[str, Callable[..., Any]] = {}


def register(name: str, make: Maker) -> Maker:
    """Add a maker of attentions."""
    _makers[name] = make
    return make


def attention_by(name: str) -> Callable[..., Any]:
    """The registered maker of attentions; a program of torch.export may run before any other call of frisket."""
    if name not in _makers:
        import_module("frisket.runtime.attention.entry")
    return _makers[name]
