"""Order: an order of positions in which a mask reads fewer tiles, and its gain."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ShapeError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, lit, param, substitute, var
from frisket.dsl.types import INT
from frisket.lowering.analysis.tiling import Counts
from frisket.lowering.orders.candidates import Candidate, by_graph, candidates, closed, folded, position
from frisket.runtime.calls.arrays import TokenPermutation, take
from frisket.runtime.calls.options import check_tile
from frisket.runtime.machine.caller import counting
from frisket.runtime.masks.mask import Mask, MaskLike
from frisket.runtime.masks.mask import mask as as_mask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK, MOVING = (128, 64), 100.0  # of a GPU: a tile's queries and keys; pairs that take as long as moving a row
CPU = (64, 32), 10.0  # of a CPU
PARTIAL = 1.25  # the time of a partial tile, in full ones
WORTH = 1.1  # gains below are left alone
# Candidates are compared on tiles of queries: how many, the queries of each that are looked at, and how many candidates
# are left then, whose tiles are counted.
ROUNDS = ((2, 8, 6), (8, 8, 2))
PLACE = 0.382  # of a tile in its part of the queries: no multiple of a stride


@dataclass(frozen=True, eq=False)
class Order:
    """An order of queries and keys, found by `frisket.reorder`.

    >>> import frisket as fk
    >>> order = fk.reorder("causal & dilated(1024, 4)", 16384, 16384)
    >>> print(order)
    queries and keys: remainders by 4
      tiles of 128 x 64: 2,232 before, 744 after; gain 1.7
    >>> order.positions[:3], order.positions.dtype
    (array([0, 4, 8], dtype=int32), dtype('int32'))
    >>> order.undo(order.apply(np.arange(16384), axis=0), axis=0)[:3]
    array([0, 1, 2])
    >>> figure = order.plot()  # of the tiles after reordering; with a path it writes a file
    >>> order.moved_beside({"a"}).layout(16384, 16384).counts == order.moved.layout(16384, 16384).counts
    True

    Place i of a reordered array holds position `positions[i]`: `apply` puts an array in order, `undo` puts it back, and
    rotary embeddings of a reordered model take `positions`. `kv_positions` are those of keys and values; the same
    unless the order says otherwise. `before` and `after` count tiles of `block` (queries, keys), in tokens; `gain` is
    how many times cheaper attention is by that count, gathering included. An order that changes nothing has gain 1.
    """

    mask: Mask
    q_len: int
    kv_len: int
    queries: Candidate | None  # None: as they are
    keys: Candidate | None
    block: tuple[int, int]
    before: Counts
    after: Counts
    gain: float

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """The position of the query at every place, int32 [q_len]."""
        return _places(self.queries, self.q_len)

    @cached_property
    def kv_positions(self) -> NDArray[np.int32]:
        """The position of the key at every place, int32 [kv_len]."""
        return _places(self.keys, self.kv_len)

    def apply(self, x: Any, axis: int = -2, keys: bool = False) -> Any:
        """`x`, an array of numpy, torch or JAX, in this order along `axis`; `keys` where it holds keys or values."""
        return x if (at := self._axis(x, axis, keys)) is None else take(x, self._indices[keys, False], at)

    def undo(self, x: Any, axis: int = -2, keys: bool = False) -> Any:
        """`x` as it was before `apply`."""
        return x if (at := self._axis(x, axis, keys)) is None else take(x, self._indices[keys, True], at)

    def _permuted(self, x: Any, axis: int, keys: bool = False, back: bool = False) -> Any:
        """`apply`, or `undo` where it goes `back`, whose gradient is gathered too."""
        if self._still(keys):
            return x
        at = self._axis(x, axis, keys) or 0
        # results are the user's: their memory is no scratch
        return take(x, self._indices[keys, back], at, self._indices[keys, not back], not back)

    def ready(self) -> None:
        """Compute the places now, because a graph of torch cannot.

        >>> import frisket as fk
        >>> fk.reorder("causal & dilated(1024, 4)", 16384, 16384).ready()  # before torch.compile(step)
        """
        _ = self._indices

    def _still(self, keys: bool) -> bool:
        return (self.keys if keys else self.queries) is None

    @cached_property
    def _indices(self) -> dict[tuple[bool, bool], NDArray[np.int64]]:
        both = {False: self.positions.astype(np.int64), True: self.kv_positions.astype(np.int64)}
        # the inverse of a permutation sorts it
        return {(keys, back): np.argsort(x) if back else x for keys, x in both.items() for back in (False, True)}

    def _axis(self, x: Any, axis: int, keys: bool) -> int | None:
        """An axis, counted from the first, None where nothing moves; raises where its length is not the order's."""
        size, shape = self.kv_len if keys else self.q_len, tuple(getattr(x, "shape", ()))
        if not -len(shape) <= axis < len(shape) or shape[axis] != size:
            raise ShapeError(
                f"the array is {shape or type(x).__name__}, and axis {axis} is to have {size:,} places\n"
                f"  this order is of {self.q_len:,} queries and {self.kv_len:,} keys; lengths of batches and heads "
                "come before: write axis="
            )
        return None if self._still(keys) else axis % len(shape)  # checked first, also where nothing moves

    @cached_property
    def rows(self) -> TokenPermutation | None:
        """The rows of queries and keys in unordered arrays; None where nothing moves."""
        return None if self._still(False) and self._still(True) else TokenPermutation(self.positions, self.kv_positions)

    @cached_property
    def coordinates(self) -> dict[str, Any]:
        """The arguments of `Attention.at` for arrays in this order: a formula where there is one, else a table."""
        arguments: dict[str, Any] = {}
        for name, order, length in (("q", self.queries, self.q_len), ("k", self.keys, self.kv_len)):
            if order is None:
                continue
            if (e := _formula(order, length, name)) is not None:
                arguments[name] = str(e)
            else:  # one table where queries and keys share an order: kernels read it once
                table = "order_q" if self.queries is self.keys and self.q_len == self.kv_len else f"order_{name}"
                arguments |= {name: f"{table}[{name}]", table: _places(order, length)}
        return arguments

    @property
    def by_table(self) -> bool:
        """Whether positions of queries or keys have no formula here."""
        return any(n not in ("q", "k") for n in self.coordinates)

    @cached_property
    def moved(self) -> Mask:
        """The mask of arrays in this order."""
        return self.moved_beside(())

    def moved_beside(self, names: Collection[str]) -> Mask:
        """The mask of arrays in this order, whose new tables take none of `names`."""
        return _permuted(self.mask, self.queries, self.keys, self.q_len, self.kv_len, names)

    def plot(self, path: str | Path | None = None, *, before: bool = False, **options: Any) -> Figure:
        """A picture of the tiles in this order, or as they were `before`, written to a `.png` or `.svg` if there is a
        path: `order.plot("after.png")`. Options are those of `Layout.plot`."""
        what = self.mask if before else self.moved
        return what.layout(self.q_len, self.kv_len, block=self.block).plot(path, **options)

    def __str__(self) -> str:
        if self.queries is None and self.keys is None:
            return f"no order is cheaper: {self.before.visited:,} tiles of {self.block[0]} x {self.block[1]}"
        if self.queries is self.keys:
            sides = f"queries and keys: {self.queries}"
        else:
            parts = (("queries", self.queries), ("keys", self.keys))
            sides = "; ".join(f"{side}: {order}" for side, order in parts if order is not None)
        return (
            f"{sides}\n  tiles of {self.block[0]} x {self.block[1]}: {self.before.visited:,} before, "
            f"{self.after.visited:,} after; gain {self.gain:.1f}"
        )

    __repr__ = __str__


@counting
def reorder(
    mask: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    *,
    block: tuple[int, int] = BLOCK,
    moving: float = MOVING,
    **params: Any,
) -> Order:
    """Find the order of queries and keys in which attention under a mask visits the fewest tiles.

    >>> import frisket as fk
    >>> order = fk.reorder("natten2d(256, 256, 13, 13)", 65536)
    >>> print(order)
    queries and keys: tiles of 4 x 8, 8 x 8, 8 x 16 in a grid of 256 x 256
      tiles of 128 x 64: 19,968 before, 5,828 after; gain 2.4

    The mask suggests the candidates. Remainders and quotients (`(q - k) % 4`, `q // 256`) cut positions into axes,
    which are tiled together or laid one after another; tables of rows and columns are axes, too. A table that is not
    sorted (`doc[q] == doc[k]`) gives the order of its values; a table of pairs (`blocks[q // 16, k // 16]`) gives one
    by its graph, where scipy is installed. Keys may move where queries stay. The analysis counts the tiles of each
    candidate, of `block` (queries, keys) in tokens. A tile costs its number of positions, and a partial tile 1.25 times
    that. Moving a row of q, k, v or the result costs `moving` positions. That is some 100 on a GPU, 10 on a CPU, and 0
    for a model that keeps its tokens in order. An order that gains less than a tenth is not used.

    `frisket.compile(mask, reorder=order)` moves the arrays of each call and puts the result back. A model that moves
    its tokens once, at its input, calls `frisket.compile(mask).at(**order.coordinates)`. Batch entry 0 and head 0 are
    counted. Raises `ParameterError` for a parameter without a value, `ShapeError` for lengths and tiles below 1.
    """
    what = as_mask(mask, **params)
    kv_len = q_len if kv_len is None else kv_len
    block = check_tile(block) or BLOCK
    what.check_tables(q_len, kv_len)
    if not (q_len and kv_len):
        # nothing to count, and no tile to sample
        none = what.layout(q_len, kv_len, block=block).counts
        return Order(what, q_len, kv_len, None, None, block, none, none, 1.0)
    ways = list(_ways(what, q_len, kv_len))
    move_cost = {way: moving * 2 * (q_len * (way[0] is not None) + kv_len * (way[1] is not None)) for way in ways}
    left, seen = ways[1:], _Seen(what, q_len, kv_len)  # without the present order, which is always counted
    for tiles, queries, most in ROUNDS:
        if len(left) > most:  # samples cost, too: few candidates are counted at once
            cost = {way: _sampled(seen, way, block, tiles, queries) + move_cost[way] for way in left}
            left = sorted(left, key=cost.__getitem__)[:most]
    counts = {
        way: _permuted(what, *way, q_len, kv_len).layout(q_len, kv_len, block=block, exact=False).counts
        for way in (ways[0], *left)
    }
    best = min(counts, key=lambda way: _cost(counts[way], block) + move_cost[way])
    before, after = counts[ways[0]], counts[best]
    # a mask that shows nothing has no cost
    gain = _cost(before, block) / max(_cost(after, block) + move_cost[best], 1.0)
    if gain < WORTH:
        return Order(what, q_len, kv_len, None, None, block, before, before, 1.0)
    return Order(what, q_len, kv_len, *best, block, before, after, gain)


Way = tuple["Candidate | None", "Candidate | None"]  # of queries, of keys


def _ways(what: Mask, q_len: int, kv_len: int) -> Iterator[Way]:
    """The orders to compare, the present one first."""
    yield None, None
    # candidates take strides and sides as literals
    numbers = {param(n, INT): lit(int(x)) for n, x in what.scalars.items() if isinstance(x, int | np.integer)}
    e = substitute(what.expr, numbers)
    by_name = {c.name: c for c in candidates(e, what.tables, kv_len)}
    for c in by_name.values():
        if q_len == kv_len:  # an order is of one length
            yield c, c
        if c.untiled:
            yield None, c
    if q_len != kv_len:
        for c in candidates(e, what.tables, q_len):
            yield c, by_name.get(c.name)
    yield from by_graph(what.expr, what.scalars, what.tables, q_len, kv_len)


def _places(order: Candidate | None, length: int) -> NDArray[np.int32]:
    return (np.arange(length) if order is None else order.places(length)).astype(np.int32)


def _formula(order: Candidate, length: int, name: str) -> Expr | None:
    formula = order.table is None and not order.start and closed(order.digits, length)
    return position(order.digits, var(name)) if formula else None


def _permuted(
    what: Mask, queries: Candidate | None, keys: Candidate | None, q_len: int, kv_len: int, names: Collection[str] = ()
) -> Mask:
    """The mask of arrays in another order."""
    change: dict[Expr, Expr] = {}
    places: dict[str, NDArray[np.int32]] = {}
    for name, order, length in (("q", queries, q_len), ("k", keys, kv_len)):
        if order is not None and (e := _formula(order, length, name)) is not None:
            change[var(name)] = e
        elif order is not None:
            places[name] = _places(order, length)
    tables: dict[str, NDArray[Any]] = {}
    e = what.expr
    if places:  # a kernel then reads one table, not a table at a place of another
        e, tables = folded(e, places, {**what.scalars, "Q_LEN": q_len, "KV_LEN": kv_len}, what.tables, names)
    e = substitute(e, change)
    read = {*Mask(e).unbound}  # folded tables replace some of the mask's
    return Mask(e, {n: x for n, x in {**what.params, **tables}.items() if n in read})


class _Seen:
    """The keys that queries see, each query evaluated once."""

    def __init__(self, what: Mask, q_len: int, kv_len: int) -> None:
        self.what, self.q_len, self.kv_len = what, q_len, kv_len
        self.keys = np.arange(kv_len)
        self.env = {**what.scalars, "B": 1, "H": 1, "Q_LEN": q_len, "KV_LEN": kv_len, "b": 0, "h": 0, "k": self.keys}
        self.known: dict[int, NDArray[np.int64]] = {}

    def of(self, queries: NDArray[np.int64]) -> NDArray[np.int64]:
        # candidates share many queries, and a row of a long mask takes long
        if new := [q for q in queries.tolist() if q not in self.known]:
            seen = evaluate(self.what.expr, {**self.env, "q": np.array(new)[:, None]}, self.what.tables)
            for q, row in zip(new, np.broadcast_to(seen, (len(new), self.kv_len)), strict=True):
                self.known[q] = np.flatnonzero(row)
        return np.concatenate([self.known[q] for q in queries.tolist()])


def _sampled(seen: _Seen, way: Way, block: tuple[int, int], tiles: int, queries: int) -> float:
    """The cost of the tiles of an order, by some queries of some tiles, from as many equal parts of the queries."""
    of_queries, of_keys = way
    total = 0.0
    for i in range(tiles):
        p = int((i + PLACE) * seen.q_len / tiles)
        start = p // block[0] * block[0]
        sample = np.arange(start, min(start + block[0], seen.q_len))  # the last tile may be short
        sample = sample if of_queries is None else of_queries.tile_at(p, block[0], seen.q_len)
        sample = sample[np.linspace(0, len(sample) - 1, min(queries, len(sample))).astype(np.int64)]
        keys = seen.of(sample)
        keys = keys if of_keys is None else of_keys.rank(keys, seen.kv_len)
        pairs = np.unique(keys // block[1], return_counts=True)[1]
        total += float(np.where(pairs < len(sample) * block[1], PARTIAL, 1.0).sum())
    return total / tiles * block[1] * seen.q_len


def _cost(counts: Counts, block: tuple[int, int]) -> float:
    """The time of tiles, in units of one pair of a full tile."""
    return float(counts.full + PARTIAL * counts.partial) * block[0] * block[1]
