"""For tests that put a mistake in: what sound code has answered is forgotten."""

from __future__ import annotations

import functools
import gc

UNDERSTANDING = ("frisket.dsl", "frisket.lowering")  # what runtime does once for a process it must not do again


def forget() -> None:
    """Answers remembered from the sound code would hide the mistake, and the mistake's would outlive it."""
    gc.unfreeze()  # what earlier files of tests left is not among the objects until then
    for thing in gc.get_objects():
        if type(thing) is functools._lru_cache_wrapper and thing.__module__.startswith(UNDERSTANDING):
            thing.cache_clear()
