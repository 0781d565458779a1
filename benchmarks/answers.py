"""Visible pairs, empty rows and implications at 4k, 64k and 1M tokens: `python benchmarks/answers.py`.

Everything from the mask on counts: tables are scanned anew each time. Nothing else we know of answers these without
evaluating every pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from layout import milliseconds
from store import keep, shown

import frisket as fk

LENGTHS = (4096, 65536, 1 << 20)


def masks(n: int) -> dict[str, fk.Mask]:
    draw = np.random.default_rng(0)
    some = max(2, n // 500)
    doc, mixed = np.sort(draw.integers(0, some, n)).astype(np.int32), draw.integers(0, some, n).astype(np.int32)
    marked = np.zeros(n, bool)
    marked[draw.integers(0, n, n // 1000 + 1)] = True
    side = int(n**0.5)
    far = side - 4
    near = f"abs(clamp(q // {side}, 3, {far}) - k // {side}) <= 3 & abs(clamp(q % {side}, 3, {far}) - k % {side}) <= 3"
    texts = {
        "causal": {}, "causal & window(1024)": {}, "dilated(1000, 4)": {}, "causal & k % 2 == 0": {},
        "causal & (q - k < 128 | (q - k) % 128 == 0)": {}, "causal & chunked(1024)": {}, "q // 16 >= k // 16": {},
        "prefix(1000) | causal": {}, "causal & (sinks(4) | window(1024))": {},
        "prefix(1000) | window(128) | dilated(4096, 8)": {}, "causal & same(doc)": {"doc": doc},
        "causal & same(mixed)": {"mixed": mixed}, "same(mixed)": {"mixed": mixed},
        "causal & same(doc) & window(1024)": {"doc": doc}, "global_tokens(t) | window(256)": {"t": marked},
    }  # fmt: skip
    made = {text: fk.mask(text, **tables) for text, tables in texts.items()}
    return {**made, f"neighbourhood of 7 x 7 in {side} x {side}": fk.mask(near)}


QUESTIONS: dict[str, Callable[[fk.Mask, int], Any]] = {
    "visible pairs": lambda m, n: m.visible_pairs(n, n),
    "empty rows": lambda m, n: m.empty_rows(n, n),
    "implies causal": lambda m, n: m.implies("causal", n, n),
    "implies window(2048)": lambda m, n: m.implies("window(2048)", n, n),
}


def main() -> None:
    for n in LENGTHS:
        rows = {}
        for name, mask in masks(n).items():
            ms = {q: milliseconds(lambda a=ask, m=mask, s=n: a(m, s), rounds=3) for q, ask in QUESTIONS.items()}
            rows[name] = {"figures": {"ms": ms, "pairs": {"visible": mask.visible_pairs(n, n)}}}
            print(n, shown(name, rows[name]), flush=True)
        keep("answers", f"{n} tokens", rows, {"tokens": n, "rounds": 3})


if __name__ == "__main__":
    main()
