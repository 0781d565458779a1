"""Few queries on Triton: whether the heads of a key head share a tile, and in how many parts the keys are read.

A program of the forward reads all keys that a tile of queries sees. With few queries most of the tile is empty, and
there are fewer programs than the GPU can run at once. So a tile holds the queries of all heads that share a key head,
and the visible tiles of keys are divided among several programs, whose results a second kernel combines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from frisket.grammar.memo import memo
from frisket.lowering.kernels.triton.decode import emit, packed, rows_of_a_tile
from frisket.lowering.kernels.triton.writer import Dims, padded
from frisket.lowering.plan import Geometry, LoopPlan, Spans, SpanSource, Target, make_plan
from frisket.runtime.plans.device import FlatPlan

from . import tiles as triton_tiles
from .arguments import Bound, Launch, Values, emitted_kernels
from .grids import of_host

Tensor = Any
PACK = 64  # queries of one head that fill a tile: from here on heads are not packed, unless FULLER says so
FILLED = 0.8  # share of the slots (programs that run at once): with this many programs nothing is split
# Prompts over EVEN_KEYS times as many keys have rows of tiles of about one length, and wait for products: WAVES waves
# of their programs are not split. Heads are packed where one alone fills less than FULLER of what packed heads fill.
EVEN_KEYS, WAVES, FULLER = 4, 4, 0.9
LEAST = 4  # so few tiles of 64 keys are not worth splitting
MOST = 256  # parts of a row
# Sequences have parts in proportion to the tiles that they see where three things hold: to read the longest row of
# tiles costs at least RAGGED times what the results of a part cost; one head has at most ROWS rows; and the longest
# sequence sees more than EVEN times the mean. By the model of benchmarks/gpu_sim, one sequence of 128k tokens among
# 31 of 1k would take 10 times as long without. Sequences of equal length take 1 to 6 % longer with it, and 9 % with
# int8 in pages of 16, where ptxas gives a thread 168 registers, not 255. ROWS rows of MOST parts, and one more for
# each, are the 65,535 programs that an axis of a grid may have.
RAGGED, ROWS, EVEN = 64, 255, 1.25
# Programs of four warps that share a processor: one waits for memory while the other converts and multiplies.
BLOCKS = 2
DEEP = 98_304  # bytes of keys and values that three stages may hold, where a program may have as much
FLOP = 180  # operations in 16 bits that an H100 does while it reads one byte, at 60 % of its peak
# The time of a program's first and last instructions, and that of the kernel that combines: as bytes read meanwhile.
START, COMBINE = 16_384, 32_768
NEAR = 1.03  # times the least cost: up to here fewer parts are as good
INTERPRETED = 4  # processors of Triton's interpreter, which runs one program after another
NOTHING = make_plan(None, None)  # the plan of the kernel that combines
NO_VALUES = Values(({}, {}), (), (), (), ())


@dataclass(frozen=True)
class Shares:
    """How a call of few queries is divided: the queries and heads of a tile, and the parts of a row of tiles."""

    target: Target  # `splits` are the parts of a row
    queries: int  # queries of each head in a tile
    pack: int  # heads in a tile
    block: tuple[int, int]  # the tile (queries, keys) of the spans that the kernel reads
    balanced: bool = False  # sequences have parts in proportion to the tiles they see; `splits` is then the mean

    @property
    def alone(self) -> bool:
        """Whether one program reads all keys of a row, and so writes the results."""
        return self.target.splits == 1 and not self.balanced

    def grid(self, g: Geometry) -> tuple[int, int, int]:
        rows, heads = -(-g.q_len // self.queries), g.heads // self.pack
        if self.balanced:  # rounding up gives each row one part more at most
            return heads, g.batch * rows * (self.target.splits + 1), 1
        return rows * self.target.splits, heads, g.batch

    def results(self, g: Geometry) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shapes and dtypes of the arrays that hold the results of parts until they are combined."""
        heads, programs, _ = self.grid(g)
        rows = (programs, g.heads, min(g.q_len, self.queries)) if self.balanced else (
            self.target.splits, g.batch, g.heads, g.q_len
        )  # fmt: skip
        shapes: dict[str, tuple[tuple[int, ...], type]] = {"Acc": ((*rows, g.v_dim), np.float32)}
        shapes |= dict.fromkeys(("Tops", "Totals"), (rows, np.float32))
        if self.balanced:
            shapes["Parts"] = (heads, programs // (self.target.splits + 1), 2), np.int32
        return shapes

    def numbers(self, g: Geometry) -> dict[str, int]:
        """The numbers that the combining kernel is launched with."""
        division = {"queries": self.queries, "pack": self.pack} if self.balanced else {"splits": self.target.splits}
        return {"heads": g.heads, "q_len": g.q_len, **division}


def shares(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, dims: Dims, processors: int
) -> Shares | None:
    """How a call of few queries is divided, or None where the forward kernel is as good: `target.splits` is 1, or heads
    are not packed and there are enough programs. Reads nothing from a device."""
    if target.splits == 1:
        return None
    pack = packed(plan, dims) if _whole_groups(g) else 1
    even = g.kv_len >= EVEN_KEYS * g.q_len  # rows of tiles see about as much as one another
    most = rows_of_a_tile(dims)
    if g.q_len >= PACK and not (
        even and _used(g.q_len, target.block_q) < FULLER * _used(g.q_len, max(1, most // pack))
    ):
        pack = 1
    most = most if pack > 1 or most < PACK // 2 else target.block_q  # larger heads have few rows
    rows = max(min(most, padded(g.q_len * pack)), padded(pack))
    queries = rows // pack
    programs = -(-g.q_len // queries) * g.batch * g.heads // pack
    decode_target = _hurried(target.decode or target, dims, rows, plan.pages is not None)
    block = (target.block_q if g.q_len <= min(queries, target.block_q) else queries), decode_target.block_k
    splits, slots = target.splits, processors * (BLOCKS if decode_target.num_warps == 4 else 1)
    if not splits:
        # The last of a few waves of programs whose time are products may leave most of the machine idle.
        waves = WAVES if even and rows >= PACK else FILLED
        if programs >= waves * slots and pack == 1:
            return None
        tiles = most_tiles(spans, g, block)
        read, tile, results = _costs(g, dims, rows, decode_target.block_k)
        short = tiles * decode_target.block_k <= LEAST * 64
        splits = 1 if short else parts(programs, slots, tiles, tile, results, waves)
        if (
            tiles * read >= RAGGED * results
            and g.batch * -(-g.q_len // queries) <= ROWS
            and ragged(plan, spans, g, block)
        ):
            return Shares(replace(decode_target, block_q=rows, splits=splits), queries, pack, block, balanced=True)
        if splits == 1 and (short or pack == 1):
            return None
    return Shares(replace(decode_target, block_q=rows, splits=splits), queries, pack, block)


def ragged(plan: LoopPlan, spans: SpanSource | None, g: Geometry, block: tuple[int, int]) -> bool:
    """Whether some sequences of a batch may see many more tiles of keys than others, as they do where their lengths
    differ. True where the lengths are known to the device alone."""
    if plan.mask is None or plan.bounds is not None or g.batch == 1:
        return False
    if spans is None or isinstance(spans, FlatPlan):
        return True
    rows = spans.rows(block)
    if not isinstance(rows, Spans):
        return True
    seen = (rows.bounds[..., 3] - rows.bounds[..., 0]).sum((-1, -2))[rows.slice_of]
    return bool(seen.max(initial=0) > EVEN * seen.mean())


def _used(length: int, rows: int) -> float:
    """The share of its tiles of so many rows that a length fills."""
    return length / (-(-length // rows) * rows)


def _costs(g: Geometry, dims: Dims, rows: int, keys: int) -> tuple[int, int, int]:
    """The costs of reading a tile of keys, of a tile, and of a part's results, which are written once and read once. A
    cost is a number of bytes; that of a tile is its bytes, or the bytes that could be read while it is multiplied."""
    width = g.head_dim + g.v_dim
    of_key = 1 if dims.kv_dtype else 4 if dims.dtype == "float32" else 2
    read = keys * width * of_key
    return read, max(read, keys * width * 2 * rows // FLOP), 8 * rows * (g.v_dim + 2)


def _whole_groups(g: Geometry) -> bool:
    """Whether the call begins with the first head of a group, as the call of every shard does: h // group is then the
    same for all heads in a tile."""
    first = g.origin[1]
    return not of_host(first) or int(first) % (g.heads // g.kv_heads) == 0


def _hurried(target: Target, dims: Dims, rows: int, paged: bool) -> Target:
    """The target of few queries, which wait for memory: more stages of loads, where they fit, and no more warps than
    rows need. With pages five stages do what three do without, as the number of a page is loaded before its keys."""
    of_entry = 4 if dims.dtype == "float32" else 1 if dims.kv_dtype else 2
    stage = 2 * padded(dims.head_dim) * target.block_k * of_entry
    fits = target.num_stages > 1 and 3 * stage <= min(DEEP, target.limit or DEEP)
    stages = max(target.num_stages, 5 if paged else 3) if fits else target.num_stages
    return replace(target, num_stages=stages, num_warps=4 if rows <= 64 else 8)


def most_tiles(spans: SpanSource | None, g: Geometry, block: tuple[int, int]) -> int:
    """The most tiles of keys that a row reads; all of them where only the device knows."""
    if spans is not None and not isinstance(spans, FlatPlan):
        rows = spans.rows(block)
        if isinstance(rows, Spans):
            return int(np.max((rows.bounds[..., 3] - rows.bounds[..., 0]).sum(-1), initial=0))
    return -(-g.kv_len // block[1])


@memo(1024, weigh=100)
def parts(programs: int, slots: int, tiles: int, tile: int, results: int, waves: float = FILLED) -> int:
    """The fewest parts of a row whose predicted cost is within 3 % of the least. The cost is that of all waves of
    programs, each with its share of the tiles, and of combining the parts. `tile` and `results` are the costs of a tile
    and of a part's results, in bytes. Where programs fill so many `waves` nothing is split.

    >>> parts(8, 264, 256, 32768, 16640), parts(264, 264, 256, 32768, 16640)
    (32, 1)
    """
    if programs >= waves * slots:
        return 1
    cost = {n: -(-programs * n // slots) * (START + -(-tiles // n) * tile + results * (n > 1)) + COMBINE * (n > 1)
            for n in range(1, min(MOST, tiles) + 1)}  # fmt: skip
    return next(n for n, x in cost.items() if x <= NEAR * min(cost.values()))


def processors(device: Any) -> int:
    return triton_tiles.processors(device) if device.type == "cuda" else INTERPRETED


class Parts:
    """The launches of a call of few queries: two, or one where rows have one part."""

    def __init__(
        self, context: Bound, plan: LoopPlan, spans: SpanSource | None, chosen: Shares, device_slots: tuple[str, ...],
        sinks: bool, top: bool, lse_residual: bool,
    ) -> None:  # fmt: skip
        g, target = context.geometry, chosen.target
        alike = replace(target, splits=int(chosen.alone))  # the kernels are the same for any number of parts
        kernels = emitted_kernels(
            emit, plan, alike, context.dims(device_slots), packs=chosen.pack > 1, sinks=sinks, top=top,
            low=lse_residual, balanced=chosen.balanced,
        )  # fmt: skip
        self.combine: Launch | None = None
        results = {"Out": "o", "Lse": ""}
        results |= {"Top": ""} if top else {}
        results |= {"Low": ""} if lse_residual else {}
        results |= {"Sinks": ""} if sinks else {}
        self.splits, self.partial_shapes = target.splits, chosen.results(g)
        partial = dict.fromkeys(self.partial_shapes, "")
        self.decode = context.launch(
            kernels, "attention_decode", chosen.grid(g), target,
            {"Q": "q", "K": "k", "V": "v", **(results if chosen.alone else partial)},
            records=None if spans is None else spans.rows, block=chosen.block, device_slots=device_slots,
            splits=target.splits, batches=g.batch,
        )  # fmt: skip
        if chosen.alone:
            return
        two = replace(target, num_warps=2)
        grid = g.q_len, g.heads, g.batch
        self.combine = Launch(
            kernels.kernels["attention_combine"], {}, NOTHING, grid, two, context.device, chosen.numbers(g),
            partial | results, (),
        )  # fmt: skip

    def __call__(self, values: Values, q: Tensor, k: Tensor, v: Tensor, *results: Tensor) -> None:
        import torch

        if self.combine is None:
            self.decode(values, q, k, v, *results)
            return
        kinds: dict[Any, Any] = {np.float32: torch.float32, np.int32: torch.int32}
        partials = [
            torch.empty(shape, dtype=kinds[dtype], device=q.device) for shape, dtype in self.partial_shapes.values()
        ]
        self.decode(values, q, k, v, *partials)
        self.combine(NO_VALUES, *partials, *results)
