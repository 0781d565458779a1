"""Kernels whose program owns one row of tiles and walks its records: a tile of queries and records of key tiles, or,
swapped, a tile of keys and records of query tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from frisket.dsl.ir import TRUE, Expr, uses
from frisket.dsl.types import BOOL
from frisket.lowering.analysis.intervals import K0, K1
from frisket.lowering.analysis.solve import Ends
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, LEVELS, POSITION, ROW, SCALAR, levels
from frisket.lowering.kernels.text import fields, filled
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import ALONG, by_distance, last_factor, machine
from frisket.lowering.plan import LoopPlan

from .writer import LINE, Dims, KernelTraits, Parameters, TritonWriter, bounds_of, conjuncts, wrapped

QUERIES = frozenset(("q", "q0", "q1"))


def axes_of(target: Target) -> tuple[int, int]:
    """The axes of the grid that count rows of tiles and heads. Programs start in the order of the first axis: there
    heads follow one another where the longest row of each comes before the second longest of any."""
    return (1, 0) if target.order == "longest-of-all-first" else (0, 1)


class RowKernel(TritonWriter):
    """A kernel whose program owns one row of tiles. `mask` and `score` are the expressions of the loops; `more` are
    other expressions that a position needs, such as that of dropout. A swapped kernel of a mask reads its records from
    a table; others may have them from a closed form.
    """

    shown = "inside[None, :]"  # the positions of a border tile that exist
    one_of = "one_of"  # the function that says which positions of a tile a row's interval has
    near = False  # rows of tables are counted from the first that a tile reads
    longest = LINE
    numbers: tuple[str, ...] = ("heads", "q_len", "kv_len")

    def __init__(
        self,
        plan: LoopPlan,
        dims: Dims,
        target: Target,
        more: Iterable[Expr],
        traits: KernelTraits,
        when: Mapping[str, int] = LEVELS,
    ) -> None:
        self.traits, self.axes = traits, axes_of(target)
        self.ends = self._ends(plan, dims)
        # what the ends of a row say already is not asked again of its positions
        mask = conjuncts(plan.mask if self.ends is None else self.ends.rest)
        self.mask = [by_distance(e, when) for e in mask] if traits.gathers else mask
        self.score, self.factor = [], 1.0
        if plan.score is not None:
            score = machine(self.rewritten(plan.score), dims, when, gathers=traits.gathers)
            score, self.factor = last_factor(score) if dims.half else (score, 1.0)
            self.score = [score]
        # the closed form gives keys of queries; a swapped kernel reads its spans from tables
        self.bounds = {} if traits.swapped else bounds_of(plan)
        self.tabled = plan.mask is not None and not self.bounds
        self.rows = self._rows()
        known = levels(*self.mask, when={**when, **ALONG})
        # a Bool that no position decides, which only the interpreter minds
        self.spread = any(n.type is BOOL and n.op != "const" and at == SCALAR for n, at in known.items())
        self.positions = [*self.mask, *self.score, *more]
        inner = [*self.positions, *self.rows.values()]
        roots = [*self.bounds.values(), *inner]
        super().__init__(plan, dims, target, roots, inner, traits, when)
        # a table that lists the programs has their order
        ordered = target.order != "forward" and not shrinking(self.bounds) and not traits.listed
        origins = {"q" if traits.swapped else "k"} if self.rows else set()
        self.parameters = Parameters(plan, self.used | origins, self.tabled, bool(self.bounds), ordered)

    def rewritten(self, e: Expr) -> Expr:
        """A score mod or weight as this kernel reads it."""
        return e

    def units(self) -> dict[str, Any]:
        """The holes of two factors: `unit` turns scores into exponents of 2, `scale` products into scores."""
        plain = self.plan.score is None
        unit = "scale" if plain else "" if self.factor == 1.0 else f"{self.factor!r}"
        return {
            "in_unit": unit,
            "unit": "unit" if unit else "LOG2E",
            "scale": "" if plain or self.dims.half else " * scale",
        }

    def grid_of(self, rows: str, heads: str) -> str:
        """The grid, in words."""
        return f"({heads}, {rows}, batch)" if self.axes[0] else f"({rows}, {heads}, batch)"

    def filled(self, skeleton: str) -> str:
        return filled(skeleton, partial(wrapped, longest=self.longest), **self.holes())

    def holes(self) -> dict[str, Any]:
        """The holes of every skeleton with rows of tiles: flags, and the lines that read scalars."""
        common = self.parameters.holes(self.numbers)
        return {
            **common,
            "blank": [""],
            "of_row": str(self.axes[0]),
            "of_head": str(self.axes[1]),
            "walked": "query" if self.traits.swapped else "key",
            "queries": "BLOCK_Q",
            "grouped": self.dims.group > 1,
            "kv_head": "head" if self.dims.group == 1 else "kv_head",
            "masked": self.plan.mask is not None,
            **vars(self.traits),
            "place": "place",
            **fields(self, "near precision wide"),
            "several": self.traits.swapped and self.dims.group > 1,  # heads that a program walks, one after another
            "rows_of_slice": "tl.cdiv(kv_len, BLOCK_K)" if self.traits.swapped else "tl.cdiv(q_len, BLOCK_Q)",
            **self.units(),
            "open": "(" if self.wide else "",
            "close": f"){self.wide}" if self.wide else "",
            "vectors": [f"{n}_origin = tl.load({n}_origin + batch)" for n in common["moved"]],
            "conversions": self.conversions(),
            "by_batch": "b" in self.used,
            "by_head": "h" in self.used,
        }

    def closed_form(self) -> dict[str, Any]:
        """The holes of closed_form.tpl."""
        bounds = [f"{name} = {self.bound(name)}" for name in self.bounds]
        return {"formulas": self.lines(list(self.bounds.values()), SCALAR), "bounds": bounds}

    def bound(self, name: str) -> str:
        """A bound of the closed form, counted from the call's first key and clamped to its keys, unless the bound says
        otherwise."""
        root = self.bounds[name]
        # a bound that holds its clamp already is not clamped again
        op, end, clamp = ("max", K0, "tl.maximum({}, k_first)")
        if "last" in name:
            op, end, clamp = ("min", K1, "tl.minimum({}, k_last)")
        value = self.value(root) if end in operands(root, op) else clamp.format(self.value(root))
        return "0" if value == "k_first" else f"{value} - k_first"

    def tiles(self) -> list[dict[str, Any]]:
        """The holes of both loops of a skeleton over tiles: partial tiles first, then full ones."""
        # A loop from full_hi to hi has one tile at most: ptxas would see that, and make products of gradients wait.
        edge = {"which": "The ragged edge: a last tile that is not full.", "range": "hi - full_hi"}
        if self.plan.mask is not None:
            which = "Border tiles, before and behind the full ones: the mask is a predicate."
            edge = {"which": which, "range": "lo, hi - full_hi + full_lo"}
        full = {"which": "Full tiles: every position is visible.", "tile": "tile", "range": "full_lo, full_hi"}
        if self.traits.parted:
            edge["range"] = "lo + bounded(begin, border), lo + bounded(end, border)"
            full["range"] = "full_lo + bounded(begin, full), full_lo + bounded(end, full)"
        return [
            {**edge, "tile": "j", "border": True, **self.tile("inside")},
            {**full, "border": False, **self.tile("")},
        ]

    def tile(self, inside: str) -> dict[str, Any]:
        """The holes of one loop; `inside` names the positions of a tile that exist, "" where all exist."""
        raise NotImplementedError

    def _ends(self, plan: LoopPlan, dims: Dims) -> Ends | None:
        """The ends of what a row sees, or None where the kernel evaluates the whole mask instead. A swapped kernel with
        heads past 64 has no registers left for a row's last position beside its accumulators: the compiler spills. The
        ends of runs are worth it there: the entries of the table would take more registers."""
        swapped = self.traits.swapped
        ends = plan.by_key if swapped else plan.by_query
        if ends is None or not self.traits.bounded:
            return None
        if swapped and ends.last is not None and dims.head_dim > 64 and not plan.run_tables:
            return None
        return ends

    def _rows(self) -> dict[str, Expr]:
        """The Exprs of a row's ends, which are computed before the loops, by name."""
        if self.ends is None:
            return {}
        asks = None if self.ends.asks is TRUE else self.ends.asks
        ends = {"least": self.ends.first, "most": self.ends.last, "asks": asks}
        return {name: expr.machine(e) for name, e in ends.items() if e is not None}

    def before_tiles(self) -> list[str]:
        """The lines before the loops: values that are known once a program or once a row, and the ends of each row."""
        # all in one go: values that the mask and the score mod share are computed once
        roots = [*self.positions, *self.rows.values()]
        lines = [*self.lines(roots, SCALAR), *self.lines(roots, ROW)]
        if not self.rows:
            return lines
        axis, length = ("q", "q_len") if self.traits.swapped else ("k", "kv_len")
        row, others = ("key", "queries") if self.traits.swapped else ("query", "keys")
        # a condition on the row alone makes its interval empty, so that no position asks it again
        least, most, asks = (self.value(self.rows[n]) if n in self.rows else "" for n in ("least", "most", "asks"))
        most = f"placed({most}, {axis}_origin, -1, {length} - 1)" if most else f"{length} - 1"
        most = f"tl.where({asks}, {most}, -1)" if asks else most
        if not least:
            return [*lines, f"# The last of the call's {others} that a {row} may see.", f"most = {most}"]
        return [
            *lines,
            f"# The first of the call's {others} that a {row} may see, and the number of those up to the last.",
            f"least = placed({least}, {axis}_origin, 0, {length})",
            f"many = tl.maximum({most} + 1 - least, 0)",
        ]

    def visible(self, written: set[str]) -> list[str]:
        """The condition that positions of a border tile are visible."""
        lines = self.lines(self.mask, POSITION, written)
        if self.plan.mask is not None:
            lines += self.quote(self.plan.mask)
        along, start = ("rows", "tile * BLOCK_Q") if self.traits.swapped else ("columns", "tile * BLOCK_K")
        shown = self.shown
        if self.rows:
            shown = f"up_to({along}[None, :], most - {start})"
        if "least" in self.rows:
            shown = f"{self.one_of}({along}[None, :], least - {start}, many)"
        lines += [f"visible = {shown}", *(f"visible &= {self.value(term)}" for term in self.mask)]
        if self.spread:
            lines.append("visible = visible != 0  # Triton's interpreter spreads a bool over a tile as bytes")
        return lines

    def quoted(self, e: Expr | None, root: Expr | None, line: str, written: set[str], mask: str = "") -> list[str]:
        """An Expr of the plan as a comment, and the lines that compute and apply it."""
        if e is None or root is None:
            return []
        lines = [*self.quote(e), *self.lines([root], POSITION, written, mask)]
        return [*lines, *[line.format(self.value(root))] * bool(line)]

    def score_mod(self, name: str, written: set[str], mask: str = "") -> list[str]:
        """The lines of the modified score, which has the shape of a tile also where it is one number for all keys."""
        root = next(iter(self.score), None)
        # without the score it has no axis of queries, and products need a whole tile
        whole = root is None or "score" in uses(root)
        line = f"{name} = {{}}" if whole else f"_, {name} = tl.broadcast(score, tl.cast({{}}, tl.float32))"
        return self.quoted(self.plan.score, root, line, written, mask)

    def along_tile(self, name: str, local: str, roots: Sequence[Expr], written: set[str]) -> list[str]:
        """The coordinate along the walked axis, where `roots` read it, and the lines of values that depend on it."""
        known = self.coordinate(name, local) if any(name in uses(r) for r in roots) else []
        return [*known, *self.line(roots), *self.lines(roots, COLUMN, written)]


def shrinking(bounds: Mapping[str, Expr]) -> bool:
    """Whether later rows of a closed form see fewer keys, as under `k >= q`: their first key moves with the queries and
    their last key does not. The longest row is then the first."""
    return bool(bounds) and bool(uses(bounds["first"]) & QUERIES) and not uses(bounds["last"]) & QUERIES


def operands(e: Expr, op: str) -> list[Expr]:
    """The operands of nested nodes of one operator: a, b and c of `min(min(a, b), c)`."""
    return [x for a in e.args for x in operands(a, op)] if e.op == op else [e]
