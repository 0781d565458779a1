"""Colours of the language, from its grammar: a Pygments lexer, and a TextMate grammar for editors.

    python docs/editors.py        write docs/assets/frisket.tmLanguage.json

VS Code, Sublime Text and TextMate read that file. The site gives ```` ```frisket ```` blocks to `FrisketLexer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pygments.lexer import RegexLexer
from pygments.lexers import LEXERS
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, Whitespace

from frisket.runtime.explore.server import token_classes

__all__ = ["FrisketLexer"]
FILE = Path(__file__).parent / "assets" / "frisket.tmLanguage.json"
TOKENS = {  # scopes of TextMate in Pygments
    "comment.line.number-sign": Comment.Single, "": Whitespace, "keyword.control": Keyword,
    "storage.type": Keyword.Type, "variable.language": Name.Variable.Magic, "constant.language": Keyword.Constant,
    "support.function": Name.Builtin, "constant.numeric.float": Number.Float,
    "constant.numeric.integer": Number.Integer, "variable.other": Name, "keyword.operator": Operator,
    "punctuation": Punctuation,
}  # fmt: skip


class FrisketLexer(RegexLexer):
    """frisket's language in Pygments."""

    name, aliases, filenames = "frisket", ["frisket"], ["*.frisket"]
    tokens = {"root": [(p, TOKENS[scope]) for scope, p in token_classes()]}  # noqa: RUF012 (Pygments' own form)


def textmate() -> dict[str, Any]:
    """The same classes as a TextMate grammar."""
    return {
        "name": "frisket",
        "scopeName": "source.frisket",
        "fileTypes": ["frisket"],
        "patterns": [{"name": f"{s}.frisket", "match": p} for s, p in token_classes() if s],
    }


def text() -> str:
    return json.dumps(textmate(), indent=1) + "\n"


def register() -> None:
    """Make Pygments know the language by its name."""
    LEXERS["FrisketLexer"] = (__name__, "frisket", ("frisket",), ("*.frisket",), ())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
