"""The programs of a launch, for torch and JAX: grids, few queries in several parts, and long rows of tiles.

Few queries: a program of the forward reads all keys that a tile of queries sees. With few queries most of the tile is
empty, and there are fewer programs than the GPU can run at once. So a tile holds the queries of all heads that share a
key head, and the visible tiles of keys are divided among several programs. A second kernel combines the results.

Long rows: a row that sees many more tiles than the others is divided among several programs. Some masks have a few long
rows and many short ones: global tokens and a window, say. One program would walk a long row while the rest of the
GPU idles. The exact counts of a layout say which rows are long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COORDINATES, SCORE, SIZES, Expr, uses, walk
from frisket.grammar.memo import memo
from frisket.lowering.architectures import GPUS, H100
from frisket.lowering.derive import Gradient, alone, backward_of
from frisket.lowering.dtypes import DTYPES
from frisket.lowering.kernels.triton import captured
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.backward import DELTA, Sum
from frisket.lowering.kernels.triton.forward import OptionalArrays, packed, rows_of_a_tile
from frisket.lowering.kernels.triton.module import Dims, padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.triton.writer import axes_of
from frisket.lowering.plan import Geometry, LoopPlan, Spans, SpanSource
from frisket.runtime.plans.device import FlatPlan, Values

from . import tiles as triton_tiles
from .launch import GRID, Grid, LaunchStep, Shaped, dry_run

EMPTY: Mapping[str, Any] = {}
OF_KEYS = ("attention_dkv", "attention_dv")  # kernels that own keys and walk tiles of queries
OF_GRADIENTS = ("attention_dq", *OF_KEYS)
# the fewest rows of tiles in a part of a block diagonal: a window has few diagonals, so these have parts
DIAGONAL_ROWS = 16
DIAGONAL_PARTS, ROOM = 8, 1 << 24  # the most parts of a block diagonal, and the most numbers in the sums of all parts


def forward_plan(plan: LoopPlan, g: Geometry, invariant: bool = False) -> LoopPlan:
    """The plan a forward kernel is printed for. A scale of 0 or less is applied score by score: the kernel that applies
    it to the maximum needs max(x * scale) = max(x) * scale. So is that of `invariant` calls, some of which may have
    simplified their score mod away."""
    return replace(plan, score=SCORE) if (invariant or not g.scale > 0) and plan.score is None else plan


def backward_plan(plan: LoopPlan, g: Geometry) -> LoopPlan:
    """The plan backward kernels are printed for. A scale of 0 is applied score by score: for others, the accumulator of
    a product starts at lse / scale."""
    return replace(plan, score=SCORE) if g.scale == 0 and plan.score is None else plan


def of_forward(g: Geometry, target: Target) -> Grid:
    return grid_of(-(-g.q_len // target.block_q), g.heads, g.batch, target)


def grid_of(rows: int, heads: int, batch: int, target: Target) -> Grid:
    """The grid of a kernel whose programs have a row of tiles each."""
    return (heads, rows, batch) if axes_of(target)[0] else (rows, heads, batch)


class KernelProgram(NamedTuple):
    """The launches of a call in their order, and the text of their kernels: `emit` of a plan, `parts` and `flags`."""

    emit: Callable[..., str]
    parts: tuple[Any, ...]
    flags: Mapping[str, Any]
    steps: list[LaunchStep]


class ForwardKind(NamedTuple):
    """The facts by which launches of one forward differ. `device_slots` have their values on the device, `row_max` and
    `lse_residual` are results next to out and lse, and `described` arrays are read by tensor descriptors. With
    `shared_values` values are the first numbers of keys, in the same memory."""

    device_slots: tuple[str, ...] = ()
    sinks: bool = False
    row_max: bool = False
    lse_residual: bool = False
    described: bool = False
    shared_values: bool = False

    @property
    def optional(self) -> OptionalArrays:
        """The optional arrays of the kernel, by which its text differs."""
        return OptionalArrays(self.sinks, self.row_max, self.lse_residual)

    def program(
        self, plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, dims: Dims, processors: int
    ) -> KernelProgram:
        """The kernels of a forward: of few queries, of rows of which some are long, or one kernel."""
        of_few = replace(dims, shared_values=self.shared_values)
        few = shares(plan, spans, g, target, of_few, processors)
        if few is not None:
            steps = of_weights(few.steps(g)) if plan.weighted else few.steps(g)
            return KernelProgram(triton_forward.emit_decode, (few.text_target, of_few, self.optional), few.flags, steps)
        steps = [LaunchStep("attention_forward", target, of_forward(g, target), "rows")]
        parts = of_call(plan, spans, g, target, processors)
        if parts is not None:
            sums: dict[str, tuple[int, ...]] = {"Acc": (g.v_dim,), "Tops": (), "Totals": ()}
            steps = divided(steps[0], "attention_combine", g, parts, sums)
            steps = of_weights(steps) if plan.weighted else steps
        return KernelProgram(triton_forward.emit, (target, dims, self.optional), {"listed": parts is not None}, steps)


def of_weights(steps: list[LaunchStep]) -> list[LaunchStep]:
    """The launches of a forward of weighted rows. Parts leave numbers of keys in the place of largest scores, and the
    kernel that combines them reads slots and tables, by which it divides."""
    first, *more = steps
    leaves = dict(first.leaves)
    if "Tops" in leaves:
        leaves["Counts"] = leaves.pop("Tops")[0], np.int32
    return [replace(first, leaves=leaves), *(replace(step, side="rows") for step in more)]


def of_backward(
    g: Geometry,
    target: Target,
    kernels: Mapping[str, Collection[str]],
    totals: Sequence[Sum] = (),
    parts: Mapping[str, RowParts] = EMPTY,
) -> list[LaunchStep]:
    """The launches of a backward in their order: those of the `kernels` that the module has, each with the names of its
    parameters. `totals` are the sums that they write, and `parts` the programs of those whose rows several share."""
    dq, dkv = target.dq or target, target.dkv or target
    steps = [LaunchStep("attention_delta", DELTA, (-(-g.q_len // DELTA.block_q), g.heads, g.batch), "")]
    steps.append(LaunchStep("attention_dq", dq, of_forward(g, dq), "rows"))
    for name, tile in zip(OF_KEYS, (dkv, target.dv or dkv)):
        grid = grid_of(-(-g.kv_len // tile.block_k), g.kv_heads, g.batch, tile)
        steps.append(LaunchStep(name, tile, grid, "columns"))
    widths = {"DQ": g.head_dim, "DK": g.head_dim, "DV": g.v_dim}
    widths |= {s.buffer: g.heads // g.kv_heads if s.along == "k" else 1 for s in totals}  # one for each head
    launches: list[LaunchStep] = []
    for step in [s for s in steps if s.name in kernels]:
        if step.name in parts:
            last = f"{step.name}_sums"
            sums = {"Acc": (sum(widths.get(n, 0) for n in kernels[last]),)}
            launches += divided(step, last, g, parts[step.name], sums)
        else:
            launches.append(step)
    return launches


# -- captured gradients -------------------------------------------------------------------------------


def by_position(plan: LoopPlan, grad_names: frozenset[str]) -> list[Gradient]:
    """The gradients that no row or column of tiles can sum."""
    captured = (x for x in backward_of(plan).gradients if x.source in grad_names)
    return [x for x in captured if x.over in ("diagonal", "scatter")]


def shapes_of(totals: Sequence[Sum], g: Geometry) -> dict[str, tuple[int, ...]]:
    """The shapes of the float32 buffers of sums of rows and columns, by their names."""
    return {s.buffer: (g.batch, g.heads, g.kv_len if s.along == "k" else g.q_len) for s in totals}


def tiles(g: Geometry, side: int) -> tuple[int, int]:
    """Rows and columns of square tiles."""
    return -(-g.q_len // side), -(-g.kv_len // side)


def of_diagonals(g: Geometry, side: int, sums: int) -> tuple[int, int, int]:
    """(block diagonals, rows of tiles in a part of one, parts of one)."""
    rows, columns = tiles(g, side)
    across = rows + columns - 1
    room = ROOM // (g.batch * g.heads * sums * 2 * across * side)
    share = -(-rows // max(1, min(DIAGONAL_PARTS, rows // DIAGONAL_ROWS, room)))
    return across, share, -(-rows // share)


def of_plane(g: Geometry, side: int, shared: str) -> Grid:
    rows, columns = tiles(g, side)
    return rows * columns, 1 if "h" in shared else g.heads, 1 if "b" in shared else g.batch


def plane(gradient: Gradient, shape: Sequence[int], g: Geometry, slots: Values) -> str | None:
    """The axes "b" and "h" that share the entries of a table, where every query and key, and each of the other axes,
    has separate entries. None where two may meet in one entry."""
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


class CapturedLaunch(NamedTuple):
    """A launch of a kernel of captured gradients, of the text that `emit` writes of the plan, the tile and `parts`.
    Also the name and shape of its result, which begins as 0 where it is `zeroed`."""

    emit: Callable[..., str]
    parts: tuple[Any, ...]
    step: LaunchStep
    result: str
    shape: tuple[int, ...]
    zeroed: bool = False


class CapturedKernels:
    """The kernels of captured gradients that no row or column of tiles can sum, "diagonal" and "scatter", in square
    tiles. A subclass for a framework says how its arrays are given to a kernel, and added up in fixed point."""

    plan: LoopPlan
    geometry: Geometry
    tile: Target
    slots: Values
    tables: Values

    def run(self, launch: CapturedLaunch, operands: Values = EMPTY) -> Any:
        """The result of a launch; `operands` are those next to the arrays."""
        raise NotImplementedError

    def padded(self, x: Any, before: int, behind: int) -> Any:
        """The array with zeros along its last axis but one."""
        raise NotImplementedError

    def in_fixed_point(self, total: Any, count: CapturedLaunch) -> Any:
        """Sums of units, whose number in 1 is chosen by the total of all magnitudes. `count`, which reads that number
        as `PerUnit`, gives them as integers."""
        raise NotImplementedError

    def buffers(self, gradients: Sequence[Gradient], deterministic: bool = True) -> dict[Gradient, Any]:
        """A buffer for each of the gradients, float32 and of the shape `derive.Gradient` describes."""
        by_distance = tuple(g for g in gradients if g.over == "diagonal")
        buffers = dict(zip(by_distance, self.diagonals(by_distance), strict=True)) if by_distance else {}
        return buffers | {g: self.scattered(g, deterministic) for g in gradients if g.over == "scatter"}

    def diagonals(self, gradients: tuple[Gradient, ...]) -> list[Any]:
        g, side, factors = self.geometry, self.tile.block_q, captured.weights(gradients)
        across, share, parts = of_diagonals(g, side, len(factors))
        shape = g.batch, g.heads, len(factors), parts, 2, across, side
        step = self.step("diagonal", (across * parts, g.heads, g.batch), share=share)
        sums = self.run(CapturedLaunch(captured.diagonal, (gradients,), step, "Sums", shape)).sum(3)
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
            step = self.step("plane", of_plane(g, side, shared), batches=g.batch)
            return self.run(CapturedLaunch(captured.plane, (gradient, shared), step, "Into", shape, zeroed=True))
        rows, parts = tiles(g, side)[0], (gradient, deterministic)
        grid = rows, g.heads, g.batch
        add = CapturedLaunch(captured.scatter, parts, self.step("scatter", grid), "Into", shape, zeroed=True)
        if not deterministic:
            return self.run(add)
        step = self.step("total", grid)
        total = self.run(CapturedLaunch(captured.scatter, parts, step, "Total", (g.batch, g.heads, rows)))
        return self.in_fixed_point(total, add._replace(result="Counted"))

    def step(self, kernel: str, grid: Grid, **numbers: int) -> LaunchStep:
        return LaunchStep(f"attention_{kernel}", self.tile, grid, "rows", numbers=numbers)

    def plane(self, gradient: Gradient) -> str | None:
        """The axes "b" and "h" that share a place of the table, where every query and key, and what of the two is left,
        has a separate place. None where that is not so or not known."""
        return plane(gradient, self.tables[gradient.source].shape, self.geometry, self.slots)


def of_host(x: Any) -> bool:
    """Whether a number, or a vector of them, is known without asking a device."""
    return isinstance(x, bool | int | float | np.generic | np.ndarray)


# -- few queries -------------------------------------------------------------------------------------

PACK = 64  # queries of one head that fill a tile: from here on heads are not packed, unless FULLER says so
FILLED = 0.8  # share of the slots (programs that run at once): with this many programs nothing is split
# Prompts over EVEN_KEYS times as many keys make rows of about one length, and wait for products: WAVES waves
# of their programs are not split. Heads are packed where one alone fills less than FULLER of what packed heads fill.
EVEN_KEYS, WAVES, FULLER = 4, 4, 0.9
LEAST_TILES = 4  # so few tiles of 64 keys are not worth splitting
MOST = 256  # parts of a row
# Sequences have parts in proportion to the tiles that they see where three things hold. To read the longest row of
# tiles costs at least RAGGED times what the results of a part cost. One head has at most MOST_ROWS rows. The
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

    def results(self, g: Geometry) -> Shaped:
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
        splits, tile = self.target.splits, replace(self.target, num_warps=2)
        leaves = {} if self.alone else self.results(g)
        numbers = {"splits": splits, "batches": g.batch}
        first = LaunchStep("attention_decode", self.target, self.grid(g), "rows", self.block, numbers, leaves)
        division = {"queries": self.queries, "pack": self.pack} if self.balanced else {"splits": splits}
        last = LaunchStep("attention_combine", tile, (g.q_len, g.heads, g.batch), "", numbers=division)
        return [first] if self.alone else [first, last]


def shares(
    plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, dims: Dims, processors: int
) -> Shares | None:
    """How a call of few queries is divided, or None where the forward kernel is as good: `target.splits` is 1, or heads
    are not packed and there are enough programs. Reads nothing from a device."""
    if target.splits == 1:
        return None
    latent = latent_tile(plan, g, target, dims)
    pack = packed(plan, dims, latent.block_q if latent else 0) if _whole_groups(g) else 1
    even = g.kv_len >= EVEN_KEYS * g.q_len  # rows of tiles see about as much as one another
    most = latent.block_q if latent else rows_of_a_tile(dims)
    # a text may be asked for without a query
    if g.q_len >= PACK and not (
        even and _used(g.q_len, target.block_q) < FULLER * _used(g.q_len, max(1, most // pack))
    ):
        pack = 1
    most = most if pack > 1 or most < PACK // 2 else target.block_q  # larger heads have few rows
    rows = latent.block_q if latent else max(min(most, padded(g.q_len * pack)), padded(pack))
    queries = rows // pack
    programs = -(-g.q_len // queries) * g.batch * g.heads // pack
    decode_target = latent or _hurried(target.decode or target, dims, rows, plan.pages is not None)
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
        if latent and rows >= PACK and not short:
            splits = max(splits, 2)  # the sums leave no registers for results of whole rows
        long = tiles * read >= RAGGED * results and g.batch * -(-g.q_len // queries) <= MOST_ROWS
        if long and ragged(plan, spans, g, block):
            return Shares(replace(decode_target, block_q=rows, splits=splits), queries, pack, block, balanced=True)
        if splits == 1 and (short or pack == 1):
            return None
    return Shares(replace(decode_target, block_q=rows, splits=splits), queries, pack, block)


def latent_tile(plan: LoopPlan, g: Geometry, target: Target, dims: Dims) -> Target | None:
    """The target of few queries whose values are the first numbers of keys. It has the tile with the fewest rows of
    which two hold all queries that share a key head, else the one with the most. None where other values' tiles
    serve."""
    decode_target = target.decode or target
    if not (decode_target.latent and dims.values_in_keys and not target.fixed):
        return None
    heads = 1 if plan.uses_head or not _whole_groups(g) else dims.group
    tiles = decode_target.latent
    rows, keys, warps, stages = next((x for x in tiles if g.q_len * heads <= 2 * x[0]), tiles[-1])
    return replace(decode_target, block_q=rows, block_k=keys, num_warps=warps, num_stages=stages)


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
    read = keys * (g.head_dim if dims.values_in_keys else width) * dims.kv_bytes
    return read, max(read, keys * width * 2 * rows // FLOP), 8 * rows * (g.v_dim + 2)


def _whole_groups(g: Geometry) -> bool:
    """Whether the call begins with the first head of a group, as the call of every shard does. Then h // group is the
    same for all heads in a tile."""
    first = g.origin[1]
    return not of_host(first) or int(first) % (g.heads // g.kv_heads) == 0


def _hurried(target: Target, dims: Dims, rows: int, paged: bool) -> Target:
    """The target of few queries, which wait for memory: more stages of loads, where they fit, and no more warps than
    rows need. With pages five stages do what three do without, as the number of a page is loaded before its keys."""
    of_entry = dims.kv_bytes if dims.half else DTYPES[dims.dtype].bytes
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
    dry = dry_run.get()
    if dry is not None and dry.arch:
        return GPUS[dry.arch].processors or H100.processors
    device = device if dry is None else dry.device
    return triton_tiles.processors(device) if device.type == "cuda" else INTERPRETED


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
    slice_of: NDArray[np.int32]  # of the spans


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
    return RowParts(programs, rows, ends - places, int(ends[-1, -1]), spans.slice_of)


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
    their lengths. None where there is a program for each row."""
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


def of_kernels(
    names: Sequence[str], plan: LoopPlan, spans: SpanSource | None, g: Geometry, target: Target, processors: int
) -> dict[str, RowParts]:
    """The programs of those kernels of a call that walk a table of them."""
    tiles = {n: triton_tiles.of_kernel(n, target) for n in names if n != "attention_dv" or target.dv}
    parts = {n: of_call(plan, spans, g, tile, processors, walked=n in OF_KEYS) for n, tile in tiles.items()}
    return {n: x for n, x in parts.items() if x is not None}


def divided(
    step: LaunchStep, combine: str, g: Geometry, parts: RowParts, sums: Mapping[str, tuple[int, ...]]
) -> list[LaunchStep]:
    """The launches of a step whose programs share long rows. It leaves float32 `sums` of parts, with the shapes of a
    query or key, which the kernel `combine` adds up."""
    walked, tile = step.side == "columns", step.tile
    rows, heads = (tile.block_k, g.kv_heads) if walked else (tile.block_q, g.heads)
    grid = grid_of(parts.programs.shape[1], heads, g.batch, tile)
    leaves = {n: ((parts.places, rows, *shape), np.float32) for n, shape in sums.items()}
    first = replace(step, grid=grid, numbers={"Parts": parts.programs, "At": parts.at}, leaves=leaves)
    numbers = {"Rows": parts.rows, "SliceOf": parts.slice_of, "At": parts.at, "queries": rows}
    grid = parts.rows.shape[1] * rows, heads, g.batch
    return [first, LaunchStep(combine, replace(tile, num_warps=2), grid, "", numbers=numbers)]
