"""The cost of a first call, in a process of its own: `python -m frisket.runtime.bench.first JOB`.

JOB is a pickle of a contestant's name, a stage and contests of other lengths. Printed is one JSON object: the seconds
of a second call, those of the first beyond it, and the seconds and compilations of a first call at each other length.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import jax_stage, torch_stage
from .contest import Call, Contest, Stage

CACHES = {  # where what is compiled is kept, by the variable that says so
    "FRISKET_CACHE_DIR": "frisket", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "JAX_COMPILATION_CACHE_DIR": "jax",
}  # fmt: skip


def stage_of(name: str, device: str) -> Stage:
    if name == "torch":
        return torch_stage.stage(device, lengths=True)
    return jax_stage.stage("gpu" if device == "cuda" else device)


def main(path: str) -> None:
    who, stage_name, device, contests = pickle.loads(Path(path).read_bytes())
    stage = stage_of(stage_name, device)
    contestant = next(c for c in stage.contestants if c.name == who)
    compilations = counter(stage_name)
    warm_up(stage_name, device)
    first, again, _ = timed(contestant.prepare, contests[0], compilations)
    others = [timed(contestant.prepare, c, compilations) for c in contests[1:]]
    found = {"first": first - again, "others": [f - a for f, a, _ in others], "compilations": [n for *_, n in others]}
    print(json.dumps(found))


def timed(
    prepare: Callable[[Contest], Call], contest: Contest, compilations: Callable[[], int]
) -> tuple[float, float, int]:
    """Seconds of a first call, of a second, and what a compiler was asked."""
    before, start = compilations(), time.perf_counter()
    call = prepare(contest)
    call()
    first = time.perf_counter() - start
    start = time.perf_counter()
    call()
    return first, time.perf_counter() - start, compilations() - before


def warm_up(stage_name: str, device: str) -> None:
    """Run the work that a framework does once in a process, whoever computes first."""
    if stage_name == "torch":
        torch_stage.warm_up(device)
    else:
        import jax

        jax.jit(lambda x: x + 1)(1.0).block_until_ready()


def counter(stage_name: str) -> Callable[[], int]:
    """How often a compiler has been asked so far: graphs of torch.compile, programs of XLA, kernels of ours."""
    kernels = Path(os.environ["FRISKET_CACHE_DIR"])
    seen: list[Any] = []

    def ours() -> int:
        return sum(1 for p in kernels.rglob("*") if p.suffix in (".so", ".cubin", ".hsaco"))

    if stage_name == "torch":

        def graphs() -> int:
            counters = sys.modules.get("torch._dynamo.utils")
            return counters.counters["stats"]["unique_graphs"] if counters else 0

        return lambda: ours() + graphs()
    import jax

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return lambda: ours() + len(seen)


if __name__ == "__main__":
    main(sys.argv[1])
