"""Huge pages for large tensors: the system clears memory 2 MiB at a time, and not 4 KiB."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from frisket.grammar.memo import memo

HUGE, LARGE = 2 << 20, 4 << 20  # bytes of a huge page, and of a tensor from which it pays


def huge(x: Any) -> None:
    """Ask for huge pages under a new torch tensor of `LARGE` bytes or more. A system that has none ignores it.

    In pages of 4 KiB writing to a new tensor of 32 MiB takes four times as long as to one that was written before."""
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    _advise()(start, x.data_ptr() + x.nbytes - start, getattr(mmap, "MADV_HUGEPAGE", 0))


@memo(1)
def _advise() -> Callable[..., Any]:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return lambda *given: None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return found
