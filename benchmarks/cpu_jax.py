"""Both CPU tiers beside `jax.nn.dot_product_attention`, in one process: `python benchmarks/cpu_jax.py`.

Same arrays, turn about; a figure is the median over rounds of peer / frisket with its 95 % interval. What jax.nn has
no word for is a dense mask and einsum. Parts, each a key of results/cpu-jax.json: forward, backward, overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cpu import TIERS, at_least
from store import run_parts

import frisket as fk
from frisket.runtime.bench.race import raced, rounds_of

Call = Callable[[], Any]
LENGTH, HEADS, DIM, WINDOW, CAP, DOCUMENTS = 4096, 8, 64, 256, 50.0, 16
REST = 0.1  # the peer's S x S arrays go back to the system after its answer: 60 ms that are not ours
AT = np.arange(LENGTH)
DOC = AT * DOCUMENTS // LENGTH
SLOPE = (2.0 ** -(8 * (np.arange(HEADS) + 1) / HEADS)).astype(np.float32)
GOALS = {
    "forward": {"causal": (2.5, 6.0), "causal & window(256)": (9.0, 35.0)},
    "backward": {},
}


def dense(change: Callable[[Any], Any], seen: Any) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any) -> Any:
        s = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1), v)

    return run


def contests() -> dict[str, tuple[Callable[[str], fk.Attention], Callable[[], Callable[..., Any]]]]:
    """name -> (frisket's attention for a tier, a function that makes the peer and its tables of all pairs)."""
    attend = jax.nn.dot_product_attention

    def lower() -> Any:
        return jnp.asarray(AT[:, None] >= AT)

    def together() -> Any:
        return lower() & jnp.asarray(DOC[:, None] == DOC)

    def alibi() -> Callable[..., Any]:
        bias = jnp.asarray(SLOPE)[:, None, None] * (AT - AT[:, None])
        return dense(lambda s: s + bias, lower())

    def ours(mask: str, score: str | None = None, **params: Any) -> Callable[[str], fk.Attention]:
        return lambda tier: fk.compile(mask, score, backend=tier, **params)

    return {
        "causal": (ours("causal"), lambda: partial(attend, is_causal=True)),
        f"causal & window({WINDOW})": (
            ours(f"causal & window({WINDOW})"),
            lambda: partial(attend, is_causal=True, local_window_size=(WINDOW - 1, 0))),
        f"causal & same(doc), {DOCUMENTS} documents": (
            ours("causal & same(doc)", doc=DOC), lambda: partial(attend, mask=together()[None, None])),
        "softcap(50), causal": (
            ours("causal", "softcap(50)"), lambda: dense(lambda s: CAP * jnp.tanh(s / CAP), lower())),
        "ALiBi, causal": (ours("causal", "score + slope[h] * (k - q)", slope=SLOPE), alibi),
    }  # fmt: skip


def drawn(*shape: int) -> tuple[Any, ...]:
    draw = np.random.default_rng(0)
    return tuple(jnp.asarray(draw.standard_normal(shape, np.float32)) for _ in range(3))


def rested(call: Call) -> Call:
    return lambda: jax.block_until_ready(call())


def beside(name: str, part: str, calls: dict[str, Call], rounds: int) -> dict[str, Any]:
    """First calls, then agreement, then turn about."""
    firsts, results = {}, {}
    for who, call in calls.items():
        start = time.perf_counter()
        results[who] = jax.block_until_ready(call())
        firsts[who] = time.perf_counter() - start
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), *(results[w] for w in ("library", "peer")))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), *(results[w] for w in ("native", "peer")))
    found = raced({w: rested(c) for w, c in calls.items()}, rounds, TIERS, REST)
    found["figures"]["s, first call"] = firsts
    goals = dict(zip(TIERS, GOALS[part].get(name, ()), strict=False))
    return found | {"goals": at_least({f"peer / {t}": goal for t, goal in goals.items()})}


def forward(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    arrays = drawn(1, LENGTH, HEADS, DIM)
    for name, (ours, peer) in contests().items():
        calls = {t: partial(jax.jit(ours(t)), *arrays) for t in TIERS} | {"peer": partial(jax.jit(peer()), *arrays)}
        yield name, beside(name, "forward", calls, rounds)


def gradients(attend: Callable[..., Any], arrays: tuple[Any, ...], cotangent: Any) -> Call:
    """Forward and backward together."""
    return partial(jax.jit(jax.grad(lambda q, k, v: (attend(q, k, v) * cotangent).sum(), argnums=(0, 1, 2))), *arrays)


def backward(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    arrays, cotangent = drawn(1, LENGTH, HEADS, DIM), drawn(1, LENGTH, HEADS, DIM)[0]
    for name, (ours, peer) in list(contests().items())[:2]:
        attends = {t: ours(t) for t in TIERS} | {"peer": peer()}
        calls = {who: gradients(attend, arrays, cotangent) for who, attend in attends.items()}
        yield name, beside(name, "backward", calls, rounds)


def small(tier: str) -> Call:
    """A call of 16 tokens, one head of 16, under jit."""
    return partial(jax.jit(fk.compile("causal", backend=tier)), *drawn(1, 16, 1, 16))


def overhead(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Small calls; the goal is 40 us."""
    calls = {t: small(t) for t in TIERS}
    calls["one addition"] = partial(jax.jit(lambda q, k, v: q + 1.0), *drawn(1, 16, 1, 16))

    def many(call: Call) -> Call:
        def run() -> None:
            for _ in range(50):
                jax.block_until_ready(call())

        return run

    times = rounds_of({n: many(c) for n, c in calls.items()}, rounds)
    us = {n: 1e6 * statistics.median(t) / 50 for n, t in times.items()}
    yield "16 tokens", {"figures": {"us": us}, "goals": {"at most": {"us": {"native": 40.0}}}}


PARTS = {f.__name__: f for f in (forward, backward, overhead)}


if __name__ == "__main__":
    run_parts(__doc__, PARTS, "cpu-jax", lambda _: {"shape": [1, HEADS, LENGTH, DIM], "dtype": "float32"})
