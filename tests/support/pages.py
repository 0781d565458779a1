"""The blocks of code on a page, and what it means that one is true; the scripts of docs/ as modules.

```python runs, as a session where it begins with `>>> `; ```frisket is read; the `$ frisket` lines of ```console print
what stands below them, and those of ```bash end well. What cannot run has `<!-- not run: why -->` above it.
"""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from frisket.dsl.program import read
from frisket.runtime.cli.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """`where` is the page and line of its first line, `why` the reason that it does not run."""

    where: str
    language: str
    text: str
    why: str | None

    def run(self, names: dict[str, Any]) -> None:
        """Raise unless the block is true; `names` are those of the page, which it may add to."""
        RUN[self.language](self, names)


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page inside docs/, in order; `text` is the page as it is read, unless given."""
    text = (DOCS / page).read_text(encoding="utf-8") if text is None else text
    found = [
        Block(f"{page}:{1 + text.count(chr(10), 0, m.start('text'))}", m["language"], m["text"], m["why"])
        for m in BLOCK.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.M)), "a fence is not closed, or not at the margin"
    return found


def python(block: Block, names: dict[str, Any]) -> None:
    if not block.text.startswith(">>> "):
        exec(compile(block.text, block.where, "exec"), names)
        return
    session = doctest.DocTestParser().get_doctest(block.text, {}, block.where, block.where, 0)
    session.globs = names
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(session, out=said.append, clear_globs=False).failed == 0, "".join(said)


def console(block: Block, names: dict[str, Any]) -> None:
    """What each command prints, errors included."""
    commands = re.findall(r"^\$ frisket (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.M)
    assert len(commands) == len(re.findall(r"^\$ ", block.text, re.M)) > 0, block.where
    for command, shown in commands:
        _, said = frisket(command)
        same = doctest.OutputChecker().check_output(shown, said, doctest.ELLIPSIS)
        assert same, f"{block.where} frisket {command}\n{said}"


def bash(block: Block, names: dict[str, Any]) -> None:
    for line in block.text.splitlines():
        assert line.startswith("frisket "), f"{block.where} {line}"
        status, said = frisket(line.removeprefix("frisket "))
        assert status == 0, f"{block.where} {line}\n{said}"


def frisket(command: str) -> tuple[int, str]:
    """(exit status, what it prints)."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(shlex.split(command, comments=True))
    return status, said.getvalue()


RUN: dict[str, Callable[[Block, dict[str, Any]], Any]] = {
    "python": python,
    "console": console,
    "bash": bash,
    "frisket": lambda block, names: read(block.text),
}


@cache
def script(name: str) -> ModuleType:
    """docs/NAME.py, loaded."""
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def sources() -> Any:
    """The `Tree` of docs/house.py over this checkout, which parses a file at its first use and keeps it."""
    house = script("house")
    return house.Tree(house.ROOT)
