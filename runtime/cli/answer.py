"""The result of a command: data for --json, pieces of text for people, an exit status."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

CARETS = re.compile(r" *\^+")
WIDTH = 10  # of the names of rows
NARROW = 100  # lines of words are folded at this many columns, where the terminal is not narrower still
NARROWEST = 24  # columns that a value needs beside its name
GOOD, BAD, SOME = "green", "bold red", "magenta"  # which can be read on white and on black
CODE = {  # of a token of Pygments, for both, too
    ("Comment",): "dim", ("Keyword",): "magenta", ("Keyword", "Type"): "cyan", ("Literal", "String"): "green",
    ("Literal", "Number"): "cyan", ("Name", "Function"): "bold", ("Name", "Class"): "bold",
    ("Operator", "Word"): "magenta",
}  # fmt: skip


@dataclass(frozen=True)
class AnswerRow:
    """A name, and beside it lines of a value, from column `width` on. What of a line has no room in a terminal goes
    on below its column `hang`, or below its indentation."""

    name: Text
    value: Text
    width: int = WIDTH
    hang: int = 0

    def plain(self) -> Text:
        return self._placed(self.value.split("\n", allow_blank=True), self.width)

    def folded(self, console: Console, columns: int) -> Text:
        """No line longer than `columns`."""
        width, hang = self.width, self.hang
        if columns - width - hang < NARROWEST:  # the value stands below its name
            width, hang = 4, 0
        lines: list[Text] = []
        for line in self.value.split("\n", allow_blank=True):
            if line.cell_len <= columns - width:
                lines.append(line)
                continue
            below = max(hang, len(line.plain) - len(line.plain.lstrip(" ")))
            below = below if columns - width - below >= NARROWEST else hang
            first, *rest = line[below:].wrap(console, columns - width - below)
            lines += [line[:below] + first, *(Text(" " * below) + one for one in rest)]
        for line in lines:
            line.rstrip()
        return self._placed(lines, width)

    def _placed(self, lines: Iterable[Text], width: int) -> Text:
        gap = " " * (width - self.name.cell_len) if width == self.width else "\n" + " " * width
        text = Text.assemble(self.name, gap, Text("\n" + " " * width).join(lines))
        text.rstrip()
        return text


Piece: TypeAlias = "AnswerRow | Text | str"


@dataclass
class CommandResult:
    data: dict[str, Any]
    text: list[Piece] = field(default_factory=list)
    status: int = 0


def row(name: str, value: str | Text, hang: int = 0) -> AnswerRow:
    return AnswerRow(Text(name, "bold"), Text(value) if isinstance(value, str) else value, hang=hang)


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
    from rich.style import Style
    from rich.syntax import ANSISyntaxTheme, Syntax

    theme = ANSISyntaxTheme({token: Style.parse(style) for token, style in CODE.items()})
    text = Syntax("", language, theme=theme, background_color="default").highlight(source)
    text.rstrip()
    return text


def folded(message: str) -> str:
    """An error with long sentences folded by words where a person reads it. Carets, and the lines above, stay whole."""
    if not sys.stderr.isatty():
        return message
    columns = min(get_terminal_size().columns, NARROW)
    lines = message.split("\n")
    out: list[str] = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if len(line) <= columns or CARETS.fullmatch(below) or CARETS.fullmatch(line):
            out.append(line)
        else:
            rest = " " * (len(line) - len(line.lstrip()) + 2)
            out += wrap(line, columns, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
    return "\n".join(out)
