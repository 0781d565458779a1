"""Arrays of JAX for kernels: integers of 32 bits, and meshes of explicit axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frisket.dsl.errors import ParameterError


def narrowed(source: str, floating: bool, table: Any, int64: bool) -> Any:
    """A table in the integers JAX has; numbers that do not fit are an error, not other numbers."""
    import jax.numpy as jnp

    whole = isinstance(table, np.ndarray) and table.dtype.kind in "iu" and table.size
    wide = np.iinfo(np.int32)
    if whole and not floating and not int64 and (table.max() > wide.max or table.min() < wide.min):
        raise ParameterError(
            f"table `{source}` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it"
        )
    return table if isinstance(table, np.ndarray) else jnp.asarray(table)


def placed(x: Any, like: Any = None) -> Any:
    """An array on a mesh of explicit axes split as `like` is, or whole on every device."""
    import jax

    have: Any = jax.typeof(x).sharding
    if jax.sharding.AxisType.Explicit not in have.mesh.axis_types:
        return x
    sharding: Any = jax.sharding  # JAX leaves some of its functions untyped
    spec = sharding.PartitionSpec() if like is None else jax.typeof(like).sharding.spec
    return sharding.reshard(x, sharding.NamedSharding(have.mesh, spec))


def automatic(run: Callable[..., Any], *arrays: Any) -> Any:
    """`run(*arrays)` with axes of a mesh that are explicit made automatic: along explicit ones JAX looks nothing up.
    Results are whole on every device, but mapped axes stay split."""
    import jax

    sharding: Any = jax.sharding
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    mesh = next((m for m in meshes if sharding.AxisType.Explicit in m.axis_types), None)
    whole = mesh and sharding.NamedSharding(mesh, sharding.PartitionSpec())
    return (sharding.auto_axes(run, out_sharding=whole) if mesh else run)(*arrays)
