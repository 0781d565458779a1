"""The pixels of a layout: a colour for every tile, every few tiles, every token, or every few tokens; PNG and SVG.

Blue, orange and paper are apart for every kind of colour vision and in greyscale.

>>> from frisket.runtime.draw.pixels import LIGHT
>>> from frisket.runtime.masks.mask import mask
>>> panel = of_tiles(mask("causal").layout(512, 512), LIGHT)
>>> panel.colours.shape, panel.step, panel.tiles
((4, 4, 3), (128, 128), (1, 1))

`plot` makes a picture of them: which tiles are full, partial or empty, and the inside of partial ones.

    layout.plot("mask.png")                      # or .svg; without a path, the matplotlib figure
    layout.plot("gallery.svg", compact=True)     # tiles and tokens alone: for many pictures on a page

Up to 4096 x 4096 positions the inside of partial tiles is looked up. Larger masks are drawn from the runs: work and
memory follow them and the picture, never the tiles or tokens.
"""

from __future__ import annotations

import io
import math
import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError
from frisket.dsl.ir import uses
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.lowering.analysis.tiling import Array, Tiling
from frisket.lowering.dense import coordinates, visible
from frisket.runtime.machine.modules import extras

from .terminal import of_layout, start_of

if TYPE_CHECKING:
    from .figure import Figure


@dataclass(frozen=True)
class Palette:
    """Colours as `#rrggbb`. From `full` over `partial` and `tint` to `empty` the luminance goes one way."""

    full: str
    partial: str  # a partial tile, and in a picture of tokens what it shows
    tint: str  # what a partial tile hides; of many tiles drawn as one, where little is read
    empty: str
    paper: str
    ink: str
    dim: str


LIGHT = Palette("#0a4c86", "#d9730d", "#f3bd7c", "#f3f4f6", "#ffffff", "#1b1f24", "#57606a")
DARK = Palette("#a8dcff", "#d98032", "#704218", "#1d2026", "#111317", "#e6e9ed", "#9aa4af")


CELLS = 512  # along each axis at most
TOKENS = 512 * 512  # positions of one picture that shows tokens
INSIDE = 4096 * 4096  # positions that are looked at to show the inside of partial tiles
PANELS = 6  # slices drawn side by side
SUFFIXES = (".png", ".svg")
LOOKED_AT = 32  # slices compared, token by token, to find different ones


@dataclass(frozen=True)
class Panel:
    """One picture: uint8 [rows, columns, 3], a colour for every cell of `step = (q, k)` tokens. `tiles` is the
    size of a cell in tiles, (0, 0) where cells are parts of a tile; `slices` are the (b, h) that look like this."""

    colours: Array
    step: tuple[int, int]
    tiles: tuple[int, int]
    slices: list[tuple[int, int]] = field(default_factory=list)


def panels(
    layout: Tiling, palette: Palette, batches: Sequence[int], heads: Sequence[int], *, fine: int, cells: int, most: int
) -> list[Panel]:
    """The different pictures of these heads, at most so many; `fine` is a cell's side in tokens, 0 for whole tiles."""
    named = uses(layout.written)
    # entries that begin elsewhere look different
    by_batch = "b" in named or any(np.ndim(at) for at in layout.origin[2:])
    views: dict[Any, Panel] = {}
    looked: dict[tuple[int, int], Any] = {}  # the (b, h) that may differ -> what they look like
    for b in batches:
        for h in heads:
            place = (b if by_batch else 0, h if "h" in named else 0)
            if place not in looked:
                if fine and len(looked) == LOOKED_AT:
                    continue
                looked[place] = seen(layout, b, h, fine).tobytes() if fine else int(layout.spans.slice_of[b, h])
            look = looked[place]
            if look not in views and len(views) < most:
                views[look] = of_tokens(layout, palette, b, h, fine) if fine else of_tiles(layout, palette, b, h, cells)
            if look in views:
                views[look].slices.append((b, h))
    return list(views.values())


def of_tiles(layout: Tiling, palette: Palette, b: int = 0, h: int = 0, cells: int = CELLS) -> Panel:
    """One batch entry and head, from its runs. A cell of several tiles is full or empty where all of them are,
    else from `tint` to `partial` by the share that is read."""
    grid = of_layout(layout, b, h, min(cells, CELLS))
    read = ((grid.full + grid.partial) / grid.total)[..., None]
    colours = np.rint(rgb(palette.tint) * (1 - read) + rgb(palette.partial) * read).astype(np.uint8)
    colours[grid.full == grid.total] = rgb(palette.full)
    colours[grid.full + grid.partial == 0] = rgb(palette.empty)
    (bq, bk), (nq, nk) = layout.block, grid.step
    return Panel(colours, (bq * nq, bk * nk), grid.step)


def of_tokens(layout: Tiling, palette: Palette, b: int = 0, h: int = 0, step: int = 1) -> Panel:
    """One batch entry and head with the inside of its partial tiles. A cell of `step` x `step` tokens is from `tint` to
    `partial` by the share of its pairs that is visible. `step` divides both sides of a tile."""
    bq, bk = layout.block[0] // step, layout.block[1] // step
    tiles = of_layout(layout, b, h, max(layout.rows, layout.columns))
    kind = np.where(tiles.full, FULL, np.where(tiles.partial, PARTIAL, 0))
    share = seen(layout, b, h, step)
    kind = kind[np.arange(share.shape[0])[:, None] // bq, np.arange(share.shape[1]) // bk]
    colours = np.stack([rgb(palette.empty), rgb(palette.tint), rgb(palette.full)]).astype(np.uint8)[kind]
    inside, part = kind == PARTIAL, share[..., None]
    colours[inside] = np.rint(rgb(palette.tint) * (1 - part) + rgb(palette.partial) * part).astype(np.uint8)[inside]
    return Panel(colours, (step, step), (0, 0))


def seen(layout: Tiling, b: int, h: int, step: int = 1) -> NDArray[np.float32]:
    """The share of the pairs of every `step` x `step` tokens of one slice that is visible."""
    (b0, h0, q0, k0), (n, m) = layout.origin, (layout.q_len, layout.kv_len)
    tables = {name: table.array for name, table in layout.tables.items()}
    places, bands = np.arange(0, m, step), []
    for q in range(0, n, step):  # a band of cells at a time: no matrix of all positions
        shape = (1, 1, min(step, n - q), m) if step > 1 else (1, 1, n, m)
        origin = b0 + b, h0 + h, start_of(q0, b) + q, start_of(k0, b)
        lengths = {"q_len": shape[2], "kv_len": m, "batch": 1, "heads": 1}
        env = coordinates(replace(layout.problem, **lengths, origin=origin, sizes=layout.sizes))
        shown = np.asarray(visible(layout.written, {**env, **layout.params}, tables, shape)[0, 0])
        if step == 1:
            return shown.astype(np.float32)
        sums = np.add.reduceat(shown.sum(0), places)
        bands.append(sums / (shape[2] * np.minimum(step, m - places)))
    return np.stack(bands).astype(np.float32)


def rgb(colour: str) -> NDArray[np.float64]:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float64)


def png(colours: Array) -> bytes:
    """The file of a picture, one pixel for each colour (PNG specification, third edition: colour type 2)."""
    height, width, _ = colours.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = colours.reshape(height, -1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def save(path: Path, content: bytes) -> None:
    """Write next to `path` and move it there, so that no reader sees half a picture."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ParameterError(f"cannot write {path}: {error.strerror}") from None


# -- files and figures -----------------------------------------------------------------------------------


def plot(
    layout: Tiling,
    path: str | Path | None = None,
    *,
    b: int | None = None,
    h: int | None = None,
    tokens: bool | None = None,
    compact: bool = False,
    dark: bool = False,
    size: float | None = None,
    dpi: int = 150,
    title: str | None = None,
) -> Figure:
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

        from .figure import figure_of
    with mpl.rc_context():
        mpl.rcdefaults()  # the same picture whatever style the caller has set
        mpl.rcParams["svg.hashsalt"] = "frisket"  # ids in an SVG are random otherwise
        figure = figure_of(layout, style, drawn, len(batches) * len(heads))
        if where is not None:
            save(where, file_of(figure, where, dpi=dpi, facecolor=style.palette.paper))
    return figure


def file_of(figure: Any, path: Path, **options: Any) -> bytes:
    """The bytes of a matplotlib figure in the format of `path`; equal ones for equal figures, as no date is in them."""
    out, suffix = io.BytesIO(), path.suffix.lower()
    undated = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
    figure.savefig(out, format=suffix[1:], metadata=undated, **options)
    return out.getvalue()


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
        text = f"tokens=True draws at most {TOKENS:,} positions, one pixel each or more; these are {positions:,} in "
        text += f"{style.pixels} pixels a side\n  lay out a part with `origin` and `sizes`, give a larger `size`, or "
        raise ParameterError(f"{text}see `to_html`")
    if tokens is not None or fits:
        return int(tokens is not False)
    looked = slices if uses(layout.written) & {"b", "h"} else 1
    if positions * min(looked, LOOKED_AT) > INSIDE:
        return 0
    side = math.gcd(*layout.block)  # a cell divides both sides of a tile
    return next((n for n in range(1, side) if side % n == 0 and longest <= n * style.pixels), 0)
