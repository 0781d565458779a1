"""The way from a mask and a score mod with values to the inputs of kernels, in the order of docs/how-it-works.md.

`simplified_program` brings a program into one form, once for all lengths. `work` lays its tiles out for a problem and a
tile size and makes the `LoopPlan`, with values for its slots and tables. This is a `TiledPlan`, which calls run, and
which `Attention.stages`, `frisket emit`, `frisket explain` and FRISKET_SHOW print. `loop_plan` is the last step, shared
with plans whose tables a device holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import decided
from frisket.dsl.ir import COMPARISONS, Expr, Named, lit, names_of, substitute, walk
from frisket.dsl.transfer import finite
from frisket.dsl.types import INT
from frisket.grammar.memo import Memo, memo

from .analysis.decide import sees_itself
from .analysis.layout import AnalysedMask, DecodeSpans, bind, decode_spans
from .analysis.reach import SMALLEST, SMALLEST_DOUBLE, narrowed
from .analysis.solve import facts_of
from .analysis.table import Table
from .analysis.tiling import Tiling, check_block, check_reach, segments_of_coordinates, short_tables
from .plan import MAX_DECODE_QUERIES, RATE, SEED, Bounds, LoopPlan, Problem, ProgramFacts, Sizes, Spans, make_plan
from .simplify import ProgramExprs, prepare, simplify

Array = NDArray[Any]
CACHED = 256  # plans kept
Sane = Mapping[str, bool]  # whether each Float table is without infinities and NaN
UNDRAWN = {SEED: 0, RATE: 0.0}  # each call has other values


class BoundProgram(Protocol):
    """A mask and a score mod with values, which compares and hashes by value: a `CallProgram` of runtime."""

    @property
    def exprs(self) -> ProgramExprs: ...
    @property
    def double(self) -> bool: ...
    @property
    def reading(self) -> Sequence[Expr]: ...
    @property
    def scalars(self) -> Named: ...
    @property
    def tables(self) -> Mapping[str, Array]: ...
    @property
    def expanded(self) -> str: ...
    @property
    def layout_type(self) -> type[Tiling]: ...
    def scored(self, exprs: ProgramExprs) -> ProgramExprs: ...
    def plan_arguments(self, tables: Named, dropout: bool) -> dict[str, Any]: ...
    def require_bound(self) -> None: ...


@dataclass(frozen=True, eq=False)
class SimplifiedProgram:
    """A program whose values the host knows, simplified: the part of a plan that is the same at every length."""

    program: BoundProgram
    simplified: ProgramExprs
    analysed: Expr  # the mask as the analysis takes it
    rules: Counter[str]
    sane: Sane
    scalars: Named
    arrays: Mapping[str, Array]
    tables: Mapping[str, Table]  # the mask's

    def layout(self, problem: Problem, block: tuple[int, int]) -> Tiling:
        """The tiles of the mask, laid out when they are first asked for."""
        return self.program.layout_type(self.mask, problem, block)

    @cached_property
    def mask(self) -> AnalysedMask:
        """The mask with the values that it reads."""
        visible = self.simplified.visible
        read = names_of(visible)
        known = {n: x for n, x in self.scalars.items() if n in read}
        return AnalysedMask(self.analysed, visible, known, self.tables)

    @cached_property
    def decode(self) -> DecodeSpans | None:
        return decode_spans(self.analysed, self.scalars, self.tables)

    @cached_property
    def reads(self) -> tuple[tuple[str, int, int], ...]:
        """(coordinate, start, stop) of every axis of a table that a bare coordinate indexes, and of offsets."""
        endless = dict.fromkeys("bhqk", 1 << 62)
        readers = self.program.reading
        axes = {(c, 0, have) for e in readers for c, _, _, have in short_tables(e, self.arrays, endless)}
        segments = (x for e in readers for x in segments_of_coordinates(e, self.arrays))
        return *axes, *{(c, first, last) for c, _, first, last in segments}

    def check_reach(self, problem: Problem) -> None:
        """Refuse a table that is read past its end."""
        places = dict(zip("bhqk", zip(problem.origin, problem.ends, strict=True), strict=True))
        # the exact check takes long: only where a position may be outside
        if any(np.min(places[c][0]) < start or places[c][1] > stop for c, start, stop in self.reads):
            check_reach(self.analysed, self.program.reading, self.scalars, self.arrays, problem)

    def no_empty_row(self, problem: Problem) -> bool:
        """Whether every query sees a key, where that is known without counting."""
        mask, room = self.simplified.mask, problem.kv_len - problem.q_len
        if mask is None:
            return True
        if not sees_itself(mask):  # others are counted, if that pays
            return False
        ahead = problem.origin[2] - problem.origin[3]  # own keys are part of the call
        if type(ahead) is int:
            return 0 <= ahead <= room
        return bool(np.all((ahead >= 0) & (ahead <= room)))


@dataclass(frozen=True, eq=False)
class TiledPlan:
    """The inputs of kernels at one tile size: a `LoopPlan` with values, and the spans of its tiles."""

    plan: LoopPlan  # of many tile sizes: the tables that are uploaded for it are remembered on it
    slots: Named
    tables: Mapping[str, Array]
    program: SimplifiedProgram
    problem: Problem
    block: tuple[int, int]
    decode_spans: Spans | None = None  # the spans of few queries, where no layout is needed for them
    analysed: Tiling | None = None  # the layout, where the kernels' inputs needed one

    @property
    def simplified(self) -> ProgramExprs:
        return self.program.simplified

    @property
    def rules(self) -> Counter[str]:
        return self.program.rules

    @cached_property
    def layout(self) -> Tiling:
        return self.analysed or self.program.layout(self.problem, self.block)

    @property
    def facts(self) -> Any:
        return self.layout.facts

    @property
    def spans(self) -> Spans:
        """Records per row of tiles, laid out when they are first asked for."""
        return self.decode_spans or self.layout.spans


# layouts come later: a guess from the rows of tiles
_works = Memo("lowering.pipeline.work", CACHED, weigh=lambda key, *_: 4000 + 64 * (key[1][0] // key[2][0]))


def work(
    program: BoundProgram, problem: Problem, block: tuple[int, int], *, proofs: bool = False, dropout: bool = False
) -> TiledPlan:
    """The `TiledPlan` of a program, remembered by value: mask, contents of its tables, problem, tiles. `proofs` counts
    rows to drop the checks for empty ones, which pays in kernels of many queries only."""
    key = program, problem.key, block, proofs, dropout
    cached: TiledPlan | None = _works.get(key)
    if cached is not None:
        return cached
    check_block(block, problem)
    base = simplified_program(program)
    if base.arrays:
        base.check_reach(problem)
    nonempty, room, spans = base.no_empty_row(problem), problem.full, None
    layout: Tiling | None
    if problem.q_len > MAX_DECODE_QUERIES:
        layout = base.layout(problem, block)
        bounds = layout.bounds
        nonempty = nonempty or bool(proofs and layout.facts.rows_nonempty)
    else:  # steps of decoding plan at each token, too often for a layout
        spans = base.decode.spans(problem, block) if base.decode else None
        # keys of a row that are no one interval need the analysis
        layout = None if spans else base.layout(problem, block)
        bounds = layout.analysis.bounds if layout else base.decode.formula if base.decode else None
        # integers have room to grow: later steps of decoding take the same kernel
        room = tuple(1 << (n - 1).bit_length() for n in room)  # type: ignore[assignment]
    try:
        values = _values(base, bounds, nonempty, room, dropout)
    except LoweringError:  # 64 bits are too few for the room, or for a closed form though not for the mask
        bounds = layout.analysis.bounds if layout else bounds
        values = _values(base, bounds, nonempty, problem.full, dropout)
    return _works.put(key, TiledPlan(*values, base, problem, block, spans, layout))


@memo(group="plans")
def _values(
    base: SimplifiedProgram, bounds: Bounds | None, nonempty: bool, full: Sizes, dropout: bool
) -> tuple[LoopPlan, Named, Mapping[str, Array]]:
    """A `LoopPlan`, and values for its slots and tables: the part of a `TiledPlan` that is the same for tile sizes."""
    limits, tables = limits_of(full, base.scalars, base.arrays), base.tables
    table_facts = frozenset(f for f in facts_of(base.simplified.visible) if holds(tables, *f))
    facts = ProgramFacts(bounds, nonempty, limits=limits, table_facts=table_facts)
    plan = loop_plan(base.program, base.simplified, facts, base.sane, base.arrays, dropout)
    arrays = {n: np.asarray(t) for n, t in plan.table_values(base.arrays).items()}
    return plan, plan.slot_values({**base.scalars, **UNDRAWN}), arrays  # seeds come with calls


def loop_plan(
    program: BoundProgram, exprs: ProgramExprs, facts: ProgramFacts, sane: Sane, tables: Named, dropout: bool
) -> LoopPlan:
    """The `LoopPlan` of a program's simplified expressions. `tables` may be arrays without entries that are read."""
    facts = replace(facts, score_finite=exprs.score is None or finite(exprs.score, sane))
    return make_plan(exprs, program.expanded, facts, **program.plan_arguments(tables, dropout))


def finite_tables(tables: Mapping[str, Array]) -> dict[str, bool]:
    """Whether each Float table is without infinities and NaN."""
    return {n: bool(np.isfinite(t).all()) for n, t in tables.items() if t.dtype.kind == "f"}


@memo(group="plans")
def simplified_program(program: BoundProgram) -> SimplifiedProgram:
    """The `SimplifiedProgram` of a program, remembered by value."""
    program.require_bound()
    arrays = program.tables
    sane = finite_tables(arrays)
    scalars = program.scalars
    exprs = program.exprs.changed(lambda e: bind(e, arrays))
    exprs = _with_numbers(exprs, scalars) if scalars else exprs
    if exprs.weight is not None:
        exprs, reach = narrowed(exprs, scalars, arrays, SMALLEST_DOUBLE if program.double else SMALLEST)
        arrays = {**arrays, **reach}
    exprs, analysed, rules = _simplified(program.scored(exprs), tuple(sane.items()))
    read = names_of(exprs.visible) if arrays else ()
    tables = {n: Table(x) for n, x in arrays.items() if n in read}
    return SimplifiedProgram(program, exprs, analysed, rules, sane, scalars, arrays, tables)


PLAIN = frozenset({"add", "sub", "neg", "abs", "min", "max"}) | COMPARISONS  # operators whose numbers become slots
LEAST = 3  # from here on plans lift a number and its neighbours: -1, 0 and 1 are parts of a text


def _with_numbers(exprs: ProgramExprs, scalars: Named) -> ProgramExprs:
    """Expressions with literals for Int parameters that literals would be lifted for: `window(w)` becomes the kernel of
    `window(300)`, which asks less than one of any `w`. Other values stay parameters."""
    # a branch that a number decides would be in the kernel
    exprs = exprs.changed(lambda e: decided(e, scalars))
    nodes = list(walk(*exprs.parts))
    spans: dict[Expr, frozenset[str]] = {}  # the parameters in the value of an Int
    symbolic: set[str] = set()
    for e in nodes:
        below = frozenset[str]().union(*(spans[a] for a in e.args if a.type is INT))
        if e.op not in PLAIN:  # a literal there would be part of the kernel's text
            symbolic |= below
        spans[e] = below | {e.name} if e.op == "param" and e.type is INT else below
    free = [e for e in nodes if e.op == "param" and e.type is INT and e.name not in symbolic]
    known = {e: lit(int(scalars[e.name])) for e in free if scalars[e.name] >= LEAST}
    return exprs.changed(lambda e: substitute(e, known)) if known else exprs


@memo(group="plans")  # other values of the parameters are other programs
def _simplified(exprs: ProgramExprs, sane: tuple[tuple[str, bool], ...]) -> tuple[ProgramExprs, Expr, Counter[str]]:
    """The simplified expressions, and the mask as the analysis takes it."""
    rules: Counter[str] = Counter()
    exprs = prepare(exprs, dict(sane), rules)
    analysed = prepare(ProgramExprs(exprs.mask)).visible
    return exprs, simplify(analysed), rules


def holds(tables: Mapping[str, Table], fact: str, name: str) -> bool:
    """Whether a table has a fact, by its entries. NaN is not equal to itself: Floats have none."""
    table = tables[name]
    if table.array.dtype.kind == "f":
        return False
    return table.has_runs if fact == "has_runs" else table.sorted


def limits_of(full: Sizes, scalars: Named, tables: Mapping[str, Array]) -> dict[str, float]:
    """The largest magnitude of every name, for the width of integers."""
    b, h, q, k = full
    limits: dict[str, float] = {"b": b, "h": h, "q": q, "k": k, "q0": q, "q1": q, "k0": k, "k1": k}
    limits |= {"B": b, "H": h, "Q_LEN": q, "KV_LEN": k}
    limits |= {n: abs(float(x)) for n, x in scalars.items()}
    limits |= {n: max(abs(int(t.max())), abs(int(t.min()))) for n, t in tables.items() if t.dtype.kind in "iu"}
    return limits
