"""Attention as what lies below it makes it: graphs of torch hold a text, and run the attention that it says.

`runtime/attention` registers how: "program" takes a program and options, "texts" those of `frisket.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Maker = TypeVar("Maker", bound=Callable[..., Any])
_makers: dict[str, Callable[..., Any]] = {}


def register(name: str, make: Maker) -> Maker:
    """Remember what makes an attention."""
    _makers[name] = make
    return make


def attention_by(name: str) -> Callable[..., Any]:
    """The registered maker of attentions; a program of torch.export may run before any other call of frisket."""
    if name not in _makers:
        import_module("frisket.runtime.attention.entry")
    return _makers[name]
