"""A race of a few tiles of each Triton kernel, for one attention and shape: `frisket.tune`.

Every candidate computes the whole call. One that does not launch, spills, or gives other results than a float64
reference takes no part. The others run in turns, and the fastest is kept by `tuned`.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from frisket.dsl.errors import BackendError, ParameterError
from frisket.lowering.architectures import architecture_of
from frisket.lowering.dtypes import HALVES
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import quickest
from frisket.runtime.bench.race import rounds_of
from frisket.runtime.calls.options import AS_CHOSEN, CallArgs, LaunchOptions, Tuning, attention_by

from . import launch, tiles, tuned
from .tuned import Tile

Attention = Any
AS_IS = "as chosen"
MOST = 6  # tiles of a race, with the one that frisket chose
GAIN = 0.98  # a winner takes at most this share of the time of the tile as chosen
SHORTEST = 128  # queries: calls of fewer take kernels whose tiles are not raced
# the largest error of the tile as chosen, as a share of the largest number of the reference
BOUNDS = {"bfloat16": 0.02, "float16": 0.004, "float32": 1e-4}
FLOOR = 1e-6
NO_GPU = (
    "no GPU is visible to torch: `frisket tune` races tiles of Triton's kernels on your GPU\n"
    "  run it on the machine whose calls it is for; kernels of a CPU have no tiles to race"
)


class TunedRow(NamedTuple):
    """One kernel: the tile that frisket chose and the fastest one, as (queries, keys, warps, stages), with medians of
    their times in milliseconds. `left_out` has a reason for each tile that took no part."""

    kernel: str
    call: str
    chosen: Tile
    chosen_ms: float
    winner: Tile
    winner_ms: float
    left_out: Mapping[str, str] = {}

    def __str__(self) -> str:
        gain = self.chosen_ms / self.winner_ms
        if self.winner == self.chosen:
            result = f"{words(self.chosen)} stays the fastest, {self.chosen_ms:.3f} ms"
        else:
            times = f"{self.winner_ms:.3f} ms; as chosen {self.chosen_ms:.3f} ms"
            result = f"{words(self.winner)}, {times}: speed-up {gain:.2f}"
        return "\n".join(
            [f"{self.kernel} of {self.call}: {result}", *(f"    {n}: {x}" for n, x in self.left_out.items())]
        )


@dataclass(frozen=True)
class Tuned:
    """The report of `frisket.tune`: a `TunedRow` for each kernel, the GPU, and the files that hold the winners.

    >>> row = TunedRow("dq", "Attention(mask = causal)", (128, 64, 8, 3), 1.25, (64, 64, 4, 3), 1.0)
    >>> print(Tuned((row,), "NVIDIA L4", ("tuned/1f.json",)))
    dq of Attention(mask = causal): 64 x 64, 4 warps, 3 stages, 1.000 ms; as chosen 1.250 ms: speed-up 1.25
    kept for NVIDIA L4 in tuned/1f.json
    """

    rows: tuple[TunedRow, ...]
    device: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        places = [f"kept for {self.device} in {x}" for x in self.files] or ["kept nowhere: no folder can be written to"]
        return "\n".join([*map(str, self.rows), *places])


def words(tile: Tile) -> str:
    return "{} x {}, {} warps, {} stages".format(*tile)


def check_gpu() -> Any:
    """The device of a race: the current GPU. Raises where there is none."""
    if why := RECORDS["triton"].reason("torch"):
        raise BackendError(NO_GPU if why.startswith("no GPU") else why)
    import torch

    if not torch.cuda.is_available():  # Triton's interpreter runs kernels without one
        raise BackendError(NO_GPU)
    return torch.device("cuda", torch.cuda.current_device())


def name_of(device: Any) -> str:
    return tuned.device_name(device)


@dataclass(frozen=True)
class TileRace:
    """The device of a race, what is raced, and the clock: the seconds of a call."""

    device: Any
    gradients: bool
    rounds: int
    clock: Callable[[Callable[[], Any]], float]


def gpu_seconds(run: Callable[[], Any]) -> float:
    """The seconds of a call on the current GPU."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def raced(att: Attention, sizes: dict[str, Any], race: TileRace) -> tuple[list[TunedRow], str]:
    """The rows of one attention and shape, and the file that holds the winners."""
    _check(att, sizes)
    with tuned.without():
        entrant = _Entrant(att, sizes, race)
        rows = [entrant.race(kernel) for kernel in entrant.kernels]
    winners = {row.kernel: row.winner for row in rows}
    path = tuned.keep(entrant.key, winners, str(datetime.date.today())) if winners else None
    return rows, "" if path is None else str(path)


def _check(att: Attention, sizes: dict[str, Any]) -> None:
    if att.options.tile is not None or att.options.tuning != AS_CHOSEN:
        raise ParameterError("the attention names tiles, and `tune` races them: leave out `tile` and `kernel_options`")
    if att.options.backend not in (None, *(b.name for b in RECORDS.values() if b.guarded)):
        raise ParameterError(f"backend={att.options.backend!r} has no tiles of Triton: leave it out")
    if sizes["dtype"] not in BOUNDS:
        raise ParameterError(f"dtype={sizes['dtype']!r}: tiles are raced in {', '.join(BOUNDS)}")
    if sizes["q_len"] < SHORTEST:
        raise ParameterError(f"q_len={sizes['q_len']}: tiles are raced from {SHORTEST} queries on")


@dataclass(eq=False)
class _Entrant:
    """An attention and arrays in a race."""

    att: Attention
    sizes: dict[str, Any]
    race_of: TileRace
    arrays: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        import torch

        s, device, torch_dtype = self.sizes, self.race_of.device, getattr(torch, self.sizes["dtype"])
        shapes = [(s["heads"], s["q_len"], s["head_dim"])]
        shapes += [(s["kv_heads"], s["kv_len"], s[n]) for n in ("head_dim", "v_dim")]
        draw = torch.Generator().manual_seed(0)
        arrays = [torch.randn((s["batch"], *x), generator=draw).to(device, torch_dtype) for x in shapes]
        self.arrays = [x.requires_grad_(self.race_of.gradients) for x in arrays]
        self.seed = {"seed": 0} if self.att.options.dropout else {}
        self.name = f"{self.att!r}, {s['dtype']}, head_dim {s['head_dim']}, {s['q_len']} queries"
        self.base = self.attention(AS_CHOSEN)
        with torch.no_grad():
            self.base(*self.arrays, **self.seed)
        self.target = self.ready(self.base).inputs.target
        call = self.base.call(CallArgs(*self.arrays)._replace(seed=0))
        self.key = tiles.kind_of(*tiles.traits_of(call.plan, call.geometry), call.geometry, s["dtype"], device)
        named = self.att.options.backend
        forward = named or quickest("triton", call.plan, call.geometry, s["dtype"], self.att.options)
        self.kernels = ["forward"] * (forward == "triton") + ["dq", "dkv"] * self.race_of.gradients
        self.reference = self.results(self.attention(AS_CHOSEN, "aten"), [x.detach().double() for x in self.arrays])
        self.errors = self.errors_of(self.base)
        wrong = [n for n, x in self.errors.items() if not x <= BOUNDS[s["dtype"]]]
        if wrong:
            raise BackendError(
                f"{self.name}: {wrong[0]} differs from the float64 reference by {self.errors[wrong[0]]:.1e}"
            )

    def attention(self, tuning: Tuning, backend: str = "triton") -> Any:
        options = replace(self.att.options, backend=backend, engines=False, tuning=tuning)
        return attention_by("program")(self.att.program, options)

    def ready(self, att: Any) -> Any:
        """The prepared call of an attention that ran once."""
        return next(x for x in att.calls.values() if hasattr(x, "inputs"))

    def results(self, att: Any, arrays: list[Any]) -> dict[str, Any]:
        """The result and gradients of an attention by name, for a cotangent of small integers."""
        import torch

        leaves = [x.detach().requires_grad_(self.race_of.gradients) for x in arrays]
        out = att(*leaves, **self.seed)
        results = {"out": out.detach()}
        if self.race_of.gradients:
            grads = torch.autograd.grad(out, leaves, self.cotangent(out))
            results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        return results

    def cotangent(self, out: Any) -> Any:
        import torch

        return (torch.arange(out.numel(), device=out.device) % 7 - 3).to(out.dtype).view(out.shape)

    def errors_of(self, att: Any) -> dict[str, float]:
        """The largest difference of each result from the reference, as a part of the largest number."""
        import torch

        errors: dict[str, float] = {}
        for name, x in self.results(att, self.arrays).items():
            expected = self.reference[name]
            off = (x.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
            errors[name] = float(off) if bool(torch.isfinite(x).equal(torch.isfinite(expected))) else float("inf")
        return errors

    def race(self, kernel: str) -> TunedRow:
        """The fastest tile of a kernel. The time of dq and dkv is that of the whole backward."""
        part = self.target if kernel == "forward" else getattr(self.target, kernel) or self.target
        chosen: Tile = part.block_q, part.block_k, part.num_warps, part.num_stages
        calls, left_out, named = {AS_IS: self.call(self.base, kernel)}, {}, {AS_IS: chosen}
        for tile in candidates(kernel, chosen, self.sizes):
            tuning: dict[str, Any] = {kernel: LaunchOptions(*tile)}
            att = self.attention(Tuning(**tuning))
            if why := self.refused(att, kernel):
                left_out[words(tile)] = why
                continue
            calls[words(tile)], named[words(tile)] = self.call(att, kernel), tile
        times = rounds_of(calls, self.race_of.rounds, clock=self.race_of.clock)
        ms = {name: 1e3 * statistics.median(x) for name, x in times.items()}
        best = min(ms, key=ms.__getitem__)
        best = best if ms[best] <= GAIN * ms[AS_IS] else AS_IS
        return TunedRow(kernel, self.name, chosen, ms[AS_IS], named[best], ms[best], left_out)

    def refused(self, att: Any, kernel: str) -> str:
        """A reason why a tile takes no part."""
        try:
            errors = self.errors_of(att)
        except BackendError as error:  # it takes more than the GPU has, or does not compile
            return str(error).split("\n")[0]
        wrong = [n for n, x in errors.items() if not x <= 2 * self.errors[n] + FLOOR]
        if wrong:
            return f"{wrong[0]} differs from the float64 reference by {errors[wrong[0]]:.1e}"
        spills = spills_of(self.ready(att), self.arrays, f"attention_{kernel}")
        return f"spills {spills} registers of each thread" if spills else ""

    def call(self, att: Any, kernel: str) -> Callable[[], Any]:
        import torch

        if kernel == "forward":
            return torch.no_grad()(partial(att, *self.arrays, **self.seed))
        out = att(*self.arrays, **self.seed)
        return partial(torch.autograd.grad, out, self.arrays, self.cotangent(out), retain_graph=True)


def candidates(kernel: str, chosen: Tile, sizes: Mapping[str, Any]) -> Iterator[Tile]:
    """Tiles near the chosen one that the GPU's shared memory holds: other sides, then other stages."""
    queries, keys, warps, stages = chosen
    swapped = kernel == "dkv"
    owned, walked = (keys, queries) if swapped else (queries, keys)
    near = [(owned // 2, walked, stages), (owned, walked // 2, stages), (owned, walked * 2, stages)]
    near += [(owned * 2, walked, stages), (owned, walked, stages + 1), (owned, walked, stages - 1)]
    limit, products = tiles.shared_memory(), architecture_of(tiles.architecture()).products
    dim = max(64, 1 << (max(sizes["head_dim"], sizes["v_dim"]) - 1).bit_length())
    entry, count = 2 if sizes["dtype"] in HALVES else 4, 1
    for side, other, depth in near:
        fits = not limit or tiles.shared(kernel, dim, side, other, depth, entry, products) <= limit
        if count < MOST and 16 <= side <= 256 and 16 <= other <= 256 and 1 <= depth <= 5 and fits:
            count += 1
            number = min(8, max(4, warps * side // owned))
            yield (other, side, number, depth) if swapped else (side, other, number, depth)


def spills_of(ready: Any, arrays: list[Any], kernel: str) -> int:
    """The registers of a thread that a kernel of an earlier call spilled, by Triton; 0 where it was interpreted."""
    x, (q, k, _) = ready.inputs, arrays
    context = launch.bound(x.plan, x.spans, x.geometry, x.target, q, k)
    steps = (step for program in context.launches.values() for step in program.launches)
    return max((step.spills for step in steps if step.step.name == kernel), default=0)
