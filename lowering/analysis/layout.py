"""Makes spans from a simplified mask and lengths: closed form where there is one, coarse to fine elsewhere.

The layout of a decoding step has few queries, one row of tiles, and the intervals of `rows` in Python's integers. A
step of decoding has new positions and lengths and nothing else, and numpy is slow on arrays of one element.
`decode_spans` computes once what all steps share; `DecodeSpans.spans` is one pass over a list of operations. The
records are those of `analyse`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import EvaluationError, LoweringError
from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import TRUE, Expr, lit, substitute, uses, var, walk
from frisket.dsl.types import FLOAT
from frisket.dsl.work import outside, steps
from frisket.grammar.memo import memo
from frisket.lowering.plan import Bounds, Problem, Spans
from frisket.lowering.simplify import simplify

from .rows import RowIntervals, by_query, row_intervals, sweep
from .runs import Runs, fitted, from_boxes, merge, records, share
from .table import Table
from .tiles import FULL, PARTIAL, Grid, Scope, Spent, classify
from .tiles import outside as outside_of

Array = NDArray[Any]
WRITTEN = 1 << 18  # steps of reductions that kernels write out
ENDLESS = 1 << 40  # keys before and after a row, more than any call has
UNDERSTOOD = 1 << 11  # steps of reductions that are reasoned about


@dataclass(frozen=True, eq=False)
class AnalysedMask:
    """A mask with its values: simplified for the analysis, and as it was written for explanations."""

    simplified: Expr
    written: Expr
    params: Mapping[str, Any]
    tables: Mapping[str, Table]
    shown: Expr | None = None  # with calls of the library, as the user wrote it; None: `written`


@dataclass(frozen=True)
class Analysis:
    """The result of an analysis, and the method used."""

    spans: Spans
    bounds: Bounds | None  # the closed form, when the mask has one
    method: str  # "closed form", "bounds", "query by query", "coarse to fine"
    exact: bool  # no tile was left PARTIAL for want of budget
    settled: int  # tiles decided by looking at their elements
    looked_at: int  # elements looked at
    steps: int  # taken of the budget
    undecided: int  # tiles left PARTIAL


def bind(e: Expr, tables: Mapping[str, Any], most: int = WRITTEN) -> Expr:
    """The mask with extents as the sizes of the bound tables and reductions written out, as kernels need them.

    Raises `LoweringError` for reductions that take more than `most` steps a position."""
    e = _sized(e, tables)
    if not any(n.op == "reduce" for n in walk(e)):
        return e
    if (cost := steps(e)) > most:
        raise LoweringError(
            f"the reductions here, written out, are {cost:,} steps at every position, more than the {most:,} of a "
            "kernel\n  let them run over fewer values, or put the inner one in a table"
        )
    return unroll(e)


def bind_in_part(e: Expr, tables: Mapping[str, Any]) -> Expr:
    """The mask bound for an analysis. Reductions too long to reason about stay, and tiles they decide are looked at."""
    e = _sized(e, tables)
    outer = [n for n in outside(e) if n.op == "reduce"]
    return substitute(e, {n: unroll(n) for n in outer}) if outer and steps(e) <= UNDERSTOOD else e


def _sized(e: Expr, tables: Mapping[str, Any]) -> Expr:
    sizes = {n: lit(int(np.shape(tables[n.name[0]])[n.name[1]])) for n in walk(e) if n.op == "extent"}
    return substitute(e, sizes) if sizes else e


def swap(e: Expr) -> Expr:
    """The mask with queries and keys exchanged: rows of the result are columns of the mask."""
    return substitute(e, {var("q"): var("k"), var("k"): var("q")})


def analyse(
    mask: Expr | None,
    problem: Problem,
    block: tuple[int, int],
    scope: Scope,
    *,
    look: bool = True,
    transposed: bool = False,
) -> Analysis:
    """The spans of `mask` over queries `[q, q + q_len)` and keys `[k, k + kv_len)` of the whole problem.

    `scope` has the values that the mask reads and the steps that the analysis may take; past them tiles stay PARTIAL
    and `exact` is False. `transposed` gives rows of key tiles whose records hold query tiles. `look=False`: no elements
    are looked at.
    """
    expr = TRUE if mask is None else mask
    expr = simplify(bind_in_part(expr, {n: t.array for n, t in scope.tables.items()}))
    if problem.is_empty:  # without a query or a key there is no tile to ask about
        length, side = (problem.kv_len, block[1]) if transposed else (problem.q_len, block[0])
        return _nothing(-(-length // side), problem.batch, problem.heads)
    grid, slice_of = grid_of(expr, problem, block)
    if transposed:
        expr = simplify(swap(expr))
        grid = Grid(problem.kv_len, problem.q_len, (block[1], block[0]), grid.b, grid.h, grid.k, grid.q)
    formula = None
    intervals = _intervals(expr, grid, scope)
    if intervals is not None and (records_by_row := _by_row(intervals, grid, scope)) is not None:
        tile_records, formula = records_by_row, intervals.formula
        method = "closed form" if formula is not None else "bounds"
    elif intervals is not None and _reads(expr) and (runs := by_query(intervals, grid, scope)) is not None:
        tile_records, method = _recorded(runs, grid, scope), "query by query"
    else:
        tile_records, method = _recorded(from_boxes(classify(expr, grid, scope, look)), grid, scope), "coarse to fine"
    spans = share(*tile_records, slice_of)
    counts = scope.settled, scope.looked_at, scope.spent, scope.undecided
    return Analysis(spans, formula, method, not scope.undecided, *counts)


def closed_form(expr: Expr, grid: Grid, scope: Scope) -> RowIntervals | None:
    """The intervals of a mask, bound and simplified, whose spans `analyse` writes as a formula, found without a row of
    tiles. None where it has none, though one may leave 64 bits in a row."""
    intervals = _intervals(expr, grid, scope)
    has_formula = intervals is not None and intervals.formula is not None and _holds(intervals, grid, scope)
    return intervals if has_formula else None


def reads_at_most(intervals: RowIntervals, grid: Grid, scope: Scope, most: int) -> bool:
    """Whether no row reads more than `most` tiles, for a mask in closed form that depends on q - k alone. A row with
    endless keys around it reads the most; only where that row reads more are all rows asked."""
    (bq, bk), k = grid.block, grid.k[:, None]
    one = {**_rows(replace(grid, q_len=bq)), "k0": k - ENDLESS, "k1": k + ENDLESS}
    for every in (False, True):
        first, last = scope.values(intervals.visible[0], _rows(grid) if every else one)
        if (((last - k) // bk - (first - k) // bk < most) | (last < first)).all():
            return True
    return False


def _intervals(expr: Expr, grid: Grid, scope: Scope) -> RowIntervals | None:
    intervals = row_intervals(expr)
    holds = intervals is not None and (intervals.needs is TRUE or scope.value(intervals.needs, _slices(grid)).all())
    return intervals if holds else None


def _recorded(runs: Runs, grid: Grid, scope: Scope) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The records of runs; in a row with too many runs, one PARTIAL record stands for the last of them."""
    runs, widened = fitted(runs, len(grid.b) * grid.rows, grid.rows)
    scope.undecided += widened
    return records(runs, len(grid.b), grid.rows)


def _nothing(rows: int, batch: int, heads: int) -> Analysis:
    """The analysis of a layout without queries or without keys."""
    bounds, count = np.zeros((1, rows, 1, 4), np.int32), np.zeros((1, rows), np.int32)
    return Analysis(Spans(bounds, count, np.zeros((batch, heads), np.int32)), None, "nothing to see", True, 0, 0, 0, 0)


def grid_of(expr: Expr, problem: Problem, block: tuple[int, int] = (1, 1)) -> tuple[Grid, Array]:
    """The grid with one slice for every (b, h) the mask can tell apart."""
    batch, heads = problem.batch, problem.heads
    b0, h0, *starts = problem.origin
    used = uses(expr)
    shifts = [np.broadcast_to(np.asarray(x, np.int64), (batch,)) for x in starts]
    # sequences that begin elsewhere see other tiles, though the mask does not read b
    per_batch = "b" in used or any((s != s[0]).any() for s in shifts)
    nb, nh = batch if per_batch else 1, heads if "h" in used else 1
    b, h = np.divmod(np.arange(nb * nh), nh)
    grid = Grid(problem.q_len, problem.kv_len, block, b0 + b, h0 + h, shifts[0][b], shifts[1][b])
    rows, columns = np.arange(batch) % nb if per_batch else np.zeros(batch, int), np.arange(heads) % nh
    return grid, rows[:, None] * nh + columns[None, :]


def _rows(grid: Grid) -> dict[str, Array]:
    """The first and last query of every row of tiles, and the keys of the crop: [slices, rows]."""
    start = np.arange(grid.rows) * grid.block[0]
    stop = np.minimum(start + grid.block[0], grid.q_len)
    b, h, q, k = (x[:, None] for x in (grid.b, grid.h, grid.q, grid.k))
    return {"b": b, "h": h, "q0": q + start, "q1": q + stop - 1, "k0": k, "k1": k + grid.kv_len - 1}


def _reads(expr: Expr) -> bool:
    """Whether a table is read along the sequence: numbers alone make few boxes, which cost less than queries."""
    return any(n.op in ("lookup", "segment") and uses(n) & {"q", "k"} for n in walk(expr))


def _slices(grid: Grid) -> dict[str, Array]:
    return {"b": grid.b[:, None], "h": grid.h[:, None]}


def _holds(intervals: RowIntervals, grid: Grid, scope: Scope) -> bool:
    """Whether the keys of a row of tiles are one interval per term, over the queries of every slice."""
    at = _slices(grid)
    unsure = [value for value, sure in intervals.rises if not (sure is TRUE or scope.value(sure, at).all())]
    looks = bool(unsure) or any("q" in uses(e) for a in intervals.diagonals for e in (*a.lows, *a.highs))
    exprs = [*unsure, *(e for a in intervals.diagonals for e in (*a.lows, *a.highs))]
    # without steps left to look at every query, tiles are asked instead
    if looks and not scope.afford(len(grid.b) * grid.q_len * sum(map(steps, exprs))):
        return False
    # distances without q are the same for every query
    at["q"] = grid.q[:, None] + np.arange(grid.q_len if looks else 1)
    shape = at["q"].shape
    arrays = (scope.value(e, at) for e in unsure)
    if any((x[..., 1:] < x[..., :-1]).any() for x in arrays):  # a difference may leave 64 bits
        return False
    for diagonal in intervals.diagonals:
        ends = [[np.broadcast_to(scope.value(e, at), shape) for e in side] for side in (diagonal.lows, diagonal.highs)]
        low = np.max([x.max(axis=1) for x in ends[0]], axis=0)
        if (low > np.min([x.min(axis=1) for x in ends[1]], axis=0)).any():
            return False
    return True


def _by_row(intervals: RowIntervals, grid: Grid, scope: Scope) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """The tile ranges of rows whose keys are one interval per term. None where keys are not, or an end of an interval
    leaves 64 bits, which the mask itself need not."""
    try:
        if not (intervals.rowwise and _holds(intervals, grid, scope)):
            return None
        return _closed(intervals, grid, scope) if intervals.full is not None else _swept(intervals, grid, scope)
    except (EvaluationError, Spent):
        return None


def _closed(intervals: RowIntervals, grid: Grid, scope: Scope) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    env = _rows(grid)
    shape, k0, bk = (len(grid.b), grid.rows), env["k0"], grid.block[1]
    assert intervals.full is not None
    ends = scope.values([*intervals.visible[0], *intervals.full], env)
    first, last, full_first, full_last = (np.broadcast_to(x, shape) for x in ends)
    lo, hi = first - k0, last - k0  # a million tokens are ten thousand rows, so arrays are changed where they lie
    full_lo, full_hi = full_first - k0, full_last - k0
    hi += bk
    full_lo += bk - 1
    full_hi += 1
    for x in (lo, hi, full_lo, full_hi):
        x //= bk
    np.copyto(hi, lo, where=last < first)  # an empty row: no tile from lo on
    np.minimum(np.maximum(full_lo, lo, out=full_lo), hi, out=full_lo)
    np.minimum(np.maximum(full_hi, full_lo, out=full_hi), hi, out=full_hi)
    none = full_lo >= full_hi
    if grid.q_len % grid.block[0]:  # the last row of tiles reaches outside: it has no FULL tile
        none[:, -1] = True
    out, count = np.empty((*shape, 1, 4), np.int32), (hi > lo).astype(np.int32)
    for i, end in enumerate((lo, full_lo, full_hi, hi)):
        # without a FULL tile the record is PARTIAL from lo to hi
        if end is not lo:
            np.copyto(end, hi, where=none)
        out[:, :, 0, i] = end
    if not count.all():
        out *= count[..., None, None]  # records that are not meant are zero
    return out, count


def _swept(intervals: RowIntervals, grid: Grid, scope: Scope) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    env = _rows(grid)
    shape, k0, bk = (len(grid.b), grid.rows), env["k0"], grid.block[1]
    yes, no = intervals.visible, intervals.hidden or ()
    flat = scope.values([e for pair in (*yes, *no) for e in pair], env)
    tiles = []
    for first, last in zip(flat[0::2], flat[1::2], strict=True):
        start = np.broadcast_to((first - k0) // bk, shape)
        stop = np.where(last >= first, (last - k0) // bk + 1, start)
        tiles.append(np.stack([start, stop], axis=-1).reshape(-1, 2))
    both = np.stack(tiles, axis=1)
    seen, hidden = both[:, : len(yes)], both[:, len(yes) :]
    hidden = np.concatenate([hidden, outside_of(grid)[:, None]], axis=1)
    row, start, stop, kind = sweep(seen, hidden, grid.columns)
    return records(merge(row // grid.rows, row % grid.rows, start, stop, kind), len(grid.b), grid.rows)


SLICES = 64  # more of them are arrays
_BEYOND = 1 << 62
_STEPS: dict[str, Callable[..., Any]] = (
    {op: getattr(operator, op) for op in "neg abs add sub mul lt le gt ge eq ne xor".split()}
    | {"not": operator.not_, "min": min, "max": max, "int": int, "where": lambda c, x, y: x if c else y}
    | {"and": lambda *a: all(a), "or": lambda *a: any(a)}
    | {"floordiv": lambda x, y: x // y if y else 0, "mod": lambda x, y: x % y if y else 0}
)
_FACTS = ("is_sorted", "has_runs")  # of tables: the same at every step
Record = list[int]
Row = list[Record]


class IntegerProgram:
    """Exprs in Int and Bool as operations on Python's integers; `KeyError` for an operation without one."""

    def __init__(self, parts: Sequence[Expr], scope: Scope) -> None:
        nodes = list(walk(*parts))
        place = {e: i for i, e in enumerate(nodes)}
        self.leaves: list[tuple[int, str]] = []
        self.steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        self.start: list[Any] = [None] * len(nodes)
        for i, e in enumerate(nodes):
            if e.op == "lit":
                self.start[i] = e.name
            elif e.op in _FACTS:
                self.start[i] = bool(scope.value(e, {}))
            elif e.op not in ("var", "param"):
                self.steps.append((i, _operation(e, scope), tuple(place[a] for a in e.args)))
            elif e.name in scope.env:
                x = scope.env[e.name]
                # one by one, Python's integers are faster than numpy's, and do not wrap
                self.start[i] = x.item() if isinstance(x, np.generic | np.ndarray) else x
            else:
                self.leaves.append((i, str(e.name)))
        if any(e.type is FLOAT for e in nodes):
            raise KeyError("Float")
        self.answers = [place[e] for e in parts]

    def __call__(self, env: Mapping[str, Any]) -> list[Any]:
        values = self.start.copy()
        for i, name in self.leaves:
            values[i] = env[name]
        for i, run, args in self.steps:
            values[i] = run(*[values[a] for a in args])
        return [values[i] for i in self.answers]


def _operation(e: Expr, scope: Scope) -> Callable[..., Any]:
    if e.op in _STEPS:
        return _STEPS[e.op]
    if e.op == "lookup":
        table = scope.arrays[e.name]
        ends = [n - 1 for n in table.shape]
        return lambda *at: table[tuple(min(max(i, 0), n) for i, n in zip(at, ends, strict=True))].item()
    hook = scope.hooks()[e.op]

    @memo(64, weigh=200)  # first and last query of a row are often one
    def call_hook(*args: Any) -> Any:
        return hook(e, *map(np.asarray, args)).item()

    return call_hook


@dataclass(frozen=True)
class DecodeSpans:
    """A mask prepared for rows of few queries."""

    formula: Bounds | None
    axes: frozenset[str]  # "b", "h" if the mask knows them
    terms: int  # visible ones; 0 where the keys that every query sees have a separate form
    always: IntegerProgram | None  # conditions that hold for the whole call
    ends: IntegerProgram  # of intervals, first and last in turn
    rises: IntegerProgram  # values that must not fall from query to query
    diagonals: tuple[tuple[IntegerProgram, int], ...]  # lows, then highs, and how many lows there are

    def spans(self, problem: Problem, block: tuple[int, int]) -> Spans | None:
        """The spans of one row of tiles; None where keys are not one interval."""
        batch, heads, q_len, kv_len = problem.lengths
        b0, h0, *starts = problem.origin
        qs, ks = ([x] * batch if type(x) is int else x.tolist() for x in starts)
        per_batch = "b" in self.axes or any(x != qs[0] for x in qs) or any(x != ks[0] for x in ks)
        nb, nh = batch if per_batch else 1, heads if "h" in self.axes else 1
        if q_len > block[0] or nb * nh > SLICES:
            return None
        env: dict[str, Any] = problem.named_sizes
        slots: dict[Any, int] = {}
        slice_of = np.zeros((batch, heads), np.int32)
        for b in range(nb):
            for h in range(nh):
                env |= {"b": b0 + b, "h": h0 + h, "k0": ks[b], "k1": ks[b] + kv_len - 1}
                row = self._row(env, qs[b], q_len, kv_len, block)
                if row is None:
                    return None
                slot = slots.setdefault(tuple(map(tuple, row)), len(slots))
                if slot:
                    slice_of[b if per_batch else slice(None), h if nh > 1 else slice(None)] = slot
        most = max(1, *map(len, slots))
        bounds = np.array([[[*row, *((0, 0, 0, 0),) * (most - len(row))]] for row in slots], np.int32)
        return Spans(bounds, np.array([[len(row)] for row in slots], np.int32), slice_of)

    def _row(self, env: dict[str, Any], q: int, q_len: int, kv_len: int, block: tuple[int, int]) -> Row | None:
        env |= {"q0": q, "q1": q + q_len - 1}
        if (self.always is not None and not all(self.always(env))) or not self._holds(env, q, q_len):
            return None
        ends, k0, bk, columns = self.ends(env), env["k0"], block[1], -(-kv_len // block[1])
        # arrays would leave 64 bits: both ways have to give the same spans
        if any(abs(x) > _BEYOND for x in ends):
            return None
        cut = q_len % block[0] > 0
        if not self.terms:
            return _one_interval([x - k0 for x in ends], bk, cut)
        intervals = zip(ends[::2], ends[1::2], strict=True)
        pairs = [((a - k0) // bk, (z - k0) // bk + 1) if z >= a else (0, 0) for a, z in intervals]
        outside = [(0, columns)] if cut else [(columns - 1, columns)] if kv_len % bk else []
        return _recorded_row(_runs(pairs[: self.terms], [*pairs[self.terms :], *outside], columns))

    def _holds(self, env: dict[str, Any], q: int, q_len: int) -> bool:
        """Whether the keys of these queries are one interval per term."""
        at = [env | {"q": q + i} for i in range(q_len)] if self.diagonals or self.rises.answers else []
        values = [self.rises(e) for e in at] if q_len > 1 and self.rises.answers else []
        if any(y < x for a, z in pairwise(values) for x, y in zip(a, z, strict=True)):
            return False
        for program, lows in self.diagonals:
            distances = [program(e) for e in at]
            if max(max(x[:lows]) for x in distances) > min(min(x[lows:]) for x in distances):
                return False
        return True


def decode_spans(mask: Expr, params: Mapping[str, Any], tables: Mapping[str, Table]) -> DecodeSpans | None:
    """The simplified `mask` prepared for rows of few queries; None where its terms are not bounds on integers."""
    intervals = row_intervals(mask)
    if intervals is None or not intervals.rowwise:
        return None
    scope = Scope(params, tables)
    try:
        return DecodeSpans(
            intervals.formula,
            uses(mask) & {"b", "h"},
            0 if intervals.full is not None else len(intervals.visible),
            None if intervals.needs is TRUE else IntegerProgram([intervals.needs], scope),
            IntegerProgram(_ends(intervals), scope),
            IntegerProgram([value for value, sure in intervals.rises if sure is not TRUE], scope),
            tuple((IntegerProgram([*a.lows, *a.highs], scope), len(a.lows)) for a in intervals.diagonals),
        )
    except (KeyError, EvaluationError):
        return None


def _ends(intervals: RowIntervals) -> list[Expr]:
    if intervals.full is not None:
        return [*intervals.visible[0], *intervals.full]
    return [e for pair in (*intervals.visible, *(intervals.hidden or ())) for e in pair]


def _one_interval(ends: Sequence[int], bk: int, cut: bool) -> Row:
    """One span record, from the first and last key that any query sees and that all see; as `layout._closed` makes."""
    first, last, full_first, full_last = ends
    lo, hi = first // bk, last // bk + 1
    if last < first or hi <= lo:
        return []
    full_lo = min(max(-(-full_first // bk), lo), hi)
    full_hi = min(max((full_last + 1) // bk, full_lo), hi)
    return [[lo, hi, hi, hi]] if cut or full_lo >= full_hi else [[lo, full_lo, full_hi, hi]]


def _runs(
    seen: Sequence[tuple[int, int]], hidden: Sequence[tuple[int, int]], columns: int
) -> list[tuple[int, int, int]]:
    """The maximal runs (start, stop, kind) of visible tiles: `rows.sweep`."""
    cuts = sorted({min(max(x, 0), columns) for pair in (*seen, *hidden) for x in pair})
    out: list[tuple[int, int, int]] = []
    for start, stop in pairwise(cuts):
        if any(a <= start < z for a, z in seen):
            kind = PARTIAL if any(a <= start < z for a, z in hidden) else FULL
            if out and out[-1][1:] == (start, kind):
                start = out.pop()[0]
            out.append((start, stop, kind))
    return out


def _recorded_row(runs: Sequence[tuple[int, int, int]]) -> Row:
    """The records of runs: `runs.records`."""
    out: Row = []
    end, place = -1, 0  # where the run before stops, and how many runs touch one another up to here
    for start, stop, kind in runs:
        place = place + 1 if start == end else 0
        if not place or (kind == FULL and place != 1):
            out.append([start, start if kind == FULL else stop, stop, stop])
        elif kind == FULL:
            out[-1][1:] = start, stop, stop
        else:
            out[-1][3] = stop
        end = stop
    return out
