"""Flags: a form with values, for arrays of given lengths: what adapters of engines pass on.

Documents in a row, as variable-length attention takes them, are fitted to the keys that queries see (`packing`).

>>> from frisket.dsl.sugar import k, q
>>> from frisket.lowering.engines.forms import form_of
>>> from frisket.lowering.plan import Geometry
>>> from frisket.lowering.simplify import ProgramExprs
>>> place = Geometry(1, 8, 8, 1024, 4096, 64, 64, 0.125, origin=(0, 0, 3072, 0))
>>> flags = flags_of(form_of(ProgramExprs((q >= k) & (q - k <= 255))), place, {}, {})
>>> flags.left, flags.right, str(flags)
(255, 0, 'causal from the bottom right, window 255 to the left from the bottom right')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import EvaluationError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, Named, build
from frisket.lowering.plan import Geometry

from .forms import EngineForm, Exprs

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Packing:
    """Documents and one window for all of them. Document i has queries `r0[i] .. r1[i]` and keys `k0[i] .. k1[i]` of
    the packed sequences. With n queries and m keys, its query u stands at m - n + u. It sees keys from `left` before to
    `right` after that place; -1 is no bound. It is fitted to queries `q` that see keys `first .. stop`, and `doc` is
    the document of each of these; whether the flags show each of them just that, `fits` says."""

    q: Array
    first: Array
    stop: Array
    doc: Array
    r0: Array
    r1: Array
    k0: Array
    k1: Array
    left: int
    right: int

    @property
    def ordered(self) -> bool:
        """Whether the keys of a document end before those of the next."""
        return not (self.k0[1:] < self.k1[:-1]).any()

    @property
    def shown(self) -> tuple[Array, Array]:
        """The keys `[low, high)` that the flags show each query."""
        low, high = self.k0[self.doc], self.k1[self.doc]
        stands = (self.k1 - self.r1)[self.doc] + self.q
        low = low if self.left < 0 else np.maximum(low, stands - self.left)
        return low, high if self.right < 0 else np.minimum(high, stands + (self.right + 1))

    @property
    def fits(self) -> bool:
        low, high = self.shown
        # the widths are those of the farthest query: others of a document may see less
        return self.ordered and bool((low == self.first).all() and (high == self.stop).all())

    def cumulative(self, total_q: int, total_k: int) -> NDArray[np.int32]:
        """cu_seqlens of queries and of keys, int32 [2, documents + 1]. Queries between two documents are one without
        keys, keys between them one without queries."""
        queries = np.stack([self.r0, self.r0, self.r1], axis=1).reshape(-1)
        keys = np.stack([np.append(0, self.k1)[: len(self.k1)], self.k0, self.k1], axis=1).reshape(-1)
        rest = keys[-1] if len(keys) else 0
        corners = np.array([[0, *queries, total_q, total_q], [0, *keys, rest, total_k]], np.int32)
        return np.ascontiguousarray(corners[:, np.append(True, (np.diff(corners, axis=1) > 0).any(axis=0))])


def packing(q: Array, first: Array, stop: Array) -> Packing:
    """Documents fitted to queries `q` of the packed sequence, in order, that see keys `[first, stop)`, none of them
    empty. Neighbouring queries without a common key are of two documents."""
    opens = np.ones(len(q), bool)
    # an absent query sees nothing, and so ends a document
    opens[1:] = (q[1:] > q[:-1] + 1) | (first[1:] >= stop[:-1]) | (stop[1:] <= first[:-1])
    at = np.flatnonzero(opens)
    end = np.append(at[1:], len(q))[: len(at)] - 1
    doc, r1, k0, k1 = np.cumsum(opens) - 1, q[end] + 1, first[at], stop[end]
    stands = (k1 - r1)[doc] + q  # the key where each query stands
    left = _width(stands - first, first == k0[doc])
    return Packing(q, first, stop, doc, q[at], r1, k0, k1, left, _width(stop - 1 - stands, stop == k1[doc]))


def _width(distance: Array, free: Array) -> int:
    """How far a query sees to one side, -1 where its document alone bounds it."""
    return -1 if free.all() else max(-1, int(distance.max()))


Number = int | Array  # one for all batch entries, or int64 [batch]


@dataclass(frozen=True, eq=False)
class Flags:
    """The keys that queries see, in places of the call's arrays. Of n queries and m keys, query i is at e = i + m - n.
    The last query is at the last key ("bottom right"). It sees e - left .. e + right; None is no bound.

    With `documents`, cu_seqlens of queries and of keys, int32 [2, documents + 1] over the packed batch, that holds of
    each document, n and m being its lengths. `keys` and `queries` are the places [start, stop) that are valid, None:
    all; a query that is not sees nothing. The score is `factor * score`, then `softcap * tanh(score / softcap)`, then
    plus `slopes` [heads or batch, heads] times `distance`."""

    left: Number | None = None
    right: Number | None = None
    documents: NDArray[np.int32] | None = None
    keys: tuple[Number, Number] | None = None
    queries: tuple[Number, Number] | None = None
    factor: float = 1.0
    softcap: float | None = None
    slopes: Array | None = None
    distance: str = ""
    ahead: int = 0  # keys beyond the number of queries

    @property
    def top_left(self) -> tuple[Number | None, Number | None]:
        """(left, right) of a call without documents, where query i stands at key i."""
        left, right = self.left, self.right
        return None if left is None else left - self.ahead, None if right is None else right + self.ahead

    @property
    def longest(self) -> tuple[int, int]:
        """The queries and the keys of the longest document."""
        assert self.documents is not None
        q, k = np.diff(self.documents, axis=1).max(axis=1).tolist()
        return q, k

    def visible(self, geometry: Geometry) -> tuple[Array, Array]:
        """The keys `[first, stop)` that every query sees, int64 [batch, q_len] each, places in its batch entry."""
        b, n, m = geometry.batch, geometry.q_len, geometry.kv_len
        at = np.broadcast_to(np.arange(n), (b, n))
        if self.documents is None:
            low, high, stands = np.zeros((b, n), int), np.full((b, n), m), at + m - n
        else:
            cu_q, cu_k = self.documents.astype(np.int64)
            place = at + np.arange(b)[:, None] * n
            doc = np.searchsorted(cu_q, place, side="right") - 1
            base = np.arange(b)[:, None] * m
            low, high = cu_k[doc] - base, cu_k[doc + 1] - base
            stands = place - cu_q[doc + 1] + cu_k[doc + 1] - base
        if self.left is not None:
            low = np.maximum(low, stands - _column(self.left))
        if self.right is not None:
            high = np.minimum(high, stands + _column(self.right) + 1)
        if self.keys is not None:
            low, high = np.maximum(low, _column(self.keys[0])), np.minimum(high, _column(self.keys[1]))
        if self.queries is not None:
            high = np.where((at >= _column(self.queries[0])) & (at < _column(self.queries[1])), high, 0)
        return low, np.maximum(low, high)  # a query that sees nothing, with no negative number of keys

    def empty_rows(self, geometry: Geometry) -> bool:
        """Whether some query sees no key."""
        first, stop = self.visible(geometry)
        return bool((stop <= first).any())

    def __str__(self) -> str:
        parts, corner = [], "" if self.documents is not None or not self.ahead else " from the bottom right"
        left, right = self.left, self.right
        # "causal from the top left" says more than a width that depends on the lengths
        if corner and any(x is not None and _is(x, 0) for x in self.top_left) and not _is(right, 0):
            (left, right), corner = self.top_left, " from the top left"
        if right is not None:
            parts.append(f"causal{corner}" if _is(right, 0) else f"window {_number(right)} to the right{corner}")
        if left is not None:
            parts.append(f"window {_number(left)} to the left{corner}")
        if self.documents is not None:
            n = self.documents.shape[1] - 1
            parts.append(f"documents as cu_seqlens of {n} sequence{'s' * (n != 1)}")
        if self.keys is not None:
            start, stop = self.keys
            parts.append(f"keys {_number(start)} to {_number(stop)}")
        if self.queries is not None:
            parts.append(f"queries {_number(self.queries[0])} to {_number(self.queries[1])}")
        parts = parts or ["full"]
        parts += [] if self.factor == 1.0 else [f"scores times {self.factor:g}"]
        parts += [] if self.softcap is None else [f"soft cap {self.softcap:g}"]
        return ", ".join(parts + ([] if self.slopes is None else ["ALiBi slopes"]))


def flags_of(form: EngineForm, geometry: Geometry, scalars: Named, tables: Mapping[str, Array]) -> Flags | str:
    """A form with values at a place, or the reason why it has no flags there: documents that are torn apart, say.
    Where tables say what a query sees, every query is compared with what the flags show it; work follows the tokens."""
    try:
        return _Binding(geometry, scalars, tables).flags(form)
    except EvaluationError as error:
        return str(error)


class _Binding:
    """The values of a form's names at one place."""

    def __init__(self, geometry: Geometry, scalars: Named, tables: Mapping[str, Array]) -> None:
        self.geometry, self.tables = geometry, tables
        b, h, q, k = geometry.origin
        self.q, self.k = (x if type(x) is int else np.asarray(x, np.int64) for x in (q, k))
        self.batch, self.heads = int(b) + np.arange(geometry.batch), int(h) + np.arange(geometry.heads)
        self.env = {**geometry.named_sizes, **scalars}

    def flags(self, form: EngineForm) -> Flags | str:
        g = self.geometry
        ahead, shift = g.kv_len - g.q_len, self.q - self.k  # i - j = (q - k) - shift
        high, low = self.ends(form.high, "min"), self.ends(form.low, "max")
        # a bound that reaches past the arrays is none: a call without a window runs a faster kernel
        left = None if high is None else _unless(high - shift + ahead, g.kv_len - 1)
        right = None if low is None else _unless(shift - low - ahead, g.q_len - 1)
        keys = None if form.by_rows else self.valid(form.first, form.last, self.k, g.kv_len)
        flags = Flags(left, right, None, keys, self.valid(form.first_query, form.last_query, self.q, g.q_len))
        if form.document or form.by_rows:
            packed = self.packed(form, flags)
            if isinstance(packed, str):
                return packed
            flags = packed
        slopes = None if form.slope is None else self.slopes(form.slope)
        factor = 1.0 if form.factor is None else float(self.value(form.factor))
        softcap = None if form.softcap is None else float(self.value(form.softcap))
        distance = form.distance
        return replace(flags, factor=factor, softcap=softcap, slopes=slopes, distance=distance, ahead=ahead)

    def value(self, e: Expr, **places: Any) -> Array:
        return evaluate(e, {**self.env, **places}, self.tables)

    def slopes(self, e: Expr) -> Array:
        values = self.value(e, b=self.batch[:, None], h=self.heads)
        return np.broadcast_to(values, values.shape if values.ndim > 1 else (self.geometry.heads,))

    def ends(self, bounds: Exprs, op: str) -> Number | None:
        """The tightest of some bounds, in positions."""
        if not bounds:
            return None
        values = [self.value(e, b=self.batch) for e in bounds]
        return _one({"min": np.minimum, "max": np.maximum}[op].reduce(np.broadcast_arrays(*values)))

    def valid(self, first: Exprs, last: Exprs, origin: Number, n: int) -> tuple[Number, Number] | None:
        """The places [start, stop) between bounds, None where those leave all of them."""
        low, high = self.ends(first, "max"), self.ends(last, "min")
        start = 0 if low is None else _one(np.clip(low - origin, 0, n))
        stop = n if high is None else _one(np.maximum(np.clip(high + 1 - origin, 0, n), start))
        return None if _is(start, 0) and _is(stop, n) else (start, stop)

    def packed(self, form: EngineForm, flags: Flags) -> Flags | str:
        """The flags of documents, from the keys that every query sees."""
        g = self.geometry
        one = len(form.document) == 1 and not form.by_rows and flags.keys is None and flags.queries is None
        # queries and keys at the same positions read the same values
        if one and g.q_len == g.kv_len and type(self.q) is int and self.q == self.k:
            return self.of_tokens(form.document[0], flags)
        low, stop = (np.array(x) for x in flags.visible(g))
        b = self.batch[:, None]
        q = np.broadcast_to(np.asarray(self.q).reshape(-1, 1) + np.arange(g.q_len), low.shape)
        k = np.broadcast_to(np.asarray(self.k).reshape(-1, 1) + np.arange(g.kv_len), (g.batch, g.kv_len))
        origin = np.asarray(self.k).reshape(-1, 1)
        if form.by_rows:
            if form.first:  # in one Expr, for they share lookups
                low = np.maximum(low, self.value(reduce(partial(build, "max"), form.first), b=b, q=q) - origin)
            if form.last:
                stop = np.minimum(stop, self.value(reduce(partial(build, "min"), form.last), b=b, q=q) + 1 - origin)
        for e in form.document:
            mine, theirs = (np.broadcast_to(self.value(e, b=b, q=x), x.shape) for x in (q, k))
            for entry in range(g.batch):
                runs = _runs(mine[entry], theirs[entry])
                if runs is None:
                    return _torn(e, entry)
                low[entry], stop[entry] = np.maximum(low[entry], runs[0]), np.minimum(stop[entry], runs[1])
        rows = np.arange(g.batch)[:, None]
        some = stop > low
        place = (rows * g.q_len + np.arange(g.q_len))[some]
        documents = packing(place, (low + rows * g.kv_len)[some], (stop + rows * g.kv_len)[some])
        if not documents.fits:
            return "the keys that queries see are not documents one after another under one window"
        cu = documents.cumulative(g.batch * g.q_len, g.batch * g.kv_len)
        left, right = (None if x < 0 else x for x in (documents.left, documents.right))
        declared = Flags(flags.left, flags.right, cu)
        sides = (flags.left, left), (flags.right, right)
        if all(x is y or _is(x, y) for x, y in sides):
            return declared
        if all(x is None for x, _ in sides):  # a fitted width hides some key of a document
            return Flags(left, right, cu)
        # widths of the text where they show the same: those that are fitted to documents change with them
        same = all((x[some] == y[some]).all() for x, y in zip(declared.visible(g), (low, stop), strict=True))
        return declared if same else Flags(left, right, cu)

    def of_tokens(self, e: Expr, flags: Flags) -> Flags | str:
        """The flags of documents of tokens, queries and keys alike: windows are equal in each, so changes decide."""
        g = self.geometry
        at = self.value(e, b=self.batch[:, None], q=self.q + np.arange(g.q_len))
        at = np.broadcast_to(at, (g.batch, g.q_len))
        opens = np.ones((g.batch, g.q_len), bool)
        np.not_equal(at[:, 1:], at[:, :-1], out=opens[:, 1:])
        starts = np.flatnonzero(opens)
        values, entry = at[opens], starts // g.q_len
        order = np.lexsort((values, entry))
        # tokens of a document that another one interrupts are no document of cu_seqlens
        again = (np.diff(values[order]) == 0) & (np.diff(entry[order]) == 0)
        if again.any():
            return _torn(e, int(entry[order][:-1][again].min()))
        cu = np.append(starts, g.batch * g.q_len).astype(np.int32)
        return Flags(flags.left, flags.right, np.stack([cu, cu]))


def _torn(e: Expr, entry: int) -> str:
    return f"equal values of `{e}` are not adjacent in batch entry {entry}: they are no documents"


def _runs(mine: Array, theirs: Array) -> tuple[Array, Array] | None:
    """The keys `[first, stop)` with a query's value; None where equal values are not adjacent."""
    starts = np.flatnonzero(np.append(True, theirs[1:] != theirs[:-1]))
    # by runs, as a sequence has far fewer documents than tokens
    values, order = np.unique(theirs[starts], return_index=True)
    if len(values) != len(starts):
        return None
    at = np.minimum(np.searchsorted(values, mine), len(values) - 1)
    known, run = values[at] == mine, order[at]
    return np.where(known, starts[run], 0), np.where(known, np.append(starts[1:], len(theirs))[run], 0)


def _column(x: Number) -> Any:
    return x if isinstance(x, int) else x[:, None]


def _one(x: Any) -> Number:
    """One number where all batch entries have the same."""
    values = np.asarray(x, np.int64)
    return int(values.flat[0]) if (values == values.flat[0]).all() else values


def _unless(bound: Any, most: int) -> Number | None:
    """A bound, None where no pair of places is as far apart."""
    return None if bool((np.asarray(bound) >= most).all()) else _one(bound)


def _is(x: Number | None, n: int | None) -> bool:
    return isinstance(x, int) and x == n


def _number(x: Number) -> str:
    return str(x) if isinstance(x, int) else f"{x.min()} to {x.max()}, by batch entry"
