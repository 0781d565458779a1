"""`python benchmarks/cpu_jax.py`: the JAX library tier against `jax.nn.dot_product_attention`, in one process.

Same arrays, turn about, medians; the figures are the ratios, kept in `benchmarks/results/cpu-jax.json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import save, turn_about

from frisket.dsl.ir import Expr, lookup
from frisket.dsl.sugar import eq, function, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.analysis.driver import analyse
from frisket.lowering.plan import Geometry, make_plan
from frisket.runtime import jax_op

Call = Callable[[], Any]
WINDOW, CAP, DOCUMENTS = 256, 50.0, 16
REST = 0.1  # the peer's S x S arrays go back to the system after its answer: 60 ms that are not ours
GOALS = {"causal": 2.5, "window(256)": 9.0}


def frisket(mask: Expr, mod: Expr | None, arrays: tuple[Any, ...], tables: dict[str, Any]) -> Call:
    """A call of the library executor, with everything done that a first call does."""
    batch, length, heads, dim = arrays[0].shape
    shape = Geometry(batch, heads, heads, length, length, dim, dim, dim**-0.5)
    target = jax_op.default_target("xla", shape)
    found = analyse(
        mask, q_len=length, kv_len=length, batch=batch, heads=heads, tables=tables,
        block=(target.block_q, target.block_k),
    )  # fmt: skip
    limits = dict.fromkeys(["q", "k", "h", *tables], float(length))
    plan = make_plan(mask, mod, limits=limits)
    slots, held = plan.slot_values({}), plan.table_values(tables)
    return lambda: jax_op.forward(plan, found.spans, shape, *arrays, slots, held, target, "xla")[0]


def dense(seen: Any, change: Callable[[Any], Any], arrays: tuple[Any, ...]) -> Call:
    """What one writes where jax.nn has no word for it: a dense mask and einsum."""

    @jax.jit
    def run(q_: Any, k_: Any, v_: Any) -> Any:
        s = change(jnp.einsum("bqhd,bkhd->bhqk", q_, k_) * q_.shape[-1] ** -0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1), v_)

    return lambda: run(*arrays)


def rows(arrays: tuple[Any, ...]) -> dict[str, tuple[Call, Callable[[], Call]]]:
    """name -> (the peer's call, what makes ours)."""
    length, heads = arrays[0].shape[1:3]
    at = np.arange(length)
    doc = at * DOCUMENTS // length
    slope = (2.0 ** -(8 * (np.arange(heads) + 1) / heads)).astype(np.float32)
    lower = jnp.asarray(at[:, None] >= at)
    together = lower & jnp.asarray(doc[:, None] == doc)
    bias = jnp.asarray(slope)[:, None, None] * (at - at[:, None])
    causal, same = q >= k, eq(lookup("doc", (q,)), lookup("doc", (k,)))
    peer = jax.jit(jax.nn.dot_product_attention, static_argnames=("is_causal", "local_window_size"))
    softcap = CAP * function("tanh", score / CAP)
    alibi = score + lookup("slope", (h,), FLOAT) * (k - q)
    return {
        "causal": (partial(peer, *arrays, is_causal=True), partial(frisket, causal, None, arrays, {})),
        f"window({WINDOW})": (
            partial(peer, *arrays, is_causal=True, local_window_size=(WINDOW - 1, 0)),
            partial(frisket, causal & (q - k < WINDOW), None, arrays, {}),
        ),
        f"{DOCUMENTS} documents": (
            partial(peer, *arrays, mask=together[None, None]),
            partial(frisket, causal & same, None, arrays, {"doc": doc}),
        ),
        "softcap + causal": (
            dense(lower, lambda s: CAP * jnp.tanh(s / CAP), arrays),
            partial(frisket, causal, softcap, arrays, {}),
        ),
        "alibi + causal": (
            dense(lower, lambda s: s + bias, arrays),
            partial(frisket, causal, alibi, arrays, {"slope": slope}),
        ),
    }


def measure(length: int, heads: int, dim: int, rounds: int) -> dict[str, dict[str, Any]]:
    draw = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(draw.standard_normal((1, length, heads, dim), np.float32)) for _ in range(3))
    jax.block_until_ready(arrays)
    found = {}
    for name, (peer, make) in rows(arrays).items():
        start = time.perf_counter()
        ours = make()
        out = jax.block_until_ready(ours())
        first = time.perf_counter() - start
        error = float(jnp.abs(out - peer()).max())
        if not error < 1e-5:
            raise SystemExit(f"{name}: differs from the peer by {error}")
        row: dict[str, Any] = turn_about(ended(ours), ended(peer), rounds, REST) | {"first_call_s": first}
        goal = f"  goal >= {GOALS[name]}" if name in GOALS else ""
        found[name] = row | ({"goal": GOALS[name]} if name in GOALS else {})
        print(
            f"{name:18s} peer {row['peer_ms']:7.1f} ms   frisket {row['frisket_ms']:7.1f} ms"
            f"   {row['ratio']:5.1f} x   first call {first:4.2f} s{goal}",
            flush=True,
        )
    return found


def ended(call: Call) -> Call:
    return lambda: jax.block_until_ready(call())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--length", type=int, default=4096)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    found = measure(given.length, given.heads, given.dim, given.rounds)
    save("cpu-jax", {"shape": [1, given.heads, given.length, given.dim], "dtype": "float32", "rows": found})


if __name__ == "__main__":
    main()
