"""Closed form: masks made of bounds on q, k and q - k alone, solved a row of tiles at a time.

For a conjunction of such bounds and a row of queries `q0..q1`, the keys that some query sees are one interval,
and so are the keys that every query sees: four formulas, no search, no table. For a disjunction the intervals of
its terms (and of the terms of its negation, for the tiles that hold an invisible point) are united by a sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import FALSE, Expr, disj
from frisket.dsl.sugar import maximum, minimum, where

from ..plan import Bounds
from ..simplify import simplify
from ..simplify.rules_boolean import negate
from .abstract import K0, K1, Q0, Q1
from .questions import System, system, terms

Array = NDArray[Any]


def _fold(pick: Callable[[Expr, Expr], Expr], *xs: Expr) -> Expr:
    out = xs[0]
    for x in xs[1:]:
        out = pick(out, x)
    return out


@lru_cache(maxsize=4096)
def bounds(mask: Expr) -> Bounds | None:
    """The four formulas of a convex mask, or None."""
    found = terms(mask)
    if found is None or len(found) != 1 or system(found[0]).rest:
        return None
    s = system(found[0])
    first, last = _visible(s)
    full_first = _fold(maximum, K0, *s.low["k"], *(Q1 - d for d in s.high["d"]))
    full_last = _fold(minimum, K1, *s.high["k"], *(Q0 - d for d in s.low["d"]))
    outside = disj(*(x > Q0 for x in s.low["q"]), *(x < Q1 for x in s.high["q"]), *(negate(f) for f in s.fixed))
    full_last = where(outside, K0 - 1, full_last) if outside is not FALSE else full_last
    return Bounds(simplify(first), simplify(full_first), simplify(full_last), simplify(last))


def _visible(s: System) -> tuple[Expr, Expr]:
    """First and last key that some query of q0..q1 sees under `s`; last < first when there is none."""
    start, stop = _fold(maximum, Q0, *s.low["q"]), _fold(minimum, Q1, *s.high["q"])
    first = _fold(maximum, K0, *s.low["k"], *(start - d for d in s.high["d"]))
    last = _fold(minimum, K1, *s.high["k"], *(stop - d for d in s.low["d"]))
    empty = disj(
        *(negate(f) for f in s.fixed),
        *(lo > hi for lo in s.low["d"] for hi in s.high["d"]),
        *(x > stop for x in s.low["q"]), *(x < Q0 for x in s.high["q"]),
    )  # fmt: skip
    empty = simplify(empty)
    return first, last if empty is FALSE else where(empty, K0 - 1, last)


@lru_cache(maxsize=4096)
def intervals(mask: Expr) -> tuple[tuple[Expr, Expr], ...] | None:
    """(first, last) for each term of `mask`, where every term is made of bounds; None otherwise."""
    found = terms(mask)
    if found is None or any(system(t).rest for t in found):
        return None
    return tuple((simplify(a), simplify(b)) for a, b in (_visible(system(t)) for t in found))


@lru_cache(maxsize=4096)
def both_sides(mask: Expr) -> tuple[tuple[tuple[Expr, Expr], ...], tuple[tuple[Expr, Expr], ...]] | None:
    """Intervals of the mask and of its negation."""
    yes, no = intervals(mask), intervals(simplify(negate(mask)))
    return None if yes is None or no is None else (yes, no)


def sweep(seen: Array, hidden: Array, columns: int) -> tuple[Array, Array, Array, Array]:
    """Unite intervals of tiles: `seen` and `hidden` are [n, terms, 2], half-open, empty where stop <= start.
    Returns (row, start, stop, kind) of the maximal runs, kind 1 where hidden reaches, else 2."""
    n = len(seen)
    ends = np.concatenate([seen.reshape(n, -1), hidden.reshape(n, -1)], axis=1)
    cuts = np.sort(np.clip(ends, 0, columns), axis=1)
    start, stop = cuts[:, :-1], cuts[:, 1:]

    def covered(parts: Array) -> Array:
        hit = np.zeros(start.shape, bool)
        for t in range(parts.shape[1]):
            hit |= (parts[:, t, :1] <= start) & (start < parts[:, t, 1:])
        return hit

    live = (start < stop) & covered(seen)
    kind = np.where(covered(hidden), 1, 2)
    row, at = np.nonzero(live)
    return row, start[row, at], stop[row, at], kind[row, at]
