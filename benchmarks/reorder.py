"""Attention with its tokens in the order that the mask wants, against the order as they come: `python
benchmarks/reorder.py`.

One head, D64, float32, forward, and forward with gradients; moving q, k, v and the result is part of the call. Both run
turn about on one thread, whose own time is taken; a figure is the median over rounds of the ratio, with the 95 %
interval of that median. "tiles" of 64 x 32 are those of the layouts, and "gpu_tiles" of 128 x 64; "found_s" is how long
the order took to find.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from store import run_parts

import frisket as fk
from frisket.runtime.attention.order import CPU
from frisket.runtime.bench.machine import median_ratio, processor_seconds, rounds_of

CASES = {  # mask, length, the least gain that is wanted
    "natten2d 13 x 13 on 256 x 256": ("natten2d(256, 256, 13, 13)", 65536, 2.2),
    "natten3d 5 x 5 x 5 on 16 x 64 x 64": ("natten3d(16, 64, 64, 5, 5, 5)", 65536, 3.0),
    "causal & dilated(1024, 4)": ("causal & dilated(1024, 4)", 16384, 2.5),
    "causal & k % 4 == 0": ("causal & k % 4 == 0", 16384, 3.0),
    "causal & (q - k) % 64 == 0": ("causal & (q - k) % 64 == 0", 16384, 3.0),
    "64 documents, shuffled": ("causal & same(doc)", 16384, 8.0),
}


def tables(mask: str, length: int) -> dict[str, Any]:
    if "doc" not in mask:
        return {}
    return {"doc": np.random.default_rng(0).permutation(np.arange(length) % 64).astype(np.int32)}


def counted(order: fk.Order) -> dict[str, int]:
    return {"before": order.before.visited, "after": order.after.visited}


def orders(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (mask, length, goal) in CASES.items():
        given = tables(mask, length)
        began = time.perf_counter()
        order = fk.reorder(mask, length, block=CPU[0], moving=CPU[1], **given)
        found = time.perf_counter() - began
        wide = fk.reorder(mask, length, **given)
        ways = {"order": fk.compile(mask, reorder=order, **given), "as they come": fk.compile(mask, **given)}
        for direction in ("forward", "forward and backward"):
            q, k, v = (torch.randn(1, 1, length, 64, requires_grad=direction != "forward") for _ in "qkv")

            def call(att: Any, q: Any = q, k: Any = k, v: Any = v) -> None:
                out = att(q, k, v)
                if out.requires_grad:
                    torch.autograd.grad(out, (q, k, v), out)

            times = rounds_of(
                {n: lambda att=att: call(att) for n, att in ways.items()}, rounds, clock=processor_seconds
            )
            ratio = "as they come / order"
            yield f"{name}, {direction}", {
                "figures": {
                    "ms": {n: 1e3 * statistics.median(x) for n, x in times.items()},
                    "tiles": counted(order),
                    "gpu_tiles": counted(wide),
                    "found_s": {"order": found},
                },
                "ratios": {ratio: median_ratio(times["as they come"], times["order"])},
                "goals": {"at least": {"ratios": {ratio: goal}}},
            }  # fmt: skip


def settings(part: str) -> dict[str, Any]:
    return {"heads": 1, "head_dim": 64, "dtype": "float32", "threads": torch.get_num_threads()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_parts(__doc__, {"orders": orders}, "reorder", settings)
