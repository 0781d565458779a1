"""Tiling: which tiles of keys each tile of queries reads, how many, and why.

Inputs are checked first: lengths, origins and tiles that make sense, and tables as long as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BudgetError, ParameterError, ShapeError, looks_like_lengths
from frisket.dsl.explain import Explanation, TileExplanation, explain, explain_tile
from frisket.dsl.ir import COORDINATES, TRUE, Expr, clauses, conj, make, names_of, substitute, uses, var, walk
from frisket.dsl.sugar import eq
from frisket.dsl.types import BOOL
from frisket.grammar.memo import own_state
from frisket.lowering.plan import Bounds, Problem, Spans, is_positive, is_start
from frisket.lowering.simplify import simplify

from .decide import Lookup, guards, lookups, no_row_empty, pair_counts, row_counts
from .layout import AnalysedMask, Analysis, analyse, bind_in_part, closed_form, grid_of, reads_at_most
from .questions import always, mixed, never
from .rows import RowIntervals
from .runs import Runs, from_records
from .solve import sides_of_ids
from .table import Table, TableFacts
from .tiles import EMPTY, FULL, PARTIAL, WORK, Grid, Scope

Array = NDArray[Any]
At = int | None
_TILE = 1 << 22  # positions of a tile that explain looks at
_ROW = 1 << 8  # steps to search a row for a key it sees
_STEPS = 1 << 27  # to find a position outside of offsets


@dataclass(frozen=True)
class RunTable:
    """Runs of key tiles in CSR, per distinct slice and row of tiles: row `i = slice * rows + row` has runs
    `row_ptr[i] .. row_ptr[i + 1]`, each tiles `[start, stop)` of one `kind` (1 partial, 2 full)."""

    row_ptr: NDArray[np.int64]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    kind: NDArray[np.uint8]
    slice_of: NDArray[np.int32]


class Tiling:
    """The tiles of a mask at given lengths, and every fact about them: `Layout` without drawing and exports."""

    def __init__(
        self, mask: AnalysedMask, problem: Problem, block: tuple[int, int], exact: bool = True, budget: int = WORK
    ) -> None:
        self.mask, self.written = mask.simplified, mask.written
        self.shown = mask.written if mask.shown is None else mask.shown
        self.params, self.tables = mask.params, mask.tables
        self.problem, self.block = problem, block
        self.batch, self.heads, self.q_len, self.kv_len = problem.lengths
        self.origin, self.sizes = problem.origin, problem.full
        self.work, self.look = budget, exact
        self._analysis: Analysis | None = None

    # -- tiles ------------------------------------------------------------------------------------

    @property
    def analysis(self) -> Analysis:
        """The analysis, made when it is first asked for."""
        if self._analysis is None:
            self._analysis = analyse(self.mask, self.problem, self.block, self.scope(), look=self.look)
        return self._analysis

    @cached_property
    def _closed(self) -> RowIntervals | None:
        if self.problem.is_empty:
            return None  # nothing to solve
        bound = simplify(bind_in_part(self.mask, {n: t.array for n, t in self.tables.items()}))
        return closed_form(bound, self._grid[0], self.scope())

    @property
    def bounds(self) -> Bounds | None:
        """The mask's closed form, found without laying out a tile."""
        if self._analysis:
            return self._analysis.bounds
        return self._closed.formula if self._closed else None

    def reads_at_most(self, most: int) -> bool:
        """Whether no row reads more than `most` tiles, for a mask that depends on q - k alone."""
        if self._analysis or self._closed is None:
            bounds = self.spans.bounds
            return int((bounds[..., 3] - bounds[..., 0]).sum(-1).max()) <= most
        return reads_at_most(self._closed, self._grid[0], self.scope(), most)

    @property
    def spans(self) -> Spans:
        """Records of four bounds per row of tiles, in key tiles."""
        return self.analysis.spans

    @property
    def exact(self) -> bool:
        """Every tile has its true kind; False when the budget ran out and some FULL or EMPTY are PARTIAL."""
        return self.analysis.exact

    @property
    def rows(self) -> int:
        """Tiles of queries."""
        return -(-self.q_len // self.block[0])

    @property
    def columns(self) -> int:
        """Tiles of keys."""
        return -(-self.kv_len // self.block[1])

    @cached_property
    def _runs(self) -> Runs:
        return from_records(self.spans.bounds, self.spans.count)

    @cached_property
    def runs(self) -> RunTable:
        """Tile ranges of one kind, in CSR: `.row_ptr .start .stop .kind`, in tiles of keys, half-open."""
        return _table(self._runs, self.spans, self.rows)

    @cached_property
    def transposed(self) -> Side:
        """The tiles by columns: for each tile of keys, the runs of query tiles that read it."""
        analysis = analyse(self.mask, self.problem, self.block, self.scope(), look=self.look, transposed=True)
        return Side(analysis.spans, self.columns)

    def __getstate__(self) -> dict[str, Any]:
        return own_state(self)

    @cached_property
    def counts(self) -> Counts:
        """How many tiles are empty, partial and full, over every batch entry and head."""
        width = self._runs.stop - self._runs.start
        uses_of = np.bincount(self.spans.slice_of.reshape(-1), minlength=len(self.spans.count))
        by = [int((width * uses_of[self._runs.slice])[self._runs.kind == kind].sum()) for kind in (PARTIAL, FULL)]
        total = self.batch * self.heads * self.rows * self.columns
        return Counts(total - sum(by), *by)

    def kinds(self) -> NDArray[np.uint8]:
        """Every tile, uint8 [batch, heads, q_tiles, k_tiles]: 0 empty, 1 partial, 2 full."""
        grid = np.full((len(self.spans.count), self.rows, self.columns), EMPTY, np.uint8)
        r = self._runs
        steps = np.zeros((len(self.spans.count), self.rows, self.columns + 1), np.int8)
        np.add.at(steps, (r.slice, r.row, r.start), r.kind.astype(np.int8))
        np.add.at(steps, (r.slice, r.row, r.stop), -r.kind.astype(np.int8))
        # kinds are 0 to 2: int8 holds their sums
        grid += np.cumsum(steps, axis=2, dtype=np.int8)[..., :-1].astype(np.uint8)
        return grid[self.spans.slice_of]

    @cached_property
    def questions(self) -> dict[str, Expr]:
        """The questions that the analysis asks of a rectangle `q0..q1` x `k0..k1` of positions, ends inclusive.
        They are `always`, `never`, and `mixed`: every tile holds both, and `tk` is the width of its narrowest tile."""
        return {"always": always(self.mask), "never": never(self.mask), "mixed": mixed(self.mask)}

    # -- facts ------------------------------------------------------------------------------------

    @cached_property
    def row_counts(self) -> NDArray[np.int64]:
        """Keys each query sees, int64 [batch, heads, q_len]; BudgetError when counting costs too much."""
        if self.problem.is_empty:
            return np.zeros((self.batch, self.heads, self.q_len), np.int64)
        grid, slice_of = self._grid
        return row_counts(self.mask, grid, self.scope(), self._spread)[slice_of]

    @cached_property
    def row_pairs(self) -> NDArray[np.int64]:
        """Visible pairs of each row of tiles, over every batch entry and head, int64 [rows]; BudgetError likewise."""
        if self.problem.is_empty:
            return np.zeros(self.rows, np.int64)
        grid, slice_of = self._grid
        counts = row_counts(self.mask, grid, self.scope(), self._spread)
        # counts of a slice, as often as it is read
        every = np.bincount(slice_of.reshape(-1), minlength=len(grid.b)) @ counts
        return np.add.reduceat(every, np.arange(0, self.q_len, self.block[0]))

    @cached_property
    def visible_pairs(self) -> int:
        """The exact number of visible (query, key) pairs of all batch entries and heads; BudgetError if too costly."""
        if self.problem.is_empty:
            return 0
        grid, slice_of = self._grid
        return int(pair_counts(self.mask, grid, self.scope(), self._spread)[slice_of].sum())

    @cached_property
    def rows_nonempty(self) -> bool | None:
        """Whether every query sees a key; None where the budget does not suffice to know."""
        if self.problem.is_empty:
            return not self.q_len  # without keys every query sees none
        grid, _ = self._grid
        return no_row_empty(self.mask, grid, self.scope(min(self.work, 1 << 28) + _ROW * grid.q_len * len(grid.b)))

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """Every table lookup of the mask, and whether its index stays inside where the rest does not decide."""
        grid, _ = grid_of(self.written, self.problem, self.block)
        written = bind_in_part(self.written, {n: t.array for n, t in self.tables.items()})
        return lookups(written, TRUE, grid, self.scope(1 << 27))

    def scope(self, work: int | None = None) -> Scope:
        """The values the analysis reads."""
        env = {**self.problem.named_sizes, **self.params}
        return Scope(env, self.tables, self.work if work is None else work)

    @cached_property
    def _grid(self) -> tuple[Grid, Array]:
        return grid_of(self.mask, self.problem, self.block)

    def _spread(self) -> Runs:
        """The runs of every slice of the grid: the spans have one slice for every different answer."""
        grid, slice_of = self._grid
        index = np.zeros(len(grid.b), np.int64)
        index[slice_of.reshape(-1)] = self.spans.slice_of.reshape(-1)
        r = self._runs
        parts = [np.flatnonzero(r.slice == s) for s in index]
        at = np.concatenate(parts) if parts else np.zeros(0, np.int64)  # concatenate wants an array
        owner = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        return Runs(owner, r.row[at], r.start[at], r.stop[at], r.kind[at])

    @property
    def density(self) -> float:
        """The share of tiles that are read."""
        read = self.counts.partial + self.counts.full
        return read / max(read + self.counts.empty, 1)  # 1 where there is no tile: 0 / 0

    @cached_property
    def facts(self) -> Facts:
        """Facts that a kernel may rely on: tile ranges of a row, gaps, formulas, and how the layout was found."""
        r = self._runs
        line = r.slice * self.rows + r.row
        gaps = (line[1:] == line[:-1]) & (r.start[1:] != r.stop[:-1])
        named = (*sorted(uses(self.mask) & {"b", "h"}), *sorted({*self.params, *self.tables}))
        most, analysis = int(np.bincount(line, minlength=1).max(initial=0)), self.analysis
        return Facts(most, not gaps.any(), analysis.bounds is not None, named, analysis.method, analysis.settled, self)

    @overload
    def explain(self, q: int, k: int, b: At = None, h: At = None) -> Explanation: ...
    @overload
    def explain(self, *, tile: tuple[int, int], b: At = None, h: At = None) -> TileExplanation: ...

    def explain(
        self, q: At = None, k: At = None, b: At = None, h: At = None, *, tile: tuple[int, int] | None = None
    ) -> Explanation | TileExplanation:
        """Explain why query q may or may not see key k, in global positions: the clause of the mask and its values.

        `explain(tile=(i, j))` says why the tile in row i and column j of this layout is empty, partial or full.
        b and h are global, too; where they are not given they are the first of the layout.
        """
        b, h = self.origin[0] if b is None else b, self.origin[1] if h is None else h
        values = {**self.scope().env, "b": b, "h": h}
        tables = {n: t.array for n, t in self.tables.items()}
        if q is not None and k is not None and tile is None:
            for name, at, size in zip("bhqk", (b, h, q, k), self.sizes, strict=True):
                if not is_start(at) or np.ndim(at) or at >= size:
                    raise ShapeError(f"{name} = {at} is outside 0..{size - 1}\n  positions are global")
            return explain(self.written, {**values, "q": q, "k": k}, tables, self.shown)
        if tile is None or q is not None or k is not None:
            raise ParameterError("explain takes a position or a tile: explain(q=300, k=17), explain(tile=(2, 0))")
        if np.shape(tile) != (2,) or np.asarray(tile).dtype.kind not in "iu":  # -1 is refused below
            raise ShapeError(f"tile is {tile}\n  it is (row, column), counted in tiles of this layout")
        (rows, columns), cut = self._tile(tile, b, h)
        return explain_tile(self.written, {**values, "q": rows, "k": columns}, tables, self.shown, cut=cut)

    def _tile(self, tile: tuple[int, int], b: int, h: int) -> tuple[tuple[Array, Array], bool]:
        """The positions of a tile that are inside the lengths, and whether that is not all of it."""
        names, starts = ("b", "h", "tile row", "tile column"), (*self.origin[:2], 0, 0)
        counts = self.batch, self.heads, self.rows, self.columns
        for name, at, start, n in zip(names, (b, h, *tile), starts, counts, strict=True):
            if not start <= at < start + n:
                raise ShapeError(f"{name} {at} is outside this layout, which has {start}..{start + n - 1}")
        if self.block[0] * self.block[1] > _TILE:
            text = f"a tile of {self.block[0]:,} x {self.block[1]:,} positions is more than explain looks at, "
            raise BudgetError(f"{text}{_TILE:,}\n  lay the mask out in smaller tiles, or explain a position")
        out, cut = [], False
        for at, size, start, n in zip(tile, self.block, self.origin[2:], (self.q_len, self.kv_len), strict=True):
            # one start for all batch entries, or one for each
            first = int(np.broadcast_to(start, (self.batch,))[b - self.origin[0]])
            stop = min((at + 1) * size, n)
            cut |= stop < (at + 1) * size
            out.append(np.arange(first + at * size, first + stop))
        return (out[0], out[1]), cut


@dataclass(frozen=True)
class Side:
    """One way through the tiles: `spans`, and the same as CSR `runs`."""

    spans: Spans
    rows: int

    @cached_property
    def runs(self) -> RunTable:
        return _table(from_records(self.spans.bounds, self.spans.count), self.spans, self.rows)


def _table(runs: Runs, spans: Spans, rows: int) -> RunTable:
    lines = len(spans.count) * rows
    row_ptr = np.zeros(lines + 1, np.int64)
    np.cumsum(np.bincount(runs.slice * rows + runs.row, minlength=lines), out=row_ptr[1:])
    start, stop = (x.astype(np.int32) for x in (runs.start, runs.stop))
    return RunTable(row_ptr, start, stop, runs.kind.astype(np.uint8), spans.slice_of)


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
    def counted(self) -> str:
        """The visible pairs in words, or the reason why they are not counted."""
        pairs = self.visible_pairs
        return f"{pairs:,} pairs" if pairs is not None else "not counted: too many pairs to look at"

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
        inside = [e for e in parts if e.op != "or" and (sides_of_ids(e) or any(map(_of_document, walk(e))))]
        if not inside:
            return ()
        document, at = ("document_by_batch", "b, k") if any("b" in uses(e) for e in inside) else ("document", "k")
        below = {n: None for e in parts if e.op == "or" for n in walk(e) if n.op in ("lt", "le")}
        first = [n for n in below if n.args[0] is var("k") and n.args[1].op in ("lit", "param")]
        text = f"shows keys of the first document alone; for the first keys of each write `{document}(off, m)` with"
        return tuple(f"`{n!r}` {text} `sinks({n.args[1]!r})` in m, or `k - start[{at}] < {n.args[1]!r}`" for n in first)

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
        rows = {
            True: "every query sees a key",
            False: "some query sees no key",
            None: "the budget does not suffice to know whether every query sees a key",
        }
        lines = {
            "rows": rows[self.rows_nonempty],
            "runs": f"at most {self.max_runs_per_row} per row of tiles" + (", contiguous" if self.contiguous else ""),
            "found by": self.method + (f", {self.settled} tiles looked at" if self.settled else ""),
            "uses": ", ".join(self.uses) or "positions only",
        }
        if not self.exact:
            left = self.layout.analysis.undecided
            lines["exact"] = f"no: {left:,} tiles count as partial without being looked at"
        lines["visible"] = self.counted
        if self.tables:
            lines["tables"] = "\n".join(f"{name}: {facts}" for name, facts in self.tables.items())
        if self.lookups:
            open_ = [str(one) for one in self.lookups if not one.proved]
            lines["lookups"] = "\n".join(open_) or "all stay inside their tables"
        if self.hints:
            lines["hint"] = "\n".join(self.hints)
        return "\n".join(f"{name:9} " + value.replace("\n", "\n" + 10 * " ") for name, value in lines.items())


def _of_document(e: Expr) -> bool:
    """Whether this is the segment of a position, or the start of its document in `document_by_batch`."""
    return e.op == "segment" or (e.op == "reduce" and e.name[0] == "max")


Values = Mapping[str, Any]
NO_TABLES: Values = MappingProxyType({})


def check_reach(
    mask: Expr, readers: Sequence[Expr], scalars: Values, tables: Values, problem: Problem, shapes: Values = NO_TABLES
) -> None:
    """Refuse a table that a bare coordinate of `readers` runs past the end of, at a position that `mask` shows and
    where the lookup counts. Refuse offsets that do not hold a bare coordinate whose segment counts. Elsewhere lookups
    clamp. `shapes` stand for tables whose values are not known; a lookup that such values guard is not checked."""
    stops = dict(zip("bhqk", problem.ends, strict=True))
    starts = {c: np.min(x) for c, x in zip("bhqk", problem.origin, strict=True)}
    known = {**tables, **shapes}
    env, known_tables = {**problem.named_sizes, **scalars}, {n: Table(t) for n, t in known.items()}
    scope = Scope(env, known_tables, _STEPS)
    visible = bind_in_part(mask, known)
    diagonal = {var("k"): var("q")} if mask is eq(var("q"), var("k")) else {}  # there more guards are sure
    for e in readers:
        reader = bind_in_part(e, known)
        grid, _ = grid_of(reader, problem)
        left = short_tables(reader, known, stops)
        shown: dict[Any, bool | None] = {}
        while left and len(shown) != len(left):  # a lookup that never leaves its table may guard others
            when = guards(reader, {node for _, node, _, _ in left}, shapes, grid, scope)
            shown = dict.fromkeys(left)
            for short in left:
                coordinate, node, _, have = short
                beyond = simplify(conj(visible, substitute(when[node], diagonal), var(coordinate) >= have))
                if not names_of(beyond).keys() & shapes.keys():
                    analysis = analyse(beyond, problem, (128, 128), Scope(env, known_tables))
                    # not known, and so not refused
                    shown[short] = bool(analysis.spans.count.any()) if analysis.exact else None
            left = [x for x in left if shown[x] is not False]
        for coordinate, node, axis, have in filter(shown.get, left):
            need, name, shape = stops[coordinate], node.name, known[node.name].shape
            advice = f"give {need}, or hide what lies beyond: `{coordinate} < {have} & ...`"
            if coordinate == "b" and have == 1 and len(shape) == 2:
                advice = f"one row for all batch entries is a table of one axis: `same({name})`, or `{name}[q]`"
            elif len(shape) == 2 and (shape[1 - axis], have) == (need, stops.get(node.args[1 - axis].name)):
                advice = f"its axes are the other way round: give {name}.T"
            text = f"table `{name}` has {have} entries on axis {axis} and is read at `{coordinate}` = 0..{need - 1}; "
            raise ParameterError(f"{text}{advice}")
    for e in readers:
        segments = segments_of_coordinates(e, tables)
        outside = {n: stops[c] for c, n, first, last in segments if starts[c] < first or stops[c] > last}
        if not outside or names_of(e).keys() & shapes.keys():
            continue
        reader, seen = bind_in_part(e, tables), TRUE if e.type is BOOL else visible
        grid, _ = grid_of(make("both", (reader, seen)), problem)
        for one in lookups(reader, seen, grid, scope):
            if one.offsets and one.witness and one.table in outside:
                advice = _advice(one.table, tables[one.table], outside[one.table])
                raise ParameterError(f"{one}\n  {advice}")


def short_tables(e: Expr, tables: Mapping[str, Array], sizes: Mapping[str, int]) -> list[tuple[str, Expr, int, int]]:
    """(coordinate, lookup, axis, its length) wherever a bare coordinate runs past the end of a table."""
    lookups = [node for node in walk(e) if node.op == "lookup"]
    return [
        (index.name, node, axis, have)
        for node in lookups
        for axis, (index, have) in enumerate(zip(node.args, tables[node.name].shape, strict=True))
        if index.op == "var" and sizes.get(index.name, 0) > have
    ]


def segments_of_coordinates(e: Expr, tables: Mapping[str, Array]) -> list[tuple[str, str, int, int]]:
    """(coordinate, offsets, the first one, the last one) wherever an Expr asks for the segment of a coordinate."""
    read = [(n.args[0].name, n.name) for n in walk(e) if n.op == "segment" and n.args[0].op == "var"]
    read = [(c, name) for c, name in read if c in COORDINATES and name in tables]
    return [(c, name, int(tables[name][0]), int(tables[name][-1])) for c, name in read]


def _advice(name: str, offsets: Array, stop: int) -> str:
    """The remedy for offsets that do not hold all positions below `stop`."""
    lengths = looks_like_lengths(name)
    if offsets[0] <= 0:
        text = f"`{name}[{len(offsets) - 1}]` = {offsets[-1]} is where the last segment ends: give the end, "
        return f"{text}[*{name}, {stop}], or hide what lies beyond"
    if offsets.sum() == stop:
        return lengths
    start = f"offsets begin with 0: [0, *{name}]"
    return start if offsets[-1] == stop else f"{start}; or {lengths}"


def check_block(block: tuple[int, ...], problem: Problem) -> None:
    """Refuse tiles that cannot be laid out."""
    if len(block) != 2 or not all(map(is_positive, block)):
        raise ShapeError(f"block is {block}\n  tile sizes are two positive integers (queries, keys), in tokens")
    for length, tile in ((problem.q_len, block[0]), (problem.kv_len, block[1])):
        if (tiles := length // int(tile)) >= 1 << 31:  # tile ranges are int32
            raise ShapeError(f"{length:,} tokens in tiles of {tile} are {tiles:,} tiles\n  take larger tiles")
