"""`python tests/readme.py first|tests`: the README's own commands, so that CI runs what people read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(language: str, path: Path = README) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def commands() -> dict[str, str]:
    """The two commands of the quick start: `first` and `tests`."""
    first, tests = (block.strip() for block in blocks("bash")[:2])
    return {"first": first, "tests": tests}


if __name__ == "__main__":
    print(commands()[sys.argv[1]])
