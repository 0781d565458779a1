"""What the parts of gpu.py share: how large everything is, clocks, tensors, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from frisket.runtime.bench.machine import raced, seconds

Call = Callable[[], Any]
Measure = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """How large everything is; lengths in tokens."""

    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    tokens: int  # of a call: batch * length
    width: int  # heads * head size
    cache: int
    batches: tuple[int, ...]  # of a step of decoding
    documents_at: int
    rounds: int
    dtype: Any
    device: str

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


FULL = Scale(
    (2048, 8192, 32768), (64, 128), 32768, 2048, 32768, (1, 8, 32), 131072, 15, torch.bfloat16, "cuda",
)  # fmt: skip
DRY = Scale((48,), (16,), 48, 32, 96, (1,), 512, 2, torch.float32, "cpu")


@dataclass(frozen=True)
class Part:
    """`rows` are its names; `prepare` compiles a row and returns what measures it. `together`: how many rows compile
    side by side, 0: as many as there are workers. A row that prepares or measures for `limit` seconds hangs. `whole`
    says whether the results of a row are all that is asked today, and `waits` whether all other rows run first."""

    rows: Callable[[Scale], Iterable[str]]
    prepare: Callable[[str, Scale], Measure]
    together: int = 0
    minutes: float = 7.5
    limit: float = 150
    whole: Callable[[dict[str, Any]], bool] = lambda found: True
    waits: Callable[[str], bool] = lambda row: False


# -- times ----------------------------------------------------------------------------------------------


def on_device(call: Call) -> float:
    """Seconds of a call on the GPU: enough of them in a row, and the host far ahead when they begin."""
    if not torch.cuda.is_available():
        return seconds(call)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(5_000_000)  # cycles, some milliseconds
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / CALLS


CALLS = 5


def compared(calls: dict[str, Call], rounds: int, work: float, goals: Any = None) -> dict[str, Any]:
    """`work` in floating-point operations; ratios are peer / frisket."""
    found = raced(calls, rounds, clock=on_device)
    found["figures"]["tflops"] = {n: work / ms / 1e9 for n, ms in found["figures"]["ms"].items()}
    return found if goals is None else {**found, "goals": reached(goals)}


def reached(goals: tuple[float, float], who: str = "frisket") -> dict[str, Any]:
    """TFLOP/s of visible work that must be reached; what should be is in gpu_contests.GOALS and gpu_jax.GOALS."""
    return {"at least": {"tflops": {who: goals[0]}}}


def drawn(batch: int, heads: int, q_len: int, kv_len: int, dim: int, scale: Scale, kv_heads: int = 0) -> list[Any]:
    torch.manual_seed(0)
    shapes = [(batch, heads, q_len, dim), *[(batch, kv_heads or heads, kv_len, dim)] * 2]
    return [torch.randn(s, device=scale.device).to(scale.dtype) for s in shapes]


def same(got: Any, want: Any) -> None:
    """Within what 16 bits leave of gradients that sum thousands of terms."""
    for x, y in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        error, size = (x.float() - y.float()).abs().max().item(), y.float().abs().max().item()
        if not error <= 0.02 * max(size, 1.0):
            raise AssertionError(f"results differ by {error:.3g}, the largest is {size:.3g}")
