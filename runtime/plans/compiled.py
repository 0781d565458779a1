"""Compiles masks, score mods and parameters to the inputs of kernels: a `LoopPlan`, spans, slots and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError, ShapeError
from frisket.dsl.evaluate import decided
from frisket.dsl.ir import COMPARISONS, TRUE, Expr, lit, substitute, walk
from frisket.dsl.types import INT
from frisket.grammar.memo import Memo, memo
from frisket.lowering.analysis.decide import sees_itself
from frisket.lowering.analysis.layout import DecodeSpans, decode_spans
from frisket.lowering.analysis.layout import bind as written_out
from frisket.lowering.analysis.table import Table
from frisket.lowering.kernels.cpp.tiles import MAX_DECODE_QUERIES
from frisket.lowering.plan import RATE, SEED, Bounds, LoopPlan, Origin, Sizes, Spans, make_plan, whole
from frisket.lowering.simplify import prepare, simplify
from frisket.lowering.simplify.curves import Fact, facts_of
from frisket.lowering.simplify.hoist import finite
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.layouts.tiling import check_lengths, check_reach, place_of
from frisket.runtime.machine.caller import as_int
from frisket.runtime.machine.parameters import locating, names_of, segments_of_coordinates, short_tables
from frisket.runtime.masks.layout import Layout

Array = NDArray[Any]
Place = tuple[int, int, int, int, tuple[int, int], Origin, Sizes | None]  # q_len, kv_len, batch, heads, tiles, ...
CACHED = 256  # compilations kept
UNDRAWN = {SEED: 0, RATE: 0.0}  # each call has other values


@dataclass(frozen=True, eq=False)
class SimplifiedProgram:
    """A program whose values the host knows, simplified: the part of a `Plan` that is the same at every length."""

    program: CallProgram
    simplified: tuple[Expr | None, Expr | None]  # mask and score mod
    analysed: Expr  # the mask as the analysis takes it
    rules: Counter[str]
    sane: Mapping[str, bool]  # Float tables without infinities
    scalars: Mapping[str, Any]
    arrays: Mapping[str, Array]
    tables: Mapping[str, Table]  # the mask's

    def layout(self, place: Place) -> Layout:
        known = {n: x for n, x in self.scalars.items() if n in self.names}
        seen = self.simplified[0]
        return Layout(self.analysed, known, self.tables, *place, True, TRUE if seen is None else seen)

    @cached_property
    def names(self) -> frozenset[str]:
        seen = self.simplified[0]
        return frozenset() if seen is None else frozenset(names_of(seen))

    @cached_property
    def facts(self) -> frozenset[Fact]:
        """The facts of tables that hold, among those that solve terms of the mask."""
        seen = self.simplified[0]
        return frozenset() if seen is None else frozenset(f for f in facts_of(seen) if holds(self.tables, *f))

    @cached_property
    def decode(self) -> DecodeSpans | None:
        return decode_spans(self.analysed, self.scalars, self.tables)

    @cached_property
    def reads(self) -> tuple[tuple[str, int, int], ...]:
        """(coordinate, start, stop) of every axis of a table that a bare coordinate indexes, and of offsets."""
        endless = dict.fromkeys("bhqk", 1 << 62)
        readers = [p.expr for p in self.program.parts]
        axes = {(c, 0, have) for e in readers for c, _, _, have in short_tables(e, self.arrays, endless)}
        segments = (x for e in readers for x in segments_of_coordinates(e, self.arrays))
        return *axes, *{(c, first, last) for c, _, first, last in segments}

    def check_reach(self, lengths: Sizes, origin: Origin, sizes: Sizes | None) -> None:
        """Refuse a table that is read past its end."""
        if not (self.arrays and self.reads):
            return
        places = dict(zip("bhqk", zip(origin, whole(origin, lengths), strict=True), strict=True))
        # the exact check takes long: only where a position may be outside
        if any(np.min(places[c][0]) < start or places[c][1] > stop for c, start, stop in self.reads):
            readers = [p.expr for p in self.program.parts]
            check_reach(self.analysed, readers, self.scalars, self.arrays, lengths, origin, sizes)

    def no_empty_row(self, q_len: int, kv_len: int, origin: Origin) -> bool:
        """Whether every query sees a key, where that is known without counting."""
        if self.simplified[0] is None:
            return True
        if not sees_itself(self.simplified[0]):  # others are counted, if that pays
            return False
        ahead = origin[2] - origin[3]  # own keys are part of the call
        if type(ahead) is int:
            return 0 <= ahead <= kv_len - q_len
        return bool(np.all((ahead >= 0) & (ahead <= kv_len - q_len)))

    def inputs(self, bounds: Bounds | None, nonempty: bool, limits: Mapping[str, float], dropout: bool) -> PlanValues:
        seen, mod = self.simplified
        plan = make_plan(
            seen, mod, self.program.expanded, bounds=bounds, score_finite=mod is None or finite(mod, self.sane),
            rows_nonempty=nonempty, limits=limits, dropout=dropout, facts=self.facts,
            **self.program.plan_arguments(self.arrays),
        )  # fmt: skip
        arrays = {n: np.asarray(t) for n, t in plan.table_values(self.arrays).items()}
        return PlanValues(plan, plan.slot_values({**self.scalars, **UNDRAWN}), arrays)  # seeds come with calls


@dataclass(frozen=True, eq=False)
class PlanValues:
    """A `LoopPlan` with values for slots and tables: the part of a `TiledPlan` that is the same for every tile size."""

    plan: LoopPlan
    slots: Mapping[str, Any]
    tables: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class TiledPlan(PlanValues):
    """The inputs of the kernels of a `Plan` at one tile size: `PlanValues`, and the spans of its tiles."""

    shared: PlanValues  # of all tile sizes: what is uploaded is remembered on it
    compiled: SimplifiedProgram
    place: Place
    decode_spans: Spans | None = None  # the spans of few queries, where no layout is needed for them
    analysed: Layout | None = None  # the layout, where the kernels' inputs needed one

    @property
    def simplified(self) -> tuple[Expr | None, Expr | None]:
        return self.compiled.simplified

    @property
    def rules(self) -> Counter[str]:
        return self.compiled.rules

    @cached_property
    def layout(self) -> Layout:
        return self.analysed or self.compiled.layout(self.place)

    @property
    def facts(self) -> Any:
        return self.layout.facts

    @property
    def spans(self) -> Spans:
        """Records per row of tiles, laid out when they are first asked for."""
        return self.decode_spans or self.layout.spans


# layouts come later: a guess from the rows of tiles
_works = Memo("runtime.plans.compiled.work", CACHED, weigh=lambda key, *_: 4000 + 64 * (key[1] // key[5][0]))


def work(
    program: CallProgram, q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int],
    origin: Origin = (0, 0, 0, 0), sizes: Sizes | None = None, *, proofs: bool = False, dropout: bool = False,
) -> TiledPlan:  # fmt: skip
    """The `TiledPlan` of a program, remembered by value: mask, contents of its tables, lengths, tiles, origin. `proofs`
    counts rows to drop the checks for empty ones, which pays in kernels of many queries only."""
    sizes = None if sizes is None else tuple(sizes)  # type: ignore[assignment]
    key = (program, q_len, kv_len, batch, heads, block, place_of(origin), sizes, proofs, dropout)
    cached: TiledPlan | None = _works.get(key)
    if cached is not None:
        return cached
    check_lengths(q_len, kv_len, batch, heads, block, origin, sizes)
    base = simplified_program(program)
    lengths = int(batch), int(heads), int(q_len), int(kv_len)  # numpy's would wrap
    base.check_reach(lengths, origin, sizes)
    place: Place = (*lengths[2:], *lengths[:2], block, origin, sizes)
    with locating(*program.parts):
        few = q_len <= MAX_DECODE_QUERIES  # steps of decoding plan at each token, too often for a layout
        return _works.put(key, _decode_work(base, place, dropout) if few else _work(base, place, dropout, proofs))


def _work(base: SimplifiedProgram, place: Place, dropout: bool, proofs: bool) -> TiledPlan:
    q_len, kv_len, *_, origin, _ = place
    layout = base.layout(place)
    nonempty = base.no_empty_row(q_len, kv_len, origin) or bool(proofs and layout.facts.rows_nonempty)
    try:
        inputs = _inputs(base, layout.bounds, nonempty, layout.sizes, dropout)
    except LoweringError:  # the closed form may leave 64 bits where the mask does not
        inputs = _inputs(base, layout.analysis.bounds, nonempty, layout.sizes, dropout)
    return TiledPlan(inputs.plan, inputs.slots, inputs.tables, inputs, base, place, analysed=layout)


def _decode_work(base: SimplifiedProgram, place: Place, dropout: bool) -> TiledPlan:
    """The work of a call with few queries. Integers have room to grow: later steps of decoding take the same kernel."""
    q_len, kv_len, batch, heads, _, origin, sizes = place
    full = sizes or whole(origin, (batch, heads, q_len, kv_len))
    spans = base.decode.spans(*place[:6], full) if base.decode else None
    # keys of a row that are no one interval need the analysis
    layout = None if spans else base.layout(place)
    bounds = layout.analysis.bounds if layout else base.decode.formula if base.decode else None
    room: Any = tuple(1 << (n - 1).bit_length() for n in full)
    nonempty = base.no_empty_row(q_len, kv_len, origin)
    try:
        inputs = _inputs(base, bounds, nonempty, room, dropout)
    except LoweringError:  # too much room: 64 bits are not enough for it
        inputs = _inputs(base, bounds, nonempty, full, dropout)
    return TiledPlan(inputs.plan, inputs.slots, inputs.tables, inputs, base, place, spans, layout)


@memo(group="plans")
def _inputs(base: SimplifiedProgram, bounds: Bounds | None, nonempty: bool, full: Sizes, dropout: bool) -> PlanValues:
    return base.inputs(bounds, nonempty, limits_of(full, base.scalars, base.arrays), dropout)


@memo(group="plans")
def simplified_program(program: CallProgram) -> SimplifiedProgram:
    """The `SimplifiedProgram` of a program, remembered by value."""
    program.require_bound()
    arrays = program.tables
    sane = {n: bool(np.isfinite(t).all()) for n, t in arrays.items() if t.dtype.kind == "f"}
    parts = [None if p is None else written_out(p.expr, arrays) for p in (program.mask, program.score)]
    scalars = program.scalars
    seen, mod = _with_numbers(parts, scalars) if scalars else parts
    seen, mod, analysed, rules = _simplified(seen, program.scored(mod), tuple(sane.items()))
    read = names_of(seen) if arrays and seen is not None else ()
    tables = {n: Table(x) for n, x in arrays.items() if n in read}
    return SimplifiedProgram(program, (seen, mod), analysed, rules, sane, scalars, arrays, tables)


PLAIN = frozenset({"add", "sub", "neg", "abs", "min", "max"}) | COMPARISONS  # operators whose numbers become slots
LEAST = 3  # of a number that plans lift, and so the numbers beside it: -1, 0 and 1 are parts of a text


def _with_numbers(parts: Sequence[Expr | None], scalars: Mapping[str, Any]) -> list[Expr | None]:
    """Mask and score mod with literals for Int parameters that literals would be lifted for: `window(w)` becomes the
    kernel of `window(300)`, which asks less than one of any `w`. Other values stay parameters."""
    # a branch that a number decides would be in the kernel
    parts = [e if e is None else decided(e, scalars) for e in parts]
    nodes = list(walk(*[e for e in parts if e is not None]))
    spans: dict[Expr, frozenset[str]] = {}  # the parameters in the value of an Int
    symbolic: set[str] = set()
    for e in nodes:
        below = frozenset[str]().union(*(spans[a] for a in e.args if a.type is INT))
        if e.op not in PLAIN:  # a literal there would be part of the kernel's text
            symbolic |= below
        spans[e] = below | {e.name} if e.op == "param" and e.type is INT else below
    known = {
        e: lit(int(scalars[e.name])) for e in nodes
        if e.op == "param" and e.type is INT and e.name not in symbolic and scalars[e.name] >= LEAST
    }  # fmt: skip
    return [None if e is None else substitute(e, known) for e in parts] if known else list(parts)


@memo(group="plans")  # other values of the parameters are other programs
def _simplified(
    seen: Expr | None, mod: Expr | None, sane: tuple[tuple[str, bool], ...]
) -> tuple[Expr | None, Expr | None, Expr, Counter[str]]:
    """Mask, score mod, and the mask as the analysis takes it."""
    rules: Counter[str] = Counter()
    seen, mod = prepare(seen, mod, dict(sane), rules)
    analysed = None if seen is None else prepare(seen, None)[0]
    return seen, mod, TRUE if analysed is None else simplify(analysed), rules


def holds(tables: Mapping[str, Table], fact: str, name: str) -> bool:
    """Whether a table has a fact, by its entries. NaN is not equal to itself: Floats have none."""
    table = tables[name]
    if table.array.dtype.kind == "f":
        return False
    return table.has_runs if fact == "has_runs" else table.sorted


def limits_of(full: Sizes, scalars: Mapping[str, Any], tables: Mapping[str, Array]) -> dict[str, float]:
    """The largest magnitude of every name, for the width of integers."""
    b, h, q, k = full
    limits: dict[str, float] = {"b": b, "h": h, "q": q, "k": k, "q0": q, "q1": q, "k0": k, "k1": k}
    limits |= {"B": b, "H": h, "Q_LEN": q, "KV_LEN": k}
    limits |= {n: abs(float(x)) for n, x in scalars.items()}
    limits |= {n: max(abs(int(t.max())), abs(int(t.min()))) for n, t in tables.items() if t.dtype.kind in "iu"}
    return limits


LONGEST_TILE, LARGEST_TILE = 1 << 16, 1 << 24


def check_tile(tile: Any) -> tuple[int, int] | None:
    """(queries, keys) of a tile, or `ShapeError`."""
    if tile is None:
        return None
    sides = as_int(tile)
    pair = (sides, sides) if isinstance(sides, int) else tuple(map(as_int, sides)) if np.iterable(sides) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n <= 0 for n in pair):
        raise ShapeError(f"tile is {tile}; tile sizes are two positive integers (queries, keys), in tokens")
    if max(pair) > LONGEST_TILE or pair[0] * pair[1] > LARGEST_TILE:
        raise ShapeError(
            f"tile is {tile}; a tile has at most {LONGEST_TILE:,} queries or keys and {LARGEST_TILE:,} pairs of them\n"
            "  its scores are held at once: tiles of 32 to 256 are usual"
        )
    return pair
