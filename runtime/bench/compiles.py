"""First calls: cold, with what was compiled on disk, and at other lengths. Each contestant in processes of its own.

A process runs `python -m frisket.runtime.bench.compiles JOB`, the cost of one first call. JOB is a pickle of a
contestant's name, a stage and contests of other lengths. It prints one JSON object: the seconds of a second call,
and of the first beyond it. For each other length it has the seconds and compilations of a first call.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from . import contestants
from .race import Call, Contest, Stage, failure_text

# where what is compiled is kept, by the variable that says so
CACHES = {"FRISKET_CACHE_DIR": "frisket", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
CACHES |= {"JAX_COMPILATION_CACHE_DIR": "jax"}


def stage_of(name: str, device: str) -> Stage:
    if name == "torch":
        return contestants.torch_stage(device, lengths=True)
    return contestants.jax_stage("gpu" if device == "cuda" else device)


def main(path: str) -> None:
    who, stage_name, device, contests = pickle.loads(Path(path).read_bytes())
    # a stage does not pickle, so that a job names its contestant
    contestant = next(c for c in stage_of(stage_name, device).contestants if c.name == who)
    compilations = counter(stage_name)
    warm_up(stage_name, device)
    first, again, _ = timed(contestant.prepare, contests[0], compilations)
    others = [timed(contestant.prepare, c, compilations) for c in contests[1:]]
    figures = {"first": first - again, "others": [f - a for f, a, _ in others], "compilations": [n for *_, n in others]}
    print(json.dumps(figures))


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
        contestants.warm_up(device)
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
            counters = sys.modules.get("torch._dynamo.utils")  # nothing is compiled where it is not imported
            return counters.counters["stats"]["unique_graphs"] if counters else 0

        return lambda: ours() + graphs()
    import jax

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        # one event for each program that XLA compiles
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return lambda: ours() + len(seen)


LIMIT = 600  # seconds of one process


@dataclass
class Firsts:
    """One contest as far as it has come; seconds by contestant."""

    contest: Contest
    stage: str
    ours: tuple[str, ...]
    lengths: tuple[int, ...]
    cold: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)
    compilations: dict[str, int] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    doing: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """A row in the form of schema.py; ratios are of cold first calls, peer / ours."""
        entry: dict[str, Any] = {}
        if self.cold:
            peers = [n for n in self.cold if n not in self.ours]
            pairs = {f"{p} / {o}": [self.cold[p] / self.cold[o]] for o in self.ours if o in self.cold for p in peers}
            seconds = {"s, cold": self.cold, "s, from disk": self.disk, "s, another length": self.other}
            figures: dict[str, Any] = {name: dict(of) for name, of in seconds.items()}
            figures[f"compilations for {len(self.lengths) - 1} other lengths"] = dict(self.compilations)
            entry = {"figures": figures, "ratios": pairs}
        return entry | ({"notes": dict(self.out)} if self.out else {})


def run(
    contests: list[Contest], stage: Stage, device: str, families: Collection[str] | None = None
) -> Iterator[Firsts]:
    """`contests` are one mask at several lengths, the first of them the one that is met first."""
    chosen = [c for c in stage.contestants if c.ours or families is None or c.family in families]
    lengths = tuple(c.sizes.q_len for c in contests)
    firsts = Firsts(contests[0], stage.name, tuple(c.name for c in chosen if c.ours), lengths, machine=stage.machine)
    for c in chosen:
        firsts.doing = c.name
        yield firsts
        if c.missing:
            firsts.out[c.name] = c.missing
            continue
        try:
            c.prepare(contests[0])  # compiles nothing: it says whether there are words for it
        except Exception as error:
            firsts.out[c.name] = failure_text(error)
            continue
        with tempfile.TemporaryDirectory() as folder:
            # the second process starts with what the first has compiled
            cold = _child(folder, (c.name, stage.name, device, contests))
            # its first call alone is timed
            disk = cold if isinstance(cold, str) else _child(folder, (c.name, stage.name, device, contests[:1]))
        if isinstance(cold, str) or isinstance(disk, str):
            firsts.out[c.name] = str(cold if isinstance(cold, str) else disk)
            continue
        firsts.cold[c.name], firsts.disk[c.name] = cold["first"], disk["first"]
        if cold["others"]:
            firsts.other[c.name] = median(cold["others"])
            firsts.compilations[c.name] = sum(cold["compilations"])
        yield firsts
    firsts.doing = ""
    yield firsts


def _child(folder: str, job: Any) -> dict[str, Any] | str:
    """The result of a job in a process that keeps compiled kernels in `folder`, or the last words of the process."""
    path = Path(folder, "job.pickle")
    path.write_bytes(pickle.dumps(job))
    env = os.environ | {name: str(Path(folder, at)) for name, at in CACHES.items()}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # JAX stores nothing that took less than a second
    # -P: no module of the caller's folder is imported
    command = [sys.executable, "-P", "-m", "frisket.runtime.bench.compiles", str(path)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"failed: not done after {LIMIT} s"
    if done.returncode:
        return "failed: " + (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]  # libraries print, too


if __name__ == "__main__":
    main(sys.argv[1])
