"""Costs: a committed table of where an engine is faster than the generated kernels, with its sources, and the
platforms on which each engine was compared with float64 under frisket.

Rows are in the order of speed: of engines that win, the one with the first row runs. Nothing is measured while a
program runs, so the same call on the same versions takes the same engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Where an engine was compared with the oracle as frisket calls it: on the CPU by the tests, on other platforms by
# `python benchmarks/gpu.py right`, whose rows are then in benchmarks/results/gpu.json: results, lse, the engine's own
# gradients, and those of generated kernels from its results. An H100 has not compared heads that share keys.
CHECKED: dict[str, tuple[str, ...]] = {"sdpa": ("cpu",)}


@dataclass(frozen=True)
class CostRow:
    """One row: `pays(call)` says whether the engine wins, and `source` where that is known from."""

    engine: str
    platform: str
    dtypes: tuple[str, ...]
    pays: Callable[[Any], bool]
    where: str  # in words: where generated kernels win
    source: str


def turn(engine: str, call: Any) -> int:
    """The place of an engine among those of a call: that of its first row that says it wins."""
    return next((i for i, row in enumerate(COSTS) if _holds(row, engine, call) and row.pays(call)), len(COSTS))


def lost(engine: str, call: Any) -> str:
    """A reason why a call does not take an engine by itself, whatever its mask; empty where it does."""
    if call.engines is not True and engine not in call.engines:
        return f"engines={', '.join(call.engines)!r} leaves it out"
    if call.engines is True and call.platform not in CHECKED.get(engine, ()):
        return f"not all of it was compared with float64 on {call.platform}: engines={engine!r} takes it"
    rows = [row for row in COSTS if _holds(row, engine, call)]
    if any(row.pays(call) for row in rows):
        return ""
    return (
        f"generated kernels are faster here: {rows[0].where}" if rows else "no measurement says that it is faster here"
    )


def _holds(row: CostRow, engine: str, call: Any) -> bool:
    return (row.engine, row.platform) == (engine, call.platform) and call.dtype in row.dtypes


def _heads(call: Any) -> bool:
    return call.geometry.head_dim == call.geometry.v_dim and call.geometry.head_dim in (64, 128)


HALVES = ("float16", "bfloat16")
FLEX = (
    "PyTorch's post FlexAttention + FlashAttention-4: 1.6 to 3.2 times flex_attention's Triton kernels forward and "
    "1.85 to 2.3 times backward on a GB200; on Hopper and Blackwell 1.2 times or more where arithmetic takes the time. "
    "On an H100 ours are 1.0 to 4.1 times flex_attention's (docs/performance.md)"
)
CUDNN = "with fewer than 1,024 queries, head dims other than 64 and 128, and on GPUs before Hopper"
FLASH = "with fewer than 2,048 queries, and head dims other than 64 and 128"
COSTS = (
    CostRow(
        "flash", "cuda", HALVES,
        lambda call: call.capability >= (10, 0) and _heads(call) and call.geometry.q_len >= 2048, FLASH,
        f"FlashAttention 4's paper: up to 1.3 times cuDNN 9.13 and 2.7 times Triton on a B200; {FLEX}",
    ),
    CostRow(
        "cudnn", "cuda", HALVES,
        lambda call: call.capability >= (9, 0) and _heads(call) and call.geometry.q_len >= 1024, CUDNN,
        "benchmarks/results/gpu.json, an H100, 2,048 to 32,768 tokens: causal forward 0.92 to 1.04 of the time of "
        "generated kernels, backward 0.84 to 0.99, whose sums have no order",
    ),
    CostRow(
        "flash", "cuda", HALVES,
        lambda call: call.capability >= (9, 0) and _heads(call) and call.geometry.q_len >= 2048, FLASH, FLEX,
    ),
    CostRow(
        "sdpa", "cpu", ("float32", *HALVES), lambda call: call.generated == "aten" and call.geometry.q_len <= 256,
        "with a C++ compiler, and past 256 queries without one",
        "benchmarks/results/engines.json, Intel Xeon with AMX, one thread, head dim 64: library calls take 3.8 to 11 "
        "times as long up to 256 tokens, 0.95 to 1.4 times at 1,024; C++ kernels 0.2 to 0.55 times",
    ),
)  # fmt: skip
