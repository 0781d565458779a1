"""Where the programs of this folder keep what they find: benchmarks/results, a part of a file at a time, in the form of
frisket.runtime.bench.schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from frisket.runtime.bench import schema
from frisket.runtime.bench.race import described

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def keep(
    file: str, part: str, rows: Mapping[str, Row], settings: Mapping[str, Any], *,
    notes: Mapping[str, str] | None = None, device: Mapping[str, Any] | None = None, folder: Path = RESULTS,
) -> None:  # fmt: skip
    """One part of `<file>.json`, with the machine named; other parts stay, each with the machine it was measured on.
    `settings` are what all rows share, `rounds` among them."""
    path = folder / f"{file}.json"
    known = json.loads(path.read_text())["parts"] if path.exists() else {}
    found = {"machine": {**described(), **(device or {})}, "settings": dict(settings), "rows": dict(rows)}
    if notes:
        found["notes"] = dict(notes)
    result = json.loads(json.dumps({"schema": schema.VERSION, "parts": {**known, part: found}}))  # keys are text
    schema.check(result)
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


Part = Callable[[int], Iterator[tuple[str, Row]]]  # of a number of rounds: rows and their names


def run_parts(
    doc: str | None, parts: Mapping[str, Part], file: str, settings: Callable[[str], dict[str, Any]], rounds: int = 9
) -> None:
    """The command line of a benchmark in parts: runs those asked for, prints their rows, and keeps them in `file`."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=[*parts, []], help="all of them unless named")
    options.add_argument("--rounds", type=int, default=rounds)
    given = options.parse_args()
    for part in given.parts or parts:
        print(f"== {part}", flush=True)
        rows = {}
        for name, row in parts[part](given.rounds):
            rows[name] = row
            print(shown(name, row), flush=True)
        keep(file, part, rows, {**settings(part), "rounds": given.rounds})


def shown(name: str, row: Row, indent: str = "") -> str:
    """A row to read: figures, ratios with their intervals, what was to be."""
    lines = [indent + name]
    for inner, each in row.get("rows", {}).items():
        lines.append(shown(inner, each, indent + "    "))
    for quantity, figures in row.get("figures", {}).items():
        lines.append(f"{indent}    {quantity:24} " + ", ".join(f"{n} {rounded(x)}" for n, x in figures.items()))
    for quantity, each in row.get("rounds", {}).items():
        lines.append(f"{indent}    {quantity:24} {rounded(min(each))} to {rounded(max(each))}")
    bounds = {(g.quantity, g.name): g for g in schema.goals(row)}
    for pair, ratio in row.get("ratios", {}).items():
        goal = bounds.pop(("ratios", pair), None)
        interval = "  [" + ", ".join(f"{x:.2f}" for x in ratio[1:]) + "]" if len(ratio) > 1 else ""
        lines.append(f"{indent}    {pair:24} {ratio[0]:6.2f}{interval}" + (f"  {said(goal)}" if goal else ""))
    lines += [f"{indent}    {g.quantity}, {g.name}: {said(g)}" for g in bounds.values()]
    lines += [f"{indent}    {n}: {x}" for n, x in row.get("notes", {}).items()]
    return "\n".join(lines)


def said(goal: schema.Goal) -> str:
    return f"{goal.side} {goal.bound:g}{'' if goal.met else ': MISSED'}"


def rounded(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value
