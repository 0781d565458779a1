"""`frisket tune EXPR --shape SIZES`: a race of tiles on this machine's GPU, whose winners later calls take."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from frisket.runtime.attention.tune import tune as race
from frisket.runtime.attention.warm import SIZES

from .answer import CommandResult, add_subject, examples, positive
from .show import compiled, read_program, require_bound


def shape_of(text: str) -> dict[str, Any]:
    """The sizes of a shape: `q_len=8192,heads=32,head_dim=128,dtype=bfloat16`."""
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not equals or name not in SIZES or not value:
            example = "q_len=8192,heads=32,head_dim=128,dtype=bfloat16"
            raise argparse.ArgumentTypeError(f"{part!r} is no size; there are {', '.join(SIZES)}: --shape {example}")
        sizes[name] = int(value) if value.isdigit() else value
    return sizes


def add_tune(p: argparse.ArgumentParser) -> None:
    add_subject(p, block=None, expand=False, tiles=False)
    group = p.add_argument_group("the race")
    sizes = "sizes of calls, such as q_len=8192,batch=2,heads=32,head_dim=128,dtype=bfloat16; may be repeated"
    group.add_argument("--shape", type=shape_of, action="append", default=[], metavar="SIZES", help=sizes)
    group.add_argument("--no-gradients", action="store_true", help="race the forward alone")
    rounds = "timed runs of each tile; default: %(default)s"
    group.add_argument("--rounds", type=positive, default=20, metavar="N", help=rounds)
    examples(p, "frisket tune 'causal & window(1024)' --shape q_len=8192,heads=32")


def tune(args: argparse.Namespace, console: Console) -> CommandResult:
    """A line for each kernel: the fastest tile, what it gains, and why others were left out."""
    program = read_program(args)
    require_bound(program)
    att = compiled(program)
    report = race(att, *args.shape, gradients=not args.no_gradients, rounds=args.rounds)
    rows = [{**row._asdict(), "left_out": dict(row.left_out)} for row in report.rows]
    return CommandResult({"device": report.device, "files": list(report.files), "kernels": rows}, [str(report)])
