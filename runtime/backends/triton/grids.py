"""Kernels, tiles and grids that launches of the Triton kernels have in common, whoever brings the arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COORDINATES, SCORE, SIZES, Expr, uses, walk
from frisket.lowering.derive import Gradient, alone
from frisket.lowering.kernels.triton.backward import DELTA
from frisket.lowering.kernels.triton.rows import axes_of
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target

ROWS = 16  # the fewest rows of tiles in a part of a block diagonal: a window has few diagonals, so these have parts
PARTS, ROOM = 8, 1 << 24  # the most parts of a block diagonal, and the most numbers in the sums of all parts

Grid = tuple[int, int, int]


def forward_plan(plan: LoopPlan, g: Geometry) -> LoopPlan:
    """The plan a forward kernel is printed for. A scale of 0 or less is applied score by score: the kernel that applies
    it to the maximum needs max(x * scale) = max(x) * scale."""
    return replace(plan, score=SCORE) if not g.scale > 0 and plan.score is None else plan


def backward_plan(plan: LoopPlan, g: Geometry) -> LoopPlan:
    """The plan backward kernels are printed for. A scale of 0 is applied score by score: for others, the accumulator of
    a product starts at lse / scale."""
    return replace(plan, score=SCORE) if g.scale == 0 and plan.score is None else plan


def of_forward(g: Geometry, target: Target) -> Grid:
    return grid_of(-(-g.q_len // target.block_q), g.heads, g.batch, target)


def grid_of(rows: int, heads: int, batch: int, target: Target) -> Grid:
    """The grid of a kernel whose programs have a row of tiles each."""
    return (heads, rows, batch) if axes_of(target)[0] else (rows, heads, batch)


@dataclass(frozen=True)
class LaunchStep:
    """One kernel of a backward; `side` is the method of a SpanSource that its records come from, if any."""

    name: str
    tile: Target
    grid: Grid
    side: Literal["", "rows", "columns"]


def of_backward(g: Geometry, target: Target, kernels: Collection[str]) -> list[LaunchStep]:
    """The launches of a backward in their order: those of the `kernels` that the module has."""
    dq, dkv = target.dq or target, target.dkv or target
    dv = target.dv or dkv
    steps = (
        LaunchStep("attention_delta", DELTA, (-(-g.q_len // DELTA.block_q), g.heads, g.batch), ""),
        LaunchStep("attention_dq", dq, of_forward(g, dq), "rows"),
        *(
            LaunchStep(name, tile, grid_of(-(-g.kv_len // tile.block_k), g.kv_heads, g.batch, tile), "columns")
            for name, tile in (("attention_dkv", dkv), ("attention_dv", dv))
        ),
    )
    return [s for s in steps if s.name in kernels]


# -- captured gradients -------------------------------------------------------------------------------


def tiles(g: Geometry, side: int) -> tuple[int, int]:
    """Rows and columns of square tiles."""
    return -(-g.q_len // side), -(-g.kv_len // side)


@dataclass(frozen=True)
class Diagonals:
    """How the tiles along block diagonals are divided: each part of a diagonal has `share` rows of tiles."""

    across: int  # block diagonals
    share: int
    parts: int


def of_diagonals(g: Geometry, side: int, sums: int) -> Diagonals:
    rows, columns = tiles(g, side)
    across = rows + columns - 1
    room = ROOM // (g.batch * g.heads * sums * 2 * across * side)
    share = -(-rows // max(1, min(PARTS, rows // ROWS, room)))
    return Diagonals(across, share, -(-rows // share))


def of_plane(g: Geometry, side: int, shared: str) -> Grid:
    rows, columns = tiles(g, side)
    return rows * columns, 1 if "h" in shared else g.heads, 1 if "b" in shared else g.batch


def plane(gradient: Gradient, shape: Sequence[int], g: Geometry, slots: Mapping[str, Any]) -> str | None:
    """The axes "b" and "h" that share the entries of a table, where every query and key, and each of the other axes,
    has entries of its own; None where two may meet in one entry."""
    entries = zip(gradient.index, shape, strict=True)
    axes = {n for e, size in entries if (n := _apart(e, size, g, slots))}
    if not {"q", "k"} <= axes:
        return None
    moving = frozenset[str]().union(*map(uses, gradient.index))
    if any(np.ndim(start) for start in g.origin[2:]):  # another place in every batch
        moving |= {"b"}
    alike = [n for n, size in (("b", g.batch), ("h", g.heads)) if n in moving and n not in axes and size > 1]
    return None if alike else "".join(n for n in "bh" if n not in moving)


def _apart(entry: Expr, size: int, g: Geometry, slots: Mapping[str, Any]) -> str | None:
    """The coordinate that an index is, up to a constant, where none of its values is clamped; otherwise None."""
    name = alone(entry)
    if name is None:
        return None
    at = COORDINATES.index(name)
    length, start = (g.batch, g.heads, g.q_len, g.kv_len)[at], g.origin[at]
    env = {**dict.fromkeys(COORDINATES, 0), **dict(zip(SIZES, g.full, strict=True)), **slots}
    read = [env[e.name] for e in walk(entry) if e.op in ("var", "param")]
    if not all(map(of_host, (start, *read))):
        return None  # known on the device alone
    step = int(evaluate(entry, env))
    inside = step + int(np.min(start)) >= 0 and step + int(np.max(start)) + length <= size
    return name if inside else None


def of_host(x: Any) -> bool:
    """Whether a number, or a vector of them, is known without asking a device."""
    return isinstance(x, bool | int | float | np.generic | np.ndarray)


# -- span tables --------------------------------------------------------------------------------------


def span_arrays(spans: Spans) -> dict[str, NDArray[np.int32]]:
    """The span arrays that kernels read, by the names of their parameters. `Order` lists the rows of each slice, those
    with the most tiles first."""
    work = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1)
    order = np.argsort(-work, axis=-1, kind="stable").astype(np.int32)
    return {"Spans": spans.bounds, "Count": spans.count, "SliceOf": spans.slice_of, "Order": order}
