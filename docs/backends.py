"""The page of backends and what each lacks: `python docs/backends.py` writes docs/backends.md.

Features and reasons are those of the backends' records, from which calls are refused. The tests of each online softmax
are those that tests/support/softmax_features.py names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support import softmax_features  # noqa: E402

from frisket.lowering.kernels.features import FEATURES  # noqa: E402
from frisket.runtime.backends.base import Backend, backends_of  # noqa: E402

PAGE = HERE / "backends.md"
INTRO = """\
# Backends

For readers who want to know which backend runs their call, and for contributors who add a feature or a kernel. After
this page you know what each backend lacks, and which test checks a feature in each kernel.
Written by `python docs/backends.py` from the records in `runtime/backends` and from `lowering/kernels/features.py`.

A call that [chooses no backend](how-it-works.md#which-kernel-a-call-takes) runs on one that has all it needs. A call
that names a backend raises the reason below if the backend lacks something. `…` stands for a part of the call. Limits
on lengths and on the entries of tables are not listed; their errors name them. Neither are the masks of
[engines](engines.md), which depend on the GPU too. `frisket doctor` says which backends run on your machine, and lists
the features that each lacks.

| backend | what it runs | arrays of | platforms |
| --- | --- | --- | --- |
{backends}

## Features

A test runs a tiny call for each backend and feature. The call is right, or it raises the reason.

| feature | what a call needs | backends that lack it |
| --- | --- | --- |
{features}

## Reasons

{reasons}

## The online softmax

Each kernel implements the online softmax. For each kernel and feature the table names a test, or the feature that the
backend lacks.

| kernel | features | checked by |
| --- | --- | --- |
{places}
"""


def row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def shown(reason: str) -> str:
    """A reason in one line, with … for what a call puts in."""
    return re.sub(r"\{.*?\}", "…", "; ".join(line.strip() for line in reason.splitlines())).replace("`", "'")


def reasons(backend: Backend) -> list[str]:
    """What a backend lacks, the features of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for feature, why in backend.features.items():
        by_reason.setdefault(shown(why.replace("{dtype}", feature)), []).append(feature)
    return [f"- {', '.join(features)}: `{why}`" for why, features in by_reason.items()]


def places() -> list[str]:
    """A line for each place of the online softmax and each test or reason."""
    lines = []
    for name, place in softmax_features.PLACES.items():
        by_cell: dict[str, list[str]] = {}
        for feature, cell in place.cells.items():
            lacks = isinstance(cell, softmax_features.Lacks)
            text = f"{place.backend} lacks {cell.feature}" if lacks else f"`{cell.partition('tests/')[2]}`"
            by_cell.setdefault(text, []).append(feature)
        lines += [row(name, ", ".join(features), text) for text, features in by_cell.items()]
    return lines


def page() -> str:
    """The page as it should be."""
    records = backends_of()
    lacking = {name: [f"`{b.name}`" for b in records if name in b.features] for name in FEATURES}
    where = {b.name: ", ".join(b.platforms) or "all" for b in records}
    return INTRO.format(
        backends="\n".join(row(f"`{b.name}`", b.kernels, ", ".join(b.frameworks), where[b.name]) for b in records),
        features="\n".join(row(name, what, ", ".join(lacking[name])) for name, what in FEATURES.items()),
        reasons="\n\n".join("\n".join([f"`{b.name}`", "", *reasons(b)]) for b in records if b.features),
        places="\n".join(places()),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
