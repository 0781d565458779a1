"""Tiles of FlashAttention 4, and the heads that it takes: those that the engine's own configuration asks block-sparse
tensors for (`flash_attn/cute/interface.py`, version 4.0.0b36).

A key tile of the lists is one of the kernel's. On Hopper a query tile is as well; on Blackwell the forward has two in
flight. Backward lists have the backward's own tiles.
"""

from __future__ import annotations

from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.plan import Geometry, Target
from frisket.runtime.backends.triton.tiles import architecture
from frisket.runtime.calls.options import AS_CHOSEN, Tuning
from frisket.runtime.plans.device import CallPlan

ARCHITECTURES = ("sm_90", "sm_100")
INSTEAD = "take backend='triton'"
Block = tuple[int, int]  # queries, keys


def target(
    plan: CallPlan | None, g: Geometry, dtype: str, tile: Block | None = None, tuning: Tuning = AS_CHOSEN,
    device: Any = None, arch: str | None = None,
) -> Target:  # fmt: skip
    """The target of a call; `dq` has the tiles of the backward. The engine has its own: a `tile` must be that."""
    if arch and arch not in ARCHITECTURES:
        raise BackendError(f"FlashAttention 4 is checked on {' and '.join(ARCHITECTURES)}, not {arch}; {INSTEAD}")
    gpu = arch or architecture(device)
    gpu = gpu if gpu in ARCHITECTURES else ARCHITECTURES[0]  # whose source can be printed anywhere
    if why := refused_heads(g, gpu):
        raise BackendError(f"{why}\n  {INSTEAD}")
    block = forward_block(g, gpu)
    if tile is not None and tuple(tile) != block:
        raise BackendError(f"FlashAttention 4 takes tiles of {block[0]} x {block[1]} for this head, leave out `tile`")
    back = Target("flash", *backward_block(g, gpu), num_warps=12, arch=gpu)
    return Target("flash", *block, num_warps=12, arch=gpu, dq=back)


def forward_block(g: Geometry, arch: str) -> Block:
    """The queries and keys of a tile of the forward's lists."""
    if arch == "sm_100":
        return 256, 128
    if g.head_dim <= 96:
        return 192, 128
    if g.head_dim <= 128:
        return 128, 128
    return (128, 128 if g.v_dim <= 128 else 112) if g.head_dim <= 192 else (128, 80)


def backward_block(g: Geometry, arch: str) -> Block:
    """The queries and keys of a tile of the backward's lists."""
    if arch == "sm_100":  # heads of 192 have two blocks of threads for 256 keys
        return 128, 256 if g.head_dim == 192 else 128
    if g.head_dim <= 64:
        return 128, 128
    if g.head_dim <= 128:
        return 64, 128
    return 64, 96 if g.head_dim <= 192 else 64


def refused_heads(g: Geometry, arch: str) -> str:
    """A reason why the engine does not take heads of these sizes; "" where it does."""
    d, v = g.head_dim, g.v_dim
    if d % 8 or v % 8:
        return f"FlashAttention 4 takes head sizes that are multiples of 8, not {d} and {v}"
    if arch == "sm_90":
        known = min(d, v) >= 8 and max(d, v) <= 256
        return "" if known else f"FlashAttention 4 takes head sizes from 8 to 256 on Hopper, not {d} and {v}"
    known = (min(d, v) >= 8 and max(d, v) <= 128) or (d, v) in ((192, 128), (256, 256))
    which = "from 8 to 128, 192 with values of 128, and 256"
    return "" if known else f"FlashAttention 4 takes head sizes {which} on Blackwell, not {d} and {v}"
