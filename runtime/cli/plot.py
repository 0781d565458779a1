"""`frisket plot EXPR -o FILE`: a picture, or a page that answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from frisket.dsl.errors import ParameterError
from frisket.runtime.draw.plot import SUFFIXES
from frisket.runtime.masks.mask import Program

from .answer import CommandResult, add_sizes, add_subject, examples, natural, rows
from .input import laid_out, read_program, visible_mask
from .show import size, tiles, written

PAGES = (".html", ".htm")


def add_plot(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    add_sizes(p)
    drawn = p.add_argument_group("the picture")
    drawn.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .html")
    drawn.add_argument("--b", type=natural, metavar="N", help="one batch entry; default: all that differ")
    drawn.add_argument("--h", type=natural, metavar="N", help="one head; default: all that differ")
    drawn.add_argument("--dark", action="store_true", help="light on dark")
    drawn.add_argument("--title", metavar="TEXT", help="default: the mask as you write it")
    examples(
        p,
        "frisket plot 'causal & (window(256) | sinks(4))' -o mask.png",
        "frisket plot 'causal & window(64 * (h + 1))' --heads 4 -o heads.svg --dark",
        "frisket plot 'causal & window(256)' --q-len 1048576 -o mask.html",
    )


def plot(args: argparse.Namespace, console: Console) -> CommandResult:
    """Write the picture and say what is in it; with no --b and --h, every different batch entry and head."""
    path: Path = args.output
    if path.suffix.lower() not in (*PAGES, *SUFFIXES):
        raise ParameterError(f"cannot write {path.name!r}: name it .png, .svg or .html")
    program = read_program(args)
    mask = visible_mask(program, "to draw")
    layout = laid_out(args, mask)
    if path.suffix.lower() not in PAGES:
        layout.plot(path, b=args.b, h=args.h, dark=args.dark, title=args.title or titled(program))
    elif (args.b, args.h, args.title) != (None, None, None) or args.dark:
        raise ParameterError(
            "--b, --h, --dark and --title are for .png and .svg: a page shows every slice, and follows the browser"
        )
    else:
        layout.to_html(path)
    bytes_ = path.stat().st_size
    data = {"file": str(path), "bytes": bytes_, "counts": vars(layout.counts), "exact": layout.exact}
    if program.score is not None:
        data["score"] = {"text": str(program.score), "hides": program.hidden_by_score is not None}
    lines = rows([("written", f"{path}, {size(bytes_)}"), ("tiles", tiles(layout)), ("score", scored(program))])
    return CommandResult(data, lines)


def titled(program: Program) -> str:
    """The text of the mask, and of a score mod that hides positions."""
    parts = [] if program.mask is None else [written(program.mask)]
    if program.score is not None and program.hidden_by_score is not None:
        parts.append(f"score = {written(program.score)}")
    return "; ".join(parts)


def scored(program: Program) -> str:
    """A line that says how much of the score mod the picture shows."""
    if program.score is None:
        return ""
    if (hidden := program.hidden_by_score) is None:
        return f"{written(program.score)} hides nothing, so it is not in the picture"
    return f"{written(program.score)} hides positions; the picture shows those where {hidden}"
