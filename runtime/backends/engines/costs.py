"""Costs: a committed table of where an engine is faster than the generated kernels, with its sources.

A row holds for an engine, a platform and dtypes; the first that holds decides. Nothing is measured while a program
runs, so the same call on the same versions takes the same engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CostRow:
    """One row: `pays(arguments, call)` says whether the engine wins, and `source` where that is known from."""

    engine: str
    platform: str
    dtypes: tuple[str, ...]
    pays: Callable[[Any, Any], bool]
    where: str  # in words
    source: str


def slower(proof: Any, call: Any) -> str:
    """A reason why the generated kernels are taken though an engine would do; empty where it is faster."""
    for row in COSTS:
        if (row.engine, row.platform) == (proof.backend, call.platform) and call.dtype in row.dtypes:
            return "" if row.pays(proof.arguments, call) else f"generated kernels are faster here: {row.where}"
    return "no measurement says that it is faster here"


HALVES = ("float16", "bfloat16")
COSTS = (
    CostRow(
        "sdpa", "cpu", ("float32", *HALVES), lambda a, call: call.generated == "aten" and call.geometry.q_len <= 256,
        "with a C++ compiler, and past 256 queries without one",
        "benchmarks/results/engines.json, AMD EPYC with AVX-512, one thread, head dim 64: library calls take 1.7 to 14 "
        "times as long up to 256 tokens, 1.0 to 1.2 times at 1,024; C++ kernels 0.1 to 0.9 times, but for 1.5 at 16",
    ),
    CostRow(
        "cudnn", "cuda", HALVES,
        lambda a, call: a.capability >= (9, 0) and call.geometry.head_dim in (64, 128) and call.geometry.q_len >= 1024,
        "with fewer than 1,024 queries, head dims other than 64 and 128, and on GPUs before Hopper",
        "NVIDIA's cudnn-frontend, causal at head dim 128: 490 to 680 TFLOP/s forward at 2,048 to 16,384 tokens on "
        "an H200; the model of an H100 gives Triton's kernels 303 to 428 (benchmarks/results/gpu-model.json)",
    ),
    CostRow(
        "sdpa", "cuda", HALVES, lambda a, call: False, "FlashAttention 2 is not ahead of them on any GPU",
        "FlashAttention 3's paper: FlashAttention 2 has 335 (causal) and 370 TFLOP/s (full) on an H100 at "
        "16,384 tokens; the model gives Triton's kernels 347 to 428",
    ),
)  # fmt: skip
