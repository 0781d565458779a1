"""The current mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.mesh import thread_resources  # JAX has no public word for the mesh of `with mesh:`
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .fit import names_of

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
