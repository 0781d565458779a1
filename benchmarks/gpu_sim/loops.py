"""The steady loops of a kernel, played: cycles a tile, rates, counts by class, and what warps wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .compiled import Compiled, remembered
from .machine import GPUS, Gpu, resident
from .sass import Loop, Sass, counted
from .simulate import Role, simulate
from .steps import steps, wired

WARM, TURNS = 4, 10  # repetitions that are played first, and then those that are measured
VERSION = 3  # of the model: what another version simulated is simulated anew


@dataclass(frozen=True)
class LoopFigures:
    """One loop with matrix products in its steady state, of `blocks` blocks that share an SM: `cycles` for a tile of
    each, the floor of the matrix unit and of issue in cycles, instructions of a warp by class, cycles of a warp by what
    it waited for, and bytes from L2 of a block."""

    start: int
    instructions: int
    blocks: int
    cycles: float
    matrix: float
    issue: float
    counts: Mapping[str, int]
    waits: Mapping[str, float]
    bytes: float

    def rate(self, gpu: Gpu, pairs: int, flops: float) -> float:
        """TFLOP/s where a tile has so many pairs of so many FLOP."""
        return pairs * flops * self.blocks / self.cycles * gpu.processors * gpu.clock / 1e12

    def an_element(self, pairs: int, warps: int) -> float:
        """Instructions of a thread for one pair, without products."""
        return (self.instructions - self.counts.get("matrix", 0)) * warps * 32 / pairs


def figures(compiled: Compiled, gpu: Gpu | None = None, blocks: int = 0) -> list[LoopFigures]:
    """The loops of a kernel with products, in the order of its text, each played by itself."""
    gpu = gpu or GPUS[compiled.arch]
    blocks = blocks or resident(gpu, compiled.warps, compiled.registers, compiled.shared)
    key = ("loops", VERSION, compiled.digest, compiled.warps, blocks, gpu)

    def make() -> list[dict[str, Any]]:
        kernel = compiled.sass
        return [
            asdict(played(kernel, loop, gpu, compiled.warps, blocks, compiled.tma_bytes, compiled.ahead))
            for loop in kernel.products
        ]

    return [LoopFigures(**x) for x in remembered(key, make)]


def played(
    kernel: Sass, loop: Loop, gpu: Gpu, warps: int, blocks: int, tma_bytes: float, ahead: int = 1
) -> LoopFigures:  # fmt: skip
    """One loop played by itself, `blocks` blocks of so many warps at a time. A TMA copy brings `tma_bytes`, `ahead`
    repetitions before they are waited for."""
    body = kernel.body(loop)
    each = looped(steps(body, gpu, tma_bytes), ahead)
    run = simulate(gpu, [Role(warps, ((each, WARM + TURNS),))], blocks)
    kinds = counted(body)
    matrix = sum(x.occupied for x in each if x.pipe == "matrix" or x.kind == "product") * warps * blocks / 4
    total = warps * blocks * (WARM + TURNS)
    return LoopFigures(
        loop.start, sum(kinds.values()), blocks, run.period(WARM), matrix, sum(kinds.values()) * warps * blocks / 4,
        dict(kinds.most_common()), {n: x / total for n, x in sorted(run.waits.items(), key=lambda x: -x[1])},
        run.bytes / blocks / (WARM + TURNS),
    )  # fmt: skip


def looped(body: list[Any], ahead: int = 1, name: str = "copy") -> list[Any]:
    """A loop's steps with the barriers of its TMA copies, which are called `name` and a number: one warp copies,
    `ahead` repetitions before all warps wait; 0 where steps before the loop copy for its first ones. The copies belong
    to the waits in the order of the text, each wait to as many."""
    waits, copies = (sum(x.kind == kind for x in body) for kind in ("await", "tma"))
    if not waits or not copies:
        return body
    names = [(f"{name} {i}", ahead) for i in range(waits)]
    each = [names[i * waits // copies] for i in range(copies)]
    posts = [names[min(i, waits - 1)] for i in range(sum(x.kind == "post" and x.first for x in body))]
    rest = iter(posts)
    wired(body, names, [], each)
    for x in body:
        if x.kind == "post" and x.first:
            x.keys = (next(rest),)
    return body
