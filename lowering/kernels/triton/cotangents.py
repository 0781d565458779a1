"""Scores of a tile recomputed, and their cotangents: the shared base of the Triton backward kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frisket.dsl.ir import Expr, lit, renamed
from frisket.dsl.show import show
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import POSITION, SCALAR
from frisket.lowering.plan import LoopPlan, Target

from .forward import PartSums
from .rows import RowKernel
from .units import machine
from .writer import Dims, TritonKernel, arguments, check_tile, launched, masked, taken


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


def sums(plan: LoopPlan, wanted: Collection[str]) -> list[Sum]:
    """The sums of the tables and slots in `wanted`, in the order of `backward_of(plan).gradients`; "diagonal" and
    "scatter" are not among them."""
    names, known = taken(plan), arguments(plan)
    return [
        Sum(g, names.new(f"D{known[g.source].name}"), names.new(f"d{known[g.source].name}"))
        for g in backward_of(plan).gradients
        if g.source in wanted and g.over in ("head", "row", "column")
    ]


class GradientKernel(RowKernel):
    """A kernel that owns a tile of queries, or swapped one of keys, and walks tiles of the other axis. `p` are the
    weights of a tile before dropout, `dm` is the cotangent of its modified scores, `ds` the cotangent of the plain
    ones.

    `slope` says that the kernel wants ds, `summed` are the sums it takes of dm; where it wants neither, p suffices.
    `asked` are other expressions that it uses per position, `gradients` those among "qkv" that it writes."""

    selects = True

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, summed: Iterable[Sum], *, slope: bool, swapped: bool = False,
        asked: Iterable[Expr] = (), gradients: Iterable[str] = (),
    ) -> None:  # fmt: skip
        check_tile(target)
        self.target = target
        derived = backward_of(plan)
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        self.slope = machine(derived.slope, dims) if slope and derived.slope is not None else None
        self.kept = None if plan.kept is None else expr.machine(plan.kept)
        self.sums = [(s, machine(s.gradient.weight, dims)) for s in summed]
        self.inner = slope or bool(self.sums)
        arrays = [
            (f"D{n.upper()}", f"d{n}", "e" if n == "v" and dims.v_dim != dims.head_dim else "d") for n in gradients
        ]
        totals = [(s.buffer, s.total) for s, _ in self.sums]
        self.part = PartSums(dims, arrays, totals, dims.group if swapped else 1)
        more = [e for e in (self.slope, self.kept, *(w for _, w in self.sums), *asked) if e is not None]
        super().__init__(plan, dims, target, more, swapped=swapped)
        self.full = [*self.score, *more]  # what full tiles ask for

    def holes(self) -> dict[str, Any]:
        own, index, block = ("k", "columns", "BLOCK_K") if self.swapped else ("q", "rows", "BLOCK_Q")
        ds = "ds" if self.slope is not None or not self.sums else "dm"
        found = super().holes()
        return {
            **found,
            "apart": self.e == "e",
            "e": self.e,
            "dropped": self.kept is not None,
            "rate": "" if self.kept is None else self.arguments[str(self.plan.rate)].name,
            "inner": self.inner,
            "by_length": self.dims.by_length,
            "own_d": self.tile_mask("d", "present"),
            "own_e": self.tile_mask("e", "present"),
            "store_d": self.tile_mask("d", "present", other=""),
            "store_e": self.tile_mask("e", "present", other=""),
            "exponent": f"{'modified' if self.score else 'score'} * {found['unit']}",  # the forward's own product
            "ds": ds,
            "dm": "ds" if ds == "ds" and not self.sums and self.slope is None else "dm",
            "buffers": self.buffers(),
            "zeros": [f"{s.total} = tl.zeros([{block}], tl.float32)" for s, _ in self.sums],
            "numbers_of_part": self.part.numbers,
            "place": "batch * heads + kv_head * GROUP" if self.swapped and self.dims.group > 1 else "place",
            "own_place": f"batch * tl.num_programs({self.axes[1]}) + kv_head" if self.dims.group > 1 else "place",
            "partial": self.part.stores({n: self.tile_mask(n, "present", other="") for n in "de"}),
            "partial_totals": self.part.stores_of_totals(),
            "stores": [f"tl.store({s.buffer} + at_{own} + {index}, {s.total}, mask=present)" for s, _ in self.sums],
        }

    def before_loops(self) -> dict[str, Any]:
        """The lines before the loop over tiles, beside origins and slots."""
        own, index = ("k", "columns") if self.swapped else ("q", "rows")
        return {
            "own": self.coordinate(own, f"start + {index}") if own in self.used else [],
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
        walked = ("q", "tile * BLOCK_Q + rows") if self.swapped else ("k", "tile * BLOCK_K + columns")
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
            "dropout": self.quoted(self.plan.kept, self.kept, "kept = tl.where({}, survivor, 0.0)", written, visible),
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
        return lines, f"tl.where(p == 0.0, 0.0, dm * {value})" if self.careful else f"dm * {value}"

    def read(self, gradient: Gradient) -> str:
        """The text `slope[h]`, or the name of a slot."""
        named = {n: a.name for n, a in self.arguments.items()}
        index = [show(renamed(i, named), known=set(named.values())) for i in gradient.index]
        return f"{named[gradient.source]}[{', '.join(index)}]" if index else named[gradient.source]

    def buffers(self) -> list[str]:
        """The lines of the signature for the buffers of sums."""
        length, over = ("kv_len", "queries") if self.swapped else ("q_len", "keys")
        shape = f"float32 [batch, heads, {length}]"
        return [
            f"{s.buffer},  # {shape}: the gradient of {self.read(s.gradient)}, summed over {over}" for s, _ in self.sums
        ]


def weights(gradients: Sequence[Gradient]) -> list[Expr]:
    """The distinct weights, in order: the sums that `attention_diagonal` makes."""
    return list(dict.fromkeys(g.weight for g in gradients))


class CapturedKernel(GradientKernel):
    """The base of the kernels of captured gradients: `dm`, the cotangent of the modified score, of one tile wherever it
    is. The mask is a predicate on every tile, full ones too."""

    name: str
    skeleton: str
    grid: str
    shown = "present[:, None] & inside[None, :]"
    bounded = False

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient], index: Sequence[Expr] = ()
    ) -> None:
        self.gradients = gradients
        self.factors = [machine(w, dims) for w in weights(gradients)]
        self.index = [expr.machine(e) for e in index]
        asked = [*self.factors, *self.index]
        super().__init__(plan, replace(target, order="forward"), dims, (), slope=False, asked=asked)
        self.tile_roots = [*self.mask, *self.score, *([] if self.kept is None else [self.kept]), *self.factors]

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
        roots = [self.bounds["first"], self.bounds["last"]]
        return {
            "formulas": self.lines(roots, SCALAR, set(self.hoisted)),
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
