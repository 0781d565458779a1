"""Seconds to compile the Triton kernels of a first call with gradients, one after another and together, on a machine
without a GPU: `python benchmarks/triton_together.py`.

The kernels are those of `fk.warm(arch="sm_90")`, in an empty folder each time. Rounds alternate, figures are medians.
`of the processor` is what threads and processes computed, without waiting: where other programs take the processors,
the wall times say little, and `least` is the ratio that so many processors would give at best: the larger of the
longest kernel and the sum divided by the number of processors, over the sum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch

import frisket as fk
from frisket.runtime.backends.triton import ahead


def one_round(mask: str, dim: int, workers: int) -> tuple[float, float, list[float]]:
    """Seconds of the wall, seconds of the processor, and seconds of each kernel."""
    from triton import knobs

    sizes = {"q_len": 4096, "kv_len": 4096, "batch": 4, "heads": 16, "kv_heads": 16, "head_dim": dim, "v_dim": dim}
    att = fk.compile(mask, backend="triton")
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        ahead_jobs = [
            job
            for name, job in ahead.jobs_of(att, {**sizes, "dtype": "bfloat16"}, True, "sm_90")
            if name.endswith("with gradients")
        ]
        for job in ahead_jobs:
            job.function.device_caches.clear()
        start, spent = time.perf_counter(), sum(os.times()[:4])
        with ahead.compiling_for("sm_90"):
            each = [x.seconds for x in ahead.outcomes(ahead_jobs, workers)]
        return time.perf_counter() - start, sum(os.times()[:4]) - spent, each


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mask", default="causal")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    one_round(given.mask, given.head_dim, 1)
    rounds: dict[int, list[tuple[float, float, list[float]]]] = {1: [], cores: []}
    for _ in range(given.rounds):
        for workers in rounds:
            rounds[workers].append(one_round(given.mask, given.head_dim, workers))
    for workers, found in rounds.items():
        wall, spent = (statistics.median(x[i] for x in found) for i in (0, 1))
        print(f"{workers} at a time: {wall:.2f} s, {spent:.2f} s of the processor")
    apart, together = (statistics.median(x[0] for x in found) for found in rounds.values())
    shares = [[s / sum(x[2]) for s in x[2]] for x in rounds[1]]
    least = statistics.median(max(max(x), 1 / cores) for x in shares)
    ratio, load = together / apart, os.getloadavg()[0]
    print(f"together / apart: {ratio:.2f}; least on {cores} processors: {least:.2f}; load {load:.1f}")


if __name__ == "__main__":
    main()
