"""Few queries on Triton: whether the heads of a key head share a tile, and in how many parts the keys are read.

A program of the forward reads all keys of a tile of queries. With few queries its tile is mostly empty, and there are
too few programs for the machine: then tiles hold the queries of all heads of a key head, and the tiles of keys that
are visible go to several programs, whose results a second kernel combines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from frisket.grammar.memo import memo
from frisket.lowering.kernels.triton.decode import emit, packed, rows_of_a_tile
from frisket.lowering.kernels.triton.parameters import padded
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, Spans, SpanSource, Target, make_plan
from frisket.runtime.plans.device import FlatPlan

from . import tiles as triton_tiles
from .arguments import Bound, Launch, Made, Values, loaded_kernels
from .grids import of_host

Tensor = Any
PACK = 64  # queries of one head from which on a tile is full without those of other heads
FILLED = 0.8  # of the machine's slots: with so many programs nothing is split
LEAST = 4  # tiles of 64 keys, or fewer, that are not worth splitting
MOST = 256  # parts
# Rows have parts in proportion to what they see where reading one costs so many times what the results of a part do,
# there are no more of one head, and one sees so many times what they see in the mean. By the model of
# benchmarks/gpu_sim that costs equal sequences 1 to 6 %, and 9 % with int8 in pages of 16, where ptxas takes 168
# registers for 255; one of 128k tokens among 31 of 1k takes 10 times as long without. Rows and MOST parts are few
# enough for an axis of a grid, which has 65,535 programs.
RAGGED, ROWS, EVEN = 64, 255, 1.25
BLOCKS = (
    2  # programs of four warps that share a processor: one waits for memory while the other converts and multiplies
)
DEEP = 98_304  # bytes of keys and values that three stages may hold, on any NVIDIA GPU
FLOP = 180  # products for a byte: as many of 16 bits as an H100 makes while it reads one, at 60 % of its peak
# Bytes that a program could have read in the time of its first and last instructions, and of the kernel that combines.
START, COMBINE = 16_384, 32_768
NEAR = 1.03  # of the least cost: fewer parts are as good
INTERPRETED = 4  # processors of Triton's interpreter, which runs one program after another
NOTHING = make_plan(None, None)  # the plan of the kernel that combines
NO_VALUES = Values(({}, {}), (), (), (), ())


@dataclass(frozen=True)
class Shares:
    """How a call of few queries is divided."""

    target: Target  # its `splits` are those chosen
    queries: int  # of a tile, for each head in it
    pack: int  # heads in a tile
    block: tuple[int, int]  # tiles whose spans say what a row sees
    balanced: bool = False  # rows have parts in proportion to what they see: `splits` are those of a row in the mean

    @property
    def alone(self) -> bool:
        """Whether every row is read by one program, which writes the results."""
        return self.target.splits == 1 and not self.balanced

    def grid(self, g: Geometry) -> tuple[int, int, int]:
        rows, heads = -(-g.q_len // self.queries), g.heads // self.pack
        if self.balanced:  # what rows have beyond their share is rounded up
            return heads, g.batch * rows * (self.target.splits + 1), 1
        return rows * self.target.splits, heads, g.batch

    def results(self, g: Geometry) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shapes and dtypes of what programs leave to be combined."""
        heads, programs, _ = self.grid(g)
        rows = (programs, g.heads, min(g.q_len, self.queries)) if self.balanced else (
            self.target.splits, g.batch, g.heads, g.q_len
        )  # fmt: skip
        found: dict[str, tuple[tuple[int, ...], type]] = {"Acc": ((*rows, g.v_dim), np.float32)}
        found |= dict.fromkeys(("Tops", "Totals"), (rows, np.float32))
        if self.balanced:
            found["Parts"] = (heads, programs // (self.target.splits + 1), 2), np.int32
        return found

    def numbers(self, g: Geometry) -> dict[str, int]:
        """Numbers that the kernel which combines parts is launched with."""
        own = {"queries": self.queries, "pack": self.pack} if self.balanced else {"splits": self.target.splits}
        return {"heads": g.heads, "q_len": g.q_len, **own}


def shares(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, dims: Dims, processors: int
) -> Shares | None:
    """The shares of a short query's keys, or None where the forward kernel does as well: `target.splits` says 1, or
    there is nothing to pack and enough programs. Never asks a device for anything."""
    if target.splits == 1:
        return None
    pack = packed(plan, dims) if g.q_len < PACK and _whole_groups(g) else 1
    most = rows_of_a_tile(dims) if pack > 1 else target.block_q
    rows = max(min(most, padded(g.q_len * pack)), padded(pack))
    queries = rows // pack
    programs = -(-g.q_len // queries) * g.batch * g.heads // pack
    own = _hurried(target.decode or target, dims, rows, plan.pages is not None)
    block = (target.block_q if g.q_len <= min(queries, target.block_q) else queries), own.block_k
    splits, slots = target.splits, processors * (BLOCKS if own.num_warps == 4 else 1)
    if not splits:
        if programs >= FILLED * slots and pack == 1:
            return None
        tiles = most_tiles(spans, g, block)
        tile, results = _costs(g, dims, rows, own.block_k)
        splits = parts(programs, slots, tiles, tile, results)
        if tiles * tile >= RAGGED * results and ragged(plan, spans, g, queries, block):
            return Shares(replace(own, block_q=rows, splits=splits), queries, pack, block, balanced=True)
        if splits == 1 and (tiles * max(1, own.block_k // 64) <= LEAST or pack == 1):
            return None
    return Shares(replace(own, block_q=rows, splits=splits), queries, pack, block)


def ragged(plan: LoopPlan, spans: SpanSource | None, g: Geometry, queries: int, block: tuple[int, int]) -> bool:
    """Whether some rows of tiles may see many more tiles of keys than others.

    Sequences of a batch do where their lengths differ. Where the host does not know, they may."""
    rows = g.batch * -(-g.q_len // queries)
    if plan.mask is None or plan.bounds is not None or not 1 < rows <= ROWS:
        return False
    if spans is None or isinstance(spans, FlatPlan):
        return True
    found = spans.rows(block)
    if not isinstance(found, Spans):
        return True
    seen = (found.bounds[..., 3] - found.bounds[..., 0]).sum(-1)[found.slice_of]
    return bool(seen.max(initial=0) > EVEN * seen.mean())


def _costs(g: Geometry, dims: Dims, rows: int, keys: int) -> tuple[int, int]:
    """The cost of a tile of keys, and of the results of a part, which are written and read: in bytes, or in what is
    read while as much is multiplied."""
    width = g.head_dim + g.v_dim
    of_key = 1 if dims.kv_dtype else 4 if dims.dtype == "float32" else 2
    return keys * width * max(of_key, 2 * rows // FLOP), 8 * rows * (g.v_dim + 2)


def _whole_groups(g: Geometry) -> bool:
    """Whether the call begins with the first head of a group, as that of every shard does: then h // group is one
    number for all heads in a tile."""
    first = g.origin[1]
    return not of_host(first) or int(first) % (g.heads // g.kv_heads) == 0


def _hurried(target: Target, dims: Dims, rows: int, paged: bool) -> Target:
    """Few queries wait for memory: more stages of loads, where they fit, and no more warps than rows need. The number
    of a page is loaded before its keys, so that five stages are in flight what three are without pages."""
    of_entry = 4 if dims.dtype == "float32" else 1 if dims.kv_dtype else 2
    stage = 2 * padded(dims.head_dim) * target.block_k * of_entry
    fits = target.num_stages > 1 and 3 * stage <= DEEP
    stages = max(target.num_stages, 5 if paged else 3) if fits else target.num_stages
    return replace(target, num_stages=stages, num_warps=4 if rows <= 64 else 8)


def most_tiles(spans: SpanSource | None, g: Geometry, block: tuple[int, int]) -> int:
    """Tiles of keys that a row reads at most, as far as the host knows."""
    if spans is not None and not isinstance(spans, FlatPlan):
        found = spans.rows(block)
        if isinstance(found, Spans):
            return int(np.max((found.bounds[..., 3] - found.bounds[..., 0]).sum(-1), initial=0))
    return -(-g.kv_len // block[1])


@memo(1024, weigh=100)
def parts(programs: int, slots: int, tiles: int, tile: int, results: int) -> int:
    """The fewest parts whose predicted cost is next to the least: that of all waves of programs, each with its share
    of the tiles, and of combining their results. `tile` and `results` are what a tile and a part cost, in bytes.

    >>> parts(8, 264, 256, 32768, 16640), parts(264, 264, 256, 32768, 16640), parts(8, 264, 3, 32768, 16640)
    (32, 1, 1)
    """
    if programs >= FILLED * slots or tiles <= LEAST:
        return 1
    cost = {n: -(-programs * n // slots) * (START + -(-tiles // n) * tile + results * (n > 1)) + COMBINE * (n > 1)
            for n in range(1, min(MOST, tiles) + 1)}  # fmt: skip
    return next(n for n, x in cost.items() if x <= NEAR * min(cost.values()))


def processors(device: Any) -> int:
    return triton_tiles.processors(device) if device.type == "cuda" else INTERPRETED


class Parts:
    """The launches of such a call: two, or one where nothing is divided."""

    def __init__(
        self, own: Bound, plan: LoopPlan, spans: SpanSource | None, chosen: Shares, live: tuple[str, ...], sinks: bool,
        top: bool, low: bool,
    ) -> None:  # fmt: skip
        g, target = own.geometry, chosen.target
        alike = replace(target, splits=int(chosen.alone))  # of any number of parts the kernels are the same
        kernels = _made(plan, alike, own.dims(live), chosen.pack > 1, sinks, top, low, chosen.balanced)
        self.combine: Launch | None = None
        results = {"Out": "o", "Lse": ""}
        results |= {"Top": ""} if top else {}
        results |= {"Low": ""} if low else {}
        results |= {"Sinks": ""} if sinks else {}
        self.splits, self.given = target.splits, chosen.results(g)
        partial = dict.fromkeys(self.given, "")
        self.decode = own.launch(
            kernels, "attention_decode", chosen.grid(g), target,
            {"Q": "q", "K": "k", "V": "v", **(results if chosen.alone else partial)},
            records=None if spans is None else spans.rows, block=chosen.block, live=live, splits=target.splits,
            batches=g.batch,
        )  # fmt: skip
        if chosen.alone:
            return
        two = replace(target, num_warps=2)
        grid = g.q_len, g.heads, g.batch
        self.combine = Launch(
            kernels.kernels["attention_combine"], {}, NOTHING, grid, two, own.device, chosen.numbers(g),
            partial | results, (),
        )  # fmt: skip

    def __call__(self, values: Values, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> None:
        import torch

        if self.combine is None:
            self.decode(values, q, k, v, *results)
            return
        kinds: dict[Any, Any] = {np.float32: torch.float32, np.int32: torch.int32}
        made = [torch.empty(shape, dtype=kinds[dtype], device=q.device) for shape, dtype in self.given.values()]
        self.decode(values, q, k, v, *made)
        self.combine(NO_VALUES, *made, *results)


@memo(group="kernels")
def _made(
    plan: LoopPlan, target: Target, dims: Dims, packs: bool, sinks: bool, top: bool, low: bool, balanced: bool
) -> Made:
    return loaded_kernels(
        emit(plan, target, dims, packs=packs, sinks=sinks, top=top, low=low, balanced=balanced), plan
    )  # fmt: skip
