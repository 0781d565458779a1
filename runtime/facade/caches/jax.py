"""Caches of keys and values for JAX: pytrees to append to under `jax.jit`."""

from frisket.runtime.machine.extras import extras

with extras():
    from frisket.runtime.caches.jax import *  # noqa: F403
    from frisket.runtime.caches.jax import __all__ as __all__
