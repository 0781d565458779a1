"""The explorer's page: the page of a layout with an editor above its map, and sliders beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from frisket import grammar
from frisket.dsl import ir
from frisket.dsl.functions import BUILT_IN, CONSTANTS
from frisket.dsl.library import Entry, library
from frisket.runtime.draw import html

from .answer import LONGEST

ROOM = str(__package__)
SCORES = ("Positions in scores", "Scores")  # the parts of the library that hold score mods
PARTS = ("tiled_row", "tiled_col", "morton_col", "morton_row", "t5_bucket", "tanh_fraction")  # for use in others
# arguments that are no plain number or table: what is written in their place
HELP = '    <button id="help" aria-haspopup="dialog">Help</button>\n'
PUNCTUATION = ("(", ")", "[", "]", ",", ":")
TYPES = ("bool", "float", "int", "sorted")
WRITTEN = {"m": "causal", "f": "relu(score)", "e": "0.001", "is_causal": "true", "seed": "7"}


def page(state: Mapping[str, Any], tables: Mapping[str, Any], nonce: str) -> str:
    """HTML for a browser that asks `./` for the rest. `state` is the first request; `tables` those from files."""
    begin = {
        "state": state, "longest": LONGEST, "library": [shown(e) for e in library().values() if e.name not in PARTS],
        "files": {name: f"{t.dtype}[{', '.join(map(str, t.shape))}]" for name, t in tables.items()},
        "tokens": token_classes(),
    }  # fmt: skip
    return html.filled(
        title="frisket explore", buttons=HELP, nonce=f' nonce="{nonce}"', data=html.script(begin),
        style=html.file(ROOM, "explore.css"), editor=html.file(ROOM, "editor.html"),
        controls=html.file(ROOM, "controls.html"), more=html.file(ROOM, "more.html"),
        start="\n".join(html.file(ROOM, f"{name}.js") for name in ("library", "controls", "complete", "explore")),
    )  # fmt: skip


def token_classes() -> list[tuple[str, str]]:
    """(TextMate scope, pattern) of every kind of token, all terminals of the grammar, in order; "" is white space."""
    tables = json.loads(html.file(grammar.__name__, "mask.json"))
    signs, patterns = tables["signs"], tables["patterns"]
    space, comment = patterns["SPACE"].split("|", 1)
    operators = [s for s in signs if not s.isalpha() and s not in PUNCTUATION]
    return [
        ("comment.line.number-sign", comment),
        ("", rf"{space}|{patterns['NL']}"),
        ("keyword.control", _words(s for s in signs if s.isalpha())),
        ("storage.type", rf"{_words(TYPES)}(?!\s*\()"),
        ("variable.language", _words([*ir.COORDINATES, *ir.SIZES, "score"])),
        ("constant.language", _words(CONSTANTS)),
        ("support.function", _words({*BUILT_IN, *(e.name for e in library().values())})),
        ("constant.numeric.float", patterns["FLOAT"]),
        ("constant.numeric.integer", patterns["INT"]),
        ("variable.other", patterns["NAME"]),
        ("keyword.operator", "|".join(map(re.escape, operators))),
        ("punctuation", "|".join(map(re.escape, PUNCTUATION))),
    ]


def _words(names: Iterable[str]) -> str:
    return rf"\b(?:{'|'.join(sorted(names, key=lambda n: (-len(n), n)))})\b"


def shown(e: Entry) -> dict[str, Any]:
    """An entry to choose: `text` is what is written for it."""
    arguments = ", ".join(WRITTEN.get(p, p) for p in e.params)
    return {
        "name": e.name, "signature": e.signature, "sentence": e.sentence, "formula": e.formula, "section": e.section,
        "text": f"{e.name}({arguments})" if e.params else e.name, "score": e.section in SCORES,
    }  # fmt: skip
