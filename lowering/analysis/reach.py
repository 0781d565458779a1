"""Windows that a weight implies: a factor without `score` counts as 0 below the smallest normal number.

>>> from frisket.dsl.sugar import k, q, score
>>> weight = score * lit(0.97) ** build("float", q - k)
>>> narrowed(ProgramExprs(weight=weight), {}, {})[0].mask
q - k <= 2867
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import TRUE, Expr, build, conj, lit, lookup, uses
from frisket.dsl.types import INT
from frisket.lowering.simplify import ProgramExprs

Array = NDArray[Any]
SMALLEST, SMALLEST_DOUBLE = 2.0**-126, 2.0**-1022  # factors below count as 0: in float32, in float64
FARTHEST = 2.0**40  # distances from here on are no window


def narrowed(
    exprs: ProgramExprs, scalars: Mapping[str, Any], tables: Mapping[str, Array], least: float = SMALLEST
) -> tuple[ProgramExprs, dict[str, Array]]:
    """The expressions with the windows of a weight in their mask, and the tables that these windows read.

    `gamma[h] ** (q - k)` has one distance for each head. `scalars` and `tables` are the values that the host knows.
    Where `divide` reads `count` the mask stays the same, because keys of weight 0 count."""
    if exprs.weight is None or (exprs.divide is not None and "count" in uses(exprs.divide)):
        return exprs, {}
    terms, new = [], dict[str, Array]()
    for factor in _factors(exprs.weight):
        if "score" in uses(factor) or (exponential := _exponential(factor)) is None:
            continue
        rate, distance = exponential
        logs = _logarithms(rate, scalars, tables)
        if logs is None or (distances := _reach(logs, least)) is None:
            continue
        if rate.op == "lookup":
            new[f"reach_of_{rate.name}"] = distances
        reach = lookup(f"reach_of_{rate.name}", rate.args, INT) if rate.op == "lookup" else lit(int(distances))
        # a base below 1 shrinks with the distance; a base above 1 shrinks as the distance goes below 0
        terms.append(build("le", distance, reach) if (logs < 0).all() else build("ge", distance, -reach))
    if not terms:
        return exprs, {}
    mask = conj(exprs.visible, *terms)
    return replace(exprs, mask=None if mask is TRUE else mask), new


def _factors(e: Expr) -> Iterator[Expr]:
    """The factors of a product."""
    if e.op == "mul":
        for part in e.args:
            yield from _factors(part)
    else:
        yield e


def _exponential(e: Expr) -> tuple[Expr, Expr] | None:
    """(x, n) of a factor `x ** n` with an Int n; None of other factors."""
    if e.op != "pow" or e.args[1].op != "float" or e.args[1].args[0].type is not INT:
        return None
    base, (distance,) = e.args[0], e.args[1].args
    reads = uses(base) | frozenset().union(*(uses(a) for a in base.args))
    return (base, distance) if base.op in ("lit", "param", "lookup") and not reads & {"q", "k"} else None


def _logarithms(base: Expr, scalars: Mapping[str, Any], tables: Mapping[str, Array]) -> Array | None:
    """The logarithms of the values of a base; None where some are unknown, or their signs differ."""
    if base.op == "lit":
        values = np.asarray(base.name, np.float64)
    elif base.name in (scalars if base.op == "param" else tables):
        values = np.asarray((scalars if base.op == "param" else tables)[base.name], np.float64)
    else:
        return None
    one_sign = ((values > 0) & (values < 1)).all() or ((values > 1) & np.isfinite(values)).all()
    return np.asarray(np.log(values)) if one_sign else None


def _reach(logs: Array, least: float) -> Array | None:
    """The largest distances at which powers are at least `least`; None where one is too far to be a window."""
    reach = np.floor(math.log(least) / -np.abs(logs))
    return reach.astype(np.int64) if (reach < FARTHEST).all() else None
