"""What a command gives back: data for --json, pieces of text for people, an exit status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

WIDTH = 10  # of the names of rows


@dataclass
class Answer:
    data: dict[str, Any]
    text: list[Text | str] = field(default_factory=list)
    status: int = 0


def row(name: str, value: str) -> Text:
    """One named line; further lines of the value are indented below it."""
    lines = value.split("\n")
    body = "\n".join([lines[0], *(" " * WIDTH + line for line in lines[1:])])
    return Text.assemble((f"{name:<{WIDTH}}", "bold"), body)


def rows(pairs: Iterable[tuple[str, str]]) -> list[Text | str]:
    return [row(name, value) for name, value in pairs if value]
