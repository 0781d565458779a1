"""What a call costs that brings another table than the one before: `python benchmarks/changing_tables.py`.

Native kernels, [1, 1, S, 16] in float32, on one thread of the CPU. "repeated" brings one table again and again, and
"changed" another one each time; for "planned by the host" there are no planners in C++. "beside" is what a changed
table adds: the median of the differences of rounds. Time of this process alone; rounds take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from store import run_parts

import frisket as fk
from frisket.runtime.bench.machine import processor_seconds, rounds_of
from frisket.runtime.torch.ready import ChangingTables

LENGTHS, CALLS, WARM, OF_DOCUMENT = (1024, 4096), 10, 60, 64
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
        # as many as there are calls: the host remembers plans, too
        tables = [{table: make(np.random.default_rng(i), s)} for i in range(WARM + (rounds + 1) * CALLS)]
        q, k, v = torch.randn(3, 1, 1, s, 16)
        others, by_host = cycle(tables), fk.compile(text, engines=False)
        att = fk.compile(text, engines=False)
        for _ in range(WARM):  # by then there is a planner
            att(q, k, v, **next(others))

        def some(run: Any, given: Any, q: Any = q, k: Any = k, v: Any = v) -> Callable[[], None]:
            return lambda: [run(q, k, v, **next(given)) for _ in range(CALLS)] and None

        def without(run: Callable[[], None]) -> Callable[[], None]:
            return patch.object(ChangingTables, "planned", lambda *_: None)(run)

        calls = {
            "repeated": some(att, cycle(tables[:1])), "changed": some(att, others),
            "planned by the host": without(some(by_host, cycle(tables[WARM:]))),
        }  # fmt: skip
        times = rounds_of(calls, rounds, clock=processor_seconds)
        us = {n: round(1e6 * float(np.median(t)) / CALLS, 1) for n, t in times.items()}
        more = np.subtract(times["changed"], times["repeated"])
        us["beside"] = round(1e6 * float(np.median(more)) / CALLS, 1)
        yield (
            f"{name}, {s:,} tokens",
            {"figures": {"us": us}, "goals": {"at most": {"us": {"beside": 100 + 0.002 * s}}}},
        )


if __name__ == "__main__":
    settings = {"shape": [1, 1, "S", 16], "dtype": "float32", "threads": 1, "calls": CALLS}
    run_parts(__doc__, {"torch": rows}, "changing-tables", lambda part: settings, rounds=15)
