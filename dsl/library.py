"""The library of definitions, written in the language itself and read when one is first used.

>>> library()["causal"].sentence
'A query sees itself and what came before.'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from frisket.grammar.memo import memo

from .parse import Node, parse

HEAD = re.compile(r"def (\w+)(?: = |\(([^)]*)\) = )")


@dataclass(frozen=True)
class Definition:
    """A definition `def name(params) = body`; positions of `body` are in `text`. The library's are parsed on use."""

    name: str
    params: tuple[str, ...]
    text: str
    node: Node | None = None
    library: bool = False
    checks: tuple[tuple[str, str], ...] = ()  # conditions on parameters, and the advice where one is false
    changed: str = ""  # a warning: what the definition means since the last release

    @cached_property
    def conditions(self) -> tuple[Definition, ...]:
        """The conditions of `checks` as definitions with these parameters."""
        return tuple(
            Definition(self.name, self.params, f"def {self.signature} = {text}", library=True)
            for text, _ in self.checks
        )

    @cached_property
    def body(self) -> Node:
        if self.node is not None:
            return self.node
        body: Node = parse(self.text, "library").args[0].args[1]
        return body

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.params)})" if self.params else self.name

    @property
    def formula(self) -> str:
        return self.text[self.body.start : self.body.stop]


@dataclass(frozen=True)
class Entry:
    """A definition of the library with its documentation. It has a signature, a sentence, a formula of mathematics, the
    text of the language (`text`), the source and the section of the library. It also has an example call with numbers
    for some thousand tokens, if it takes only numbers.

    >>> entry = library()["causal"]
    >>> entry.text, entry.formula
    ('def causal = q >= k', 'q >= k')
    """

    name: str
    params: tuple[str, ...]
    signature: str
    sentence: str
    formula: str
    source: str
    text: str
    section: str
    example: str = ""
    checks: tuple[tuple[str, str], ...] = ()
    changed: str = ""


def define(node: Node, text: str) -> Definition:
    params, body = node.args
    return Definition(node.value.text, tuple(p.text for p in params), text, body)


@memo(group="once")
def _read() -> tuple[Entry, ...]:
    return read_entries((Path(__file__).parent / "library.frisket").read_text(encoding="utf-8"))


def read_entries(text: str) -> tuple[Entry, ...]:
    """The definitions of a text laid out as the library is. `## Section`, then one paragraph each: three lines
    of comment (sentence, formula, source) above a `def`. Then perhaps `example: ` and a call, `check: ` lines with a
    condition on the parameters and an advice, and a warning after `changed: `."""
    entries, section = [], ""
    for paragraph in text.split("\n\n"):
        *above, body = re.split(r"^(?=def )", paragraph.strip("\n"), maxsplit=1, flags=re.M)
        if paragraph.startswith("## "):
            section = paragraph.strip("# \n")
        if above and (head := HEAD.match(body)):  # else a paragraph of comment between definitions
            sentence, formula, source, *more = (line.removeprefix("# ") for line in above[0].splitlines())
            params = tuple(p.strip() for p in (head[2] or "").split(",")) if head[2] else ()
            signature = f"{head[1]}({', '.join(params)})" if params else head[1]
            words = [line.split(": ", 2) for line in more]
            lines = {word: rest for word, *rest in words}  # `check` may stand several times, and is read from `words`
            example = ": ".join(lines["example"]) if "example" in lines else "" if params else head[1]
            checks = tuple((rest[0], rest[1]) for word, *rest in words if word == "check")
            about = sentence, formula, source, body, section, example, checks, ": ".join(lines.get("changed", ()))
            entries.append(Entry(head[1], params, signature, *about))
    return tuple(entries)


@memo(group="once")
def definitions() -> dict[str, dict[int, Definition]]:
    """The definitions of the library: name -> number of parameters -> definition."""
    overloads: dict[str, dict[int, Definition]] = {}
    for e in _read():
        overloads.setdefault(e.name, {})[len(e.params)] = Definition(
            e.name, e.params, e.text, library=True, checks=e.checks, changed=e.changed
        )
    return overloads


@memo(group="once")
def library() -> Mapping[str, Entry]:
    """The entries of the library by signature, in order: `library()["causal(offset)"].formula`.

    >>> list(library())[:3]
    ['full', 'causal', 'causal(offset)']
    """
    return MappingProxyType({e.signature: e for e in _read()})  # all callers share it
