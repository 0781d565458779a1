"""Options of the commands: a parser that says what was meant, options that commands share, the types of values."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from frisket.dsl.errors import nearest

from .answer import folded


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
        """Say what is wrong with words nobody takes."""
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


def add_subject(p: argparse.ArgumentParser, block: tuple[int, int] | None = (128, 128)) -> None:
    """`block` is the tile where none is given; None: the backend's choice."""
    group = p.add_argument_group("what")
    group.add_argument("expr", metavar="EXPR", help="a mask or a score mod, a .frisket file, or - for standard input")
    group.add_argument("--score", metavar="EXPR", help="a score mod, in addition to the mask")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="bind a scalar: --set w=256")
    group.add_argument(
        "--table", action="append", default=[], metavar="NAME=FILE", help="bind a table: doc=doc.npy, or doc=[0,0,1,1]"
    )
    said = "default: the backend's choice" if block is None else "default: {}x{}".format(*block)
    group.add_argument("--block", type=tile_size, default=block, metavar="N or QxK", help=f"tile in tokens; {said}")


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
