"""What every benchmark shares: the machine's name, timing turn about, and where results are kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


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


def turn_about(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int, rest: float = 0.0) -> dict[str, float]:
    """Median milliseconds of both, and the median of the ratios peer / ours, after a warm-up of each. Who goes
    first changes: the second finds warm caches. `rest` is the pause before each call, in seconds, where one
    gives memory back after it has answered."""

    def rested(run: Callable[[], Any]) -> float:
        time.sleep(rest)
        return seconds(run)

    ours()
    peer()
    pairs = []
    for i in range(rounds):
        first, second = (rested(run) for run in ((ours, peer) if i % 2 else (peer, ours)))
        pairs.append((first, second) if i % 2 else (second, first))
    return {
        "frisket_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "peer_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def fresh(code: str) -> str:
    """What a new Python prints for `code`, with bytecode kept as an installed package has it."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def save(name: str, found: dict[str, Any]) -> None:
    """`benchmarks/results/<name>.json`, with the machine named."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": described(), **found}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
