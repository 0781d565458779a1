"""What a command gives back: data for --json, pieces of text for people, an exit status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 10  # of the names of rows
GOOD, BAD, SOME = "green", "bold red", "yellow"


@dataclass(frozen=True)
class Row:
    """One named line; further lines of the value stand below it."""

    name: str
    value: Text

    def plain(self) -> Text:
        body = Text("\n" + " " * WIDTH).join(self.value.split("\n", allow_blank=True))
        return Text.assemble((f"{self.name:<{WIDTH}}", "bold"), body)

    def wrapped(self) -> Table:
        """Lines too long for the terminal go on below their beginning."""
        grid = Table.grid()
        grid.add_column(width=WIDTH, style="bold")
        grid.add_column(overflow="fold")
        grid.add_row(self.name, self.value)
        return grid


Piece: TypeAlias = "Row | Text | str"


@dataclass
class Answer:
    data: dict[str, Any]
    text: list[Piece] = field(default_factory=list)
    status: int = 0


def row(name: str, value: str | Text) -> Row:
    return Row(name, Text(value) if isinstance(value, str) else value)


def rows(pairs: Iterable[tuple[str, str | Text]]) -> list[Piece]:
    return [row(name, value) for name, value in pairs if value]


def table(lines: Sequence[Sequence[str | Text]], right: Sequence[int] = ()) -> list[Piece]:
    """Columns as wide as their longest entry, the first line in bold; those of `right` hold numbers."""
    cells = [[Text(x) if isinstance(x, str) else x.copy() for x in line] for line in lines]
    widths = [max(x.cell_len for x in column) for column in zip(*cells, strict=True)]
    out: list[Piece] = []
    for line in cells:
        for n, (x, width) in enumerate(zip(line, widths, strict=True)):
            x.align("right" if n in right else "left", width)
        text = Text("  ").join(line)
        text.rstrip()
        out.append(text)
    out[0].stylize("bold")  # type: ignore[union-attr]
    return out


def coloured(console: Console) -> bool:
    """Whether colours reach the reader; without them, marks must do."""
    return console.color_system is not None and not console.no_color


def code(source: str, language: str, console: Console) -> Text:
    """Source text, in colours where there are some."""
    if not coloured(console):
        return Text(source)
    from rich.syntax import Syntax

    text = Syntax("", language, theme="ansi_dark", background_color="default").highlight(source)
    text.rstrip()
    return text
