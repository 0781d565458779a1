"""LoopPlan: what a kernel has to do, said once for every backend.

A kernel walks, for each tile of `block_q` queries, a list of records `lo <= full_lo <= full_hi <= hi` of key
tiles: `[lo, full_lo)` and `[full_hi, hi)` with the mask as a predicate, `[full_lo, full_hi)` without. The
records come from a table (`Spans`) or, for a convex mask, from four formulas (`Bounds`) in the kernel's prologue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr
from frisket.dsl.types import Type

Origin = tuple[Any, Any, Any, Any]  # b, h, q, k; q and k may be vectors with one entry per batch
Sizes = tuple[int, int, int, int]  # B, H, Q_LEN, KV_LEN of the whole problem, never of the crop


@dataclass(frozen=True)
class Slot:
    """A run-time scalar of the kernel: a parameter of the user's, or a literal lifted out of the text."""

    name: str
    type: Type


@dataclass(frozen=True)
class TableUse:
    """A run-time table of the kernel; `source` is the user's name for it."""

    name: str
    source: str
    rank: int
    type: Type


@dataclass(frozen=True)
class Bounds:
    """Closed form of a row of tiles: global key positions, inclusive, as Exprs in `q0 q1` (first and last
    global query of the tile, inside the crop), `k0 k1` (first and last global key of the crop), `b h`, sizes
    and slots. Some query of the tile may see keys `first..last`; every query sees all of
    `full_first..full_last`. A range with last < first is empty."""

    first: Expr
    full_first: Expr
    full_last: Expr
    last: Expr


@dataclass(frozen=True)
class LoopPlan:
    """Backend-neutral. Mask and score speak of `b h q k score`, sizes, slots (`param` leaves) and tables
    (by `TableUse.name`)."""

    mask: Expr | None  # the predicate of PARTIAL tiles; None: every position inside the lengths is visible
    score: Expr | None  # None: identity
    score_class: Literal["identity", "affine", "general"]
    slots: tuple[Slot, ...]
    tables: tuple[TableUse, ...]
    bounds: Bounds | None  # None: read the span table
    guard: bool  # a visible row may have no finite score: keep the -inf checks
    uses_batch: bool  # the mask depends on b
    uses_head: bool  # the mask depends on h
    int64: bool  # an index of the mask or score may leave 32 bits
    text: str = field(compare=False)  # the mask and score as the user would write them


@dataclass(frozen=True)
class Target:
    """Per backend and machine: the numbers that do not change what is computed."""

    backend: str
    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    order: Literal["forward", "longest-first"] = "longest-first"


@dataclass(frozen=True)
class Geometry:
    """The shapes of one call. Lengths in tokens; `origin` and `sizes` place the call in the whole problem."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int
    scale: float
    origin: Origin = (0, 0, 0, 0)
    sizes: Sizes | None = None

    @property
    def full(self) -> Sizes:
        return self.sizes or (self.batch, self.heads, self.q_len, self.kv_len)


@dataclass(frozen=True)
class Spans:
    """Records per row of tiles, at most R of them, in key tiles, half-open.

    `bounds` int32 [slices, rows, R, 4] holds (lo, full_lo, full_hi, hi), ordered and disjoint; only the first
    `count[slice, row]` are meant, the rest are zero. `slice_of` int32 [batch, heads] names the slice.
    """

    bounds: NDArray[np.int32]
    count: NDArray[np.int32]
    slice_of: NDArray[np.int32]


def make_plan(mask: Expr | None, score: Expr | None, text: str = "") -> LoopPlan:
    """The plan of a simplified mask and score mod."""
    from frisket.dsl.ir import FALSE, TRUE, build, free_names, lookup, transform, uses
    from frisket.dsl.types import BOOL

    roots = [e for e in (mask, score) if e is not None]
    whole = [build("eq", e, e) if e.type is not BOOL else e for e in roots]
    scalars: dict[str, Type] = {}
    found: dict[str, tuple[int, Type]] = {}
    for e in whole:
        s, t = free_names(e)
        scalars |= s
        found |= t
    tables = tuple(
        TableUse(f"t{i}", name, rank, type) for i, (name, (rank, type)) in enumerate(found.items())
    )
    names = {t.source: t.name for t in tables}

    def rename(e: Expr) -> Expr:
        if e.op == "lookup":
            return lookup(names[e.name], e.args, e.type)
        return e

    mask = None if mask is None or mask is TRUE else transform(mask, rename)
    score = None if score is None else transform(score, rename)
    used = frozenset[str]() if mask is None else uses(mask)
    return LoopPlan(
        mask=mask,
        score=score,
        score_class="identity" if score is None else "general",
        slots=tuple(Slot(n, t) for n, t in scalars.items()),
        tables=tables,
        bounds=None,
        guard=mask is not None or score is not None or mask is FALSE,
        uses_batch="b" in used,
        uses_head="h" in used,
        int64=False,
        text=text,
    )
