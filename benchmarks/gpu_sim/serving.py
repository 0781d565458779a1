"""Steps of serving: few queries of every sequence over a long cache of keys and values, which HBM brings once.

A program reads its share of the tiles of one sequence and one key head. Programs start in the order of the launch, each
where a place is free first. Each has a part of the time beside its tiles, and then reads as fast as its loops do where
as many blocks share the SM; all together read no faster than HBM. What one program leaves of the rate, others take. A
second kernel combines the parts. The share of a step is the time in which HBM brings the visible keys and values, their
scales and page numbers, over the time of its kernels.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.triton import decode
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, Pages, make_plan
from frisket.runtime.backends.triton import report
from frisket.runtime.backends.triton.decode import Shares, shares
from frisket.runtime.backends.triton.source import load
from frisket.runtime.backends.triton.tiles import MEDIUM, default_target, of_kernel

from . import flex as flex_kernels
from .compiled import Compiled, kept, remembered
from .full import SECONDS_A_LAUNCH, Kernel, _plain, loop_numbers, path, whole
from .loops import VERSION, figures
from .machine import GPUS, Gpu, resident
from .simulate import Role, simulate
from .steps import steps

FAR = 479 - 263  # cycles from L2 to HBM: Luo et al., as `machine` has it
GROUP, KEY_HEADS, DIM = 8, 8, 128
SEARCH = 2500  # cycles of a program that finds nothing to do, some four loads from L2 one after another
TURNS = 8  # full tiles of the run that says what a program takes beside its tiles


@dataclass(frozen=True)
class Step:
    """A step of `queries` for every sequence, the last of `lengths` tokens each; a cache has room for `room`."""

    queries: int
    lengths: tuple[int, ...]
    kv_dtype: str = ""  # as the queries, bfloat16
    page: int = 0
    arch: str = "sm_90"

    @property
    def room(self) -> int:
        return max(self.lengths)

    @property
    def entry(self) -> int:
        """Bytes of a key or value of one head, with its scale."""
        return DIM + 4 if self.kv_dtype else 2 * DIM

    @property
    def bytes(self) -> float:
        """Bytes of the keys and values that some query sees, their scales and page numbers."""
        pages = sum(-(-n // self.page) for n in self.lengths) * 4 if self.page else 0
        return 2.0 * sum(self.lengths) * KEY_HEADS * self.entry + pages

    @property
    def flops(self) -> float:
        return 4.0 * DIM * sum(self.lengths) * self.queries * GROUP * KEY_HEADS

    @property
    def geometry(self) -> Geometry:
        heads, n = GROUP * KEY_HEADS, self.queries
        scale = DIM**-0.5
        return Geometry(len(self.lengths), heads, KEY_HEADS, n, self.room, DIM, DIM, scale, kv_dtype=self.kv_dtype)

    @property
    def dims(self) -> Dims:
        return Dims(DIM, DIM, "bfloat16", GROUP, self.kv_dtype)


@dataclass(frozen=True)
class Block:
    """One program: cycles beside its tiles, cycles of its tiles where it waits for no one, and their bytes."""

    fixed: float
    work: float
    bytes: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step with its launches, `busy` without them, and the shares of the memory rate and of the
    matrix unit's peak in that time."""

    seconds: float
    busy: float
    share: float
    matrix: float
    launches: int
    programs: int


def stream(blocks: Sequence[Block], places: int, cap: float) -> float:
    """The cycle at which the last of the blocks ends, where all together read `cap` bytes a cycle at most."""
    waiting = iter(blocks)
    now = served = demand = 0.0  # `served`: cycles of work that every block that reads since the start has done
    starting: list[tuple[float, int, Block]] = []  # the cycle in which they begin to read
    reading: list[tuple[float, int, Block]] = []  # the work served at which they end
    count = 0

    def start() -> None:
        nonlocal count
        if (one := next(waiting, None)) is not None:
            count += 1
            heapq.heappush(starting, (now + one.fixed, count, one))

    for _ in range(places):
        start()
    while starting or reading:
        rate = min(1.0, cap / demand) if demand > cap else 1.0
        end = now + (reading[0][0] - served) / rate if reading else float("inf")
        if starting and starting[0][0] <= end:
            at, number, one = heapq.heappop(starting)
            served, now = served + (at - now) * rate, at
            if one.work:
                heapq.heappush(reading, (served + one.work, number, one))
                demand += one.bytes / one.work
            else:
                start()
        else:
            served, now = reading[0][0], end
            _, _, one = heapq.heappop(reading)
            demand = max(0.0, demand - one.bytes / one.work) if reading else 0.0
            start()
    return now


# -- kernels ----------------------------------------------------------------------------------------------


@cache
def plan_of(kv_dtype: str, page: int) -> LoopPlan:
    """Causal attention behind what every sequence has of its own, as caches ask for it."""
    mask = (k <= q + lookup("start", (b,))) & (k < lookup("end", (b,)))
    places = (lookup("pages", (b, k // page)), h // GROUP, k % page) if page else (b, h // GROUP, k)
    key, value = (lookup(n, places, FLOAT) for n in ("k_scale", "v_scale"))
    pages = Pages("pages", page) if page else None
    own = {"score": score * key, "weight": value} if kv_dtype else {"score": None}
    return make_plan(mask, **own, pages=pages, unwritten=True)


def divided(step: Step) -> Shares:
    """The shares that frisket chooses: lengths live on the device, so that the host knows the room alone."""
    plan, gpu = plan_of(step.kv_dtype, step.page), GPUS[step.arch]
    stored = bool(step.kv_dtype or step.page)
    tile = default_target(step.geometry, "bfloat16", keys=MEDIUM, stored=stored, arch=step.arch)
    found = shares(plan, None, step.geometry, tile, step.dims, gpu.processors)
    assert found is not None, step
    return found


@cache
def made(name: str, step: Step, chosen: Shares) -> Compiled:
    """A kernel of the module for such a step."""
    plan, target = plan_of(step.kv_dtype, step.page), chosen.target
    target = replace(target, splits=int(chosen.alone))
    source = decode.emit(plan, target, step.dims, packs=chosen.pack > 1, balanced=chosen.balanced)
    kernel = vars(load(source))[name]
    own = of_kernel(name, target)
    key = (source, name, report.signature(kernel, plan, own, step.dims), own, step.dims)
    found = kept(
        name, step.arch, own.num_warps, key, lambda: report.compiled_for(step.arch, kernel, plan, own, step.dims)
    )
    return replace(found, stages=own.num_stages)


def tiles_of(step: Step, length: int, queries: int, keys: int) -> tuple[int, int]:
    """(border, full) tiles of keys that the last queries of a sequence see, one tile of queries."""
    full = max(0, length - queries + 1) // keys
    return -(-length // keys) - full, full


def rows_of(step: Step, chosen: Shares) -> list[tuple[int, int, int]]:
    """(border tiles, full tiles, programs) of every row of one key head."""
    splits, queries = chosen.target.splits, min(step.queries, chosen.queries)
    of_sequence = -(-step.queries // chosen.queries) * (GROUP // chosen.pack)
    rows = [tiles_of(step, n, queries, chosen.target.block_k) for n in step.lengths for _ in range(of_sequence)]
    if not chosen.balanced:
        return [(*row, splits) for row in rows]
    share = max(1, -(-sum(map(sum, rows)) // (len(rows) * splits)))
    return [(*row, max(1, -(-sum(row) // share))) for row in rows]


def blocks_of(step: Step, chosen: Shares) -> Iterator[tuple[int, int]]:
    """(border, full) tiles of every program of one key head, in the order of the launch."""
    count = 0
    for border, full, parts in rows_of(step, chosen):
        for part in range(parts):
            begin, end = (i * (border + full) // parts for i in (part, part + 1))
            edge = min(end, border) - min(begin, border)
            yield edge, end - begin - edge
        count += parts
    if chosen.balanced:
        yield from [(0, 0)] * (chosen.grid(step.geometry)[1] - count)


# -- times ------------------------------------------------------------------------------------------------


def timed(step: Step, chosen: Shares | None = None) -> StepTime:
    """The time of a step with the shares that frisket chooses, or with others."""
    chosen = chosen or divided(step)
    target = chosen.target
    one = made("attention_decode", step, chosen)
    more = combine_cycles(step, chosen, GPUS[step.arch]) if not chosen.alone else 0
    blocks = [*blocks_of(step, chosen)]
    # Where rows have parts in proportion, the key heads of a program start one after another.
    blocks = [x for x in blocks for _ in range(KEY_HEADS)] if chosen.balanced else blocks * KEY_HEADS
    return _timed(step, one, blocks, target.block_k, target.block_q, more)


def flex_timed(step: Step) -> StepTime:
    """The time of flex_attention's decoding with torch's tile and splits, where it exists: for keys in bfloat16 without
    pages. What combines its parts, a few reductions of torch, is taken to be as fast as our kernel."""
    gpu, (tile,) = GPUS[step.arch], flex_kernels.tiles("decode", DIM, "bfloat16", step.arch)
    splits = max(1, gpu.processors // (len(step.lengths) * KEY_HEADS) * 2)  # as torch has it
    one = flex_kernels.Flex("decode", "causal", DIM, arch=step.arch, group=GROUP, queries=step.queries, splits=2)
    programs = []
    for length in step.lengths:
        blocks = -(-length // flex_kernels.BLOCK)
        each = -(-step.room // splits // tile.block_k)  # tiles of a part
        edges, inner = (n * flex_kernels.BLOCK // tile.block_k for n in (1, blocks - 1))
        for part in range(splits):
            whole_ = min(max(0, inner - (splits - part - 1) * each), each)
            programs.append((min(max(0, edges - part * each), each), whole_))
    rows = max(16, 1 << (step.queries * GROUP - 1).bit_length())
    like = divided(step)
    like = replace(like, target=replace(like.target, splits=splits), balanced=False)
    more = combine_cycles(step, like, gpu) if splits > 1 else 0
    return _timed(step, flex_kernels.compiled(one), programs * KEY_HEADS, tile.block_k, rows, more)


def _timed(
    step: Step, one: Compiled, programs: Sequence[tuple[int, int]], keys: int, rows: int, more: float
) -> StepTime:  # fmt: skip
    """The time of programs of (border, full) tiles of so many keys and rows; `more` are cycles of a second kernel."""
    near = GPUS[step.arch]
    far = replace(near, copy_latency=near.copy_latency + FAR, global_latency=near.global_latency + FAR)
    fit = resident(near, one.warps, one.registers, one.shared)
    busy = 1 + max(i for i, n in enumerate(programs) if sum(n))  # programs behind those leave at once
    fit = max(1, min(fit, -(-busy // near.processors)))
    border, full = loop_numbers(one, one.sass.products)
    x = Kernel(one, border, full, rows * keys, 4 * DIM)
    each = figures(one, far, fit)
    bytes = keys * 2 * step.entry
    fixed = {n: near.launch + beside(x, far, n, fit, len(programs), bytes) for n in (False, True)}
    blocks = [
        Block(fixed[e > 0], e * each[border].cycles + f * each[full].cycles, (e + f) * bytes)
        if e + f else Block(near.launch + SEARCH, 0, 0) for e, f in programs
    ]  # fmt: skip
    products = sum(e + f for e, f in programs) * x.pairs * x.flops
    clock, matrix = near.clock, 0.0
    for _ in range(3):  # power takes from the clock of the processors, not from that of the memory
        cycles = stream(blocks, near.processors * fit, near.hbm / clock)
        matrix = products / cycles / (near.processors * near.matrix * 8)
        clock = near.clock_under(matrix)
    busy, launches = cycles / clock + more / near.clock, 2 if more else 1
    share = step.bytes / near.hbm / busy
    return StepTime(busy + launches * SECONDS_A_LAUNCH, busy, share, matrix, launches, len(programs))


def beside(x: Kernel, far: Gpu, bordered: bool, fit: int, programs: int, bytes: float) -> float:
    """Cycles of a program beside its tiles of so many bytes: a run of the whole programs of an SM that has its share of
    HBM, less what their tiles take there."""
    rate = min(far.l2_rate, far.hbm / far.clock / min(far.processors, programs))
    crowded = replace(far, l2_rate=rate, l2_burst=0)
    turns = {x.border: int(bordered), x.full: TURNS}
    key = ("beside 2", VERSION, x.compiled.digest, x.compiled.warps, turns, fit, crowded)
    taken: float = remembered(key, lambda: whole(x, crowded, turns, fit, x.compiled.stages - 1))
    each = figures(x.compiled, far, fit)
    return max(0.0, taken - sum(n * max(each[i].cycles, fit * bytes / rate) for i, n in turns.items()))


def combine_cycles(step: Step, chosen: Shares, gpu: Gpu) -> float:
    """Cycles of the kernel that combines the parts: its whole program, played with as many turns as it takes."""
    one = made("attention_combine", step, chosen)
    turns = -(-max(parts for *_, parts in rows_of(step, chosen)) // 16)
    total = step.queries * GROUP * KEY_HEADS * len(step.lengths)
    fit = min(resident(gpu, one.warps, one.registers, one.shared), -(-total // gpu.processors))
    kernel = one.sass
    (loop,) = kernel.loops

    def make() -> float:
        x = Kernel(one, 0, 0, 0, 0)
        before = path(kernel, 0, [loop.start])[:-1]
        after = path(kernel, loop.stop, [i for i, s in enumerate(kernel.instructions) if s.op == "EXIT"])
        parts = [(_plain(kernel, before, x, gpu), 1), (steps(kernel.body(loop), gpu), turns)]
        parts.append((_plain(kernel, after, x, gpu), 1))
        return simulate(gpu, [Role(one.warps, tuple(p for p in parts if p[0]))], fit).cycles

    cycles: float = remembered(("combine", VERSION, one.digest, turns, fit, gpu), make)
    return -(-total // (gpu.processors * fit)) * (gpu.launch + cycles)
