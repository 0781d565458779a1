"""Colours of the language, from its grammar: a Pygments lexer, and a TextMate grammar for editors.

    python docs/editors.py        write docs/assets/frisket.tmLanguage.json

VS Code, Sublime Text and TextMate read that file. The site gives ```` ```frisket ```` blocks to `FrisketLexer`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from pygments.lexer import RegexLexer
from pygments.lexers import LEXERS
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, Whitespace

from frisket import grammar
from frisket.dsl import ir
from frisket.dsl.functions import BUILT_IN, CONSTANTS
from frisket.dsl.library import library

__all__ = ["FrisketLexer"]
TABLES = json.loads(Path(grammar.__file__).with_name("mask.json").read_text(encoding="utf-8"))
FILE = Path(__file__).parent / "assets" / "frisket.tmLanguage.json"
PUNCTUATION = ("(", ")", "[", "]", ",", ":")
TYPES = ("bool", "float", "int", "sorted")


class Rule(NamedTuple):
    """One colour: the kind of token in Pygments, the scope in TextMate, and the text that has it."""

    token: Any
    scope: str
    pattern: str


def words(names: Any) -> str:
    return rf"\b(?:{'|'.join(sorted(names, key=lambda n: (-len(n), n)))})\b"


def rules() -> list[Rule]:
    """The rules in the order in which they are tried. Every terminal of the grammar stands in one of them."""
    signs, patterns = TABLES["signs"], TABLES["patterns"]
    spelled = [s for s in signs if s.isalpha()]
    space, comment = patterns["SPACE"].split("|", 1)
    operators = [s for s in signs if not s.isalpha() and s not in PUNCTUATION]
    return [
        Rule(Comment.Single, "comment.line.number-sign", comment),
        Rule(Whitespace, "", rf"{space}|{patterns['NL']}"),
        Rule(Keyword, "keyword.control", words(spelled)),
        Rule(Keyword.Type, "storage.type", rf"{words(TYPES)}(?!\s*\()"),
        Rule(Name.Variable.Magic, "variable.language", words([*ir.COORDINATES, *ir.SIZES, "score"])),
        Rule(Keyword.Constant, "constant.language", words(CONSTANTS)),
        Rule(Name.Builtin, "support.function", words({*BUILT_IN, *(e.name for e in library().values())})),
        Rule(Number.Float, "constant.numeric.float", patterns["FLOAT"]),
        Rule(Number.Integer, "constant.numeric.integer", patterns["INT"]),
        Rule(Name, "variable.other", patterns["NAME"]),
        Rule(Operator, "keyword.operator", "|".join(map(re.escape, operators))),
        Rule(Punctuation, "punctuation", "|".join(map(re.escape, PUNCTUATION))),
    ]


class FrisketLexer(RegexLexer):
    """frisket's language in Pygments."""

    name, aliases, filenames = "frisket", ["frisket"], ["*.frisket"]
    tokens = {"root": [(rule.pattern, rule.token) for rule in rules()]}  # noqa: RUF012 (Pygments' own form)


def textmate() -> dict[str, Any]:
    """The same rules as a TextMate grammar."""
    return {
        "name": "frisket",
        "scopeName": "source.frisket",
        "fileTypes": ["frisket"],
        "patterns": [{"name": f"{r.scope}.frisket", "match": r.pattern} for r in rules() if r.scope],
    }


def text() -> str:
    return json.dumps(textmate(), indent=1) + "\n"


def register() -> None:
    """Make Pygments know the language by its name."""
    LEXERS["FrisketLexer"] = (__name__, "frisket", ("frisket",), ("*.frisket",), ())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
