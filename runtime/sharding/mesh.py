"""The mesh at hand."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.mesh import thread_resources  # JAX has no public word for the mesh of `with mesh:`


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
