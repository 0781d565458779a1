"""Writes the Triton kernels of captured gradients that no row or column of tiles can sum, by `lowering.derive`.

`attention_diagonal`: a table read by distance. A program owns tiles along a diagonal, adds them up, and sums the
diagonals of what it has then. `attention_plane`: a table in which every query and key has a place of its own. A program
owns a tile of it, and sums over the batches and heads that share it. Neither adds to what another program adds to:
results repeat bit for bit. `attention_scatter`: any other table, with atomics; in fixed point, for which
`attention_total` finds the unit, results repeat too (`lowering/aten/captured.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from frisket.dsl.ir import uses
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, alone, backward_of
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.kernels.text import skeleton
from frisket.lowering.plan import LoopPlan, Target

from .cotangents import CapturedKernel
from .writer import Dims, TritonKernel, module

TITLE = "Gradients of captured tensors"
NAMES = ("attention_diagonal", "attention_plane", "attention_total", "attention_scatter")


@memo(group="programs")
def square(target: Target) -> Target:
    """The target of the kernels of captured gradients, from the `target` of the whole backward: 64 x 64 or what 8 warps
    carry without a spill, or about as much as a tile of dq where that has fewer queries."""
    own = target.dq or target
    side = target.square if own.block_q >= 64 else 1 << ((own.block_q * own.block_k).bit_length() - 1) // 2
    return replace(own, block_q=side, block_k=side, num_warps=8, num_stages=1, descriptors=False, dq=None, dkv=None)


def diagonal(plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient]) -> str:
    """The module of `attention_diagonal`, for gradients by distance; gradients of one weight are one sum."""
    return module(TITLE, plan, dims, [_Diagonal(plan, target, dims, gradients).kernel()])


def plane(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> str:
    """The module of `attention_plane`. `shared` are the axes among "b" and "h" on which the place in the table does not
    depend."""
    return module(TITLE, plan, dims, [_Plane(plan, target, dims, gradient, shared).kernel()])


def scatter(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, *, fixed: bool) -> str:
    """The module of `attention_scatter`, in fixed point with `attention_total` or in float32 without."""
    made = [_Total(plan, target, dims, gradient), _Scatter(plan, target, dims, gradient, fixed=fixed)]
    return module(TITLE, plan, dims, [k.kernel() for k in (made if fixed else made[1:])])


def kernels(plan: LoopPlan, target: Target, dims: Dims, wanted: Collection[str]) -> list[TritonKernel]:
    """The kernels for the tables in `wanted`, to read: as if no index were clamped, and of tables that take kernels of
    one name the kernels of the first. Executors print a module for each table read by position."""
    gradients = [g for g in backward_of(plan).gradients if g.source in wanted]
    by_distance = [g for g in gradients if g.over == "diagonal"]
    found: list[CapturedKernel] = [_Diagonal(plan, target, dims, by_distance)] if by_distance else []
    for g in gradients:
        if g.over != "scatter":
            continue
        apart, moving = {alone(e) for e in g.index}, frozenset[str]().union(*map(uses, g.index))
        if {"q", "k"} <= apart and not moving & {"b", "h"} - apart:
            found.append(_Plane(plan, target, dims, g, "".join(n for n in "bh" if n not in moving)))
        else:
            found += [_Total(plan, target, dims, g), _Scatter(plan, target, dims, g, fixed=True)]
    first: dict[str, CapturedKernel] = {}
    for made in found:
        first.setdefault(made.name, made)
    return [made.kernel() for made in first.values()]


class _Diagonal(CapturedKernel):
    name, skeleton = "attention_diagonal", skeleton(__package__, "diagonal")
    numbers = (*CapturedKernel.numbers, "share")
    grid = "(block diagonals * parts, heads, batch)"

    def results(self) -> list[str]:
        what = " and ".join(dict.fromkeys(self.read(g) for g in self.gradients))
        return [
            "Sums,  # float32 [batch, heads, weights, parts, 2, block diagonals, BLOCK_K]: gradients of",
            f"# {what}, by distance",
        ]

    def holes(self) -> dict[str, Any]:
        n = len(self.factors)
        found = {**super().holes(), "hoisted": self.lines(self.tile_roots, SCALAR), **self.seen()}
        written = set(self.hoisted)
        totals = [{"total": self.names.numbered("sum")} for _ in self.factors]
        return {
            **found,
            "coordinates": self.positioned(frozenset[str]().union(*map(uses, self.tile_roots))),
            **self.one_tile(self.tile_roots, (ROW, COLUMN), written),
            "totals": [
                {**total, **self.shared(w, written), "at": "place" if n == 1 else f"(place * {n} + {i})"}
                for i, (total, w) in enumerate(zip(totals, self.factors, strict=True))
            ],
        }


class _Placed(CapturedKernel):
    """A kernel of one gradient that knows where in the table its shares go."""

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient) -> None:
        super().__init__(plan, target, dims, [gradient], gradient.index)
        self.table = self.arguments[gradient.source]

    def into(self, written: set[str], load_mask: str = "") -> list[str]:
        """The lines of `to`, the entry of every position."""
        lines = self.lines(self.index, POSITION, written, load_mask)
        entries = [f"clamp({self.value(e)}, {n})" for e, n in zip(self.index, self.table.sizes, strict=True)]
        inner = zip(entries[1:], self.table.sizes[1:], strict=True)
        return [*lines, f"to = tl.cast({entries[0]}, tl.int64)", *(f"to = to * {n} + {entry}" for entry, n in inner)]


class _Plane(_Placed):
    name, skeleton = "attention_plane", skeleton(__package__, "plane")

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> None:
        super().__init__(plan, target, dims, gradient)
        self.all_heads, self.all_batches = "h" in shared, "b" in shared
        self.grid = f"(q tiles * k tiles, {'1' if self.all_heads else 'heads'}, {'1' if self.all_batches else 'batch'})"
        if self.all_batches:
            self.numbers = (*self.numbers, "batches")

    def results(self) -> list[str]:
        return [f"Into,  # float32, contiguous: the gradient of {self.read(self.gradients[0])}"]

    def holes(self) -> dict[str, Any]:
        found = super().holes()
        entries = [line for level in (SCALAR, ROW, COLUMN) for line in self.lines(self.index, level)]
        entries += self.into(self.hoisted)
        written = set(self.hoisted)
        return {
            **found,
            "all_heads": self.all_heads,
            "all_batches": self.all_batches,
            "vectors": [] if self.all_batches else found["vectors"],
            "coordinates": self.positioned(frozenset("qk")),
            "into": entries,
            **self.seen(),
            **self.one_tile(self.tile_roots, (SCALAR, ROW, COLUMN), written),
            **self.shared(self.factors[0], written),
        }


class _Walk(_Placed):
    """A kernel whose program owns a tile of queries and walks the tiles of keys it sees."""

    skeleton = skeleton(__package__, "scatter")
    grid = "(q tiles, heads, batch)"

    def holes(self) -> dict[str, Any]:
        roots = [*self.tile_roots, *self.index]
        own = self.coordinate("q", "start + rows") if "q" in self.used else []
        found = {**super().holes(), "own": own, **self.closed_form()}
        hoisted = [*self.lines(roots, SCALAR), *self.lines(roots, ROW)]
        written = set(self.hoisted)
        walked = self.one_tile(roots, (COLUMN,), written)
        walked["row_and_column"][:0] = self.positioned(self.used & {"k"})
        share = self.shared(self.factors[0], written)
        return {
            **found,
            "hoisted": hoisted,
            **walked,
            **share,
            "weighed": share["share"] != "dm",
            "added": "dm" if share["share"] == "dm" else "share",
            **self.each(written),
        }

    def each(self, written: set[str]) -> dict[str, Any]:
        """The lines that use a tile's share."""
        raise NotImplementedError


class _Total(_Walk):
    name = "attention_total"

    def results(self) -> list[str]:
        return ["Total,  # float32 [batch, heads, q tiles]: the sum of the magnitudes of all that is added"]

    def each(self, written: set[str]) -> dict[str, Any]:
        return {"total": True, "fixed": False, "atomic": False, "into": []}


class _Scatter(_Walk):
    name = "attention_scatter"

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, *, fixed: bool) -> None:
        super().__init__(plan, target, dims, gradient)
        self.fixed = fixed

    def results(self) -> list[str]:
        what = f"contiguous: the gradient of {self.read(self.gradients[0])}"
        if not self.fixed:
            return [f"Into,  # float32, {what}"]
        return [f"Counted,  # int64, {what}, in units", "PerUnit,  # float32: how many units make 1, a power of two"]

    def each(self, written: set[str]) -> dict[str, Any]:
        into = self.into(written, "visible")
        return {"total": False, "fixed": self.fixed, "atomic": not self.fixed, "into": into}
