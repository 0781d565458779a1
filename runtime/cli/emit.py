"""`frisket emit EXPR --backend B`: the source text of a kernel; with --report, what it takes of a GPU."""

from __future__ import annotations

import argparse

from rich.console import Console

from frisket.dsl.errors import ParameterError
from frisket.runtime.attention.warm import warm
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import check_name, printed

from .answer import CommandResult, code
from .input import compiled, read_program, shapes
from .options import add_sizes, add_subject, examples, positive
from .report import check_reports, report


def add_emit(p: argparse.ArgumentParser) -> None:
    add_subject(p, block=None)
    add_sizes(p)
    kernel = p.add_argument_group("the kernel")
    kernel.add_argument("--backend", default="cpp", help=f"{', '.join(printed())}; default: %(default)s")
    kernel.add_argument("--kv-heads", type=positive, metavar="N", help="heads of keys; default: --heads")
    kernel.add_argument("--head-dim", type=positive, default=64, metavar="N", help="default: %(default)s")
    kernel.add_argument("--v-dim", type=positive, metavar="N", help="head size of values; default: --head-dim")
    kernel.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16; default: %(default)s")
    kernel.add_argument(
        "--report", action="store_true", help="compile for Triton: registers, spills, shared memory; no GPU is needed"
    )
    kernel.add_argument("--arch", nargs="+", metavar="GPU", help="sm_80, sm_90, sm_100, gfx942; several with --report")
    kernel.add_argument(
        "--build", action="store_true", help="compile the C++ kernels, forward and backward, into the cache on disk"
    )
    kernel.add_argument("--framework", default="torch", choices=("torch", "jax"), help="of --build")
    examples(
        p,
        "frisket emit 'causal & window(256)' --backend triton --dtype bfloat16",
        "frisket emit causal --score 'softcap(50)' --backend cpp",
        "frisket emit causal --backend triton --report --q-len 4 --kv-len 2048",
        "frisket emit 'causal & window(256)' --build --dtype bfloat16",
    )


def emit(args: argparse.Namespace, console: Console) -> CommandResult:
    if args.build:
        return build(args)
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


def build(args: argparse.Namespace) -> CommandResult:
    """A line for each kernel; status 1 where one cannot be compiled."""
    check_name(args.backend)
    if args.backend not in RECORDS or RECORDS[args.backend].ahead is None:
        raise ParameterError(f"--build is about kernels of C++, not {args.backend!r}; write --backend cpp")
    if args.report or args.arch:
        raise ParameterError("--report and --arch are about GPUs, --build about this CPU: leave one or the other out")
    att = compiled(read_program(args), args.block, backend=args.backend)
    made = warm(att, shapes(args), framework=args.framework)
    rows = [row._asdict() for row in made.rows]
    return CommandResult({"backend": args.backend, "kernels": rows}, [str(made)], 0 if made.good else 1)
