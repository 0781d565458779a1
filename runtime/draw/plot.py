"""A layout as a picture, PNG or SVG: which tiles are full, partial or empty, and the inside of partial ones.

    layout.plot("mask.png")                      # or .svg; without a path, the matplotlib figure
    layout.plot("gallery.svg", compact=True)     # tiles and tokens alone: for many pictures on a page

Up to 4096 x 4096 positions the inside of partial tiles is looked up. Larger masks are drawn from the runs: work and
memory follow them and the picture, never the tiles or tokens.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import ParameterError
from frisket.dsl.ir import uses
from frisket.runtime.machine.extras import extras

from .pixels import DARK, LIGHT, LOOKED_AT, Palette, Panel, panels, save, start
from .terminal import tokens as position

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from frisket.runtime.layouts.tiling import Tiling

    from .figure import Figure

TOKENS = 512 * 512  # positions of one picture that shows tokens
INSIDE = 4096 * 4096  # positions that are looked at to show the inside of partial tiles
PANELS = 6  # slices drawn side by side
LINES = 64  # tiles along an axis between which lines are drawn
TICKS = 8
SUFFIXES = (".png", ".svg")


def plot(
    layout: Tiling, path: str | Path | None = None, *, b: int | None = None, h: int | None = None,
    tokens: bool | None = None, compact: bool = False, dark: bool = False, size: float | None = None, dpi: int = 150,
    title: str | None = None,
) -> Figure:  # fmt: skip
    """The matplotlib figure of a layout, written to `path` (`.png` or `.svg`) if there is one.

    `b` and `h` choose a batch entry and head, counted in the layout; else every different picture is drawn, up to six.
    Up to 4096 x 4096 positions partial tiles show their inside; `tokens=True` asks for every position by itself,
    `tokens=False` for whole tiles. `size` is the longer side of one picture in inches; without it several are drawn
    smaller than one. Equal layouts give equal bytes. Raises `ParameterError` for other suffixes, places that cannot be
    written and options that do not fit, `MissingPackageError` without matplotlib.
    """
    where = None if path is None else Path(path)
    if where is not None and where.suffix.lower() not in SUFFIXES:
        raise ParameterError(f"cannot draw {where.name!r}: name it .png or .svg; for a page there is `to_html`")
    several = (b is None and layout.batch > 1) or (h is None and layout.heads > 1)
    usual = 1.6 if compact else 3.4 if several and uses(layout.written) & {"b", "h"} else 5.0
    style = Style(DARK if dark else LIGHT, compact, int((size or usual) * dpi), dpi, title)
    if style.pixels < 16:
        raise ParameterError(f"size={size}, dpi={dpi} leaves {style.pixels} pixels: a picture needs 16")
    batches, heads = _chosen("b", b, layout.batch), _chosen("h", h, layout.heads)
    fine = _fine(layout, style, tokens, len(batches) * len(heads))
    drawn = panels(layout, style.palette, batches, heads, fine=fine, cells=style.pixels, most=PANELS)
    with extras():
        import matplotlib as mpl
    with mpl.rc_context():
        mpl.rcdefaults()  # the same picture whatever style the caller has set
        mpl.rcParams["svg.hashsalt"] = "frisket"
        figure = _figure(layout, style, drawn, len(batches) * len(heads))
        if where is not None:
            out = io.BytesIO()
            suffix = where.suffix[1:].lower()
            undated: dict[str, Any] = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
            figure.savefig(out, format=suffix, dpi=dpi, metadata=undated, facecolor=style.palette.paper)
            save(where, out.getvalue())
    return figure


@dataclass(frozen=True)
class Style:
    palette: Palette
    compact: bool
    pixels: int  # of the longer side of one picture
    dpi: int
    title: str | None

    def points(self, n: float) -> int:
        """Points in pixels."""
        return round(n * self.dpi / 72)


def _chosen(name: str, at: int | None, n: int) -> Sequence[int]:
    if at is not None and not 0 <= at < n:
        raise ParameterError(f"{name}={at} is outside the {n} there are")
    return range(n) if at is None else [at]


def _fine(layout: Tiling, style: Style, tokens: bool | None, slices: int) -> int:
    """The side of a cell in tokens: 1 where every token has one, 0 where cells are whole tiles."""
    positions, longest = layout.q_len * layout.kv_len, max(layout.q_len, layout.kv_len)
    fits = positions <= TOKENS and longest <= style.pixels
    if tokens and not fits:
        raise ParameterError(
            f"tokens=True draws at most {TOKENS:,} positions, one pixel each or more; these are {positions:,} in "
            f"{style.pixels} pixels a side\n  lay out a part with `origin` and `sizes`, give a larger `size`, or "
            "see `to_html`"
        )
    if tokens is not None or fits:
        return int(tokens is not False)
    looked = slices if uses(layout.written) & {"b", "h"} else 1
    if positions * min(looked, LOOKED_AT) > INSIDE:
        return 0
    side = math.gcd(*layout.block)
    steps = (n for n in range(1, side) if side % n == 0 and longest <= n * style.pixels)
    return next(steps, 0)


# -- how it is placed, in pixels from the upper left corner --------------------------------------------


def _figure(layout: Tiling, style: Style, panels: Sequence[Panel], of: int) -> Figure:
    from .figure import Figure

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
    axes.set_ylim(layout.q_len, 0)
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
        if tiles <= LINES and n / tiles >= style.points(2.5) and panel.tiles in ((0, 0), (1, 1)):
            axis.remove_overlapping_locs = False  # lines where there are labels too
            axis.set_ticks(np.arange(1, tiles) * block, minor=True)
            axis.grid(True, which="minor", color=p.dim, alpha=0.4, linewidth=0.4)
        every = block
        while length / every > TICKS:
            every *= 2
        first, places = start(at, b), np.arange(0, length, every)
        names = [position(first + int(x), first + int(places[-1])) for x in places]
        axis.set_ticks([] if style.compact else places, labels=None if style.compact else names)
    axes.tick_params(which="minor", length=0)
    if not style.compact:
        axes.set_xlabel("keys", size=8, color=p.dim, labelpad=3)
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("queries", size=8, color=p.dim, labelpad=3)
        axes.set_title(label, size=8.5, color=p.ink, pad=4)


def _legend(figure: Figure, style: Style, panel: Panel, at: tuple[int, int]) -> None:
    from matplotlib.patches import Rectangle

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
        figure.add_artist(
            Rectangle(corner, pt(9) / width, pt(9) / height, facecolor=colour, edgecolor=p.dim, linewidth=0.5)
        )
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
        below.append(
            f"One cell shows {nq} × {nk} tiles: full or empty where all of them are, else partial, "
            "deeper where more are read."
        )
    drawn = sum(len(panel.slices) for panel in panels)
    if drawn < of:
        below.append(f"Drawn: {drawn:,} of {of:,} batch entries and heads; choose others with b and h.")
    if not layout.exact:
        below.append("Some of the partial tiles may be full or empty: the budget of the analysis ran out.")
    wide = int(pixels / style.points(4.2))
    return above, [line for s in below for line in textwrap.wrap(s, wide)]
