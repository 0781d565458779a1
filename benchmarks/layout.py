"""Layouts, the front end and the import, beside peers where they can run: `python benchmarks/layout.py [PART ...]`.

Peers are timed in this process, turn about with ours. `create_block_mask` evaluates every element, so it is
asked for 4k and 8k only; 32k takes it most of a minute and 10 GB.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import cases
import numpy as np
from store import keep, shown

import frisket as fk
from frisket.lowering.simplify import ProgramExprs, prepare
from frisket.runtime.bench.race import fresh, raced, rounds_of, row, seconds

TILE = 128
LENGTHS = (2**12, 2**16, 2**20)


def milliseconds(run: Callable[[], Any], rounds: int = 7) -> float:
    run()
    return statistics.median(1e3 * seconds(run) for _ in range(rounds))


def growth() -> dict[str, Any]:
    """Causal and window(1024) over lengths, and the log-log slope from 64k to 8M."""
    mask = fk.mask("causal & window(1024)")
    lengths = (2**15, 2**20, 10_000_000)
    figures = {n: milliseconds(lambda n=n: mask.layout(n, n, block=TILE)) for n in lengths}
    held = {n: round(peak(lambda n=n: mask.layout(n, n, block=TILE)), 2) for n in lengths}
    slopes = {}
    for text in ("causal", "causal & window(1024)"):
        m = fk.mask(text)
        lengths = [2**i for i in range(16, 24)]
        times = [milliseconds(lambda n=n, m=m: m.layout(n, n, block=TILE)) for n in lengths]
        slopes[text] = float(np.polyfit([math.log(n) for n in lengths], [math.log(t) for t in times], 1)[0])
    rows: dict[str, Any] = {text: {"figures": {"slope": {"64k to 8M tokens": x}}} for text, x in slopes.items()}
    rows["causal & window(1024)"]["figures"] |= {
        "ms": {f"{n:,} tokens": x for n, x in figures.items()},
        "MB at most": {f"{n:,} tokens": x for n, x in held.items()},
    }
    return rows


def library() -> dict[str, Any]:
    """Every mask of the library at 4k, 64k and 1M tokens, or why not."""
    rows: dict[str, Any] = {}
    for n in LENGTHS:
        for name, case in cases.masks(n).items():
            found = figures(case.mask, case.lengths) if case.fits else {"notes": {"not measured": case.data}}
            rows.setdefault(name, {"rows": {}})["rows"][f"{n:,} tokens"] = found
            print(n, shown(name, found), flush=True)
    return rows


def targets() -> dict[str, Any]:
    """The masks that have a figure to reach, at 1M tokens."""
    n = 1 << 20
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(n, 1999, replace=False))
    doc = np.searchsorted(cuts, np.arange(n), side="right").astype(np.int32)
    image = "abs(clamp(q // 1024, 6, 1017) - k // 1024) <= 6 & abs(clamp(q % 1024, 6, 1017) - k % 1024) <= 6"
    masks = {
        "causal & same(doc), 2,000 documents": fk.mask("causal & same(doc)", doc=doc),
        "causal & same(doc), documents in any order": fk.mask("causal & same(doc)", doc=rng.permutation(2000)[doc]),
        "prefix(300) | window(256) | dilated(512, 4)": fk.mask("prefix(300) | window(256) | dilated(512, 4)"),
        "13 x 13 neighbourhood of 1024 x 1024": fk.mask(image),
        "k % 2 == 0 & causal": fk.mask("k % 2 == 0 & causal"),
    }
    return {name: figures(m, {"q_len": n, "kv_len": n}) for name, m in masks.items()}


def figures(mask: fk.Mask, lengths: dict[str, int]) -> dict[str, Any]:
    """Median milliseconds of three, the first of all apart: it also simplifies and derives the questions."""
    first = 1e3 * seconds(lambda: mask.layout(**lengths, block=TILE))
    made = mask.layout(**lengths, block=TILE)
    rounds = 3 if first < 2000 else 1
    again = statistics.median(1e3 * seconds(lambda: mask.layout(**lengths, block=TILE)) for _ in range(rounds))
    return {
        "figures": {
            "ms": {"again": round(again, 2), "first": round(first, 2)},
            "spans": {"all": int(made.spans.count.sum())},
            "tiles settled one by one": {"all": made.analysis.settled},
            "MB at most": {"held": round(peak(lambda: mask.layout(**lengths, block=TILE)), 2)},
        },
        "notes": {"method": made.analysis.method, "exact": made.exact},
    }


def peak(run: Callable[[], Any]) -> float:
    """Megabytes held at most while `run` works, beyond what was held before."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def peers() -> dict[str, Any]:
    """`create_block_mask`, eager, and splash attention's mask processing on the same masks: their time by ours."""
    import torch
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as splash_info
    from torch.nn.attention.flex_attention import create_block_mask

    out: dict[str, Any] = {}
    window = fk.mask("causal & window(1024)")
    for n in (2**12, 2**13):
        ids = np.arange(n) // 512
        table = torch.from_numpy(ids)
        masks = {
            "window": (window, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
            "documents": (
                fk.mask("causal & same(doc)", doc=ids), lambda b, h, q, k, t=table: (q >= k) & (t[q] == t[k])
            ),
        }  # fmt: skip
        for name, (ours, theirs) in masks.items():
            calls = {
                "frisket": lambda m=ours, n=n: m.layout(n, n, block=TILE),
                "create_block_mask": lambda f=theirs, n=n: create_block_mask(f, None, None, n, n, device="cpu"),
            }
            out[f"{name}, {n:,} tokens"] = {"rows": {"create_block_mask": raced(calls, 3)}}

        widths = itertools.count(1000)  # never one it has seen: process_mask remembers its answers

        def processed(n: int = n, widths: Any = widths) -> Any:
            heads = splash.MultiHeadMask([splash.LocalMask((n, n), (next(widths), 0), 0)])
            return splash_info.process_mask(heads, (TILE, TILE))

        def laid_out(n: int = n, widths: Any = widths) -> Any:
            return fk.mask("causal & window(w)", w=next(widths)).layout(n, n, block=TILE)

        beside = raced({"frisket": laid_out, "process_mask": processed}, 3)
        out[f"window, {n:,} tokens"]["rows"]["splash process_mask"] = beside
    return out


def front_end() -> dict[str, Any]:
    """Parse, check and simplify a mask of 30 comparisons, each time with numbers never seen before."""

    def text(i: int) -> str:
        parts = [f"(q - k < {90 * j + i} | k < {j + i} | q % {j + 2} == k % {j + 2})" for j in range(9)]
        return " & ".join(["causal", "window(4096)", f"k >= {i} - 5", *parts])

    from frisket.dsl.parse import parse
    from frisket.dsl.program import read

    fk.mask("causal")
    times: dict[str, list[float]] = {"parse": [], "check and simplify": []}
    for i in range(30):
        source = text(i)
        start = time.perf_counter()
        parse(source)
        middle = time.perf_counter()
        prepare(ProgramExprs(read(source, kind="mask").mask))  # parses again
        times["parse"].append(1e3 * (middle - start))
        times["check and simplify"].append(1e3 * (time.perf_counter() - middle - (middle - start)))
    ms = {n: statistics.median(x) for n, x in times.items()}
    ms["check and simplify, first"] = times["check and simplify"][0]
    return {"30 comparisons": {"figures": {"ms": ms}}}


def imports(rounds: int = 9) -> dict[str, Any]:
    """Import time of frisket, its names loaded, against numpy and lark together, each in a fresh process."""

    calls = {"frisket": "import frisket; frisket.mask; frisket.attention", "numpy and lark": "import numpy, lark"}

    def inside(what: str) -> float:
        return float(fresh(f"import time; t = time.perf_counter(); {what}; print(time.perf_counter() - t)"))

    return {"import frisket": row(rounds_of(calls, rounds, clock=inside), ours=["numpy and lark"])}


def main() -> None:
    parts: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {  # and rounds
        "import": (imports, 9), "front_end": (front_end, 30), "growth": (growth, 7), "targets": (targets, 3),
        "peers": (peers, 3), "library": (library, 3),
    }  # fmt: skip
    for part in sys.argv[1:] or parts:
        measure, rounds = parts[part]
        rows = measure()
        print(*(shown(name, row) for name, row in rows.items()), sep="\n", flush=True)
        keep("layout", part, rows, {"rounds": rounds, "tile": TILE})


if __name__ == "__main__":
    main()
