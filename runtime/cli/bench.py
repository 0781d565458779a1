"""`frisket bench [EXPR] --suite cpu|gpu|tpu|layout|compile`: frisket beside what is installed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from frisket.dsl.errors import BackendError, ParameterError, ShapeError
from frisket.runtime.bench import contestants, race, schema
from frisket.runtime.bench.race import Contest, Sizes, Stage, away, described, lines, losses, spoken, standard
from frisket.runtime.bench.schema import draw, ratios
from frisket.runtime.machine.modules import extras, pip_install

from .answer import CommandResult, Piece, examples, positive, row, table
from .show import read_program, require_bound

SUITES = ("cpu", "gpu", "tpu", "layout", "compile")
LENGTHS = {"cpu": 4096, "gpu": 8192, "tpu": 8192, "layout": 4096, "compile": 1024}  # where nobody says
QUICK = 1024
LONG = 1 << 20  # of ours in the layout suite, where peers are not asked
FAMILIES = ("sdpa", "flex", "flash", "jax", "splash")
UNREAD = {  # options that would change nothing in a suite
    "layout": ("backward", "framework", "kv_heads", "head_dim", "dtype"),
    "compile": ("kv_len", "rounds"),
}


def add_bench(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("what")
    group.add_argument("expr", metavar="EXPR", nargs="?", help="a mask or a .frisket file; default: several masks")
    group.add_argument("--score", metavar="EXPR", help="a score mod, in addition to the mask")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="bind a scalar: --set w=256")
    group.add_argument("--table", action="append", default=[], metavar="NAME=FILE", help="bind a table: doc=doc.npy")
    suites = "attention on the CPU, a GPU or a TPU; layouts; first calls and compilation; default: %(default)s"
    group.add_argument("--suite", choices=SUITES, default="cpu", help=suites)
    group.add_argument("--backward", action="store_true", help="the forward and the gradients of q, k and v together")
    group.add_argument("--framework", choices=["torch", "jax"], help="default: all that are installed")
    peers = f"who is raced against: {', '.join(FAMILIES)}, or none; default: all"
    group.add_argument("--peers", metavar="NAME,...", help=peers)
    sizes = p.add_argument_group("sizes")
    lengths = ", ".join(f"{n:,} ({suite})" for suite, n in LENGTHS.items())
    sizes.add_argument("--q-len", type=positive, metavar="TOKENS", help=f"queries; default: {lengths}")
    sizes.add_argument("--kv-len", type=positive, metavar="TOKENS", help="keys; default: as many as queries")
    sizes.add_argument("--batch", type=positive, default=1, metavar="N", help="default: %(default)s")
    sizes.add_argument("--heads", type=positive, metavar="N", help="of queries; default: 8, of layouts 1")
    sizes.add_argument("--kv-heads", type=positive, metavar="N", help="default: --heads")
    sizes.add_argument("--head-dim", type=positive, metavar="N", help="default: 64, on a GPU or TPU 128")
    dtypes = ["float32", "float16", "bfloat16"]
    sizes.add_argument("--dtype", choices=dtypes, help="default: float32, on a GPU or TPU bfloat16")
    sizes.add_argument("--rounds", type=positive, metavar="N", help="timed calls of each; default: 9")
    sizes.add_argument("--quick", action="store_true", help=f"{QUICK:,} tokens, 3 rounds")
    out = p.add_argument_group("output")
    out.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="results, with the machine named")
    out.add_argument("--chart", type=Path, metavar="FILE.png", help="a picture of the ratios, .png or .svg")
    examples(
        p,
        "frisket bench 'causal & window(64)' --q-len 256 --rounds 3 --peers sdpa",
        "frisket bench 'causal & window(w)' --set w=100 --suite layout --q-len 1024",
    )


def bench(args: argparse.Namespace, console: Console) -> CommandResult:
    """Time contestants whose results agree, in turns. Status 1 where a result of frisket's is wrong."""
    for name in UNREAD.get(args.suite, ()):
        if getattr(args, name):
            raise ParameterError(f"--suite {args.suite} does not read --{name.replace('_', '-')}; leave it out")
    if args.suite != "layout":  # layouts need no framework
        race.choose(args.framework)
    if args.suite in ("gpu", "tpu") and (why := absent(args.suite, args.framework)):
        raise BackendError(f"the {args.suite} suite does not run here: {why}")
    for path, suffixes in ((args.output, (".json",)), (args.chart, (".png", ".svg"))):
        if path is not None and path.suffix.lower() not in suffixes:
            raise ParameterError(f"cannot write {path.name!r}: name it {' or '.join(suffixes)}")
        if path is not None and not path.parent.is_dir():
            raise ParameterError(f"cannot write {path}: there is no folder {path.parent}")
    if args.chart is not None:
        with extras():  # said before minutes of measuring, not after
            import matplotlib  # noqa: F401
    sizes, rounds, families = sizes_of(args), args.rounds or (3 if args.quick else 9), families_of(args)
    steps = firsts(args, sizes, families) if args.suite == "compile" else races(args, sizes, rounds, families)
    runs = followed(steps)
    result = results(args.suite, runs, sizes, 1 if args.suite == "compile" else rounds)
    bad = ("wrong", "failed")
    wrong = [f"{x.contest.name}: {n}" for x in runs for n in x.ours if x.out.get(n, "").startswith(bad)]
    columns = console.width if sys.stdout.isatty() else None  # only a terminal has a width to fit into
    text = [*lines_of(runs, columns), *closing(args, runs, result, wrong)]
    if files := written(args, result):
        text.append(row("written", ", ".join(files)))
    return CommandResult(result, text, 1 if wrong else 0)


def written(args: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """The files that were asked for."""
    files = []
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        files.append(str(args.output))
    if args.chart is not None:
        if rows := ratios(result["parts"]):
            draw(rows, args.chart, title=f"frisket bench --suite {args.suite}")
        files.append(str(args.chart) if rows else "no chart: no other library was timed")
    return files


# -- what is raced ----------------------------------------------------------------------------------------


def sizes_of(args: argparse.Namespace) -> Sizes:
    device = args.suite in ("gpu", "tpu")
    q_len = args.q_len or (QUICK if args.quick else LENGTHS[args.suite])
    heads = args.heads or (1 if args.suite == "layout" else 8)
    kv_heads = args.kv_heads or heads
    if heads % kv_heads:
        raise ShapeError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}; key heads are shared evenly")
    dim, dtype = args.head_dim or (128 if device else 64), args.dtype or ("bfloat16" if device else "float32")
    return Sizes(q_len, args.kv_len or q_len, args.batch, heads, kv_heads, dim, dtype, args.backward)


def families_of(args: argparse.Namespace) -> set[str] | None:
    if args.peers is None:
        return None
    named = {x.strip() for x in args.peers.split(",")} - {"none", ""}
    if unknown := sorted(named - set(FAMILIES)):
        raise ParameterError(f"--peers: there is no {unknown[0]!r}; there are {', '.join(FAMILIES)}, and none")
    return named


def absent(suite: str, framework: str | None) -> str:
    """A reason why a suite has no such device here; empty where it has one."""
    frameworks = [framework] if framework else race.installed()
    if any(visible(suite, name) for name in frameworks):
        return ""
    return f"no {suite.upper()} is visible to {' or '.join(frameworks)}; --suite cpu does"


def stages(suite: str, framework: str | None) -> Iterator[Stage]:
    device = suite if suite in ("gpu", "tpu") else "cpu"
    if suite == "layout":
        yield contestants.layout_stage()
        return
    for name in [framework] if framework else race.installed():
        if not visible(device, name):
            continue
        if name == "torch":
            yield contestants.torch_stage("cuda" if device == "gpu" else device)
        else:
            yield contestants.jax_stage(device)


def visible(device: str, framework: str) -> bool:
    if device == "cpu":
        return True
    if framework == "torch":
        import torch

        return device == "gpu" and torch.cuda.is_available()
    import jax

    try:
        return bool(jax.devices(device))
    except RuntimeError:  # JAX has no such platform
        return False


def contests(args: argparse.Namespace, sizes: Sizes) -> list[Contest]:
    """The user's, or several."""
    if args.expr is None:
        return standard(sizes)
    program = read_program(args)
    require_bound(program)
    if program.mask is not None:
        program.mask.check_tables(sizes.q_len, sizes.kv_len, sizes.batch, sizes.heads)
    name = " ".join(str(args.expr).split()) + (f", {args.score}" if args.score else "")
    return [Contest(name, program.mask, program.score, sizes)]


def races(args: argparse.Namespace, sizes: Sizes, rounds: int, families: set[str] | None) -> Iterator[Any]:
    raced = contests(args, sizes)
    if args.suite == "layout":
        raced = [c for c in raced if args.expr or c.score is None]  # a score mod has no tiles
        if args.expr is None and args.q_len is None and not args.quick:
            longest = replace(sizes, q_len=LONG, kv_len=LONG)
            more = [c for c in standard(longest) if c.score is None]
            raced = [replace(c, name=f"{c.name}, {c.sizes.q_len:,} tokens") for c in [*raced, *more]]
    for stage in stages(args.suite, args.framework):
        for contest in raced:
            yield from race.run(contest, stage, rounds, families)


def firsts(args: argparse.Namespace, sizes: Sizes, families: set[str] | None) -> Iterator[Any]:
    n = sizes.q_len
    lengths = [n, *(x for x in (n // 2, 3 * n // 4, n // 4) if x)]
    each = [contests(args, replace(sizes, q_len=x, kv_len=x)) for x in lengths]
    for stage in stages(args.suite, args.framework):
        for at in range(len(each[0]) if args.expr else 2):  # a mask of numbers alone, and a window
            yield from contestants.first_calls([x[at] for x in each], stage, "cpu", families)


# -- what is shown ----------------------------------------------------------------------------------------


def followed(steps: Iterator[Any]) -> list[Any]:
    """The results of all races; on a terminal they are watched as they go, on stderr."""
    err = Console(stderr=True, highlight=False, markup=False, emoji=False)  # stdout is for the results
    watched = sys.stderr.isatty() and not err.is_dumb_terminal
    runs: list[Any] = []
    with ExitStack() as stack:
        screen = stack.enter_context(Live(console=err, transient=True, auto_refresh=False)) if watched else None
        for x in steps:
            if not runs or runs[-1] is not x:  # a race comes again at each of its steps
                runs.append(x)
            if screen is not None:
                screen.update(Group(*lines_of([x], err.width)), refresh=True)
    return runs


def lines_of(runs: list[Any], columns: int | None) -> list[Any]:
    if all(isinstance(x, race.Race) for x in runs):
        return list(lines(runs, columns))
    return [piece for x in runs for piece in first_lines(x, columns)]


def first_lines(record: Any, columns: int | None) -> list[Piece]:
    """A table of first calls."""
    head = ("", "cold", "from disk", "new length", f"compiled for {len(record.lengths) - 1} more")
    body: list[list[str]] = []
    for n in record.cold:
        times = record.cold[n], max(record.disk[n], 0), max(record.other.get(n, 0), 0)
        body.append([f"  {n}", *map(spoken, times), str(record.compilations.get(n, ""))])
    at = ", ".join(f"{x:,}" for x in record.lengths)
    out: list[Piece] = [Text(f"{record.contest.name}, {record.stage}, {at} tokens", "bold")]
    out += table([head, *body], right=(1, 2, 3, 4)) if body else []
    out += [line for n, why in record.out.items() for line in away(n, why, len(n), columns)]
    return [*out, Text(f"  {record.doing} ..." if record.doing else "", "dim")]


def results(suite: str, races: list[Any], sizes: Sizes, rounds: int) -> dict[str, Any]:
    """The results in the form of bench/schema.py: a part for each framework."""
    parts: dict[str, Any] = {}
    for x in races:
        name = suite if x.stage == suite else f"{suite}, {x.stage}"
        settings = {**sizes.settings(), "rounds": rounds}
        part = parts.setdefault(name, {"machine": {**described(), **x.machine}, "settings": settings, "rows": {}})
        part["rows"][x.contest.name] = x.row()
    result = {"schema": schema.VERSION, "parts": parts}
    schema.check(result)  # a file that the schema refuses is not written
    return result


def closing(args: argparse.Namespace, races: list[Any], result: dict[str, Any], wrong: list[str]) -> list[Piece]:
    """The machine, the sizes, what was lost."""
    part = next(iter(result["parts"].values()))
    machine, s = part["machine"], part["settings"]
    versions = ", ".join(f"{n} {machine[n]}" for n in ("torch", "jax", "triton") if n in machine)
    heads = f"{s['heads']} head{'s' * (s['heads'] > 1)}"
    shape = f"{s['q_len']:,} × {s['kv_len']:,} tokens, batch {s['batch']}, {heads}"
    shape += "" if s["kv_heads"] == s["heads"] else f" over {s['kv_heads']}"
    shape += "" if args.suite == "layout" else f" of {s['head_dim']}, {s['dtype']}, {s['direction']}"
    if args.suite != "compile":
        shape += f"; medians of {s['rounds']} round{'s' * (s['rounds'] > 1)}, interleaved"
    where = f"{machine['cpu']}, {machine['cores']} cores; {versions}"
    out: list[Piece] = [Text(), row("sizes", shape), row("machine", where)]
    if absent := absentees(args.suite, args.framework):
        out.append(row("not here", "\n".join(absent)))
    lost = losses([x for x in races if isinstance(x, race.Race)])
    if lost:
        out.append(row("slower", "\n".join(lost)))
    if wrong:
        out.append(row("WRONG", "\n".join(wrong)))
    return out


def absentees(suite: str, framework: str | None) -> list[str]:
    """Whom a reader might look for, and why they are not in the table."""
    present = race.installed()
    absences = [f"{x}: not installed; {pip_install(x)}" for x in ("torch", "jax") if x not in present]
    if suite == "cpu":
        absences.append("FlashAttention, cuDNN: --suite gpu; splash attention: --suite tpu")
    return absences if framework is None else []
