"""What a call costs that brings another table than the one before: `python benchmarks/changing_tables.py`.

Native kernels, [1, 1, S, 16] in float32, on one thread of the CPU. Each round has a table of its own: "changed" is the
first call with it, "repeated" the second one, and "planned by the host" the first call of an attention without planners
in C++. "replanning" is the median of the differences of the first two. Time of this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from store import run_parts

import frisket as fk
from frisket.runtime.bench.race import processor_seconds
from frisket.runtime.torch.ready import ChangingTables

LENGTHS, WARM, OF_DOCUMENT = (1024, 4096), 60, 64
Make = Callable[[np.random.Generator, int], Any]


def whole(ids: Callable[[np.random.Generator, int], Any]) -> Make:
    """Documents of 64 tokens with these ids."""
    return lambda rng, s: ids(rng, s // OF_DOCUMENT).repeat(OF_DOCUMENT)


MASKS: dict[str, tuple[str, str, Make]] = {
    "documents that ascend": ("causal & same(doc)", "doc", lambda rng, s: np.sort(rng.integers(0, s // 64, s))),
    "documents in any order": ("causal & same(doc)", "doc", whole(lambda rng, n: rng.permutation(n))),
    "documents that return": ("causal & same(doc)", "doc", whole(lambda rng, n: rng.permutation(n) % 7)),
    "padding behind": ("causal & keep[k]", "keep", lambda rng, s: np.arange(s) < rng.integers(s // 4, s)),
    "half of the keys": ("causal & keep[k]", "keep", lambda rng, s: rng.random(s) < 0.5),
    "kinds of tokens": ("causal | same(kind) & kind[q] > 0", "kind", whole(lambda rng, n: rng.integers(0, 3, n))),
}


def rows(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    torch.set_num_threads(1)
    for (name, (text, table, make)), s in ((m, s) for m in MASKS.items() for s in LENGTHS):
        q, k, v = torch.randn(3, 1, 1, s, 16)
        att, by_host = fk.compile(text, engines=False), fk.compile(text, engines=False)
        times: dict[str, list[float]] = {"changed": [], "repeated": [], "planned by the host": []}
        for i in range(WARM + rounds):  # no table comes twice: the host remembers plans, too
            given = {table: make(np.random.default_rng(i), s)}
            if i < WARM:  # by then there is a planner
                att(q, k, v, **given)
                continue
            for n, run in {"changed": att, "repeated": att, "planned by the host": by_host}.items():
                fresh = {table: given[table].copy()}
                with patch.object(ChangingTables, "host_planned", lambda *_: None) if run is by_host else nullcontext():
                    times[n].append(1e6 * processor_seconds(partial(run, q, k, v, **fresh)))
        us = {n: round(float(np.median(t)), 1) for n, t in times.items()}
        us["replanning"] = round(float(np.median(np.subtract(times["changed"], times["repeated"]))), 1)
        yield (
            f"{name}, {s:,} tokens",
            {"figures": {"us": us}, "goals": {"at most": {"us": {"replanning": 100 + 0.002 * s}}}},
        )


if __name__ == "__main__":
    settings = {"shape": [1, 1, "S", 16], "dtype": "float32", "threads": 1}
    run_parts(__doc__, {"torch": rows}, "changing-tables", lambda part: settings, rounds=61)
