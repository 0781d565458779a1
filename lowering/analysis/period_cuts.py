"""Cuts tiles at periods of `// n` and `% n`: inside a piece, rows, columns and frames of an image are plain numbers,
so ranges are exact that over the whole tile would be unbounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr, var, walk
from frisket.grammar.memo import memo
from frisket.lowering.simplify.affine import linear, write
from frisket.lowering.simplify.curves import depends

Array = NDArray[Any]
_MOST = 64  # pieces a tile may be cut into
_EDGES = {"q": ("q0", "q1"), "k": ("k0", "k1")}


@memo(group="expressions")
def cuts(mask: Expr) -> tuple[tuple[str, Expr, Expr], ...]:
    """The (axis, shift, period) of cuts, where `(x + shift) // period` steps, for `//` and `%` of one coordinate."""
    found: dict[tuple[str, Expr, Expr], None] = {}
    for node in walk(mask):
        if node.op in ("floordiv", "mod") and len(depends(node)) == 1 and not depends(node.args[1]):
            inner, period = node.args
            while inner.op == "floordiv" and not depends(inner.args[1]):
                inner, period = inner.args[0], inner.args[1] * period
            (axis,) = depends(node)
            form = linear(inner)
            if form.coefficient(var(axis)) == 1 and not depends(rest := write(form.without(var(axis)))):
                found[axis, rest, period] = None
    return tuple(found)


def pieces(mask: Expr, env: Mapping[str, Array], value: Callable[..., Array]) -> tuple[Array, dict[str, Array]]:
    """The pieces that tiles are cut into, as many as allowed: the tile of each piece, sorted, and the corners."""
    n = len(env["q0"])
    owner = np.arange(n)
    box = {name: env[name].copy() for name in ("q0", "q1", "k0", "k1")}
    fixed = {name: env[name] for name in ("b", "h")}
    for axis, shift, period in cuts(mask):
        lo, hi = _EDGES[axis]
        c, p = (np.broadcast_to(value(e, fixed), (n,)) for e in (shift, period))
        while True:
            room = np.bincount(owner, minlength=n)[owner] < _MOST
            mine, by = c[owner], np.maximum(p[owner], 1)
            at = ((box[lo] + mine) // by + 1) * by - mine  # the first position past lo where a new stretch begins
            split = np.flatnonzero((p[owner] > 1) & (at <= box[hi]) & room)
            if not len(split):
                break
            new = {name: x[split] for name, x in box.items()}
            new[lo] = at[split]
            box[hi][split] = at[split] - 1
            box = {name: np.concatenate([x, new[name]]) for name, x in box.items()}
            owner = np.concatenate([owner, owner[split]])
    order = np.argsort(owner, kind="stable")
    return owner[order], {name: x[order] for name, x in box.items()}
