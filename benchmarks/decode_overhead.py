"""What a step of decoding costs beside attention itself: `FRISKET_BACKEND=native python benchmarks/decode_overhead.py`.

A step appends one token to every sequence of a cache and attends with its query, at positions that are another at
every step. Beside it runs the same kernel on the same arrays at positions that the host knows, planned once. Parts,
each a key of results/decode-overhead.json, microseconds, over rounds that take turns:

- jax: medians; one jitted step with the cache donated; append alone, and a jitted step that does nothing, beside it.
- torch: one eager step; append alone beside it. Attention is the kernel's executor, called with all that it takes;
  time of this process alone, on one thread, in the round that was disturbed least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
from store import run_parts

import frisket as fk
from frisket.runtime.bench.race import processor_seconds, rounds_of, seconds

HEADS, KV_HEADS, DIM, CAPACITY, STEPS = 8, 2, 64, 1024, 50
CASES = {
    "one sequence": (1, "float32", "causal"),
    "one sequence, int8": (1, "int8", "causal"),
    "one sequence, window(256)": (1, "float32", "causal & window(256)"),
    "8 ragged sequences": (8, "float32", "causal"),
    "8 ragged sequences, int8": (8, "int8", "causal"),
}


def lengths_of(batch: int) -> np.ndarray[Any, Any]:
    """Tokens that are stored: short ones, so that the kernel is short beside what is measured."""
    return np.linspace(64, 200, batch).astype(np.int32)


def rows(
    case: Callable[[int, str, str], tuple[dict[str, Callable[[], Any]], float]],
    rounds: int,
    clock: Callable[[Callable[[], Any]], float] = seconds,
    of: Callable[[list[float]], float] = statistics.median,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for each case, from the calls to be timed, of STEPS steps each, and the figure to reach."""
    for name, what in CASES.items():
        calls, goal = case(*what)
        times = {n: [1e6 * x / STEPS for x in found] for n, found in rounds_of(calls, rounds, clock=clock).items()}
        beside = of(times["step"]) - of(times["attention"])
        found = {n: round(of(each), 1) for n, each in times.items()}
        yield (
            name,
            {
                "figures": {"us": {**found, "overhead": round(beside, 1)}},
                "goals": {"at most": {"us": {"overhead": goal}}},
            },
        )


def in_jax(
    batch: int, dtype: str, mask: str, names: Collection[str] = ("step", "append", "nothing", "attention")
) -> tuple[dict[str, Callable[[], Any]], float]:
    """The calls of these names, and what the step is to cost at most besides attention."""
    import jax
    import jax.numpy as jnp

    from frisket.caches.jax import KVCache

    att, lengths = fk.compile(mask), lengths_of(batch)
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((batch, 1, h, DIM)), jnp.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    prompt = jnp.asarray(draw.standard_normal((batch, 256, KV_HEADS, DIM)), jnp.float32)

    def filled() -> KVCache:
        return KVCache.create(batch, CAPACITY, KV_HEADS, DIM, dtype=dtype).append(prompt, prompt, jnp.asarray(lengths))

    kept = {name: filled() for name in names}
    run = {
        "step": lambda cache, q, k, v: cache.attention(att, q, k, v)[::-1],
        "append": lambda cache, q, k, v: (cache.append(k, v), q),
        "nothing": lambda cache, q, k, v: (cache, q),
        "attention": lambda cache, q, k, v: (cache, fixed(cache, q)),
    }

    if "attention" in names:
        from frisket.runtime.caches.positions import APPENDED, END, START, placed

        known = placed(att, APPENDED).plan(1, CAPACITY, batch, HEADS, **{START: lengths, END: lengths + 1})

    def fixed(cache: KVCache, q: jax.Array) -> Any:
        scales = {n: x for n, x in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)) if x is not None}
        return placed(att, APPENDED)(q, cache.k, cache.v, plan=known, **scales)

    def steps(name: str) -> Callable[[], Any]:
        jitted = jax.jit(run[name], donate_argnums=0)

        def some() -> None:
            kept[name] = kept[name].truncate(lengths)  # the same positions in every round
            for _ in range(STEPS):
                kept[name], out = jitted(kept[name], q, k, v)
            jax.block_until_ready(out)

        return some

    return {n: steps(n) for n in names}, 150


def in_torch(
    batch: int, dtype: str, mask: str, names: Collection[str] = ("step", "append", "attention")
) -> tuple[dict[str, Callable[[], Any]], float]:
    """The calls of these names, and what the step is to cost at most besides attention."""
    import torch

    from frisket.caches.torch import KVCache

    torch.set_num_threads(1)
    att, lengths, draw = fk.compile(mask), lengths_of(batch), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, h, 1, DIM, generator=draw) for h in (HEADS, KV_HEADS, KV_HEADS))
    prompt = torch.randn(batch, KV_HEADS, 256, DIM, generator=draw)

    def filled() -> KVCache:
        made = KVCache.create(batch, CAPACITY, KV_HEADS, DIM, dtype=getattr(torch, dtype))
        return made.append(prompt, prompt, lengths)

    caches = {name: filled() for name in names}
    ready: dict[str, Any] = {}
    if "attention" in names:
        cache = caches["attention"].append(prompt, prompt, [STEPS // 2] * batch)  # as many keys as on average
        cache.attention(att, q, k, v)
        (step,) = cache._steps.values()
        executor = step.repeat.forward

        def recorded(*arguments: Any) -> Any:
            ready["arguments"] = arguments
            return executor(*arguments)

        step.repeat = step.repeat._replace(forward=recorded)
        cache.attention(att, q, k, v)
    run = {
        "step": lambda cache: cache.attention(att, q, k, v),
        "append": lambda cache: cache.append(k, v),
        "attention": lambda cache: executor(*ready["arguments"]),
    }

    def steps(name: str) -> Callable[[], Any]:
        def some() -> None:
            if name != "attention":
                caches[name].truncate(lengths)  # the same positions in every round
            for _ in range(STEPS):
                run[name](caches[name])

        return some

    return {n: steps(n) for n in names}, 100


PARTS = {
    "jax": lambda rounds: rows(in_jax, rounds),
    "torch": lambda rounds: rows(in_torch, rounds, processor_seconds, min),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, "decode-overhead", lambda part: {"steps": STEPS, "capacity": CAPACITY})
