"""Prose: docs/prose.py finds the banned forms, and nothing that users read has one."""

import re
from pathlib import Path

import pytest
from support.pages import script

PROSE = script("prose")
PAGES = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Masks whose truth hangs on the pair are slow.", "hangs on"),
        ("Another length compiles nothing.", "compiles nothing"),
        ("Tiles count as partial, which is right and slower.", "which is right and slower"),
        ("What torch lets\npass is an error.", "lets\npass"),
        ("| `x` | a kernel of its own |", "of its own"),
        ("Names and values; the latter\nwin.", "the latter"),
        ("*Nobody* knows.", "Nobody"),
        ("Tokens are dealt to ranks.", "dealt"),
        ("Changes are told.", "are told"),
        ("The doors of a module.", "doors"),
        ("The value of `x` is computed anew.", "anew"),
        ("One value a key, worked out before the kernel.", "worked out before"),
        ("Steps are\nlaunched into nothing.", "launched into nothing"),
        ("Equal values stand together.", "stand together"),
        ("Dilated masks fall apart.", "fall apart"),
        ("Other sizes are refused in words.", "refused in words"),
    ],
)
def test_a_banned_form_is_found(sentence, words):
    (found,) = PROSE.findings("page.md", f"# A page\n\n{sentence}\n")
    assert found.words == words
    assert found.where == f"page.md:{3 + sentence[: sentence.index(words)].count(chr(10))}"


@pytest.mark.parametrize("ends", [". ", ":\n", ".\n\n", ";\n- ", "  |"])
def test_a_long_sentence_is_found(ends):
    half = ("word " * (PROSE.WORDS - 10)).strip()
    assert [*PROSE.findings("page.md", f"{half}{ends}{half}")] == []
    (found,) = PROSE.findings("page.md", f"{half},\n{half}")
    assert found.instead == f"shorter sentences: {2 * (PROSE.WORDS - 10)} words"


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = dealt  # anew, of its own\n```\n",
        "Write `deals` in [this](https://anew.example/doors) page.",
        "<!-- written by nobody -->",
        "Each sequence has its own length, and they are told apart.",
        "The given name is kept.",
    ],
)
def test_code_and_links_are_no_prose(text):
    assert [*PROSE.findings("page.md", text)] == []


def test_docstrings_are_read():
    class Public:
        """Nobody knows."""

        def method(self):
            """Two lines,

            and the latter counts."""

    Public.__module__ = "frisket.somewhere"
    found = [f for where, text in PROSE.docstrings("Public", Public) for f in PROSE.findings(where, text)]
    assert [(f.where, f.words) for f in found] == [("Public:1", "Nobody"), ("Public.method:3", "the latter")]


@pytest.mark.parametrize("page", sorted({*PAGES.rglob("*.md")} - {PAGES / "index.md", *(PAGES / "gallery").iterdir()}))
def test_a_page_begins_with_its_readers(page):
    """The rule of Diátaxis: who the page is for, and what they will be able to do."""
    first = next(p for p in page.read_text(encoding="utf-8").split("\n\n") if not p.startswith(("#", "<!--")))
    assert re.match(r"For (readers|those|people|users|contributors)\b|Five programs for readers", first.strip()), first


def test_texts_that_users_read_have_no_banned_form():
    sources = dict(PROSE.sources())
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "frisket show --help", "frisket.compile"} <= {*sources}
    found = [str(f) for where, text in sources.items() for f in PROSE.findings(where, text)]
    assert found == []
