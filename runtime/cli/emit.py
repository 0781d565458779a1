"""`frisket emit EXPR --backend B`: the source text of a kernel; with --report, what it takes of a GPU."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import ParameterError
from frisket.lowering.kernels.triton.writer import Dims
from frisket.runtime.attention.warm import warm
from frisket.runtime.backends.base import RECORDS, backends_of, named
from frisket.runtime.backends.registry import check_name, printed
from frisket.runtime.backends.triton import kernels as triton_report
from frisket.runtime.backends.triton.tiles import GPUS

from .answer import BAD, GOOD, CommandResult, add_sizes, add_subject, code, examples, positive, progress, table
from .input import compiled, read_program, shapes


def add_emit(p: argparse.ArgumentParser) -> None:
    add_subject(p, block=None, expand=False)
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
    gpus = ", ".join(GPUS)
    kernel.add_argument("--arch", nargs="+", metavar="GPU", help=f"{gpus}; several with --report")
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
    check_name(args.backend)
    args.backend = named(args.backend, "torch").name
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
    if RECORDS[args.backend].ahead is None:
        raise ParameterError(f"--build is about kernels of C++, not {args.backend!r}; write --backend cpp")
    if args.report or args.arch:
        raise ParameterError("--report and --arch are about GPUs, --build about this CPU: leave one or the other out")
    att = compiled(read_program(args), args.block, backend=args.backend)
    warmed = warm(att, shapes(args), framework=args.framework)
    rows = [row._asdict() for row in warmed.rows]
    return CommandResult({"backend": args.backend, "kernels": rows}, [str(warmed)], 0 if warmed.good else 1)


HEAD = ("kernel", "GPU", "queries x keys", "warps", "stages", "registers", "spills", "shared memory", "MMA")


def check_reports(option: str, backend: str) -> None:
    """Refuse an option about kernels that are compiled ahead of time, for a backend whose kernels are not."""
    record = RECORDS.get(backend)
    if record is None or record.compile_reports is None:
        name = next(b.name for b in backends_of() if b.compile_reports)
        raise ParameterError(f"{option} is about {name.title()} kernels, not {backend!r}; write --backend {name}")


def report(args: argparse.Namespace, console: Console) -> CommandResult:
    """A line for each kernel and architecture; status 1 where one needs more shared memory than there is."""
    check_reports("--report", args.backend)
    reports = RECORDS[args.backend].compile_reports
    assert reports is not None  # checked above
    architectures = args.arch or ["sm_90"]
    for arch in architectures:
        triton_report.check_compiles(arch)
    att, sizes = compiled(read_program(args), args.block), shapes(args)
    stages = {arch: att.stages(backend=args.backend, arch=arch, **sizes) for arch in architectures}
    kernels: list[triton_report.KernelReport] = []
    dims = Dims(args.head_dim, args.v_dim or args.head_dim, args.dtype, args.heads // sizes["kv_heads"])
    with progress(sum(len(re.findall(r"^def attention_", s.source, re.M)) for s in stages.values())) as step:
        for arch, s in stages.items():
            for one in reports(s.source, s.plan, s.target, dims, arch):
                kernels.append(one)
                step("compiling")
    lengths = (sizes[n] for n in ("q_len", "kv_len", "batch", "heads"))
    engines = att.plan(*lengths).engines(args.head_dim, sizes["kv_heads"], args.dtype, device="cuda")
    data = {
        "head_dim": args.head_dim, "dtype": args.dtype, "kernels": [r.as_dict() for r in kernels], "engines": engines,
    }  # fmt: skip
    text = [*table([HEAD, *map(line, kernels)], right=(3, 4, 5, 6, 7, 8)), "", *map(Text, engines.splitlines())]
    return CommandResult(data, text, 0 if all(r.fits for r in kernels) else 1)


def line(r: Any) -> tuple[str | Text, ...]:
    name = r.kernel.removeprefix("attention_")
    tile = str(r.block_q) if name == "delta" else f"{r.block_q} x {r.block_k}"
    tile = "" if name == "combine" or name.endswith("_sums") else tile  # they add up rows
    shared = Text(f"{r.shared:,} of {r.shared_limit:,}" + ("" if r.fits else " TOO MUCH"), GOOD if r.fits else BAD)
    return name, r.arch, tile, *map(str, (r.warps, r.stages, r.registers, r.spills)), shared, str(r.mma)
