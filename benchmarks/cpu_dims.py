"""Native kernels of every head size beside SDPA: `python benchmarks/cpu_dims.py`, or `... avx2` on a CPU that has more.

Two heads of float32, no mask and a causal one, forward, and forward with gradients. All calls run turn about on one
thread, whose own time is taken; a figure is the median over rounds of SDPA / native, with the 95 % interval of that
median. Each set of instructions has a process of its own: in that of AVX2 frisket's kernels have no wider vectors, nor
have those of torch itself. The matrix products of SDPA are those of its library, which chooses its instructions.
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
from frisket.runtime.bench.machine import fresh, median_ratio, processor_seconds, rounds_of
from frisket.runtime.machine import cpp_cpu

CASES = [(mask, 4096, dim) for mask in ("True", "causal") for dim in (40, 64, 80, 128, 256)]
CASES += [("True", 16384, 64), ("causal", 16384, 64), ("causal", 512, 64), ("causal", 128, 64)]
HEADS, LEAST = 2, 1.15
CODE = """
import json, sys
sys.path.insert(0, {folder!r})
import cpu_dims
print(json.dumps(cpu_dims.compared({case!r}, {backward}, {rounds})))
"""


def compared(case: tuple[str, int, int], backward: bool, rounds: int) -> dict[str, Any]:
    """The row of a case: milliseconds of both, and their ratio."""
    if variant := os.environ.get("CPU_DIMS"):
        cpp_cpu.VARIANTS["native"] = cpp_cpu.VARIANTS[variant]
    torch.set_num_threads(1)
    mask, length, dim = case
    arrays = tuple(torch.randn(1, HEADS, length, dim, requires_grad=backward) for _ in "qkv")
    cotangent = torch.randn(1, HEADS, length, dim)
    calls = {
        "native": partial(fk.compile(mask, backend="native"), *arrays),
        "SDPA": partial(sdpa, *arrays, is_causal=mask == "causal"),
    }
    torch.testing.assert_close(calls["native"](), calls["SDPA"](), rtol=1e-3, atol=1e-4)
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


def rows(variant: str, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    given = {"CPU_DIMS": variant, "ATEN_CPU_CAPABILITY": variant} if variant else {}
    for case in CASES:
        for backward in (False, True):
            code = CODE.format(folder=os.path.dirname(__file__), case=case, backward=backward, rounds=rounds)
            mask, length, dim = case
            name = f"{'no mask' if mask == 'True' else mask}, {length} x {dim}, forward{' and backward' * backward}"
            yield name, json.loads(fresh(code, **given))


if __name__ == "__main__":
    parts = {"native": partial(rows, ""), "avx2": partial(rows, "avx2")}
    run_parts(__doc__, parts, "cpu-dims", lambda part: {"threads": 1, "heads": HEADS, "dtype": "float32"})
