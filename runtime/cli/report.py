"""`frisket emit EXPR --backend triton --report`: what kernels take of GPUs, by compiling them ahead of time."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import ParameterError
from frisket.lowering.kernels.triton.writer import Dims
from frisket.runtime.backends.base import RECORDS, backends_of
from frisket.runtime.backends.triton import report as triton_report

from .answer import BAD, GOOD, CommandResult, table
from .input import compiled, read_program, shapes
from .progress import progress

HEAD = ("kernel", "GPU", "queries x keys", "warps", "stages", "registers", "spills", "shared memory", "MMA")


def check_reports(option: str, backend: str) -> None:
    """Refuse an option about kernels that are compiled ahead of time, for a backend whose kernels are not."""
    found = RECORDS.get(backend)
    if found is None or found.reports is None:
        name = next(b.name for b in backends_of() if b.reports)
        raise ParameterError(f"{option} is about {name.title()} kernels, not {backend!r}; write --backend {name}")


def report(args: argparse.Namespace, console: Console) -> CommandResult:
    """A line for each kernel and architecture; status 1 where one needs more shared memory than there is."""
    check_reports("--report", args.backend)
    reports = RECORDS[args.backend].reports
    assert reports is not None  # checked above
    architectures = args.arch or ["sm_90"]
    for arch in architectures:
        triton_report.check_compiles(arch)
    att, sizes = compiled(read_program(args), args.block), shapes(args)
    stages = {arch: att.stages(backend=args.backend, arch=arch, **sizes) for arch in architectures}
    found: list[triton_report.KernelReport] = []
    dims = Dims(args.head_dim, args.v_dim or args.head_dim, args.dtype, args.heads // sizes["kv_heads"])
    with progress(sum(len(re.findall(r"^def attention_", s.source, re.M)) for s in stages.values())) as step:
        for arch, s in stages.items():
            for one in reports(s.source, s.plan, s.target, dims, arch):
                found.append(one)
                step("compiling")
    lengths = (sizes[n] for n in ("q_len", "kv_len", "batch", "heads"))
    said = att.plan(*lengths).engines(args.head_dim, sizes["kv_heads"], args.dtype, device="cuda")
    data = {
        "head_dim": args.head_dim, "dtype": args.dtype, "kernels": [r.as_dict() for r in found], "engines": said,
    }  # fmt: skip
    text = [*table([HEAD, *map(line, found)], right=(3, 4, 5, 6, 7, 8)), "", *map(Text, said.splitlines())]
    return CommandResult(data, text, 0 if all(r.fits for r in found) else 1)


def line(r: Any) -> tuple[str | Text, ...]:
    name = r.kernel.removeprefix("attention_")
    tile = str(r.block_q) if name == "delta" else f"{r.block_q} x {r.block_k}"
    tile = "" if name == "combine" or name.endswith("_sums") else tile  # they add up rows
    shared = Text(f"{r.shared:,} of {r.shared_limit:,}" + ("" if r.fits else " TOO MUCH"), GOOD if r.fits else BAD)
    return name, r.arch, tile, *map(str, (r.warps, r.stages, r.registers, r.spills)), shared, str(r.mma)
