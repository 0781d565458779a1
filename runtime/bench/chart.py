"""Results as a chart: the time of everybody beside ours, with the interval of the ratio.

A row of marks for each row of results: at 1 ours, to the right who is slower, to the left who is faster.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.runtime.draw.palette import DARK, LIGHT, Palette
from frisket.runtime.draw.save import save
from frisket.runtime.machine.extras import extras

from .schema import leaves

COLOURS = ("#d9730d", "#7a5cc4", "#1a8f6f", "#b03a6f", "#8a6d1c", "#4f6f8f")
MARKS = "osD^vP"
SUFFIXES = (".png", ".svg")


def ratios(parts: Mapping[str, Any], ours: str | None = None) -> dict[str, dict[str, Sequence[float]]]:
    """Row -> peer -> [median, low, high] of peer / ours: of the first of ours that the row names, or of `ours`."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    for title, part in parts.items():
        for names, row in leaves(part["rows"]):
            pairs = {tuple(pair.split(" / ")): x for pair, x in row.get("ratios", {}).items()}
            base = ours or next((o for _, o in pairs), None)
            of = {p: x for (p, o), x in pairs.items() if o == base}
            if of:
                found[", ".join((*names, title) if len(parts) > 1 else names)] = of
    return found


def draw(
    rows: Mapping[str, Mapping[str, Sequence[float]]], path: Path, *, dark: bool = False, title: str = "",
    axis: str = "time / frisket's time",
) -> None:  # fmt: skip
    """Write the chart to `path`, `.png` or `.svg`. Equal rows give equal bytes."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ParameterError(f"cannot draw {path.name!r}: name it .png or .svg")
    if not rows:
        raise ParameterError("there is nothing to draw: no other library was timed")
    with extras():
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams["svg.hashsalt"] = "frisket"
        figure = Figure((8, 1.2 + 0.42 * len(rows)), dpi=150)
        FigureCanvasAgg(figure)
        _marks(figure.add_subplot(), rows, DARK if dark else LIGHT, title, axis)
        figure.set_facecolor((DARK if dark else LIGHT).paper)
        out = io.BytesIO()
        undated: dict[str, Any] = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(out, format=suffix[1:], metadata=undated, bbox_inches="tight", pad_inches=0.15)
    save(path, out.getvalue())


def _marks(axes: Any, rows: Mapping[str, Mapping[str, Sequence[float]]], p: Palette, title: str, axis: str) -> None:
    peers = list(dict.fromkeys(peer for of in rows.values() for peer in of))
    axes.set_facecolor(p.paper)
    axes.axvline(1, color=p.full, linewidth=2)
    for n, peer in enumerate(peers):
        at = [i + _beside(list(of), peer) for i, of in enumerate(rows.values()) if peer in of]
        values = [of[peer] for of in rows.values() if peer in of]
        middle = [x[0] for x in values]
        low, high = ([x[0] - x[1] if len(x) > 1 else 0 for x in values], [x[-1] - x[0] for x in values])
        axes.errorbar(
            middle, at, xerr=[low, high], fmt=MARKS[n % len(MARKS)], markersize=5, linewidth=1.2,
            color=COLOURS[n % len(COLOURS)], label=peer,
        )  # fmt: skip
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
    axes.set_title(title, color=p.ink, size=10, loc="left", pad=22, parse_math=False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8, frameon=False, labelcolor=p.ink, borderpad=0,
        handletextpad=0.3, columnspacing=1.2,
    )  # fmt: skip


def _beside(peers: Sequence[str], peer: str) -> float:
    """How far below the middle of its row a mark stands."""
    return (peers.index(peer) - (len(peers) - 1) / 2) * min(0.16, 0.6 / len(peers))


def _ticks(axes: Any, values: Sequence[float]) -> None:
    """Set ticks at 1, 2, 5, 10 and the like, 1 among them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = 0.9 * min(1, *values), 1.1 * max(1, *values)
    axes.set_xlim(low, high)
    steps = [m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5)]
    inside = [x for x in steps if low <= x <= high]
    if len(inside) > 9:
        inside = [10.0**e for e in range(-4, 7) if low <= 10.0**e <= high]
    if len(inside) < 3:
        inside = [x / 10 for x in range(5, 30) if low <= x / 10 <= high]
    axes.xaxis.set_major_locator(FixedLocator(inside))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
