"""Documents that return: whether the queries and the keys of a box have an entry of a table in common.

Each tile has the set of entries that it holds, in bits, and runs of 2, 4, 8, ... tiles have their unions: a box is two
unions along each axis, where minima and maxima would overlap almost everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr, var
from frisket.dsl.types import INT

Array = NDArray[Any]
BYTES = 1 << 24  # of the sets along an axis


def common_ids(mask: Expr, arrays: Mapping[str, Array], grid: Any) -> list[tuple[Array, Array]]:
    """The sets of queries and of keys for each clause `T[q] == U[k]` of a conjunction; b and h may stand before."""
    made = []
    for e in mask.args if mask.op == "and" else (mask,):
        reads = {a.args[-1]: a for a in e.args if a.op == "lookup" and a.type is INT} if e.op == "eq" else {}
        sides = [reads[var(n)] for n in "qk" if var(n) in reads]
        if len(sides) < 2 or not {*sides[0].args[:-1], *sides[1].args[:-1]} <= {var("b"), var("h")}:
            continue
        found = np.unique(np.concatenate([np.unique(arrays[s.name]) for s in sides]))
        tiles = max(grid.rows, grid.columns)
        if len(grid.b) * tiles * tiles.bit_length() * len(found) // 8 <= BYTES:
            made.append((_sets(sides[0], arrays, found, grid, 0), _sets(sides[1], arrays, found, grid, 1)))
    return made


def shared(sets: tuple[Array, Array], live: Array) -> Array:
    """Whether each box has an entry in common."""
    s, r0, r1, c0, c1 = live
    return np.asarray((_union(sets[0], s, r0, r1) & _union(sets[1], s, c0, c1)).any(axis=1))


def _sets(e: Expr, arrays: Mapping[str, Array], found: Array, grid: Any, axis: int) -> Array:
    """[levels, slices, tiles, words]: the sets of 1, 2, 4, ... tiles from each tile on."""
    length, tiles = (grid.q_len, grid.kv_len)[axis], (grid.rows, grid.columns)[axis]
    at = np.arange(length)
    starts = {"b": grid.b, "h": grid.h, "q": grid.q, "k": grid.k}
    where = {var(n): x[:, None] + at * (n in "qk") for n, x in starts.items()}
    table = arrays[e.name]
    entry = table[tuple(np.clip(where[a], 0, n - 1) for a, n in zip(e.args, table.shape, strict=True))]
    bits = np.zeros((len(grid.b), tiles, -(-len(found) // 64) * 64), bool)
    bits[np.arange(len(grid.b))[:, None], at // grid.block[axis], np.searchsorted(found, entry)] = True
    levels = [np.packbits(bits, axis=-1).view(np.uint64)]
    for n in range(tiles.bit_length() - 1):
        one, far = levels[-1], np.minimum(np.arange(tiles) + (1 << n), tiles - 1)
        levels.append(one | one[:, far])
    return np.stack(levels)


def _union(sets: Array, s: Array, first: Array, end: Array) -> Array:
    level = np.frexp(end - first)[1] - 1
    return np.asarray(sets[level, s, first] | sets[level, s, end - (1 << level)])
