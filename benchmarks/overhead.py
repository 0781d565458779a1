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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from store import keep, shown

import frisket as fk
from frisket.runtime.backends.base import RECORDS, register

S, H = 256, 2
CALLS, ROUNDS = 200, 31
KINDS = ("call", "with gradients", "and backward")
ALIBI = "param slope: float[_]\nscore = score + slope[h] * (k - q)"
SCALAR = "param c: float\nscore = c * tanh(score / c)"


def cases(backend: str, length: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """(attention, the keywords of its calls) by name."""
    compiled = partial(fk.compile, backend=backend)
    doc = torch.arange(length) // 100
    documents = compiled("causal & same(doc)")
    return {
        "causal": (compiled("causal"), {}),
        "window": (compiled("causal & window(256)"), {}),
        "documents, planned": (documents, {"plan": documents.plan(length, length, 1, H, doc=doc, flat=True)}),
        "softcap": (compiled("causal", "softcap(20)"), {}),
        "a learned table": (compiled("causal", ALIBI), {"slope": torch.randn(H)}),
        "a learned scalar": (compiled("causal", SCALAR), {"c": torch.tensor(20.0)}),
        "sinks and dropout": (compiled("causal", dropout=0.1), {"sinks": torch.randn(H), "seed": 3}),
    }


def calls(att: Any, keywords: dict[str, Any], length: int) -> dict[str, Callable[[], Any]]:
    """The calls to time, of an attention with these keywords."""
    arrays = [torch.randn(1, H, length, 64, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in arrays]
    cotangent = torch.randn_like(arrays[0])
    timed = (
        lambda: att(*arrays, **keywords),
        lambda: att(*leaves, **keywords),
        lambda: torch.autograd.grad(att(*leaves, **keywords), leaves, cotangent),
    )
    return dict(zip(KINDS, timed, strict=True))


def without_device() -> None:
    """Triton's kernels launch into nothing, from tensors of the CPU."""
    # imported where it is used: it needs the modules of one tree, and guard.py times other trees
    from support.triton import null as triton_null

    triton_null.install()
    register(replace(RECORDS["triton"], reason=lambda framework: ""))


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


def main() -> None:
    torch.set_num_threads(1)
    without_device()
    found = {}
    for name, case in cases("triton", S).items():
        us = {n: round(microseconds(call), 1) for n, call in calls(*case, S).items()}
        found[name] = {"figures": {"us": us}}
        print(shown(name, found[name]), flush=True)
    keep("overhead", "host", found, {"shape": [1, H, S, 64], "dtype": "bfloat16", "rounds": ROUNDS})


if __name__ == "__main__":
    main()
