"""Builds in threads beside the program, on half of the cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable

_threads: dict[Hashable, threading.Thread] = {}  # of builds that wait or run
_slots: threading.Semaphore


def _reset() -> None:
    """Forget all builds: the child of a fork does not have the threads of its parent."""
    global _slots
    _slots = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))
    _threads.clear()


_reset()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)


def underway(key: Hashable) -> bool:
    """Whether a build waits or runs."""
    return key in _threads


def begin(key: Hashable, build: Callable[[], object]) -> bool:
    """Run `build` in a thread, once at a time for each key; False where no thread can be had. The interpreter ends
    after the builds that run, without those that wait."""

    def work() -> None:
        try:
            with _slots:
                if threading.main_thread().is_alive():
                    build()
        finally:
            _threads.pop(key, None)

    thread = threading.Thread(target=work, name="frisket compiler", daemon=False)
    if _threads.setdefault(key, thread) is thread:
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter ends
            del _threads[key]
            return False
    return True
