"""Memory over many calls, and of plans and kernels of long sequences: `python benchmarks/memory.py [calls] [plans]
[kernels]`, on Linux.

"calls" are calls on torch tensors that change from one to the next: the text of the mask and its numbers, lengths,
batch, heads, dtype, tables, gradients. What the process holds is read after each tenth of them, beside what the tables
of remembered answers hold (`frisket doctor --caches`). The program fails where memory grows after the first fifth by
more than these tables do and 32 MiB. Calls of 16 bits have three lengths: torch's oneDNN keeps compiled
products for each length, also without frisket. "plans" are the most memory that a process takes for one plan, less what
it had before; each length has a process. "kernels" are the most memory that a call takes beside what it is given and
what it returns, forward, and forward and backward. It is the second call of a process: the first one plans and builds,
and what it leaves behind counts. Results go to benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from store import keep

import frisket as fk
from frisket.grammar.memo import tables

MASKS = (
    "causal", "causal & window({n})", "prefix({n}) | window(64)", "causal & doc[q] == doc[k]", "causal & k % {n} < 5",
    "dilated({n}, 4) & causal", "q // {n} >= k // {n}", "param w: int\nmask = causal & q - k < w",
)  # fmt: skip
SCORES = (None, None, "softcap({n})", "alibi")
COMPILED = ("causal", "causal & window({n})", "causal & doc[q] == doc[k]")  # one kernel each, whatever the numbers are
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLANNED = {"causal & window(4096)": None, "causal & doc[q] == doc[k]": "doc", "strided(977) & causal": None}
TOKENS = (10_000, 100_000, 1_000_000, 10_000_000)
SLACK = 32  # MiB
DIM, DOCUMENT = 16, 1000
CALLED = {"causal & window(256)": None, "causal & doc[q] == doc[k]": "doc"}
LONGEST = 400  # seconds of a call of `kernels`, its process and its first call included
RUNS = {"torch, cpp": ("torch", "cpp"), "torch, aten": ("torch", "aten"), "jax, cpp": ("jax", "cpp"),
        "jax, xla": ("jax", "xla")}  # fmt: skip


def resident() -> float:
    """MiB of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def remembered() -> float:
    """MiB in the tables of remembered answers, by their own count."""
    return sum(t.bytes for t in tables()) / 2**20


def call(draw: random.Random) -> None:
    """One call, of a mask that hardly ever comes again; a few kinds by native kernels, each of which is compiled."""
    n, length, batch, heads = (
        draw.randrange(6, 500),
        draw.randrange(1, 300),
        draw.choice((1, 1, 2)),
        draw.choice((1, 2)),
    )
    kind, score = draw.choice(MASKS), draw.choice(SCORES)
    dtype, train, text = draw.choice(DTYPES), draw.random() < 0.2, kind.format(n=n)
    native = kind in COMPILED and score is None and dtype is torch.float32 and not train
    length = length if dtype in DTYPES[:2] else draw.choice((17, 64, 200))  # oneDNN keeps kernels for every length
    att = fk.compile(text, None if score is None else score.format(n=n), backend=None if native else "aten")
    q, k, v = (torch.randn(batch, heads, length, 16, dtype=dtype, requires_grad=train) for _ in range(3))
    given: dict[str, Any] = {"doc": torch.arange(length) // 50} if "doc" in text else {}
    given |= {"w": n} if "param w" in text else {}
    out = att(q, k, v, **given)
    if out.requires_grad:
        out.float().sum().backward()


def many(count: int, seed: int = 0, marks: int = 10) -> Iterator[tuple[int, float, float]]:
    """(calls so far, MiB of the process, MiB of the tables) after each of equal parts of the calls."""
    draw = random.Random(seed)
    for i in range(1, count + 1):
        call(draw)
        if i % (count // marks) == 0:
            gc.collect()
            yield i, resident(), remembered()


def grown(found: list[tuple[int, float, float]]) -> float:
    """MiB that memory grew after the first fifth, beyond what the tables grew."""
    (_, before, held), (_, after, holds) = found[len(found) // 5 - 1], found[-1]
    return after - before - max(0.0, holds - held)


def calls(count: int) -> None:
    start, found = time.monotonic(), []
    for mark in many(count):
        found.append(mark)
        print(*mark, round(time.monotonic() - start), flush=True)
    rows = {f"{n} calls": {"figures": {"MiB": {"process": a, "tables": b}}} for n, a, b in found}
    keep("memory", "calls", rows, {"calls": count, "seconds": round(time.monotonic() - start), "rounds": 1})
    if grown(found) > SLACK:
        raise SystemExit(f"memory grew by {grown(found):.0f} MiB")


def peak(text: str, length: int) -> dict[str, float]:
    """In this process: MiB and seconds of one plan."""
    given = {"doc": torch.arange(length) // 4096} if PLANNED[text] else {}
    att = fk.compile(text)
    att.plan(1024, 1024, 1, 1, **({"doc": torch.zeros(1024, dtype=torch.int64)} if given else {}))  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the most from here on
    before, start = resident(), time.monotonic()
    plan = att.plan(length, length, 1, 1, **given)
    spent = time.monotonic() - start
    assert plan is not None
    return {"MiB": max(0.0, most() - before), "s": spent}


def most() -> float:
    """MiB of this process that were in memory at once, since its references were cleared."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def trimmed() -> float:
    """MiB of this process after all that is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def on_torch(att: fk.Attention, length: int, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Calls of one head, ready to be made; they return their results."""
    q, k, v, cotangent = (torch.randn(1, 1, length, DIM, requires_grad=i < 3) for i in range(4))
    tables = {n: torch.from_numpy(x) for n, x in given.items()}

    @torch.no_grad()
    def forward() -> Any:
        return (att(q, k, v, **tables),)

    def both() -> Any:
        out = att(q, k, v, **tables)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent))

    return {"forward": forward, "forward and backward": both}


def on_jax(att: fk.Attention, length: int, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """As `on_torch`, compiled."""
    import jax
    import numpy as np

    arrays = [
        jax.block_until_ready(jax.device_put(np.random.default_rng(i).standard_normal((1, length, 1, DIM), np.float32)))
        for i in range(4)
    ]

    @jax.jit
    def forward(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        return (att(q, k, v, **given),)

    @jax.jit
    def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, back = jax.vjp(lambda *x: att(*x, **given), q, k, v)
        return (out, *back(cotangent))

    kinds = {"forward": forward, "forward and backward": both}
    return {kind: partial(lambda call: jax.block_until_ready(call(*arrays)), call) for kind, call in kinds.items()}


def beside(text: str, length: int, run: str) -> dict[str, float]:
    """In this process: MiB of one call beside its arrays and its results, by what is called; and those of its query."""
    import numpy as np

    framework, backend = RUNS[run]
    att, made = fk.compile(text, backend=backend), on_torch if framework == "torch" else on_jax

    def calls(length: int) -> dict[str, Callable[[], Any]]:
        return made(att, length, {"doc": np.arange(length) // DOCUMENT} if CALLED[text] else {})

    for call in calls(min(length, 1024)).values():
        call()  # imports
    ready, found = calls(length), {"query": length * DIM * 4 / 2**20}
    before = trimmed()
    for kind, call in ready.items():
        call()
        trimmed()
        Path("/proc/self/clear_refs").write_text("5")  # the most from here on
        results = call()
        found[kind] = max(0.0, most() - before - sum(x.nbytes for x in results) / 2**20)
        del results
    return found


def kernels() -> None:
    rows: dict[str, Any] = {}
    for text in CALLED:
        for run in RUNS:
            for length in TOKENS:
                command = [sys.executable, __file__, "--call", text, str(length), run]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST)
                except subprocess.TimeoutExpired:  # its cell is a dash
                    print(text, run, length, f"more than {LONGEST} s", flush=True)
                    continue
                found = json.loads(done.stdout)
                print(text, run, length, found, flush=True)
                for kind in found.keys() - {"query"}:
                    figures = rows.setdefault(f"{text}, {kind}", {"figures": {}})["figures"]
                    figures.setdefault(run, {})[str(length)] = found[kind]
                    figures.setdefault("query", {})[str(length)] = found["query"]
    keep(
        "memory", "kernels", rows, {"heads": 1, "head_dim": DIM, "dtype": "float32", "document": DOCUMENT, "rounds": 1}
    )


def plans() -> None:
    rows: dict[str, Any] = {}
    for text in PLANNED:
        made = {}
        for length in TOKENS:
            command = [sys.executable, __file__, "--one", text, str(length)]
            made[length] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(text, length, made[length], flush=True)
        rows[text] = {"figures": {unit: {str(n): found[unit] for n, found in made.items()} for unit in ("MiB", "s")}}
    keep("memory", "plans", rows, {"tile": 128, "rounds": 1})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=["calls", "plans", "kernels", []], help="all, unless named")
    options.add_argument("--count", type=int, default=100_000, help="of calls")
    options.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--call", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(peak(given.one[0], int(given.one[1]))))
        return
    if given.call:
        text, length, run = given.call
        print(json.dumps(beside(text, int(length), run)))
        return
    if not given.parts or "plans" in given.parts:
        plans()
    if not given.parts or "kernels" in given.parts:
        kernels()
    if not given.parts or "calls" in given.parts:
        calls(given.count)


if __name__ == "__main__":
    main()
