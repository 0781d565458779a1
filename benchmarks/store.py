"""Where the programs of this folder keep what they find: benchmarks/results, a part of a file at a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from frisket.runtime.bench.machine import described

RESULTS = Path(__file__).parent / "results"


def save(name: str, found: dict[str, Any]) -> None:
    """`benchmarks/results/<name>.json`, with the machine named."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": described(), **found}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def merge(name: str, part: str, found: dict[str, Any], folder: Path = RESULTS) -> None:
    """One part of `<name>.json` in benchmarks/results; the others stay, each with the machine it was measured on."""
    path = folder / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    parts = {n: x for n, x in known.items() if isinstance(x, dict) and "machine" in x}
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({**parts, part: {"machine": described(), **found}}, indent=1) + "\n")


Part = Callable[[int], Iterator[tuple[str, dict[str, Any]]]]  # of a number of rounds: rows and their names


def run_parts(
    doc: str | None, parts: Mapping[str, Part], file: str, head: Callable[[str], dict[str, Any]],
    shown: Callable[[str, dict[str, Any]], str] = lambda name, row: f"{name:32} {json.dumps(row)}",
) -> None:  # fmt: skip
    """The command line of a benchmark in parts: runs those asked for, prints their rows, and keeps them in `file`,
    each part's below its `head`."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=[*parts, []], help="all of them unless named")
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    for part in given.parts or parts:
        print(f"== {part}", flush=True)
        rows = {}
        for name, row in parts[part](given.rounds):
            rows[name] = row
            print(shown(name, row), flush=True)
        merge(file, part, {**head(part), "rows": rows})
