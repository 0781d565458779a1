"""A race as lines to read: who, how long, beside ours, and why somebody is missing."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from textwrap import wrap
from typing import Any

from rich.text import Text

from .race import Race

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
