"""Mutants that change nothing, the score of a run, and the commit it is of."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

EQUIVALENT = Path(__file__).with_name("equivalent.txt")


def equivalent() -> dict[str, str]:
    """Id -> why no test could notice: the lines of equivalent.txt, `ID REASON`."""
    lines = [x for x in EQUIVALENT.read_text(encoding="utf-8").splitlines() if x and not x.startswith("#")]
    return {id: reason for id, _, reason in (line.partition(" ") for line in lines)}


def summary(area: str, results: Iterable[dict[str, str]]) -> str:
    """A row of the table in tests/mutation/scores.md. The score leaves out invalid and equivalent mutants."""
    n = Counter(r["outcome"] for r in results)
    counted = n["killed"] + n["timed out"] + n["survived"]
    score = f"{(n['killed'] + n['timed out']) / counted:.1%}" if counted else "–"
    columns = sum(n.values()), n["invalid"], n["equivalent"], n["killed"], n["timed out"], n["survived"]
    return f"| {area} | {' | '.join(f'{c:,}' for c in columns)} | {score} |"


def commit() -> str:
    """The commit of the checkout, and "+" where files of it are changed."""
    asked = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    found = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no checkout"
