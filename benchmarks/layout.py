"""Layouts, the front end and the import, beside peers where they can run: `python benchmarks/layout.py`.

Peers are timed in this process, turn about with ours. `create_block_mask` evaluates every element, so it is
asked for 4k and 8k only; 32k takes it most of a minute and 10 GB.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import cases
import numpy as np
from store import save

import frisket as fk
from frisket.lowering.simplify import prepare
from frisket.runtime.bench.machine import fresh, seconds, turn_about

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
    return {"window_ms": figures, "window_peak_mb": held, "slope_64k_8M": slopes}


def library() -> dict[str, Any]:
    """Every mask of the library at 4k, 64k and 1M tokens, or why not."""
    rows: dict[str, Any] = {}
    for n in LENGTHS:
        for name, case in cases.masks(n).items():
            found = figures(case.mask, case.lengths) if case.fits else {"n/a": case.data}
            rows.setdefault(name, {})[n] = found
            print(n, name, found, flush=True)
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
        "ms": round(again, 2),
        "first_ms": round(first, 2),
        "method": made.analysis.method,
        "spans": int(made.spans.count.sum()),
        "exact": made.exact,
        "settled": made.analysis.settled,
        "peak_mb": round(peak(lambda: mask.layout(**lengths, block=TILE)), 2),
    }  # fmt: skip


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
            out[f"create_block_mask {name} {n}"] = turn_about(
                lambda m=ours, n=n: m.layout(n, n, block=TILE),
                lambda f=theirs, n=n: create_block_mask(f, None, None, n, n, device="cpu"), 3,
            )  # fmt: skip

        widths = itertools.count(1000)  # never one it has seen: process_mask remembers its answers

        def processed(n: int = n, widths: Any = widths) -> Any:
            heads = splash.MultiHeadMask([splash.LocalMask((n, n), (next(widths), 0), 0)])
            return splash_info.process_mask(heads, (TILE, TILE))

        def laid_out(n: int = n, widths: Any = widths) -> Any:
            return fk.mask("causal & window(w)", w=next(widths)).layout(n, n, block=TILE)

        out[f"splash process_mask window {n}"] = turn_about(laid_out, processed, 3)
    return out


def front_end() -> dict[str, float]:
    """Parse, check and simplify a mask of 30 comparisons, each time with numbers never seen before."""

    def text(i: int) -> str:
        parts = [f"(q - k < {90 * j + i} | k < {j + i} | q % {j + 2} == k % {j + 2})" for j in range(9)]
        return " & ".join(["causal", "window(4096)", f"k >= {i} - 5", *parts])

    from frisket.dsl.parse import parse
    from frisket.dsl.program import read

    fk.mask("causal")
    times: dict[str, list[float]] = {"parse_ms": [], "check_and_simplify_ms": []}
    for i in range(30):
        source = text(i)
        start = time.perf_counter()
        parse(source)
        middle = time.perf_counter()
        prepare(read(source, kind="mask").mask, None)  # parses again
        times["parse_ms"].append(1e3 * (middle - start))
        times["check_and_simplify_ms"].append(1e3 * (time.perf_counter() - middle - (middle - start)))
    return {**{n: statistics.median(x) for n, x in times.items()}, "first_ms": times["check_and_simplify_ms"][0]}


def imports(rounds: int = 9) -> dict[str, float]:
    """Import time of frisket, its names loaded, against numpy and lark together, each in a fresh process."""

    def run(what: str) -> float:
        code = f"import time; t = time.perf_counter(); {what}; print(time.perf_counter() - t)"
        return float(fresh(code))

    run("import frisket; frisket.mask; frisket.attention")
    pairs = [(run("import frisket; frisket.mask; frisket.attention"), run("import numpy, lark")) for _ in range(rounds)]
    return {
        "frisket_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "numpy_lark_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    found = {
        "import": imports(), "front_end": front_end(), "growth": growth(), "targets": targets(), "peers": peers(),
        "library": library(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    save("layout", found)


if __name__ == "__main__":
    main()
