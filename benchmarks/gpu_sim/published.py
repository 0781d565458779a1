"""Published figures of flex_attention on H100 SXM, which the model is held to.

All are TFLOP/s of visible pairs, bfloat16, batch 1, read from charts (to some 3 %) or worked out of latencies. The
charts of MagiAttention (its `cp_benchmark`) have 64 query heads and 8 key heads; pytorch's issues 16 heads of each.
They ran other versions of torch and Triton than those that are compiled here.
"""

from __future__ import annotations

from .full import Case

MAGI = "MagiAttention, cp_benchmark"
ISSUE, BENCHMARK = "pytorch #137036", "pytorch/benchmark #2443"
ROWS = [  # direction, mask, head size, length, TFLOP/s, source
    ("forward", "causal", 128, 2048, 270, MAGI), ("forward", "causal", 128, 4096, 326, MAGI),
    ("forward", "causal", 128, 8192, 369, MAGI), ("forward", "causal", 128, 32768, 391, MAGI),
    ("forward", "full", 128, 8192, 385, MAGI), ("forward", "full", 128, 32768, 391, MAGI),
    ("forward", "full", 128, 16384, 408, BENCHMARK), ("forward", "full", 64, 16384, 346, ISSUE),
    ("forward", "causal", 64, 16384, 340, ISSUE), ("backward", "causal", 128, 2048, 112, MAGI),
    ("backward", "causal", 128, 4096, 165, MAGI), ("backward", "causal", 128, 8192, 217, MAGI),
    ("backward", "causal", 128, 32768, 271, MAGI), ("backward", "full", 128, 8192, 283, MAGI),
    ("backward", "full", 128, 32768, 288, MAGI), ("backward", "full", 64, 16384, 268, ISSUE),
    ("backward", "causal", 64, 16384, 263, ISSUE),
]  # fmt: skip
# the ratio of model and published figure: of forwards, of backwards, and of causal backwards up to 8k, whose charts
# hold a cost that grows with the length more slowly than the pairs, and that the model has no part for
BANDS = {"forward": (0.9, 1.2), "backward": (0.85, 1.4), "short causal backward": (1.0, 1.8)}


def band(direction: str, mask: str, length: int) -> tuple[float, float]:
    short = direction == "backward" and mask == "causal" and length <= 8192
    return BANDS["short causal backward" if short else direction]


def case(mask: str, dim: int, length: int, source: str) -> Case:
    return Case(mask, dim, length, 64, 8) if source == MAGI else Case(mask, dim, length)


def name(direction: str, mask: str, dim: int, length: int) -> str:
    return f"{direction} {mask}, {length // 1024}k, D{dim}"
