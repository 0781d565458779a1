"""Kernels whose program owns one row of tiles and walks its records: a tile of queries and records of key tiles, or,
swapped, a tile of keys and records of query tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from frisket.dsl.ir import Expr, uses
from frisket.dsl.types import BOOL
from frisket.lowering.analysis.intervals import K0, K1
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, LEVELS, POSITION, SCALAR, levels
from frisket.lowering.kernels.text import filled
from frisket.lowering.plan import LoopPlan, Target

from .parameters import Parameters
from .writer import LINE, Dims, TritonWriter, bounds_of, conjuncts, wrapped


class RowKernel(TritonWriter):
    """A kernel whose program owns one row of tiles. `mask` and `score` are the expressions of the loops; `more` are
    other expressions used per position. Swapped kernels always read their records from a table, where there is a mask.
    """

    shown = "inside[None, :]"  # of a border tile: what may be visible at all
    longest = LINE
    numbers: tuple[str, ...] = ("heads", "q_len", "kv_len")

    def __init__(
        self, plan: LoopPlan, dims: Dims, target: Target, more: Iterable[Expr] = (), *, swapped: bool = False,
        when: Mapping[str, int] = LEVELS,
    ) -> None:  # fmt: skip
        self.mask = conjuncts(plan.mask)
        self.score = [] if plan.score is None else [self.machine(plan.score)]
        self.bounds = {} if swapped else bounds_of(plan)
        self.tabled = plan.mask is not None and not self.bounds
        known = levels(*self.mask, when=when)
        self.spread = any(n.type is BOOL and n.op != "const" and at == SCALAR for n, at in known.items())
        self.positions = [*self.mask, *self.score, *more]
        roots = [*self.bounds.values(), *self.positions]
        super().__init__(plan, dims, roots, self.positions, precision=target.precision, swapped=swapped, when=when)
        ordered = target.order == "longest-first"
        self.parameters = Parameters(plan, self.used, self.tabled, bool(self.bounds), ordered)

    def machine(self, e: Expr) -> Expr:
        """A score mod or weight written with the operators that machines have."""
        return expr.machine(e)

    def filled(self, skeleton: str) -> str:
        return filled(skeleton, partial(wrapped, longest=self.longest), **self.holes())

    def holes(self) -> dict[str, Any]:
        """The holes that every skeleton of rows has: flags, and the reads of scalars."""
        given = self.parameters.holes(self.numbers)
        return {
            **given,
            "blank": [""],
            "walked": "query" if self.swapped else "key",
            "queries": "BLOCK_Q",
            "grouped": self.dims.group > 1,
            "kv_head": "head" if self.dims.group == 1 else "kv_head",
            "masked": self.plan.mask is not None,
            "precision": self.precision,
            "wide": self.wide,
            "open": "(" if self.wide else "",
            "close": f"){self.wide}" if self.wide else "",
            "vectors": [f"{n}_origin = tl.load({n}_origin + batch)" for n in given["moved"]],
            "conversions": self.conversions(),
            "by_batch": "b" in self.used,
            "by_head": "h" in self.used,
            "packs": False,  # a tile holds several heads
        }

    def closed_form(self) -> dict[str, Any]:
        """The holes of closed_form.tpl."""
        bounds = [f"{name} = {self.bound(name)}" for name in self.bounds]
        return {"formulas": self.lines(list(self.bounds.values()), SCALAR), "bounds": bounds}

    def bound(self, name: str) -> str:
        """A bound of the closed form, counted from the call's first key and clamped to its keys, unless the bound says
        otherwise."""
        root = self.bounds[name]
        op, end, clamp = ("max", K0, "tl.maximum({}, k_first)")
        if "last" in name:
            op, end, clamp = ("min", K1, "tl.minimum({}, k_last)")
        value = self.value(root) if end in operands(root, op) else clamp.format(self.value(root))
        return "0" if value == "k_first" else f"{value} - k_first"

    def tiles(self) -> list[dict[str, Any]]:
        """The holes of both loops of a skeleton over tiles: partial tiles first, then full ones."""
        edge = {"which": "The ragged edge: a last tile that is not full.", "tile": "tile", "range": "full_hi, hi"}
        if self.plan.mask is not None:  # without one a loop of its own says in fewer registers that one tile is ragged
            which = "Border tiles, before and behind the full ones: the mask is a predicate."
            edge = {"which": which, "tile": "j", "range": "lo, hi - full_hi + full_lo"}
        full = {"which": "Full tiles: every position is visible.", "tile": "tile", "range": "full_lo, full_hi"}
        return [
            {**edge, "border": True, **self.tile("inside")},
            {**full, "border": False, **self.tile("")},
        ]

    def tile(self, inside: str) -> dict[str, Any]:
        """The holes of one loop; `inside` names the positions of a tile that exist, empty where all do."""
        raise NotImplementedError

    def visible(self, written: set[str]) -> list[str]:
        """The condition that positions of a border tile are visible."""
        found = self.lines(self.mask, POSITION, written)
        if self.plan.mask is not None:
            found += self.quote(self.plan.mask)
        found += [f"visible = {self.shown}", *(f"visible &= {self.value(term)}" for term in self.mask)]
        if self.spread:
            found.append("visible = visible != 0  # Triton's interpreter spreads a bool over a tile as bytes")
        return found

    def quoted(self, e: Expr | None, root: Expr | None, line: str, written: set[str], mask: str = "") -> list[str]:
        """An expression of the plan as a comment, and the lines that work it out and apply it."""
        if e is None or root is None:
            return []
        found = [*self.quote(e), *self.lines([root], POSITION, written, mask)]
        return [*found, *[line.format(self.value(root))] * bool(line)]

    def along_tile(self, name: str, local: str, roots: Sequence[Expr], written: set[str]) -> list[str]:
        """The coordinate of a tile's walked axis, where `roots` read it, and the lines that depend on it."""
        known = self.coordinate(name, local) if any(name in uses(r) for r in roots) else []
        return [*known, *self.lines(roots, COLUMN, written)]


def operands(e: Expr, op: str) -> list[Expr]:
    """The operands of a tree of one operator: of a minimum of minima."""
    return [x for a in e.args for x in operands(a, op)] if e.op == op else [e]
