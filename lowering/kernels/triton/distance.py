"""Tables read by distance: one vector for each tile of queries and keys, instead of one load for each position.

The index of `bias[h, q - k]`, with or without a clamp or buckets, is the same along a diagonal of a tile. A tile of
BLOCK_Q queries and BLOCK_K keys has BLOCK_Q + BLOCK_K - 1 diagonals. Their entries are loaded once: for one key
`k_line` and as many queries `q_line` as there are diagonals, one at each distance. Every position then takes the entry
of its diagonal out of shared memory. The values equal those of one load for each position, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from frisket.dsl.ir import Expr, build, lit, make, rebuild, substitute, uses, var, walk
from frisket.dsl.types import BOOL, INT
from frisket.lowering.derive import over
from frisket.lowering.kernels.expr import COLUMN, POSITION, SCALAR

Q_LINE, K_LINE, HERE = var("q_line"), var("k_line"), var("here")
LINE = {Q_LINE: var("q"), K_LINE: var("k")}
ALONG = {Q_LINE.name: COLUMN, K_LINE.name: COLUMN, HERE.name: POSITION}  # levels: a vector for each tile
GATHERED = "gathered"


def by_distance(root: Expr, when: Mapping[str, int]) -> Expr:
    """An Expr whose outermost lookups by distance are read from the vector of the tile's diagonals.

    >>> from frisket.dsl.ir import lookup
    >>> from frisket.dsl.sugar import k, q
    >>> [n.op for n in walk(by_distance(lookup("bias", (q - k,)), {"q": 1, "k": 2}))]
    ['var', 'var', 'sub', 'lookup', 'var', 'gathered']
    """
    lookups = [n for n in walk(root) if n.op == "lookup" and _along(n, when)]
    below = {x for n in lookups for a in n.args for x in walk(a)}
    taken = {n: _taken(n) for n in lookups if n not in below}
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        done[node] = taken[node] if node in taken else rebuild(node, tuple(done[a] for a in node.args))
    return done[root]


def _along(e: Expr, when: Mapping[str, int]) -> bool:
    """Whether a lookup depends on `q - k`, and beside it only on values that a program has one of."""
    return over((e,)) == "diagonal" and all(when.get(n, SCALAR) == SCALAR for n in uses(e) & {"b", "h"})


def _taken(e: Expr) -> Expr:
    line = substitute(e, {x: y for y, x in LINE.items()})
    if e.type is not BOOL:
        return make(GATHERED, (line, HERE), None, e.type)
    return build("ne", make(GATHERED, (build("int", line), HERE), None, INT), lit(0))
