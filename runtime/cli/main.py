"""The command line: `frisket show 'causal & window(256)' --q-len 2048`.

>>> from frisket.runtime.cli.main import main
>>> main(["show", "q - k"])  # the error goes to stderr
2

Exit status: 0 good, 1 mismatch with the reference, 2 bad input. A command `show` is `show(args, console)` of the module
that `COMMANDS` names, with `add_show(parser)` for its options; the module is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby

from rich.console import Console
from rich.text import Text

from frisket import __version__
from frisket.dsl.errors import FrisketError, MismatchError

from .answer import BAD, NARROW, AnswerRow, CommandResult, Parser, Piece, folded, meant

PLAIN: dict[int, int | str] = {**str.maketrans("×·–╲’✓✗█▓▒░", "x.-\\'+-#%+-")}
PLAIN |= {ord("→"): "->", ord("…"): "...", ord("≤"): "<="}


@dataclass(frozen=True)
class Command:
    name: str
    takes: str
    help: str
    group: str
    module: str  # in this folder; commands that share what they import share one


LOOK, RUN, SEE = "See what a mask does", "Run it", "Look inside"
_COMMANDS = (
    Command("show", "EXPR", "how much it shows, what is read, and the picture of its tiles", LOOK, "show"),
    Command("explain", "EXPR", "why a query sees a key or not; or every stage up to a kernel", LOOK, "explain"),
    Command("plot", "EXPR -o FILE", "a picture, or a page to zoom into and ask", LOOK, "explain"),
    Command("explore", "EXPR", "the mask in a browser: edit it, see tiles and cost change", LOOK, "explain"),
    Command("library", "[WORD ...]", "the masks and score mods there are; one in full", LOOK, "show"),
    Command("check", "EXPR", "compare every kernel with a float64 reference", RUN, "kernels"),
    Command("run", "EXPR --tokens FILE ...", "attention over files packed into one sequence", RUN, "timing"),
    Command("bench", "[EXPR]", "frisket vs. the other libraries here, with interleaved calls", RUN, "timing"),
    Command("tune", "EXPR --shape SIZES", "race a few tiles on this GPU; later calls take the fastest", RUN, "tune"),
    Command("emit", "EXPR --backend BACKEND", "the source text of a kernel, or what it takes of a GPU", SEE, "kernels"),
    Command("doctor", "", "what is installed, what runs here, and what is missing", SEE, "kernels"),
    Command("completion", "SHELL", "a script that completes commands, options and names", SEE, "show"),
)
COMMANDS = {c.name: c for c in _COMMANDS}
HEAD = "Attention masks and score modifiers, from a line of text to a kernel."
FOOT = """\
EXPR is text such as 'causal & window(256)', a .frisket file, or - for stdin.

examples:
  frisket show 'causal & window(256)' --q-len 1048576
  frisket explain 'causal & window(w)' --set w=256 --q 300 --k 17
  frisket library window"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; prints, and raises nothing for bad input."""
    if hasattr(sys.stdout, "reconfigure"):  # a name of a file may hold what the locale cannot say
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = arguments(sys.argv[1:] if argv is None else list(argv))
        answer: CommandResult = args.command(args, Output())
        write(answer, as_json=args.json)
        sys.stdout.flush()
        return answer.status
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return int(stop.code or 0)
    except BrokenPipeError:  # `frisket … | head` is not an error
        # Python flushes stdout when it ends, which would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FrisketError as error:
        complain(type(error).__name__, str(error))
        return 1 if isinstance(error, MismatchError) else 2
    except OSError as error:
        complain(f"cannot read {error.filename}" if error.filename else "cannot write", str(error.strerror))
        return 2
    except MemoryError as error:
        complain("not enough memory", f"{error}\n  ask for smaller lengths, or larger tiles with --block")
        return 2
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells say it


def arguments(argv: list[str]) -> argparse.Namespace:
    """The arguments of one command, whose module is imported for its options."""
    command = argv[0] if argv else ""
    top = parser(command)
    if command and not command.startswith("-") and command not in COMMANDS:
        top.error(f"there is no command {command!r}{meant(command, COMMANDS)}")
    args, rest = top.parse_known_args(argv)
    if not hasattr(args, "command"):
        top.print_help(sys.stderr)
        raise SystemExit(2)
    if rest:
        args.parser.left_over(rest)
    return args


class Output(Console):
    """Colour on terminals only (rich also obeys NO_COLOR and FORCE_COLOR); lines are never cut."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would leave with status 1


def complain(name: str, message: str) -> None:
    err = Output(stderr=True)
    text = Text(folded(f"{name}: {message}"))
    text.stylize(BAD, 0, len(name))
    text.highlight_regex(r"(?m)^ *\^+$", BAD)
    show(err, text)


def write(answer: CommandResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads(json.dumps(answer.data), parse_constant=str), indent=2))  # JSON has no NaN
        return
    out = Output()
    for piece in answer.text:
        show(out, piece)


def show(out: Console, piece: Piece) -> None:
    """Print, in characters the locale has; rows of words are folded where a person reads them."""
    plain = out.options.ascii_only
    if isinstance(piece, AnswerRow):
        piece = replace(piece, value=ascii_of(piece.value)) if plain else piece
        folded = out.is_terminal and sys.stdout.isatty()
        piece = piece.folded(out, min(out.width, NARROW)) if folded else piece.plain()
    text = piece if isinstance(piece, Text) else Text(piece)
    if plain:
        text = ascii_of(text)
        text.rstrip()
    out.print(text)


def ascii_of(text: Text) -> Text:
    """Every character as one or more of ASCII, colours where they were."""
    return Text.assemble(*((str(s.text).translate(PLAIN), s.style or "") for s in text.render(Console())))


# -- parsers ------------------------------------------------------------------------------------------


def parser(*filled: str) -> Parser:
    """The parser of all commands, with the options of those named."""
    top = Parser(prog="frisket", usage="frisket COMMAND [options]", description=described(), epilog=FOOT)
    top.add_argument("--version", action="version", version=f"frisket {__version__}")
    sub = top.add_subparsers(prog="frisket", metavar="COMMAND", help=argparse.SUPPRESS)
    for c in COMMANDS.values():
        usage = " ".join(filter(None, ("frisket", c.name, c.takes, "[options]")))
        p = sub.add_parser(c.name, help=c.help, usage=usage, description=c.help[0].upper() + c.help[1:] + ".")
        if c.name in filled:
            module = import_module(f".{c.module}", __package__)
            getattr(module, f"add_{c.name}")(p)
            p.add_argument("--json", action="store_true", help="print one JSON object")
            p.set_defaults(command=getattr(module, c.name), parser=p)
    return top


def described() -> str:
    """The list of commands, by what people want to do."""
    lines = [HEAD]
    for group, commands in groupby(COMMANDS.values(), key=lambda c: c.group):
        lines += ["", f"{group}:", *(f"  {c.name:11} {c.help}" for c in commands)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
