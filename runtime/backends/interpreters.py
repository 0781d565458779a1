"""A warning of how long a call may take where an interpreter runs a GPU's or a TPU's kernels on a CPU."""

from __future__ import annotations

from frisket.lowering.plan import Geometry
from frisket.runtime.machine.once import warn_once

from .base import RECORDS

FIRST = 1.0  # seconds of tracing and compiling, whatever the lengths
TIMES = ((3, "some seconds"), (30, "about 10 s"), (180, "some minutes"), (1800, "about 10 min"), (10800, "an hour"))


def warn_slow(backend: str, g: Geometry) -> None:
    """Say once that calls on this backend are interpreted, and how long one of these sizes may take."""
    interpreter = RECORDS[backend].interpreter
    if interpreter is None or not all(type(n) is int for n in (g.batch, g.heads, g.q_len, g.kv_len)):
        return
    tiles = g.batch * g.heads * -(-g.q_len // 128) * -(-g.kv_len // 128)
    seconds = FIRST + tiles * interpreter.seconds
    how_long = next((words for most, words in TIMES if seconds < most), "many hours")
    warn_once(
        f"backend {backend!r} runs in {interpreter.owner} interpreter on this CPU, for checking and not for speed: a "
        f"call of this size may take {how_long}, its gradient three times as long\n"
        "  without a backend calls run on kernels for the CPU"
    )
