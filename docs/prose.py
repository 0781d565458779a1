"""The linter of prose: `python docs/prose.py` prints every banned form, and every sentence that is too long.

It reads README.md, CONTRIBUTING.md, the pages of docs/, what `--help` prints, and docstrings of public names. Code
and links are not prose.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from frisket.runtime.cli.main import COMMANDS, parser

ROOT = Path(__file__).resolve().parent.parent
WORDS = 46  # of a sentence, at most
MODULES = (
    "frisket",
    *(
        f"frisket.{m}"
        for m in ("caches", "caches.jax", "caches.torch", "flex", "modeling", "operations", "parallel", "sharding")
    ),
)
BANNED = {  # a regular expression -> what to write instead
    # pronouns in the place of a noun
    r"the (latter|former)\b(?! of)": "the noun again",
    r"(those|that) of the same": "the same, and the noun",
    r"it has those": "the noun",
    r"the same of": "the noun again",
    r"(of )?(its|their) own(?=[.,;:)]|$)": "a separate one, or the noun again",
    r"of (its|their) own": "separate",
    r"whoever|nobody": "the person who does it, or the thing as the subject",
    # participles as nouns, metaphors for machinery
    r"the (given|kept)(?=[.,;:)]| (is|are|of|and|in)\b)": "what is given or kept, by its noun",
    r"seams?|doors?|twins?": "the thing itself: an interface, a module, a copy",
    r"dealt|deals (tokens|them|it)": "distributed, distributes",
    # words of another language's order
    r"(hang|hangs|hung) on": "depends on",
    r"at hand": "this, available, current",
    r"anew": "again",
    r"turn about": "in turns, interleaved",
    r"in silence|lets? pass": "silently accepts",
    r"(is|are) told(?! apart)": "receives, is listed",
    r"compiles? nothing": "does not recompile",
    r"which is right and slower": "still correct, but slower",
    r"(is|are) to be": "must be, or is",
    r"for ever": "forever, without end",
    r"(is|are|was|were) worked out|worked out (by|from|in|before)": "computed",
    r"launch(es|ed)? into nothing": "launched without a device",
    r"(stand|stands|standing) together": "adjacent",
    r"falls? apart": "what it becomes",
    r"(said|refused) in words": "an error that gives the reason",
}
RULE = re.compile(
    "|".join(rf"(?P<r{i}>\b(?:{pattern})(?!\w))".replace(" ", r"\s+") for i, pattern in enumerate(BANNED)), re.I
)


class Finding(NamedTuple):
    where: str
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.where}: {self.words!r}: write {self.instead}"


def findings(where: str, text: str, words: int = WORDS) -> Iterator[Finding]:
    """What is wrong with a text in Markdown, by its lines."""
    plain = prose(text)
    for m in RULE.finditer(plain):
        yield Finding(at(where, plain, m.start()), m[0], [*BANNED.values()][int(str(m.lastgroup)[1:])])
    for m in re.finditer(r"(?:(?!\n\s*(?:[-*+|#>]|\d+\.) |\n\s*\n|[.!?:;](?:\s|$)|\|).)+", plain, re.S):
        if len(m[0].split()) > words:
            said = " ".join(m[0].split()[:8])
            yield Finding(at(where, plain, m.start()), f"{said} …", f"shorter sentences: {len(m[0].split())} words")


def at(where: str, text: str, start: int) -> str:
    return f"{where}:{1 + text.count(chr(10), 0, start)}"


def prose(text: str) -> str:
    """The text without code, comments, links and lists of names, each line in its place."""

    def blank(m: re.Match[str]) -> str:
        return "\n" * m[0].count("\n")

    text = re.sub(r"^( *)(```|~~~).*?^\1\2 *$", blank, text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|<[^>\n]*>", blank, text, flags=re.S)
    text = re.sub(r"^(?:    |\t|:::|>>> |\.\.\. |\[!\[).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", lambda m: "x" + blank(m), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    return re.sub(r"(\bx,?\s+){3,}", lambda m: "x " + blank(m), text)


def sources() -> Iterator[tuple[str, str]]:
    """(name, text) of everything that is read by users."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    for name, text in helps():
        yield f"frisket {name} --help", text
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            yield from docstrings(f"{module.__name__}.{name}", getattr(module, name))


def helps() -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        (found,) = (a for a in parser(name)._actions if isinstance(a, argparse._SubParsersAction))
        sub = found.choices[name]
        options = [str(a.help) for a in sub._actions if a.help and a.help != argparse.SUPPRESS]
        yield name, "\n\n".join([str(sub.description), *options])


def docstrings(place: str, value: object) -> Iterator[tuple[str, str]]:
    """The docstring of a public name, and those of a class's public methods."""
    if not str(getattr(value, "__module__", None)).startswith("frisket"):
        return
    if text := inspect.getdoc(value):
        yield place, text
    for name, method in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_") and (text := getattr(method, "__doc__", None)):
            yield f"{place}.{name}", inspect.cleandoc(text)


if __name__ == "__main__":
    found = [f for where, text in sources() for f in findings(where, text)]
    print(*found, sep="\n")
    sys.exit(bool(found))
