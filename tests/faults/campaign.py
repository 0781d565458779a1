"""Rounds of a fault: which are done, what was seen, and the file from which they go on."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import children, compilers, kernels, kills, memory, places, signals, threads
from .machine import NotHereError

# by name: what is done in a round, and how many rounds there are
FAULTS: dict[str, tuple[Callable[[random.Random], dict[str, int]], int | Callable[[], int]]] = {
    **kills.FAULTS, **places.FAULTS, **compilers.FAULTS, **memory.FAULTS, **signals.FAULTS, **children.FAULTS,
    **threads.FAULTS, **kernels.FAULTS,
}  # fmt: skip


@dataclass
class Outcome:
    """Rounds of a fault, what they counted, and what was wrong."""

    rounds: int = 0
    failed: int = 0
    seconds: float = 0.0
    left_out: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, line: dict) -> None:
        self.rounds += 1
        self.seconds += line["seconds"]
        self.failed += bool(line["failure"])
        self.left_out = line["left_out"]
        self.counts.update(line["counts"])

    def __str__(self) -> str:
        if self.left_out:
            return f"not run: {self.left_out}"
        seen = "".join(f", {n:,} {what}" for what, n in self.counts.items())
        return f"{self.rounds} rounds{seen}, {self.failed} failed, {self.seconds:.0f} s"


def run(
    name: str, seed: int = 0, rounds: int | None = None, file: Path | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Outcome:  # fmt: skip
    work, usual = FAULTS[name]
    done, outcome = read(file, name, seed) if file else {}, Outcome()
    if rounds is None:
        rounds = usual() if callable(usual) else usual
    for number in range(rounds):
        line = done.get(number) or one(work, name, seed, number)
        if line["failure"]:
            show(f"# {name}, seed {seed}, round {number}\n{line['failure']}")
        outcome.add(line)
        if file and number not in done and not line["left_out"]:
            with file.open("a", encoding="utf-8") as f:
                f.write(json.dumps({"fault": name, "seed": seed, "round": number, **line}) + "\n")
        if line["left_out"]:
            break
    return outcome


def one(work: Callable[[random.Random], dict[str, int]], name: str, seed: int, number: int) -> dict:
    began, line = time.monotonic(), {"counts": {}, "failure": "", "left_out": ""}
    try:
        draw = random.Random(f"{name} {seed} {number}")
        draw.round = number  # type: ignore[attr-defined]
        line["counts"] = work(draw)
    except NotHereError as why:
        line["left_out"] = str(why)
    except Exception as error:  # an AssertionError as a rule
        line["failure"] = f"{type(error).__name__}: {error}"
    return line | {"seconds": round(time.monotonic() - began, 2)}


def read(file: Path, name: str, seed: int) -> dict[int, dict]:
    """The rounds that a file holds; a last line that was cut off is removed."""
    if not file.exists():
        return {}
    whole, _, cut = file.read_text(encoding="utf-8").rpartition("\n")
    if cut:
        file.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    found = map(json.loads, filter(None, whole.split("\n")))
    return {x["round"]: x for x in found if (x["fault"], x["seed"]) == (name, seed)}
