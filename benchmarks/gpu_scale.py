"""What the parts of gpu.py share: how large everything is, clocks, tensors, comparisons."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gpu_sensors
import torch

from frisket.runtime.bench import race
from frisket.runtime.bench.race import seconds, turns

Call = Callable[[], Any]
Row = dict[str, Any]
Times = dict[str, list[float]]  # seconds of every call in every round
Measure = Callable[[], Iterable[Row]]  # a row of results as it grows; the last is what there is to keep


class Deadline:
    """The time after which a row begins nothing more, and the parts that it left out for that."""

    def __init__(self, at: float = math.inf) -> None:
        self.at, self.left_out = at, list[str]()

    def passed(self, part: str) -> bool:
        """Whether it is too late for this part of a row, which is then left out."""
        late = time.monotonic() > self.at
        if late:
            self.left_out.append(part)
        return late


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
    grouped_heads: int  # query heads where they share key heads
    grouped_lengths: tuple[int, ...]
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


FULL = Scale(
    (2048, 8192, 32768), (64, 128), 32768, 2048, 32768, (1, 8, 32), 131072, 15, torch.bfloat16, "cuda", 32,
    (4096, 16384),
)  # fmt: skip
DRY = Scale((48,), (16,), 48, 32, 96, (1,), 512, 2, torch.float32, "cpu", 8, (32,))


@dataclass(frozen=True)
class Part:
    """`rows` are its names; `prepare` compiles a row and returns what measures it. `together`: how many rows compile
    side by side, 0: as many as there are workers. A row that prepares or measures for `limit` seconds hangs. `whole`
    says whether the results of a row are all that is asked today, and `waits` whether all other rows run first. Rows of
    a part `of_the_day` are measured again on another day: they say what is installed."""

    rows: Callable[[Scale], Iterable[str]]
    prepare: Callable[[str, Scale], Measure]
    together: int = 0
    minutes: float = 7.5
    limit: float = 150
    whole: Callable[[Row], bool] = lambda row: True
    waits: Callable[[str], bool] = lambda row: False
    of_the_day: bool = False


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


def waited(call: Call) -> float:
    """Seconds of a call with all that it does on the host, until the GPU has ended it."""
    return seconds(lambda: (call(), torch.cuda.is_available() and torch.cuda.synchronize()))


SLOWER = 0.95  # of a row's highest clock: rounds below are marked


def watched(
    calls: dict[str, Call], scale: Scale, row: Callable[[Times], Row], notes: dict[str, Any] | None = None,
    clock: Callable[[Call], float] = on_device,
) -> Iterator[Row]:  # fmt: skip
    """After every round the row of results that `row` makes of the times so far, with the clock, power and temperature
    of the GPU in each round. The first call runs once more while they are read."""
    readings = []
    for number, times in enumerate(turns(calls, scale.rounds, clock=clock), 1):
        readings.append(gpu_sensors.reading(next(iter(calls.values()))))
        yield with_readings(row(times), readings, notes or {})
        if number < scale.rounds and scale.deadline.passed(f"rounds after {number} of {scale.rounds}"):
            return


def with_readings(row: Row, readings: list[gpu_sensors.Reading | None], notes: dict[str, Any]) -> Row:
    """The row with `rounds`, and a note of those in which the clock fell."""
    notes = {**row.get("notes", {}), **notes}
    read = [x for x in readings if x is not None]
    if len(read) == len(readings):
        row["rounds"] = dict(zip(gpu_sensors.QUANTITIES, map(list, zip(*read))))
        clocks = row["rounds"]["SM MHz"]
        if slow := [n for n, mhz in enumerate(clocks, 1) if mhz < SLOWER * max(clocks)]:
            notes["slower clock"] = f"in rounds {', '.join(map(str, slow))}, below {SLOWER:.0%} of {max(clocks)} MHz"
    return row | ({"notes": notes} if notes else {})


def one_after_another(measures: dict[str, Measure], scale: Scale) -> Iterator[Row]:
    """A row of rows, each measured when the ones before it are whole."""
    rows: dict[str, Row] = {}
    for name, measure in measures.items():
        if rows and scale.deadline.passed(name):
            continue
        for row in measure():
            rows[name] = row
            yield {"rows": rows}


def rates(times: Times, work: float, goals: Any = None) -> Row:
    """`work` in floating-point operations; ratios are peer / frisket."""
    row = race.row(times)
    row["figures"]["tflops"] = {n: work / ms / 1e9 for n, ms in row["figures"]["ms"].items()}
    return row if goals is None else {**row, "goals": reached(goals)}


def reached(goals: tuple[float, float], who: str = "frisket") -> Row:
    """TFLOP/s of visible work that must be reached; what should be is in gpu_contests.GOALS and gpu_jax.GOALS."""
    return {"at least": {"tflops": {who: goals[0]}}}


def shares(times: Times, read: int, copied: int) -> Row:
    """Microseconds of steps of decoding, and the `read` bytes that each must read in that time, as a share of the rate
    at which the device copies memory. The call "copy" reads and writes `copied` bytes together."""
    each = {n: statistics.median(t) for n, t in times.items()}
    rate = copied / each.pop("copy")
    return {
        "figures": {
            "us": {n: 1e6 * t for n, t in each.items()}, "gb_s": {"copy": rate / 1e9},
            "share of bandwidth": {n: read / t / rate for n, t in each.items()},
        },
    }  # fmt: skip


def copying(scale: Scale) -> tuple[Call, int]:
    """A call that copies memory on the device, and the bytes that it reads and writes."""
    space = torch.empty(2, 1 << (16 if scale.dry else 30), dtype=torch.uint8, device=scale.device)
    return lambda: space[0].copy_(space[1]), space.numel()


# -- arrays and results -----------------------------------------------------------------------------------


class Entrants:
    """Calls that are timed together. Each runs once before and agrees with the first; `notes` say why one cannot."""

    def __init__(self, scale: Scale) -> None:
        self.scale, self.calls, self.notes = scale, dict[str, Call](), dict[str, str]()
        self.result: Any = None  # of the first

    def enter(self, name: str, build: Callable[[], Call], agrees: Callable[[Any, Any], None] | None = None) -> None:
        """Build a call unless it is too late. `agrees` raises an error where its result is not that of the first."""
        if self.calls and self.scale.deadline.passed(name):
            return
        try:
            call = build()
            result = call()
        except Exception as error:  # of any library
            if not self.calls:
                raise
            self.notes[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            return
        if self.calls:
            (agrees or same)(result, self.result)
        else:
            self.result = result
        self.calls[name] = call


def drawn(
    batch: int, heads: int, q_len: int, kv_len: int, dim: int, scale: Scale, kv_heads: int = 0, v_dim: int = 0
) -> list[Any]:  # fmt: skip
    torch.manual_seed(0)
    kv_heads = kv_heads or heads
    shapes = [(batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim or dim)]
    return [torch.randn(s, device=scale.device).to(scale.dtype) for s in shapes]


def same(got: Any, want: Any) -> None:
    """Within what 16 bits leave of gradients that sum thousands of terms."""
    for x, y in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        error, size = (x.float() - y.float()).abs().max().item(), y.float().abs().max().item()
        if not error <= 0.02 * max(size, 1.0):
            raise AssertionError(f"results differ by {error:.3g}, the largest is {size:.3g}")
