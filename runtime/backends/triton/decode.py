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
SHARED = 16  # queries up to which heads share a tile even where nothing is split: keys and values are read once
FILLED = 0.8  # of the machine's processors: with so many programs nothing is split
LEAST = 4  # tiles of keys that are not worth splitting
MOST = 128  # parts
DEEP = 98_304  # bytes of keys and values that three stages may hold, on any NVIDIA GPU
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


def shares(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, dims: Dims, processors: int
) -> Shares | None:
    """The shares of a short query's keys, or None where the forward kernel does as well: `target.splits` says 1, or
    there is nothing to pack and enough programs. Never asks a device for anything."""
    if target.splits == 1:
        return None
    pack = packed(plan, dims) if g.q_len < PACK and _whole_groups(g) else 1
    most = rows_of_a_tile(padded(max(dims.head_dim, dims.v_dim))) if pack > 1 else target.block_q
    rows = max(min(most, padded(g.q_len * pack)), padded(pack))
    queries = rows // pack
    programs = -(-g.q_len // queries) * g.batch * g.heads // pack
    own = target.decode or target
    block = (target.block_q if g.q_len <= min(queries, target.block_q) else queries), own.block_k
    splits, few = target.splits, pack > 1 and g.q_len <= SHARED
    if not splits:
        if programs >= FILLED * processors and not few:
            return None
        tiles = most_tiles(spans, g, block)
        splits = parts(programs, processors, tiles)
        if splits == 1 and (tiles <= LEAST or not few):
            return None
    return Shares(replace(_hurried(own, dims, rows), block_q=rows, splits=splits), queries, pack, block)


def _whole_groups(g: Geometry) -> bool:
    """Whether the call begins with the first head of a group, as that of every shard does: then h // group is one
    number for all heads in a tile."""
    first = g.origin[1]
    return not of_host(first) or int(first) % (g.heads // g.kv_heads) == 0


def _hurried(target: Target, dims: Dims, rows: int) -> Target:
    """Few queries wait for memory: one more stage of loads, where it fits, and no more warps than rows need."""
    stage = 2 * padded(dims.head_dim) * target.block_k * (4 if dims.dtype == "float32" else 2)
    stages = 3 if target.num_stages == 2 and 3 * stage <= DEEP else target.num_stages
    return replace(target, num_stages=stages, num_warps=4 if rows <= 64 else 8)


def most_tiles(spans: SpanSource | None, g: Geometry, block: tuple[int, int]) -> int:
    """Tiles of keys that a row reads at most, as far as the host knows."""
    if spans is not None and not isinstance(spans, FlatPlan):
        found = spans.rows(block)
        if isinstance(found, Spans):
            return int(np.max((found.bounds[..., 3] - found.bounds[..., 0]).sum(-1), initial=0))
    return -(-g.kv_len // block[1])


@memo(1024, weigh=100)
def parts(programs: int, processors: int, tiles: int) -> int:
    """The fewest parts that keep the processors nearly as busy as the best number would (J. Shah et al.,
    FlashAttention-3, `num_splits_heuristic`).

    >>> parts(8, 132, 256), parts(132, 132, 256), parts(8, 132, 3)
    (14, 1, 1)
    """
    if programs >= FILLED * processors or tiles <= LEAST:
        return 1
    wanted = [n for n in range(1, min(MOST, processors, tiles) + 1) if n == 1 or -(-tiles // n) < -(-tiles // (n - 1))]
    busy = {n: (waves := programs * n / processors) / -(-waves // 1) for n in wanted}
    return next(n for n in wanted if busy[n] >= 0.85 * max(busy.values()))


def processors(device: Any) -> int:
    return triton_tiles.processors(device) if device.type == "cuda" else INTERPRETED


class Parts:
    """The two launches of such a call."""

    def __init__(
        self, own: Bound, plan: LoopPlan, spans: SpanSource | None, chosen: Shares, live: tuple[str, ...], sinks: bool,
        top: bool, low: bool,
    ) -> None:  # fmt: skip
        g, target = own.geometry, chosen.target
        alike = replace(target, splits=0)  # of any number of parts the kernels are the same
        kernels = _made(plan, alike, own.dims(live), chosen.pack > 1, sinks, top, low)
        self.sizes = target.splits, g.batch, g.heads, g.q_len
        self.v_dim = g.v_dim
        tiles = -(-g.q_len // chosen.queries)
        self.decode = own.launch(
            kernels, "attention_decode", (tiles * target.splits, g.heads // chosen.pack, g.batch), target,
            {"Q": "q", "K": "k", "V": "v", "Acc": "", "Tops": "", "Totals": ""},
            records=None if spans is None else spans.rows, block=chosen.block, live=live, splits=target.splits,
        )  # fmt: skip
        tensors = {"Acc": "", "Tops": "", "Totals": "", "Out": "o", "Lse": ""}
        tensors |= {"Top": ""} if top else {}
        tensors |= {"Low": ""} if low else {}
        tensors |= {"Sinks": ""} if sinks else {}
        four = replace(target, num_warps=4)
        fixed = {"heads": g.heads, "q_len": g.q_len, "splits": target.splits}
        grid = g.q_len, g.heads, g.batch
        self.combine = Launch(
            kernels.kernels["attention_combine"], {}, NOTHING, grid, four, own.device, fixed, tensors, ()
        )

    def __call__(self, values: Values, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> None:
        import torch

        acc = torch.empty((*self.sizes, self.v_dim), dtype=torch.float32, device=q.device)
        tops, totals = torch.empty((2, *self.sizes), dtype=torch.float32, device=q.device)
        self.decode(values, q, k, v, acc, tops, totals)
        self.combine(NO_VALUES, acc, tops, totals, *results)


@memo(group="kernels")
def _made(plan: LoopPlan, target: Target, dims: Dims, packs: bool, sinks: bool, top: bool, low: bool) -> Made:
    return loaded_kernels(emit(plan, target, dims, packs=packs, sinks=sinks, top=top, low=low), plan)
