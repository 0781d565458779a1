"""Documents that return: whether the queries and the keys of a box have an entry of a table in common.

Each tile has the set of entries that it holds, in bits, and runs of 2, 4, 8, ... tiles have their unions: a box is two
unions along each axis, where minima and maxima would overlap almost everywhere. Of `T[q] == T[k] & T[q] > 0`, the sets
leave out queries whose entries are not above 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr, conj, disj, uses, var
from frisket.dsl.types import INT

if TYPE_CHECKING:
    from .tiles import Grid

Array = NDArray[Any]
BYTES = 1 << 25  # of the sets along an axis
PART = 1 << 16  # positions whose entries are looked up at once
# the values of a condition, or None where it has none or they cost too much
Asked = Callable[[Expr, Mapping[str, Array]], Array | None]


@dataclass(frozen=True)
class CommonIds:
    """A clause of a mask: a box is EMPTY where no part's sets of queries and of keys have an entry in common, and
    `rest`, the parts without sets, holds nothing."""

    parts: list[list[tuple[Array, Array]]]
    rest: Expr | None

    @property
    def words(self) -> int:
        """The words of 64 bits that a question about a box reads."""
        return sum(len(sets) * sets[0][0].shape[-1] for sets in self.parts)

    def shared(self, live: Array) -> Array:
        """Whether each box has, in some part, an entry in common in all of its sets."""
        s, r0, r1, c0, c1 = live
        found = np.zeros(live.shape[1], bool)
        for part in self.parts:
            both = ((_union(of_q, s, r0, r1) & _union(of_k, s, c0, c1)).any(axis=1) for of_q, of_k in part)
            found |= np.logical_and.reduce([*both])
        return found


def common_ids(mask: Expr, arrays: Mapping[str, Array], grid: Grid, asked: Asked) -> list[CommonIds]:
    """The clauses of a conjunction with sets for `T[q] == U[k]` in some part; b and h may stand before q and k."""
    made = []
    for clause in mask.args if mask.op == "and" else (mask,):
        sets = {part: _of_part(part, arrays, grid, asked) for part in (clause.args if clause.op == "or" else (clause,))}
        if any(sets.values()):
            rest = [part for part, found in sets.items() if not found]
            made.append(CommonIds([x for x in sets.values() if x], disj(*rest) if rest else None))
    return made


def sides_of_ids(e: Expr) -> list[Expr]:
    """The lookups of `T[q] == U[k]`, that of q first; b and h may stand before q and k. None for other Exprs."""
    reads = {a.args[-1]: a for a in e.args if a.op == "lookup" and a.type is INT} if e.op == "eq" else {}
    sides = [reads[var(n)] for n in "qk" if var(n) in reads]
    return sides if len(sides) == 2 and {a for s in sides for a in s.args[:-1]} <= {var("b"), var("h")} else []


def _of_part(part: Expr, arrays: Mapping[str, Array], grid: Grid, asked: Asked) -> list[tuple[Array, Array]]:
    conditions = part.args if part.op == "and" else (part,)
    pairs = []
    for e in conditions:
        if not (sides := sides_of_ids(e)):
            continue
        found = np.unique(np.concatenate([np.unique(arrays[s.name]) for s in sides]))
        tiles = max(grid.rows, grid.columns)
        if len(grid.b) * tiles * tiles.bit_length() * len(found) // 8 <= BYTES:
            pairs.append((sides, found))
    if not pairs:
        return []
    kept = [_kept([e for e in conditions if uses(e) & {"q", "k"} == {name}], name, grid, asked) for name in "qk"]
    made = []
    for sides, found in pairs:
        of_q, of_k = (_sets(side, arrays, found, grid, axis, kept[axis]) for axis, side in enumerate(sides))
        made.append((of_q, of_k))
    return made


def _places(grid: Grid, axis: int, at: Array) -> dict[str, Array]:
    """b, h, q and k of positions along an axis: [slices, positions] or [slices, 1]."""
    starts = {"b": grid.b, "h": grid.h, "q": grid.q, "k": grid.k}
    return {n: x[:, None] + (at if n == "qk"[axis] else 0) for n, x in starts.items()}


def _kept(conditions: list[Expr], name: str, grid: Grid, asked: Asked) -> Array | None:
    """Whether each position meets conditions on it alone, [slices, length]; None where nothing is known."""
    if not conditions:
        return None
    axis = "qk".index(name)
    places = _places(grid, axis, np.arange((grid.q_len, grid.kv_len)[axis]))
    found = asked(conj(*conditions), {n: places[n] for n in ("b", "h", name)})
    return None if found is None else np.broadcast_to(found, np.broadcast_shapes(*(x.shape for x in places.values())))


def _sets(e: Expr, arrays: Mapping[str, Array], found: Array, grid: Grid, axis: int, kept: Array | None) -> Array:
    """[levels, slices, tiles, words]: the sets of 1, 2, 4, ... tiles from each tile on, of positions that are kept."""
    tiles, table = (grid.rows, grid.columns)[axis], arrays[e.name]
    length, words = (grid.q_len, grid.kv_len)[axis], -(-len(found) // 64)
    levels = np.empty((tiles.bit_length(), len(grid.b), tiles, words), np.uint64)
    bits = np.zeros((len(grid.b), tiles, words * 64), bool)
    for start in range(0, length, PART):
        at = np.arange(start, min(start + PART, length))
        places = _places(grid, axis, at)
        where = (places[a.name] for a in e.args)
        entry = table[tuple(np.clip(x, 0, n - 1) for x, n in zip(where, table.shape, strict=True))]
        slices = np.arange(len(grid.b))[:, None]
        put = np.broadcast_arrays(slices, at // grid.block[axis], np.searchsorted(found, entry))
        bits[tuple(put) if kept is None else tuple(x[kept[:, at]] for x in put)] = True
    levels[0] = np.packbits(bits, axis=-1).view(np.uint64)
    for n in range(1, len(levels)):
        far = np.minimum(np.arange(tiles) + (1 << n - 1), tiles - 1)
        np.bitwise_or(levels[n - 1], levels[n - 1][:, far], out=levels[n])
    return levels


def _union(sets: Array, s: Array, first: Array, end: Array) -> Array:
    level = np.frexp(end - first)[1] - 1
    return np.asarray(sets[level, s, first] | sets[level, s, end - (1 << level)])
