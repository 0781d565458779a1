"""Caches of keys and values for torch: modules to append to in place."""

from frisket.runtime.machine.extras import extras

with extras():
    from frisket.runtime.caches.torch import *  # noqa: F403
    from frisket.runtime.caches.torch import __all__ as __all__
