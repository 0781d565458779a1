"""Which tiles a Triton kernel takes."""

from __future__ import annotations

from frisket.lowering.emit.expr import POSITION, levels
from frisket.lowering.emit.triton_parameters import padded
from frisket.lowering.plan import Geometry, LoopPlan, Target

# (16-bit or float32, padded head size) -> block_q, block_k, warps, stages, for Hopper and the like
TILES = {
    (16, 64): (128, 64, 8, 3), (16, 128): (128, 64, 8, 2), (16, 256): (128, 32, 8, 2),
    (32, 64): (32, 32, 8, 2), (32, 128): (32, 16, 8, 2), (32, 256): (16, 16, 4, 2),
}  # fmt: skip


def default_target(plan: LoopPlan, geometry: Geometry, dtype: str, arch: str = "sm_90") -> Target:
    """Tiles as large as registers and shared memory carry without a spill (tests/kernels/triton_compiled.py)."""
    g, bits = geometry, 32 if dtype == "float32" else 16
    dim = max(64, min(256, max(padded(g.head_dim), padded(g.v_dim))))
    block_q, block_k, warps, stages = TILES[bits, dim]
    if bits == 16 and dim == 128 and plan.bounds is not None and plan.score is None:
        block_k, stages = 128, 3  # without a span table the registers suffice
    if bits == 16 and _loads_per_position(plan):
        block_k, stages = min(block_k, 32), 2  # Triton stages such a table through shared memory too
    if arch.startswith("gfx"):
        block_k, stages = min(block_k, 64), 1  # 64 KiB of shared memory
    elif arch == "sm_80":
        stages = min(stages, 2)
    while block_q > 16 and block_q >= 2 * g.q_len:
        block_q, warps = block_q // 2, max(4, warps // 2)
    return Target("triton", block_q, block_k, warps, stages)


def _loads_per_position(plan: LoopPlan) -> bool:
    roots = [e for e in (plan.mask, plan.score) if e is not None]
    return any(n.op == "lookup" and at == POSITION for n, at in levels(*roots).items())
