"""What a call costs in a graph of torch.compile beside the eager one: `python benchmarks/graph_overhead.py`.

A causal call of native kernels, [1, 4, S, 64] in float32, on one thread of the CPU, by inductor. "forward" is a call
under no_grad, "with backward" one whose arrays require gradients, and its backward. "graph" takes what a call like it
has left; "graph, looked up" finds the attention, the keywords and the prepared call again, as every call of a graph did
once. "SDPA" and "SDPA, graph" are torch's scaled_dot_product_attention, called and in a graph. Time of this process
alone, in the round of each that was disturbed least; rounds take turns, and a ratio is the median over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from store import run_parts

import frisket as fk
from frisket.runtime.bench.race import median_ratio, processor_seconds, rounds_of
from frisket.runtime.torch import running

HEADS, DIM, LENGTHS, CALLS = 4, 64, (64, 256, 1024), 20
Call = Callable[[], Any]


def calls_of(length: int, backward: bool) -> dict[str, Call]:
    """The contestants, each of CALLS calls."""
    torch._dynamo.reset()
    arrays = [torch.randn(1, HEADS, length, DIM, requires_grad=backward) for _ in range(3)]
    cotangent, bare, att = torch.randn(1, HEADS, length, DIM), running.BARE, fk.compile("causal", engines=False)
    graph = torch.compile(lambda q, k, v: att(q, k, v), fullgraph=True, dynamic=False)

    peer = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    peer_graph = torch.compile(lambda q, k, v: peer(q, k, v), fullgraph=True, dynamic=False)

    def one(run: Any) -> None:
        out = run(*arrays)
        if backward:
            torch.autograd.grad(out, arrays, cotangent)

    def some(run: Any, names: tuple[str, ...] = bare) -> Call:
        def calls() -> None:
            running.BARE = names
            with torch.set_grad_enabled(backward):
                for _ in range(CALLS):
                    one(run)
            running.BARE = bare

        return calls

    return {"eager": some(att), "graph": some(graph), "graph, looked up": some(graph, ()), "SDPA": some(peer),
            "SDPA, graph": some(peer_graph)}  # fmt: skip


def rows(backward: bool, rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    torch.set_num_threads(1)
    for length in LENGTHS:
        times = rounds_of(calls_of(length, backward), rounds, clock=processor_seconds)
        found = {n: round(1e6 * min(t) / CALLS, 1) for n, t in times.items()}
        pairs = ("graph", "eager"), ("graph, looked up", "graph"), ("SDPA, graph", "graph")
        ratios = {f"{a} / {b}": median_ratio(times[a], times[b]) for a, b in pairs}
        yield f"S = {length}", {"figures": {"us": found}, "ratios": ratios}


PARTS = {"forward": lambda rounds: rows(False, rounds), "with backward": lambda rounds: rows(True, rounds)}

if __name__ == "__main__":
    settings = {"shape": [1, HEADS, "S", DIM], "dtype": "float32", "threads": 1, "calls": CALLS}
    run_parts(__doc__, PARTS, "graph-overhead", lambda part: settings, rounds=61)
