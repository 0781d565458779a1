"""The table and the pictures of docs/reordering.md: `python docs/reordering.py` writes them."""

from __future__ import annotations

import json
import re
import sys
from itertools import product
from math import prod
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import cases  # noqa: E402
import numpy as np  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.runtime.attention.order import Order  # noqa: E402
from frisket.runtime.attention.ordered import KINDS  # noqa: E402

PAGE = HERE / "reordering.md"
MARK = re.compile(r"(<!-- table, written by docs/reordering\.py -->\n).*?(<!-- end -->)", re.S)
TIMES = re.compile(r"(<!-- times, written by docs/reordering\.py -->\n).*?(<!-- end -->)", re.S)
PAPERS = re.compile(r"(<!-- papers, written by docs/reordering\.py -->\n).*?(<!-- end -->)", re.S)
# Masks of the library at 4,096 tokens, and larger ones; of NATTEN's the axes, as arguments of natten1d.
NATTEN = {
    "natten1d(4096, 257)": ("4096, 257",),
    "natten2d(32, 128, 13, 13)": ("32, 13", "128, 13"),
    "natten2d(32, 128, 13, 6, 1, 2, 2, 1, true, false)": ("32, 13, 1, 2, true", "128, 6, 2, 1, false"),
    "natten3d(16, 16, 16, 7, 7, 7)": ("16, 7",) * 3,
    "natten3d(16, 16, 16, 7, 7, 3, 1, 1, 2, 1, 2, 1, true, false, false)": (
        "16, 7, 1, 1, true", "16, 7, 1, 2, false", "16, 3, 2, 1, false",
    ),
    "natten2d(256, 256, 13, 13)": ("256, 13", "256, 13"),
    "natten3d(16, 64, 64, 5, 5, 5)": ("16, 5", "64, 5", "64, 5"),
}  # fmt: skip
STA = (
    "sta2d(32, 128, 24, 48, 8, 16)", "sta3d(16, 16, 16, 6, 6, 12, 2, 2, 4)", "sta3d(30, 48, 80, 18, 24, 24, 6, 8, 8)",
)  # fmt: skip
RESULTS = HERE.parent / "benchmarks" / "results" / "reorder.json"
LENGTH = 4096
PICTURES = {"dilated": ("causal & dilated(256, 4)", 1024), "natten": ("natten2d(32, 32, 9, 9)", 1024)}


def orders(*names: str) -> dict[str, Order]:
    """The orders of masks of the library that pay, by the entry's name: of all, or of those named. Moving rows is
    free."""
    found, every = {}, cases.masks(LENGTH)
    for name in names or every:
        case = every[name]
        if case.batch == case.heads == 1 and not case.data and (case.limit is None or case.limit >= LENGTH):
            order = fk.reorder(case.mask, case.q_len, case.kv_len, moving=0)
            if order.gain > 1:
                found[name] = order
    return found


def row(name: str, order: Order) -> str:
    said = str(order).partition("\n")[0]
    return f"| `{name}` | `{said}` | {order.before.visited:,} | {order.after.visited:,} |"


def table() -> str:
    rows = ["| mask | order | tiles before | after |", "| --- | --- | ---: | ---: |"]
    return "\n".join([*rows, *(row(*found) for found in orders().items())])


def halo(axis: str, queries: int, keys: int) -> int:
    """The tiles of keys of an axis that all of its tiles of queries visit, each from the first key it sees to the last.
    Every remainder by the dilation has tiles of its own."""
    size, _, dilation, *_ = map(int, (axis.split(", ") + ["1"])[:3])
    seen, found = fk.mask(f"natten1d({axis})").dense(size, size)[0, 0], 0
    for r in range(dilation):
        part = seen[r::dilation, r::dilation]
        for start in range(0, len(part), queries):
            at = np.flatnonzero(part[start : start + queries].any(0))
            found += -(-int(at[-1] - at[0] + 1) // keys)
    return found


def shapes(axes: int, tokens: int) -> list[tuple[int, ...]]:
    powers = [2**i for i in range(tokens.bit_length())]
    return [x for x in product(powers, repeat=axes) if prod(x) == tokens]


def of_natten(axes: tuple[str, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The fewest tiles of NATTEN, and the shapes of its tiles of queries and of keys, of powers of two."""
    known = {(a, i, j): halo(a, 2**i, 2**j) for a in {*axes} for i in range(8) for j in range(7)}

    def tiles(queries: tuple[int, ...], keys: tuple[int, ...]) -> int:
        sides = zip(axes, queries, keys, strict=True)
        return prod(known[a, q.bit_length() - 1, k.bit_length() - 1] for a, q, k in sides)

    both = product(shapes(len(axes), 128), shapes(len(axes), 64))
    return min((tiles(q, k), q, k) for q, k in both)


def of_paper(mask: str) -> str:
    """A row: tiles of 128 x 64 as tokens come, as the paper tiles them, and in the order of `frisket.reorder`."""
    axes = int(mask[mask.index("d(") - 1])
    length = prod(int(x) for x in mask.partition("(")[2].split(", ")[:axes])
    order = fk.reorder(mask, length, moving=0)
    if mask in NATTEN:
        tiles, *sizes = of_natten(NATTEN[mask])
        said = ", ".join(" x ".join(map(str, x)) for x in sizes)
        paper = f"{tiles:,} ({said})"
    else:
        paper = f"{-(-order.mask.visible_pairs(length, length) // (128 * 64)):,}"
    return f"| `{mask}` | {order.before.visited:,} | {paper} | {order.after.visited:,} |"


def papers(*masks: str) -> str:
    rows = ["| mask | unordered | NATTEN, STA | frisket |", "| --- | ---: | ---: | ---: |"]
    return "\n".join([*rows, *map(of_paper, masks or (*NATTEN, *STA))])


def times() -> str:
    """The times that `"auto"` compares on a CPU."""
    part = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"]["costs"]
    found = {variant: [x["ns"] for x in row["figures"].values()] for variant, row in part["rows"].items()}
    rows = [
        f"| ns of one, measured on {part['machine']['cpu']} | {' | '.join(found)} |",
        f"| --- |{' ---: |' * len(found)}",
    ]
    each = zip(KINDS, *found.values(), strict=True)
    return "\n".join([*rows, *(f"| {kind} | {' | '.join(f'{x:,.2f}' for x in ns)} |" for kind, *ns in each)])


def page(text: str) -> str:
    text = TIMES.sub(lambda m: f"{m[1]}\n{times()}\n\n{m[2]}", text)
    text = PAPERS.sub(lambda m: f"{m[1]}\n{papers()}\n\n{m[2]}", text)
    return MARK.sub(lambda m: f"{m[1]}\n{table()}\n\n{m[2]}", text)


def pictures() -> None:
    for name, (mask, length) in PICTURES.items():
        order = fk.reorder(mask, length, block=(32, 32), moving=0)
        for when in ("before", "after"):
            path = HERE / "assets" / f"reorder-{name}-{when}.png"
            order.plot(path, before=when == "before", size=3.2, dpi=110, title=f"{when}: {mask}")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    pictures()
