"""A race: all contestants compute the same, are compared first, and are then timed in turns."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frisket.dsl.errors import Undecided

from .contest import Call, Contest, NoWordsError, Stage
from .machine import median_ratio, row, turns

ALLOWED = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}  # of the largest result, or of 1


@dataclass
class Race:
    """One contest as far as it has come. `times` are seconds by contestant; `out` says who is not timed, and why."""

    contest: Contest
    stage: str
    ours: tuple[str, ...]
    rounds: int
    times: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)  # seconds of the first call, compilation included
    out: dict[str, str] = field(default_factory=dict)
    doing: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)  # what of the stage's device is worth a name

    def row(self) -> dict[str, Any]:
        """A row in the form of schema.py."""
        timed = {n: t for n, t in self.times.items() if t}
        found = row(timed, self.ours) if timed else {}
        if self.first:
            found.setdefault("figures", {})["s, first call"] = dict(self.first)
        return found | ({"notes": dict(self.out)} if self.out else {})

    def default(self) -> str | None:
        """Ours that is taken where nobody asks for another, among those that were timed."""
        return next((n for n in self.ours if self.times.get(n)), None)

    def beside(self, name: str) -> tuple[float, float, float] | None:
        """Time of a contestant / time of our default, round by round."""
        base = self.default()
        if base in (None, name) or not self.times.get(name):
            return None
        assert base is not None
        n = min(len(self.times[name]), len(self.times[base]))
        return median_ratio(self.times[name][:n], self.times[base][:n]) if n else None


def run(contest: Contest, stage: Stage, rounds: int, families: Collection[str] | None = None) -> Iterator[Race]:
    """The race after every step. `families` are the peers that take part, None for all."""
    chosen = [c for c in stage.contestants if c.ours or families is None or c.family in families]
    race = Race(contest, stage.name, tuple(c.name for c in chosen if c.ours), rounds, machine=stage.machine)
    calls: dict[str, Call] = {}
    results: dict[str, Any] = {}
    for c in chosen:
        if c.missing:
            race.out[c.name] = c.missing
            continue
        race.doing = f"{c.name}: first call"
        yield race
        start = time.perf_counter()
        try:
            call = c.prepare(contest)
            results[c.name] = stage.numpy(call())
        except Exception as error:  # of any library: what it says is part of the result
            race.out[c.name] = failure_text(error)
            continue
        race.first[c.name] = time.perf_counter() - start
        calls[c.name] = call
    race.doing = "comparing results"
    yield race
    for name, why in disagreeing(contest, results, race.ours, stage).items():
        race.out[name] = why
        del calls[name]
    results.clear()
    for n, race.times in enumerate(turns(calls, rounds, stage.rest, stage.clock), 1):
        race.doing = f"round {n} of {rounds}" if n < rounds else ""
        yield race


def failure_text(error: Exception) -> str:
    """A text that says why a participant is not timed."""
    if isinstance(error, NoWordsError):
        return str(error)
    return f"failed: {type(error).__name__}: {error}".split("\n")[0][:200]


def disagreeing(contest: Contest, results: dict[str, Any], ours: Collection[str], stage: Stage) -> dict[str, str]:
    """Contestants whose results are not right, and how far off they are. They are held against the interpreter for
    some rows, then everything against ours; of gradients the interpreter says nothing here, so that those that differ
    from ours are named as differing."""
    bad: dict[str, str] = {}
    sizes = contest.sizes
    for at, want in stage.truth(contest):
        for name, (out,) in results.items():
            if why := apart(out[:, :, at], want, sizes.dtype):
                bad.setdefault(name, f"wrong, not timed: {why} from the interpreter")
    base = next((n for n in ours if n in results and n not in bad), None)
    for name, found in results.items():
        if base is None or name in bad or name == base:
            continue
        whys = [apart(x, y, sizes.dtype) for x, y in zip(found, results[base], strict=True)]
        if why := next(filter(None, whys), ""):
            bad[name] = f"not timed: {why} from {base}"
    peers = [n for n in bad if n not in ours]
    if peers and contest.mask is not None and _sees_nothing(contest):
        bad |= {n: f"{bad[n]}; some queries see no key, where results are 0 here" for n in peers}
    return bad


def _sees_nothing(contest: Contest) -> bool:
    """Whether some query sees no key: what others answer there is theirs to choose."""
    s = contest.sizes
    assert contest.mask is not None
    try:
        return bool(contest.mask.empty_rows(s.q_len, s.kv_len, batch=s.batch, heads=s.heads))
    except Undecided:
        return False


def apart(got: Any, want: Any, dtype: str) -> str:
    """How two results differ, where it is more than their numbers allow."""
    if got.shape != want.shape:
        return f"its shape {got.shape} differs"
    nan = int(np.isnan(got).sum() - np.isnan(want).sum())
    if nan > 0:
        return f"{nan:,} of {got.size:,} numbers are NaN, apart"
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = float(np.nanmax(np.abs(got - want), initial=0.0))
    size = max(1.0, float(np.nanmax(np.abs(want), initial=0.0)))
    return "" if error <= ALLOWED[dtype] * size else f"{error:.2g} apart"
