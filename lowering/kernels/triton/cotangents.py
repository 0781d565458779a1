"""What the Triton kernels of the backward share: scores of a tile worked out anew, and their cotangents."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from frisket.dsl.ir import Expr, lit, renamed, uses
from frisket.dsl.show import show
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.plan import LoopPlan, Target

from .parameters import arguments, taken
from .rows import Rows
from .writer import Dims, check_tile, masked


@dataclass(frozen=True)
class Sum:
    """A captured gradient that a row or column of tiles sums: `buffer` is the pointer, `total` the running sum."""

    gradient: Gradient
    buffer: str
    total: str

    @property
    def along(self) -> str:
        """The last axis of the buffer, float32 [batch, heads, q_len] or [batch, heads, kv_len]. What is summed per
        head is summed per query first."""
        return "k" if self.gradient.over == "column" else "q"


def sums(plan: LoopPlan, wanted: Collection[str]) -> list[Sum]:
    """Those of the tables and slots in `wanted`, in the order of `backward_of(plan).gradients`; "diagonal" and
    "scatter" are not among them."""
    names, known = taken(plan), arguments(plan)
    return [
        Sum(g, names.new(f"D{known[g.source].name}"), names.new(f"d{known[g.source].name}"))
        for g in backward_of(plan).gradients
        if g.source in wanted and g.over in ("head", "row", "column")
    ]


class Cotangents(Rows):
    """A kernel that owns a tile of queries, or swapped one of keys, and walks tiles of the other axis. `p` are the
    weights of a tile before dropout, `dm` is the cotangent of its modified scores, `ds` that of the plain ones.

    `slope` says that the kernel wants ds, `summed` are the sums it takes of dm; where it wants neither, p suffices.
    `asked` are other expressions that it uses per position."""

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, summed: Iterable[Sum], *, slope: bool, swapped: bool = False,
        asked: Iterable[Expr] = (),
    ) -> None:  # fmt: skip
        check_tile(target)
        self.target = target
        derived = backward_of(plan)
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        self.slope = expr.machine(derived.slope) if slope and derived.slope is not None else None
        self.kept = None if plan.kept is None else expr.machine(plan.kept)
        self.sums = [(s, expr.machine(s.gradient.weight)) for s in summed]
        self.inner = slope or bool(self.sums)
        self.ds = "ds" if self.slope is not None or not self.sums else "dm"
        more = [e for e in (self.slope, self.kept, *(w for _, w in self.sums), *asked) if e is not None]
        super().__init__(plan, dims, target, more, swapped=swapped)
        self.full = [*self.score, *more]  # what full tiles ask for
        self.own, self.other = ("k", "q") if swapped else ("q", "k")
        self.block, self.length, self.index = (
            ("BLOCK_Q", "q_len", "rows") if swapped else ("BLOCK_K", "kv_len", "columns")
        )

    # -- before the loops ---------------------------------------------------------------------------

    def axes(self) -> None:
        line = self.page.line
        line("rows = tl.arange(0, BLOCK_Q)", "columns = tl.arange(0, BLOCK_K)", "d = tl.arange(0, DIM)")
        if self.e == "e":
            line("e = tl.arange(0, DIM_V)")

    def hoist(self) -> None:
        """What is known before the loop over tiles, beside origins and slots."""
        if self.own in self.used:
            self.coordinate(self.own, "start + " + ("columns" if self.swapped else "rows"))
        if self.bounds:
            self.closed_form()
            self.page.blank()
        for level in (SCALAR, ROW):
            self.lines([*self.mask, *self.full], level, self.hoisted)

    def factors(self) -> None:
        if self.plan.score is None:
            self.page.line("unit = scale * LOG2E")
        if self.kept is not None:
            self.page.line(f"survivor = 1.0 / (1.0 - {self.arguments[str(self.plan.rate)].name})")

    def zeros(self) -> None:
        for s, _ in self.sums:
            self.page.line(f"{s.total} = tl.zeros([{'BLOCK_K' if self.swapped else 'BLOCK_Q'}], tl.float32)")

    # -- addresses ----------------------------------------------------------------------------------

    def offset(self, letter: str, *indices: str) -> str:
        """`offset("q", "batch", "head")`: of scalars, 64 bits wide."""
        return " + ".join(f"{x}.to(tl.int64) * stride_{letter}{a}" for x, a in zip(indices, "bhs", strict=False))

    def within(self, letter: str, index: str) -> str:
        """Offsets in a tile along `index`, 32 bits wide."""
        return f"{index}[:, None] * stride_{letter}s + {self.along(letter)}[None, :] * stride_{letter}d"

    def along(self, letter: str) -> str:
        return self.e if letter in "vgo" else "d"

    def tile_mask(self, letter: str, inside: str, other: str = ", other=0.0") -> str:
        """Of a tile whose rows are `inside`; all are where that is empty."""
        index = f"{self.along(letter)}[None, :]"
        pad = self.value_pad(index) if letter in "vgo" else self.head_pad(index)
        return masked(inside and f"{inside}[:, None]", pad, other=other)

    # -- the loops ----------------------------------------------------------------------------------

    def tiles(self) -> None:
        line = self.page.line
        with self.border_tiles():
            line(f"inside = tile * {self.block} + {self.index} < {self.length}")
            self._tile("inside")
        self.page.comment("Full tiles: every position is visible.")
        with self.page.block("for tile in range(full_lo, full_hi):"):
            self._tile("")

    def _tile(self, inside: str) -> None:
        self.products(inside)
        written = set(self.hoisted)
        roots = [*self.mask, *self.full] if inside else self.full
        if any(self.other in uses(r) for r in roots):
            self.coordinate(self.other, f"tile * {self.block} + {self.index}")
        self.lines(roots, COLUMN, written)
        if inside:
            self.visible(written)
        self.weights(written, inside and "visible")
        if self.inner:
            self.cotangents(written, inside and "visible")
        self.accumulate()

    def products(self, inside: str) -> None:
        """Loads a tile of the other axis, and writes `score` and, where it is wanted, `dp`."""
        raise NotImplementedError

    def per_query(self, name: str, visible: str) -> None:
        """Loads lse, low or delta, where it is not there from the beginning."""

    def accumulate(self) -> None:
        """Adds the share of a tile."""
        raise NotImplementedError

    def dot(self, name: str, one: str, two: str, start: str = "") -> None:
        """One times two transposed; the sum begins at `start`."""
        start = start and f", tl.broadcast_to({start}, [BLOCK_K, BLOCK_Q])"
        scaled = " * scale" if name == "score" and self.score else ""
        self.page.line(f"{name} = tl.dot({one}, tl.trans({two}){start}{self.precision}){scaled}")

    def weights(self, written: set[str], visible: str) -> None:
        """`p`, 0 where nothing is seen, and with dropout `kept`, what its weights are multiplied with."""
        line = self.page.line
        exponent = "score * unit"
        if self.plan.score is not None:
            self.quote(self.plan.score)
            self.lines(self.score, POSITION, written, visible)
            line(f"modified = {self.value(self.score[0])}")
            exponent = "modified * LOG2E"
        self.per_query("lse", visible)
        self.per_query("low", visible)
        p = f"tl.exp2({exponent} - lse - low)"  # the forward's own product, rounded as there
        line(f"p = tl.where({visible}, {p}, 0.0)" if visible else f"p = {p}")
        if self.kept is not None and self.plan.kept is not None:
            self.quote(self.plan.kept)
            self.lines([self.kept], POSITION, written, visible)
            line(f"kept = tl.where({self.value(self.kept)}, survivor, 0.0)")

    def cotangents(self, written: set[str], visible: str) -> None:
        line = self.page.line
        dm = "ds" if self.ds == "ds" and not self.sums and self.slope is None else "dm"
        if self.kept is not None:
            self.per_query("delta", visible)
            line(f"{dm} = p * (dp * kept - delta)")
        else:
            line(f"{dm} = p * dp" if self.swapped else f"{dm} = p * (dp - delta)")
        for s, weight in self.sums:
            self.page.comment(f"The gradient of {self.read(s.gradient)}.")
            line(f"{s.total} += tl.sum({self.times(weight, 'weight', written, visible)}, 1)")
        if self.slope is not None:
            self.page.comment("The derivative of the score mod.")
            line(f"ds = {self.times(self.slope, 'derivative', written, visible)}")

    def times(self, factor: Expr, name: str, written: set[str], visible: str) -> str:
        """`dm` times a factor, 0 where p is 0 if the factor may be infinite or NaN there."""
        if factor is lit(1.0):
            return "dm"
        self.lines([factor], POSITION, written, visible)
        value = self.value(factor)
        if not value.isidentifier():
            self.page.line(f"{name} = {value}")
            value = name
        return f"tl.where(p == 0.0, 0.0, dm * {value})" if self.careful else f"dm * {value}"

    def shape(self, heads: str, length: str) -> str:
        """That of the gradient of an array, for the reader."""
        return f"[batch, {length}, {heads}, dim]" if self.dims.by_length else f"[batch, {heads}, {length}, dim]"

    # -- captured values ----------------------------------------------------------------------------

    def read(self, gradient: Gradient) -> str:
        """`slope[h]`, or the name of a slot."""
        named = {n: a.name for n, a in self.arguments.items()}
        index = [show(renamed(i, named), known=set(named.values())) for i in gradient.index]
        return f"{named[gradient.source]}[{', '.join(index)}]" if index else named[gradient.source]

    def pointers(self) -> list[str]:
        """The lines of the signature for the buffers of sums."""
        length, over = ("kv_len", "queries") if self.swapped else ("q_len", "keys")
        shape = f"float32 [batch, heads, {length}]"
        return [
            f"{s.buffer},  # {shape}: the gradient of {self.read(s.gradient)}, summed over {over}" for s, _ in self.sums
        ]

    def store_sums(self, at: str, present: str) -> None:
        for s, _ in self.sums:
            self.page.line(f"tl.store({s.buffer} + {at}, {s.total}, mask={present})")
