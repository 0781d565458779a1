"""What a warm call of Triton's kernels costs the host: `python benchmarks/overhead.py`.

Kernels are launched without a device, by the same Python as on a GPU, on tensors of the CPU. The time is that of the
host: finding the plan, laying arguments out, allocating results, autograd's share. "call" is a call without
gradients, "with gradients" one whose arrays require them, "and backward" such a call and its backward. The arrays are
small, because a CPU asks its system for the memory of large ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from store import keep, shown
from support.triton import null as triton_null

import frisket as fk
from frisket.runtime.backends.base import RECORDS, register

S, H = 256, 2
CALLS, ROUNDS = 200, 31
ALIBI = "param slope: float[_]\nscore = score + slope[h] * (k - q)"
SCALAR = "param c: float\nscore = c * tanh(score / c)"


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """(attention, what a call brings beside q, k and v)."""
    triton = {"backend": "triton"}
    doc = torch.arange(S) // 100
    documents = fk.compile("causal & same(doc)", **triton)
    return {
        "causal": (fk.compile("causal", **triton), {}),
        "window": (fk.compile("causal & window(256)", **triton), {}),
        "documents, planned": (documents, {"plan": documents.plan(S, S, 1, H, doc=doc, flat=True)}),
        "softcap": (fk.compile("causal", "softcap(20)", **triton), {}),
        "a learned table": (fk.compile("causal", ALIBI, **triton), {"slope": torch.randn(H)}),
        "a learned scalar": (fk.compile("causal", SCALAR, **triton), {"c": torch.tensor(20.0)}),
        "sinks and dropout": (fk.compile("causal", dropout=0.1, **triton), {"sinks": torch.randn(H), "seed": 3}),
    }


def microseconds(run: Callable[[], Any]) -> float:
    """One call's share of many, in the best of the rounds: what else the machine does only adds."""
    for _ in range(CALLS):
        run()
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            run()
        times.append((time.process_time() - start) / CALLS)
    return 1e6 * min(times)


def figures(att: Any, given: dict[str, Any]) -> dict[str, float]:
    arrays = [torch.randn(1, H, S, 64, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in arrays]
    cotangent = torch.randn_like(arrays[0])

    def both() -> None:
        torch.autograd.grad(att(*leaves, **given), leaves, cotangent)

    return {
        "call": microseconds(lambda: att(*arrays, **given)),
        "with gradients": microseconds(lambda: att(*leaves, **given)),
        "and backward": microseconds(both),
    }


def main() -> None:
    torch.set_num_threads(1)
    triton_null.install()
    register(replace(RECORDS["triton"], reason=lambda framework: ""))
    found = {}
    for name, case in cases().items():
        found[name] = {"figures": {"us": {n: round(x, 1) for n, x in figures(*case).items()}}}
        print(shown(name, found[name]), flush=True)
    keep("overhead", "host", found, {"shape": [1, H, S, 64], "dtype": "bfloat16", "rounds": ROUNDS})


if __name__ == "__main__":
    main()
