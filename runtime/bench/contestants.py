"""Contestants in torch, on the CPU or a GPU: frisket's backends, SDPA, flex_attention, FlashAttention.

Contestants in JAX, on the CPU, a GPU or a TPU: frisket's backends, `dot_product_attention`, splash attention.

Layouts compared with those of others: torch's `create_block_mask`, splash attention's `process_mask`.

First calls: cold, with what was compiled on disk, and at other lengths. Each contestant in separate processes. A
process runs `python -m frisket.runtime.bench.contestants JOB`, the cost of one first call. JOB is a pickle of a
contestant's name, a stage and contests of other lengths. It prints one JSON object: the seconds of a second call,
and of the first beyond it. For each other length it has the seconds and compilations of a first call.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from frisket.dsl.errors import FrisketError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import SCORE, SIZES, Expr, free_names, lit, param, substitute, uses, var
from frisket.lowering import dense
from frisket.lowering.analysis.tiles import EMPTY
from frisket.lowering.dtypes import HALVES
from frisket.lowering.kernels.torch_mask_mod import score_mod
from frisket.lowering.plan import Problem, needs_int64
from frisket.lowering.simplify import simplify
from frisket.runtime.attention.entry import compile
from frisket.runtime.backends.base import ranked
from frisket.runtime.backends.registry import library, reason
from frisket.runtime.export.tile_lists import mask_mod_of
from frisket.runtime.machine.modules import load_source
from frisket.runtime.masks.mask import Mask

from .race import Array, Call, Contest, Contestant, ContestResult, NoWordsError, Stage, failure_text, seconds

BIASES = 1 << 31  # bytes of a bias for every pair


def torch_stage(device: str, lengths: bool = False) -> Stage:
    """`device` is "cpu" or "cuda". `lengths`: the same contestants meet several lengths, so that flex_attention is
    compiled with torch's defaults; else for these shapes alone, which is faster."""
    import torch

    tiers = [b.name for b in ranked("torch", device)] + ([library("torch")] if device == "cpu" else [])
    contestants = [Contestant(f"frisket {b}", partial(_ours, b, device), True, reason(b, "torch")) for b in tiers]
    contestants += [
        Contestant("SDPA is_causal", partial(_is_causal, device), family="sdpa"),
        Contestant("SDPA with a mask", partial(_masked, device), family="sdpa"),
        Contestant("flex_attention, compiled", partial(_flex, device, lengths), family="flex"),
    ]
    if device == "cuda":
        contestants.insert(-2, Contestant("SDPA cuDNN is_causal", partial(_cudnn, device), family="sdpa"))
        missing = "" if importlib.util.find_spec("flash_attn") else "flash_attn is not installed"
        contestants.append(Contestant("FlashAttention", partial(_flash, device), missing=missing, family="flash"))
    properties = torch.cuda.get_device_properties(0) if device == "cuda" else None
    machine = {} if properties is None else {"gpu": properties.name, "cuda": torch.version.cuda}
    clock = seconds if device == "cpu" else on_device
    # numpy has no bfloat16
    return Stage("torch", tuple(contestants), lambda x: x.detach().float().cpu().numpy(), clock, machine=machine)


def on_device(call: Call) -> float:
    """Seconds of a call on the GPU: some in a row, the host ahead of all of them."""
    import torch

    many = 5
    cuda: Any = torch.cuda
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()  # earlier work is not counted
    cuda._sleep(5_000_000)  # cycles, some milliseconds
    start.record()
    for _ in range(many):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / many


def _call(contest: Contest, device: str, attend: Callable[..., Any], swap: bool = False) -> Call:
    """`attend(q, k, v)` on the contest's arrays, and wanted gradients. `swap`: arrays [batch, length, heads, dim]."""
    import torch

    s = contest.sizes
    *arrays, cotangent = (torch.from_numpy(x).to(device, getattr(torch, s.dtype)) for x in s.drawn())
    if swap:
        # copied beforehand, which is no part of a call
        arrays, cotangent = [x.transpose(1, 2).contiguous() for x in arrays], cotangent.transpose(1, 2).contiguous()

    def turned(xs: Any) -> Any:
        return tuple(x.transpose(1, 2) for x in xs) if swap else xs

    def forward() -> Any:
        with torch.no_grad():  # nothing is stored for a backward
            out = attend(*arrays)
        return turned((out,))[0]

    def both() -> Any:
        return turned(torch.autograd.grad(attend(*arrays), arrays, cotangent))

    if not s.backward:
        return forward
    arrays = [x.requires_grad_() for x in arrays]
    return both


def _ours(tier: str, device: str, contest: Contest) -> Call:
    return _call(contest, device, compile(contest.program, backend=tier))


# -- SDPA -------------------------------------------------------------------------------------------------


def _is_causal(device: str, contest: Contest) -> Call:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    _plain(contest, "SDPA")
    causal = not contest.everything
    if causal and contest.window() != 0:
        raise NoWordsError("it takes plain causal masks alone, of as many queries as keys")
    s = contest.sizes
    return _call(contest, device, partial(sdpa, is_causal=causal, enable_gqa=s.heads != s.kv_heads))


def _cudnn(device: str, contest: Contest) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = _is_causal(device, contest)

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return run


def _masked(device: str, contest: Contest) -> Call:
    """A bool for every pair by the interpreter; where a score mod only adds something, that in the array's dtype."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    s = contest.sizes
    seen: Any = torch.from_numpy(contest.dense()).to(device)
    if contest.score is not None:
        bias = torch.from_numpy(bias_of(contest, "SDPA").copy()).to(device, getattr(torch, s.dtype))
        seen = bias.masked_fill(~seen, -math.inf)
    return _call(contest, device, partial(sdpa, attn_mask=seen, enable_gqa=s.heads != s.kv_heads))


def _plain(contest: Contest, who: str) -> None:
    if contest.score is not None:
        raise NoWordsError(f"{who} has no word for a score mod")


def bias_of(contest: Contest, who: str) -> Array:
    """The bias that equals the score mod, float32 [1 or batch, 1 or heads, q_len, kv_len]."""
    s = contest.sizes
    e, tables = _bound(contest)
    # the score may be on either side of the sum
    added = next((x for x, y in (e.args, e.args[::-1]) if y is SCORE), None) if e.op == "add" else None
    if added is None or "score" in uses(added):
        raise NoWordsError(f"{who} adds a bias to the score: it has no word for other score mods")
    # a bias that reads neither b nor h is broadcast, in less memory
    batch, heads = (n if name in uses(added) else 1 for name, n in (("b", s.batch), ("h", s.heads)))
    if 8 * batch * heads * s.q_len * s.kv_len > BIASES:  # 8 bytes of a pair, as it is evaluated in float64
        raise NoWordsError(f"a bias for every pair of {heads} heads is more than {BIASES >> 30} GiB")
    env = dense.coordinates(Problem(s.q_len, s.kv_len, batch, heads, sizes=s.problem))
    bias = np.asarray(evaluate(added, env, tables), np.float32)
    return np.ascontiguousarray(np.broadcast_to(bias, (batch, heads, s.q_len, s.kv_len)))


# -- flex_attention ---------------------------------------------------------------------------------------


def torchs(function: Any) -> Any:
    """A function of torch's flex_attention, unless frisket stands in its place."""
    if function.__module__.startswith("frisket."):
        raise NoWordsError("frisket.flex.install() has replaced it: call undo() to compare")
    return function


def _flex(device: str, lengths: bool, contest: Contest) -> Call:
    """A call of torch's flex_attention with our block mask, made beforehand, and our mask_mod and score_mod."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    s = contest.sizes
    if device == "cpu" and s.backward:
        raise NoWordsError("flex_attention has no backward on the CPU")
    if not lengths:
        torch._dynamo.reset()  # it gives up after eight masks otherwise
    layout = None if contest.mask is None else contest.mask.layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
    compiled = torch.compile(torchs(flex_attention), dynamic=None if lengths else False)
    how = {"score_mod": flex_score_mod(contest, device), "enable_gqa": s.heads != s.kv_heads}
    how["block_mask"] = None if layout is None else layout.to_block_mask(device)
    return _call(contest, device, partial(compiled, **how))


def flex_score_mod(contest: Contest, device: str) -> Any:
    """The score mod as flex_attention takes it, its tables on `device`; None where there is none."""
    import torch

    if contest.score is None:
        return None
    e, tables = _bound(contest)
    reach = dict(zip("bhqk", contest.sizes.problem, strict=True))
    arrays = {n: np.asarray(tables[n]) for n in free_names(e)[1]}
    arrays = {n: x.astype(np.float32) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    largest = {n: float(np.abs(x).max()) for n, x in arrays.items() if x.dtype.kind == "i"}
    try:
        wide, of = needs_int64([e], {**reach, **largest}), {n: x.shape for n, x in arrays.items()}
        source = score_mod(e, of, reach=reach, int64=wide, title=str(contest.score))
    except (FrisketError, KeyError) as error:
        raise NoWordsError(f"torch has no word for it: {error}") from None
    tensors = (torch.from_numpy(x.copy()).to(device) for x in arrays.values())
    return load_source(source, importable=True, torch=torch, math=math)["make"](*tensors)


def _bound(contest: Contest) -> tuple[Expr, Any]:
    """The score mod with sizes and scalars written in, and its tables."""
    assert contest.score is not None
    values: dict[Expr, Expr] = {var(n): lit(int(x)) for n, x in zip(SIZES, contest.sizes.problem, strict=True)}
    scalars = free_names(contest.score.expr)[0]
    values |= {param(n, t): lit(contest.score.scalars[n]) for n, t in scalars.items()}
    return simplify(substitute(contest.score.expr, values)), contest.score.tables


# -- FlashAttention ---------------------------------------------------------------------------------------


def _flash(device: str, contest: Contest) -> Call:
    """Causal masks and windows; for 16 bits on GPUs."""
    from flash_attn import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    _plain(contest, "FlashAttention")
    if contest.sizes.dtype not in HALVES:
        raise NoWordsError(f"FlashAttention computes in 16 bits, not in {contest.sizes.dtype}")
    window = contest.window()
    if window is None and not contest.everything:
        raise NoWordsError("flash_attn_func has words for causal masks and causal windows")
    inside = {"window_size": (window - 1, 0)} if window else {}  # window_size does not count the key of the query
    return _call(contest, device, partial(flash_attn_func, causal=not contest.everything, **inside), swap=True)


REST = 0.1  # arrays of every pair go back to the system after an answer: 60 ms that count for no contestant


def jax_stage(device: str) -> Stage:
    """`device` is "cpu", "gpu" or "tpu"."""
    import jax

    # backends have torch's names of platforms
    ours = [b.name for b in ranked("jax", "cuda" if device == "gpu" else device)]
    ours += [library("jax")] if device == "cpu" else []
    contestants = [Contestant(f"frisket {b}", partial(_jax_ours, b, device), True, reason(b, "jax")) for b in ours]
    contestants.append(Contestant("jax.nn.dot_product_attention", partial(_attention, None, device), family="jax"))
    if device == "gpu":
        contestants.append(Contestant("the same by cuDNN", partial(_attention, "cudnn", device), family="jax"))
    if device == "tpu":
        contestants.append(Contestant("splash attention", partial(splash, device, False), family="splash"))
    kind = jax.devices(device)[0].device_kind
    clock, rest, machine = (seconds, REST, {}) if device == "cpu" else (in_a_row, 0.0, {device: kind})
    return Stage("jax", tuple(contestants), lambda x: np.asarray(x, np.float32), clock, rest=rest, machine=machine)


def in_a_row(call: Call) -> float:
    """Seconds of a call on a device: some of them enqueued, the host ahead of all but the first."""
    many = 5
    _ready(call())  # nothing of an earlier call is in the queue

    def run() -> None:
        for _ in range(many):
            last = call.enqueue()  # type: ignore[attr-defined]
        _ready(last)

    return seconds(run) / many


def _ready(result: Any) -> Any:
    """When it is there."""
    import jax

    return jax.block_until_ready(result)  # type: ignore[no-untyped-call]


class Jitted:
    """A jitted function on a device's arrays, [batch, length, heads, dim] inside, [batch, heads, length, dim] out."""

    def __init__(self, attend: Callable[..., Any], contest: Contest, device: str) -> None:
        import jax
        import jax.numpy as jnp

        s = contest.sizes
        where = jax.devices(device)[0]
        *arrays, cotangent = (jax.device_put(jnp.asarray(x.swapaxes(1, 2), s.dtype), where) for x in s.drawn())

        def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            return jax.vjp(attend, q, k, v)[1](cotangent)

        self.arguments = [*arrays, cotangent] if s.backward else arrays
        self.function = jax.jit(both if s.backward else attend)

    def enqueue(self) -> Any:
        return self.function(*self.arguments)

    def __call__(self) -> Any:
        result = _ready(self.enqueue())
        return tuple(x.swapaxes(1, 2) for x in result) if isinstance(result, tuple) else result.swapaxes(1, 2)


def _jax_ours(backend: str, device: str, contest: Contest) -> Call:
    return Jitted(compile(contest.program, backend=backend), contest, device)


def _attention(implementation: str | None, device: str, contest: Contest) -> Call:
    import jax
    import jax.numpy as jnp

    more: dict[str, Any] = {}
    if contest.score is not None:
        more["bias"] = jnp.asarray(bias_of(contest, "dot_product_attention"), contest.sizes.dtype)
    window = contest.window()
    if window is not None:
        more |= {"is_causal": True} | ({"local_window_size": (window - 1, 0)} if window else {})
    elif not contest.everything:
        more["mask"] = jnp.asarray(contest.dense())
    return Jitted(partial(jax.nn.dot_product_attention, implementation=implementation, **more), contest, device)


def splash_mask(contest: Contest) -> Any:
    """Splash attention's own class of mask where it has one, else a bool for every pair."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    s, window = contest.sizes, contest.window()
    shape = (s.q_len, s.kv_len)
    if window is not None:
        one: Any = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
        return masks.MultiHeadMask([one] * s.heads)
    dense = contest.dense()
    if dense.shape[0] > 1:
        raise NoWordsError("splash attention has one mask for all batch entries")
    # one mask for all heads, or one for each
    return masks.MultiHeadMask([masks.NumpyMask(dense[0, min(h, dense.shape[1] - 1)]) for h in range(s.heads)])


def splash(device: str, interpret: bool, contest: Contest) -> Call:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    s = contest.sizes
    if contest.score is not None:
        raise NoWordsError("splash attention has no word for a score mod")
    make = kernels.make_splash_mha if s.heads == s.kv_heads else kernels.make_splash_mqa
    if s.heads != s.kv_heads and s.kv_heads != 1:
        raise NoWordsError("splash attention takes one key head, or as many as query heads")
    kernel = make(mask=splash_mask(contest), head_shards=1, q_seq_shards=1, interpret=interpret)
    scale = s.head_dim**-0.5

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q * scale, k, v))  # it scales nothing
        if s.kv_heads == 1 != s.heads:  # make_splash_mqa takes keys without an axis of heads
            k, v = k[:, 0], v[:, 0]
        return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)

    return Jitted(attend, contest, device)


# -- layouts ---------------------------------------------------------------------------------------------

TILE = 128
PAIRS = 1 << 26  # looked at to know which tiles are read
MOST = {"create_block_mask": 8192, "process_mask": 16384}  # tokens: both look at every pair, and take minutes beyond


def layout_stage() -> Stage:
    """Calls return which tiles are read, bool [1, heads or 1, rows, columns]."""
    torch, jax = (f"{x} is not installed" if not importlib.util.find_spec(x) else "" for x in ("torch", "jax"))
    contestants = (
        Contestant("frisket", _our_layout, ours=True),
        Contestant("create_block_mask", _create_block_mask, missing=torch, family="flex"),
        Contestant("splash process_mask", _process_mask, missing=jax, family="splash"),
    )
    return Stage("layout", contestants, lambda read: read(), seconds, _tiles_read)


def _tiles_read(contest: Contest) -> Iterator[tuple[slice, Array]]:
    """The tiles that are read, found by looking at every pair, where pairs are few enough."""
    s = contest.sizes
    if s.q_len * s.kv_len > PAIRS:
        return
    seen = contest.dense()
    tiles = np.zeros((*seen.shape[:2], -(-s.q_len // TILE), -(-s.kv_len // TILE)), bool)
    for i in range(tiles.shape[2]):
        rows = seen[:, :, i * TILE : (i + 1) * TILE].any(2)
        # reduceat: the last tile may be cut
        tiles[:, :, i] = np.logical_or.reduceat(rows, np.arange(0, s.kv_len, TILE), axis=2)
    yield slice(None), np.broadcast_to(tiles, (s.batch, s.heads, *tiles.shape[2:]))


def _mask_of(contest: Contest) -> Mask:
    if contest.mask is None:
        raise NoWordsError("a score mod hides nothing: there are no tiles to tell apart")
    return contest.mask


def _refuse_long(contest: Contest, who: str) -> None:
    if max(contest.sizes.q_len, contest.sizes.kv_len) > MOST[who]:
        raise NoWordsError(f"{who} looks at every pair: it is not asked for more than {MOST[who]:,} tokens")


def _our_layout(contest: Contest) -> Call:
    """A new layout at every call, of a new mask."""
    s, m = contest.sizes, _mask_of(contest)

    def run() -> Callable[[], Array]:
        layout = Mask(m.expr, m.params).layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads, block=(TILE, TILE))
        layout.spans  # noqa: B018 - what it is for
        # the kinds are written out after the time is taken
        return lambda: np.broadcast_to(layout.kinds() != EMPTY, (s.batch, s.heads, layout.rows, layout.columns))

    return run


def _create_block_mask(contest: Contest) -> Call:
    """`create_block_mask`, eager, of our mask_mod."""
    from torch.nn.attention.flex_attention import create_block_mask

    s = contest.sizes
    _refuse_long(contest, "create_block_mask")
    layout = _mask_of(contest).layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
    create = partial(torchs(create_block_mask), mask_mod_of(layout), *s.problem, device="cpu", BLOCK_SIZE=TILE)

    def run() -> Callable[[], Array]:
        block_mask = create()
        return lambda: block_mask.to_dense().bool().numpy()

    return run


def _process_mask(contest: Contest) -> Call:
    """`process_mask`, its cache emptied, of what `splash_mask` says."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    s = contest.sizes
    _mask_of(contest)
    _refuse_long(contest, "process_mask")
    if s.q_len % TILE or s.kv_len % TILE:
        raise NoWordsError(f"splash attention takes lengths that are multiples of {TILE}")
    mask = splash_mask(contest)

    def run() -> Callable[[], Array]:
        info._process_mask.cache_clear()
        mask_info, _ = info.process_mask(mask, (TILE, TILE), shrink_grid=False)
        shape = (s.batch, s.heads, s.q_len // TILE, s.kv_len // TILE)
        return lambda: np.broadcast_to(np.asarray(mask_info.block_mask) > 0, shape)

    return run


# -- first calls, each contestant in processes of its own ---------------------------------------------


# where what is compiled is kept, by the variable that says so
CACHES = {"FRISKET_CACHE_DIR": "frisket", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
CACHES |= {"JAX_COMPILATION_CACHE_DIR": "jax"}


def main(path: str) -> None:
    who, stage_name, device, contests = pickle.loads(Path(path).read_bytes())
    # a stage does not pickle, so that a job names its contestant
    in_torch = stage_name == "torch"
    stage = torch_stage(device, lengths=True) if in_torch else jax_stage("gpu" if device == "cuda" else device)
    contestant = next(c for c in stage.contestants if c.name == who)
    compilations = counter(stage_name)
    warm_up_stage(stage_name, device)
    first, again, _ = timed(contestant.prepare, contests[0], compilations)
    others = [timed(contestant.prepare, c, compilations) for c in contests[1:]]
    figures = {"first": first - again, "others": [f - a for f, a, _ in others], "compilations": [n for *_, n in others]}
    print(json.dumps(figures))


def timed(
    prepare: Callable[[Contest], Call], contest: Contest, compilations: Callable[[], int]
) -> tuple[float, float, int]:
    """Seconds of a first call, of a second, and what a compiler was asked."""
    before, start = compilations(), time.perf_counter()
    call = prepare(contest)
    call()
    first = time.perf_counter() - start
    start = time.perf_counter()
    call()
    return first, time.perf_counter() - start, compilations() - before


def warm_up_stage(stage_name: str, device: str) -> None:
    """Run the work that a framework does once in a process, before anything is timed."""
    if stage_name == "torch":
        import torch

        x = torch.randn(1, 1, 64, 16, device=device)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        if device == "cuda":
            torch.cuda.synchronize()
    else:
        import jax

        jax.jit(lambda x: x + 1)(1.0).block_until_ready()


def counter(stage_name: str) -> Callable[[], int]:
    """How often a compiler has been asked so far: graphs of torch.compile, programs of XLA, kernels of ours."""
    kernels = Path(os.environ["FRISKET_CACHE_DIR"])
    seen: list[Any] = []

    def ours() -> int:
        return sum(1 for p in kernels.rglob("*") if p.suffix in (".so", ".cubin", ".hsaco"))

    if stage_name == "torch":

        def graphs() -> int:
            counters = sys.modules.get("torch._dynamo.utils")  # nothing is compiled where it is not imported
            return counters.counters["stats"]["unique_graphs"] if counters else 0

        return lambda: ours() + graphs()
    import jax

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        # one event for each program that XLA compiles
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(heard)
    return lambda: ours() + len(seen)


LIMIT = 600  # seconds of one process


@dataclass
class Firsts(ContestResult):
    """One contest as far as it has come; seconds by contestant."""

    lengths: tuple[int, ...]
    cold: dict[str, float] = field(default_factory=dict)
    disk: dict[str, float] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)
    compilations: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """A row in the form of schema.py; ratios are of cold first calls, peer / ours."""
        entry: dict[str, Any] = {}
        if self.cold:
            peers = [n for n in self.cold if n not in self.ours]
            pairs = {f"{p} / {o}": [self.cold[p] / self.cold[o]] for o in self.ours if o in self.cold for p in peers}
            seconds = {"s, cold": self.cold, "s, from disk": self.disk, "s, another length": self.other}
            figures: dict[str, Any] = {name: dict(of) for name, of in seconds.items()}
            figures[f"compilations for {len(self.lengths) - 1} other lengths"] = dict(self.compilations)
            entry = {"figures": figures, "ratios": pairs}
        return entry | ({"notes": dict(self.out)} if self.out else {})


def first_calls(
    contests: list[Contest], stage: Stage, device: str, families: Collection[str] | None = None
) -> Iterator[Firsts]:
    """`contests` are one mask at several lengths, the first of them the one that is met first."""
    chosen = stage.chosen(families)
    lengths = tuple(c.sizes.q_len for c in contests)
    firsts = Firsts(contests[0], stage.name, tuple(c.name for c in chosen if c.ours), lengths, machine=stage.machine)
    for c in chosen:
        firsts.doing = c.name
        yield firsts
        if c.missing:
            firsts.out[c.name] = c.missing
            continue
        try:
            c.prepare(contests[0])  # does not compile: it says whether there are words for it
        except Exception as error:
            firsts.out[c.name] = failure_text(error)
            continue
        with tempfile.TemporaryDirectory() as folder:
            # the second process starts with what the first has compiled
            cold = _child(folder, (c.name, stage.name, device, contests))
            # its first call alone is timed
            disk = cold if isinstance(cold, str) else _child(folder, (c.name, stage.name, device, contests[:1]))
        if isinstance(cold, str) or isinstance(disk, str):
            firsts.out[c.name] = str(cold if isinstance(cold, str) else disk)
            continue
        firsts.cold[c.name], firsts.disk[c.name] = cold["first"], disk["first"]
        if cold["others"]:
            firsts.other[c.name] = median(cold["others"])
            firsts.compilations[c.name] = sum(cold["compilations"])
        yield firsts
    firsts.doing = ""
    yield firsts


def _child(folder: str, job: Any) -> dict[str, Any] | str:
    """The result of a job in a process that keeps compiled kernels in `folder`, or the last words of the process."""
    path = Path(folder, "job.pickle")
    path.write_bytes(pickle.dumps(job))
    env = os.environ | {name: str(Path(folder, at)) for name, at in CACHES.items()}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # JAX stores nothing that took less than a second
    # -P: no module of the caller's folder is imported
    command = [sys.executable, "-P", "-m", __name__, str(path)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"failed: not done after {LIMIT} s"
    if done.returncode:
        return "failed: " + (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]  # libraries print, too


if __name__ == "__main__":
    main(sys.argv[1])
