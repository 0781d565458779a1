"""`frisket emit EXPR --backend B`: the source text of a kernel; with --report, what it takes of a GPU."""

from __future__ import annotations

import argparse

from rich.console import Console

from frisket.dsl.errors import ParameterError
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import printed

from .answer import CommandResult, code
from .input import compiled, read_program, shapes
from .options import add_sizes, add_subject, examples, positive
from .report import check_reports, report


def add_emit(p: argparse.ArgumentParser) -> None:
    add_subject(p, block=None)
    add_sizes(p)
    kernel = p.add_argument_group("the kernel")
    kernel.add_argument("--backend", required=True, help=", ".join(printed()))
    kernel.add_argument("--kv-heads", type=positive, metavar="N", help="heads of keys; default: --heads")
    kernel.add_argument("--head-dim", type=positive, default=64, metavar="N", help="default: %(default)s")
    kernel.add_argument("--v-dim", type=positive, metavar="N", help="head size of values; default: --head-dim")
    kernel.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16; default: %(default)s")
    kernel.add_argument(
        "--report", action="store_true", help="compile for Triton: registers, spills, shared memory; no GPU is needed"
    )
    kernel.add_argument("--arch", nargs="+", metavar="GPU", help="sm_80, sm_90, sm_100, gfx942; several with --report")
    examples(
        p,
        "frisket emit 'causal & window(256)' --backend triton --head-dim 128 --dtype bfloat16",
        "frisket emit causal --score 'softcap(50)' --backend cpp",
        "frisket emit causal --backend triton --report --q-len 4 --kv-len 2048 --arch sm_90 --dtype float16",
    )


def emit(args: argparse.Namespace, console: Console) -> CommandResult:
    if args.report:
        return report(args, console)
    if args.arch:
        check_reports("--arch", args.backend)
    if args.arch and len(args.arch) > 1:
        raise ParameterError(f"one text is for one GPU: --arch {args.arch[0]}; several go with --report")
    arch = args.arch[0] if args.arch else None
    source = compiled(read_program(args), args.block).source(args.backend, arch=arch, **shapes(args)).rstrip("\n")
    highlight = RECORDS[args.backend].highlight
    return CommandResult({"backend": args.backend, "source": source}, [code(source, highlight, console)])
