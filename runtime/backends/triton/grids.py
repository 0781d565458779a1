"""The programs of a launch, whoever brings the arrays: grids, few queries in several parts, and long rows of tiles.

Few queries: a program of the forward reads all keys that a tile of queries sees. With few queries most of the tile is
empty, and there are fewer programs than the GPU can run at once. So a tile holds the queries of all heads that share a
key head, and the visible tiles of keys are divided among several programs, whose results a second kernel combines.

Long rows: a row that sees many more tiles than the others is divided among several programs. Some masks have a few long
rows beside many short ones: global tokens beside a window, say. One program would walk a long row while the rest of the
GPU idles. The exact counts of a layout say which rows are long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COORDINATES, SCORE, SIZES, Expr, uses, walk
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, alone, backward_of
from frisket.lowering.kernels.triton import cotangents
from frisket.lowering.kernels.triton.backward import DELTA
from frisket.lowering.kernels.triton.decode import emit, packed, rows_of_a_tile
from frisket.lowering.kernels.triton.forward import OptionalArrays
from frisket.lowering.kernels.triton.rows import axes_of
from frisket.lowering.kernels.triton.writer import Dims, padded
from frisket.lowering.plan import Geometry, LoopPlan, Spans, SpanSource, Target, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.calls.arrays import uploaded
from frisket.runtime.plans.device import FlatPlan, Values

from . import tiles as triton_tiles
from .launch import (
    GRID,
    Access,
    KernelArgs,
    KernelModule,
    Launch,
    LaunchConfig,
    LaunchContext,
    emitted_kernels,
    span_tables,
)

Tensor = Any
CapturedResult = tuple[str, tuple[int, ...]]  # the name of the parameter, and the shape
NO_FLAGS: Mapping[str, Any] = {}
# the fewest rows of tiles in a part of a block diagonal: a window has few diagonals, so these have parts
DIAGONAL_ROWS = 16
DIAGONAL_PARTS, ROOM = 8, 1 << 24  # the most parts of a block diagonal, and the most numbers in the sums of all parts

Grid = tuple[int, int, int]


def forward_plan(plan: LoopPlan, g: Geometry) -> LoopPlan:
    """The plan a forward kernel is printed for. A scale of 0 or less is applied score by score: the kernel that applies
    it to the maximum needs max(x * scale) = max(x) * scale."""
    return replace(plan, score=SCORE) if not g.scale > 0 and plan.score is None else plan


def backward_plan(plan: LoopPlan, g: Geometry) -> LoopPlan:
    """The plan backward kernels are printed for. A scale of 0 is applied score by score: for others, the accumulator of
    a product starts at lse / scale."""
    return replace(plan, score=SCORE) if g.scale == 0 and plan.score is None else plan


def of_forward(g: Geometry, target: Target) -> Grid:
    return grid_of(-(-g.q_len // target.block_q), g.heads, g.batch, target)


def grid_of(rows: int, heads: int, batch: int, target: Target) -> Grid:
    """The grid of a kernel whose programs have a row of tiles each."""
    return (heads, rows, batch) if axes_of(target)[0] else (rows, heads, batch)


class ForwardKind(NamedTuple):
    """The facts by which launches of one forward differ. `device_slots` have their values on the device, `row_max` and
    `lse_residual` are results next to out and lse, and `described` arrays are read by tensor descriptors."""

    device_slots: tuple[str, ...] = ()
    sinks: bool = False
    row_max: bool = False
    lse_residual: bool = False
    described: bool = False

    @property
    def tensors(self) -> dict[str, Access]:
        """The parameters behind the arrays, in the order in which a call brings them."""
        more = {"Top": self.row_max, "Low": self.lse_residual, "Sinks": self.sinks}
        return {"Out": "o", "Lse": "", **{n: "" for n, there in more.items() if there}}

    @property
    def optional(self) -> OptionalArrays:
        """The optional arrays of the kernel, by which its text differs."""
        return OptionalArrays(self.sinks, self.row_max, self.lse_residual)


@dataclass(frozen=True)
class LaunchStep:
    """One launch of a kernel. `side` is the method of a SpanSource that its records come from; a kernel without records
    reads no slots and no tables. The records are of tiles of `block`, or of the tile where that is None. `numbers` are
    values of parameters that are the launch's own."""

    name: str
    tile: Target
    grid: Grid
    side: Literal["", "rows", "columns"]
    block: tuple[int, int] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> tuple[int, int]:
        return self.block or (self.tile.block_q, self.tile.block_k)


def of_backward(g: Geometry, target: Target, kernels: Collection[str]) -> list[LaunchStep]:
    """The launches of a backward in their order: those of the `kernels` that the module has."""
    dq, dkv = target.dq or target, target.dkv or target
    dv = target.dv or dkv
    delta = LaunchStep("attention_delta", DELTA, (-(-g.q_len // DELTA.block_q), g.heads, g.batch), "")
    steps = [delta, LaunchStep("attention_dq", dq, of_forward(g, dq), "rows")]
    for name, tile in (("attention_dkv", dkv), ("attention_dv", dv)):
        grid = grid_of(-(-g.kv_len // tile.block_k), g.kv_heads, g.batch, tile)
        steps.append(LaunchStep(name, tile, grid, "columns"))
    return [s for s in steps if s.name in kernels]


# -- captured gradients -------------------------------------------------------------------------------


def by_position(plan: LoopPlan, grad_names: frozenset[str]) -> list[Gradient]:
    """The gradients that no row or column of tiles can sum."""
    captured = (x for x in backward_of(plan).gradients if x.source in grad_names)
    return [x for x in captured if x.over in ("diagonal", "scatter")]


def tiles(g: Geometry, side: int) -> tuple[int, int]:
    """Rows and columns of square tiles."""
    return -(-g.q_len // side), -(-g.kv_len // side)


@dataclass(frozen=True)
class Diagonals:
    """How the tiles along block diagonals are divided: each part of a diagonal has `share` rows of tiles."""

    across: int  # block diagonals
    share: int
    parts: int


def of_diagonals(g: Geometry, side: int, sums: int) -> Diagonals:
    rows, columns = tiles(g, side)
    across = rows + columns - 1
    room = ROOM // (g.batch * g.heads * sums * 2 * across * side)
    share = -(-rows // max(1, min(DIAGONAL_PARTS, rows // DIAGONAL_ROWS, room)))
    return Diagonals(across, share, -(-rows // share))


def of_plane(g: Geometry, side: int, shared: str) -> Grid:
    rows, columns = tiles(g, side)
    return rows * columns, 1 if "h" in shared else g.heads, 1 if "b" in shared else g.batch


def plane(gradient: Gradient, shape: Sequence[int], g: Geometry, slots: Values) -> str | None:
    """The axes "b" and "h" that share the entries of a table, where every query and key, and each of the other axes,
    has entries of its own; None where two may meet in one entry."""
    entries = zip(gradient.index, shape, strict=True)
    axes = {n for e, size in entries if (n := _apart(e, size, g, slots))}
    if not {"q", "k"} <= axes:
        return None
    moving = frozenset[str]().union(*map(uses, gradient.index))
    if any(np.ndim(start) for start in g.origin[2:]):  # another place in every batch
        moving |= {"b"}
    alike = [n for n, size in (("b", g.batch), ("h", g.heads)) if n in moving and n not in axes and size > 1]
    return None if alike else "".join(n for n in "bh" if n not in moving)


def _apart(entry: Expr, size: int, g: Geometry, slots: Values) -> str | None:
    """The coordinate that an index is, up to a constant, where none of its values is clamped; otherwise None."""
    name = alone(entry)
    if name is None:
        return None
    at = COORDINATES.index(name)
    length, start = (g.batch, g.heads, g.q_len, g.kv_len)[at], g.origin[at]
    env = {**dict.fromkeys(COORDINATES, 0), **dict(zip(SIZES, g.full, strict=True)), **slots}
    read = [env[e.name] for e in walk(entry) if e.op in ("var", "param")]
    if not all(map(of_host, (start, *read))):
        return None  # known on the device alone
    step = int(evaluate(entry, env))
    inside = step + int(np.min(start)) >= 0 and step + int(np.max(start)) + length <= size
    return name if inside else None


class CapturedKernels:
    """The kernels of captured gradients that no row or column of tiles can sum, "diagonal" and "scatter", in square
    tiles. A subclass for a framework says how its arrays are given to a kernel, and added up in fixed point."""

    plan: LoopPlan
    geometry: Geometry
    tile: Target
    slots: Values
    tables: Values

    def run(
        self, emit: Callable[..., str], parts: tuple[Any, ...], kernel: str, grid: Grid, result: CapturedResult, *,
        flags: Mapping[str, bool] = NO_FLAGS, more: Values = NO_FLAGS, zeroed: bool = False, **numbers: Any,
    ) -> Any:  # fmt: skip
        """The result of a kernel, of the text that `emit` writes of the plan, the tile and `parts`. `more` are operands
        next to the arrays; a `zeroed` result begins as 0."""
        raise NotImplementedError

    def padded(self, x: Any, before: int, behind: int) -> Any:
        """The array with zeros along its last axis but one."""
        raise NotImplementedError

    def in_fixed_point(self, total: Any, shape: tuple[int, ...], count: Callable[..., Any]) -> Any:
        """Sums of units, whose number in 1 is chosen by the total of all magnitudes. `count(result, per_unit)` gives
        them as integers."""
        raise NotImplementedError

    def buffers(self, gradients: Sequence[Gradient], deterministic: bool = True) -> dict[Gradient, Any]:
        """A buffer for each of the gradients, float32 and of the shape `derive.Gradient` describes."""
        by_distance = tuple(g for g in gradients if g.over == "diagonal")
        buffers = dict(zip(by_distance, self.diagonals(by_distance), strict=True)) if by_distance else {}
        return buffers | {g: self.scattered(g, deterministic) for g in gradients if g.over == "scatter"}

    def diagonals(self, gradients: tuple[Gradient, ...]) -> list[Any]:
        g, side, factors = self.geometry, self.tile.block_q, cotangents.weights(gradients)
        grid = of_diagonals(g, side, len(factors))
        shape = g.batch, g.heads, len(factors), grid.parts, 2, grid.across, side
        programs = grid.across * grid.parts, g.heads, g.batch
        run = partial(self.run, cotangents.diagonal, (gradients,), "attention_diagonal", programs)
        sums = run(("Sums", shape), share=grid.share).sum(3)
        low, high = sums[:, :, :, 0], sums[:, :, :, 1]  # diagonals c of a tile, and c - side: those of the next one up
        whole = self.padded(low, 1, 0) + self.padded(high, 0, 1)
        whole = whole.reshape(*whole.shape[:3], -1)
        first = tiles(g, side)[1] * side - g.kv_len + 1
        whole = whole[..., first : first + g.q_len + g.kv_len - 1]
        return [whole[:, :, factors.index(x.weight)] for x in gradients]

    def scattered(self, gradient: Gradient, deterministic: bool) -> Any:
        g, side, shape = self.geometry, self.tile.block_q, self.tables[gradient.source].shape
        shared = self.plane(gradient)
        if shared is not None:
            run = partial(self.run, cotangents.plane, (gradient, shared), "attention_plane", of_plane(g, side, shared))
            return run(("Into", shape), zeroed=True, batches=g.batch)
        rows = tiles(g, side)[0]
        run = partial(self.run, cotangents.scatter, (gradient,), grid=(rows, g.heads, g.batch))
        run = partial(run, flags={"fixed": deterministic})
        if not deterministic:
            return run("attention_scatter", result=("Into", shape), zeroed=True)
        total = run("attention_total", result=("Total", (g.batch, g.heads, rows)))
        count = partial(run, "attention_scatter", zeroed=True)
        return self.in_fixed_point(total, shape, lambda result, per: count(result=result, more={"PerUnit": per}))

    def plane(self, gradient: Gradient) -> str | None:
        """The axes "b" and "h" that share a place of the table, where every query and key, and what of the two is left,
        has a place of its own; None where that is not so or not known."""
        return plane(gradient, self.tables[gradient.source].shape, self.geometry, self.slots)


def of_host(x: Any) -> bool:
    """Whether a number, or a vector of them, is known without asking a device."""
    return isinstance(x, bool | int | float | np.generic | np.ndarray)


# -- few queries -------------------------------------------------------------------------------------

PACK = 64  # queries of one head that fill a tile: from here on heads are not packed, unless FULLER says so
FILLED = 0.8  # share of the slots (programs that run at once): with this many programs nothing is split
# Prompts over EVEN_KEYS times as many keys have rows of tiles of about one length, and wait for products: WAVES waves
# of their programs are not split. Heads are packed where one alone fills less than FULLER of what packed heads fill.
EVEN_KEYS, WAVES, FULLER = 4, 4, 0.9
LEAST_TILES = 4  # so few tiles of 64 keys are not worth splitting
MOST = 256  # parts of a row
# Sequences have parts in proportion to the tiles that they see where three things hold: to read the longest row of
# tiles costs at least RAGGED times what the results of a part cost; one head has at most MOST_ROWS rows; and the
# longest sequence sees more than EVEN times the mean. By the model of benchmarks/gpu_sim, one sequence of 128k tokens
# among 31 of 1k would take 10 times as long without. Sequences of equal length take 1 to 6 % longer with it, and 9 %
# with int8 in pages of 16, where ptxas gives a thread 168 registers, not 255. MOST_ROWS rows of MOST parts, and one
# more for each, are the 65,535 programs that an axis of a grid may have.
RAGGED, MOST_ROWS, EVEN = 64, 255, 1.25
# Programs of four warps that share a processor: one waits for memory while the other converts and multiplies.
BLOCKS = 2
DEEP = 98_304  # bytes of keys and values that three stages may hold, where a program may have as much
FLOP = 180  # operations in 16 bits that an H100 does while it reads one byte, at 60 % of its peak
# The time of a program's first and last instructions, and that of the kernel that combines: as bytes read meanwhile.
START, COMBINE = 16_384, 32_768
NEAR = 1.03  # times the least cost: up to here fewer parts are as good
INTERPRETED = 4  # processors of Triton's interpreter, which runs one program after another
NOTHING = make_plan(ProgramExprs())  # the plan of the kernel that combines
NO_VALUES = KernelArgs(({}, {}), (), (), (), ())


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

    @property
    def text_target(self) -> Target:
        """The target that the kernels are printed for: they are the same for any number of parts."""
        return replace(self.target, splits=int(self.alone))

    @property
    def flags(self) -> dict[str, bool]:
        """The flags by which the text of the kernels differs."""
        return {"packs": self.pack > 1, "balanced": self.balanced}

    def grid(self, g: Geometry) -> tuple[int, int, int]:
        rows, heads = -(-g.q_len // self.queries), g.heads // self.pack
        if self.balanced:  # rounding up gives each row one part more at most
            return heads, g.batch * rows * (self.target.splits + 1), 1
        return rows * self.target.splits, heads, g.batch

    def results(self, g: Geometry) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shapes and dtypes of the arrays that hold the results of parts until they are combined."""
        heads, programs, _ = self.grid(g)
        of_row = self.target.splits, g.batch, g.heads, g.q_len
        rows = (programs, g.heads, min(g.q_len, self.queries)) if self.balanced else of_row
        shapes: dict[str, tuple[tuple[int, ...], type]] = {"Acc": ((*rows, g.v_dim), np.float32)}
        shapes |= dict.fromkeys(("Tops", "Totals"), (rows, np.float32))
        if self.balanced:
            shapes["Parts"] = (heads, programs // (self.target.splits + 1), 2), np.int32
        return shapes

    def steps(self, g: Geometry) -> list[LaunchStep]:
        """The launch of the parts, and where rows have several, that of the kernel that combines their `results`."""
        splits = {"splits": self.target.splits}
        numbers = {**splits, "batches": g.batch}
        first = LaunchStep("attention_decode", self.target, self.grid(g), "rows", self.block, numbers)
        if self.alone:
            return [first]
        division = {"queries": self.queries, "pack": self.pack} if self.balanced else splits
        numbers = {"heads": g.heads, "q_len": g.q_len, **division}
        grid, tile = (g.q_len, g.heads, g.batch), replace(self.target, num_warps=2)
        return [first, LaunchStep("attention_combine", tile, grid, "", numbers=numbers)]


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
    # a text may be asked for without a query
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
        short = tiles * decode_target.block_k <= LEAST_TILES * 64
        splits = 1 if short else parts(programs, slots, tiles, tile, results, waves)
        long = tiles * read >= RAGGED * results and g.batch * -(-g.q_len // queries) <= MOST_ROWS
        if long and ragged(plan, spans, g, block):
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
    of_part = {n: START + -(-tiles // n) * tile + results * (n > 1) for n in range(1, min(MOST, tiles) + 1)}
    cost = {n: -(-programs * n // slots) * x + COMBINE * (n > 1) for n, x in of_part.items()}
    return next(n for n, x in cost.items() if x <= NEAR * min(cost.values()))


def processors(device: Any) -> int:
    return triton_tiles.processors(device) if device.type == "cuda" else INTERPRETED


class DividedLaunch:
    """The launches of a kernel whose programs share rows: `first` leaves the results of parts in arrays of
    `partial_shapes`, and `combine` makes a row's result of them."""

    first: Launch
    combine: Launch | None = None  # None: rows have one part
    partial_shapes: Mapping[str, tuple[tuple[int, ...], type]]
    inputs: int  # tensors that `first` alone reads
    writes: bool  # whether `first` writes results too

    def __call__(self, values: KernelArgs, *tensors: Tensor) -> None:
        import torch

        if self.combine is None:
            self.first(values, *tensors)
            return
        kinds: dict[Any, Any] = {np.float32: torch.float32, np.int32: torch.int32}
        device = tensors[0].device
        partials = [torch.empty(shape, dtype=kinds[x], device=device) for shape, x in self.partial_shapes.values()]
        results = tensors[self.inputs :]
        self.first(values, *(tensors if self.writes else tensors[: self.inputs]), *partials)
        self.combine(NO_VALUES, *partials, *results)


class Parts(DividedLaunch):
    """The launches of a call of few queries: two, or one where rows have one part."""

    inputs, writes = 3, False

    def __init__(
        self, context: LaunchContext, plan: LoopPlan, spans: SpanSource | None, chosen: Shares, kind: ForwardKind
    ) -> None:
        g, dims = context.geometry, context.dims(kind.device_slots)
        kernels = emitted_kernels(emit, plan, chosen.text_target, dims, kind.optional, **chosen.flags)
        self.splits, self.partial_shapes = chosen.target.splits, chosen.results(g)
        partial: dict[str, Access] = dict.fromkeys(self.partial_shapes, "")
        step, *combines = chosen.steps(g)
        tensors: dict[str, Access] = {"Q": "q", "K": "k", "V": "v", **(partial if combines else kind.tensors)}
        config = LaunchConfig(kernels, step.name, step.grid, step.tile, tensors, kind.device_slots)
        records = None if spans is None else spans.rows
        self.first = context.launch(config, records=records, block=step.block, **step.numbers)
        for last in combines:
            config = LaunchConfig(kernels, last.name, last.grid, last.tile, partial | kind.tensors)
            self.combine = Launch(config, NOTHING, context.device, last.numbers)


# -- long rows of tiles -------------------------------------------------------------------------------

# A row is divided where it has LONG times the tiles of a share: of what each program of those that run at a time has in
# the mean. The first and the last instructions of a program take as long as FIXED tiles. Parts are FINER than a share,
# as more programs may run at a time than the host takes for granted, and have some LEAST tiles. Where long rows of some
# heads start behind the rows of others, shares are LATER times smaller.
LONG, FIXED, FINER, LEAST, LATER = 1.25, 2, 2, 16, 4


@dataclass(frozen=True, eq=False)
class RowParts:
    """The programs of a launch, by the names of the kernels' parameters, and the number of places for their sums."""

    # [slices, programs, 4]: row (-1: none), the place of a part's sums (-1: a whole row), first tile, end of tiles
    programs: NDArray[np.int32]
    rows: NDArray[np.int32]  # [slices, rows in parts, 3]: row, the first place of its sums, parts
    at: NDArray[np.int32]  # [batch, heads]: the first place of a head
    places: int


def row_parts(spans: Spans, slots: int, group: int = 1, later: bool = False) -> RowParts | None:
    """The programs of every slice, those with the most tiles first, where `slots` programs run at a time; None where no
    row is long. A program walks its row for `group` heads, which see alike; `later` says that long rows of some heads
    start behind short ones of others."""
    tiles = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1, dtype=np.int64)
    slice_of = spans.slice_of[:, ::group]
    used = np.bincount(slice_of.ravel(), minlength=len(tiles))
    later = later and tiles.max() > 2 * tiles.mean()  # among rows alike none ends late
    share = max(LEAST, int(used @ (group * tiles + FIXED).sum(1)) // (slots * (LATER if later else 1)))
    of_part = -(-max(LEAST, share // FINER) // group)
    parts = np.where(group * tiles > LONG * share, -(-tiles // of_part), 1)
    if not (parts[used > 0] > 1).any() or (spans.slice_of != np.repeat(slice_of, group, 1)).any():
        return None
    slices = [_of_slice(*x) for x in zip(tiles, parts)]
    programs = np.full((len(tiles), max(len(x) for x, _ in slices), 4), -1, np.int32)
    rows = np.zeros((len(tiles), max(len(x) for _, x in slices), 3), np.int32)
    for one, (listed, divided) in enumerate(slices):
        programs[one, : len(listed)], rows[one, : len(divided)] = listed, divided
    places = rows[..., 2].sum(1)[slice_of].astype(np.int32)
    ends = places.cumsum(dtype=np.int32).reshape(places.shape)
    return RowParts(programs, rows, ends - places, int(ends[-1, -1]))


def _of_slice(tiles: NDArray[np.int64], parts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(programs, rows in parts) of one slice."""
    row = np.repeat(np.arange(len(tiles)), parts)
    part = np.arange(len(row)) - np.repeat(parts.cumsum() - parts, parts)
    divided = np.flatnonzero(parts > 1)
    first = np.zeros_like(parts)
    first[divided] = parts[divided].cumsum() - parts[divided]
    begin, end = (x * tiles[row] // parts[row] for x in (part, part + 1))
    programs = np.stack([row, np.where(parts[row] > 1, first[row] + part, -1), begin, end], 1)
    return programs[np.argsort(begin - end, kind="stable")], np.stack([divided, first[divided], parts[divided]], 1)


def of_call(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, processors: int, *, walked: bool = False
) -> RowParts | None:
    """The programs of a launch that walks rows of tiles, or `walked` columns, where some are long and the host knows
    their lengths; None where there is a program for each row."""
    if target.splits == 1 or target.order == "forward" or spans is None:
        return None
    if plan.mask is None or (plan.bounds is not None and not walked):
        return None
    records = (spans.columns if walked else spans.rows)((target.block_q, target.block_k))
    if not isinstance(records, Spans):
        return None
    group = g.heads // g.kv_heads if walked else 1
    later = g.batch > 1 or (g.heads > group and axes_of(target)[0] == 0)
    parts = row_parts(records, processors * (BLOCKS if target.num_warps == 4 else 1), group, later)
    return parts if parts is not None and parts.programs.shape[1] <= GRID else None


def walking_queries(target: Target) -> tuple[str, ...]:
    """The kernels of a target that own keys and walk tiles of queries."""
    return ("attention_dkv", "attention_dv") if target.dv else ("attention_dkv",)


def listed_kernels(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, processors: int
) -> frozenset[str]:
    """The kernels of a call for whose programs there is a table."""
    walked = walking_queries(target)
    tiles = {n: triton_tiles.of_kernel(n, target) for n in ("attention_forward", "attention_dq", *walked)}
    parts = {n: of_call(plan, spans, g, tile, processors, walked=n in walked) for n, tile in tiles.items()}
    return frozenset(n for n, x in parts.items() if x is not None)


class RowLaunches(DividedLaunch):
    """The launches of a kernel whose programs share long rows."""

    writes = True

    def __init__(
        self, context: LaunchContext, kernels: KernelModule, names: tuple[str, str], target: Target, parts: RowParts,
        records: Callable[[tuple[int, int]], Any], inputs: dict[str, Access], sums: dict[str, tuple[int, ...]],
        results: dict[str, Access], device_slots: tuple[str, ...],
    ) -> None:  # fmt: skip
        """`names` are the kernels. `inputs` are the tensors that the first one reads, `results` those that both write,
        and `sums` the float32 arrays that hold what it leaves of parts, with the shapes of a query or key."""
        g, device = context.geometry, context.device
        walked = names[0] in ("attention_dkv", "attention_dv")
        rows, heads = (target.block_k, g.kv_heads) if walked else (target.block_q, g.heads)
        self.partial_shapes = {n: ((parts.places, rows, *shape), np.float32) for n, shape in sums.items()}
        partial: dict[str, Access] = dict.fromkeys(sums, "")
        at = uploaded(parts.at, device)
        grid = grid_of(parts.programs.shape[1], heads, g.batch, target)
        config = LaunchConfig(kernels, names[0], grid, target, inputs | results | partial, device_slots)
        self.first = context.launch(config, records=records, Parts=uploaded(parts.programs, device), At=at)
        slices = span_tables(records(self.first.tile), device)["SliceOf"]
        listed = {"Rows": uploaded(parts.rows, device), "SliceOf": slices, "At": at}
        numbers = {"heads": g.heads, "q_len": g.q_len, "kv_len": g.kv_len, "queries": rows, "scale": g.scale}
        grid, tile = (parts.rows.shape[1] * rows, heads, g.batch), replace(target, num_warps=2)
        config = LaunchConfig(kernels, names[1], grid, tile, partial | results)
        self.combine = Launch(config, NOTHING, device, numbers | listed)
        self.inputs = len(inputs)
