"""Predicted times of chunked prefill by Gluon's forward: parts of prompts over a cache, in pages or in one piece.

A program of 128 queries of one head walks the tiles that its queries see, as `specialised` simulates them. The mask is
causal with one origin for all sequences, of which formulas give the tiles; Triton's kernels of `serving` read them from
a table. What HBM delivers takes less time than the products of a part of 512 queries, and is left out. Where both
halves of the queries meet to set values that nobody sees to 0, the simulation lets neither wait for the other: once or
twice a program.
"""

from __future__ import annotations

from frisket.dsl.ir import var
from frisket.dsl.sugar import k, q
from frisket.lowering.kernels.gluon.forward import emit
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Pages, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.gluon import torch as gluon_kernels
from frisket.runtime.machine.modules import load_from_file

from .compiled import Compiled, kept
from .full import SECONDS_A_LAUNCH, makespan
from .machine import GPUS
from .serving import DIM, GROUP, Step, tiles_of
from .specialised import Cycles, cycles

QUERIES, KEYS = 128, 128  # of a tile: `gluon.torch.keys_of` for a causal mask at head size 128


def compiled(step: Step) -> tuple[Compiled, Target]:
    """Gluon's forward of a step, and its tile."""
    q0, q1, k0 = (var(n) for n in ("q0", "q1", "k0"))
    pages, facts = Pages("pages", step.page) if step.page else None, ProgramFacts(bounds=Bounds(k0, k0, q0, q1))
    plan, dims, g = make_plan(ProgramExprs(q >= k), "", facts, pages=pages, unwritten=True), step.dims, step.geometry
    stages = gluon_kernels.stages(step.arch, g, QUERIES, KEYS)
    target = Target("gluon", QUERIES, KEYS, 4, stages, arch=step.arch)
    source = emit(plan, target, dims)
    kernel = vars(load_from_file(source))["attention_forward"]
    key = source, target, dims
    found = kept("attention_forward", step.arch, 4, key, lambda: gluon_kernels.compiled_for(kernel, plan, target, dims))
    return found, target


def of_tiles(step: Step) -> Cycles:
    """The cycles of the tiles of a step's kernel."""
    found, target = compiled(step)
    return cycles(found.sass, GPUS[step.arch], target.num_stages, found.tma_bytes)


def seconds(step: Step, each: Cycles) -> float:
    """The time of a step at the clock that power leaves, with its launch."""
    gpu, durations, products = GPUS[step.arch], [], 0
    for length in step.lengths:
        for end in range(step.queries, 0, -QUERIES):  # the longest first
            border, full = tiles_of(length - step.queries + end, min(end, QUERIES), KEYS)
            # the first tile is computed before the loops
            durations.append(gpu.launch + each.fixed + max(0, border - 1) * each.border + full * each.full)
            products += border + full
    heads = GROUP * step.key_heads
    end, _ = makespan(heads * durations, gpu.processors)
    share = heads * products * QUERIES * KEYS * 4 * DIM / end / (gpu.processors * gpu.matrix * 8)
    return end / gpu.clock_under(share) + SECONDS_A_LAUNCH


def rate(step: Step) -> float:
    """TFLOP/s of visible pairs."""
    return step.flops / seconds(step, of_tiles(step)) / 1e12
