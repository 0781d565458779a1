"""The result of a command: data for --json, pieces of text for people, an exit status; the parser of its options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NoReturn, TypeAlias

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import nearest

CARETS = re.compile(r" *\^+")
WIDTH = 10  # of the names of rows
NARROW = 100  # lines of words are folded at this many columns, where the terminal is not narrower still
NARROWEST = 24  # columns that a value needs besides its name
GOOD, BAD, SOME = "green", "bold red", "magenta"  # which can be read on white and on black
# of a token of Pygments, for both, too
CODE = {("Comment",): "dim", ("Keyword",): "magenta", ("Keyword", "Type"): "cyan", ("Literal", "String"): "green"}
CODE |= {("Literal", "Number"): "cyan", ("Name", "Function"): "bold", ("Name", "Class"): "bold"}
CODE |= {("Operator", "Word"): "magenta"}


@dataclass(frozen=True)
class AnswerRow:
    """A name, then lines of a value, from column `width` on. What of a line has no room in a terminal goes
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
    # `align` changes a text in place
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
    from rich.syntax import ANSISyntaxTheme, Syntax  # imports Pygments, which few commands need

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


class Parser(argparse.ArgumentParser):
    """Options are written out, and mistakes get one line and a way to the help."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", WideHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print(folded(f"{self.prog}: {message}\n  see `{self.prog} --help`"), file=sys.stderr)
        raise SystemExit(2)

    @property
    def switches(self) -> list[str]:
        return [s for action in self._actions for s in action.option_strings if s.startswith("--")]

    def left_over(self, words: Iterable[str]) -> NoReturn:
        """Say what is wrong with words that no command takes."""
        words = list(words)
        for word in words:
            if word.startswith("-") and len(word) > 1:
                name = word.partition("=")[0]
                self.error(f"there is no option {name}{meant(name, self.switches)}")
        takes = any(action.metavar == "EXPR" for action in self._get_positional_actions())
        quoted = "; an EXPR with spaces is written in quotes: 'causal & window(256)'" if takes else ""
        self.error(f"{words[0]!r} is one word too many{quoted}")


class WideHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with room for the options' names."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=30, **options)


def meant(word: str, words: Iterable[str]) -> str:
    """`meant("shwo", ["show", "plot"]) == "; did you mean show?"`."""
    words = list(words)
    near = next((w for w in words if w.startswith(word)), None) or nearest(word, words)
    return f"; did you mean {near}?" if near else ""


def examples(p: argparse.ArgumentParser, *lines: str) -> None:
    """Write the examples that end `--help`. Tests run each of them."""
    p.epilog = "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_subject(
    p: argparse.ArgumentParser, block: tuple[int, int] | None = (128, 128), expand: bool = True, tiles: bool = True
) -> None:
    """`block` is the tile where none is given; None: the backend's choice. `expand`: the command prints the mask.
    `tiles`: the command takes a tile."""
    group = p.add_argument_group("what")
    group.add_argument("expr", metavar="EXPR", help="a mask or a score mod, a .frisket file, or - for standard input")
    group.add_argument("--score", metavar="EXPR", help="a score mod, in addition to the mask")
    group.add_argument("--weight", metavar="EXPR", help="the weight of a visible pair, in place of the softmax")
    group.add_argument("--divide", metavar="EXPR", help="the divisor of a row of weights: count, total + 1")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="bind a scalar: --set w=256")
    table = "bind a table: doc=doc.npy, or doc=[0,0,1,1]"
    group.add_argument("--table", action="append", default=[], metavar="NAME=FILE", help=table)
    if expand:
        group.add_argument("--expand", action="store_true", help="write calls of the library out as formulas")
    if not tiles:
        return
    default = "default: the backend's choice" if block is None else "default: {}x{}".format(*block)
    group.add_argument("--block", type=tile_size, default=block, metavar="N or QxK", help=f"tile in tokens; {default}")


def add_sizes(p: argparse.ArgumentParser, length: str = "2048") -> None:
    """`length` says which one is taken where none is given."""
    group = p.add_argument_group("sizes")
    group.add_argument("--q-len", type=positive, metavar="TOKENS", help=f"queries; default: {length}")
    group.add_argument("--kv-len", type=positive, metavar="TOKENS", help="keys; default: as many as queries")
    group.add_argument("--batch", type=positive, default=1, metavar="N", help="default: %(default)s")
    group.add_argument("--heads", type=positive, default=1, metavar="N", help="of queries; default: %(default)s")


def add_slice(p: argparse._ActionsContainer) -> None:
    p.add_argument("--b", type=natural, default=0, metavar="N", help="which batch entry, from 0; default: %(default)s")
    p.add_argument("--h", type=natural, default=0, metavar="N", help="which head, from 0; default: %(default)s")


def positive(text: str) -> int:
    return natural(text, least=1)


def natural(text: str, least: int = 0) -> int:
    try:
        n = int(text)
    except ValueError:
        # 1e6 is written by people: the advice has its digits
        digits = f"{float(text):.0f}" if re.fullmatch(r"\d+(\.\d*)?e\+?\d{1,2}", text) else "4096"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in digits, such as {digits}") from None
    if n < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}")
    return n


def even(text: str) -> int:
    if (n := positive(text)) % 2:
        raise argparse.ArgumentTypeError("must be even: RoPE turns pairs of channels")
    return n


def tile(text: str) -> tuple[int, int]:
    i, comma, j = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is no tile; write its row and column, for example 3,5")
    return natural(i), natural(j)


def tile_size(text: str) -> tuple[int, int]:
    q, x, k = text.replace(",", "x").partition("x")
    return positive(q), positive(k if x else q)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr if that is a terminal, gone when the work is done; `step(name)` moves it."""
    # commands that end at once do not load it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    err = Console(stderr=True)
    shown = sys.stderr.isatty() and not err.is_dumb_terminal  # colours may be forced into a pipe, a bar may not
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not shown) as bar:
        task = bar.add_task("preparing", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
