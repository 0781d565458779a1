"""`frisket run FILE|EXPR --tokens FILE...`: the main job, and what it prints."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import uses
from frisket.lowering.simplify import prepare
from frisket.runtime.bench import packed
from frisket.runtime.bench.race import spoken

from .answer import CommandResult, add_subject, even, examples, positive, progress, rows
from .doctor import cpu_count
from .input import compiled, read_program, require_bound, scalars, tables
from .show import described, laid, picture


def add_run(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    p.set_defaults(b=0, h=0)
    job = p.add_argument_group("the job")
    job.add_argument(
        "--tokens", nargs="+", type=Path, required=True, metavar="FILE",
        help="read as bytes and packed into one sequence; EXPR reads the number of the file as `doc`",
    )  # fmt: skip
    job.add_argument("--max-tokens", type=positive, default=4096, metavar="TOKENS", help="default: %(default)s")
    job.add_argument("--heads", type=positive, default=8, metavar="N", help="default: %(default)s")
    job.add_argument("--head-dim", type=even, default=64, metavar="N", help="default: %(default)s")
    job.add_argument("--framework", choices=["torch", "jax"], help="default: the first one installed")
    job.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="timed runs of each; default: %(default)s"
    )
    examples(
        p,
        "frisket run 'causal & same(doc)' --tokens README.md LICENSE --max-tokens 512",
        "frisket run causal --score 'softcap(50)' --tokens README.md --max-tokens 512",
    )


def run(args: argparse.Namespace, console: Console) -> CommandResult:
    """Pack the files, attend, and report: text, layout, picture, times, errors. Status 1 when the error is more
    than twice that of dense attention in the same dtype (plus 1e-6)."""
    framework = packed.choose(args.framework)
    files = packed.pack(args.tokens, args.max_tokens)
    program = read_program(args, doc=files.doc)
    if program.mask is None:
        raise ShapeError("`run` needs a mask; give one, for example `causal`, and the score mod with --score")
    require_bound(program)
    mask, score = prepare(program.mask.expr, None if program.score is None else program.score.expr)
    layout = program.mask.layout(len(files), len(files), heads=args.heads, block=args.block)
    arrays = packed.projections(files.tokens, args.heads, args.head_dim)
    job = packed.Job(arrays, mask, score, scalars(program), tables(program))
    by_head = mask is not None and "h" in uses(mask)
    seen = packed.visible(mask, job.scalars, job.tables, args.heads, len(files), by_head)
    bench = packed.prepare(framework, job, seen, compiled(program))

    rivals = [bench.dense, *([bench.builtin] if bench.builtin else [])]
    pieces = args.heads * -(-len(files) // packed.SLAB)
    with progress(args.repeats + 1 + pieces) as step:
        seconds = timed(bench, rivals, args.repeats, step)
        errors = compared(job, bench, step)

    data, lines = described(program)
    layout_data, facts = laid(layout, program.mask)
    where = f"{platform.machine()}, {cpu_count()}"
    data |= layout_data | {
        "files": dict(zip(files.names, files.lengths, strict=True)), "tokens": len(files),
        "available": files.available, "framework": bench.name, "machine": where, "heads": args.heads,
        "head_dim": args.head_dim, "repeats": args.repeats,
        "seconds": {"frisket": seconds[0]} | {r.name: s for r, s in zip(rivals, seconds[1:], strict=True)},
        "ratio": seconds[1] / seconds[0], "error": errors[0], "error_dense": errors[1],
    }  # fmt: skip
    good = errors[0] <= 2 * errors[1] + 1e-6
    times = [f"{spoken(s):>8}" for s in seconds]
    table = [f"{times[0]}  frisket"]
    for rival, mine, s in zip(rivals, times[1:], seconds[1:], strict=True):
        table.append(f"{mine}  {rival.name}, {s / seconds[0]:.2f} × as long")
    error = f"{errors[0]:.1e} from the float64 reference at most; dense attention: {errors[1]:.1e}"
    text = rows([("tokens", packing(files, args.max_tokens)), *lines, *facts])
    text += ["", picture(layout, args, console), ""]
    text += rows([
        ("run", f"{bench.name}, float32, {args.heads} heads of {args.head_dim}, {where}"),
        ("time", "\n".join(table) + f"\nmedians of {args.repeats} run{'s' * (args.repeats > 1)}, interleaved"),
        ("error", error if good else f"{error}\nMISMATCH: more than 2 × that of dense attention + 1e-6"),
    ])  # fmt: skip
    return CommandResult(data, text, 0 if good else 1)


def packing(files: packed.Packed, limit: int) -> str:
    parts = ", ".join(f"{name} {n:,}" for name, n in zip(files.names, files.lengths, strict=True))
    if files.available > len(files):
        cut = f"{len(files):,} of {files.available:,} bytes, the longest files cut at --max-tokens {limit:,}"
    else:
        cut = f"{len(files):,} bytes"
    return f"{cut}\n{parts}"


def timed(bench: packed.Bench, rivals: list[packed.Rival], repeats: int, step: Any) -> list[float]:
    medians: list[float] = []
    for round_medians in packed.interleaved([bench.ours, *(r.run for r in rivals)], repeats):
        if round_medians is None:
            step("timing")
        else:
            medians = round_medians
    return medians


def compared(job: packed.Job, bench: packed.Bench, step: Any) -> tuple[float, float]:
    """Largest errors against the float64 interpreter: frisket's, and that of its own formula in float32. The rival
    that is timed would not do for that: it may add in blocks, and be better than dense attention."""
    ours, worst = bench.numpy(bench.ours()), np.zeros(2)
    what = (job.arrays, job.mask, job.score, job.scalars, job.tables)
    plain = packed.oracle(*what, rounded=lambda x: np.asarray(x, np.float32))
    for (at, want), (_, dense) in zip(packed.oracle(*what), plain, strict=True):
        # NaN must not pass: max keeps it, and no comparison with it is true
        worst = np.maximum(worst, [np.abs(got - want).max() for got in (ours[:, *at], dense)])
        step("checking")
    return float(worst[0]), float(worst[1])
