"""Kernels whose warp groups have programs of their own: one that copies by TMA, others that compute.

The programs begin at the kernel's entry and at the targets of its branch by a register. Each is played whole, from its
first instruction through its loops to its end; barriers in shared memory, told apart by the constants of their
addresses, tie the programs together. A barrier of several stages has an address for each: those that the copying
program names are the first of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from .full import Work, makespan, path
from .machine import Gpu
from .sass import Instruction, Loop, Sass
from .simulate import Role, simulate
from .steps import Step, steps

ADDRESS = re.compile(r"\[[^\]]*\+0x([0-9a-f]+)\]")
TURNS = ((2, 4), (2, 12), (8, 4))  # border and full tiles of the runs whose differences are a tile's cycles


@dataclass(frozen=True)
class Program:
    """One program: where it begins, and its loops with products, or with copies."""

    start: int
    loops: tuple[Loop, ...]
    copies: bool


def programs(kernel: Sass) -> list[Program]:
    """The programs that compute or copy, in the order of the text."""
    code = kernel.instructions
    starts = sorted({0, *(t for x in code for t in x.targets)})
    found = []
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        inside = [x for x in kernel.loops if start <= x.start < stop]
        computing = tuple(x for x in inside if x in kernel.products)
        copying = tuple(x for x in inside if any(i.kind == "TMA" for i in kernel.body(x)))
        if computing or copying:
            found.append(Program(start, computing or copying, not computing))
    return found


def roles(kernel: Sass, gpu: Gpu, turns: tuple[int, int], depth: int, tma_bytes: float) -> list[Role]:
    """The warps of a block: four for each program that computes, one for a program that copies as many tiles as those
    take, one more than their loops have: it is computed before them."""
    found = programs(kernel)
    bases = {_address(x) for p in found if p.copies for loop in p.loops for x in kernel.body(loop)} - {None}
    made = []
    for p in found:
        resolved = _resolved(kernel, p)
        counts = (sum(turns) + 1,) if p.copies else turns[: len(p.loops)]
        wired = partial(_wired, kernel, gpu, bases, resolved, depth, tma_bytes)
        parts, at = [], p.start
        early: frozenset[str] = frozenset()  # barriers of tiles that the first part asks already
        for loop, count in zip(p.loops, counts, strict=True):
            parts.append((wired(path(kernel, at, [loop.start])[:-1]), 1))
            parts.append((wired([*kernel.way(loop.start, loop.stop)]), count))
            early = early or frozenset(n for s in parts[0][0] if s.kind == "await" for n, _ in s.keys)
            at = loop.stop
        ends = [
            i for i, x in enumerate(kernel.instructions)
            if x.op == "EXIT" or (x.op.startswith("BRA") and not x.predicate and x.target is not None and x.target <= i)
        ]  # fmt: skip
        parts.append((wired(path(kernel, at, ends), early), 1))
        made.append(Role(1 if p.copies else 4, tuple(x for x in parts if x[0])))
    return made


def _resolved(kernel: Sass, p: Program) -> dict[str, int]:
    """The addresses of barriers that a loop names by a register alone, or before one: those of the same steps of the
    program's other loops."""
    asked = [[x for x in kernel.body(loop) if x.op.startswith("SYNCS")] for loop in p.loops]
    pairs = ((x, y) for some in asked for others in asked if len(some) == len(others) for x, y in zip(some, others))
    return {_place(x): at for x, y in pairs if _address(x) is None and (at := _address(y)) is not None}


def _place(x: Instruction) -> str:
    return x.text[x.text.index("[") : x.text.index("]")]


def _wired(
    kernel: Sass, gpu: Gpu, bases: set[int | None], resolved: dict[str, int], depth: int, tma_bytes: float,
    way: Sequence[int], early: frozenset[str] = frozenset(),
) -> list[Step]:  # fmt: skip
    """Steps with their barriers. A second question about a phase changes nothing: one of the same address, one about a
    ring of tiles in the same part, or one of `early`, the barriers that an earlier part has asked one tile ahead.
    Barriers of all threads, at which programs begin and end, are left out."""
    code = [kernel.instructions[i] for i in way]
    made = [(x, s) for x in code for s in steps([x], gpu, tma_bytes)]
    asked: set[str] = set()
    newest = ""
    for x, s in made:
        if s.kind in ("barrier", "signal") and not s.warps:
            s.kind, s.pipe = "pipe", ""
        elif s.kind in ("await", "post"):
            base = _base(_address(x) or resolved.get(_place(x)), bases, depth)
            name, ring = f"{base:x}", base in bases
            if s.kind == "post":
                newest = name
            known = x.operands in asked or name in early or (ring and name in asked)
            if s.kind == "post" or not known:
                # what the copying program asks for is free at first, all stages of it
                s.keys = ((name, depth if _loads(kernel, x) else 0),)
            asked |= {x.operands, name}
        elif s.kind == "tma":
            s.keys = ((newest, 0),)
    return [s for _, s in made]


def _loads(kernel: Sass, x: Instruction) -> bool:
    return any(x in kernel.body(loop) for p in programs(kernel) if p.copies for loop in p.loops)


def _address(x: Instruction) -> int | None:
    found = ADDRESS.search(x.text) if x.op.startswith("SYNCS") else None
    return int(found[1], 16) if found else None


def _base(address: int | None, bases: set[int | None], depth: int) -> int:
    if address is None:
        return 0
    first = [b for b in bases if b is not None and b <= address < b + 8 * depth]
    return max(first, default=address)


@dataclass(frozen=True)
class Cycles:
    """Cycles of a block: for each border and full tile, and beside them."""

    border: float
    full: float
    fixed: float


def cycles(kernel: Sass, gpu: Gpu, depth: int, tma_bytes: float) -> Cycles:
    """The cycles of one block alone on its SM, whose copies have `depth` stages."""
    few, more_full, more_border = (simulate(gpu, roles(kernel, gpu, turns, depth, tma_bytes)).cycles for turns in TURNS)
    full = (more_full - few) / (TURNS[1][1] - TURNS[0][1])
    border = (more_border - few) / (TURNS[2][0] - TURNS[0][0])
    return Cycles(border, full, few - TURNS[0][0] * border - TURNS[0][1] * full)


def share(found: Cycles, work: Work, heads: int, gpu: Gpu, pairs: int, flops: float) -> tuple[float, float]:
    """(seconds at the clock that power leaves, share of the matrix unit's peak) of all blocks."""
    counts = replace(work, border=(work.border - 1).clip(0))  # the first tile is computed before the loops
    durations = [*(gpu.launch + found.fixed + counts.border * found.border + work.full * found.full)]
    end, _ = makespan(heads * durations, gpu.processors)
    products = heads * float((work.border + work.full).sum()) * pairs * flops
    part = products / end / (gpu.processors * gpu.matrix * 8)
    return end / gpu.clock_under(part), part
