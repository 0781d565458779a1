"""Native kernels of every head size beside SDPA: `python benchmarks/cpu_dims.py`, or a part of it.

"native": float32 as the CPU is. "avx2": with its vectors on a CPU that has more. On an Intel Xeon with a matrix unit:
"xeon", float32, and "amx", bfloat16, which that unit multiplies; long calls of float32 are six products of bfloat16.
Two heads, no mask and a causal one, forward, and forward with gradients. Calls run in turns on one thread; a time
is that of the thread; a figure is the median over rounds of SDPA / native, with the 95 % interval of that median.
Each row has a process of its own; rows of short calls have more rounds. In "avx2" neither frisket's kernels nor those
of torch itself have wider vectors; SDPA's matrix products are those of a library, which chooses its instructions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from store import run_parts
from torch.nn.functional import scaled_dot_product_attention as sdpa

import frisket as fk
from frisket.runtime.bench.race import fresh, median_ratio, processor_seconds, rounds_of
from frisket.runtime.machine import cpp_build

CASES = [(mask, 4096, dim) for mask in ("True", "causal") for dim in (40, 64, 80, 128, 256)]
CASES += [("True", 16384, 64), ("causal", 16384, 64), ("causal", 512, 64), ("causal", 128, 64)]
HEADS, LEAST = 2, 1.15
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}
DTYPES = {"amx": "bfloat16"}  # of parts; others have float32
CODE = """
import json, sys
sys.path.insert(0, {folder!r})
import cpu_dims
print(json.dumps(cpu_dims.compared({case!r}, {backward}, {rounds}, {dtype!r})))
"""


def compared(case: tuple[str, int, int], backward: bool, rounds: int, dtype: str) -> dict[str, Any]:
    """The row of a case: milliseconds of both, and their ratio."""
    if variant := os.environ.get("CPU_DIMS"):
        cpp_build.VARIANTS["native"] = cpp_build.VARIANTS[variant]
    torch.set_num_threads(1)
    mask, length, dim = case
    given = {"dtype": getattr(torch, dtype)}
    arrays = tuple(torch.randn(1, HEADS, length, dim, **given, requires_grad=backward) for _ in "qkv")
    cotangent = torch.randn(1, HEADS, length, dim, **given)
    calls = {
        "native": partial(fk.compile(mask, backend="native"), *arrays),
        "SDPA": partial(sdpa, *arrays, is_causal=mask == "causal"),
    }
    close = CLOSE[dtype]
    torch.testing.assert_close(calls["native"](), calls["SDPA"](), rtol=10 * close, atol=close)
    if backward:
        calls = {n: partial(gradients, call, arrays, cotangent) for n, call in calls.items()}
    times = rounds_of(calls, rounds, clock=processor_seconds)
    return {
        "figures": {"ms": {n: 1e3 * sorted(t)[len(t) // 2] for n, t in times.items()}},
        "ratios": {"SDPA / native": median_ratio(times["SDPA"], times["native"])},
        "goals": {"at least": {"ratios": {"SDPA / native": LEAST}}},
    }


def gradients(call: Any, arrays: Any, cotangent: Any) -> Any:
    return torch.autograd.grad(call(), arrays, cotangent)


def rows(part: str, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    variant, dtype = "avx2" if part == "avx2" else "", DTYPES.get(part, "float32")
    given = {"CPU_DIMS": variant, "ATEN_CPU_CAPABILITY": variant} if variant else {}
    for case in CASES:
        for backward in (False, True):
            mask, length, dim = case
            many = rounds * max(1, 2048 // length)  # a short call takes less time, and is seldom left alone for it
            asked = {"case": case, "backward": backward, "rounds": many, "dtype": dtype}
            code = CODE.format(folder=os.path.dirname(__file__), **asked)
            name = f"{'no mask' if mask == 'True' else mask}, {length} x {dim}, forward{' and backward' * backward}"
            yield name, json.loads(fresh(code, **given))


if __name__ == "__main__":
    names = ["native", "avx2", *(["xeon", "amx"] if not cpp_build.lacking("amx") else [])]
    parts = {name: partial(rows, name) for name in names}
    run_parts(
        __doc__, parts, "cpu-dims",
        lambda part: {"threads": 1, "heads": HEADS, "dtype": DTYPES.get(part, "float32")},
    )  # fmt: skip
