"""The schema of a file of results.

    {"schema": 1, "parts": {"forward": {
        "machine": {"date": "2026-11-21", "cpu": "AMD EPYC", "cores": 2, "python": "3.11.7", "torch": "2.13.0"},
        "settings": {"shape": [1, 8, 4096, 64], "dtype": "float32", "rounds": 15},
        "rows": {"causal": {
            "figures": {"ms": {"native": 91.3, "flex": 180.4}},
            "ratios": {"flex / native": [1.98, 1.94, 2.24]},
            "goals": {"at least": {"ratios": {"flex / native": 1.75}}}}}}}}

Figures are medians over rounds by what is counted and by whom, or by what varies along the row. A ratio names both
sides; it is the median over rounds, with the 95 % interval of that median (of fewer than six rounds, with their range)
where one was taken, or the median alone.
"peer / ours" is above 1 where ours is faster. `rounds` of the settings is null where nobody wrote it down. A row may
hold rows of its own, one for each length, say. `notes` are words: why there is no figure, or how it came about. `run`
is the date, machine and versions of a row, and `rounds` what was read in each round, such as the clock of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from frisket.dsl.errors import ParameterError

VERSION = 1
MACHINE = {"date": str, "cpu": str, "cores": int, "python": str}  # and the versions of what is installed
SIDES = ("at least", "at most")


def check(result: Any) -> None:
    """Raise `ParameterError` that says where `result` is no result in this form.

    >>> check({"schema": 1, "parts": {"forward": {"settings": {}, "rows": {}}}})
    Traceback (most recent call last):
    ...
    frisket.dsl.errors.ParameterError: parts.forward: the keys are rows, settings; there must be machine, settings, rows
    """
    _keys(result, "a result", ("schema", "parts"))
    if result["schema"] != VERSION:
        raise ParameterError(f"schema: {result['schema']!r} is not {VERSION}, the form of this version")
    for name, part in _named(result["parts"], "parts"):
        where = f"parts.{name}"
        _keys(part, where, ("machine", "settings", "rows"), ("notes",))
        for key, kind in MACHINE.items():
            if not isinstance(part["machine"].get(key), kind):
                raise ParameterError(f"{where}.machine: {key} must be given, as {kind.__name__}")
        _checked(part["settings"], f"{where}.settings", str | Real | None)
        if "rounds" not in part["settings"]:
            raise ParameterError(f"{where}.settings: `rounds` must be given, null where it is not known")
        _checked(part.get("notes", {}), f"{where}.notes")
        _rows(part["rows"], f"{where}.rows")


def leaves(rows: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Rows with their names, outermost first; of those that hold others, the others."""
    for name, row in rows.items():
        if "rows" in row:
            yield from leaves(row["rows"], (*above, name))
        else:
            yield (*above, name), row


@dataclass(frozen=True)
class Goal:
    """One figure or ratio, and what it was to be."""

    quantity: str  # of the figures, or "ratios"
    name: str
    value: float
    bound: float
    side: str

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.side == "at least" else self.value <= self.bound


def goals(row: Mapping[str, Any]) -> Iterator[Goal]:
    """The goals of a row beside what was measured; those whose figure is not there are left out."""
    for side, quantities in row.get("goals", {}).items():
        for quantity, bounds in quantities.items():
            for name, bound in bounds.items():
                if quantity == "ratios":
                    if name in row.get("ratios", {}):
                        yield Goal(quantity, name, row["ratios"][name][0], bound, side)
                elif name in row.get("figures", {}).get(quantity, {}):
                    yield Goal(quantity, name, row["figures"][quantity][name], bound, side)


def _rows(rows: Any, where: str) -> None:
    for name, row in _named(rows, where):
        here = f"{where}.{name}"
        for key in {"run", "rounds", "notes"} & dict(_named(row, here)).keys():
            _checked(row[key], f"{here}.{key}", Real if key == "rounds" else str | Real)
        if "rows" in row:
            _keys(row, here, ("rows",), ("run",))
            _rows(row["rows"], here)
            continue
        _keys(row, here, (), ("figures", "ratios", "goals", "notes", "run", "rounds"))
        if not set(row) - {"run"}:
            raise ParameterError(f"{here}: nothing is said; give figures, ratios or notes")
        for quantity, figures in _named(row.get("figures", {}), f"{here}.figures"):
            for who, value in _named(figures, f"{here}.figures.{quantity}"):
                _number(value, f"{here}.figures.{quantity}.{who}")
        for pair, ratio in _named(row.get("ratios", {}), f"{here}.ratios"):
            _ratio(pair, ratio, f"{here}.ratios.{pair}")
        _keys(row.get("goals", {}), f"{here}.goals", (), SIDES)
        for side, quantities in row.get("goals", {}).items():
            for quantity, bounds in _named(quantities, f"{here}.goals.{side}"):
                measured = row.get("ratios" if quantity == "ratios" else "figures", {})
                if quantity != "ratios" and quantity not in measured:
                    raise ParameterError(f"{here}.goals.{side}: there are no figures in {quantity!r}")
                for who, value in _named(bounds, f"{here}.goals.{side}.{quantity}"):
                    _number(value, f"{here}.goals.{side}.{quantity}.{who}")


def _ratio(pair: str, ratio: Any, where: str) -> None:
    if " / " not in pair:
        raise ParameterError(f"{where}: name both sides, for example 'flex / native'")
    if not isinstance(ratio, list | tuple) or len(ratio) not in (1, 3):
        raise ParameterError(f"{where}: {ratio!r} must be [median] or [median, low, high]")
    for x in ratio:
        _number(x, where)
    if len(ratio) == 3 and not ratio[1] <= ratio[0] <= ratio[2]:
        raise ParameterError(f"{where}: {ratio!r}: the median lies outside of its interval")


def _number(x: Any, where: str) -> None:
    if not isinstance(x, Real) or isinstance(x, bool) or x != x:
        raise ParameterError(f"{where}: {x!r} is no number")


def _checked(given: Any, where: str, kinds: Any = str | Real) -> None:
    for name, value in _named(given, where):
        each = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(x, kinds) for x in each):
            raise ParameterError(f"{where}.{name}: {value!r} must be text, a number or a list of them")


def _named(given: Any, where: str) -> Any:
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in given):
        raise ParameterError(f"{where}: must be an object with names, got {type(given).__name__}")
    return given.items()


def _keys(given: Any, where: str, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    _named(given, where)
    if set(needed) - set(given) or set(given) - {*needed, *others}:
        must = f"there must be {', '.join(needed)}" if needed else f"there may be {', '.join(others)}"
        raise ParameterError(f"{where}: the keys are {', '.join(sorted(given)) or 'none'}; {must}")
