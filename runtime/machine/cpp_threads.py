"""Threads of native kernels: torch's own beside torch, a pool of ours elsewhere and after a fork."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from frisket.grammar.memo import memo
from frisket.lowering.kernels.cpp import call as cpp_call

from .cpp_build import library


class Threads(NamedTuple):
    """The first words of a `Call`."""

    workers: int
    parallel: int = 0  # a function; 0: one worker
    pool: int = 0  # its first argument


def of_torch() -> Threads:
    """The very threads that torch uses: others would have to share the cores with them, because they spin for a while
    after every operation."""
    import torch

    count = torch.get_num_threads()
    return Threads(count, *_of_torch()) if count > 1 else Threads(1)


def own(count: int | None = None) -> Threads:
    """Threads of frisket's own pool: `count`, else OMP_NUM_THREADS, else a thread for each CPU of the process."""
    count = count or setting()
    return Threads(count, _address(_library().frisket_own)) if count > 1 else Threads(1)


def setting() -> int:
    """OMP_NUM_THREADS, whose list is one of nesting levels, otherwise the CPUs this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdigit() and int(given) else len(os.sched_getaffinity(0))


@memo(1)
def _of_torch() -> tuple[int, int]:
    import torch

    pool = _library()
    try:  # what torch's own library calls, whichever OpenMP library that is and whatever else is loaded
        calls = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        table = (ctypes.c_void_p * 2)(_address(calls.GOMP_parallel), _address(calls.omp_get_thread_num))
    except (OSError, AttributeError):  # a torch built with other threads
        return _address(pool.frisket_own), 0
    _kept.append(table)
    return _address(pool.frisket_openmp), ctypes.addressof(table)


_kept: list[Any] = []  # pool arguments: functions keep them


def source() -> str:
    """The text of the pool, which every call of torch loads."""
    text = resources.files(__package__).joinpath("cpp_threads.cpp").read_text(encoding="utf-8")
    return f"#include <stdint.h>\ntypedef void Real;\n{cpp_call.text()}{text}"


@memo(group="once")
def _library() -> ctypes.CDLL:
    pool = library(source())
    if _forked:
        pool.frisket_set_forked()
    return pool


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _child() -> bool:
    """Whether this process was forked by multiprocessing, before this module was there to see it."""
    process, context = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.context")
    if process is None or context is None or process.parent_process() is None:
        return False
    return bool(context._default_context.get_start_method(allow_none=True) != "spawn")


_forked = _child()


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
