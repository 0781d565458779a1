"""Prose: docs/prose.py finds what breaks a rule, and its counts are the limits in prose.json."""

import re
from pathlib import Path
from types import SimpleNamespace

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
    (finding,) = PROSE.findings(PROSE.Text("page.md", f"# A page\n\n{sentence}\n"))
    assert (finding.rule, finding.words) == ("forms", words)
    assert finding.where == f"page.md:{3 + sentence[: sentence.index(words)].count(chr(10))}"


@pytest.mark.parametrize(
    ("sentence", "rule", "words"),
    [
        ("Twice as fast beside SDPA.", "dialect", "beside"),
        ("Rows stay as they come.", "dialect", "as they come"),
        ("The line is of the matrix.", "dialect", "is of the"),
        ("It has tiles of keys.", "dialect", "has tiles of"),
        ("A border\ntile is partial.", "terms", "border\ntile"),
        ("The oracle agrees.", "terms", "oracle"),
        ("Kernels match the float64 interpreter.", "terms", "float64 interpreter"),
        ("Two runs of tiles a row.", "terms", "runs of tiles"),
        ("The goal was missed.", "diary", "goal"),
        ("Slower than at 05096f2.", "diary", "05096f2"),
        ("It was written by hand and is not tested.", "diary", "by hand and is not"),
    ],
)
def test_a_form_is_found_by_its_rule(sentence, rule, words):
    (finding,) = PROSE.findings(PROSE.Text("page.md", sentence))
    assert (finding.rule, finding.words) == (rule, words)


@pytest.mark.parametrize(
    "sentence", ["Besides its tile.", "Triton's interpreter.", "On 1234567 or deadbeef.", "A layout."]
)
def test_words_with_a_good_meaning_are_let_through(sentence):
    assert [*PROSE.findings(PROSE.Text("page.md", sentence))] == []


@pytest.mark.parametrize(("rule", "most"), [("sentences", 30), ("clauses", 46)])
@pytest.mark.parametrize("ends", [". ", ".\n\n", "!\n- ", "  |"])
def test_a_long_sentence_is_found(rule, most, ends):
    text = " ".join(["word"] * most)
    assert [x for x in PROSE.findings(PROSE.Text("page.md", f"{text}{ends}{text}")) if x.rule == rule] == []
    (finding,) = (x for x in PROSE.findings(PROSE.Text("page.md", f"Short.\n{text}\nword")) if x.rule == rule)
    assert (finding.where, finding.instead) == ("page.md:2", f"shorter sentences: {most + 1} words")


@pytest.mark.parametrize("ends", [":\n", ";\n- ", "; "])
def test_a_semicolon_ends_a_clause_and_no_sentence(ends):
    text = " ".join(["word"] * 28)
    rules = {x.rule for x in PROSE.findings(PROSE.Text("page.md", f"{text}{ends}{text}"))}
    assert rules == ({"sentences"} if "-" not in ends else set())


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
    assert [*PROSE.findings(PROSE.Text("page.md", text))] == []


@pytest.mark.parametrize(
    ("cell", "findings"),
    [
        ("SDPA / native", 1),
        ("model / published", 1),
        ("torch.sum / ours", 0),
        ("speed-up over SDPA / flex", 0),
        ("time, us", 0),
    ],
)
def test_a_ratio_in_a_first_row_says_whose_speed_up_it_is(cell, findings):
    page = PROSE.Text("page.md", f"# Times\n\nAnd / or.\n\n| case | {cell} |\n|---|---:|\n| one / two | 1 |\n")
    body, heads = PROSE.without_headings(page)
    assert heads.text == f"# Times\n\n\n\n| case | {cell} |\n\n\n"
    assert body.text == "\n\nAnd / or.\n\n\n|---|---:|\n| one / two | 1 |\n"
    assert [x.where for x in PROSE.findings(heads, ["ratios"])] == ["page.md:5"] * findings


def test_an_entry_over_two_lines_is_found():
    link = "[figures](https://example.com/a-long-address)"
    log = "".join(f"- {'a' * (PROSE.ENTRY - n)}\n  {link} {link}\n" for n in (18, 17))
    assert [(x.rule, x.where) for x in PROSE.long_entries(PROSE.Text("CHANGELOG.md", log))] == [
        ("entries", "CHANGELOG.md:3")
    ]


MODULE = '''"""A module.

The docstring's third line."""

X = 1  # a comment outside of functions
# fmt: off


class C:
    # two lines
    # of a comment

    def f(self, x):
        """Keeps "x # y" of z."""
        # why
        self.x = "#"  # noqa: X1
        raise ValueError(f"{x} is wrong; write something "  # inline
                         f"else for '{self}'", "too short")
'''


def test_prose_of_a_module_is_read():
    code = PROSE.Code()
    code.read(PROSE.Text("dsl/a.py", MODULE))
    assert {(x.line, x.text) for x in code.docstrings} == {
        (1, "A module.\n\nThe docstring's third line."),
        (14, 'Keeps "x # y" of z.'),
    }
    assert [(x.line, x.text) for x in code.comments if x.text.strip()] == [
        (5, "a comment outside of functions"),
        (10, "two lines\nof a comment"),
        (15, "why"),
        (17, "inline"),
    ]
    assert [(x.line, x.text) for x in code.texts] == [(17, "x is wrong; write something else for 'x'")]
    assert (code.comments_in_functions, code.lines) == (2, MODULE.count("\n"))


def test_public_docstrings_are_read():
    class Public:
        """Nobody knows."""

        def method(self):
            """Two lines,

            and the latter counts."""

    Public.__module__ = "frisket.somewhere"
    findings = [x for text in PROSE.docstrings("Public", Public) for x in PROSE.findings(text)]
    assert [(x.where, x.words) for x in findings] == [("Public:1", "Nobody"), ("Public.method:3", "the latter")]


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("jax: take a source without slots", True),
        ("torch, jax: read sinks once", True),
        ("runtime/caches: drop a copy", True),
        ("Take a source without slots", False),
        ("jax: Sources may be none", False),
        ("jax: sources", False),
        ("jax: take " + "x" * 62, True),
        ("jax: take " + "x" * 63, False),
    ],
)
def test_a_subject_of_a_commit_is_area_verb_object(subject, good):
    assert PROSE.well_formed(subject) is good


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project with three findings, and its limits."""
    files = {
        "README.md": "# A mask\n\nRead beside the page.\n",
        "CONTRIBUTING.md": "",
        "CHANGELOG.md": "",
        "SECURITY.md": "",
        "docs/a.md": "The oracle, an oracle.\n",
        "dsl/a.py": "def f():\n    return 1  # why\n",
        "prose.json": '{"pages dialect": 1, "pages terms": 2, "comments sparse": 2}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(PROSE, "ROOT", tmp_path)
    monkeypatch.setattr(PROSE, "LIMITS", tmp_path / "prose.json")
    monkeypatch.setattr(PROSE, "public", list)
    monkeypatch.setattr(PROSE, "helps", list)
    return tmp_path


@pytest.fixture
def command(monkeypatch):
    """The command as a function from arguments to the exit status."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["prose.py", *arguments])
        with pytest.raises(SystemExit) as end:
            PROSE.main()
        return end.value.code

    return run


def test_limits_only_fall(project, command, capsys):
    assert command() == 0
    (project / "docs" / "a.md").write_text("The oracle is beside the page.", encoding="utf-8")
    assert command() == 1
    assert capsys.readouterr().out.endswith(
        "pages dialect: 2, over the limit, 1: python docs/prose.py pages dialect\n"
        "pages terms: 1, under the limit, 2: python docs/prose.py --limits\n"
    )
    assert command("--limits") == 1
    assert PROSE.limits() == {"pages dialect": 1, "pages terms": 1, "comments sparse": 2}
    (project / "docs" / "a.md").write_text("The oracle.", encoding="utf-8")
    assert command("--limits") == 0


def test_comments_in_functions_do_not_become_rare(project):
    (project / "dsl" / "a.py").write_text("def f():\n    return 1  # why\n\n", encoding="utf-8")
    assert PROSE.complaints(PROSE.counts(PROSE.code()), PROSE.limits()) == [
        "comments sparse: 3, over the limit, 2: python docs/prose.py comments sparse"
    ]


def test_findings_are_listed_by_source_and_rule(project, command, capsys):
    assert command("pages", "terms") == 1
    assert capsys.readouterr().out == "docs/a.md:1: 'oracle': write reference\n" * 2
    assert command("dialect") == 1
    assert capsys.readouterr().out.startswith("README.md:3: 'beside': write compared with")
    assert command("CHANGELOG") == 0
    assert command("prose") == 2
    assert "prose: neither a source nor a rule" in capsys.readouterr().err


@pytest.mark.parametrize("page", sorted({*PAGES.rglob("*.md")} - {PAGES / "index.md", *(PAGES / "gallery").iterdir()}))
def test_a_page_begins_with_its_readers(page):
    """The rule of Diátaxis: who the page is for, and what they will be able to do."""
    first = next(p for p in page.read_text(encoding="utf-8").split("\n\n") if not p.startswith(("#", "<!--")))
    assert re.match(r"For (readers|those|people|users|contributors)\b|Five programs for readers", first.strip()), first


@pytest.fixture(scope="module")
def code():
    return PROSE.code()


def test_sources_of_prose_are_read(code):
    places = {source: {text.place for text in texts} for source, texts in PROSE.texts(code).items()}
    assert {*places} == {*PROSE.SOURCES}
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md"} <= places["pages"] == places["headings"]
    assert "frisket show --help" in places["help"]
    assert {"frisket.compile", "frisket.caches.jax.KVCache"} <= places["public"]
    assert all("runtime/attention/attention.py" in places[x] for x in ("docstrings", "comments", "texts"))


def test_counts_are_their_limits(code):
    counts = PROSE.counts(code)
    assert {name for names in counts for name in names.split()} <= {*PROSE.SOURCES, *PROSE.RULES}
    assert PROSE.complaints(counts, PROSE.limits()) == []


@pytest.mark.parametrize(
    ("known", "log", "status"),
    [
        (True, "1a2b3c4 docs: add a page\n", 0),
        (True, "1a2b3c4 Add a page\n", 1),
        (False, "1a2b3c4 Add a page\n", 0),  # an unpacked archive under a new history
    ],
)
def test_commits_since_the_rule_have_a_form(known, log, status, command, monkeypatch, capsys):
    def git(name, *arguments, check=True):
        assert arguments[-1] == (f"{PROSE.SINCE}..HEAD" if name == "log" else PROSE.SINCE)
        return SimpleNamespace(stdout=log, returncode=not known)

    monkeypatch.setattr(PROSE, "git", git)
    assert command("--commits") == status
    absent = f"the history here has no {PROSE.SINCE[:8]}, where the rule begins: no commit was read\n"
    assert capsys.readouterr().out == (absent if not known else log if status else "")
