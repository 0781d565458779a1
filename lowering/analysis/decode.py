"""The layout of a decoding step: few queries, one row of tiles, the intervals of `rows` in Python's integers.

A step of decoding has new positions and lengths and nothing else, and numpy is slow on arrays of one element.
`decode_spans` computes once what all steps share; `DecodeSpans.spans` is one pass over a list of operations.
The records are those of `layout.analyse`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import TRUE, Expr, uses, walk
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import memo
from frisket.lowering.plan import Bounds, Origin, Sizes, Spans

from .rows import Solved, solved
from .table import Table
from .tiles import FULL, PARTIAL, Scope

SLICES = 64  # more of them are arrays
_BEYOND = 1 << 62
_STEPS: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "abs": abs, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min,
    "max": max, "floordiv": lambda x, y: x // y if y else 0, "mod": lambda x, y: x % y if y else 0,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "and": lambda *a: all(a), "or": lambda *a: any(a), "xor": operator.xor, "not": operator.not_,
    "where": lambda c, x, y: x if c else y, "int": int,
}  # fmt: skip
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
            elif e.op in ("var", "param") and e.name in scope.env:
                self.start[i] = _number(scope.env[e.name])
            elif e.op in ("var", "param"):
                self.leaves.append((i, str(e.name)))
            else:
                self.steps.append((i, _operation(e, scope), tuple(place[a] for a in e.args)))
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


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic | np.ndarray) else x


def _operation(e: Expr, scope: Scope) -> Callable[..., Any]:
    if e.op in _STEPS:
        return _STEPS[e.op]
    if e.op == "lookup":
        table = scope.arrays[e.name]
        ends = [n - 1 for n in table.shape]
        return lambda *at: table[tuple(min(max(i, 0), n) for i, n in zip(at, ends, strict=True))].item()
    hook = scope.hooks()[e.op]

    @memo(64, weigh=200)  # first and last query of a row are often one
    def asked(*args: Any) -> Any:
        return hook(e, *map(np.asarray, args)).item()

    return asked


@dataclass(frozen=True)
class DecodeSpans:
    """A mask prepared for rows of few queries."""

    formula: Bounds | None
    apart: frozenset[str]  # "b", "h" if the mask knows them
    terms: int  # visible ones; 0 where the keys that every query sees have a form of their own
    always: IntegerProgram | None  # conditions that hold for the whole call
    ends: IntegerProgram  # of intervals, first and last in turn
    rises: IntegerProgram  # values that must not fall from query to query
    anchors: tuple[tuple[IntegerProgram, int], ...]  # lows, then highs, and how many lows there are

    def spans(
        self, q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int], origin: Origin, full: Sizes
    ) -> Spans | None:
        """The spans of one row of tiles; None where keys are not one interval. `full` has the sizes of the problem."""
        b0, h0, *places = origin
        qs, ks = ([x] * batch if type(x) is int else _each(x, batch) for x in places)
        apart = "b" in self.apart or any(x != qs[0] for x in qs) or any(x != ks[0] for x in ks)
        nb, nh = batch if apart else 1, heads if "h" in self.apart else 1
        if q_len > block[0] or nb * nh > SLICES:
            return None
        env = dict(zip(("B", "H", "Q_LEN", "KV_LEN"), full, strict=True))
        kept: dict[Any, int] = {}
        slice_of = np.zeros((batch, heads), np.int32)
        for b in range(nb):
            for h in range(nh):
                env |= {"b": b0 + b, "h": h0 + h, "k0": ks[b], "k1": ks[b] + kv_len - 1}
                row = self._row(env, qs[b], q_len, kv_len, block)
                if row is None:
                    return None
                slot = kept.setdefault(tuple(map(tuple, row)), len(kept))
                if slot:
                    slice_of[b if apart else slice(None), h if nh > 1 else slice(None)] = slot
        most = max(1, *map(len, kept))
        bounds = np.array([[[*row, *((0, 0, 0, 0),) * (most - len(row))]] for row in kept], np.int32)
        return Spans(bounds, np.array([[len(row)] for row in kept], np.int32), slice_of)

    def _row(self, env: dict[str, Any], q: int, q_len: int, kv_len: int, block: tuple[int, int]) -> Row | None:
        env |= {"q0": q, "q1": q + q_len - 1}
        if (self.always is not None and not all(self.always(env))) or not self._holds(env, q, q_len):
            return None
        ends, k0, bk, columns = self.ends(env), env["k0"], block[1], -(-kv_len // block[1])
        if any(abs(x) > _BEYOND for x in ends):
            return None
        cut = q_len % block[0] > 0
        if not self.terms:
            return _one_interval([x - k0 for x in ends], bk, cut)
        found = zip(ends[::2], ends[1::2], strict=True)
        pairs = [((a - k0) // bk, (z - k0) // bk + 1) if z >= a else (0, 0) for a, z in found]
        outside = [(0, columns)] if cut else [(columns - 1, columns)] if kv_len % bk else []
        return _recorded(_runs(pairs[: self.terms], [*pairs[self.terms :], *outside], columns))

    def _holds(self, env: dict[str, Any], q: int, q_len: int) -> bool:
        """Whether the keys of these queries are one interval per term."""
        at = [env | {"q": q + i} for i in range(q_len)] if self.anchors or self.rises.answers else []
        values = [self.rises(e) for e in at] if q_len > 1 and self.rises.answers else []
        if any(y < x for a, z in pairwise(values) for x, y in zip(a, z, strict=True)):
            return False
        for program, lows in self.anchors:
            found = [program(e) for e in at]
            if max(max(x[:lows]) for x in found) > min(min(x[lows:]) for x in found):
                return False
        return True


def decode_spans(mask: Expr, params: Mapping[str, Any], tables: Mapping[str, Table]) -> DecodeSpans | None:
    """The simplified `mask` prepared for rows of few queries; None where its terms are not bounds on integers."""
    ways = solved(mask)
    if ways is None or not ways.rowwise:
        return None
    scope = Scope(params, tables)
    try:
        return DecodeSpans(
            ways.formula,
            uses(mask) & {"b", "h"},
            0 if ways.full is not None else len(ways.yes),
            None if ways.needs is TRUE else IntegerProgram([ways.needs], scope),
            IntegerProgram(_ends(ways), scope),
            IntegerProgram([value for value, sure in ways.rises if sure is not TRUE], scope),
            tuple((IntegerProgram([*a.lows, *a.highs], scope), len(a.lows)) for a in ways.anchors),
        )
    except (KeyError, EvaluationError):
        return None


def _each(start: Any, batch: int) -> list[int]:
    return [int(x) for x in np.broadcast_to(start, (batch,))]


def _ends(ways: Solved) -> list[Expr]:
    if ways.full is not None:
        return [*ways.yes[0], *ways.full]
    return [e for pair in (*ways.yes, *(ways.no or ())) for e in pair]


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


def _recorded(runs: Sequence[tuple[int, int, int]]) -> Row:
    """The records of runs: `spans.records`."""
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
