"""The colours of pictures: blue, orange and paper, apart for every kind of colour vision and in greyscale."""

from __future__ import annotations

from dataclasses import dataclass


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
