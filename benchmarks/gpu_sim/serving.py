"""Predicted times of serving steps: queries of every sequence, one or a part of a prompt, over a long cache.

A program reads its share of the key tiles of one sequence and one key head; HBM delivers what L2 does not hold of it.
Programs start in the order of the launch, each on the first SM with a free place. A program first spends a fixed time,
then reads at the rate of its loops in an SM with as many blocks. All programs together read no faster than HBM; what
one leaves of that rate, others use. A second kernel combines the parts. The share of a step is the time in which HBM
delivers the visible keys and values, their scales and page numbers, divided by the time of its kernels.

Beside an H100 (`measured` in benchmarks/results/gpu-model.json), steps over 0.5 GB or more of 16 bits differ by 6 % at
most. Those of 1 and 4 queries over as many entries of 8 bits take 2 to 23 % longer than predicted. Steps over 8,192
tokens of one sequence take up to 9 us less: where steps follow one another, a launch costs less than 3 us.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from typing import Any, NamedTuple

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.dtypes import Operand
from frisket.lowering.kernels.triton import forward
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.plan import Geometry, LoopPlan, Pages, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import kernels as triton_kernels
from frisket.runtime.backends.triton.grids import Shares, shares
from frisket.runtime.backends.triton.tiles import MEDIUM, ProgramTraits, default_target, of_kernel
from frisket.runtime.machine.modules import load_from_file

from . import flex as flex_kernels
from .compiled import Compiled, kept, remembered
from .full import SECONDS_A_LAUNCH, Kernel, _plain, loop_numbers, path, whole
from .loops import VERSION, figures
from .machine import GPUS, Gpu, resident
from .simulate import Role, simulate
from .steps import steps

HBM_CYCLES = 479 - 263  # cycles from L2 to HBM, by Luo et al., as in `machine`
GROUP, KEY_HEADS, DIM = 8, 8, 128
SEARCH = 2500  # cycles of a program that finds no row to work on: some four loads from L2, one after another
FINE = 1 << 20  # up to so many tiles of all programs are followed one by one
TURNS = 8  # full tiles of the simulated program from which the fixed time of a program is taken


@dataclass(frozen=True)
class Heads:
    """The heads of an attention: query heads of a key head, and the sizes of keys and values, which are
    the first numbers of keys in multi-head latent attention (MLA)."""

    group: int = GROUP
    dim: int = DIM
    v_dim: int = DIM
    latent: bool = False  # values are the first numbers of keys
    shared_values: bool = False  # and kernels know it


@dataclass(frozen=True)
class Step:
    """A step of `queries` queries for every sequence, its last tokens. Sequences have `lengths` tokens, and the cache
    has room for `room` tokens of each."""

    queries: int
    lengths: tuple[int, ...]
    kv_dtype: str = ""  # as the queries, bfloat16
    page: int = 0
    arch: str = "sm_90"
    key_heads: int = KEY_HEADS
    heads: Heads = Heads()

    @property
    def room(self) -> int:
        return max(self.lengths)

    @property
    def entry(self) -> int:
        """Bytes of a key and its value of one head, with their scales."""
        return self._bytes(self.heads.dim + self.heads.v_dim * (not self.heads.latent))

    @property
    def read(self) -> int:
        """The bytes of `entry` that a program reads: a latent twice where kernels do not know that it is one."""
        return self._bytes(self.heads.dim + self.heads.v_dim * (not self.heads.shared_values))

    def _bytes(self, numbers: int) -> int:
        return numbers + 8 if self.kv_dtype else 2 * numbers

    @property
    def bytes(self) -> float:
        """Bytes of all visible keys and values, their scales and page numbers."""
        pages = sum(-(-n // self.page) for n in self.lengths) * 4 if self.page else 0
        return float(sum(self.lengths) * self.key_heads * self.entry) + pages

    @property
    def pair(self) -> int:
        """FLOP of the products of a query of one head and a key."""
        return 2 * (self.heads.dim + self.heads.v_dim)

    @property
    def flops(self) -> float:
        """FLOP of the products of all visible pairs."""
        pairs = sum(n - (self.queries - 1) / 2 for n in self.lengths) * self.queries
        return float(self.pair * pairs * self.heads.group * self.key_heads)

    @property
    def geometry(self) -> Geometry:
        keys, n, x = self.key_heads, self.queries, self.heads
        scale = x.dim**-0.5
        kv = Operand(self.kv_dtype)
        return Geometry(len(self.lengths), x.group * keys, keys, n, self.room, x.dim, x.v_dim, scale, k=kv, v=kv)

    @property
    def dims(self) -> Dims:
        x = self.heads
        return Dims(x.dim, x.v_dim, "bfloat16", x.group, self.kv_dtype, shared_values=x.shared_values)

    @property
    def plan(self) -> LoopPlan:
        return plan_of(self.kv_dtype, self.page, self.heads.group)


@dataclass(frozen=True)
class Block:
    """One program: its fixed cycles, the cycles of its tiles where no other program takes of the rate, and their
    bytes."""

    fixed: float
    work: float
    bytes: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step with its launches, `busy` without them, the share of the memory rate and the TFLOP/s of
    visible pairs in that time; bytes that HBM brings, and bytes that programs read, over those of the visible keys and
    values."""

    seconds: float
    busy: float
    share: float
    rate: float
    launches: int
    programs: int
    fetched: float
    read: float


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
def plan_of(kv_dtype: str, page: int, group: int = GROUP) -> LoopPlan:
    """The plan of causal attention over a cache, in which every sequence has its own start and end."""
    mask = (k <= q + lookup("start", (b,))) & (k < lookup("end", (b,)))
    places = (lookup("pages", (b, k // page)), h // group, k % page) if page else (b, h // group, k)
    key, value = (lookup(n, places, FLOAT) for n in ("k_scale", "v_scale"))
    pages = Pages("pages", page) if page else None
    exprs, value_scale = (ProgramExprs(mask, score * key), value) if kv_dtype else (ProgramExprs(mask), None)
    return make_plan(exprs, value_scale=value_scale, pages=pages, unwritten=True)


def divided(step: Step, whole: bool = False) -> Shares:
    """The shares that frisket chooses: lengths live on the device, so that the host knows the room alone. With `whole`
    they are the forward's: a program for every tile of queries of every head."""
    plan, gpu = step.plan, GPUS[step.arch]
    stored = bool(step.kv_dtype or step.page)
    traits = ProgramTraits(MEDIUM, stored=stored, paged=step.page > 0, unwritten=True)
    tile = default_target(step.geometry, "bfloat16", traits, arch=step.arch)
    found = None if whole else shares(plan, None, step.geometry, tile, step.dims, gpu.processors)
    return found or Shares(replace(tile, splits=1), tile.block_q, 1, (tile.block_q, tile.block_k))


def is_forward(chosen: Shares) -> bool:
    """Whether the shares are those of the forward, which neither packs nor splits."""
    return chosen.alone and chosen.pack == 1


@cache
def made(name: str, step: Step, chosen: Shares) -> Compiled:
    """The compiled kernel called `name` of the module for a step."""
    plan, target = step.plan, chosen.target
    target = replace(target, splits=int(chosen.alone))
    if name == "attention_forward":
        source = forward.emit(plan, target, step.dims)
    else:
        source = forward.emit_decode(plan, target, step.dims, packs=chosen.pack > 1, balanced=chosen.balanced)
    kernel = vars(load_from_file(source))[name]
    own = of_kernel(name, target)
    key = (source, name, triton_kernels.signature(kernel, plan, own, step.dims), own, step.dims)
    found = kept(
        name,
        step.arch,
        own.num_warps,
        key,
        lambda: triton_kernels.compiled_for(step.arch, kernel, plan, own, step.dims),
    )
    return replace(found, stages=own.num_stages)


def tiles_of(length: int, queries: int, keys: int) -> tuple[int, int]:
    """(border, full) tiles of keys that the last queries of a sequence see, one tile of queries."""
    full = max(0, length - queries + 1) // keys
    return -(-length // keys) - full, full


def rows_of(step: Step, chosen: Shares) -> list[tuple[int, int, int]]:
    """(partial tiles, full tiles, programs) of every row of tiles of one tile of heads, sequence by sequence."""
    splits, own = chosen.target.splits, chosen.queries
    ends = [min(first + own, step.queries) for first in range(0, step.queries, own)]
    if is_forward(chosen):  # the longest first
        ends.reverse()
    rows = [
        tiles_of(n - step.queries + end, (end - 1) % own + 1, chosen.target.block_k) for n in step.lengths
        for end in ends
    ]  # fmt: skip
    if not chosen.balanced:
        return [(*row, splits) for row in rows]
    each, every = len(ends), sum(map(sum, rows))
    share = max(1, -(-every // (len(step.lengths) * splits)))
    seen = [sum(map(sum, rows[i : i + each])) for i in range(0, len(rows), each)]  # of a sequence
    return [(*row, max(1, -(-seen[i // each] // (share + share // 8)))) for i, row in enumerate(rows)]


class Program(NamedTuple):
    """One program: its sequence, key head and row of tiles, and its tiles as ranges of those of the row."""

    sequence: int
    key_head: int
    border: range
    full: range

    @property
    def tiles(self) -> int:
        return len(self.border) + len(self.full)


def programs_of(step: Step, chosen: Shares) -> list[Program]:
    """All programs in the order of the launch."""
    rows, found = rows_of(step, chosen), []
    of_sequence = len(rows) // len(step.lengths)
    for sequence in range(len(step.lengths)):
        own = rows[sequence * of_sequence : (sequence + 1) * of_sequence]
        for part, (border, full, parts) in product(range(own[0][2]), own):  # rows that read the same keys together
            begin, end = (n * (border + full) // parts for n in (part, part + 1))
            ranges = range(min(begin, border), min(end, border)), range(max(0, begin - border), max(0, end - border))
            found.append((sequence, *ranges))
    heads = [key_head for key_head in range(step.key_heads) for _ in range(step.heads.group // chosen.pack)]
    if chosen.balanced:  # programs of all heads one after another, and then those without a row
        idle = chosen.grid(step.geometry)[1] - len(found)
        found += [(0, range(0), range(0))] * idle
        return [Program(sequence, head, *ranges) for sequence, *ranges in found for head in heads]
    each = len(found) // len(step.lengths)
    return [
        Program(sequence, head, *ranges) for first in range(0, len(found), each) for head in heads
        for sequence, *ranges in found[first : first + each]
    ]  # fmt: skip


def fetched(programs: Sequence[Program], places: int, room: float) -> int:
    """The tiles that HBM brings: programs go on side by side, a tile at a time, and what was read last is in L2, which
    has room for so many tiles."""
    some = 1 + sum(x.tiles for x in programs) // FINE  # tiles that are followed together
    held: OrderedDict[tuple[Any, ...], None] = OrderedDict()
    waiting, brought = iter(programs), 0
    running: list[Iterator[tuple[tuple[Any, ...], int]]] = [_reads(x, some) for x in islice(waiting, places)]
    while running:
        going = []
        for one in running:
            mine: Iterator[tuple[tuple[Any, ...], int]] | None = one
            while mine is not None and (found := next(mine, None)) is None:
                mine = _reads(x, some) if (x := next(waiting, None)) is not None else None
            if mine is None or found is None:
                continue
            going.append(mine)
            place, count = found
            if place in held:
                held.move_to_end(place)
                continue
            held[place] = None
            brought += count
            if len(held) * some > room:
                held.popitem(last=False)
        running = going
    return brought


def _reads(x: Program, some: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The places that a program reads, in turn, and the tiles of each."""
    for kind, tiles in (("border", x.border), ("full", x.full)):
        for first in range(tiles.start // some, -(-tiles.stop // some)):
            own = range(max(tiles.start, first * some), min(tiles.stop, (first + 1) * some))
            yield (x.sequence, x.key_head, kind, first), len(own)


# -- times ------------------------------------------------------------------------------------------------


def timed(step: Step, chosen: Shares | None = None) -> StepTime:
    """The time of a step with the shares that frisket chooses, or with others."""
    chosen = chosen or divided(step)
    target, gpu = chosen.target, GPUS[step.arch]
    one = made("attention_forward" if is_forward(chosen) else "attention_decode", step, chosen)
    more = combine_cycles(step, chosen, gpu) if not chosen.alone else 0
    programs = programs_of(step, chosen)
    tiles = sum(x.tiles for x in programs)
    again = step.queries > chosen.queries or chosen.pack < step.heads.group  # several programs read a tile
    room = gpu.l2_bytes / (step.entry * target.block_k)
    places = gpu.processors * max(1, resident(gpu, one.warps, one.registers, one.shared))
    far = fetched(programs, places, room) / tiles if again else 1.0
    far *= step.entry / step.read  # what a program reads twice comes from L2 the second time
    blocks = [(len(x.border), len(x.full)) for x in programs]
    return _timed(step, one, blocks, target.block_k, target.block_q, more, far)


def flex_timed(step: Step) -> StepTime:
    """The time of a step with flex_attention's decoding, in torch's tile and splits: for keys in bfloat16 without pages
    alone. The few reductions of torch that combine its parts are taken to be as fast as our kernel."""
    gpu, (tile,) = GPUS[step.arch], flex_kernels.tiles("decode", DIM, "bfloat16", step.arch)
    splits = max(1, gpu.processors // (len(step.lengths) * step.key_heads) * 2)  # as torch has it
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
    return _timed(step, flex_kernels.compiled(one), programs * step.key_heads, tile.block_k, rows, more)


def _timed(
    step: Step, one: Compiled, programs: Sequence[tuple[int, int]], keys: int, rows: int, more: float, share: float = 1
) -> StepTime:  # fmt: skip
    """The time of programs of (border, full) tiles of so many keys and rows; `more` are cycles of a second kernel, HBM
    brings a `share` of what programs read."""
    near = GPUS[step.arch]
    far = replace(near, copy_latency=near.copy_latency + HBM_CYCLES, global_latency=near.global_latency + HBM_CYCLES)
    fit = resident(near, one.warps, one.registers, one.shared)
    working = 1 + max(i for i, n in enumerate(programs) if sum(n))  # the programs after these leave at once
    fit = max(1, min(fit, -(-working // near.processors)))
    border, full = loop_numbers(one, one.sass.products)
    x = Kernel(one, border, full, rows * keys, step.pair)
    each = figures(one, far, fit)
    bytes = keys * step.read
    fixed = {n: near.launch + beside(x, far, n, fit, len(programs), bytes) for n in (False, True)}
    blocks = [
        Block(fixed[e > 0], e * each[border].cycles + f * each[full].cycles, (e + f) * bytes * share)
        if e + f else Block(near.launch + SEARCH, 0, 0) for e, f in programs
    ]  # fmt: skip
    products = sum(e + f for e, f in programs) * x.pairs * x.flops
    clock, matrix = near.clock, 0.0
    for _ in range(3):  # under load the clock of the SMs drops, that of the memory does not
        cycles = stream(blocks, near.processors * fit, near.hbm / clock)
        matrix = products / cycles / (near.processors * near.matrix * 8)
        clock = near.clock_under(matrix)
    busy, launches = cycles / clock + more / near.clock, 2 if more else 1
    of_rate, read = step.bytes / near.hbm / busy, sum(e + f for e, f in programs) * bytes / step.bytes
    found = busy + launches * SECONDS_A_LAUNCH, busy, of_rate, step.flops / busy / 1e12, launches, len(programs)
    return StepTime(*found, share * read, read)


def beside(x: Kernel, far: Gpu, bordered: bool, fit: int, programs: int, bytes: float) -> float:
    """The fixed cycles of a program, beside its tiles of `bytes` bytes each: those of a simulated SM with `fit` whole
    programs and its share of the rate of HBM, less the cycles of their tiles."""
    rate = min(far.l2_rate, far.hbm / far.clock / min(far.processors, programs))
    crowded = replace(far, l2_rate=rate, l2_burst=0)
    turns = {x.border: int(bordered), x.full: TURNS}
    key = ("beside 3", VERSION, x.compiled.digest, x.compiled.warps, x.compiled.stages, turns, fit, crowded)
    taken: float = remembered(key, lambda: whole(x, crowded, turns, fit))
    each = figures(x.compiled, far, fit)
    return max(0.0, taken - sum(n * max(each[i].cycles, fit * bytes / rate) for i, n in turns.items()))


def combine_cycles(step: Step, chosen: Shares, gpu: Gpu) -> float:
    """Cycles of the kernel that combines the parts, simulated from its first to its last instruction."""
    one = made("attention_combine", step, chosen)
    turns = -(-max(parts for *_, parts in rows_of(step, chosen)) // 16)
    total = step.queries * step.heads.group * step.key_heads * len(step.lengths)
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
