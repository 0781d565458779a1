"""Caches of keys and values for serving: plain, of 8 bits, in pages, a ring, over devices.

`frisket.caches.torch` and `frisket.caches.jax` have them for a framework; here is what both share.

>>> import frisket as fk
>>> pool = fk.caches.PagePool(pages=8, page=16)
>>> pool.allocate("prompt", 40), pool.available
([], 5)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from frisket.runtime.caches.pool import PagePool as PagePool

if TYPE_CHECKING:
    from frisket.caches import jax as jax
    from frisket.caches import torch as torch

__all__ = ["PagePool"]


def __getattr__(name: str) -> Any:
    if name in ("jax", "torch"):  # each imports its framework
        return import_module(f"frisket.caches.{name}")
    raise AttributeError(f"module 'frisket.caches' has no attribute {name!r}")
