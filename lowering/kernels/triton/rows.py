"""Kernels whose program owns one row of tiles and walks its records: a tile of queries and records of key tiles, or,
swapped, a tile of keys and records of query tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from frisket.dsl.ir import Expr
from frisket.dsl.types import BOOL
from frisket.lowering.analysis.intervals import K0, K1
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import LEVELS, POSITION, SCALAR, levels
from frisket.lowering.plan import LoopPlan, Target

from .parameters import Parameters
from .writer import Dims, Writer, bounds_of, conjuncts


class Rows(Writer):
    """`mask` and `score` are what the loops need; `more` are other expressions used per position. Swapped kernels
    always read their records from a table, where there is a mask."""

    shown = "inside[None, :]"  # of a border tile: what may be visible at all

    def __init__(
        self, plan: LoopPlan, dims: Dims, target: Target, more: Iterable[Expr] = (), *, swapped: bool = False,
        when: Mapping[str, int] = LEVELS,
    ) -> None:  # fmt: skip
        self.mask = conjuncts(plan.mask)
        self.score = [] if plan.score is None else [self.machine(plan.score)]
        self.bounds = {} if swapped else bounds_of(plan)
        self.tabled = plan.mask is not None and not self.bounds
        self.ordered = target.order == "longest-first"
        self.hoisted: set[str] = set()
        known = levels(*self.mask, when=when)
        self.spread = any(n.type is BOOL and n.op != "const" and at == SCALAR for n, at in known.items())
        positions = [*self.mask, *self.score, *more]
        roots = [*self.bounds.values(), *positions]
        super().__init__(plan, dims, roots, positions, precision=target.precision, swapped=swapped, when=when)
        self.parameters = Parameters(plan, self.used, self.tabled, bool(self.bounds), self.ordered)

    def machine(self, e: Expr) -> Expr:
        """A score mod or weight from what machines have."""
        return expr.machine(e)

    def own_row(self) -> None:
        """`batch`, `head`, `place` among the heads of all batches, and `row`, the program's tile: the grid is (rows,
        heads, batch)."""
        line = self.page.line
        line("head, batch = tl.program_id(1), tl.program_id(2)", "place = batch * heads + head")
        if self.tabled:
            line("distinct = tl.load(SliceOf + place) * tl.num_programs(0)")
            row = "tl.load(Order + distinct + tl.program_id(0))" if self.ordered else "tl.program_id(0)"
        else:
            row = "tl.num_programs(0) - 1 - tl.program_id(0)" if self.ordered else "tl.program_id(0)"
        line(f"row = {row}" + ("  # longest first" if self.ordered else ""))
        if self.tabled:
            line("entry = distinct + row")

    def scalars(self) -> None:
        """Origins, sizes, slots, `b` and `h` as the expressions read them."""
        line = self.page.line
        self.convert(self.parameters.origins(), self.parameters.sizes())
        if "b" in self.used:
            line(f"b = {self.widened('b_origin + batch')}")
        if "h" in self.used:
            self.head_coordinate()

    def head_coordinate(self) -> None:
        self.page.line(f"h = {self.widened('h_origin + head')}")

    def corners(self, block: str = "BLOCK_Q") -> None:
        """The first and last query of a row of `block` and key of the call, as wide as formulas of them need."""
        last = f"q_origin + tl.minimum(start + {block}, q_len) - 1"
        self.page.line(
            f"q_first = {self.widened('q_origin + start')}",
            f"q_last = {self.widened(last)}",
            f"k_first = k_origin{self.wide}",
            f"k_last = {self.widened('k_origin + kv_len - 1')}",
        )

    def closed_form(self, block: str = "BLOCK_Q") -> None:
        """The record of a row of `block` queries, from formulas."""
        line = self.page.line
        self.page.blank()
        self.corners(block)
        roots = list(self.bounds.values())
        self.lines(roots, SCALAR, self.hoisted)
        self.page.comment("Some query of the tile sees keys first..last, every one sees full_first..full_last.")
        line(
            *(f"{name} = {self.bound(name)}" for name in self.bounds),
            "hi = (tl.maximum(last, -1) + BLOCK_K) // BLOCK_K",
            "lo = tl.minimum(first // BLOCK_K, hi)",
            "full_lo = tl.minimum((tl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)",
            "full_lo = tl.maximum(full_lo, lo)",
            "full_hi = tl.minimum(tl.maximum(full_last + 1, 0) // BLOCK_K, hi)",
            "full_hi = tl.maximum(full_hi, full_lo)",
        )
        if self.wide:  # tiles are counted in 32 bits, wherever they came from
            line(*(f"{n} = {n}.to(tl.int32)" for n in ("lo", "full_lo", "full_hi", "hi")))

    def bound(self, name: str) -> str:
        """A bound of the closed form, counted from the call's first key and clamped to its keys, unless it says so."""
        root = self.bounds[name]
        op, end, clamp = ("max", K0, "tl.maximum({}, k_first)")
        if "last" in name:
            op, end, clamp = ("min", K1, "tl.minimum({}, k_last)")
        value = self.value(root) if end in operands(root, op) else clamp.format(self.value(root))
        return "0" if value == "k_first" else f"{value} - k_first"

    @contextmanager
    def border_tiles(self, shared: bool = False) -> Iterator[None]:
        """The loop over the tiles of a record that are not full: all of them, or the `shared` part of a program.
        Without a mask only the last may be one, which a loop of its own says in fewer registers."""
        first, whole = (
            ("lo", "lo, hi - full_hi + full_lo") if self.plan.mask is not None else ("full_hi", "full_hi, hi")
        )
        tiles = f"{first} + bounded(begin, border), {first} + bounded(end, border)" if shared else whole
        if self.plan.mask is None:
            self.page.comment("The ragged edge: a last tile that is not full.")
            with self.page.block(f"for tile in range({tiles}):"):
                yield
            return
        self.page.comment("Border tiles, before and behind the full ones: the mask is a predicate.")
        with self.page.block(f"for j in range({tiles}):"):
            self.page.line("tile = tl.where(j < full_lo, j, j - full_lo + full_hi)")
            yield

    def visible(self, written: set[str]) -> None:
        """Which positions of a border tile are visible."""
        self.lines(self.mask, POSITION, written)
        if self.plan.mask is not None:
            self.quote(self.plan.mask)
        self.page.line(f"visible = {self.shown}", *(f"visible &= {self.value(term)}" for term in self.mask))
        if self.spread:
            self.page.line("visible = visible != 0  # Triton's interpreter spreads a bool over a tile as bytes")

    @contextmanager
    def records(self) -> Iterator[None]:
        """The loop over the program's records, or its only one: `lo <= full_lo <= full_hi <= hi`."""
        line = self.page.line
        self.page.blank()
        if not self.tabled:
            if not self.bounds:  # no mask: all that is not full is the ragged edge
                line("lo, full_lo = 0, 0")
                length, block = ("q_len", "BLOCK_Q") if self.swapped else ("kv_len", "BLOCK_K")
                line(f"full_hi, hi = {length} // {block}, tl.cdiv({length}, {block})")
            yield
            return
        with self.page.block("for i in range(tl.load(Count + entry)):"):
            line("record = Spans + (entry.to(tl.int64) * records + i) * 4")
            line("lo, full_lo = tl.load(record), tl.load(record + 1)")
            line("full_hi, hi = tl.load(record + 2), tl.load(record + 3)")
            yield


def operands(e: Expr, op: str) -> list[Expr]:
    """What a tree of one operator, a minimum of minima, is made of."""
    return [x for a in e.args for x in operands(a, op)] if e.op == op else [e]
