"""The rows of guard.py, and the process that times them on one tree; guard.py starts it: `guard_rows.py PART CORES`.

Definitions are those of the programs for torch, JAX, decoding, calls and the model of GPUs in this folder. Attention
has one head in the place of eight, so that a call takes milliseconds. A function for each of the programs gives names
and functions that build a call.

The process answers each line that it reads by a line, both in JSON. `{"build": ROW}` builds the call of a row and warms
it up; the answer is how many calls take SHORTEST seconds and what a call takes, or the error. `{"calls": N}` runs the
call N times; the answer is the seconds of a call.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

Call = Callable[[], Any]
Rows = Iterator[tuple[str, Callable[[], Call]]]
VARIANTS = [("native", dtype, dim) for dtype in ("float32", "bfloat16") for dim in (64, 128)]
VARIANTS.append(("library", "float32", 64))
SHORTEST = 0.01


def attention_in_torch() -> Rows:
    import cpu
    import torch

    def forward(case: cpu.Contest, tier: str, dtype: str, dim: int) -> Call:
        return cpu.ours(case, cpu.drawn(1, 1, cpu.LENGTH, dim, dtype=getattr(torch, dtype)), tier)

    def backward(case: cpu.Contest, tier: str, dtype: str, dim: int) -> Call:
        *arrays, cotangent = (cpu.drawn(1, 1, cpu.LENGTH, dim, dtype=getattr(torch, dtype))[i] for i in (0, 1, 2, 0))
        call = cpu.ours(case, [x.requires_grad_() for x in arrays], tier)
        return lambda: torch.autograd.grad(call(), arrays, cotangent)

    cases = cpu.FORWARD | {"no mask": cpu.Contest("True", None)}
    for variant, (name, case), build in product(VARIANTS, cases.items(), (forward, backward)):
        tier, dtype, dim = variant
        yield f"{name}, {dtype}, D{dim}, {tier}, {build.__name__}", partial(build, case, *variant)


def attention_in_jax() -> Rows:
    import cpu_jax

    arrays = cpu_jax.drawn(1, cpu_jax.LENGTH, 1, cpu_jax.DIM)

    def forward(ours: Callable[[str], Any], tier: str) -> Call:
        return cpu_jax.rested(partial(cpu_jax.jax.jit(ours(tier)), *arrays))

    def backward(ours: Callable[[str], Any], tier: str) -> Call:
        return cpu_jax.rested(cpu_jax.gradients(ours(tier), arrays, arrays[0]))

    cases = cpu_jax.contests().items()
    for tier, (name, (ours, _)), build in product(cpu_jax.TIERS, cases, (forward, backward)):
        yield f"{name}, {tier}, {build.__name__}", partial(build, ours, tier)


def stored_keys() -> Rows:
    import decode_stored

    def step(*case: Any) -> Call:
        return decode_stored.step(*case)[0]

    for (batch, length), dtype, page in product(decode_stored.CACHES, ("float32", "bfloat16", "int8"), (0, 16, 64)):
        pages = f", pages of {page}" if page else ""
        yield f"{batch} x {length}, {dtype}{pages}", partial(step, batch, length, 128, dtype, page)


def calls_in_torch(backend: str, length: int) -> Rows:
    import overhead

    if backend == "triton":
        overhead.without_device()

    def call(kind: str, *case: Any) -> Call:
        return overhead.calls(*case, length)[kind]

    for (name, case), kind in product(overhead.cases(backend, length).items(), overhead.KINDS):
        yield f"{name}, {kind}, {backend}", partial(call, kind, *case)


def graphs() -> Rows:
    import graph_overhead

    def graph(backward: bool) -> Call:
        return graph_overhead.calls_of(graph_overhead.LENGTHS[0], backward)["graph"]

    for backward in (False, True):
        yield f"graph of torch.compile, {'and backward' if backward else 'forward'}", partial(graph, backward)


def cache_steps() -> Rows:
    import decode_overhead

    def step(calls: Callable[..., Any], *case: Any) -> Call:
        return calls(*case, names=("step",))[0]["step"]

    for framework, calls in (("torch", decode_overhead.in_torch), ("JAX", decode_overhead.in_jax)):
        for name, case in decode_overhead.CASES.items():
            yield f"step of a cache, {name}, {framework}", partial(step, calls, *case)


def jitted_calls() -> Rows:
    import cpu_jax

    for tier in cpu_jax.TIERS:
        yield f"16 tokens under jax.jit, {tier}", partial(lambda tier: cpu_jax.rested(cpu_jax.small(tier)), tier)


def predictions() -> Rows:
    """Calls that give the seconds that the model predicts."""
    from gpu_sim import full, published, report, serving

    def attention(direction: str, *case: Any) -> Call:
        return partial(full.seconds, "ours", direction, full.Case(*case))

    def step(kv_dtype: str, page: int) -> Call:
        return lambda: serving.timed(serving.Step(1, (32768,) * 8, kv_dtype, page)).seconds

    for case in report.FIGURES:
        yield published.name(*case), partial(attention, *case)
    for store, case in report.STORES.items():
        yield f"decode, 8 x 32768, {store}", partial(step, *case)


PARTS: dict[str, tuple[Callable[[], Rows], ...]] = {
    "torch": (attention_in_torch,),
    "jax": (attention_in_jax,),
    "decode": (stored_keys,),
    "calls": (
        partial(calls_in_torch, "native", 16),
        partial(calls_in_torch, "triton", 256),
        graphs,
        cache_steps,
        jitted_calls,
    ),
    "model": (predictions,),
}


def serve(part: str, cores: int) -> None:
    # before torch and JAX are imported, whose threads are as many as there are cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    scheduler = os.open("/proc/self/schedstat", os.O_RDONLY)

    def clock() -> float:
        """Seconds on the wall, less those in which this thread waited for a core."""
        return time.perf_counter() - int(os.pread(scheduler, 100, 0).split()[1]) * 1e-9

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library's print is no answer
    rows, failures = {}, []
    for family in PARTS[part]:
        try:
            rows.update(family())
        except Exception as error:  # an earlier commit may lack what the rows import; guard.py says which rows are new
            failures.append(f"{type(error).__name__}: {error}")
    print(json.dumps({"rows": [*rows], "failures": failures}), file=answers)
    call: Call | None = None

    def timed(count: int) -> float:
        assert call is not None
        if part == "model":
            return float(call())
        start = clock()
        for _ in range(count):
            call()
        return (clock() - start) / count

    for line in sys.stdin:
        request = json.loads(line)
        if "calls" in request:
            print(json.dumps({"seconds": timed(request["calls"])}), file=answers)
            continue
        call, count = None, 1
        gc.collect()
        try:
            if request["build"] not in rows:
                raise LookupError("; ".join(failures))
            call = rows[request["build"]]()
            call()
            while (seconds := timed(count)) * count < SHORTEST and part != "model":
                count *= 2
            answer: dict[str, Any] = {"calls": count, "seconds": seconds}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
