"""Attention with its tokens in the order that the mask wants, against the order of the caller: `python
benchmarks/reorder.py`.

One head, D64, float32, forward, and forward with gradients; moving q, k, v and the result is part of the call. Both run
turn about on one thread, whose own time is taken; a figure is the median over rounds of the ratio, with the 95 %
interval of that median. "tiles" of 64 x 32 are those of the layouts, and "gpu_tiles" of 128 x 64; "found_s" is how long
the order took to find.

"commits" asks the same of earlier commits: `FRISKET_CHECKOUTS=05096f2=DIR,0dadb9e=DIR python benchmarks/reorder.py
commits`, where each folder is a checkout with a `.venv` that frisket is installed in. Processes of all commits run turn
about, the earlier ones with unordered tokens, this one in the order that `frisket.reorder` finds, if any.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reorder_tables import tables
from scipy.optimize import nnls
from store import run_parts

import frisket as fk
from frisket.runtime.attention.order import CPU
from frisket.runtime.attention.ordered import KINDS, LANES, TIMES, work
from frisket.runtime.bench.race import median_ratio, processor_seconds, rounds_of
from frisket.runtime.machine.cpp_build import VARIANTS, lacking

CASES = {  # mask, length, the least gain that is wanted
    "natten2d 13 x 13 on 256 x 256": ("natten2d(256, 256, 13, 13)", 65536, 2.2),
    "natten3d 5 x 5 x 5 on 16 x 64 x 64": ("natten3d(16, 64, 64, 5, 5, 5)", 65536, 3.0),
    "causal & dilated(1024, 4)": ("causal & dilated(1024, 4)", 16384, 2.5),
    "causal & k % 4 == 0": ("causal & k % 4 == 0", 16384, 3.0),
    "causal & (q - k) % 64 == 0": ("causal & (q - k) % 64 == 0", 16384, 3.0),
    "64 documents, shuffled": ("causal & same(doc)", 16384, 8.0),
    "random 16 x 16 blocks, 3 % visible": ("blocks[q // 16, k // 16]", 8192, 2.0),
}
FITTED = {  # masks whose forward, unordered and in order, the model of time is fitted to
    name: (mask, length)
    for name, (mask, length, _) in CASES.items()
    if "random" not in name
} | {
    mask: (mask, 8192)
    for mask in (
        "causal", "causal & window(256)", "window(1024)", "natten2d(128, 64, 7, 7)", "natten2d(64, 128, 21, 21)",
        "(q - k) % 8 == 0", "causal & dilated(2048, 8)", "natten3d(8, 32, 32, 3, 3, 3)", "causal & same(doc)",
        "q // 512 == k // 512 & (q - k) % 3 == 0", "causal & k % 16 == 3", "q // 64 == k // 64 & causal",
    )
}  # fmt: skip
DIRECTIONS = ("forward", "forward and backward")
WORKER = """
import sys, time
sys.path.insert(0, sys.argv[3])
import torch, frisket as fk
from reorder_tables import tables
torch.set_num_threads(1)
mask, length = sys.argv[1], int(sys.argv[2])
given = tables(mask, length)
best = {"reorder": fk.reorder(mask, length, block=(64, 32), moving=10.0, **given)} if sys.argv[4] else {}
att = fk.compile(mask, **best, **given)
for line in sys.stdin:
    q, k, v = (torch.randn(1, 1, length, 64, requires_grad="backward" in line) for _ in "qkv")
    began = time.process_time()
    out = att(q, k, v)
    if out.requires_grad:
        torch.autograd.grad(out, (q, k, v), out)
    print(time.process_time() - began, flush=True)
"""


def counted(order: fk.Order) -> dict[str, int]:
    return {"before": order.before.visited, "after": order.after.visited}


def orders(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (mask, length, goal) in CASES.items():
        given = tables(mask, length)
        began = time.perf_counter()
        order = fk.reorder(mask, length, block=CPU[0], moving=CPU[1], **given)
        found = time.perf_counter() - began
        wide = fk.reorder(mask, length, **given)
        ways = {"order": fk.compile(mask, reorder=order, **given), "unordered": fk.compile(mask, **given)}
        for direction in DIRECTIONS:
            q, k, v = (torch.randn(1, 1, length, 64, requires_grad=direction != "forward") for _ in "qkv")

            def call(att: Any, q: Any = q, k: Any = k, v: Any = v) -> None:
                out = att(q, k, v)
                if out.requires_grad:
                    torch.autograd.grad(out, (q, k, v), out)

            times = rounds_of(
                {n: lambda att=att: call(att) for n, att in ways.items()}, rounds, clock=processor_seconds
            )
            ratio = "unordered / order"
            yield f"{name}, {direction}", {
                "figures": {
                    "ms": {n: 1e3 * statistics.median(x) for n, x in times.items()},
                    "tiles": counted(order),
                    "gpu_tiles": counted(wide),
                    "found_s": {"order": found},
                },
                "ratios": {ratio: median_ratio(times["unordered"], times["order"])},
                "goals": {"at least": {"ratios": {ratio: goal}}} if order.gain > 1 else {},
            }  # fmt: skip


def worker(folder: Path, python: str, mask: str, length: int, best: bool) -> subprocess.Popen[str]:
    """A process that runs a call for each line it reads, and says what time it took."""
    here = str(Path(__file__).resolve().parent)
    command = [python, "-c", WORKER, mask, str(length), here, "best" if best else ""]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process: subprocess.Popen[str], direction: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(direction + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def commits(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    folders = {n: Path(x) for n, x in (x.split("=") for x in os.environ["FRISKET_CHECKOUTS"].split(","))}
    root = Path(__file__).resolve().parent.parent
    for name, (mask, length, goal) in CASES.items():
        running = {n: worker(x, str(x / ".venv/bin/python"), mask, length, False) for n, x in folders.items()}
        running["here"] = worker(root, sys.executable, mask, length, True)
        for direction in DIRECTIONS:
            calls = {n: lambda p=p, d=direction: asked(p, d) for n, p in running.items()}
            times = rounds_of(calls, rounds, clock=lambda call: call())
            ratios = {f"{n} / here": median_ratio(times[n], times["here"]) for n in folders}
            yield (
                f"{name}, {direction}",
                {
                    "figures": {"ms": {n: 1e3 * statistics.median(x) for n, x in times.items()}},
                    "ratios": ratios,
                    "goals": {"at least": {"ratios": dict.fromkeys(ratios, goal)}},
                },
            )
        for process in running.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def costs(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Nanoseconds of each kind of work, by least squares of the relative errors, none below 0."""
    native = VARIANTS["native"]
    for variant in (v for v in TIMES if not lacking(v)):
        VARIANTS["native"] = VARIANTS[variant]
        counts, took, moving = [], [], []
        with tempfile.TemporaryDirectory() as os.environ["FRISKET_CACHE_DIR"]:
            for mask, length in FITTED.values():
                given = tables(mask, length)
                order = fk.reorder(mask, length, block=CPU[0], moving=0, **given)
                arrays = [torch.randn(1, 1, length, 64) for _ in "qkv"]
                plain = fk.compile(mask, **given)
                ways = {"plain": plain}
                if order.coordinates:
                    ways |= {"moved": plain.at(**order.coordinates), "all": fk.compile(mask, reorder=order, **given)}
                calls = {n: lambda att=att, arrays=arrays: att(*arrays) for n, att in ways.items()}
                times = rounds_of(calls, rounds, clock=processor_seconds)
                ns = {n: 1e9 * statistics.median(x) for n, x in times.items()}
                for name, what in (("plain", order.mask), ("moved", order.moved)):
                    if name in ns:
                        counts.append(work(what, length, length, LANES.get(variant, 16)))
                        took.append(ns[name])
                if "all" in ns:
                    rows = 2 * length * ((order.queries is not None) + (order.keys is not None))
                    moving.append((ns["all"] - ns["moved"]) / rows)
        every, whole = np.array(counts), np.array(took)
        found = nnls(every / whole[:, None], np.ones(len(whole)))[0]
        VARIANTS["native"] = native
        print("guessed / measured", np.round(every @ found / whole, 2))
        both = (*found.tolist(), statistics.median(moving))
        yield variant, {"figures": {kind: {"ns": ns} for kind, ns in zip(KINDS, both, strict=True)}}


def settings(part: str) -> dict[str, Any]:
    return {"heads": 1, "head_dim": 64, "dtype": "float32", "threads": torch.get_num_threads()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(__doc__, {"orders": orders, "commits": commits, "costs": costs}, "reorder", settings)
