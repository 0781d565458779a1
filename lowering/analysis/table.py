"""Tables at bind time: exact minima and maxima over index ranges, and facts of the whole table.

>>> t = Table(np.array([3, 1, 2]))
>>> t.extreme("min", [np.array([1])], [np.array([2])])
array([1])

Where documents return, queries and keys of a box are asked for an entry in common. Each tile has the set of entries
that it holds, in bits, and runs of 2, 4, 8, ... tiles have their unions: a box is two unions along each axis, where
minima and maxima would overlap almost everywhere. Of `T[q] == T[k] & T[q] > 0`, the sets leave out queries whose
entries are not above 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr, conj, disj, operands, uses

from .solve import ENDS_OF_RUNS, sides_of_ids

if TYPE_CHECKING:
    from .tiles import Grid


Array = NDArray[Any]
BEYOND = 1 << 40  # further than any position; its products with lengths still fit
RUN_LIMIT = 1 << 28  # past every position that kernels compare with the ends of runs


@dataclass(frozen=True)
class TableFacts:
    """Facts of a table's last axis: order, and `runs`, stretches of equal entries (None where a value has several)."""

    low: float
    high: float
    sorted: bool
    constant: bool
    runs: int | None
    permutation: bool  # of 0..size

    def __str__(self) -> str:
        names = [name for name in ("constant", "sorted", "permutation") if getattr(self, name)]
        if self.runs is not None and not self.permutation:
            names.append(f"{self.runs:,} run" + "s" * (self.runs != 1))
        return ", ".join([*names, f"{self.low}..{self.high}"])


class Table:
    """A bound array with its range queries; trees are built when first asked, in O(size)."""

    def __init__(self, array: Array) -> None:
        self.array = np.asarray(array)
        self._trees: dict[tuple[str, int], Array] = {}
        self._pyramid: dict[tuple[str, tuple[int, ...]], Array] = {}

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self.array if dtype is None else self.array.astype(dtype)

    @cached_property
    def sorted(self) -> bool:
        """Whether a table of one axis never decreases."""
        a = self.array
        return a.ndim == 1 and a.dtype != np.bool_ and bool(np.all(a[1:] >= a[:-1]))

    @cached_property
    def starts(self) -> Array:
        """The starts of stretches of equal entries along the last axis, as sorted positions in the flat array."""
        n = self.array.shape[-1]
        flat = self.array.reshape(-1)
        change = np.empty(len(flat), np.bool_)
        np.not_equal(flat[1:], flat[:-1], out=change[1:])
        change[::n] = True  # runs do not cross rows
        return np.flatnonzero(change)

    @cached_property
    def has_runs(self) -> bool:
        """Whether equal entries are adjacent along the last axis."""
        row, value = self.starts // self.array.shape[-1], self.array.reshape(-1)[self.starts]
        order = np.lexsort((value, row))
        row, value = row[order], value[order]
        return not bool(((row[1:] == row[:-1]) & (value[1:] == value[:-1])).any())

    @cached_property
    def facts(self) -> TableFacts:
        """The facts seen when the table is bound."""
        a = self.array
        whole = a.dtype.kind in "iu"
        distinct = a.ndim == 1 and len(self.starts) == a.size and self.has_runs
        # fmin and fmax pass over NaN
        low, high = np.fmin.reduce(a, axis=None).item(), np.fmax.reduce(a, axis=None).item()
        constant, runs = bool((a == a.reshape(-1)[0]).all()), len(self.starts) if self.has_runs else None
        permutation = bool(whole and distinct and a.min() == 0 and a.max() == a.size - 1)
        return TableFacts(low, high, self.sorted, constant, runs, permutation)

    def run(self, end: str, index: Sequence[Array]) -> Array:
        """The first or last position of the run of equal entries that holds `index`, along the last axis. Lookups
        clamp, so the first run reaches back and the last run on without end."""
        *fixed, at = (np.clip(x, 0, n - 1) for x, n in zip(index, self.array.shape, strict=True))
        n = self.array.shape[-1]
        row = np.zeros((), np.int64)
        for x, size in zip(fixed, self.array.shape, strict=False):
            row = row * size + x
        base = row * n
        place = np.searchsorted(self.starts, base + at, side="right")
        if end == "first":
            position = self.starts[place - 1] - base
            return np.where(position == 0, -BEYOND, position)
        position = np.append(self.starts, self.array.size)[place] - base - 1
        return np.where(position == n - 1, BEYOND, position)

    def segment(self, end: str, index: Array) -> Array:
        """The first or last position of the segment that holds `index`, the array being offsets."""
        inner = np.unique(self.array[1:-1])  # equal offsets enclose no position
        ends = np.concatenate([[-BEYOND], inner, [BEYOND + 1]])
        place = np.searchsorted(ends, index, side="right")
        return ends[place - 1] if end == "first" else ends[place] - 1

    def rank(self, end: str, value: Array) -> Array:
        """The first position whose entry is at least `value`, or the last whose entry is at most `value`. A sorted
        array is read, whose last entry goes on without end, and whose first reaches back."""
        n = len(self.array)
        if end == "first":
            position = np.searchsorted(self.array, value, side="left")
            return np.where(position == 0, -BEYOND, np.where(position == n, BEYOND, position))
        position = np.searchsorted(self.array, value, side="right") - 1
        return np.where(position < 0, -BEYOND, np.where(position == n - 1, BEYOND, position))

    def extreme(self, kind: str, lows: Sequence[Array], highs: Sequence[Array]) -> Array:
        """The minimum or maximum (`all` or `any` of a Bool table) over the box `lows..highs`, inclusive; ends are
        clamped to the table as lookups are. Exact when at most one axis ranges, or when boxes are aligned powers of
        two; otherwise over a box that covers the one asked for."""
        sides = [[np.clip(x, 0, n - 1) for x, n in zip(ends, self.array.shape, strict=True)] for ends in (lows, highs)]
        flat, axes = np.broadcast_arrays(*sides[0], *sides[1]), self.array.ndim
        los, his = flat[:axes], flat[axes:]
        ranging = [i for i, (lo, hi) in enumerate(zip(los, his, strict=True)) if np.any(lo != hi)]
        if not ranging:
            return np.asarray(self.array[tuple(los)])
        return self._line(kind, ranging[0], los, his) if len(ranging) == 1 else self._box(kind, los, his)

    def _line(self, kind: str, axis: int, los: Sequence[Array], his: Sequence[Array]) -> Array:
        """An iterative segment tree along one axis, a tree for every index of the other axes."""
        n = self.array.shape[axis]
        tree = self._tree(kind, axis)
        join = _join(kind)
        row = np.zeros(los[0].shape, np.int64)
        for i, size in enumerate(self.array.shape):
            if i != axis:
                row = row * size + los[i]
        flat = tree.reshape(-1)
        base = row * (2 * n)
        lo, hi = los[axis] + n, his[axis] + n + 1
        out = flat[base + lo]
        while True:
            active = lo < hi
            if not active.any():
                return np.asarray(out)
            left, right = active & (lo & 1 == 1), active & (hi & 1 == 1)
            # where nothing is joined, any node may be read: node 1 is always there
            out = np.where(left, join(out, flat[base + np.where(left, lo, 1)]), out)
            out = np.where(right, join(out, flat[base + np.where(right, hi - 1, 1)]), out)
            lo, hi = np.where(active, (lo + left) >> 1, lo), np.where(active, (hi - right) >> 1, hi)

    def _tree(self, kind: str, axis: int) -> Array:
        key = (kind, axis)
        if key not in self._trees:
            leaves = np.moveaxis(self.array, axis, -1)
            n = leaves.shape[-1]
            tree = np.empty((*leaves.shape[:-1], 2 * n), leaves.dtype)
            tree[..., n:] = leaves
            tree[..., 0] = leaves[..., 0]
            stop, join = n, _join(kind)
            while stop > 1:  # one level of nodes [start, stop) at a time, children first
                start = (stop + 1) // 2
                tree[..., start:stop] = join(
                    tree[..., 2 * start : 2 * stop : 2], tree[..., 2 * start + 1 : 2 * stop : 2]
                )
                stop = start
            self._trees[key] = np.ascontiguousarray(tree)
        return self._trees[key]

    def _box(self, kind: str, los: Sequence[Array], his: Sequence[Array]) -> Array:
        """The blocks of 2**level entries per axis, at most two per axis, that cover the box."""
        shape = los[0].shape
        flat_lo, flat_hi = ([x.reshape(-1) for x in xs] for xs in (los, his))
        levels = np.zeros(flat_lo[0].shape, np.int64)  # of all axes, 6 bits each
        for i, (lo, hi) in enumerate(zip(flat_lo, flat_hi, strict=True)):
            levels |= _levels(hi - lo + 1) << 6 * i
        out = np.empty(flat_lo[0].shape, self.array.dtype)
        for each in np.unique(levels).tolist():
            mine = levels == each
            level = tuple(each >> 6 * i & 63 for i in range(len(flat_lo)))
            blocks = self._blocks(kind, level)
            ends = [(lo[mine] >> x, hi[mine] >> x) for lo, hi, x in zip(flat_lo, flat_hi, level, strict=True)]
            extremes: Array | None = None
            for corner in np.ndindex(*(2,) * len(ends)):
                part = blocks[tuple(e[c] for e, c in zip(ends, corner, strict=True))]
                extremes = part if extremes is None else _join(kind)(extremes, part)
            out[mine] = extremes
        return out.reshape(shape)

    def _blocks(self, kind: str, levels: tuple[int, ...]) -> Array:
        """The extreme of every block of 2**level entries per axis, by pairs of the blocks that are half as long."""
        key = (kind, levels)
        if key not in self._pyramid:
            axis = int(np.argmax(levels))
            extremes = self.array
            if levels[axis]:
                half = self._blocks(kind, (*levels[:axis], levels[axis] - 1, *levels[axis + 1 :]))
                half = np.moveaxis(half, axis, 0)
                pairs = _join(kind)(half[:-1:2], half[1::2])
                # an odd block at the end has no partner
                extremes = np.moveaxis(np.concatenate([pairs, half[-1:]]) if len(half) % 2 else pairs, 0, axis)
            self._pyramid[key] = extremes
        return self._pyramid[key]


def _levels(width: Array) -> Array:
    """The smallest level whose blocks are at least as wide as a range: two blocks cover any range of this width."""
    return np.ceil(np.log2(np.maximum(width, 1))).astype(np.int64)


def _join(kind: str) -> np.ufunc:
    return np.minimum if kind == "min" else np.maximum


def derived_table(table: Any, derived: str) -> Any:
    """The table that a kernel reads, of the user's on the host. `TableUse` says what `derived` may be."""
    if not derived:
        return table
    if derived not in ENDS_OF_RUNS:
        return _segments(table, derived)
    host_table, (how, end) = Table(np.asarray(table)), derived.split("_")
    if how == "run":
        positions = host_table.run(end, np.indices(host_table.array.shape, sparse=True))
    else:  # from the last segment's first index on, lookups clamp
        positions = host_table.segment(end, np.arange(max(int(host_table.array[1:-1].max(initial=0)), 0) + 1))
    return np.clip(positions, -RUN_LIMIT, RUN_LIMIT).astype(np.int32)


def _segments(offsets: Any, derived: str) -> NDArray[np.int32]:
    array = np.asarray(offsets)
    if derived == "segment":  # from the last segment's first index on, lookups clamp
        at = np.arange(max(int(array[-2:][0]), 0) + 1)
    else:  # back to where the first segment ends
        at = -1 - np.arange(max(-int(array[1:][0]), 0) + 1) if len(array) > 1 else np.array([-1])
    segments = np.searchsorted(array, at, side="right") - 1
    return np.clip(segments, 0, max(len(array) - 2, 0)).astype(np.int32)


BYTES = 1 << 25  # of the sets along an axis
PART = 1 << 16  # positions whose entries are looked up at once
# the values of a condition, or None where it has none or they cost too much
Value = Callable[[Expr, Mapping[str, Array]], Array | None]


@dataclass(frozen=True)
class CommonIds:
    """A clause of a mask: a box is EMPTY where no part's sets of queries and of keys have an entry in common. There
    `rest`, the parts without sets, holds nothing."""

    parts: list[list[tuple[Array, Array]]]
    rest: Expr | None

    @property
    def words(self) -> int:
        """The words of 64 bits that a question about a box reads."""
        return sum(len(sets) * sets[0][0].shape[-1] for sets in self.parts)

    def shared(self, boxes: Array) -> Array:
        """Whether each box has, in some part, an entry in common in all of its sets."""
        s, r0, r1, c0, c1 = boxes
        common = np.zeros(boxes.shape[1], bool)
        for part in self.parts:
            both = ((_union(of_q, s, r0, r1) & _union(of_k, s, c0, c1)).any(axis=1) for of_q, of_k in part)
            common |= np.logical_and.reduce([*both])
        return common


def common_ids(mask: Expr, arrays: Mapping[str, Array], grid: Grid, value: Value) -> list[CommonIds]:
    """The clauses of a conjunction with sets for `T[q] == U[k]` in some part; b and h may stand before q and k."""
    clauses = []
    for clause in operands("and", mask):
        sets = {part: _of_part(part, arrays, grid, value) for part in operands("or", clause)}
        if any(sets.values()):
            rest = [part for part, ids in sets.items() if not ids]
            clauses.append(CommonIds([x for x in sets.values() if x], disj(*rest) if rest else None))
    return clauses


def _of_part(part: Expr, arrays: Mapping[str, Array], grid: Grid, value: Value) -> list[tuple[Array, Array]]:
    conditions = operands("and", part)
    pairs = []
    for e in conditions:
        if (sides := sides_of_ids(e)) is None:
            continue
        entries = np.unique(np.concatenate([np.unique(arrays[s.name]) for s in sides]))
        tiles = max(grid.rows, grid.columns)
        if len(grid.b) * tiles * tiles.bit_length() * len(entries) // 8 <= BYTES:
            pairs.append((sides, entries))
    if not pairs:
        return []
    meets = [_meets([e for e in conditions if uses(e) & {"q", "k"} == {name}], name, grid, value) for name in "qk"]
    sets = []
    for sides, entries in pairs:
        of_q, of_k = (_sets(side, arrays, entries, grid, axis, meets[axis]) for axis, side in enumerate(sides))
        sets.append((of_q, of_k))
    return sets


def _places(grid: Grid, axis: int, at: Array) -> dict[str, Array]:
    """b, h, q and k of positions along an axis: [slices, positions] or [slices, 1]."""
    starts = {"b": grid.b, "h": grid.h, "q": grid.q, "k": grid.k}
    return {n: x[:, None] + (at if n == "qk"[axis] else 0) for n, x in starts.items()}


def _meets(conditions: list[Expr], name: str, grid: Grid, value: Value) -> Array | None:
    """Whether each position meets conditions on it alone, [slices, length]; None where nothing is known."""
    if not conditions:
        return None
    axis = "qk".index(name)
    places = _places(grid, axis, np.arange((grid.q_len, grid.kv_len)[axis]))
    values = value(conj(*conditions), {n: places[n] for n in ("b", "h", name)})
    return None if values is None else np.broadcast_to(values, np.broadcast_shapes(*(x.shape for x in places.values())))


def _sets(e: Expr, arrays: Mapping[str, Array], entries: Array, grid: Grid, axis: int, meets: Array | None) -> Array:
    """[levels, slices, tiles, words]: the sets of 1, 2, 4, ... tiles from each tile on, of positions that count."""
    tiles, table = (grid.rows, grid.columns)[axis], arrays[e.name]
    length, words = (grid.q_len, grid.kv_len)[axis], -(-len(entries) // 64)
    levels = np.empty((tiles.bit_length(), len(grid.b), tiles, words), np.uint64)
    bits = np.zeros((len(grid.b), tiles, words * 64), bool)
    for start in range(0, length, PART):
        at = np.arange(start, min(start + PART, length))
        places = _places(grid, axis, at)
        where = (places[a.name] for a in e.args)
        entry = table[tuple(np.clip(x, 0, n - 1) for x, n in zip(where, table.shape, strict=True))]
        slices = np.arange(len(grid.b))[:, None]
        put = np.broadcast_arrays(slices, at // grid.block[axis], np.searchsorted(entries, entry))
        bits[tuple(put) if meets is None else tuple(x[meets[:, at]] for x in put)] = True
    levels[0] = np.packbits(bits, axis=-1).view(np.uint64)
    for n in range(1, len(levels)):
        # past the end: the last tile, which the union has already
        far = np.minimum(np.arange(tiles) + (1 << n - 1), tiles - 1)
        np.bitwise_or(levels[n - 1], levels[n - 1][:, far], out=levels[n])
    return levels


def _union(sets: Array, s: Array, first: Array, end: Array) -> Array:
    level = np.frexp(end - first)[1] - 1  # exact, where a logarithm may round up
    return np.asarray(sets[level, s, first] | sets[level, s, end - (1 << level)])
