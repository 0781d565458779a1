"""Facts of a layout: tiles by kind, and what the analysis proved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import BudgetError
from frisket.dsl.ir import clauses, var, walk
from frisket.lowering.analysis.ids import sides_of_ids

if TYPE_CHECKING:
    from frisket.lowering.analysis.reach import Lookup
    from frisket.lowering.analysis.table import TableFacts

    from .tiling import Tiling


@dataclass(frozen=True)
class Counts:
    """Tiles by kind, over every batch entry and head of the layout."""

    empty: int
    partial: int
    full: int

    @property
    def visited(self) -> int:
        """Tiles that kernels visit: those that are not empty."""
        return self.partial + self.full


@dataclass(frozen=True)
class Facts:
    """Facts that the analysis proved. Lengths in tokens, runs in tiles, FLOPs of the two matmuls per head_dim of 1.
    What takes counting is counted when it is asked for."""

    max_runs_per_row: int
    contiguous: bool  # every row of tiles reads one run of neighbouring key tiles
    closed_form: bool  # the bounds of a row are formulas: kernels read no table
    uses: tuple[str, ...]  # which of b, h, and which tables and parameters
    method: str  # how the layout was found
    settled: int  # tiles decided by looking at their elements
    layout: Tiling = field(repr=False, compare=False)

    @property
    def exact(self) -> bool:
        """Whether every tile has its true kind. Past the budget, full or empty tiles may count as partial."""
        return self.layout.exact

    @property
    def rows_nonempty(self) -> bool | None:
        """Every query sees a key; None where that would exceed the budget."""
        return self.layout.rows_nonempty

    @property
    def visible_pairs(self) -> int | None:
        """Visible (query, key) pairs; None where counting them would exceed the budget."""
        try:
            return self.layout.visible_pairs
        except BudgetError:
            return None

    @property
    def flops(self) -> int | None:
        """4 * visible pairs: multiply by head_dim."""
        pairs = self.visible_pairs
        return None if pairs is None else 4 * pairs

    @property
    def lookups(self) -> tuple[Lookup, ...]:
        """Every table the mask reads, and whether it stays inside."""
        return self.layout.lookups

    @property
    def hints(self) -> tuple[str, ...]:
        """Remarks on clauses that show less than their name says: sink tokens of the first document alone.

        >>> import frisket as fk
        >>> text = "causal & same(doc) & (window(4) | sinks(2))"
        >>> print(fk.mask(text, doc=[0] * 8 + [1] * 8).layout(16, 16).facts.hints[0])
        `k < 2` shows keys of the first document alone; for the first keys of each write `document(off, m)` with \
`sinks(2)` in m, or `k - start[k] < 2`
        """
        parts = clauses(self.layout.written)
        if not any(e.op != "or" and (sides_of_ids(e) or any(n.op == "segment" for n in walk(e))) for e in parts):
            return ()
        below = {n: None for e in parts if e.op == "or" for n in walk(e) if n.op in ("lt", "le")}
        first = [n for n in below if n.args[0] is var("k") and n.args[1].op in ("lit", "param")]
        return tuple(
            f"`{n!r}` shows keys of the first document alone; for the first keys of each write `document(off, m)` with "
            f"`sinks({n.args[1]!r})` in m, or `k - start[k] < {n.args[1]!r}`" for n in first
        )  # fmt: skip

    @property
    def tables(self) -> dict[str, TableFacts]:
        """Order, runs and range of every table the mask reads."""
        return {name: table.facts for name, table in self.layout.tables.items()}

    def as_dict(self) -> dict[str, Any]:
        """The facts by name, in numbers and text."""
        names = ("exact", "rows_nonempty", "max_runs_per_row", "contiguous", "closed_form", "uses", "method", "settled")
        values = {n: getattr(self, n) for n in (*names, "visible_pairs", "flops")}
        tables = {name: asdict(facts) for name, facts in self.tables.items()}
        return {**values, "tables": tables, "lookups": [one.as_dict() for one in self.lookups]}

    def __str__(self) -> str:
        rows = {True: "every query sees a key", False: "some query sees no key", None: "not known if all see a key"}
        lines = {
            "rows": rows[self.rows_nonempty],
            "runs": f"at most {self.max_runs_per_row} per row of tiles" + (", contiguous" if self.contiguous else ""),
            "found by": self.method + (f", {self.settled} tiles looked at" if self.settled else ""),
            "uses": ", ".join(self.uses) or "positions only",
        }
        if not self.exact:
            left = self.layout.analysis.undecided
            lines["exact"] = f"no: {left:,} tiles count as partial without being looked at"
        pairs = self.visible_pairs
        if pairs is not None:
            lines["visible"] = f"{pairs:,} pairs"
        if self.tables:
            lines["tables"] = "\n".join(f"{name}: {facts}" for name, facts in self.tables.items())
        if self.lookups:
            open_ = [str(one) for one in self.lookups if not one.proved]
            lines["lookups"] = "\n".join(open_) or "all stay inside their tables"
        if self.hints:
            lines["hint"] = "\n".join(self.hints)
        return "\n".join(f"{name:9} " + value.replace("\n", "\n" + 10 * " ") for name, value in lines.items())
