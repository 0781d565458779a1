"""The device planner: spans for tables that live on a device or are traced. Fixed shapes, no copy to the host.

A `Planner` holds Exprs of the analysis, which `planner.arrays` prints. Where every term of the mask bounds k, they are
an interval of keys for each term. Elsewhere they are the questions `always`, `never` and `mixed` of
`analysis.questions`, asked of pieces of each row, coarse to fine, in a list of `room` pieces a row. No pair is
evaluated: a tile that the Exprs leave open is PARTIAL, and so is a tile for which the list has no room, which
`overflow` reports.

Every literal of a term is read as bounds on k whose ends are the ends of some Expr over the queries `q0..q1`. So
the interval of a term holds every key that some query of the row sees, whatever the tables hold. Keys are found
in sorted tables by search (`at_least above at_most under`), in offsets by lookup; no key is visited.

>>> from frisket.dsl.ir import lookup
>>> from frisket.dsl.sugar import eq, k, q
>>> seen, hidden = intervals((q >= k) & eq(lookup("doc", (q,)), lookup("doc", (k,))), frozenset({"doc"}))
>>> seen  # at_least(doc[q0]): the first position of doc that holds at least doc[q0]
((max(k0, at_least(doc[q0])), min(min(q1, k1), at_most(doc[q1]))),)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import (
    FALSE,
    TRUE,
    Expr,
    conj,
    connect,
    disj,
    extent,
    lit,
    lookup,
    make,
    operands,
    rebuild,
    substitute,
    transform,
    uses,
    var,
    walk,
)
from frisket.dsl.sugar import eq, where
from frisket.dsl.types import INT, Type
from frisket.lowering.analysis.intervals import BEYOND_INTS, K0, ends
from frisket.lowering.analysis.questions import SINGLE, always, mixed, never
from frisket.lowering.analysis.rows import Interval, visible_keys
from frisket.lowering.analysis.solve import SIDES, K, System, disjuncts, is_positive, isolated, sides_of_ids, system
from frisket.lowering.plan import needs_int64
from frisket.lowering.simplify import simplify
from frisket.lowering.simplify.affine import Linear, linear, write
from frisket.lowering.simplify.rules_boolean import negate

ROOM = 64  # pieces of a row of tiles that are held at once
RECORDS = 16  # records per row where the mask does not say how few there are
# of masks that list tiles, which may be anywhere in a row
LISTED_ROOM, LISTED_RECORDS = 512, 128
MOST = 16  # intervals of a mask; beyond, tiles are asked one by one
BEYOND_POSITIONS = lit(1 << 30)  # beyond every position


@dataclass(frozen=True)
class Planner:
    """The planner of one mask; hashable, so that its text is printed once.

    Exprs describe a row of tiles, queries `q0..q1`, and keys `k0..k1`. Without intervals, the questions decide."""

    mask: Expr
    seen: tuple[Interval, ...]  # the keys that some query of the row may see, for each term of the mask
    hidden: tuple[Interval, ...]  # the keys that some query may not see, for each term of the negated mask
    always: Expr  # a piece of the row is full
    never: Expr  # a piece is empty
    mixed: Expr  # every tile of a piece is partial
    int64: bool
    disjoint: Expr = FALSE  # true where queries and keys of a piece share no id; C++ alone asks

    @cached_property
    def roots(self) -> tuple[Expr, ...]:
        if self.seen:
            return tuple(e for pair in (*self.seen, *self.hidden) for e in pair)
        return self.always, self.never, self.mixed

    @cached_property
    def scalars(self) -> dict[str, Type]:
        return {n.name: n.type for n in walk(*self.roots) if n.op == "param"}

    @cached_property
    def tables(self) -> tuple[str, ...]:
        return tuple(_named(*self.roots))

    @cached_property
    def lists_tiles(self) -> bool:
        """Whether a table has an entry for a query and a key, or several for one of them, as tables of chosen tiles."""

        def entries(read: Expr) -> bool:
            along = [uses(a) & {"q", "k"} for a in read.args if a.op == "lit" or not uses(a) <= {"b", "h"}]
            return any(along) and len(along) > 1

        return not self.seen and any(n.op == "lookup" and entries(n) for n in walk(self.mask))

    @property
    def room(self) -> int:
        """The number of pieces of a row of tiles that are held at once."""
        return LISTED_ROOM if self.lists_tiles else ROOM

    def records(self, columns: int) -> int:
        """The number of records a row may need, as far as the mask tells."""
        several = LISTED_RECORDS if self.lists_tiles else RECORDS
        enough = len(self.seen) + len(self.hidden) if self.seen else several
        # a record has at least a tile, and a gap before the next
        return max(1, min(enough, -(-columns // 2)))


# classes of the numbers in a range, a bit for each of 64: by the last six bits of a number, and by two hashes
CLASSES = "classes_0", "classes_1", "classes_2"
SEARCHES = frozenset({"at_least", "above", "at_most", "under"})
RANGES = frozenset({"range_min", "range_max", *CLASSES})  # of the entries between two places
READS = SEARCHES | {"lookup", "segment", "range_min", "range_max", "extent"}


def _named(*roots: Expr) -> dict[str, None]:
    """The tables that are read."""
    return dict.fromkeys(n.name[0] if n.op == "extent" else n.name for n in walk(*roots) if n.op in READS)


@dataclass(frozen=True)
class DeviceSpans:
    """Spans whose `bounds` and `count` are arrays of a framework, perhaps traced. `overflow` is a Bool array, for all
    rows or row by row. It says that some row had more pieces or runs than there is room for, and reads more tiles than
    it has to. `order`, where it is known, are the rows of each slice with the longest first, int32 [slices, rows]."""

    bounds: Any
    count: Any
    overflow: Any
    slice_of: NDArray[np.int32]
    order: Any = None


def planner(
    mask: Expr, sorted_: frozenset[str] = frozenset(), limits: Mapping[str, float] | None = None, wide: bool = True
) -> Planner:
    """The planner of a simplified mask. `sorted_` names tables that are known never to decrease; `limits` are the
    largest magnitudes of names; `wide` says whether the device has 64-bit integers."""
    limits = limits or {}
    bounds = intervals(mask, sorted_)
    if bounds is not None:
        roots = [e for pair in (*bounds[0], *bounds[1]) for e in pair]
        # an integer that may not fit would give wrong tiles: questions leave out such clauses
        if all(fits(e, limits, wide) for e in roots):
            return Planner(mask, *bounds, FALSE, FALSE, FALSE, _wide(roots, limits))
    # a piece has several tiles: a single tile left open is PARTIAL anyway
    of_several = simplify(substitute(mixed(mask), {SINGLE: FALSE}))
    yes, no, both = (_safe(points(e, sorted_), limits, wide) for e in (always(mask), never(mask), of_several))
    disjoint = _safe(points(_no_common_ids(mask, {*_named(yes, no, both)}), sorted_), limits, wide)
    return Planner(mask, (), (), yes, no, both, _wide([yes, no, both], limits), disjoint)


def _no_common_ids(mask: Expr, tables: set[str]) -> Expr:
    """Whether a piece is empty, as terms `T[q] == U[k]` tell: of some clause of the mask no part can hold."""
    with_ids = (clause for clause in operands("and", mask) if any(map(sides_of_ids, walk(clause))))
    # a clause without ids cannot tell
    return disj(*(conj(*(_part_disjoint(part, tables) for part in operands("or", clause))) for clause in with_ids))


def _part_disjoint(part: Expr, tables: set[str]) -> Expr:
    conditions = []
    for sides in filter(None, map(sides_of_ids, operands("and", part))):
        if {s.name for s in sides} <= tables:
            conditions += [eq(_classes(op, sides[0], "q") & _classes(op, sides[1], "k"), 0) for op in CLASSES]
    return disj(never(part), *conditions)


def _classes(op: str, read: Expr, axis: str) -> Expr:
    first, last = ((*read.args[:-1], var(f"{axis}{end}")) for end in (0, 1))
    return make(op, (*first, *last), read.name, INT)


def _safe(e: Expr, limits: Mapping[str, float], wide: bool) -> Expr:
    """A question without the clauses whose integers may not fit: without a clause the answer is only less certain."""
    if e.op in ("and", "or"):
        return connect(e.op, [_safe(a, limits, wide) for a in e.args])
    return e if e is TRUE or fits(e, limits, wide) else FALSE  # FALSE is the answer that decides nothing


def fits(e: Expr, limits: Mapping[str, float], wide: bool) -> bool:
    """Whether every integer of `e` stays within 63 bits, or 31 where the device has no wider ones."""
    try:
        return not _wide([e], limits) or wide
    except LoweringError:
        return False


def _wide(roots: Sequence[Expr], limits: Mapping[str, float]) -> bool:
    """Whether `needs_int64` holds, where entries read from a table are as large as the table allows."""
    parts: list[Expr] = []

    def leaf(n: Expr) -> Expr:
        if n.op in ("range_min", "range_max"):
            parts.extend(n.args)
            return lookup(n.name, (), n.type)
        if n.op in {*SEARCHES, *CLASSES}:
            parts.extend(n.args)
            return BEYOND_POSITIONS
        return n

    parts.extend(transform(e, leaf) for e in roots)
    return needs_int64(parts, limits)


# -- intervals of keys ------------------------------------------------------------------------------


def intervals(mask: Expr, sorted_: frozenset[str]) -> tuple[tuple[Interval, ...], tuple[Interval, ...]] | None:
    """The intervals (of the keys some query of the row sees, of the keys some query does not), or None where a literal
    bounds neither side. `sorted_` names the tables that never decrease along their last axis."""
    seen = _sides(mask, sorted_)
    hidden = None if seen is None else _sides(simplify(negate(mask)), sorted_)
    # hidden keys tell which tiles are FULL: one side alone is no layout
    return None if seen is None or hidden is None or len(seen) + len(hidden) > MOST else (seen, hidden)


def _sides(mask: Expr, sorted_: frozenset[str]) -> tuple[Interval, ...] | None:
    terms = disjuncts(mask)
    if terms is None:
        return None
    known = tuple(s for s in (_interval(system(t), sorted_) for t in terms) if s is not None)
    return known if len(known) == len(terms) else None


def _interval(s: System, sorted_: frozenset[str]) -> Interval | None:
    of_keys = [e for e in s.rest if "k" in uses(e)]
    pairs = [_keys(e, sorted_) for e in of_keys]
    known = [pair for pair in pairs if pair is not None]
    if len(known) < len(pairs):
        return None
    lows, highs = ([x for x in side if x is not None] for side in ([a for a, _ in known], [z for _, z in known]))
    first, last = visible_keys(s, lows, highs, [never(e) for e in s.rest if e not in of_keys])
    return points(first, sorted_), points(last, sorted_)


def _keys(e: Expr, sorted_: frozenset[str]) -> tuple[Expr | None, Expr | None] | None:
    """The first and last key that some query of the row can see by this literal; None for an unbounded end."""
    solved = isolated(e)
    if solved is None or solved.factor != 1:  # k has to stand alone, with factor 1 or -1, to be searched for
        return None
    atom, other = solved.atom, ends(write(solved.value))
    if not (atom is K or (atom.op in _SEARCH and _searched(atom, sorted_))):
        return None
    first, last = _SEARCH[atom.op]
    sides = SIDES[solved.op]
    return (
        first(atom, other.lo) if "low" in sides and other.lo is not None else None,
        last(atom, other.hi) if "high" in sides and other.hi is not None else None,
    )


def _searched(atom: Expr, sorted_: frozenset[str]) -> bool:
    """Whether a function of k is known never to decrease."""
    if atom.args[0] is not K:
        return False
    if atom.op == "floordiv":
        return is_positive(atom.args[1])
    return atom.op == "segment" or (len(atom.args) == 1 and atom.name in sorted_)


def _first_of_segment(e: Expr, v: Expr) -> Expr:
    """The first key whose segment is at least `v`: segments are 0..n - 2, for n offsets."""
    count = extent(e.name, 0) - 1
    return where(v <= 0, K0, where(v >= count, BEYOND_POSITIONS, lookup(e.name, (v,))))


def _last_of_segment(e: Expr, v: Expr) -> Expr:
    count = extent(e.name, 0) - 1
    return where(v < 0, lit(-1), where(v + 1 >= count, BEYOND_POSITIONS, lookup(e.name, (v + 1,)) - 1))


def _search(e: Expr, v: Expr, of: str, beyond: str, by: int) -> Expr:
    """The search for v in a table: "at least v + 1" is "above v", whose integers are no larger than the table's."""
    form = linear(v)
    if form.const == by:
        return make(beyond, (write(Linear(form.terms, 0)),), e.name, INT)
    return make(of, (v,), e.name, INT)


# the first key whose value is at least v, and the last whose value is at most v
_SEARCH: dict[str, tuple[Callable[[Expr, Expr], Expr], Callable[[Expr, Expr], Expr]]] = {
    "var": (lambda e, v: v, lambda e, v: v),
    "floordiv": (lambda e, v: v * e.args[1], lambda e, v: v * e.args[1] + (e.args[1] - 1)),
    "lookup": (lambda e, v: _search(e, v, "at_least", "above", 1), lambda e, v: _search(e, v, "at_most", "under", -1)),
    "segment": (_first_of_segment, _last_of_segment),
}


def points(e: Expr, sorted_: frozenset[str]) -> Expr:
    """The intervals with the least and the greatest entry of a sorted table over a range of its last axis. They are
    read at the range's ends, and no index of a range reaches farther than any table."""

    def change(n: Expr) -> Expr:
        if n.op not in ("range_min", "range_max"):
            return n
        half = len(n.args) // 2
        if n.name in sorted_ and n.args[: half - 1] == n.args[half:-1]:  # over the last axis alone
            return lookup(n.name, (*n.args[: half - 1], n.args[-1 if n.op == "range_max" else half - 1]), n.type)
        return rebuild(n, tuple(BEYOND_POSITIONS if a.op == "lit" and a.name == BEYOND_INTS else a for a in n.args))

    return transform(e, change)
