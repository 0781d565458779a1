"""`frisket run FILE|EXPR --tokens FILE...`: the main job, and what it prints.

Attention over files packed into one sequence, timed against dense attention and checked.

frisket run examples/packed.frisket --tokens README.md docs/*.md CHANGELOG.md

Below it is `frisket bench [EXPR] --suite cpu|gpu|tpu|layout|compile`: frisket and what is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from frisket.dsl.errors import BackendError, ParameterError, ShapeError
from frisket.dsl.ir import Expr, uses
from frisket.lowering import dense
from frisket.lowering.aten.expr import TileProgram
from frisket.lowering.dtypes import ACCELERATED
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs, prepare
from frisket.runtime.bench import contestants, race, schema
from frisket.runtime.bench.race import Contest, Sizes, Stage, away, choose, cpu_count, lines, losses, spoken, standard
from frisket.runtime.bench.schema import draw, ratios
from frisket.runtime.machine.modules import extras, pip_install

from .answer import CommandResult, Piece, add_subject, even, examples, positive, progress, row, rows, table
from .show import compiled, described, laid, picture, read_program, refuse_weight, require_bound, scalars, tables

SLAB = 512  # queries the float64 reference looks at together: bounds its memory
Array = NDArray[Any]
Rounding = Callable[[Any], Array]


def add_run(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    p.set_defaults(b=0, h=0)
    job = p.add_argument_group("the job")
    tokens = "read as bytes and packed into one sequence; EXPR reads the number of the file as `doc`"
    job.add_argument("--tokens", nargs="+", type=Path, required=True, metavar="FILE", help=tokens)
    job.add_argument("--max-tokens", type=positive, default=4096, metavar="TOKENS", help="default: %(default)s")
    job.add_argument("--heads", type=positive, default=8, metavar="N", help="default: %(default)s")
    job.add_argument("--head-dim", type=even, default=64, metavar="N", help="default: %(default)s")
    job.add_argument("--framework", choices=["torch", "jax"], help="default: the first one installed")
    timed_runs = "timed runs of each; default: %(default)s"
    job.add_argument("--repeats", type=positive, default=5, metavar="N", help=timed_runs)
    examples(
        p,
        "frisket run 'causal & same(doc)' --tokens README.md LICENSE --max-tokens 512",
        "frisket run causal --score 'softcap(50)' --tokens README.md --max-tokens 512",
    )


def run(args: argparse.Namespace, console: Console) -> CommandResult:
    """Pack the files, attend, and report: text, layout, picture, times, errors. Status 1 when the error is more
    than twice that of dense attention in the same dtype (plus 1e-6)."""
    framework = choose(args.framework)
    files = pack(args.tokens, args.max_tokens)
    program = read_program(args, doc=files.doc)
    if program.mask is None:
        raise ShapeError("`run` needs a mask; give one, for example `causal`, and the score mod with --score")
    require_bound(program)
    refuse_weight(program, "run")
    exprs = prepare(program.exprs)
    mask = exprs.mask
    layout = program.mask.layout(len(files), len(files), heads=args.heads, block=args.block)
    job = Job(projections(files.tokens, args.heads, args.head_dim), exprs, scalars(program), tables(program))
    by_head = mask is not None and "h" in uses(mask)  # one mask for all heads takes less memory
    seen = visible(mask, job.scalars, job.tables, args.heads, len(files), by_head)
    bench = prepare_bench(framework, job, seen, compiled(program))

    rivals = [bench.dense, *([bench.builtin] if bench.builtin else [])]
    pieces = args.heads * -(-len(files) // SLAB)
    with progress(args.repeats + 1 + pieces) as step:  # the first round is not counted
        seconds = timed(bench, rivals, args.repeats, step)
        errors = compared(job, bench, step)

    data, lines = described(program)
    layout_data, facts = laid(layout, program.mask)
    where = f"{platform.machine()}, {cpu_count()}"
    data |= {**layout_data, "files": dict(zip(files.names, files.lengths, strict=True)), "tokens": len(files)}
    data |= {"available": files.available, "framework": bench.name, "machine": where, "heads": args.heads}
    data |= {"head_dim": args.head_dim, "repeats": args.repeats}
    data["seconds"] = {"frisket": seconds[0]} | {r.name: s for r, s in zip(rivals, seconds[1:], strict=True)}
    data |= {"ratio": seconds[1] / seconds[0], "error": errors[0], "error_dense": errors[1]}
    good = errors[0] <= 2 * errors[1] + 1e-6
    times = [f"{spoken(s):>8}" for s in seconds]
    table = [f"{times[0]}  frisket"]
    for rival, mine, s in zip(rivals, times[1:], seconds[1:], strict=True):
        table.append(f"{mine}  {rival.name}, {s / seconds[0]:.2f} × as long")
    error = f"{errors[0]:.1e} from the float64 reference at most; dense attention: {errors[1]:.1e}"
    text = rows([("tokens", packing(files, args.max_tokens)), *lines, *facts])
    text += ["", picture(layout, args, console), ""]
    how = f"{bench.name}, float32, {args.heads} heads of {args.head_dim}, {where}"
    medians = "\n".join(table) + f"\nmedians of {args.repeats} run{'s' * (args.repeats > 1)}, interleaved"
    error = error if good else f"{error}\nMISMATCH: more than 2 × that of dense attention + 1e-6"
    text += rows([("run", how), ("time", medians), ("error", error)])
    return CommandResult(data, text, 0 if good else 1)


def packing(files: Packed, limit: int) -> str:
    parts = ", ".join(f"{name} {n:,}" for name, n in zip(files.names, files.lengths, strict=True))
    if files.available > len(files):
        cut = f"{len(files):,} of {files.available:,} bytes, the longest files cut at --max-tokens {limit:,}"
    else:
        cut = f"{len(files):,} bytes"
    return f"{cut}\n{parts}"


def timed(bench: Bench, rivals: list[Rival], repeats: int, step: Any) -> list[float]:
    medians: list[float] = []
    for round_medians in interleaved([bench.ours, *(r.run for r in rivals)], repeats):
        if round_medians is None:
            step("timing")
        else:
            medians = round_medians
    return medians


def compared(job: Job, bench: Bench, step: Any) -> tuple[float, float]:
    """Largest errors from the float64 reference: frisket's, and that of the dense formula in float32. The rival
    that is timed would not do for that: it may add in blocks, and be better than dense attention."""
    ours, worst = bench.numpy(bench.ours()), np.zeros(2)
    plain = oracle(job, rounded=lambda x: np.asarray(x, np.float32))
    for (at, want), (_, plain_out) in zip(oracle(job), plain, strict=True):
        # NaN must not pass: max keeps it, and no comparison with it is true
        worst = np.maximum(worst, [np.abs(got - want).max() for got in (ours[:, *at], plain_out)])
        step("checking")
    return float(worst[0]), float(worst[1])


# -- the job -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Documents in one sequence: `tokens` uint8 [length]; `doc` int32 [length], the number of the document."""

    tokens: NDArray[np.uint8]
    doc: NDArray[np.int32]
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    available: int  # bytes in the files, before the limit

    def __len__(self) -> int:
        return len(self.tokens)


def pack(paths: Sequence[Path], limit: int) -> Packed:
    """Read files as bytes and put them one after the other. Where they have more than `limit` bytes, the
    longest are cut at their end until the sum fits: dense attention and the reference grow with its square."""
    contents = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    # an empty file is no document
    named = [(path.name, data) for path, data in zip(paths, contents, strict=True) if len(data)]
    if not named:
        raise ShapeError("the files are empty; give --tokens at least one byte")
    if limit < len(named):
        raise ShapeError(f"--max-tokens {limit} for {len(named)} files: give at least one token each")
    pieces = [data[:n] for (_, data), n in zip(named, shares([len(d) for _, d in named], limit), strict=True)]
    lengths = tuple(map(len, pieces))
    doc = np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)
    return Packed(np.concatenate(pieces), doc, tuple(n for n, _ in named), lengths, sum(map(len, contents)))


def shares(lengths: Sequence[int], limit: int) -> list[int]:
    """`shares([10, 200, 300], 110) == [10, 50, 50]`: the same cap for everyone, as high as the limit allows."""
    left, out = limit, list(lengths)
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])  # what the shortest leave is for the others
    for rank, i in enumerate(order):
        out[i] = min(lengths[i], left // (len(order) - rank))
        left -= out[i]
    return out


def projections(tokens: NDArray[np.uint8], heads: int, dim: int) -> tuple[Array, Array, Array]:
    """(q, k, v) float32 [1, heads, length, dim]: a fixed-seed embedding of 256 tokens, and RoPE (Su et al.,
    "RoFormer", arXiv:2104.09864) on q and k."""
    table = np.random.default_rng(20260101).standard_normal((3, 256, heads, dim), np.float32)
    q, k, v = (part[tokens].transpose(1, 0, 2)[None] for part in table)
    angle = np.arange(len(tokens))[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def turn(x: Array) -> Array:
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    return turn(q), turn(k), np.ascontiguousarray(v)  # contiguous, as q and k are


# -- frameworks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rival:
    """The framework's own dense attention on the same arrays."""

    name: str
    run: Callable[[], Any]


@dataclass(frozen=True)
class Bench:
    """One framework's arrays, and what is timed on them. `numpy` turns a result into [1, H, S, D]."""

    name: str  # of the framework, with its version
    ours: Callable[[], Any]
    dense: Rival  # with the score mod written out, where there is one
    builtin: Rival | None  # the built-in call, which has no score mod: it does less
    numpy: Callable[[Any], Array]


@dataclass(frozen=True)
class Job:
    """The inputs of one job: numpy arrays [1, heads, length, dim], the bound mask and score mod."""

    arrays: tuple[Array, Array, Array]
    exprs: ProgramExprs
    scalars: dict[str, Any]
    tables: dict[str, Array]

    def environment(self) -> dict[str, Any]:
        q, k, _ = self.arrays
        return {**dense.coordinates(Problem(q.shape[2], k.shape[2], 1, q.shape[1])), **self.scalars}


def prepare_bench(framework: str, job: Job, seen: Array, attention: Callable[..., Any]) -> Bench:
    """The arrays of a framework and what is timed on them: `attention(q, k, v)` and dense attention under
    the mask `seen`, bool [1, 1 or heads, length, length]."""
    return (_torch if framework == "torch" else _jax)(job, seen, attention)


def _torch(job: Job, seen: Array, attention: Callable[..., Any]) -> Bench:
    import torch
    from torch.nn import functional

    q, k, v = (torch.from_numpy(x) for x in job.arrays)
    mask = torch.from_numpy(seen)
    tables = {n: torch.tensor(t) for n, t in job.tables.items()}
    env = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in job.environment().items()}
    program = None if job.exprs.score is None else TileProgram(job.exprs.score, torch.float32)

    def builtin() -> Any:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def written() -> Any:
        s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        s = program({**env, "score": s}, tables) if program else s
        # a query without keys divides 0 by 0
        return functional.softmax(s.masked_fill_(~mask, -torch.inf), dim=-1).nan_to_num_(0.0) @ v

    sdpa = Rival("scaled_dot_product_attention(attn_mask)", builtin)
    with_score = Rival("dense, mask and score mod written out", written)
    rivals: tuple[Rival, Rival | None] = (with_score, sdpa) if program else (sdpa, None)
    return Bench(f"torch {torch.__version__}", lambda: attention(q, k, v), *rivals, lambda x: np.asarray(x))


def _jax(job: Job, seen: Array, attention: Callable[..., Any]) -> Bench:
    import jax
    import jax.numpy as jnp

    q, k, v = (jnp.asarray(x.swapaxes(1, 2)) for x in job.arrays)
    mask = jnp.asarray(seen)
    tables = {n: jnp.asarray(t) for n, t in job.tables.items()}
    score = job.exprs.score

    @jax.jit
    def builtin(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    @jax.jit
    def written(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        env = {n: jnp.asarray(x) for n, x in job.environment().items()}
        if score is not None:
            s = evaluate(score, {**env, "score": s}, tables, int64=False, float64=False)
        p = jax.nn.softmax(jnp.where(mask, s, -jnp.inf), axis=-1, where=mask)
        # the softmax of a query without keys is NaN
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(mask, p, 0), v)

    def ready(fn: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
        return lambda: fn(*arrays).block_until_ready()  # JAX returns before it has computed

    dot = Rival("jax.nn.dot_product_attention(mask)", ready(builtin, q, k, v, mask))
    with_score = Rival("dense, mask and score mod written out", ready(written, q, k, v, mask))
    rivals: tuple[Rival, Rival | None] = (with_score, dot) if score is not None else (dot, None)
    ours = ready(attention, q, k, v)
    return Bench(f"jax {jax.__version__}", ours, *rivals, lambda x: np.asarray(x).swapaxes(1, 2))


# -- measuring ------------------------------------------------------------------------------------


def interleaved(runs: Sequence[Callable[[], Any]], repeats: int) -> Iterator[list[float] | None]:
    """Seconds of each run, one after the other in every round so that a busy machine disturbs all alike.
    Yields None after each round and at last the medians; one round before the first is not counted."""
    times: list[list[float]] = [[] for _ in runs]
    for round in range(repeats + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if round:
                seconds.append(time.perf_counter() - start)
        yield None
    yield [statistics.median(seconds) for seconds in times]


def oracle(job: Job, rounded: Rounding = dense.exactly) -> Iterator[tuple[tuple[slice, slice], Array]]:
    """The attention of the float64 reference, piece by piece: ((heads, queries), out [1, 1, queries, dim]); with
    `rounded` the same formula in another dtype."""
    q, k, v = job.arrays
    heads, length = q.shape[1:3]
    keys, scale = k.shape[2], q.shape[-1] ** -0.5
    for h in range(heads):
        for start in range(0, length, SLAB):
            at = (slice(h, h + 1), slice(start, min(start + SLAB, length)))
            problem = Problem(at[1].stop - start, keys, 1, 1, (0, h, start, 0), (1, heads, length, keys))
            call = dense.DenseCall(job.exprs, scale, job.scalars, job.tables, problem, rounded=rounded)
            yield at, dense.attention(q[:, *at], k[:, at[0]], v[:, at[0]], call)[0]


def visible(mask: Expr | None, params: Any, tables: Any, heads: int, length: int, by_head: bool) -> Array:
    """The dense mask by the interpreter, bool [1, heads or 1, length, length], a slab of queries at a time."""
    h = heads if by_head else 1
    sizes = (1, heads, length, length)
    out = np.ones((1, h, length, length), bool)
    for start in range(0, length if mask is not None else 0, SLAB):
        n = min(SLAB, length - start)
        env = {**dense.coordinates(Problem(n, length, 1, h, (0, 0, start, 0), sizes)), **params}
        assert mask is not None
        out[:, :, start : start + n] = dense.visible(mask, env, tables, (1, h, n, length))
    return out


# -- frisket bench --------------------------------------------------------------------------------------

SUITES = ("cpu", "gpu", "tpu", "layout", "compile")
LENGTHS = {"cpu": 4096, "gpu": 8192, "tpu": 8192, "layout": 4096, "compile": 1024}  # by default
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
    sizes.add_argument("--dtype", choices=ACCELERATED, help="default: float32, on a GPU or TPU bfloat16")
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
    if any(has_device(suite, name) for name in frameworks):
        return ""
    return f"no {suite.upper()} is visible to {' or '.join(frameworks)}; --suite cpu does"


def stages(suite: str, framework: str | None) -> Iterator[Stage]:
    device = suite if suite in ("gpu", "tpu") else "cpu"
    if suite == "layout":
        yield contestants.layout_stage()
        return
    for name in [framework] if framework else race.installed():
        if not has_device(device, name):
            continue
        if name == "torch":
            yield contestants.torch_stage("cuda" if device == "gpu" else device)
        else:
            yield contestants.jax_stage(device)


def has_device(device: str, framework: str) -> bool:
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
    refuse_weight(program, "bench")
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
        part = parts.setdefault(name, {"machine": {**race.described(), **x.machine}, "settings": settings, "rows": {}})
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
