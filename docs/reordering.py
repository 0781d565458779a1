"""The table and the pictures of docs/reordering.md: `python docs/reordering.py` writes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import cases  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.runtime.attention.cpu_time import KINDS  # noqa: E402
from frisket.runtime.attention.order import Order  # noqa: E402

PAGE = HERE / "reordering.md"
MARK = re.compile(r"(<!-- table, written by docs/reordering\.py -->\n).*?(<!-- end -->)", re.S)
TIMES = re.compile(r"(<!-- times, written by docs/reordering\.py -->\n).*?(<!-- end -->)", re.S)
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
    return f"| `{name}` | {said} | {order.before.visited:,} | {order.after.visited:,} |"


def table() -> str:
    rows = ["| mask | order | tiles before | after |", "| --- | --- | ---: | ---: |"]
    return "\n".join([*rows, *(row(*found) for found in orders().items())])


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
