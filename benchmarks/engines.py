"""What the choice of an engine costs, and where torch's SDPA is faster than generated kernels on this CPU:
`python benchmarks/engines.py`, or a part of it, `choose` or `cpu`.

"choose" is the time of a mask that nobody has asked about, simplified already: the form of its parts, and flags with
values at 4,096 tokens, in a process that has let go of an array of 8 MB, as those that load weights have: before that,
glibc gives memory back to the system after every few arrays, and half of the time goes to fetching it again. "cpu" is
SDPA beside the C++ kernels and beside library calls, one thread, 8 heads of 64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import cases
import numpy as np
import torch
from store import Row, run_parts

import frisket as fk
from frisket.grammar.memo import clear
from frisket.lowering.engines.flags import flags_of
from frisket.lowering.engines.forms import NoForm, form_of
from frisket.lowering.pipeline import simplified_program
from frisket.lowering.plan import Geometry
from frisket.runtime.calls.program import program_of

LENGTHS = (16, 64, 256, 1024)


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median of some runs."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def choose(rounds: int) -> Iterator[tuple[str, Row]]:
    known, unknown, flags = [], [], []
    np.ones(1 << 20).sum()
    for case in cases.masks(4096).values():
        if not case.fits:
            continue
        program = program_of(case.mask, None, {})
        fixed = simplified_program(program)
        g = Geometry(case.batch, case.heads, case.heads, case.q_len, case.kv_len, 64, 64, 0.125)
        times = []
        for _ in range(rounds):
            clear()  # nothing is remembered of any expression
            start = time.process_time()  # others share the machine
            form = form_of(fixed.simplified)
            times.append(time.process_time() - start)
        (unknown if isinstance(form, NoForm) else known).append(median(times))
        if not isinstance(form, NoForm):
            values = program.scalars, program.tables
            flags.append(seconds(lambda f=form, g=g, v=values: flags_of(f, g, *v), rounds))
    for name, found in (("a mask is made of parts", known), ("a mask is not", unknown), ("parts have values", flags)):
        figures = {"least": min(found), "median": median(found), "most": max(found)}
        yield (
            name,
            {
                "figures": {"us": {n: round(1e6 * x, 1) for n, x in figures.items()}},
                "notes": {"masks": str(len(found))},
            },
        )


def cpu(rounds: int) -> Iterator[tuple[str, Row]]:
    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16"):
        for length in LENGTHS:
            q, k, v = torch.randn(3, 1, 8, length, 64, dtype=getattr(torch, dtype))
            found = {}
            for backend in ("sdpa", "cpp", "aten"):
                att = fk.compile("causal", backend=backend)
                att(q, k, v)
                found[backend] = 1e6 * seconds(lambda a=att, x=(q, k, v): a(*x), rounds)
            yield (
                f"causal, {length}, {dtype}",
                {
                    "figures": {"us": {n: round(x, 1) for n, x in found.items()}},
                    "ratios": {f"{n} / sdpa": [round(found[n] / found["sdpa"], 2)] for n in ("cpp", "aten")},
                },
            )


def settings(part: str) -> dict[str, Any]:
    return {"tokens": 4096} if part == "choose" else {"threads": 1, "heads": 8, "head_dim": 64}


if __name__ == "__main__":
    run_parts(__doc__, {"choose": choose, "cpu": cpu}, "engines", settings)
