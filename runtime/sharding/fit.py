"""Axes of a mesh that can split a dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def names_of(axes: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a partition spec, in order."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def fitting(mesh: Mapping[str, int], axes: Any, size: int | None, taken: set[str] | None = None) -> Any:
    """The axes of one entry of a spec that split `size` evenly, those of `taken` and those no mesh has left out.

    >>> fitting({"dp": 2, "fsdp": 4}, ("fsdp", "dp"), 4)
    'fsdp'

    One by one, in order: what does not divide what the axes before it leave is on every device. `mesh` is sizes by
    name, `size` None where the dimension is not known. None, a name, or a tuple of names, as in a partition spec.
    """
    kept: list[str] = []
    for name in names_of(axes):
        if name not in mesh or name in kept or (taken and name in taken) or (size is not None and size % mesh[name]):
            continue
        kept.append(name)
        size = None if size is None else size // mesh[name]
    return None if not kept else kept[0] if len(kept) == 1 else tuple(kept)
