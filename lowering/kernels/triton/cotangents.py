"""Scores of a tile recomputed, and their cotangents: the shared base of the Triton backward kernels.

Kernels of captured gradients that no row or column of tiles can sum stand here too, by `lowering.derive`.

`attention_diagonal`: a table read by distance. A program owns tiles along a diagonal, adds them up, and sums the
diagonals of what it has then. `attention_plane`: a table in which every query and key has a place of its own. A program
owns a tile of it, and sums over the batches and heads that share it. Neither adds to what another program adds to:
results repeat bit for bit. `attention_scatter`: any other table, with atomics; in fixed point, for which
`attention_total` finds the unit, results repeat too (`lowering/aten/captured.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frisket.dsl.ir import Expr, lit, renamed, uses
from frisket.dsl.show import show
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, alone, backward_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.kernels.text import fields, skeleton
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import machine
from frisket.lowering.plan import LoopPlan

from .forward import PartSums
from .rows import RowKernel
from .writer import Dims, KernelTraits, TritonKernel, arguments, check_tile, launched, masked, module, reserved_names


@dataclass(frozen=True)
class Sum:
    """A captured gradient that a row or column of tiles sums: `buffer` is the pointer, `total` the running sum."""

    gradient: Gradient
    buffer: str
    total: str

    @property
    def along(self) -> str:
        """The last axis of the buffer, float32 [batch, heads, q_len] or [batch, heads, kv_len]. A sum per head is
        summed per query first."""
        return "k" if self.gradient.over == "column" else "q"


def sums(plan: LoopPlan, grad_names: Collection[str]) -> list[Sum]:
    """The sums of the tables and slots in `grad_names`, in the order of `backward_of(plan).gradients`; "diagonal" and
    "scatter" are not among them."""
    names, known = reserved_names(plan), arguments(plan)
    return [
        Sum(g, names.new(f"D{known[g.source].name}"), names.new(f"d{known[g.source].name}"))
        for g in backward_of(plan).gradients
        if g.source in grad_names and g.over in ("head", "row", "column")
    ]


class GradientKernel(RowKernel):
    """A kernel that owns a tile of queries, or swapped one of keys, and walks tiles of the other axis. `p` are the
    weights of a tile before dropout, `dm` is the cotangent of its modified scores, `ds` the cotangent of the plain
    ones.

    `gradients` are those among "qkv" that the kernel writes: those of q and k want ds. `summed` are the sums it takes
    of dm; where it wants neither, p suffices. `others` are other expressions that it uses per position."""

    def __init__(
        self,
        plan: LoopPlan,
        target: Target,
        dims: Dims,
        traits: KernelTraits,
        gradients: Collection[str] = (),
        summed: Iterable[Sum] = (),
        others: Iterable[Expr] = (),
    ) -> None:
        check_tile(target)
        self.target = target
        derived = backward_of(plan)
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        slope = bool({"q", "k"}.intersection(gradients))
        self.slope = machine(derived.slope, dims) if slope and derived.slope is not None else None
        self.keep_mask = None if plan.keep_mask is None else expr.machine(plan.keep_mask)
        self.sums = [(s, machine(s.gradient.weight, dims)) for s in summed]
        self.inner = slope or bool(self.sums)  # otherwise no product of dout and v is computed
        arrays = [
            (f"D{n.upper()}", f"d{n}", "e" if n == "v" and dims.v_dim != dims.head_dim else "d") for n in gradients
        ]
        heads = dims.group if traits.swapped else 1
        self.part = PartSums(dims, arrays, [(s.buffer, s.total) for s, _ in self.sums], heads)
        # what is None here is not written: its nodes would take registers
        more = [e for e in (self.slope, self.keep_mask, *(w for _, w in self.sums), *others) if e is not None]
        super().__init__(plan, dims, target, more, replace(traits, selects=True))
        self.full = [*self.score, *more]  # what full tiles ask for

    def holes(self) -> dict[str, Any]:
        axis, index, block = ("k", "columns", "BLOCK_K") if self.traits.swapped else ("q", "rows", "BLOCK_Q")
        # without a slope ds is dm itself, and one name is enough for both
        ds = "ds" if self.slope is not None or not self.sums else "dm"
        common = super().holes()
        return {
            **common,
            **fields(self, "e inner"),
            "apart": self.e == "e",
            "dropped": self.keep_mask is not None,
            "rate": "" if self.keep_mask is None else self.arguments[str(self.plan.rate)].name,
            "by_length": self.dims.by_length,
            "own_d": self.tile_mask("d", "present"),
            "own_e": self.tile_mask("e", "present"),
            "store_d": self.tile_mask("d", "present", other=""),
            "store_e": self.tile_mask("e", "present", other=""),
            "exponent": f"{'modified' if self.score else 'score'} * {common['unit']}",  # the forward's own product
            "ds": ds,
            "dm": "ds" if ds == "ds" and not self.sums and self.slope is None else "dm",
            "buffers": self.buffers(),
            "zeros": [f"{s.total} = tl.zeros([{block}], tl.float32)" for s, _ in self.sums],
            "numbers_of_part": self.part.numbers,
            "place": "batch * heads + kv_head * GROUP" if self.traits.swapped and self.dims.group > 1 else "place",
            "own_place": f"batch * tl.num_programs({self.axes[1]}) + kv_head" if self.dims.group > 1 else "place",
            "partial": self.part.stores({n: self.tile_mask(n, "present", other="") for n in "de"}),
            "partial_totals": self.part.stores_of_totals(),
            "stores": [f"tl.store({s.buffer} + at_{axis} + {index}, {s.total}, mask=present)" for s, _ in self.sums],
        }

    def before_loops(self) -> dict[str, Any]:
        """The lines before the loop over tiles, beside origins and slots."""
        axis, index = ("k", "columns") if self.traits.swapped else ("q", "rows")
        return {
            "own": self.coordinate(axis, f"start + {index}") if axis in self.used else [],
            **self.closed_form(),
            "hoisted": self.before_tiles(),
            "tiles": self.tiles(),
        }

    def tile_mask(self, axis: str, inside: str, other: str = ", other=0.0") -> str:
        """The mask of a tile of keys or queries, "d", or of values, "e", whose rows are `inside`; all rows where that
        is empty."""
        pad = self.value_pad(f"{self.e}[None, :]") if axis == "e" else self.head_pad("d[None, :]")
        return masked(inside and f"{inside}[:, None]", pad, other=other)

    def tile(self, inside: str) -> dict[str, Any]:
        written = set(self.hoisted)
        visible = inside and "visible"
        walked = ("q", "tile * BLOCK_Q + rows") if self.traits.swapped else ("k", "tile * BLOCK_K + columns")
        return {
            "walked_d": self.tile_mask("d", inside),
            "walked_e": self.tile_mask("e", inside),
            "stats": masked(inside and f"{inside}[:, None]"),
            "column": self.along_tile(*walked, self.positions if inside else self.full, written),
            "visible": self.visible(written) if inside else [],
            **self.modified(written, visible),
            "sums": [line for s, w in self.sums for line in self._summed(s, w, written, visible)],
            "derivative": self._derivative(written, visible),
        }

    def modified(self, written: set[str], visible: str) -> dict[str, Any]:
        """The modified score, and with dropout `kept`, the factor of the weights."""
        return {
            "score_mod": self.score_mod("modified", written, visible),
            "dropout": self.quoted(
                self.plan.keep_mask, self.keep_mask, "kept = tl.where({}, survivor, 0.0)", written, visible
            ),
        }

    def _summed(self, s: Sum, weight: Expr, written: set[str], visible: str) -> list[str]:
        lines, share = self.times(weight, "weight", written, visible)
        return [f"# The gradient of {self.read(s.gradient)}.", *lines, f"{s.total} += tl.sum({share}, 1)"]

    def _derivative(self, written: set[str], visible: str) -> list[str]:
        if self.slope is None:
            return []
        lines, ds = self.times(self.slope, "derivative", written, visible)
        return ["# The derivative of the score mod.", *lines, f"ds = {ds}"]

    def times(self, factor: Expr, name: str, written: set[str], visible: str) -> tuple[list[str], str]:
        """The text of `dm` times a factor, 0 where p is 0 if the factor may be infinite or NaN there; and the lines
        before it."""
        if factor is lit(1.0):
            return [], "dm"
        lines, value = self.lines([factor], POSITION, written, visible), self.value(factor)
        if not value.isidentifier():
            lines.append(f"{name} = {value}")
            value = name
        # 0 times an infinite slope is NaN
        return lines, f"tl.where(p == 0.0, 0.0, dm * {value})" if self.careful else f"dm * {value}"

    def read(self, gradient: Gradient) -> str:
        """The text `slope[h]`, or the name of a slot."""
        named = {n: a.name for n, a in self.arguments.items()}
        index = [show(renamed(i, named), known=set(named.values())) for i in gradient.index]
        return f"{named[gradient.source]}[{', '.join(index)}]" if index else named[gradient.source]

    def buffers(self) -> list[str]:
        """The lines of the signature for the buffers of sums."""
        length, over = ("kv_len", "queries") if self.traits.swapped else ("q_len", "keys")
        shape = f"float32 [batch, heads, {length}]"
        return [
            f"{s.buffer},  # {shape}: the gradient of {self.read(s.gradient)}, summed over {over}" for s, _ in self.sums
        ]


def weights(gradients: Sequence[Gradient]) -> list[Expr]:
    """The distinct weights, in order: the sums that `attention_diagonal` makes."""
    return list(dict.fromkeys(g.weight for g in gradients))  # tables that are added to one another have one weight


class CapturedKernel(GradientKernel):
    """The base of the kernels of captured gradients: `dm`, the cotangent of the modified score, of one tile wherever it
    is. The mask is a predicate on every tile, full ones too."""

    name: str
    skeleton: str
    grid: str
    shown = "present[:, None] & inside[None, :]"

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient], index: Sequence[Expr] = ()
    ) -> None:
        self.gradients = gradients
        self.factors = [machine(w, dims) for w in weights(gradients)]
        self.index = [expr.machine(e) for e in index]
        others = [*self.factors, *self.index]
        # the grid is none of rows of tiles, so that no order of rows applies
        super().__init__(plan, replace(target, order="forward"), dims, KernelTraits(bounded=False), others=others)
        self.tile_roots = [
            *self.mask,
            *self.score,
            *([] if self.keep_mask is None else [self.keep_mask]),
            *self.factors,
        ]

    def kernel(self) -> TritonKernel:
        return launched(self.name, self.filled(self.skeleton), self.grid, self.target)

    def holes(self) -> dict[str, Any]:
        return {
            **super().holes(),
            "name": self.name,
            "results": self.results(),
            "walked_d": self.tile_mask("d", "inside"),
            "walked_e": self.tile_mask("e", "inside"),
        }

    def results(self) -> list[str]:
        """The lines of the signature for the results of the kernel."""
        raise NotImplementedError

    def positioned(self, used: frozenset[str]) -> list[str]:
        """The coordinates of a tile among those that are used."""
        places = {"q": "start + rows", "k": "tile * BLOCK_K + columns"}
        return [line for n, local in places.items() if n in used for line in self.coordinate(n, local)]

    def seen(self) -> dict[str, Any]:
        """The holes of seen.tpl: the condition that the mask shows any position of a tile, and the lines before it."""
        if not self.bounds:
            return {"seen": "seen > 0"}
        return {
            "formulas": self.lines([self.bounds["first"], self.bounds["last"]], SCALAR, set(self.hoisted)),
            "bounds": [f"{name} = {self.bound(name)}" for name in ("first", "last")],
            "seen": "(first < (tile + 1) * BLOCK_K) & (last >= tile * BLOCK_K)",
        }

    def one_tile(self, roots: Sequence[Expr], levels: Sequence[int], written: set[str]) -> dict[str, Any]:
        """The holes of captured_cotangent.tpl, and the lines that `roots` need before it of these levels."""
        return {
            "row_and_column": [*self.line(roots), *(x for level in levels for x in self.lines(roots, level, written))],
            "visible": self.visible(written),
            **self.modified(written, "visible"),
        }

    def shared(self, weight: Expr, written: set[str]) -> dict[str, Any]:
        """The lines of `dm` times a weight, as `share`."""
        lines, share = self.times(weight, "weight", written, "visible")
        return {"weight": lines, "share": share}


TITLE = "Gradients of captured tensors"
NAMES = ("attention_diagonal", "attention_plane", "attention_total", "attention_scatter")


@memo(group="programs")
def square(target: Target) -> Target:
    """The target of the kernels of captured gradients, from the `target` of the whole backward: 64 x 64 or what 8 warps
    carry without a spill, or about as much as a tile of dq where that has fewer queries."""
    tile = target.dq or target
    side = target.square if tile.block_q >= 64 else 1 << ((tile.block_q * tile.block_k).bit_length() - 1) // 2
    return replace(tile, block_q=side, block_k=side, num_warps=8, num_stages=1, descriptors=False, dq=None, dkv=None)


def diagonal(plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient]) -> str:
    """The module of `attention_diagonal`, for gradients by distance; gradients of one weight are one sum."""
    return module(TITLE, plan, dims, [_Diagonal(plan, target, dims, gradients).kernel()])


def plane(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> str:
    """The module of `attention_plane`. `shared` are the axes among "b" and "h" on which the place in the table does not
    depend."""
    return module(TITLE, plan, dims, [_Plane(plan, target, dims, gradient, shared).kernel()])


def scatter(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, fixed: bool) -> str:
    """The module of `attention_scatter`, in fixed point with `attention_total` or in float32 without."""
    writers = [_Total(plan, target, dims, gradient), _Scatter(plan, target, dims, gradient, fixed=fixed)]
    return module(TITLE, plan, dims, [k.kernel() for k in (writers if fixed else writers[1:])])


def kernels(plan: LoopPlan, target: Target, dims: Dims, grad_names: Collection[str]) -> list[TritonKernel]:
    """The kernels for the tables in `grad_names`, to read: as if no index were clamped, and of tables that take kernels
    of one name the kernels of the first. Executors print a module for each table read by position."""
    gradients = [g for g in backward_of(plan).gradients if g.source in grad_names]
    by_distance = [g for g in gradients if g.over == "diagonal"]
    writers: list[CapturedKernel] = [_Diagonal(plan, target, dims, by_distance)] if by_distance else []
    for g in gradients:
        if g.over != "scatter":
            continue
        # a plane has an entry for every pair, so that no two shares meet and none is summed atomically
        single, moving = {alone(e) for e in g.index}, frozenset[str]().union(*map(uses, g.index))
        if {"q", "k"} <= single and not moving & {"b", "h"} - single:
            writers.append(_Plane(plan, target, dims, g, "".join(n for n in "bh" if n not in moving)))
        else:
            writers += [_Total(plan, target, dims, g), _Scatter(plan, target, dims, g, fixed=True)]
    first: dict[str, CapturedKernel] = {}  # a module cannot hold two kernels of one name
    for writer in writers:
        first.setdefault(writer.name, writer)
    return [writer.kernel() for writer in first.values()]


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
        common = {**super().holes(), "hoisted": self.lines(self.tile_roots, SCALAR), **self.seen()}
        written = set(self.hoisted)
        totals = [{"total": self.names.numbered("sum")} for _ in self.factors]
        return {
            **common,
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
        # a large table has more entries than 32 bits count
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
        common = super().holes()
        entries = [line for level in (SCALAR, ROW, COLUMN) for line in self.lines(self.index, level)]
        entries += self.into(self.hoisted)
        written = set(self.hoisted)
        return {
            **common,
            "all_heads": self.all_heads,
            "all_batches": self.all_batches,
            "vectors": [] if self.all_batches else common["vectors"],
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
        coordinate = self.coordinate("q", "start + rows") if "q" in self.used else []
        common = {**super().holes(), "own": coordinate, **self.closed_form()}
        hoisted = [*self.lines(roots, SCALAR), *self.lines(roots, ROW)]
        written = set(self.hoisted)
        walked = self.one_tile(roots, (COLUMN,), written)
        walked["row_and_column"][:0] = self.positioned(self.used & {"k"})
        share = self.shared(self.factors[0], written)
        return {
            **common,
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
        return {"total": False, "fixed": self.fixed, "atomic": not self.fixed, "into": self.into(written, "visible")}
