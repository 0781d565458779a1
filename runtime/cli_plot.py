"""`frisket plot EXPR -o FILE`: a picture, or a page that answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from frisket.dsl.errors import ParameterError

from .cli_answer import Answer, rows
from .cli_commands import laid_out
from .cli_input import subject

PAGES = (".html", ".htm")


def plot(args: argparse.Namespace, console: Console) -> Answer:
    """Write the picture and say what is in it; with no --b and --h, every different batch entry and head."""
    what = subject(args)
    if what.mask is None:
        raise ParameterError("a score mod hides nothing, so there are no tiles to draw; give a mask")
    b, h = args.b, args.h
    args.b, args.h = b or 0, h or 0
    layout = laid_out(args, what)
    path: Path = args.output
    if path.suffix.lower() not in PAGES:
        layout.plot(path, b=b, h=h, dark=args.dark)
    elif (b, h) != (None, None) or args.dark:
        raise ParameterError(
            "--b, --h and --dark are for .png and .svg: a page shows every slice, and follows the browser"
        )
    else:
        layout.to_html(path)
    c = layout.counts
    data = {"file": str(path), "bytes": path.stat().st_size, "counts": vars(c), "exact": layout.exact}
    tiles = f"{c.full:,} full, {c.partial:,} partial, {c.empty:,} empty"
    return Answer(data, rows([("written", str(path)), ("tiles", tiles)]))
