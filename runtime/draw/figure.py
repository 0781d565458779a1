"""A layout as a matplotlib figure that notebooks show as a picture, though `pyplot` did not make it."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Plain
from matplotlib.patches import Rectangle

from frisket.lowering.analysis.tiling import Tiling

from . import terminal

if TYPE_CHECKING:
    from .pixels import Panel, Style

LINES = 64  # tiles along an axis between which lines are drawn
TICKS = 8


class Figure(Plain):
    """A figure drawn by Agg, with the pixels per inch it was made with.

    Without `%matplotlib inline`, a notebook knows nothing of figures that are made without `pyplot`, and prints
    `<Figure size 960x720 with 1 Axes>`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        FigureCanvasAgg(self)  # which pyplot would make

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=self.dpi, facecolor=self.get_facecolor())
        return out.getvalue()


# -- how it is placed, in pixels from the upper left corner --------------------------------------------


def figure_of(layout: Tiling, style: Style, panels: Sequence[Panel], of: int) -> Figure:
    pt, across = style.points, min(3, len(panels))
    width, height = _extent(layout, style, panels[0])
    named = layout.batch * layout.heads > 1
    left, over, right, between = (pt(2),) * 4 if style.compact else (pt(46), pt(44 if named else 30), pt(20), pt(14))
    full_width = across * (left + width + right)
    full_width = full_width if style.compact else max(full_width, pt(330))
    above, below = ([], []) if style.compact else _words(layout, style, panels, of, full_width - 2 * pt(14))
    head = 0 if style.compact else pt(12 + 13 * len(above))
    foot = pt(2) if style.compact else pt(32 + 12 * len(below))
    full_height = head + -(-len(panels) // across) * (over + height + between) + foot
    figure = Figure((full_width / style.dpi, full_height / style.dpi), dpi=style.dpi, facecolor=style.palette.paper)
    for n, panel in enumerate(panels):
        x = left + n % across * (left + width + right)
        y = head + over + n // across * (over + height + between)
        box = (x / full_width, 1 - (y + height) / full_height, width / full_width, height / full_height)
        _draw(figure.add_axes(box), layout, style, panel, _label(panel, layout) if named else "", (width, height))

    def write(text: str, y: float, **options: Any) -> None:
        # a `$` in a mask begins no formula
        figure.text(pt(14) / full_width, 1 - y / full_height, text, va="top", parse_math=False, **options)

    p = style.palette
    for n, line in enumerate(above):
        last = n == len(above) - 1
        look = {"size": 8, "color": p.dim} if last else {"size": 9.5, "color": p.ink, "family": "monospace"}
        write(line, pt(10 + 13 * n), **look)
    if not style.compact:
        _legend(figure, style, panels[0], (pt(14), full_height - foot + pt(4)))
    for n, line in enumerate(below):
        write(line, full_height - foot + pt(24 + 12 * n), size=8, color=p.dim)
    return figure


def _extent(layout: Tiling, style: Style, panel: Panel) -> tuple[int, int]:
    """(width, height) of one picture: tokens are square unless a side is too thin to see, cells whole pixels."""
    longest = max(layout.q_len, layout.kv_len)
    sides = []
    for length, step in ((layout.kv_len, panel.step[1]), (layout.q_len, panel.step[0])):
        cell = max(style.pixels * step / longest, style.pixels / 8 * step / length, 1)
        sides.append(max(1, round(int(cell) * length / step)))
    return sides[0], sides[1]


def _draw(axes: Axes, layout: Tiling, style: Style, panel: Panel, label: str, pixels: tuple[int, int]) -> None:
    p, (rows, columns) = style.palette, panel.colours.shape[:2]
    ends = (0, columns * panel.step[1], rows * panel.step[0], 0)
    axes.imshow(panel.colours, extent=ends, interpolation="none", aspect="auto")
    axes.set_xlim(0, layout.kv_len)
    axes.set_ylim(layout.q_len, 0)  # queries run downwards
    axes.xaxis.tick_top()
    axes.tick_params(length=2.5, width=0.6, color=p.dim, labelcolor=p.dim, labelsize=7.5, pad=2)
    for spine in axes.spines.values():
        spine.set(color=p.dim, linewidth=0.6)
    b = panel.slices[0][0]
    for axis, length, block, at, n in (
        (axes.xaxis, layout.kv_len, layout.block[1], layout.origin[3], pixels[0]),
        (axes.yaxis, layout.q_len, layout.block[0], layout.origin[2], pixels[1]),
    ):
        tiles = -(-length // block)
        # lines only where a cell is a tile or less
        if tiles <= LINES and n / tiles >= style.points(2.5) and panel.tiles in ((0, 0), (1, 1)):
            axis.remove_overlapping_locs = False  # lines where there are labels too
            axis.set_ticks(np.arange(1, tiles) * block, minor=True)
            axis.grid(True, which="minor", color=p.dim, alpha=0.4, linewidth=0.4)
        every = block
        while length / every > TICKS:
            every *= 2
        first, places = terminal.start_of(at, b), np.arange(0, length, every)
        names = [terminal.tokens(first + int(x), first + int(places[-1])) for x in places]
        axis.set_ticks([] if style.compact else places, labels=None if style.compact else names)
    axes.tick_params(which="minor", length=0)
    if not style.compact:
        axes.set_xlabel("keys", size=8, color=p.dim, labelpad=3)
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("queries", size=8, color=p.dim, labelpad=3)
        axes.set_title(label, size=8.5, color=p.ink, pad=4)


def _legend(figure: Figure, style: Style, panel: Panel, at: tuple[int, int]) -> None:
    p, pt, (x, y) = style.palette, style.points, at
    width, height = figure.bbox.width, figure.bbox.height
    if panel.tiles == (0, 0):
        rows = [("full tile", p.full), ("partial: visible", p.partial), ("hidden", p.tint), ("empty tile", p.empty)]
    elif panel.tiles == (1, 1):
        rows = [("full", p.full), ("partial", p.partial), ("empty", p.empty)]
    else:
        rows = [("full", p.full), ("partial, most read", p.partial), ("little read", p.tint), ("empty", p.empty)]
    for text, colour in rows:
        corner = (x / width, 1 - (y + pt(9)) / height)
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": p.dim, "linewidth": 0.5}
        figure.add_artist(Rectangle(corner, pt(9) / width, pt(9) / height, **look))
        figure.text((x + pt(13)) / width, 1 - (y + pt(4.5)) / height, text, size=8, color=p.ink, va="center")
        x += pt(24 + 4.6 * len(text))


# -- what is said ---------------------------------------------------------------------------------------


def _label(panel: Panel, layout: Tiling) -> str:
    (b, h), *others = panel.slices
    parts = [f"batch {b}"] * (layout.batch > 1) + [f"head {h}"] * (layout.heads > 1)
    more = f" ({len(others):,} more {'looks' if len(others) == 1 else 'look'} the same)" if others else ""
    return ", ".join(parts) + more


def _words(layout: Tiling, style: Style, panels: Sequence[Panel], of: int, pixels: int) -> tuple[list[str], list[str]]:
    """Lines above the picture and below it."""
    text = style.title if style.title is not None else " ".join(repr(layout.shown).split())
    text = "".join(c if c.isprintable() else " " for c in text)  # SVG has no control characters
    wide = int(pixels / style.points(5.8))
    above = textwrap.wrap(text, wide, break_on_hyphens=False)
    (bq, bk), c = layout.block, layout.counts
    above.append(f"{layout.q_len:,} × {layout.kv_len:,} tokens in tiles of {bq} × {bk}")
    if layout.batch * layout.heads > 1:
        above[-1] += f", batch {layout.batch:,}, {layout.heads:,} {'head' if layout.heads == 1 else 'heads'}"
    below = [f"{c.full:,} full, {c.partial:,} partial, {c.empty:,} empty tiles; {100 * layout.density:.3g} % are read"]
    nq, nk = panels[0].tiles
    if (step := panels[0].step[0]) > 1 and nq == 0:
        below.append(f"One dot shows {step} × {step} tokens; in partial tiles, deeper where more are visible.")
    if (nq, nk) not in ((0, 0), (1, 1)):
        text = f"One cell shows {nq} × {nk} tiles: full or empty where all of them are, else partial, "
        below.append(f"{text}deeper where more are read.")
    drawn = sum(len(panel.slices) for panel in panels)
    if drawn < of:
        below.append(f"Drawn: {drawn:,} of {of:,} batch entries and heads; choose others with b and h.")
    if not layout.exact:
        below.append("Some of the partial tiles may be full or empty: the budget of the analysis ran out.")
    wide = int(pixels / style.points(4.2))
    return above, [line for s in below for line in textwrap.wrap(s, wide)]
