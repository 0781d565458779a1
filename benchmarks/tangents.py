"""Tangents of native kernels beside their forward: `python benchmarks/tangents.py`, or a part of it.

"torch": `torch.func.jvp`, which runs one kernel for out and its tangent. "jax": `jax.jvp`, a forward and a kernel for
the tangent. Four heads of 64, 2,048 tokens, float32 and bfloat16, with tangents of q, k and v, or of q alone. The calls
of a row run in turns; a figure is processor time, the median over rounds of jvp / forward, with the 95 % interval of
that median.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from store import run_parts

import frisket as fk
from frisket.runtime.bench.race import processor_seconds, rounds_of, row

LENGTH, HEADS, DIM = 2048, 4, 64
MASKS = "causal & window(256)", "causal"
MOST = {"q, k and v": 3.2, "q": 2.2}  # forwards that a jvp may take
Rows = Iterator[tuple[str, dict[str, Any]]]


def compared(name: str, forward: Any, jvps: dict[str, Any], rounds: int, goals: bool) -> tuple[str, dict[str, Any]]:
    calls = {"forward": forward, **jvps}
    for call in calls.values():
        call()
    result = row(rounds_of(calls, rounds, clock=processor_seconds), ["forward"])
    if goals:
        result["goals"] = {"at most": {"ratios": {f"{n} / forward": most for n, most in MOST.items()}}}
    return name, result


def in_torch(rounds: int) -> Rows:
    import torch

    for mask, dtype in product(MASKS, (torch.float32, torch.bfloat16)):
        att = fk.compile(mask, backend="native")
        arrays, along = ([torch.randn(1, HEADS, LENGTH, DIM).to(dtype) for _ in "qkv"] for _ in range(2))
        jvps = {
            "q, k and v": partial(torch.func.jvp, att, tuple(arrays), tuple(along)),
            "q": partial(torch.func.jvp, lambda q, att=att, a=arrays: att(q, *a[1:]), (arrays[0],), (along[0],)),
        }
        name = f"{mask}, {str(dtype).removeprefix('torch.')}"
        yield compared(name, partial(att, *arrays), jvps, rounds, mask == MASKS[0] and dtype == torch.float32)


def in_jax(rounds: int) -> Rows:
    import jax
    import numpy as np

    draws = np.random.default_rng(0)
    for mask in MASKS:
        att = fk.compile(mask, backend="native")
        shape = 1, LENGTH, HEADS, DIM
        arrays, along = ([draws.standard_normal(shape).astype(np.float32) for _ in "qkv"] for _ in range(2))
        both = jax.jit(lambda a, t, att=att: jax.jvp(att, a, t))
        of_q = jax.jit(lambda a, t, att=att: jax.jvp(lambda q: att(q, *a[1:]), (a[0],), (t,)))
        given = jax.tree.map(jax.numpy.asarray, (arrays, along))
        forward = jax.jit(att)
        jvps = {
            "q, k and v": lambda both=both, x=given: jax.block_until_ready(both(*x)),
            "q": lambda of_q=of_q, x=given: jax.block_until_ready(of_q(x[0], x[1][0])),
        }
        run = partial(lambda f, x: jax.block_until_ready(f(*x)), forward, given[0])
        yield compared(f"{mask}, float32", run, jvps, rounds, False)


if __name__ == "__main__":
    run_parts(
        __doc__, {"torch": in_torch, "jax": in_jax}, "tangents", lambda part: {"tokens": LENGTH, "heads": HEADS}, 41
    )
