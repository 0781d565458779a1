"""The explorer's page: the page of a layout with an editor above its map, and sliders beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frisket.dsl.library import Entry, library
from frisket.runtime.draw import html

from .answer import LONGEST

ROOM = str(__package__)
SCORES = ("Positions in scores", "Scores")  # the parts of the library that hold score mods
PARTS = ("tiled_row", "tiled_col", "morton_col", "morton_row", "t5_bucket", "tanh_fraction")  # for use in others
# arguments that are no plain number or table: what is written in their place
WRITTEN = {"m": "causal", "f": "relu(score)", "e": "0.001", "is_causal": "true", "seed": "7"}


def page(state: Mapping[str, Any], tables: Mapping[str, Any], nonce: str) -> str:
    """HTML for a browser that asks `./` for the rest. `state` is the first request; `tables` those from files."""
    begin = {
        "state": state, "longest": LONGEST, "library": [shown(e) for e in library().values() if e.name not in PARTS],
        "files": {name: f"{t.dtype}[{', '.join(map(str, t.shape))}]" for name, t in tables.items()},
    }  # fmt: skip
    return html.filled(
        title="frisket explore", nonce=f' nonce="{nonce}"', data=html.script(begin),
        style=html.file(ROOM, "explore.css"), editor=html.file(ROOM, "editor.html"),
        controls=html.file(ROOM, "controls.html"), more=html.file(ROOM, "more.html"),
        start="\n".join(html.file(ROOM, f"{name}.js") for name in ("library", "controls", "explore")),
    )  # fmt: skip


def shown(e: Entry) -> dict[str, Any]:
    """An entry to choose: `text` is what is written for it."""
    arguments = ", ".join(WRITTEN.get(p, p) for p in e.params)
    return {
        "name": e.name, "signature": e.signature, "sentence": e.sentence, "formula": e.formula, "section": e.section,
        "text": f"{e.name}({arguments})" if e.params else e.name, "score": e.section in SCORES,
    }  # fmt: skip
