"""The colours of editors and of the site follow the grammar."""

import json
import re

import pytest

pytest.importorskip("pygments")
from pygments.token import Error
from support.pages import DOCS, script

from frisket.dsl.library import library
from frisket.runtime.explore.server import token_classes

EDITORS = script("editors")
LARK = (DOCS.parent / "grammar" / "mask.lark").read_text(encoding="utf-8")


def coloured(text, rules):
    """The scope of the rule that takes the whole of a text, as the first that matches."""
    for scope, pattern in rules:
        if found := re.match(pattern, text):
            return scope if found[0] == text else None
    return None


def test_grammar_terminals_have_a_colour_in_editors():
    rules, bare = token_classes(), re.sub(r"^//.*|^[A-Z]+: /.*", "", LARK, flags=re.M)
    signs = set(re.findall(r'"([^"\n]+)"', bare))
    assert len(signs) > 30
    assert [s for s in sorted(signs) if not coloured(s, rules)] == []
    assert {coloured(s, rules) for s in signs if s.isalpha()} == {"keyword.control"}
    examples = {"FLOAT": "2.5e-3", "INT": "0x1f", "NAME": "window_2", "SPACE": "# a comment", "NL": "\n"}
    assert set(re.findall(r"^([A-Z]+):", LARK, re.M)) == set(examples)
    scopes = {n: coloured(t, rules) for n, t in examples.items() if n != "NL"}
    assert scopes == {
        "FLOAT": "constant.numeric.float", "INT": "constant.numeric.integer", "NAME": "variable.other",
        "SPACE": "comment.line.number-sign",
    }  # fmt: skip
    assert coloured("**", [r for r in rules if r[0] != "keyword.operator"]) is None  # a rule that is missing is seen


def test_texts_lex_without_errors():
    texts = [e.text for e in library().values()]
    texts += [p.read_text(encoding="utf-8") for p in (DOCS.parent).glob("[de]*/*.frisket")]
    pages = "\n".join(p.read_text(encoding="utf-8") for p in DOCS.rglob("*.md"))
    texts += re.findall(r"^```frisket\n(.*?)^```", pages, re.M | re.S)
    assert len(texts) > 100
    lexer = EDITORS.FrisketLexer()
    for text in texts:
        tokens = list(lexer.get_tokens(text))
        assert not [value for kind, value in tokens if kind in Error], text
        assert "".join(value for _, value in tokens).strip("\n") == text.strip("\n")
    assert [value for kind, value in lexer.get_tokens("q ? k") if kind in Error] == ["?"]


def test_editor_grammar_is_up_to_date():
    assert EDITORS.FILE.read_text(encoding="utf-8") == EDITORS.text(), "run `python docs/editors.py`"
    assert json.loads(EDITORS.text())["scopeName"] == "source.frisket"
