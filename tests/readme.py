"""The README's own commands and blocks, so that CI runs what people read.

python tests/readme.py first|tests    print a command
python tests/readme.py blocks         run every block between the two, in order, here
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(language: str, path: Path = README) -> list[str]:
    """The fenced blocks of a language, in order."""
    return [text for kind, text in fenced(path) if kind == language]


def fenced(path: Path = README) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def commands() -> dict[str, str]:
    """`first`, the command that installs in a clone, and `tests`, the last one."""
    shell = [block.strip() for block in blocks("bash")]
    return {"first": shell[0].splitlines()[-1], "tests": shell[-1]}


def bash(command: str) -> None:
    subprocess.run(["bash", "-ec", command], check=True)


def run(path: Path = README, shell: Callable[[str], None] = bash) -> None:
    """Run every block between the two commands, in order; sessions share their names and print what they show."""
    names: dict[str, Any] = {}
    for language, text in fenced(path)[1:-1]:
        if language == "bash":
            shell(text)
            continue
        assert language == "python", f"a block of {language} is not run"
        session = doctest.DocTestParser().get_doctest(text, {}, path.name, path.name, 0)
        assert session.examples, "a block of python without `>>> `"
        session.globs = names
        said: list[str] = []
        failed = doctest.DocTestRunner().run(session, out=said.append, clear_globs=False).failed
        assert not failed, "".join(said)


if __name__ == "__main__":
    if sys.argv[1] == "blocks":
        run()
    else:
        print(commands()[sys.argv[1]])
