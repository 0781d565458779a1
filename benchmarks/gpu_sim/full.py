"""A whole kernel: tiles by the layout's exact counts, prologue and tail, waves over all SMs, memory, power.

A block takes what its prologue and its tail take, by a run of the whole program with a few tiles of each kind, and for
each tile what a steady loop takes when as many blocks share the SM as fit. Blocks start in the order of the launch,
each where a place is free first. A kernel takes no less than its arrays take of HBM: keys and values that blocks read
again are found in L2. Where products fill much of the matrix unit, power takes from the clock.

What is not counted, by an H100 (`measured` in benchmarks/results/gpu-model.json):

- The first read of a key waits for HBM. Here it waits for L2 alone, and the bytes of HBM and the cycles of tiles
  overlap wholly. So a window of 128, which reads most tiles once, is 15 to 27 % too fast.
- Blocks of a head that run at a time share keys in L2. In an order that spreads them over heads, keys come from HBM
  again: documents of 32k tokens at D128 had 192 TFLOP/s where heads that run one after another had 396. The model
  knows no such loss, so it prefers the order that is slower.
- A block whose neighbours on the SM have ended runs faster than among them. Here it does not, so the last rows of
  a launch of few heads take too long.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import frisket as fk

from . import flex as flex_kernels
from . import ours as our_kernels
from .compiled import Compiled, remembered
from .loops import VERSION, figures, looped
from .machine import GPUS, Gpu, resident
from .ours import DRAWN, MASKS, Ours, Tile, allowed, documents, drawn
from .sass import Loop, Sass
from .simulate import Role, simulate
from .steps import steps

PROBE = (2, 6)  # border and full tiles of the run that says what a prologue and a tail take
SECONDS_A_LAUNCH = 3e-6  # of each kernel, as events on a stream see it
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """The blocks of one program for one head, in the order of their launch: border and full tiles of each."""

    border: Counts
    full: Counts

    def grouped(self, heads: int, walked: bool) -> Work:
        """The blocks for a group of query heads: one block walks the tiles of all where they are `walked`."""
        if walked:
            return Work(self.border * heads, self.full * heads)
        return Work(np.tile(self.border, heads), np.tile(self.full, heads))


@dataclass(frozen=True)
class Kernel:
    """One program of a compiled kernel: the numbers of its border loop and its full loop among the loops with products,
    pairs of a tile, FLOP that it computes for a pair, and bytes of a tile that a warp without products copies, whose
    loop is not played: a tile takes no less than they take of L2."""

    compiled: Compiled
    border: int
    full: int
    pairs: int
    flops: float
    copied: float = 0


@dataclass(frozen=True)
class Time:
    """The seconds of a kernel at the clock that its power leaves, and what they are made of."""

    seconds: float
    cycles: float
    memory: float  # seconds that its arrays take of HBM
    share: float  # of the matrix unit's peak
    clock: float
    tail: float  # share of the time in which places are empty


# -- counts ---------------------------------------------------------------------------------------------


@cache
def layout(mask: str, length: int, block: tuple[int, int]) -> Any:
    """The layout of a mask, by its name or its text, of as many queries as keys."""
    text = MASKS[mask].text if mask in MASKS else mask
    tables = documents(length) if text and "doc" in text else allowed(length) if text and "allowed" in text else {}
    tables = drawn(length) if mask == DRAWN else tables
    return fk.mask(text or "True", **tables).layout(length, length, block=block)


def ours_work(kernel: str, mask: str, length: int, tile: Tile) -> Work:
    """The tiles that our kernel walks, rows with the most tiles first."""
    found = layout(mask, length, (tile.block_q, tile.block_k))
    found = found.transposed if kernel == "dkv" else found
    bounds = found.spans.bounds[0].astype(np.int64)
    used = np.arange(bounds.shape[1])[None, :] < found.spans.count[0][:, None]
    lo, full_lo, full_hi, hi = (np.where(used, bounds[..., i], 0) for i in range(4))
    full = (full_hi - full_lo).sum(1)
    border = (hi - lo).sum(1) - full
    order = np.argsort(-(border + full), kind="stable")
    return Work(border[order], full[order])


def flex_work(kernel: str, mask: str, length: int, tile: Tile) -> Work:
    """The tiles that flex_attention walks, its blocks of 128 in the order of rows."""
    size = flex_kernels.BLOCK
    kinds = layout(mask, length, (size, size)).kinds()[0, 0]
    own, walked = (tile.block_k, tile.block_q) if kernel == "dkv" else (tile.block_q, tile.block_k)
    kinds = kinds.T if kernel == "dkv" else kinds
    border, full = ((kinds == kind).sum(1) * (size // walked) for kind in (1, 2))
    return Work(*(np.repeat(x, size // own).astype(np.int64) for x in (border, full)))


# -- one block --------------------------------------------------------------------------------------------


def path(kernel: Sass, begin: int, ends: Iterable[int]) -> list[int]:
    """The shortest way by branches forward from an instruction to one of `ends`."""
    code, ends = kernel.instructions, set(ends)
    before: dict[int, int | None] = {begin: None}
    queue = deque([begin])
    while queue:
        i = queue.popleft()
        if i in ends:
            way = [i]
            while before[way[-1]] is not None:
                way.append(before[way[-1]])  # type: ignore[arg-type]
            return way[::-1]
        x = code[i]
        ahead = [] if x.op == "EXIT" and not x.predicate else [i + 1]
        if x.op.startswith("BRA"):
            jump = [x.target] if x.target is not None and x.target > i and not code[x.target].waits else []
            ahead = jump if not x.predicate else [*ahead, *jump]
        for to in ahead:
            if to is not None and to < len(code) and to not in before:
                before[to] = i
                queue.append(to)
    raise ValueError(f"{kernel.name}: no way from instruction {begin} to {sorted(ends)[:3]}")


def overhead(x: Kernel, gpu: Gpu) -> float:
    """Cycles of a block beside its tiles: a run of the whole program, less its steady loops."""
    turns = {x.border: PROBE[0], x.full: PROBE[1]}  # of loops by number, in the order of the text
    alone = figures(x.compiled, gpu, 1)
    key = ("overhead 2", VERSION, x.compiled.digest, x.compiled.warps, x.compiled.stages, x.border, x.full, PROBE, gpu)
    taken: float = remembered(key, lambda: whole(x, gpu, turns))
    return max(0.0, taken - sum(n * alone[number].cycles for number, n in turns.items()))


def whole(x: Kernel, gpu: Gpu, turns: Mapping[int, int], blocks: int = 1) -> float:
    """Cycles of the whole program, of `blocks` that share an SM, with so many turns of its loops with products. Stages
    less one are copied ahead of a loop, but no more than it has turns, and its last turns copy nothing: what they would
    bring is predicated off."""
    kernel, ahead = x.compiled.sass, x.compiled.stages - 1
    parts: list[tuple[Sequence[Any], int]] = []
    at = 0
    for number, count in sorted(turns.items()):
        loop = kernel.products[number]
        before = _plain(kernel, path(kernel, at, [loop.start])[:-1], x, gpu)
        body, last = looped(steps(kernel.body(loop), gpu, x.compiled.tma_bytes), 0, f"{number} copy"), min(ahead, count)
        parts += [(piece, 1) for piece in _begun(before, body, ahead, last)]
        parts += [(body, count - last), ([s for s in body if s.kind not in ("copy", "tma")], last)]
        at = loop.stop
    way = path(kernel, at, [i for i, one in enumerate(kernel.instructions) if one.op == "EXIT"])
    parts.append((_plain(kernel, way, x, gpu), 1))
    return simulate(gpu, [Role(x.compiled.warps, tuple(p for p in parts if p[0] and p[1]))], blocks).cycles


def _begun(before: Sequence[Any], body: Sequence[Any], ahead: int, share: int) -> list[list[Any]]:
    """The steps ahead of a loop, where the first `share` of `ahead` stages are copied; copies by TMA, which a loop
    waits for as for its own, end a piece for each stage."""
    own = [s for s in body if s.kind == "tma"]
    copies, loads = ([i for i, s in enumerate(before) if s.kind == kind] for kind in ("copy", "tma"))
    loads = loads[len(loads) - ahead * len(own) :]  # those before are of the program's own tile
    off = set(copies[len(copies) * share // ahead :] if ahead else ()) | set(loads[share * len(own) :])
    for i, like in zip(loads, ahead * own, strict=True):
        before[i].keys = like.keys
    ends = [0, *(i + 1 for i in loads[len(own) - 1 :: max(1, len(own))]), len(before)]
    return [[before[i] for i in range(a, b) if i not in off] for a, b in itertools.pairwise(ends)]


def _plain(kernel: Sass, way: Sequence[int], x: Kernel, gpu: Gpu) -> list[Any]:
    made = steps((kernel.instructions[i] for i in way), gpu, x.compiled.tma_bytes)
    for one in made:
        if one.kind == "await":  # outside of loops barriers are not followed: what they bring is waited for
            one.latency += gpu.copy_latency if any(s.kind == "tma" for s in made) else 0
    return made


# -- all blocks -------------------------------------------------------------------------------------------


def makespan(durations: Sequence[float], places: int) -> tuple[float, float]:
    """(when the last block ends, share of the places' time that is empty): blocks in order, each where a place is free
    first."""
    free = [0.0] * min(places, max(1, len(durations)))
    heapq.heapify(free)
    for x in durations:
        heapq.heapreplace(free, free[0] + x)
    end = max(free)
    return end, 1 - sum(durations) / (end * places) if end else 0.0


def kernel_time(
    parts: Sequence[tuple[Kernel, Work]], groups: int, gpu: Gpu, bytes: float, together: int = 1
) -> Time:  # fmt: skip
    """The time of one launch: the blocks of `parts` in order, again for each of the groups of heads. Each block comes
    `together` with those of so many groups. The two programs of flex_attention's backward are one launch."""
    durations: list[float] = []
    products, places = 0.0, 0
    total = groups * sum(len(w.border) for _, w in parts)
    for x, work in parts:
        fit = resident(gpu, x.compiled.warps, x.compiled.registers, x.compiled.shared)
        fit = max(1, min(fit, -(-total // gpu.processors)))
        places = gpu.processors * fit
        each = figures(x.compiled, gpu, fit)
        fixed = gpu.launch + overhead(x, gpu)
        border, rest = (max(each[n].cycles, x.copied * fit / gpu.l2_rate) for n in (x.border, x.full))
        durations += list(fixed + work.border * border + work.full * rest)
        products += float((work.border + work.full).sum()) * x.pairs * x.flops * groups
    cycles, tail = makespan(np.tile(np.repeat(durations, together), groups // together), places)
    memory = bytes / gpu.hbm
    peak = gpu.processors * gpu.matrix * 8  # FLOP a cycle
    share = products / max(cycles, memory * gpu.clock) / peak
    clock = gpu.clock_under(share)
    seconds = max(cycles / clock, memory) + SECONDS_A_LAUNCH
    return Time(seconds, cycles, memory, share, clock, tail)


@dataclass(frozen=True)
class Case:
    """What is computed: 16 heads of a batch of one, unless it says otherwise."""

    mask: str = "causal"
    dim: int = 128
    length: int = 8192
    heads: int = 16
    group: int = 1  # query heads of a key head
    dtype: str = "bfloat16"
    arch: str = "sm_90"

    @property
    def pairs(self) -> float:
        """Visible pairs of all heads."""
        return float(layout(self.mask, self.length, (128, 128)).visible_pairs) * self.heads

    @property
    def array(self) -> float:
        """Bytes of one array of queries."""
        return self.heads * self.length * self.dim * (4 if self.dtype == "float32" else 2)


ARRAYS = {"forward": 4, "dq": 5, "dkv": 6, "delta": 2, "backward": 7}  # that a kernel reads or writes once


def loop_numbers(compiled: Compiled, loops: Sequence[Loop]) -> tuple[int, int]:
    """(border, full) among some loops: the mask is more instructions. Where no tile is a border there is one loop."""
    numbers = [compiled.sass.products.index(x) for x in loops]
    if len(numbers) not in (1, 2):
        raise ValueError(f"{compiled.kernel}: {len(numbers)} loops with products, where there are one or two")
    ranked = sorted(numbers, key=lambda n: -len(compiled.sass.body(compiled.sass.products[n])))
    return ranked[0], ranked[-1]


def ours_time(kernel: str, case: Case, tile: Tile | None = None, gpu: Gpu | None = None) -> Time:
    """One of our kernels, with its own tile or another."""
    gpu = gpu or GPUS[case.arch]
    one = Ours(kernel, case.mask, case.dim, case.dtype, case.group, case.arch)
    tile = tile or our_kernels.chosen(one)
    made = our_kernels.compiled(one, tile)
    border, full = loop_numbers(made, made.sass.products)
    x = Kernel(made, border, full, tile.block_q * tile.block_k, one.flops)
    work = ours_work(kernel, case.mask, case.length, tile).grouped(case.group, kernel == "dkv")
    together = our_kernels.together(one, case.length, case.heads // case.group)
    return kernel_time([(x, work)], case.heads // case.group, gpu, ARRAYS[kernel] * case.array, together)


def flex_time(kernel: str, case: Case, gpu: Gpu | None = None, tiles: tuple[Tile, ...] | None = None) -> Time:
    """flex_attention's forward, or its backward, with torch's tiles or others."""
    gpu = gpu or GPUS[case.arch]
    one = flex_kernels.Flex(kernel, case.mask, case.dim, case.dtype, case.arch, group=case.group)
    tiles = tiles or flex_kernels.tiles(kernel, case.dim, case.dtype, case.arch)
    made = flex_kernels.compiled(one, tiles)
    loops, parts = made.sass.products, []
    programs = ("forward",) if kernel == "forward" else ("dq", "dkv")  # in the order of the text
    for i, program in enumerate(programs):
        tile = tiles[i]
        border, full = loop_numbers(made, loops[2 * i : 2 * i + 2])
        flops = our_kernels.FLOPS[program] * case.dim
        x = Kernel(made, border, full, tile.block_q * tile.block_k, flops)
        parts.append((x, flex_work(program, case.mask, case.length, tile).grouped(case.group, program == "dkv")))
    parts.reverse()  # blocks of dkv have the first numbers
    return kernel_time(parts, case.heads // case.group, gpu, ARRAYS[kernel] * case.array)


def seconds(which: str, direction: str, case: Case, gpu: Gpu | None = None) -> float:
    """Seconds of a forward or of a backward, with delta, of `ours` or `flex`."""
    gpu = gpu or GPUS[case.arch]
    if direction == "forward":
        return (ours_time if which == "ours" else flex_time)("forward", case, gpu=gpu).seconds
    delta = ARRAYS["delta"] * case.array / gpu.hbm + SECONDS_A_LAUNCH
    if which == "flex":
        return flex_time("backward", case, gpu=gpu).seconds + delta
    return ours_time("dq", case, gpu=gpu).seconds + ours_time("dkv", case, gpu=gpu).seconds + delta


def rate(which: str, direction: str, case: Case, gpu: Gpu | None = None) -> float:
    """TFLOP/s of visible pairs: 4 FLOP for each dimension of a pair forward, 10 backward."""
    flops = (4 if direction == "forward" else 10) * case.dim * case.pairs
    return flops / seconds(which, direction, case, gpu) / 1e12
