"""The mesh at hand."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.mesh import thread_resources  # JAX has no public word for the mesh of `with mesh:`


def current_mesh() -> Any:
    """The mesh of `jax.set_mesh(mesh)` or `with mesh:`, inside of `jax.jit` too; None without one.

    >>> mesh = jax.make_mesh((1, 1), ("dp", "tp"))
    >>> with jax.set_mesh(mesh):
    ...     current_mesh() == mesh
    True
    """
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        try:
            return jax.sharding.get_mesh()
        except ValueError:  # JAX traces: a mesh without devices is all there is
            return abstract
    legacy = thread_resources.env.physical_mesh
    return None if legacy.empty else legacy
