"""Training through frisket beside training through attention written out: `python benchmarks/long_run.py`, or a part of
it, `torch` or `jax`.

A model of bytes (examples/byte_model.py) takes 2,000 steps on packed documents, from equal weights and in equal order.
"eager" attends by a dense mask and a softmax, on one thread; "threads" does the same on two; "third" and "fifth" add
values of the first third or fifth of the keys and those of the rest, so that the order of sums is another; "frisket"
attends under `causal & same(doc)`. Losses of the first 20 steps must be equal to rounding. After that every difference
grows, for training is chaotic: weights of "frisket" may be no further from those of "eager" than those of the others
are. A distance is the norm of the difference of all weights, over the norm of what eager's weights moved from their
start.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from store import Row, run_parts

HERE = Path(__file__).resolve()
STEPS, LENGTH, RATE = 2000, 256, 1e-3
SEEN = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
PARTS = {"third": 3, "fifth": 5}
RUNS = {"eager": 1, "threads": 2, "third": 1, "fifth": 1, "frisket": 1}  # threads of each
Batch = tuple[Any, Any, Any]


def batches() -> Iterator[Batch]:
    from byte_model import pack
    from python_text import documents

    return islice(cycle(pack(documents(), LENGTH)), STEPS)


def by_torch(how: str) -> Iterator[tuple[float, Callable[[], np.ndarray]]]:
    """The loss of every step, and what gives the weights after it."""
    import torch
    from byte_model import ByteModel, labels
    from torch.nn.functional import cross_entropy

    import frisket as fk

    att = fk.compile("causal & same(doc)")

    def attend(doc: Any) -> Any:
        if how == "frisket":
            return lambda layer, q, k, v: att(q, k, v, doc=doc)
        n = torch.arange(LENGTH)
        hidden = (n[:, None] < n) | (doc[:, None] != doc)

        def eager(layer: int, q: Any, k: Any, v: Any) -> Any:
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
            p, cut = scores.softmax(-1), LENGTH // PARTS.get(how, 1)
            return p[..., :cut] @ v[:, :, :cut] + p[..., cut:] @ v[:, :, cut:] if how in PARTS else p @ v

        return eager

    torch.manual_seed(0)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)

    def weights() -> np.ndarray:
        return torch.cat([x.detach().flatten() for x in model.parameters()]).numpy().copy()

    yield math.nan, weights
    for tokens, doc, place in batches():
        loss = cross_entropy(model(tokens, place, attend(doc)), labels(tokens, doc))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), weights


def by_jax(how: str) -> Iterator[tuple[float, Callable[[], np.ndarray]]]:
    """As `by_torch`, with the weights of the same model."""
    import jax
    import jax.numpy as jnp
    import optax
    import torch
    from byte_model import ByteModel, labels
    from jax.flatten_util import ravel_pytree

    import frisket as fk

    att = fk.compile("causal & same(doc)")
    torch.manual_seed(0)
    model = ByteModel()
    params = {name: jnp.asarray(x.detach().numpy()) for name, x in model.named_parameters()}
    heads, half = model.heads, model.head_dim // 2

    def attend(q: Any, k: Any, v: Any, doc: Any) -> Any:  # [1, length, heads, dim]
        if how == "frisket":
            return att(q, k, v, doc=doc)
        n = jnp.arange(LENGTH)
        visible = (n[:, None] >= n) & (doc[:, None] == doc)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2 * half)
        p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        cut = LENGTH // PARTS.get(how, 1)
        parts = (slice(0, cut), slice(cut, None)) if how in PARTS else (slice(None),)
        return sum(jnp.einsum("bhqk,bkhd->bqhd", p[..., part], v[:, part]) for part in parts)

    def rotary(x: Any, place: Any) -> Any:
        angle = place[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)

    def loss_of(params: Any, tokens: Any, place: Any, doc: Any, wanted: Any) -> Any:
        def linear(name: str, x: Any) -> Any:
            return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

        def norm(name: str, x: Any) -> Any:
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-7) * params[f"{name}.weight"]

        x = params["embed.weight"][tokens][None]
        for block in (f"blocks.{i}" for i in range(len(model.blocks))):
            qkv = linear(f"{block}.qkv", norm(f"{block}.norm", x)).reshape(1, LENGTH, 3, heads, 2 * half)
            q, k, v = (qkv[:, :, i] for i in range(3))
            out = attend(rotary(q, place), rotary(k, place), v, doc)
            x = x + linear(f"{block}.out", out.reshape(1, LENGTH, -1))
            x = x + linear(f"{block}.down", jax.nn.gelu(linear(f"{block}.up", norm(f"{block}.norm2", x)), False))
        losses = optax.softmax_cross_entropy_with_integer_labels(linear("read", x)[0], jnp.maximum(wanted, 0))
        return jnp.where(wanted >= 0, losses, 0).sum() / (wanted >= 0).sum()

    optimizer = optax.adamw(RATE, weight_decay=1e-2)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def weights() -> np.ndarray:
        return np.array(ravel_pytree(params)[0])

    yield math.nan, weights
    for tokens, doc, place in batches():
        given = (jnp.asarray(x.numpy()) for x in (tokens, place, doc, labels(tokens, doc)))
        params, state, loss = step(params, state, *given)
        yield float(loss), weights


def one(framework: str, name: str, path: str) -> None:
    """A run, in a process of its own: losses, and weights after the steps of `SEEN` and before all, into a file."""
    run = {"torch": by_torch, "jax": by_jax}[framework](name)
    start = next(run)[1]()
    losses, kept = [], []
    for i, (loss, weights) in enumerate(run, 1):
        losses.append(loss)
        if i in SEEN:
            kept.append(weights())
    np.savez(path, losses=np.array(losses), start=start, weights=np.array(kept))


def environment(framework: str, threads: int) -> dict[str, str]:
    """One of a run on so many threads."""
    several = str(threads > 1).lower()
    flags = f"--xla_cpu_multi_thread_eigen={several}" if framework == "jax" else ""
    paths = os.pathsep.join([str(HERE.parents[1] / "examples"), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "XLA_FLAGS": flags,
        "PYTHONPATH": paths,
    }


def compared(framework: str, runs: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    eager = runs["eager"]
    moved = np.linalg.norm(eager["weights"] - eager["start"], axis=1)

    def distances(name: str) -> list[float]:
        return [float(x) for x in np.linalg.norm(runs[name]["weights"] - eager["weights"], axis=1) / moved]

    def first(name: str) -> float:
        return float(np.abs(runs[name]["losses"] - eager["losses"])[:20].max())

    last = {}
    for name in runs:
        losses, figures = runs[name]["losses"], {}
        if name != "eager":
            last[name] = distances(name)
            figures["distance"] = dict(zip(map(str, SEEN), last[name], strict=True))
        figures["loss"] = {
            "largest difference in 20 steps": float(np.abs(losses - eager["losses"])[:20].max()),
            "mean of the last 100 steps": float(losses[-100:].mean()),
        }
        yield f"{framework}, {name}", {"figures": figures}
    most = max(x[-1] for name, x in last.items() if name != "frisket")
    yield (
        f"{framework}, at the end",
        {
            "ratios": {"frisket / furthest": [last["frisket"][-1] / most if most else math.inf]},
            "goals": {"at most": {"ratios": {"frisket / furthest": 1.0}}},
            "notes": {"furthest": "of the runs of eager in other orders of sums"},
        },
    )


def part(framework: str) -> Callable[[int], Iterator[tuple[str, Row]]]:
    def run(rounds: int) -> Iterator[tuple[str, Row]]:
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, threads in RUNS.items():
                path = f"{folder}/{name}.npz"
                subprocess.run(
                    [sys.executable, str(HERE), "one", framework, name, path], check=True,
                    env=environment(framework, threads),
                )  # fmt: skip
                found[name] = dict(np.load(path))
        yield from compared(framework, found)

    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        one(*sys.argv[2:])
    else:
        settings = {"steps": STEPS, "length": LENGTH, "rate": RATE, "dtype": "float32"}
        run_parts(__doc__, {x: part(x) for x in ("torch", "jax")}, "long-run", lambda part: settings, rounds=1)
