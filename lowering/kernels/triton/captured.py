"""Writes the Triton kernels of captured gradients that no row or column of tiles can sum, by `lowering.derive`.

`attention_diagonal`: a table read by distance. A program owns tiles along a diagonal, adds them up, and sums the
diagonals of what it has then. `attention_plane`: a table with an entry for every query and key. A program owns a tile
of it, and sums over the batches and heads that share it. Neither adds to what another program adds to:
results repeat bit for bit. `attention_scatter`: any other table, with atomics; in fixed point, for which
`attention_total` finds the unit, results repeat too (`lowering/aten/captured.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from frisket.dsl.ir import Expr, uses
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, alone, backward_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.kernels.text import parts
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import machine
from frisket.lowering.plan import LoopPlan

from . import backward, forward
from .backward import GradientKernel, Strings
from .module import Dims, TritonKernel, module
from .writer import KernelTraits

CAPTURED = parts(__package__, "captured")
TITLE = "Gradients of captured tensors"
NAMES = ("attention_diagonal", "attention_plane", "attention_total", "attention_scatter")
QKV = frozenset("qkv")


def emit_all(
    plan: LoopPlan, target: Target, dims: Dims, *, grad_names: Strings = QKV, sinks: bool = False, listed: Strings = ()
) -> str:
    """The text of all kernels of an attention, to read: `emit_all(plan, target, Dims(128, 128, "bfloat16"))` has the
    forward kernel, and the kernels of the gradients of the arrays, tables and slots in `grad_names`. A table lists the
    programs of the kernels that are `listed`, and behind each stands the one that combines parts of rows. Executors
    print the forward and the backward as separate modules, when each is first called; the kernels are these. Of stored
    keys and values there is the forward alone."""
    optional = forward.OptionalArrays(sinks=sinks)
    emitted = forward.kernels(plan, target, dims, optional, listed="attention_forward" in listed)
    if not dims.kv_dtype and plan.value_scale is None and plan.pages is None:
        emitted += backward.kernels(plan, target, dims, grad_names, dlse=False, listed=listed)
        emitted += kernels(plan, square(target), dims, grad_names)
    return module("Attention", plan, dims, emitted)


@memo(group="programs")
def square(target: Target) -> Target:
    """The target of the kernels of captured gradients, from the `target` of the whole backward. A tile is 64 x 64, or
    what 8 warps carry without a spill; where a tile of dq has fewer queries, it is about as large as that one."""
    tile = target.dq or target
    side = target.square if tile.block_q >= 64 else 1 << ((tile.block_q * tile.block_k).bit_length() - 1) // 2
    return replace(tile, block_q=side, block_k=side, num_warps=8, num_stages=1, descriptors=False, dq=None, dkv=None)


def diagonal(plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient]) -> str:
    """The module of `attention_diagonal`, for gradients by distance; gradients of one weight are one sum."""
    return module(TITLE, plan, dims, [_diagonal(plan, target, dims, gradients)])


def plane(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> str:
    """The module of `attention_plane`. `shared` are the axes among "b" and "h" on which the place in the table does not
    depend."""
    return module(TITLE, plan, dims, [_plane(plan, target, dims, gradient, shared)])


def scatter(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, fixed: bool) -> str:
    """The module of `attention_scatter`, in fixed point with `attention_total` or in float32 without."""
    return module(TITLE, plan, dims, _scatters(plan, target, dims, gradient, fixed))


def kernels(plan: LoopPlan, target: Target, dims: Dims, grad_names: Strings) -> list[TritonKernel]:
    """The kernels for the tables in `grad_names`, to read: as if no index were clamped, and of tables that take kernels
    of one name the kernels of the first. Executors print a module for each table read by position."""
    gradients = [g for g in backward_of(plan).gradients if g.source in grad_names]
    by_distance = [g for g in gradients if g.over == "diagonal"]
    emitted = [_diagonal(plan, target, dims, by_distance)] if by_distance else []
    for g in gradients:
        if g.over != "scatter":
            continue
        # a plane has an entry for every pair, so that no two shares meet and none is summed atomically
        single, moving = {alone(e) for e in g.index}, frozenset[str]().union(*map(uses, g.index))
        if {"q", "k"} <= single and not moving & {"b", "h"} - single:
            emitted.append(_plane(plan, target, dims, g, "".join(n for n in "bh" if n not in moving)))
        else:
            emitted += _scatters(plan, target, dims, g, fixed=True)
    first: dict[str, TritonKernel] = {}  # a module cannot hold two kernels of one name
    for kernel in emitted:
        first.setdefault(kernel.name, kernel)
    return list(first.values())


def weights(gradients: Sequence[Gradient]) -> list[Expr]:
    """The distinct weights, in order: the sums that `attention_diagonal` makes."""
    return list(dict.fromkeys(g.weight for g in gradients))  # tables that are added to one another have one weight


class CapturedKernel(GradientKernel):
    """A kernel of captured gradients, which has `dm`, the cotangent of the modified score, of one tile wherever it is.
    The mask is a predicate on every tile, full ones too. `index` is the place in the table where a share goes."""

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, name: str, gradients: Sequence[Gradient], *numbers: str
    ) -> None:
        self.factors = [machine(w, dims) for w in weights(gradients)]
        # an entry by distance is known by the diagonal alone
        self.index = [expr.machine(e) for g in gradients if g.over != "diagonal" for e in g.index]
        traits = KernelTraits(name, bounded=False, shown="present[:, None] & inside[None, :]")
        traits = replace(traits, numbers=(*traits.numbers, *numbers))
        # the grid is none of rows of tiles, so that no order of rows applies
        target = replace(target, order="forward", descriptors=False)
        super().__init__(plan, target, dims, traits, others=[*self.factors, *self.index])
        dropped = [] if self.keep_mask is None else [self.keep_mask]
        self.tile_roots = [*self.mask, *self.score, *dropped, *self.factors]

    def common(self, results: list[str]) -> dict[str, Any]:
        """The holes of every kernel; `results` are the lines of its signature for what it writes."""
        walked = {f"walked_{axis}": self.tile_mask(axis, "inside") for axis in "de"}
        return {**self.holes(), "results": results, "strides": [{"tensor": x} for x in "qkvg"], **walked}

    def of_part(self, part: str, grid: str, holes: Mapping[str, Any]) -> TritonKernel:
        """The kernel of a part of the skeleton."""
        return self.kernel(self.filled(CAPTURED[part], holes), grid)

    def positioned(self, used: frozenset[str]) -> list[str]:
        """The coordinates of a tile among those that are used."""
        places = {"q": "start + rows", "k": "tile * BLOCK_K + columns"}
        return [line for n, local in places.items() if n in used for line in self.coordinate(n, local)]

    def seen(self) -> dict[str, Any]:
        """The holes of `seen`: the condition that the mask shows any position of a tile, and the lines before it."""
        if not self.bounds:
            return {"seen": "seen > 0"}
        return {
            "formulas": self.lines([self.bounds["first"], self.bounds["last"]], SCALAR, set(self.hoisted)),
            "bounds": [f"{name} = {self.bound(name)}" for name in ("first", "last")],
            "seen": "(first < (tile + 1) * BLOCK_K) & (last >= tile * BLOCK_K)",
        }

    def one_tile(self, roots: Sequence[Expr], levels: Sequence[int], written: set[str]) -> dict[str, Any]:
        """The holes of `cotangent`, and the lines that `roots` need before it of these levels."""
        return {
            "row_and_column": [*self.line(roots), *(x for level in levels for x in self.lines(roots, level, written))],
            "visible": self.visible(written),
            **self.modified(written, "visible"),
        }

    def shared(self, weight: Expr, written: set[str]) -> dict[str, Any]:
        """The lines of `dm` times a weight, as `share`."""
        lines, share = self.times(weight, "weight", written, "visible")
        return {"weight": lines, "share": share}

    def into(self, source: str, written: set[str], load_mask: str = "") -> list[str]:
        """The lines of `to`, the entry of the table `source` for every position."""
        sizes = self.arguments[source].sizes
        lines = self.lines(self.index, POSITION, written, load_mask)
        entries = [f"clamp({self.value(e)}, {n})" for e, n in zip(self.index, sizes, strict=True)]
        inner = zip(entries[1:], sizes[1:], strict=True)
        # a large table has more entries than 32 bits count
        return [*lines, f"to = tl.cast({entries[0]}, tl.int64)", *(f"to = to * {n} + {entry}" for entry, n in inner)]


def _diagonal(plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient]) -> TritonKernel:
    """The kernel of gradients by distance."""
    w = CapturedKernel(plan, target, dims, "attention_diagonal", gradients, "share")
    roots, n = w.tile_roots, len(w.factors)
    results = [
        "Sums,  # float32 [batch, heads, weights, parts, 2, block diagonals, BLOCK_K]: gradients of",
        f"# {' and '.join(dict.fromkeys(w.read(g) for g in gradients))}, by distance",
    ]
    common = {**w.common(results), "hoisted": w.lines(roots, SCALAR), **w.seen()}
    written = set(w.hoisted)
    totals = [{"total": w.names.numbered("sum")} for _ in w.factors]
    holes = {
        **common,
        "coordinates": w.positioned(frozenset[str]().union(*map(uses, roots))),
        **w.one_tile(roots, (ROW, COLUMN), written),
        "totals": [
            {**total, **w.shared(factor, written), "at": "place" if n == 1 else f"(place * {n} + {i})"}
            for i, (total, factor) in enumerate(zip(totals, w.factors, strict=True))
        ],
    }
    return w.of_part("diagonal", "(block diagonals * parts, heads, batch)", holes)


def _plane(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> TritonKernel:
    """The kernel of a table with a place for every query and key."""
    all_heads, all_batches = "h" in shared, "b" in shared
    numbers = ("batches",) * all_batches
    w = CapturedKernel(plan, target, dims, "attention_plane", [gradient], *numbers)
    common = w.common([f"Into,  # float32, contiguous: the gradient of {w.read(gradient)}"])
    entries = [line for level in (SCALAR, ROW, COLUMN) for line in w.lines(w.index, level)]
    entries += w.into(gradient.source, w.hoisted)
    written = set(w.hoisted)
    holes = {
        **common,
        "all_heads": all_heads,
        "all_batches": all_batches,
        "vectors": [] if all_batches else common["vectors"],
        "coordinates": w.positioned(frozenset("qk")),
        "into": entries,
        **w.seen(),
        **w.one_tile(w.tile_roots, (SCALAR, ROW, COLUMN), written),
        **w.shared(w.factors[0], written),
    }
    grid = f"(q tiles * k tiles, {'1' if all_heads else 'heads'}, {'1' if all_batches else 'batch'})"
    return w.of_part("plane", grid, holes)


def _scatters(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, fixed: bool) -> list[TritonKernel]:
    """The kernel of any other table, in fixed point behind the one that sums magnitudes."""
    totals = [_walk(plan, target, dims, gradient, "total")] if fixed else []
    return [*totals, _walk(plan, target, dims, gradient, "counts" if fixed else "shares")]


def _walk(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, adds: str) -> TritonKernel:
    """A kernel whose program owns a tile of queries and walks the tiles of keys it sees. It `adds` the magnitudes of
    shares to a "total", their "counts" of units to a table, or the "shares" themselves."""
    name = "attention_total" if adds == "total" else "attention_scatter"
    w = CapturedKernel(plan, target, dims, name, [gradient])
    roots = [*w.tile_roots, *w.index]
    what = f"contiguous: the gradient of {w.read(gradient)}"
    results = {
        "total": ["Total,  # float32 [batch, heads, q tiles]: the sum of the magnitudes of all that is added"],
        "counts": [
            f"Counted,  # int64, {what}, in units",
            "PerUnit,  # float32: how many units make 1, a power of two",
        ],
        "shares": [f"Into,  # float32, {what}"],
    }
    line_of_q = w.coordinate("q", "start + rows") if "q" in w.used else []
    common = {**w.common(results[adds]), "own": line_of_q, **w.closed_form()}
    hoisted = [*w.lines(roots, SCALAR), *w.lines(roots, ROW)]
    written = set(w.hoisted)
    walked = w.one_tile(roots, (COLUMN,), written)
    walked["row_and_column"][:0] = w.positioned(w.used & {"k"})
    share = w.shared(w.factors[0], written)
    holes = {
        **common,
        "hoisted": hoisted,
        **walked,
        **share,
        "weighed": share["share"] != "dm",
        "added": "dm" if share["share"] == "dm" else "share",
        "total": adds == "total",
        "fixed": adds == "counts",
        "atomic": adds == "shares",
        "into": [] if adds == "total" else w.into(gradient.source, written, "visible"),
    }
    return w.of_part("scatter", "(q tiles, heads, batch)", holes)
