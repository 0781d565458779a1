"""Backends of accelerators that run in an interpreter on a CPU, and a warning of how long a call may take there."""

from __future__ import annotations

from frisket.lowering.plan import Geometry
from frisket.runtime.machine.once import warn_once

from .registry import PALLAS, interpreted

# seconds for 128 queries and 128 keys of one head, forward, measured on two cores; gradients take some three times more
SECONDS = {"triton": 0.03, "pallas-tpu": 0.0005, "pallas-mosaic-gpu": 4.0}
FIRST = 1.0  # of tracing and compiling, whatever the lengths
TIMES = ((3, "some seconds"), (30, "about 10 s"), (180, "some minutes"), (1800, "about 10 min"), (10800, "an hour"))


def emulated(backend: str) -> bool:
    """Whether the kernels of a backend run in an interpreter here, being written for a device that is not there."""
    if backend not in PALLAS:
        return interpreted(backend)
    import jax  # JAX's backends alone are asked for

    return bool(jax.default_backend() != {"pallas-tpu": "tpu", "pallas-mosaic-gpu": "gpu"}[backend])


def warn_slow(backend: str, g: Geometry) -> None:
    """Say once that calls on this backend are interpreted, and how long one of these sizes may take."""
    if not all(type(n) is int for n in (g.batch, g.heads, g.q_len, g.kv_len)):
        return
    tiles = g.batch * g.heads * -(-g.q_len // 128) * -(-g.kv_len // 128)
    seconds = FIRST + tiles * SECONDS[backend]
    how_long = next((words for most, words in TIMES if seconds < most), "many hours")
    owner = "Triton's" if backend == "triton" else "Pallas'"
    warn_once(
        f"backend {backend!r} runs in {owner} interpreter on this CPU, for checking and not for speed: a call of "
        f"this size may take {how_long}, its gradient three times as long\n"
        "  without a backend calls run on kernels for the CPU"
    )
