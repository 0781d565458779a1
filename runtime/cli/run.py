"""`frisket run FILE|EXPR --tokens FILE...`: the main job, and what it prints.

Attention over files packed into one sequence, timed beside dense attention and checked.

frisket run examples/packed.frisket --tokens README.md docs/*.md CHANGELOG.md
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import Expr, uses
from frisket.lowering import dense
from frisket.lowering.aten.expr import TileProgram
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs, prepare
from frisket.runtime.bench.race import choose, cpu_count, spoken

from .answer import CommandResult, add_subject, even, examples, positive, progress, rows
from .show import compiled, described, laid, picture, read_program, require_bound, scalars, tables

SLAB = 512  # queries the float64 interpreter looks at together: bounds its memory
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
    exprs = prepare(ProgramExprs(program.mask.expr, None if program.score is None else program.score.expr))
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
    """Largest errors against the float64 interpreter: frisket's, and that of its own formula in float32. The rival
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
    longest are cut at their end until the sum fits: dense attention and the oracle grow with its square."""
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
    """The arrays of a framework and what is timed on them: `attention(q, k, v)` beside dense attention under
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
    """The float64 interpreter's attention, piece by piece: ((heads, queries), out [1, 1, queries, dim]); with
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
