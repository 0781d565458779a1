"""Every block of code on every page of docs/ runs, and prints what the page shows.

The blocks of a page share their names, in order. ```python runs, as a session where it begins with `>>> `; ```frisket
is read; the `$ frisket` lines of ```console print what stands below them, and those of ```bash end well. What cannot
run here has `<!-- not run: why -->` above it, and stands in NOT_RUN.
"""

import doctest
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from frisket.dsl.program import read
from frisket.runtime.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [str(p.relative_to(DOCS)) for p in sorted(DOCS.rglob("*.md")) if p.parent.name != "gallery"]  # test_gallery.py
LONG = {"caches.md", "operations.md"}  # seconds; for CI
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
NOT_RUN = {
    ("device.md", "tables on a GPU"),
    ("parallel.md", "several processes, as in examples/context_parallel.py"),
    ("parallel.md", "several devices"),
    ("parallel.md", "what several processes say"),
    ("triton.md", "a GPU"),
    ("triton.md", "compiles for GPUs; tests/kernels/test_triton_table.py does"),
}
PLAIN = doctest.ELLIPSIS


class Block(NamedTuple):
    why: str | None
    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count("\n```") % 2 == 0, "a fence is not closed"
    found = [
        Block(m["why"], m["language"], m["text"], text.count("\n", 0, m.start("text")) + 1)
        for m in BLOCK.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.M)), "a fence is not at the margin"
    return found


def test_what_is_not_run():
    assert {(page, block.why) for page in PAGES for block in blocks(page) if block.why} == NOT_RUN


@pytest.fixture
def own_registries(monkeypatch):
    """A page may register operators."""
    from frisket.operations import AttentionRegistry, OperationRegistry

    for registry in (AttentionRegistry, OperationRegistry):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.matrix if p in LONG else ()) for p in PAGES])
def test_the_page(page, capsys, tmp_path, monkeypatch, request):
    if page == "operations.md":
        request.getfixturevalue("own_registries")
    found = [block for block in blocks(page) if not block.why]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    names: dict = {"__name__": "page"}
    for block in found:
        RUN[block.language](page, block, names, capsys)


def python(page, block, names, capsys):
    if not block.text.startswith(">>> "):
        exec(compile("\n" * block.line + block.text, str(DOCS / page), "exec"), names)
        return
    session = doctest.DocTestParser().get_doctest(block.text, names, page, str(DOCS / page), block.line)
    session.globs = names
    runner = doctest.DocTestRunner(optionflags=PLAIN)
    with capsys.disabled():
        said: list[str] = []
        runner.run(session, out=said.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def console(page, block, names, capsys):
    """What each command prints, errors included."""
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.M)
    assert commands, f"{page}:{block.line} has no command"
    for command, shown in commands:
        program, *argv = shlex.split(command)
        assert program == "frisket", command
        capsys.readouterr()
        main(argv)
        out, err = capsys.readouterr()
        same = doctest.OutputChecker().check_output(shown, out + err, PLAIN)
        assert same, f"{page}:{block.line} {command}\n{out + err}"


def bash(page, block, names, capsys):
    for command in block.text.splitlines():
        program, *argv = shlex.split(command, comments=True)
        assert program == "frisket", command
        assert main(argv) == 0, capsys.readouterr().err


def frisket(page, block, names, capsys):
    read(block.text)


RUN = {"python": python, "console": console, "bash": bash, "frisket": frisket}
