"""`frisket plot EXPR -o FILE`: a picture, or a page that answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from frisket.dsl.errors import ParameterError

from .cli_answer import Answer, rows
from .cli_input import laid_out, subject, the_mask
from .cli_options import add_sizes, add_subject, examples, natural
from .cli_show import size, tiles, written
from .draw.plot import SUFFIXES

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
        "frisket plot 'causal & window(64 * (h + 1))' --heads 4 --q-len 1024 -o heads.svg --dark",
        "frisket plot 'causal & window(256)' --q-len 1048576 -o mask.html",
    )


def plot(args: argparse.Namespace, console: Console) -> Answer:
    """Write the picture and say what is in it; with no --b and --h, every different batch entry and head."""
    path: Path = args.output
    if path.suffix.lower() not in (*PAGES, *SUFFIXES):
        raise ParameterError(f"cannot write {path.name!r}: name it .png, .svg or .html")
    mask = the_mask(subject(args), "to draw")
    layout = laid_out(args, mask)
    if path.suffix.lower() not in PAGES:
        layout.plot(path, b=args.b, h=args.h, dark=args.dark, title=args.title or written(mask))
    elif (args.b, args.h, args.title) != (None, None, None) or args.dark:
        raise ParameterError(
            "--b, --h, --dark and --title are for .png and .svg: a page shows every slice, and follows the browser"
        )
    else:
        layout.to_html(path)
    bytes_ = path.stat().st_size
    data = {"file": str(path), "bytes": bytes_, "counts": vars(layout.counts), "exact": layout.exact}
    return Answer(data, rows([("written", f"{path}, {size(bytes_)}"), ("tiles", tiles(layout))]))
