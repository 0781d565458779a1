"""The kernel that merges the two parts of a cascade on a GPU. Imports triton."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from frisket.runtime.plans.run import PlannerLaunch

Tensor = Any
ROWS = 8  # of a program


@triton.jit  # type: ignore[untyped-decorator]
def merge_prefix(  # type: ignore[no-untyped-def]
    Out,
    Lse,
    Shared,
    SharedLse,
    Behind,
    BehindLse,
    Slots,
    rows,
    heads,
    new,
    members,
    dim,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Query `new` of a head and a row of the cache: `Behind` and `BehindLse` are in this order. `Shared` holds packed
    queries [groups, heads, members * new]; `Slots` has the row's place among all members, -1 without a prefix."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = at < rows
    token, head, row = at % new, at // new % heads, at // new // heads
    slot = tl.load(Slots + row, there, -1).to(tl.int32)
    grouped = there & (slot >= 0)
    place = (slot // members * heads + head) * members * new + slot % members * new + token
    low = float("-inf")
    first, second = tl.load(SharedLse + place, grouped, low), tl.load(BehindLse + at, there, low)
    most = tl.maximum(first, second)
    base = tl.where(most == low, 0.0, most)  # -inf - -inf is NaN
    first, second = tl.exp(first - base), tl.exp(second - base)
    total = first + second
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    tl.store(Lse + at, tl.where(some, base + tl.log(divisor), low), there)
    column = tl.arange(0, DIM)[None, :]
    inside = column < dim
    x = tl.load(Shared + place[:, None].to(tl.int64) * dim + column, grouped[:, None] & inside, 0.0).to(tl.float32)
    y = tl.load(Behind + at[:, None].to(tl.int64) * dim + column, there[:, None] & inside, 0.0).to(tl.float32)
    merged = (x * first[:, None] + y * second[:, None]) / divisor[:, None]
    tl.store(Out + at[:, None].to(tl.int64) * dim + column, merged.to(Out.dtype.element_ty), there[:, None] & inside)


def merged(
    of_prefix: tuple[Tensor, Tensor],
    behind: tuple[Tensor, Tensor],
    slots: Tensor,
    members: int,
    launches: dict[Any, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows of a cache, from their packed part and the part behind it; `launches` are kept by shapes."""
    import torch

    parts = [x.contiguous() for x in (*of_prefix, *behind)]
    batch, heads, new, dim = parts[2].shape
    out, lse = torch.empty_like(parts[2]), torch.empty_like(parts[3])
    key = "merge", parts[0].shape, parts[2].shape, out.dtype, members
    if key not in launches:
        rows = batch * heads * new
        arguments = [*[None] * 7, rows, heads, new, members, dim]
        constants = {"ROWS": ROWS, "DIM": triton.next_power_of_2(dim)}
        launches[key] = PlannerLaunch(merge_prefix, (-(-rows // ROWS),), arguments, 4, **constants)
    # Triton launches on the current device
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        launches[key](out, lse, *parts, slots)
    return out, lse
