"""A race: all contestants compute the same, are compared first, and are then timed in turns.

Its lines to read say who, how long, beside ours, and why somebody is missing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from textwrap import wrap
from typing import Any

import numpy as np
from rich.text import Text

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


BAR = 24  # characters of the longest bar
GOOD, LOSS, AWAY = "green", "magenta", "dim"
HEAD = f"{'median':>8}  {'time / frisket':>14}  "
LEAST = 4  # columns that a bar of a narrow terminal needs
ENOUGH = 6  # rounds that a 95 % interval of a median takes; of fewer their range is shown


def lines(races: Iterable[Race], columns: int | None = None) -> list[Text]:
    """A heading for each race, and a line for each contestant; of `columns` at most, where a terminal has so many."""
    out: list[Text] = []
    for race in races:
        wide = max(map(len, [*race.times, *race.out, *race.ours]), default=0)
        out += [Text(), Text.assemble((f"{race.contest.name}, {race.stage}", "bold"))]
        medians = {n: median(t) for n, t in race.times.items() if t}
        if medians:
            spread = "95 % interval" if race.rounds >= ENOUGH else "range" if race.rounds > 1 else ""
            out.append(Text(f"  {'':{wide}}  {HEAD}{spread}".rstrip(), "dim"))
        longest = max(medians.values(), default=0.0)
        for name, t in sorted(medians.items(), key=lambda x: x[1]):
            room = BAR if columns is None else min(BAR, columns - wide - len(HEAD) - 22)
            bar = "█" * max(1, round(room * (t / longest))) if room >= LEAST else ""
            out.append(_line(race, name, t, wide, bar))
        out += [line for name, why in race.out.items() for line in away(name, why, wide, columns)]
        if race.doing:
            out.append(Text(f"  {race.doing} ...", "dim"))
    return out[1:]


def away(name: str, why: str, wide: int, columns: int | None) -> list[Text]:
    """A name and why it is missing, in a second column if there is one."""
    said = [why] if columns is None else wrap(why, max(columns - wide - 4, 24), break_on_hyphens=False)
    return [Text.assemble(f"  {name if n == 0 else '':{wide}}  ", (part, AWAY)) for n, part in enumerate(said or [""])]


def _line(race: Race, name: str, seconds: float, wide: int, bar: str) -> Text:
    ours, beside = name in race.ours, race.beside(name)
    if beside is None:
        ratio, colour = f"{'1.00' if name == race.default() else '':>14}  {'':16}", GOOD
    else:
        middle, low, high = beside
        colour = LOSS if high < 1 and not ours else ""
        interval = f"{low:.2f} to {high:.2f}" if race.rounds > 1 else ""
        ratio = f"{middle:14.2f}  {interval:16}"
    text = Text.assemble((f"  {name:{wide}}", "bold" if ours else ""), f"  {spoken(seconds):>8}  ", (ratio, colour),
                         "  ", (bar, "cyan" if ours else "dim"))  # fmt: skip
    text.rstrip()
    return text


def spoken(seconds: float) -> str:
    """`spoken(0.0123) == "12.3 ms"`."""
    size, unit = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")
    x = seconds / size
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.1f} {unit}" if x >= 10 else f"{x:.2f} {unit}"


def losses(races: Iterable[Race]) -> list[str]:
    """Peers that are faster than ours that is taken by itself, by more than the interval leaves open."""
    found = []
    for race in races:
        for name in race.times:
            ratio: Any = race.beside(name)
            if name not in race.ours and ratio and ratio[2] < 1:
                found.append(f"{race.contest.name}: {name} is faster, {ratio[0]:.2f} × our time")
    return found
