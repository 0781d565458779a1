"""What the JAX binding costs beside the kernels: `python benchmarks/jax_binding.py`.

Parts, each a key of results/jax-binding.json:

- trace: seconds to trace and lower causal attention, of a first call in a process and of another shape after it, for
  the platform's own kernels, on the wall and of the processor, which others on the machine do not lengthen. Nothing
  runs, so no TPU and no GPU is needed; native kernels are in the disk cache.
- dispatch: microseconds of a warm call under `jax.jit`, beside the same custom call in a jit by itself.
- eager: microseconds of a warm call outside of jit, beside one addition.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from store import run_parts

import frisket as fk
from frisket.runtime.backends.cpp import jax as native_jax
from frisket.runtime.bench.race import median_ratio, rounds_of

Call = Callable[[], Any]
GOAL = 1.5  # seconds
REPEATED = 50
FIRST = """
import json, sys, time
import jax, jax.numpy as jnp
import frisket as fk
platform, what = sys.argv[1:]
def attend(q, k, v):
    return fk.attention(q, k, v, "causal").astype("float32").sum()
function = attend if what == "forward" else jax.value_and_grad(attend, (0, 1, 2))
def seconds(length):
    shapes = [jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)] * 3
    clocks = time.perf_counter, time.process_time
    start = [clock() for clock in clocks]
    jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
    return [clock() - then for clock, then in zip(clocks, start)]
jax.jit(lambda x: x + 1).lower(1.0)  # JAX itself has started
print(json.dumps([*seconds(4096), *seconds(2048)]))
"""


def trace(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for platform in ("cpu", "tpu", "cuda"):
        for what in ("forward", "forward and backward"):
            runs = [
                json.loads(subprocess.check_output([sys.executable, "-c", FIRST, platform, what], text=True))
                for _ in range(max(1, rounds // 3))
            ]
            names = "first", "first, of the processor", "another shape", "another shape, of the processor"
            times = (statistics.median(x) for x in zip(*runs, strict=True))
            yield (
                f"{what}, {platform}",
                {
                    "figures": {"s": dict(zip(names, times, strict=True))},
                    "goals": {"at most": {"s": dict.fromkeys(names[:2], GOAL)}},
                },
            )


def drawn() -> list[Any]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.standard_normal((1, 16, 1, 16), np.float32)) for _ in range(3)]


def bare(call: Callable[..., Any], arrays: list[Any]) -> Callable[..., Any]:
    """The custom call that `call` makes, in a jit of its own with the same operands."""
    found, made = [], native_jax._compiled

    def watched(static: Any) -> Any:
        def run(qkv: Any, *values: Any) -> Any:
            found.append((made(static), values))
            return made(static)(qkv, *values)

        return run

    native_jax._compiled = watched  # type: ignore[assignment]
    try:
        call(*arrays)
    finally:
        native_jax._compiled = made
    (kernel, values), *_ = found
    return jax.jit(lambda q, k, v: kernel((q, k, v), *values)[0])


def many(call: Call) -> Call:
    def run() -> None:
        for _ in range(REPEATED):
            jax.block_until_ready(call())

    return run


def beside(calls: dict[str, Call], rounds: int) -> dict[str, Any]:
    times = rounds_of({n: many(c) for n, c in calls.items()}, rounds)
    other = next(n for n in times if n != "frisket")
    return {
        "figures": {"us": {n: 1e6 * statistics.median(t) / REPEATED for n, t in times.items()}},
        "ratios": {f"frisket / {other}": median_ratio(times["frisket"], times[other])},
    }


def dispatch(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    arrays, att = drawn(), fk.compile("causal", backend="cpp")
    calls = {"frisket": partial(jax.jit(att), *arrays), "the custom call alone": partial(bare(att, arrays), *arrays)}
    yield "16 tokens, under jit", beside(calls, rounds)


def eager(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    arrays, att = drawn(), fk.compile("causal", backend="cpp")
    add = jax.jit(jnp.add)
    yield (
        "16 tokens, outside of jit",
        beside({"frisket": partial(att, *arrays), "one addition": partial(add, *arrays[:2])}, rounds),
    )


PARTS = {f.__name__: f for f in (trace, dispatch, eager)}


if __name__ == "__main__":
    run_parts(__doc__, PARTS, "jax-binding", lambda part: {"dtype": "bfloat16" if part == "trace" else "float32"})
