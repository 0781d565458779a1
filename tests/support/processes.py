"""Processes of one group, forked from a server that has imported torch and frisket once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


def together(work: Callable[..., None], count: int, timeout: float, limit: float, lost: int = 0) -> dict[Any, Any]:
    """`work(rank, report)` in `count` processes that are a gloo group with `timeout`; what they said with
    `report(name, value)`, by (rank, name). All are ended after `limit` seconds, or when all but `lost` are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "frisket.runtime.parallel.torch_ring", "frisket"])
    said = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        args = [(work, rank, count, store, timeout, said) for rank in range(count)]
        processes = [context.Process(target=_run, args=a, daemon=True) for a in args]
        for p in processes:
            p.start()
        found, end = {}, time.monotonic() + limit
        done: set[int] = set()
        gone: set[int] = set()  # without a word: of these may be those that are to be lost
        while len(done) < count - lost and len(done | gone) < count and time.monotonic() < end:
            try:
                rank, name, value = said.get(timeout=0.2)
            except queue.Empty:
                gone |= {r for r, p in enumerate(processes) if p.exitcode not in (None, 0)}
                continue
            if name == "done":
                done.add(rank)
            else:
                found[rank, name] = value
        for p in processes:
            p.join(2)
            if p.is_alive():
                p.kill()
    return found


def _run(work: Callable[..., None], rank: int, count: int, store: str, timeout: float, said: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": count}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **where)

    def report(name: str, value: Any) -> None:
        said.put((rank, name, value))

    try:
        work(rank, report)
    except BaseException as error:
        report("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        said.put((rank, "done", None))
        said.close()
        said.join_thread()
        os._exit(0)  # not waiting for peers that a test has ended


def stop() -> None:
    """This process, for good: peers see neither an answer nor an end."""
    os.kill(os.getpid(), signal.SIGSTOP)
