"""The current mesh, and axes of a mesh that can split a dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax._src.mesh import thread_resources  # JAX has no public word for the mesh of `with mesh:`
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_spec: Any = PartitionSpec  # JAX leaves some of its functions untyped
_reshard: Any = jax.sharding.reshard
_constrain: Any = jax.lax.with_sharding_constraint


def current_mesh(own: Any = None) -> Any:
    """The mesh `own`, or that of `jax.set_mesh(mesh)` or `with mesh:`, inside of `jax.jit` too; None without one.
    Within `jax.shard_map` it is the mesh there, which knows the axes that are split already.

    >>> mesh = jax.make_mesh((1, 1), ("dp", "tp"))
    >>> with jax.set_mesh(mesh):
    ...     current_mesh() == mesh
    True
    """
    abstract = jax.sharding.get_abstract_mesh()
    if own is not None and not abstract.manual_axes:
        return own
    if not abstract.empty:
        try:
            return jax.sharding.get_mesh()
        except ValueError:  # JAX traces: a mesh without devices is all there is
            return abstract
    legacy = thread_resources.env.physical_mesh
    return None if legacy.empty else legacy


def split_as(x: Any, mesh: Any, spec: Any, explicit: bool = False) -> Any:
    """`x` split over the axes of a mesh: explicit ones are set and, unless these alone are meant, automatic ones asked
    for, each kind by a function of JAX that takes no other."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for kind, put in ((AxisType.Explicit, _reshard), (AxisType.Auto, _constrain))[: 1 if explicit else 2]:
        if kind in kinds.values():
            own = (tuple(n for n in names_of(axes) if kinds[n] == kind) or None for axes in spec)
            x = put(x, NamedSharding(mesh, _spec(*own)))
    return x


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
