"""Layouts, the front end and the import, beside peers where they can run: `python benchmarks/layout.py`.

Peers are timed in this process, turn about with ours. `create_block_mask` evaluates every element, so it is
asked for 4k and 8k only; 32k takes it most of a minute and 10 GB.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import fresh, save, seconds, turn_about

import frisket as fk
from frisket.lowering.simplify import prepare

TILE = 128


def milliseconds(run: Callable[[], Any], rounds: int = 7) -> float:
    run()
    return statistics.median(1e3 * seconds(run) for _ in range(rounds))


def growth() -> dict[str, Any]:
    """Causal and window(1024) over lengths, and the log-log slope from 64k to 8M."""
    mask = fk.mask("causal & window(1024)")
    figures = {n: milliseconds(lambda n=n: mask.layout(n, n, block=TILE)) for n in (2**15, 2**20, 10_000_000)}
    slopes = {}
    for text in ("causal", "causal & window(1024)"):
        m = fk.mask(text)
        lengths = [2**i for i in range(16, 24)]
        times = [milliseconds(lambda n=n, m=m: m.layout(n, n, block=TILE)) for n in lengths]
        slopes[text] = float(np.polyfit([math.log(n) for n in lengths], [math.log(t) for t in times], 1)[0])
    return {"window_ms": figures, "slope_64k_8M": slopes}


def library() -> dict[str, Any]:
    """Every mask of step one at 4k, 64k and 1M tokens: milliseconds, records, exactness, tiles looked at."""
    rows = {}
    for text in (
        "causal", "causal & window(1024)", "causal & (window(1024) | sinks(4))", "prefix(300) | causal",
        "sliding(512, 64)", "bottom_right", "chunked(1000)", "causal & chunked(1000)", "dilated(512, 4)",
        "k % 2 == 0 & causal",
    ):  # fmt: skip
        rows[text] = {n: figures(fk.mask(text), n) for n in (2**12, 2**16, 2**20)}
    for n in (2**12, 2**16, 2**20):
        rng = np.random.default_rng(0)
        cuts = np.sort(rng.choice(n, max(n // 512, 2), replace=False))
        doc = np.searchsorted(cuts, np.arange(n)).astype(np.int32)
        text = "causal & same(doc)"
        rows.setdefault(text, {})[n] = figures(fk.mask(text, doc=doc), n)
        hot = rng.random(n) < 8 / n
        rows.setdefault("global_tokens(t) | window(256)", {})[n] = figures(
            fk.mask("global_tokens(t) | window(256)", t=hot), n
        )
    return rows


def figures(mask: fk.Mask, n: int) -> dict[str, Any]:
    made = mask.layout(n, n, block=TILE)
    return {
        "ms": milliseconds(lambda: mask.layout(n, n, block=TILE), 3),
        "records_per_row": int(made.spans.count.max()),
        "exact": made.exact,
        "settled": made.analysis.settled,
    }


def peers() -> dict[str, Any]:
    """`create_block_mask`, eager, on the same mask: ratio of its time to ours."""
    from torch.nn.attention.flex_attention import create_block_mask

    out = {}
    ours = fk.mask("causal & window(1024)")
    for n in (2**12, 2**13):

        def theirs(n: int = n) -> Any:
            return create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 1024), None, None, n, n, device="cpu")

        out[n] = turn_about(lambda n=n: ours.layout(n, n, block=TILE), theirs, 3)
    return out


def front_end() -> dict[str, float]:
    """Parse, check and simplify a mask of 30 comparisons, each time with numbers never seen before."""

    def text(i: int) -> str:
        parts = [f"(q - k < {90 * j + i} | k < {j + i} | q % {j + 2} == k % {j + 2})" for j in range(9)]
        return " & ".join(["causal", "window(4096)", f"k >= {i} - 5", *parts])

    from frisket.dsl.program import read

    fk.mask("causal")
    counter = iter(range(10**6))
    parse, whole = [], []
    for _ in range(30):
        source = text(next(counter))
        start = time.perf_counter()
        mask = read(source, kind="mask").mask
        parse.append(time.perf_counter() - start)
        prepare(mask, None)
        whole.append(time.perf_counter() - start)
    return {"parse_check_ms": 1e3 * statistics.median(parse), "with_simplify_ms": 1e3 * statistics.median(whole),
            "worst_ms": 1e3 * max(whole)}  # fmt: skip


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
        "import": imports(), "front_end": front_end(), "growth": growth(), "peers": peers(), "library": library(),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    save("layout", found)


if __name__ == "__main__":
    main()
