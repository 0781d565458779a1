"""A static figure for kernels of AMD's GPUs: cycles of a loop over full tiles, by the busiest unit of a compute unit.

The compiler's assembly says what a wavefront does in a round of the loop: matrix products, vector instructions, bytes
from and to LDS. Registers and LDS say how many wavefronts a SIMD holds. Units work at the same time where there are
several wavefronts; one wavefront waits for each unit in turn, and for its loads. Nobody has compared this figure with a
device: it orders tiles, and predicts no time.

Rates are AMD's: of 16-bit products by the peaks of data sheets, of registers and wavefronts by LLVM's AMDGPU guide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from frisket.lowering.architectures import GPUS

from .compiled import Compiled


@dataclass(frozen=True)
class Simd:
    """A SIMD: FLOP a cycle, cycles of a vector instruction and of a transcendental one, registers of a lane for all
    wavefronts, the multiple they are allotted in, and the most wavefronts. A compute unit has `simds`."""

    flops: int
    vector: int
    transcendental: int
    registers: int
    granule: int
    waves: int
    simds: int


SIMDS = {
    "gfx90a": Simd(256, 4, 16, 512, 8, 8, 4),
    "gfx942": Simd(512, 4, 16, 512, 8, 8, 4),
    "gfx950": Simd(1024, 4, 8, 512, 8, 8, 4),
    "gfx1100": Simd(256, 1, 4, 1536, 24, 16, 2),
    "gfx1201": Simd(512, 1, 4, 1536, 24, 16, 2),
}
LDS = 128  # bytes of a compute unit in a cycle; a gfx950's is faster by AMD's words, which give no number
LATENCY, LDS_LATENCY = 600, 100  # cycles of a load from L2 with one stage, and of one from LDS

BRANCH = re.compile(r"\s+s_c?branch\w*\s+(\.LBB\w+)")
PRODUCT = re.compile(r"\s+v_s?w?mf?ma[c_]\w*?_(\d+)x(\d+)x(\d+)")
VECTOR = re.compile(r"\s+v_(?!mfma|wmma)(\w+)")
TRANSCENDENTAL = re.compile(r"\s+v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
ACCESS = re.compile(r"\s+ds_(?:load|store|read|write)(2?)(?:st64)?(?:_tr)?\w*?_[bu](\d+)")


@dataclass(frozen=True)
class Loop:
    """A round of a loop of one wavefront: FLOP of its products, instructions, and bytes of LDS a lane."""

    flop: int
    vector: int
    transcendental: int
    lds: int


def loops(text: str) -> list[Loop]:
    """The innermost loops of a kernel's assembly that multiply, in the order of the text."""
    return [x for x in map(_counted, _bodies(text.splitlines())) if x.flop]


def _bodies(lines: list[str]) -> Iterator[list[str]]:
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    jumps = ((labels.get(m[1], i), i) for i, line in enumerate(lines) if (m := BRANCH.match(line)))
    back = [(first, last) for first, last in jumps if first < last]
    for first, last in back:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in back):
            yield lines[first : last + 1]


def _counted(body: list[str]) -> Loop:
    products = [m for line in body if (m := PRODUCT.match(line))]
    accesses = [m for line in body if (m := ACCESS.match(line))]
    return Loop(
        sum(2 * int(m[1]) * int(m[2]) * int(m[3]) for m in products),
        sum(VECTOR.match(line) is not None for line in body),
        sum(TRANSCENDENTAL.match(line) is not None for line in body),
        sum((2 if m[1] else 1) * int(m[2]) // 8 for m in accesses),
    )


def resident(arch: str, registers: int, shared: int, warps: int, limit: int) -> int:
    """How many programs a compute unit holds."""
    simd = SIMDS[arch]
    allotted = -(-max(registers, 1) // simd.granule) * simd.granule
    waves = min(simd.waves, simd.registers // allotted) * simd.simds
    return min(waves // warps, limit // max(shared, 1))


def cycles(arch: str, text: str, programs: int, warps: int, stages: int) -> float:
    """Cycles of a compute unit for one round of one program's loop over full tiles, with so many `programs` on it.

    ValueError where the text has no such loop."""
    simd, found = SIMDS[arch], loops(text)
    if not found:
        raise ValueError("no loop multiplies")
    loop = min(found, key=lambda x: (x.vector / x.flop, x.flop))  # full tiles have no mask
    lanes = 64 if simd.simds == 4 else 32
    products = loop.flop / simd.flops
    vector = (loop.vector - loop.transcendental) * simd.vector + loop.transcendental * simd.transcendental
    lds = loop.lds * lanes / LDS
    on_a_simd = programs * warps / simd.simds
    alone = products + vector + lds + (LATENCY if stages == 1 else LDS_LATENCY)
    busiest = max(products * on_a_simd, vector * on_a_simd, lds * programs * warps, alone)
    return busiest / programs


def seconds_of_a_pair(found: Compiled, pairs: int) -> float:
    """The figure of a compiled kernel, whose tile has so many pairs of a query and a key, at a cycle of a nanosecond;
    infinite where no program fits."""
    programs = resident(found.arch, found.registers, found.shared, found.warps, GPUS[found.arch].shared)
    if not programs:
        return math.inf
    return 1e-9 * cycles(found.arch, found.text, programs, found.warps, found.stages) / pairs
