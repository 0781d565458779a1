"""The tile picture in a terminal: which blocks of keys each block of queries reads.

    queries ╲ keys
            0       256     512     768
          0 ▒▒· · · · · · ·
        128 ██▒▒· · · · · ·

A large layout is drawn from its runs: work and memory follow the runs and the picture, never the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.lowering.analysis.tiling import Tiling

if TYPE_CHECKING:
    from rich.text import Text

CELLS = 32  # drawn cells along each axis at most: two columns each, so 64 of 80
Ints = NDArray[np.int64]
MARGIN = 8  # columns for the labels of rows


@dataclass(frozen=True)
class CellCounts:
    """Tiles counted per drawn cell: `full` and `partial` are int64 [rows, columns]; a cell spans
    `step = (q, k)` tiles, fewer at the far edges."""

    full: Ints
    partial: Ints
    total: Ints
    step: tuple[int, int]


def from_runs(
    row_ptr: ArrayLike, start: ArrayLike, stop: ArrayLike, kind: ArrayLike, k_tiles: int, cells: int = CELLS
) -> CellCounts:
    """Tiles per cell, from runs in CSR form: row r has the runs row_ptr[r]..row_ptr[r + 1], each [start, stop)."""
    row_ptr, start, stop, kind = (np.asarray(x, np.int64) for x in (row_ptr, start, stop, kind))
    q_tiles = len(row_ptr) - 1
    steps = _steps((q_tiles, k_tiles), cells)
    rows, columns = -(-q_tiles // steps[0]), -(-k_tiles // steps[1])
    row = np.repeat(np.arange(q_tiles), np.diff(row_ptr)) // steps[0]

    def count(tile_kind: int) -> Ints:
        of = (kind == tile_kind) & (stop > start)
        return _spread(row[of], start[of], stop[of], steps[1], rows, columns)

    return CellCounts(count(FULL), count(PARTIAL), _sizes((q_tiles, k_tiles), steps), steps)


def _spread(row: Ints, start: Ints, stop: Ints, step: int, rows: int, columns: int) -> Ints:
    """How many of the tiles `[start, stop)` of each row fall into each cell."""
    # tiles of a run left of x grow linearly with x: count them as `min(stop, x) - min(start, x)` through
    # the end cells and, in between, a constant `step` written as differences
    first, last = start // step, (stop - 1) // step

    def add(column: Ints, weight: Ints) -> Ints:
        flat = np.bincount(row * (columns + 1) + column, weight, rows * (columns + 1))
        return flat.astype(np.int64).reshape(rows, columns + 1)

    in_first = np.minimum(stop, (first + 1) * step) - start
    there = np.where(last > first, stop - last * step, 0)
    inner = np.full_like(start, step) * (last > first)
    between = add(first + 1, inner) - add(np.maximum(last, first + 1), inner)
    return (add(first, in_first) + add(last, there) + np.cumsum(between, axis=1))[:, :columns]


def _steps(shape: tuple[int, ...], cells: int) -> tuple[int, int]:
    q_tiles, k_tiles = shape
    return max(1, -(-q_tiles // cells)), max(1, -(-k_tiles // cells))


def _sizes(shape: tuple[int, ...], steps: tuple[int, int]) -> Ints:
    sides = [np.diff(np.append(np.arange(0, n, s), n)) for n, s in zip(shape, steps, strict=True)]
    return np.multiply.outer(*sides)


def of_layout(layout: Tiling, b: int = 0, h: int = 0, cells: int = CELLS) -> CellCounts:
    """Count tiles per cell in one batch entry and head of a layout, counted from 0 in the layout."""
    runs, rows = layout.runs, layout.rows
    first = int(runs.slice_of[b, h]) * rows
    row_ptr = runs.row_ptr[first : first + rows + 1]
    at = slice(int(row_ptr[0]), int(row_ptr[-1]))
    return from_runs(row_ptr - row_ptr[0], runs.start[at], runs.stop[at], runs.kind[at], layout.columns, cells)


def draw(layout: Tiling) -> str:
    """The text that `print(layout)` shows: sizes, counts, and the picture of its first batch entry and head."""
    c, (bq, bk) = layout.counts, layout.block
    head = f"{layout.q_len:,} × {layout.kv_len:,} tokens in tiles of {bq} × {bk}: "
    head += f"{c.full:,} full, {c.partial:,} partial, {c.empty:,} empty"
    return "\n".join([head, *filter(None, [which(layout)]), layout_picture(layout).plain])


def which(layout: Tiling, b: int = 0, h: int = 0) -> str:
    """A label for one of several pictures; empty where all are equal."""
    slices = len(layout.spans.count)
    return f"batch {b}, head {h}: one of {slices:,} different layouts" if slices > 1 else ""


def layout_picture(layout: Tiling, b: int = 0, h: int = 0, *, ink: Ink | None = None, width: int = 80) -> Text:
    """The picture of one batch entry and head, with its axes in global positions, at most `width` columns wide."""
    origin = tuple(start_of(x, b) for x in layout.origin[2:])
    grid = of_layout(layout, b, h, max(4, min(CELLS, (width - MARGIN) // 2)))
    return picture(grid, layout.block, (origin[0], origin[1]), ink=ink or UNICODE, width=width)


def start_of(origin: Any, b: int) -> int:
    """The first position of batch entry `b`: an origin is one number, or one for each."""
    return int(np.asarray(origin)[b]) if np.ndim(origin) else int(origin)


# -- characters -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ink:
    """The characters of one picture: two columns for an empty cell, one repeated for the others."""

    empty: str
    little: str
    half: str
    most: str
    full: str
    corner: str


UNICODE = Ink("· ", "░", "▒", "▓", "█", "╲")
ASCII = Ink(". ", "-", "+", "%", "#", "\\")
# magenta and cyan can be read on white and on black; yellow cannot, and bright black is the paper of some terminals
STYLES = {"empty": "dim", "little": "magenta", "half": "magenta", "most": "cyan", "full": "cyan"}


def _levels(grid: CellCounts) -> Ints:
    """0 empty, 1 little, 2 half, 3 most, 4 full; a partial tile counts as half visible."""
    share = (grid.full + grid.partial / 2) / grid.total
    level = np.digitize(share, [0.3, 0.6]) + 1
    level[grid.full + grid.partial == 0] = 0
    level[grid.full == grid.total] = 4
    return np.asarray(level, np.int64)


def picture(
    grid: CellCounts, block: tuple[int, int], origin: tuple[int, int] = (0, 0), *, ink: Ink = UNICODE, width: int = 80
) -> Text:
    """The picture with axes in tokens and a legend. `block` is a tile's size in tokens, `origin` the first
    query and key of the layout, `width` the columns there are."""
    from rich.text import Text  # a mask is laid out without rich

    rows, columns = grid.full.shape
    q_step, k_step = (s * b for s, b in zip(grid.step, block, strict=True))
    every = 4
    text = Text(no_wrap=True, overflow="crop")  # a picture with folded lines is none
    text.append(f"queries {ink.corner} keys\n", "dim")
    largest = max(origin[0] + (rows - 1) * q_step, origin[1] + (columns - 1) * k_step)
    marks = (tokens(origin[1] + c * k_step, largest).ljust(2 * every) for c in range(0, columns, every))
    text.append(f"{'':{MARGIN}}{''.join(marks)}".rstrip() + "\n", "dim")
    names = ("empty", "little", "half", "most", "full")
    for r, levels in enumerate(_levels(grid)):
        label = tokens(origin[0] + r * q_step, largest) if rows <= 16 or r % every == 0 else ""
        line = Text.assemble((f"{label:>{MARGIN - 1}} ", "dim"))
        for name in (names[level] for level in levels):
            line.append((getattr(ink, name) * 2)[:2], STYLES[name])  # two columns are about a square
        line.rstrip()
        text.append(line).append("\n")
    return text.append(_legend(grid, (q_step, k_step), ink, width))


def _legend(grid: CellCounts, step: tuple[int, int], ink: Ink, width: int) -> Text:
    from rich.text import Text

    levels = ("half",) if grid.step == (1, 1) else ("most", "half", "little")
    parts = [
        Text.assemble((ink.full, STYLES["full"]), (" full", "dim")),
        Text.assemble(
            *((getattr(ink, name), STYLES[name]) for name in levels),
            (" partial" if len(levels) == 1 else " part, by share", "dim"),
        ),
        Text.assemble((ink.empty.strip(), STYLES["empty"]), (" empty", "dim")),
        Text(f"one cell {step[0]:,} {'x' if ink is ASCII else '×'} {step[1]:,} tokens", "dim"),
    ]
    lines = [Text(" " * MARGIN)]
    for part in parts:
        gap = 2 * (lines[-1].cell_len > MARGIN)
        if gap and lines[-1].cell_len + gap + part.cell_len > width:
            lines.append(Text(" " * MARGIN))
            gap = 0
        lines[-1].append(" " * gap).append(part)
    return Text("\n").join(lines)


def tokens(n: int, largest: int = 0) -> str:
    """A position on an axis whose last is `largest`, short enough for its column: 512, 65536, 128k, 3M."""
    if max(abs(n), largest) < 100_000 or n == 0:
        return str(n)
    if n > 1 << 20 and n % (1 << 18) == 0:
        return f"{n / (1 << 20):g}M"
    # binary units first: most lengths are powers of 2
    for unit, size in (("M", 1 << 20), ("k", 1 << 10), ("M", 10**6), ("k", 10**3)):
        if n % size == 0:
            return f"{n // size}{unit}"
    return f"{n / 2**20:.1f}M" if n >= 1 << 20 else f"{n / 1024:.1f}k"
