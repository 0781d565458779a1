"""A campaign over the cases of a seed: what was seen, what failed, and the file from which it goes on."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mutation.table import commit
from outside.programs import make

from . import smaller, targets
from .caches import make_operations, make_steps
from .hostile import make_text
from .scores import make_score

AT_ONCE = 100  # cases of a line in the file
APART = 1_000_000_000  # programs of one seed: no two seeds share one
DIGEST = 8
MAKERS: dict[str, Callable[[int], Any]] = {
    "hostile": make_text, "score": make_score, "caches": make_steps, "stores": make_operations,
}  # fmt: skip


@dataclass
class Counts:
    """How far a campaign is. Distinct cases have distinct canonical texts; hostile ones, distinct texts."""

    cases: int = 0
    failed: int = 0
    seconds: float = 0.0
    distinct: set[bytes] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.cases:,} cases, {len(self.distinct):,} distinct, {self.failed} failed, {self.seconds:.0f} s"


def run(
    target: str, seed: int, cases: int, file: Path | None = None, show: Callable[[str], None] = lambda text: None
) -> Counts:
    counts = read(file, target, seed) if file else Counts()
    here = commit() if file else ""
    while counts.cases < cases:
        began, seen = time.monotonic(), set()
        stop = min(cases, counts.cases + AT_ONCE)
        failures = []
        for i in range(counts.cases, stop):
            same, failure = one(target, seed, i)
            seen.add(blake2b(same.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest())
            if failure:
                failures.append(failure)
                show(f"# case {i}: {failure['why']}\n{failure['test']}")
        new = seen - counts.distinct
        counts.distinct |= new
        counts.cases, counts.failed = stop, counts.failed + len(failures)
        counts.seconds += (spent := time.monotonic() - began)
        if file:
            digests = base64.b64encode(b"".join(sorted(new))).decode()
            line = {"target": target, "seed": seed, "done": stop, "commit": here, "seconds": round(spent, 2)}
            with file.open("a", encoding="utf-8") as f:
                f.write(json.dumps({**line, "failures": failures, "distinct": digests}) + "\n")
    return counts


def union(files: Sequence[Path], show: Callable[[str], None] = print) -> Counts:
    """The counts of several files of one target, shown, and all of them together. Of files of one seed, whose cases are
    the same, the one with the most cases counts."""
    longest: dict[int, Counts] = {}
    first = ""
    for file in files:
        line = json.loads(file.read_text(encoding="utf-8").partition("\n")[0])
        target, seed = line["target"], line["seed"]
        first = first or target
        if target != first:
            raise SystemExit(f"{file} is of target {target}, the first one of {first}; name files of one target")
        counts = read(file, target, seed)
        show(f"{file}: {target}, seed {seed}: {counts}")
        if seed not in longest or counts.cases > longest[seed].cases:
            longest[seed] = counts
    parts = longest.values()
    whole = Counts(*(sum(getattr(c, n) for c in parts) for n in ("cases", "failed", "seconds")))
    whole.distinct = set().union(*(c.distinct for c in parts))
    show(f"union: {first}: {whole}")
    return whole


def one(target: str, seed: int, i: int) -> tuple[str, dict[str, Any] | None]:
    """(what counts as the same case, the failure if there is one)"""
    number = seed * APART + i
    case = MAKERS.get(target, make)(number)
    what = targets.what_of(target, case)
    try:
        with targets.limited(targets.seconds_of(target)):
            return targets.TARGETS[target](what), None
    except (Exception, targets.TooLong) as error:
        kind, why = targets.kind_of(error), f"{type(error).__name__}: {error}"
    fails = smaller.same_failure(target, kind)
    less = smaller.smaller_text(case, fails) if isinstance(case, str) else smaller.smaller_case(case, fails)
    what = targets.what_of(target, less)
    test = smaller.as_test(f"{target}_{seed}_{i}", target, what, why)
    return repr(case), {"case": i, "kind": kind, "why": why[:500], "test": test}


def read(file: Path, target: str, seed: int) -> Counts:
    """What a file says; a last line that was cut off is removed."""
    counts = Counts()
    if not file.exists():
        return counts
    whole, _, cut = file.read_text(encoding="utf-8").rpartition("\n")
    if cut:
        file.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    for line in filter(None, whole.split("\n")):
        found = json.loads(line)
        if (found["target"], found["seed"]) != (target, seed):
            raise SystemExit(f"{file} is of target {found['target']}, seed {found['seed']}; name another file")
        digests = base64.b64decode(found["distinct"])
        counts.distinct |= {digests[i : i + DIGEST] for i in range(0, len(digests), DIGEST)}
        counts.cases, counts.seconds = found["done"], counts.seconds + found["seconds"]
        counts.failed += len(found["failures"])
    return counts
