"""The library: definitions written in the language itself, read when one is first used.

>>> entries()["causal"].sentence
'A query sees itself and what came before.'
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .parse import Node, parse


@dataclass(frozen=True)
class Definition:
    """`def name(params) = body`; `text` is the source that the positions of `body` point into."""

    name: str
    params: tuple[str, ...]
    body: Node
    text: str
    library: bool = False

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.params)})" if self.params else self.name

    @property
    def formula(self) -> str:
        return self.text[self.body.start : self.body.stop]


@dataclass(frozen=True)
class Entry:
    """What the comments above a library definition say."""

    signature: str
    formula: str
    sentence: str
    meaning: str
    source: str


def define(node: Node, text: str, library: bool = False) -> Definition:
    params, body = node.args
    return Definition(node.value.text, tuple(p.text for p in params), body, text, library)


@cache
def _read() -> tuple[str, tuple[Definition, ...]]:
    text = (Path(__file__).parent / "library.frisket").read_text(encoding="utf-8")
    return text, tuple(define(s, text, library=True) for s in parse(text, "library").args)


@cache
def definitions() -> dict[str, dict[int, Definition]]:
    """Name -> number of parameters -> definition."""
    found: dict[str, dict[int, Definition]] = {}
    for d in _read()[1]:
        found.setdefault(d.name, {})[len(d.params)] = d
    return found


@cache
def entries() -> dict[str, Entry]:
    """Signature -> its documentation: the three comment lines above each definition."""
    text, all_ = _read()
    found = {}
    for d in all_:
        above = text[: d.body.start].rsplit("\ndef ", 1)[0].rsplit("\n", 3)[-3:]
        sentence, meaning, source = (line.removeprefix("# ") for line in above)
        found[d.signature] = Entry(d.signature, d.formula, sentence, meaning, source)
    return found
