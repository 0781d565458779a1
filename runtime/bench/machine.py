"""Parts that every measurement shares: the machine's name, clocks, and calls timed in turns."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any


def described() -> dict[str, Any]:
    """CPU, cores and versions, for the head of a result file."""
    versions = {}
    for name in ("numpy", "torch", "jax", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": str(date.today()), "cpu": cpu_name(), "cores": os.cpu_count(),
        "python": platform.python_version(), **versions,
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def processor_seconds(run: Callable[[], Any]) -> float:
    """Processor time of this process alone, without other work on the machine."""
    start = time.process_time()
    run()
    return time.process_time() - start


def turns(
    calls: Mapping[str, Any], rounds: int, rest: float = 0.0, clock: Callable[[Any], float] = seconds
) -> Iterator[dict[str, list[float]]]:
    """After every round, the seconds of every call in the rounds so far. Each is warmed up before; the order is
    another one in every round, for the second finds warm caches. `rest` is the pause before each call, in seconds,
    where one gives memory back after it has answered; `clock` is what takes the time of a call."""
    order, draw = list(calls), random.Random(0)
    times: dict[str, list[float]] = {n: [] for n in calls}
    for call in calls.values():
        clock(call)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            time.sleep(rest)
            times[name].append(clock(calls[name]))
        yield times


def rounds_of(
    calls: Mapping[str, Any], rounds: int, rest: float = 0.0, clock: Callable[[Any], float] = seconds
) -> dict[str, list[float]]:
    """The seconds of every call in every round, see `turns`."""
    *_, times = turns(calls, rounds, rest, clock)
    return times


def raced(
    calls: Mapping[str, Any], rounds: int, ours: Sequence[str] = ("frisket",), rest: float = 0.0,
    clock: Callable[[Any], float] = seconds,
) -> dict[str, Any]:  # fmt: skip
    """A row of results: median milliseconds of every call, and the ratios "peer / ours" of what is not ours."""
    return row(rounds_of(calls, rounds, rest, clock), ours)


def row(times: dict[str, list[float]], ours: Sequence[str] = ("frisket",)) -> dict[str, Any]:
    """A row of times that were taken, in seconds."""
    peers = [n for n in times if n not in ours]
    return {
        "figures": {"ms": {n: 1e3 * statistics.median(t) for n, t in times.items()}},
        "ratios": {f"{p} / {o}": median_ratio(times[p], times[o]) for o in ours if o in times for p in peers},
    }


def median_ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """The median over rounds of above / below, and the 95 % interval of that median by order statistics: the
    ranks that a binomial of n fair draws leaves with at most 2.5 % on either side."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    n, tail, rank = len(ratios), 0.5 ** len(ratios), 0
    while tail <= 0.025:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    low = max(rank - 1, 0)
    return statistics.median(ratios), ratios[low], ratios[n - 1 - low]


def fresh(code: str, **variables: str) -> str:
    """The output of a new Python that runs `code`, with bytecode kept as an installed package has it."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | variables
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
