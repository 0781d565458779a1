"""The values of an operator's call, and the text that names them.

`names` says, in order, what `values` (tensors) and `numbers` are; the names of scales and pages are no identifiers.
Before them it says "max" where the largest scores are asked for, then ":" where a graph may ask for gradients, and the
names of the values that want one, with ":" between. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from frisket.grammar.memo import memo


def sorted_out(items: list[tuple[str, Any]], names: str) -> tuple[list[Tensor], list[int], str]:
    """(tensors, numbers, names and kinds of both) of the values of a call."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for name, x in items:
        if isinstance(x, (bool, float)):  # part of the graph
            names += f",{x} {name}"
        elif isinstance(x, Tensor):
            tensors.append(x)
            names += f",tensor {name}"
        elif isinstance(x, (int, torch.SymInt)):
            numbers.append(x)  # type: ignore[arg-type]
            names += f",number {name}"
        else:
            tensors.append(torch.tensor(x, device="cpu"))
            names += f",tensor {name}"
    return tensors, numbers, names


@memo(256, weigh=500)
def names_of(text: str) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """Whether the largest scores are asked for, and (kind, name) of every value."""
    top, *rest = text.split(",")
    return top.startswith("max"), tuple((kind, name) for kind, _, name in (x.partition(" ") for x in rest))


def wanted_of(text: str) -> frozenset[str] | None:
    """The names of the values that a graph may ask gradients of; None where it asks for none at all."""
    _, asked, names = text.partition(",")[0].partition(":")
    return frozenset(names.split(":")) if asked else None


def reserved(name: str) -> bool:
    """Whether a name is not the user's, but that of scales or pages of stored keys and values."""
    return " of " in name


def floats(values: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in values if x.is_floating_point()]


def learnable(values: Sequence[Tensor], names: str) -> list[str]:
    """The names of the Float tensors among the values."""
    tensors = [n for kind, n in names_of(names)[1] if kind == "tensor"]
    return [n for n, x in zip(tensors, values, strict=True) if x.is_floating_point()]
