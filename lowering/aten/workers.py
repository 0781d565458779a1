"""Threads that each run whole blocks with single-threaded torch calls.

A block is a dozen short library calls. Spreading each of them over all cores costs a barrier a call, and one
late core (another process is enough) holds up every one of them; blocks are independent and need none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import TypeVar

from frisket.grammar.memo import memo

T = TypeVar("T")


def spread(run: Callable[[T], None], blocks: list[T]) -> None:
    """Run `run` on every block, the last of the list first, over as many threads as torch would use."""
    import torch

    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2:
        for block in reversed(blocks):
            run(block)
        return

    inference = torch.is_inference_mode_enabled()  # a mode of this thread: others may not write to what it made

    def drain() -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            while blocks:
                try:
                    block = blocks.pop()
                except IndexError:  # another thread took the last one
                    return
                run(block)

    tasks: list[Future[None]] = []
    with suppress(RuntimeError):  # no thread can be had, or the interpreter ends and starts none
        pool = _pool(torch.get_num_threads(), os.getpid())
        for _ in range(threads):
            tasks.append(pool.submit(drain))
    if not tasks:
        drain()
    for done in tasks:
        done.result()


@memo(4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The pool of threads in which torch starts no threads; threads do not survive a fork, hence `process`."""
    import torch

    together = Barrier(threads)  # every thread takes one of the first tasks
    pool = ThreadPoolExecutor(threads, "frisket")

    def alone() -> None:
        torch.set_num_threads(1)
        together.wait()

    try:
        for ready in [pool.submit(alone) for _ in range(threads)]:
            ready.result()
    except RuntimeError:  # one could not be started: the others do not wait for it
        together.abort()
        raise
    torch.set_num_threads(threads)  # torch keeps the last number for threads yet to come: put it back
    return pool
