"""The fused backward of Gluon on Hopper: its blocks played whole, as `specialised` plays the forward, and its time
compared with that of Triton's pair.

The kernel has four programs: two that compute, one that copies tiles of queries, and one that adds tiles of dq to
global memory. Barriers are told apart as in `specialised`. Of those that a program asks, the copying program's are free
at first in every stage, and the ones that the adding program posts are free once. Adding reads a tile from shared
memory, and takes L2 as long as a read of so many bytes. Sums in any order are played: turns of ordered ones depend on
other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from frisket.lowering.kernels.gluon.backward import KEYS, emit, queries_of
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget
from frisket.runtime.backends.gluon import torch as gluon
from frisket.runtime.machine.modules import load_from_file

from .compiled import Compiled, kept
from .full import ARRAYS, SECONDS_A_LAUNCH, Case, makespan, ours_work, path, seconds
from .machine import GPUS, Gpu
from .ours import Ours, Tile, planned
from .sass import Instruction, Sass
from .simulate import Role, simulate
from .specialised import TURNS, Cycles, _address, _base, programs
from .steps import Step, steps

FLOPS = 10  # of a pair, for each dimension: five products
LINE = 128  # bytes of a row that one TMA instruction copies


@dataclass(frozen=True)
class Bytes:
    """Bytes of TMA instructions: a tile is copied by `copies` of `tile` bytes, behind which `numbers` of its queries
    may come; `sums` are those of one that adds."""

    copies: int
    tile: float
    numbers: float
    sums: float

    @classmethod
    def of(cls, queries: int, dim: int) -> Bytes:
        return cls(-(-2 * dim // LINE), queries * min(2 * dim, LINE), 4 * queries, 64 * LINE)


@dataclass(frozen=True)
class Barriers:
    """What is known of a program's barriers: `bases` are addresses of first stages, `free` is how many phases of those
    that the program asks are complete at first, `posted` are those of the adding program, complete once."""

    bases: frozenset[int | None]
    depth: int
    free: int
    posted: frozenset[int | None]


def roles(kernel: Sass, gpu: Gpu, turns: tuple[int, int], depth: int, sizes: Bytes) -> list[Role]:
    """The warps of a block whose programs have so many turns of their border and of their full loop."""
    found = programs(kernel)
    adding = [p for p in found if any(_adds(x) for loop in p.loops for x in kernel.body(loop))]
    copying = [p for p in found if p.copies and p not in adding]
    named = {_address(x) for p in copying for loop in p.loops for x in kernel.body(loop)}
    every = {_address(x) for x in kernel.instructions} - {None}
    bases = frozenset(b for b in every if b in named or not named.intersection(b - 8 * i for i in range(1, depth)))
    posted = frozenset(_address(x) for p in adding for loop in p.loops for x in kernel.body(loop) if _posts(x))
    made = []
    for p in found:
        barriers = Barriers(bases, depth, depth if p in copying else 0, posted if p not in adding else frozenset())
        counts = turns[: len(p.loops)] if len(p.loops) > 1 else (sum(turns),)
        parts, at = [], p.start
        for loop, count in zip(p.loops, counts, strict=True):
            before = path(kernel, at, [loop.start])[:-1]
            parts.append((_wired(kernel, before, gpu, barriers, sizes), 1))
            parts.append((_wired(kernel, [*kernel.way(loop.start, loop.stop)], gpu, barriers, sizes), count))
            at = loop.stop
        ends = [
            i for i, x in enumerate(kernel.instructions)
            if x.op == "EXIT" or (x.op.startswith("BRA") and not x.predicate and x.target is not None and x.target <= i)
        ]  # fmt: skip
        parts.append((_wired(kernel, path(kernel, at, ends), gpu, barriers, sizes), 1))
        made.append(Role(1 if p.copies else 4, tuple(x for x in parts if x[0] and x[1])))
    return made


def _adds(x: Instruction) -> bool:
    return x.op.startswith("UTMARED")


def _posts(x: Instruction) -> bool:
    return x.op.startswith("SYNCS.ARRIVE")


def _wired(kernel: Sass, way: Sequence[int], gpu: Gpu, barriers: Barriers, sizes: Bytes) -> list[Step]:
    """Steps with their barriers; those of all threads, at which programs begin and end, are left out."""
    pairs = [(x, s) for i in way for x in [kernel.instructions[i]] for s in steps([x], gpu, sizes.tile)]
    asked: set[str] = set()
    newest, copies = "", 0
    for x, s in pairs:
        if s.kind in ("barrier", "signal") and not s.warps:
            s.kind, s.pipe = "pipe", ""
        elif s.kind in ("await", "post"):
            address = _address(x)
            name = f"{_base(address, set(barriers.bases), barriers.depth):x}"
            if s.kind == "post":
                newest, copies = name, 0
            if s.kind == "post" or x.operands not in asked:
                s.keys = ((name, barriers.free or int(address in barriers.posted)),)
            asked.add(x.operands)
        elif s.kind == "tma":
            copies += 1
            s.keys, s.amount = ((newest, 0),), sizes.tile if copies <= sizes.copies else sizes.numbers
        elif _adds(x):
            s.kind, s.amount, s.latency, s.first = "tma", sizes.sums, gpu.copy_latency, True
    return [s for _, s in pairs]


def cycles(kernel: Sass, gpu: Gpu, depth: int, sizes: Bytes) -> Cycles:
    """The cycles of one block alone on its SM."""
    few, more_full, more_border = (simulate(gpu, roles(kernel, gpu, turns, depth, sizes)).cycles for turns in TURNS)
    full = (more_full - few) / (TURNS[1][1] - TURNS[0][1])
    border = (more_border - few) / (TURNS[2][0] - TURNS[0][0])
    return Cycles(border, full, few - TURNS[0][0] * border - TURNS[0][1] * full)


def compiled(case: Case) -> Compiled:
    """The kernel of a case, with sums in any order."""
    plan, _ = planned(Ours("dkv", case.mask, case.dim, case.dtype, case.group, case.arch))
    tile = TritonTarget(
        "gluon", queries_of(case.dim), KEYS, 4, gluon.FUSED_STAGES, arch=case.arch, order="longest-of-all-first"
    )
    dims = Dims(case.dim, case.dim, case.dtype, case.group)
    source = emit(plan, tile, dims, dlse=False, ordered=False)
    made = kept(
        "attention_backward", case.arch, 4, (source, tile, dims),
        lambda: gluon.fused_compiled(load_from_file(source).attention_backward, plan, tile, dims),
    )  # fmt: skip
    return replace(made, stages=gluon.FUSED_STAGES)


def fused_seconds(case: Case, gpu: Gpu | None = None) -> float:
    """Seconds of the backward: the numbers of queries, the zeros that dq begins as, the products, and dq's rounding."""
    gpu = gpu or GPUS[case.arch]
    made, queries = compiled(case), queries_of(case.dim)
    found = cycles(made.sass, gpu, gluon.FUSED_STAGES, Bytes.of(queries, case.dim))
    work = ours_work("dkv", case.mask, case.length, Tile(queries, KEYS, 4, gluon.FUSED_STAGES))
    work = work.grouped(case.group, walked=True)
    each = gpu.launch + found.fixed + work.border * found.border + work.full * found.full
    end, _ = makespan([*np.repeat(each, case.heads // case.group)], gpu.processors)
    tiles = float((work.border + work.full).sum()) * (case.heads // case.group)
    share = tiles * queries * KEYS * FLOPS * case.dim / end / (gpu.processors * gpu.matrix * 8)
    sums = case.heads * case.length * case.dim * 4  # bytes of dq in float32: set to 0, added to, and read
    around = (ARRAYS["delta"] * case.array + 3 * sums + case.array) / gpu.hbm
    return end / gpu.clock_under(share) + around + 4 * SECONDS_A_LAUNCH


def ratio(case: Case) -> float:
    """The time of Triton's pair of kernels over that of the fused one."""
    return seconds("ours", "backward", case) / fused_seconds(case)
