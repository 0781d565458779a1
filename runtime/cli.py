"""The command line: `frisket show 'causal & window(256)' --q-len 2048`.

>>> from frisket.runtime.cli import main
>>> main(["show", "q - k"])  # the error goes to stderr
2

Exit status: 0 good, 1 mismatch with the oracle, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import FrisketError, MismatchError

from .cli_answer import Answer

PLAIN = str.maketrans({"×": "x", "·": ".", "→": "->", "…": "...", "–": "-", "≤": "<=", "╲": "\\", "’": "'"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; prints, and raises nothing for bad input."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its usage, or the help
        return int(stop.code or 0)
    try:
        answer: Answer = args.command(args, console())
        write(answer, as_json=args.json)
        return answer.status
    except BrokenPipeError:  # `frisket … | head` is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FrisketError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, MismatchError) else 2
    except OSError as error:
        print(f"cannot read {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"not enough memory: {error}\n  ask for smaller lengths, or larger tiles with --block", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def console() -> Console:
    """Colour on terminals only (rich also obeys NO_COLOR); lines are never folded or cut."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def write(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer.data, indent=2, ensure_ascii=True))
        return
    out = console()
    for piece in answer.text:
        text = piece if isinstance(piece, Text) else Text(str(piece))
        if out.options.ascii_only:
            text = Text.assemble(*((s.text.translate(PLAIN), s.style or "") for s in text.render(out)))
            text.rstrip()
        out.print(text)


# -- arguments ------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    from . import cli_commands as commands
    from .cli_check import check
    from .cli_doctor import doctor
    from .cli_library import library
    from .cli_plot import plot
    from .cli_run import run

    top = argparse.ArgumentParser(
        prog="frisket", description="Attention masks and score modifiers, from a line of text to a kernel."
    )
    sub = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: Any, help: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=help, description=help, parents=parents)
        p.set_defaults(command=does)
        p.add_argument("--json", action="store_true", help="print one JSON object")
        return p

    subject, sizes = subject_options(), size_options()
    show = command("show", commands.show, "the simplified text, its facts, and the tile picture", subject, sizes)
    add_slice(show)
    explain = command("explain", commands.explain, "the stages; with --q and --k, why", subject, sizes)
    explain.add_argument("--q", type=natural, help="a query position")
    explain.add_argument("--k", type=natural, help="a key position")
    explain.add_argument("--tile", type=tile, metavar="I,J", help="a tile: its row and column")
    explain.add_argument("--backend", help="whose target and source to show; default: the library calls of torch")
    add_slice(explain)
    add_plot(command("plot", plot, "a picture, or a page to zoom into and ask", subject, sizes))
    command("check", check, "what runs here against the float64 interpreter", subject, sizes)
    chosen = subject_options(block=None)
    emit = command("emit", emitted, "the source text of the kernel, or what it takes of a GPU", chosen, sizes)
    emit.add_argument("--backend", required=True, help="cpp, triton or pallas-tpu")
    emit.add_argument("--kv-heads", type=positive, help="default: --heads")
    emit.add_argument("--head-dim", type=positive, default=64)
    emit.add_argument("--v-dim", type=positive, help="default: --head-dim")
    emit.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16 (default: %(default)s)")
    emit.add_argument("--report", action="store_true", help="compile for triton: registers, spills, shared memory")
    emit.add_argument("--arch", nargs="+", metavar="GPU", help="sm_80, sm_90, sm_100, gfx942; several with --report")
    add_run(command("run", run, "attention over packed files, timed and checked", subject))
    command("library", library, "the entries of the library").add_argument("name", nargs="?", help="one, in full")
    command("doctor", doctor, "what is installed and what runs here")
    return top


def emitted(args: argparse.Namespace, console: Console) -> Answer:
    from . import cli_commands, cli_report

    return (cli_report.report if args.report else cli_commands.emit)(args, console)


def subject_options(block: tuple[int, int] | None = (128, 128)) -> argparse.ArgumentParser:
    """`block` is the tile where none is given; None: the backend's choice."""
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("expr", metavar="EXPR", help="a mask, a score mod, or a .frisket file")
    p.add_argument("--score", metavar="EXPR", help="a score mod beside the mask")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="bind a scalar")
    p.add_argument("--table", action="append", default=[], metavar="NAME=FILE.npy", help="bind a table")
    p.add_argument("--block", type=tile_size, default=block, metavar="N or QxK", help="tile in tokens")
    return p


def size_options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--q-len", type=positive, metavar="TOKENS")
    p.add_argument("--kv-len", type=positive, metavar="TOKENS", help="default: --q-len")
    p.add_argument("--batch", type=positive, default=1)
    p.add_argument("--heads", type=positive, default=1)
    return p


def add_slice(p: argparse.ArgumentParser) -> None:
    p.add_argument("--b", type=natural, default=0, help="which batch entry (default: %(default)s)")
    p.add_argument("--h", type=natural, default=0, help="which head (default: %(default)s)")


def add_plot(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .html")
    p.add_argument("--b", type=natural, help="one batch entry (default: all that differ)")
    p.add_argument("--h", type=natural, help="one head (default: all that differ)")
    p.add_argument("--dark", action="store_true", help="light on dark")


def add_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--tokens", nargs="+", type=Path, required=True, metavar="FILE", help="read as bytes")
    p.add_argument("--max-tokens", type=positive, default=4096, help="default: %(default)s")
    p.add_argument("--heads", type=positive, default=8, help="default: %(default)s")
    p.add_argument("--head-dim", type=even, default=64, help="default: %(default)s")
    p.add_argument("--framework", choices=["torch", "jax"], help="default: the first one installed")
    p.set_defaults(b=0, h=0)
    p.add_argument("--repeats", type=positive, default=5, help="timed runs of each (default: %(default)s)")


def positive(text: str) -> int:
    n = natural(text)
    if n == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return n


def natural(text: str) -> int:
    if not text.replace("_", "").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


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
    q, _, k = text.replace(",", "x").partition("x")
    return positive(q), positive(k or q)


if __name__ == "__main__":
    sys.exit(main())
