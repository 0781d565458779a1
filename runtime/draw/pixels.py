"""The pixels of a layout: a colour for every tile, every few tiles, every token, or every few tokens.

Blue, orange and paper are apart for every kind of colour vision and in greyscale.

>>> from frisket.runtime.draw.pixels import LIGHT
>>> from frisket.runtime.masks.mask import mask
>>> panel = of_tiles(mask("causal").layout(512, 512), LIGHT)
>>> panel.colours.shape, panel.step, panel.tiles
((4, 4, 3), (128, 128), (1, 1))
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError
from frisket.dsl.ir import uses
from frisket.lowering.analysis.tiles import FULL, PARTIAL
from frisket.lowering.dense import coordinates, visible
from frisket.runtime.layouts.tiling import Tiling

from .terminal import of_layout


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


Array = NDArray[Any]
CELLS = 512  # along each axis at most
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
    """One batch entry and head with the inside of its partial tiles: a cell of `step` x `step` tokens is from `tint` to
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
        env = coordinates(*shape, origin=(b0 + b, h0 + h, start(q0, b) + q, start(k0, b)), sizes=layout.sizes)
        shown = np.asarray(visible(layout.written, {**env, **layout.params}, tables, shape)[0, 0])
        if step == 1:
            return shown.astype(np.float32)
        sums = np.add.reduceat(shown.sum(0), places)
        bands.append(sums / (shape[2] * np.minimum(step, m - places)))
    return np.stack(bands).astype(np.float32)


def start(origin: Any, b: int) -> int:
    """The first position of batch entry `b`: an origin is one number, or one for each."""
    return int(np.asarray(origin)[b]) if np.ndim(origin) else int(origin)


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
    """Write beside `path` and move it there, so that nobody ever reads half a picture."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ParameterError(f"cannot write {path}: {error.strerror}") from None
