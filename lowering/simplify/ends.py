"""The keys that one query sees as an interval: its ends, and the conditions that no interval says.

Kernels compare a position of a border tile with ends that they work out once per query, instead of asking the whole
mask of every pair. With `axis="q"` it is the other way around: the queries that see one key.

>>> from frisket.dsl.sugar import eq, k, q
>>> found = ends_of((q >= k) & (q - k < 256) & eq(k % 4, 1))
>>> found.first, found.last, found.rest
(q - 255, q, k % 4 == 1)
>>> ends_of(q >= k, axis="q").first
k
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from frisket.dsl.ir import TRUE, Expr, build, conj, substitute, uses, var, walk
from frisket.grammar.memo import memo

from .affine import linear
from .curves import Curve, solve, together

_Q, _K = var("q"), var("k")
SEARCHED = ("run_first", "run_last", "segment_first", "segment_last", "rank_first", "rank_last")
_TURN = {_Q: _K, _K: _Q}


@dataclass(frozen=True)
class Ends:
    """The positions that one row sees: those from `first` to `last`, inclusive, for which `rest` holds. Exprs in the
    row's own coordinate, None where there is no bound; `asks` is a condition on the row alone, and without it the row
    sees nothing."""

    first: Expr | None
    last: Expr | None
    asks: Expr
    rest: Expr


@memo(group="expressions")
def ends_of(mask: Expr, axis: str = "k", runs: Collection[str] = ()) -> Ends | None:
    """The ends of a simplified mask along an axis, None where no term is a bound. `runs` are tables for which
    `run_first` and its like, which some ends are made of, have a meaning: equal entries stand together, say."""
    lows: list[Curve] = []
    highs: list[Curve] = []
    asks, rest = TRUE, TRUE
    for term in mask.args if mask.op == "and" else (mask,):
        e = term if axis == "k" else substitute(term, _TURN)
        found = solve(e)
        if found is None or not _known(found, runs):
            found = together(e)
        if "k" not in uses(e):
            asks = conj(asks, term)
        elif found is None or not _known(found, runs):
            rest = conj(rest, term)
        else:
            lows += [c for c in found if c.side == "low"]
            highs += [c for c in found if c.side == "high"]
    if not (lows or highs):
        return None
    first, last = (_one(_decisive(curves), op, axis) for curves, op in ((lows, "max"), (highs, "min")))
    return Ends(first, last, asks, rest)


def _known(found: tuple[Curve, ...], runs: Collection[str]) -> bool:
    facts = [c.needs for c in found if c.needs is not TRUE]
    facts += [n for c in found for n in walk(c.value) if n.op in SEARCHED]
    return all(n.name in runs and n.op in ("has_runs", *SEARCHED) for n in facts)


def _decisive(curves: list[Curve]) -> list[Curve]:
    """The bounds that no other one implies: the last entry of a run that holds q is not before q."""
    return [c for c in curves if not any(c is not other and _implied(c, other) for other in curves)]


def _implied(c: Curve, other: Curve) -> bool:
    if c.near is None or c.near is c.value:
        return False
    gap = linear(other.value) - linear(c.near)
    return not gap.terms and (gap.const >= 0 if c.side == "low" else gap.const <= 0)


def _one(curves: list[Curve], op: str, axis: str) -> Expr | None:
    found: Expr | None = None
    for c in curves:
        value = c.value if axis == "k" else substitute(c.value, _TURN)
        found = value if found is None else build(op, found, value)
    return found
