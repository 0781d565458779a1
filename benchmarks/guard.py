"""Compares the speed of this tree with that of the commit where a step began: `python benchmarks/guard.py COMMIT`.

The rows (guard_rows.py) are attention in torch and in JAX, decoding on stored keys, calls with little to compute, and
times that the model of GPUs predicts. Their code is this tree's, and runs on the frisket of either tree. A figure is
the median over rounds of COMMIT's time / this tree's (above 1: this tree is faster) with the 95 % interval of that
median. A verdict follows from the interval:

- slower: all of it is below 0.97, after four pairs of processes;
- faster: all of it is above 1 / 0.97, after four pairs if there is time;
- equal: none of it is below 0.97;
- undecided: 0.97 is inside. The row gets more rounds until the minutes are over.
- new: COMMIT's frisket cannot run the row, and the error says why.

The exit status is 1 if a row is slower, or if no row was compared. All rows take about 10 minutes on an idle machine
whose kernels are built, with --quick 2.

Each tree has a process: torch lets a process define the operators of one frisket only. One process waits while the
other runs, on the same core, and the order changes every round: A B, B A. Where the memory of a process lies changes
its speed by a percent or two, so each row has two pairs of processes or more. Waiting for the core is not counted
(Linux says how long it was), so that other work on the machine disturbs little. Both trees build kernels into one
cache, which finds them by their text.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import checkout  # noqa: F401
from guard_rows import PARTS
from store import keep

from frisket.runtime.bench.race import median_ratio

ROOT = Path(__file__).resolve().parent.parent
UNINSTALLED = Path("benchmarks", "uninstalled")  # by which `import frisket` finds a tree
LEAST = 0.97  # of a ratio
PAIRS, CONFIRMED = 2, 4  # of processes that time a row at least, and one whose speed seems to have changed
ROUNDS = 6, 40  # least and most in a pair of processes
BUDGET = 0.5  # seconds of a pair for a row that needs no more for the least rounds
THINNED = 11  # one row in so many, with --quick
VERDICTS = ("slower", "undecided", "equal", "faster", "new")


@dataclass
class Row:
    part: str
    name: str
    commit: list[float] = field(default_factory=list)  # seconds of each round
    tree: list[float] = field(default_factory=list)
    pairs: int = 0  # of processes that timed the row
    error: str = ""  # of COMMIT's frisket

    @property
    def ratio(self) -> tuple[float, float, float]:
        return median_ratio(self.commit, self.tree)

    @property
    def verdict(self) -> str:
        if self.error:
            return "new"
        _, low, high = self.ratio
        if high < LEAST:
            return "slower"
        if low < LEAST:
            return "undecided"
        return "faster" if low > 1 / LEAST else "equal"

    def due(self, late: bool) -> bool:
        """Whether another pair of processes times the row; `late` when the minutes are over. Predictions do not vary,
        so that one pair is enough."""
        least, confirmed = (1, 1) if self.part == "model" else (PAIRS, CONFIRMED)
        if self.error or self.pairs < least:
            return not self.error
        if self.verdict == "slower" or (self.verdict == "faster" and not late):
            return self.pairs < confirmed
        return self.verdict == "undecided" and not late

    def __str__(self) -> str:
        if self.error:
            return f"{self.verdict:9}  {self.part}: {self.name}: {self.error}"
        ratio, low, high = self.ratio
        return f"{self.verdict:9}  {ratio:.3f} [{low:.3f}, {high:.3f}]  {self.part}: {self.name}"

    def result(self) -> dict[str, Any]:
        """The row in the form of benchmarks/results."""
        if self.error:
            return {"notes": {"verdict": self.verdict, "error": self.error}}
        ms = {"commit": 1e3 * median(self.commit), "tree": 1e3 * median(self.tree)}
        return {
            "figures": {"ms": ms, "rounds": {"each": len(self.tree)}},
            "ratios": {"commit / tree": self.ratio},
            "notes": {"verdict": self.verdict},
        }


class Process:
    """A process of guard_rows.py on the tree in a folder."""

    def __init__(self, folder: Path, part: str, cores: int) -> None:
        paths = [str(folder / UNINSTALLED), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FRISKET_BACKEND": "native"}
        command = [sys.executable, str(ROOT / "benchmarks" / "guard_rows.py"), part, str(cores)]
        self.process = subprocess.Popen(
            command, env=env | {"PYTHONHASHSEED": "0"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.started = self._answer()

    def ask(self, **request: Any) -> Any:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()


def time_row(row: Row, commit: Process, tree: Process) -> None:
    """Add the rounds of a pair of processes to a row."""
    answers = [side.ask(build=row.name) for side in (tree, commit)]
    if "error" in answers[0]:
        raise RuntimeError(f"{row.part}: {row.name} does not run on this tree: {answers[0]['error']}")
    row.error = answers[1].get("error", "")
    if row.error:
        return
    row.pairs += 1
    calls, seconds = (max(x[n] for x in answers) for n in ("calls", "seconds"))
    least, most = (1, 1) if row.part == "model" else ROUNDS
    for i in range(min(max(least, math.ceil(BUDGET / (2 * calls * seconds))), most)):
        turns = [(commit, row.commit), (tree, row.tree)]
        for side, times in turns[:: -1 if i % 2 else 1]:
            times.append(side.ask(calls=calls)["seconds"])


def measure(before: Path, options: argparse.Namespace) -> list[Row]:
    """The rows, timed by pairs of processes until none is due; each is printed when that is so."""
    end = time.monotonic() + 60 * options.minutes
    rows: dict[str, list[Row]] = {}

    def due(part: str) -> bool:
        return part not in rows or any(row.due(time.monotonic() > end) for row in rows[part])

    while parts := [part for part in options.parts if due(part)]:
        for part in parts:
            print(f"== {part}", flush=True)
            with Process(before, part, options.cores) as commit, Process(ROOT, part, options.cores) as tree:
                if part not in rows:
                    rows[part] = rows_of(part, tree.started, options.rows, options.quick)
                for row in rows[part]:
                    if row.due(time.monotonic() > end):
                        time_row(row, commit, tree)
                        if not row.due(late=False):
                            print(row, flush=True)
    return [row for part in rows.values() for row in part]


def rows_of(part: str, started: dict[str, Any], text: str, quick: bool) -> list[Row]:
    """The rows to time of a part, by the first answer of this tree's process."""
    if started["failures"]:
        raise RuntimeError(f"{part} does not run on this tree: {'; '.join(started['failures'])}")
    rows = [Row(part, name) for name in started["rows"] if text in f"{part}: {name}"]
    return rows[::THINNED] if quick else rows


def report(rows: list[Row]) -> int:
    """Print the rows that stayed undecided and a line that counts all; the exit status."""
    for row in rows:
        if row.verdict == "undecided":
            print(row)
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS))
    return int(counts["slower"] > 0 or counts["new"] == len(rows))


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help=f"one row in {THINNED}")
    parser.add_argument("--minutes", type=float, help="after which undecided rows stay so (10, with --quick 2)")
    parser.add_argument("--cores", type=int, default=1, help="of a process (1)")
    parser.add_argument("--into", type=Path, metavar="FILE.json", help="also write the rows there")
    options = parser.parse_args(argv)
    if options.minutes is None:
        options.minutes = 2 if options.quick else 10
    commits = {"commit": git("describe", "--always", options.commit), "tree": git("describe", "--always", "--dirty")}
    commits = {side: text.decode().strip() for side, text in commits.items()}
    print("time of {commit} / time of {tree}".format(**commits))
    with tempfile.TemporaryDirectory() as folder:
        files = git("archive", options.commit, "dsl", "grammar", "lowering", "runtime")
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(folder, filter="data")
        shutil.copytree(ROOT / UNINSTALLED, Path(folder) / UNINSTALLED)
        rows = measure(Path(folder), options)
    for part in dict.fromkeys(row.part for row in rows) if options.into else ():
        results = {row.name: row.result() for row in rows if row.part == part}
        settings = {**commits, "cores": options.cores, "rounds": None}
        keep(options.into.stem, part, results, settings, folder=options.into.parent)
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
