"""The schema of a file of results.

    {"schema": 1, "parts": {"forward": {
        "machine": {"date": "2026-11-21", "cpu": "AMD EPYC", "cores": 2, "python": "3.11.7", "torch": "2.13.0"},
        "settings": {"shape": [1, 8, 4096, 64], "dtype": "float32", "rounds": 15},
        "rows": {"causal": {
            "figures": {"ms": {"native": 91.3, "flex": 180.4}},
            "ratios": {"flex / native": [1.98, 1.94, 2.24]},
            "goals": {"at least": {"ratios": {"flex / native": 1.75}}}}}}}}

Figures are medians over rounds by what is counted and by whom, or by what varies along the row. A ratio names both
sides. It is the median over rounds, with the 95 % interval of that median (of fewer than six rounds, with their range)
where one was taken, or the median alone.
"peer / ours" is above 1 where ours is faster. `rounds` of the settings is null where it was not recorded. A row may
hold inner rows, one for each length, say. `notes` are words: why there is no figure, or how it came about. `run`
is the date, machine and versions of a row, and `rounds` what was read in each round, such as the clock of a GPU.

A chart has the time of every contestant and ours, with the interval of the ratio. A row of results is a row of marks:
at 1 ours, to the right who is slower, to the left who is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.runtime.draw.pixels import DARK, LIGHT, SUFFIXES, Palette, file_of, save
from frisket.runtime.machine.modules import extras

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
    """The targets of a row and what was measured; those whose figure is not there are left out."""
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
        path = f"{where}.{name}"
        for key in {"run", "rounds", "notes"} & dict(_named(row, path)).keys():
            _checked(row[key], f"{path}.{key}", Real if key == "rounds" else str | Real)
        if "rows" in row:
            _keys(row, path, ("rows",), ("run",))
            _rows(row["rows"], path)
            continue
        _keys(row, path, (), ("figures", "ratios", "goals", "notes", "run", "rounds"))
        if not set(row) - {"run"}:
            raise ParameterError(f"{path}: nothing is said; give figures, ratios or notes")
        for quantity, figures in _named(row.get("figures", {}), f"{path}.figures"):
            for who, value in _named(figures, f"{path}.figures.{quantity}"):
                _number(value, f"{path}.figures.{quantity}.{who}")
        for pair, ratio in _named(row.get("ratios", {}), f"{path}.ratios"):
            _ratio(pair, ratio, f"{path}.ratios.{pair}")
        _keys(row.get("goals", {}), f"{path}.goals", (), SIDES)
        for side, quantities in row.get("goals", {}).items():
            for quantity, bounds in _named(quantities, f"{path}.goals.{side}"):
                measured = row.get("ratios" if quantity == "ratios" else "figures", {})
                if quantity != "ratios" and quantity not in measured:
                    raise ParameterError(f"`{path}.goals.{side}`: there are no figures in {quantity!r}")
                for who, value in _named(bounds, f"{path}.goals.{side}.{quantity}"):
                    _number(value, f"{path}.goals.{side}.{quantity}.{who}")


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
    if not isinstance(x, Real) or isinstance(x, bool) or x != x:  # NaN, too
        raise ParameterError(f"{where}: {x!r} is no number")


def _checked(entries: Any, where: str, kinds: Any = str | Real) -> None:
    for name, value in _named(entries, where):
        each = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(x, kinds) for x in each):
            raise ParameterError(f"{where}.{name}: {value!r} must be text, a number or a list of them")


def _named(entries: Any, where: str) -> Any:
    if not isinstance(entries, Mapping) or not all(isinstance(n, str) for n in entries):
        raise ParameterError(f"{where}: must be an object with names, got {type(entries).__name__}")
    return entries.items()


def _keys(entries: Any, where: str, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    _named(entries, where)
    if set(needed) - set(entries) or set(entries) - {*needed, *others}:
        must = f"there must be {', '.join(needed)}" if needed else f"there may be {', '.join(others)}"
        raise ParameterError(f"{where}: the keys are {', '.join(sorted(entries)) or 'none'}; {must}")


COLOURS = ("#d9730d", "#7a5cc4", "#1a8f6f", "#b03a6f", "#8a6d1c", "#4f6f8f")
MARKS = "osD^vP"
Ratios = Mapping[str, Mapping[str, Sequence[float]]]  # row -> peer -> the median, and its interval


def ratios(parts: Mapping[str, Any], ours: str | None = None) -> dict[str, dict[str, Sequence[float]]]:
    """Row -> peer -> [median, low, high] of peer / ours: of the first of ours that the row names, or of `ours`."""
    by_row: dict[str, dict[str, Sequence[float]]] = {}
    for title, part in parts.items():
        for names, row in leaves(part["rows"]):
            pairs = {tuple(pair.split(" / ")): x for pair, x in row.get("ratios", {}).items()}
            base = ours or next((o for _, o in pairs), None)
            of = {p: x for (p, o), x in pairs.items() if o == base}
            if of:
                by_row[", ".join((*names, title) if len(parts) > 1 else names)] = of
    return by_row


def draw(rows: Ratios, path: Path, *, dark: bool = False, title: str = "", axis: str = "time / frisket's time") -> None:
    """Write the chart to `path`, `.png` or `.svg`. Equal rows give equal bytes."""
    if path.suffix.lower() not in SUFFIXES:
        raise ParameterError(f"cannot draw {path.name!r}: name it .png or .svg")
    if not rows:
        raise ParameterError("there is nothing to draw: no other library was timed")
    with extras():
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams["svg.hashsalt"] = "frisket"  # ids in an SVG are random otherwise
        figure = Figure((8, 1.2 + 0.42 * len(rows)), dpi=150)
        FigureCanvasAgg(figure)  # which pyplot would make
        _marks(figure.add_subplot(), rows, DARK if dark else LIGHT, title, axis)
        figure.set_facecolor((DARK if dark else LIGHT).paper)
        content = file_of(figure, path, bbox_inches="tight", pad_inches=0.15)
    save(path, content)


def _marks(axes: Any, rows: Ratios, p: Palette, title: str, axis: str) -> None:
    peers = list(dict.fromkeys(peer for of in rows.values() for peer in of))
    axes.set_facecolor(p.paper)
    axes.axvline(1, color=p.full, linewidth=2)
    for n, peer in enumerate(peers):
        at = [i + _beside(list(of), peer) for i, of in enumerate(rows.values()) if peer in of]
        values = [of[peer] for of in rows.values() if peer in of]
        middle = [x[0] for x in values]
        low, high = ([x[0] - x[1] if len(x) > 1 else 0 for x in values], [x[-1] - x[0] for x in values])
        look = {"markersize": 5, "linewidth": 1.2, "color": COLOURS[n % len(COLOURS)], "label": peer}
        axes.errorbar(middle, at, xerr=[low, high], fmt=MARKS[n % len(MARKS)], **look)
    axes.set_xscale("log")
    _ticks(axes, [x for of in rows.values() for each in of.values() for x in each])
    axes.set_yticks(range(len(rows)), list(rows), color=p.ink, size=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="x", colors=p.dim, labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{axis}: 1 is ours, to the right is slower", color=p.dim, size=8.5)
    axes.grid(True, axis="x", which="major", color=p.dim, alpha=0.25, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    # a `$` in a title begins no formula
    axes.set_title(title, color=p.ink, size=10, loc="left", pad=22, parse_math=False)
    look = {"fontsize": 8, "frameon": False, "labelcolor": p.ink, "borderpad": 0}
    look |= {"handletextpad": 0.3, "columnspacing": 1.2}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, **look)


def _beside(peers: Sequence[str], peer: str) -> float:
    """How far below the middle of its row a mark stands."""
    # marks of many peers stay inside their row
    return (peers.index(peer) - (len(peers) - 1) / 2) * min(0.16, 0.6 / len(peers))


def _ticks(axes: Any, values: Sequence[float]) -> None:
    """Set ticks at 1, 2, 5, 10 and the like, 1 among them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = 0.9 * min(1, *values), 1.1 * max(1, *values)
    axes.set_xlim(low, high)
    steps = [m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5)]
    inside = [x for x in steps if low <= x <= high]
    # too many to read: powers of ten alone
    if len(inside) > 9:
        inside = [10.0**e for e in range(-4, 7) if low <= 10.0**e <= high]
    # a narrow range: tenths
    if len(inside) < 3:
        inside = [x / 10 for x in range(5, 30) if low <= x / 10 <= high]
    axes.xaxis.set_major_locator(FixedLocator(inside))
    axes.xaxis.set_minor_locator(NullLocator())  # a logarithmic axis would label more
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
