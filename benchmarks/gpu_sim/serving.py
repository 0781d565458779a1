"""Predicted times of serving steps: few queries of every sequence over a long cache, which is read from HBM once.

A program reads its share of the key tiles of one sequence and one key head. Programs start in the order of the launch,
each on the first SM with a free place. A program first spends a fixed time, then reads at the rate of its loops in an
SM with as many blocks. All programs together read no faster than HBM; what one leaves of that rate, others use. A
second kernel combines the parts. The share of a step is the time in which HBM delivers the visible keys and values,
their scales and page numbers, divided by the time of its kernels.
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

FAR = 479 - 263  # cycles from L2 to HBM, by Luo et al., as in `machine`
GROUP, KEY_HEADS, DIM = 8, 8, 128
SEARCH = 2500  # cycles of a program that finds no row to work on: some four loads from L2, one after another
TURNS = 8  # full tiles of the simulated program from which the fixed time of a program is taken


@dataclass(frozen=True)
class Step:
    """A step of `queries` queries for every sequence, its last tokens. Sequences have `lengths` tokens, and the cache
    has room for `room` tokens of each."""

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
        """Bytes of one key or one value of one head, with its scale."""
        return DIM + 4 if self.kv_dtype else 2 * DIM

    @property
    def bytes(self) -> float:
        """Bytes of all visible keys and values, their scales and page numbers."""
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
    """One program: its fixed cycles, the cycles of its tiles where no other program takes of the rate, and their
    bytes."""

    fixed: float
    work: float
    bytes: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step with its launches, and `busy` without them. `share` and `matrix` are fractions of the rate
    of HBM and of the matrix unit's peak in the busy time."""

    seconds: float
    busy: float
    share: float
    matrix: float
    launches: int
    programs: int


def stream(blocks: Sequence[Block], places: int, cap: float) -> float:
    """The cycle at which the last block ends, where all blocks together read at most `cap` bytes a cycle."""
    waiting = iter(blocks)
    now = served = demand = 0.0  # `served`: cycles of work done by a block that has been reading since cycle 0
    starting: list[tuple[float, int, Block]] = []  # with the cycle at which a block begins to read
    reading: list[tuple[float, int, Block]] = []  # with the value of `served` at which a block ends
    count = 0

    def start() -> None:
        nonlocal count
        if (one := next(waiting, None)) is not None:
            count += 1
            heapq.heappush(starting, (now + one.fixed, count, one))

    for _ in range(places):
        start()
    while starting or reading:
        rate = cap / demand if demand > cap else 1.0
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
    """The plan of causal attention over a cache, in which every sequence has its own start and end."""
    mask = (k <= q + lookup("start", (b,))) & (k < lookup("end", (b,)))
    places = (lookup("pages", (b, k // page)), h // GROUP, k % page) if page else (b, h // GROUP, k)
    key, value = (lookup(n, places, FLOAT) for n in ("k_scale", "v_scale"))
    pages = Pages("pages", page) if page else None
    own = {"score": score * key, "weight": value} if kv_dtype else {"score": None}
    return make_plan(mask, **own, pages=pages, unwritten=True)


def divided(step: Step) -> Shares:
    """The shares that frisket chooses. Lengths are on the device: the host knows only the room."""
    plan, gpu = plan_of(step.kv_dtype, step.page), GPUS[step.arch]
    stored = bool(step.kv_dtype or step.page)
    tile = default_target(step.geometry, "bfloat16", keys=MEDIUM, stored=stored, arch=step.arch)
    found = shares(plan, None, step.geometry, tile, step.dims, gpu.processors)
    assert found is not None, step
    return found


@cache
def made(name: str, step: Step, chosen: Shares) -> Compiled:
    """The compiled kernel called `name` of the module for a step."""
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
    """(border, full) tiles of keys that the last tile of queries of a sequence sees."""
    full = max(0, length - queries + 1) // keys
    return -(-length // keys) - full, full


def rows_of(step: Step, chosen: Shares) -> list[tuple[int, int, int]]:
    """(border tiles, full tiles, programs) of every row of tiles of one key head."""
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
    # In a balanced launch the same program of every key head starts before the next program.
    blocks = [x for x in blocks for _ in range(KEY_HEADS)] if chosen.balanced else blocks * KEY_HEADS
    return _timed(step, one, blocks, target.block_k, target.block_q, more)


def flex_timed(step: Step) -> StepTime:
    """The time of a step with flex_attention's decoding, in torch's tile and splits: for keys in bfloat16 without pages
    alone. The few reductions of torch that combine its parts are taken to be as fast as our kernel."""
    gpu, (tile,) = GPUS[step.arch], flex_kernels.tiles("decode", DIM, "bfloat16", step.arch)
    splits = max(1, gpu.processors // (len(step.lengths) * KEY_HEADS) * 2)  # as torch has it
    one = flex_kernels.Flex("decode", "causal", DIM, arch=step.arch, group=GROUP, queries=step.queries, splits=2)
    programs = []
    each = -(-step.room // splits // tile.block_k)  # tiles of a part
    for length in step.lengths:
        blocks = -(-length // flex_kernels.BLOCK)
        edges, inner = (n * flex_kernels.BLOCK // tile.block_k for n in (1, blocks - 1))
        for part in range(splits):
            full = min(max(0, inner - (splits - part - 1) * each), each)
            programs.append((min(max(0, edges - part * each), each), full))
    rows = max(16, 1 << (step.queries * GROUP - 1).bit_length())
    like = divided(step)
    like = replace(like, target=replace(like.target, splits=splits), balanced=False)
    more = combine_cycles(step, like, gpu) if splits > 1 else 0
    return _timed(step, flex_kernels.compiled(one), programs * KEY_HEADS, tile.block_k, rows, more)


def _timed(
    step: Step, one: Compiled, programs: Sequence[tuple[int, int]], keys: int, rows: int, more: float
) -> StepTime:  # fmt: skip
    """The time of `programs`, (border, full) tiles each, in tiles of `keys` keys and `rows` rows; `more` is the number
    of cycles of a second kernel."""
    near = GPUS[step.arch]  # loads take the latency of L2; in `far` they take that of HBM
    far = replace(near, copy_latency=near.copy_latency + FAR, global_latency=near.global_latency + FAR)
    fit = resident(near, one.warps, one.registers, one.shared)
    working = 1 + max(i for i, n in enumerate(programs) if sum(n))  # the programs after these leave at once
    fit = max(1, min(fit, -(-working // near.processors)))
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
    for _ in range(3):  # under load the clock of the SMs drops, that of the memory does not
        cycles = stream(blocks, near.processors * fit, near.hbm / clock)
        matrix = products / cycles / (near.processors * near.matrix * 8)
        clock = near.clock_under(matrix)
    busy, launches = cycles / clock + more / near.clock, 2 if more else 1
    share = step.bytes / near.hbm / busy
    return StepTime(busy + launches * SECONDS_A_LAUNCH, busy, share, matrix, launches, len(programs))


def beside(x: Kernel, far: Gpu, bordered: bool, fit: int, programs: int, bytes: float) -> float:
    """The fixed cycles of a program, beside its tiles of `bytes` bytes each: those of a simulated SM with `fit` whole
    programs and its share of the rate of HBM, less the cycles of their tiles."""
    rate = min(far.l2_rate, far.hbm / far.clock / min(far.processors, programs))
    crowded = replace(far, l2_rate=rate, l2_burst=0)
    turns = {x.border: int(bordered), x.full: TURNS}
    key = ("beside 2", VERSION, x.compiled.digest, x.compiled.warps, turns, fit, crowded)
    taken: float = remembered(key, lambda: whole(x, crowded, turns, fit, x.compiled.stages - 1))
    each = figures(x.compiled, far, fit)
    return max(0.0, taken - sum(n * max(each[i].cycles, fit * bytes / rate) for i, n in turns.items()))


def combine_cycles(step: Step, chosen: Shares, gpu: Gpu) -> float:
    """Cycles of the kernel that combines the parts, simulated from its first to its last instruction."""
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
