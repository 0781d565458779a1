"""Expressions read at positions that stand in an array: parts that depend on one position become tables, and
tables that are read by a query and a key are put in the order of the positions.

>>> from frisket.dsl.sugar import eq, k, q
>>> import numpy as np
>>> places = np.array([0, 2, 1, 3])
>>> e, tables = folded((q >= k) & eq(q % 2, k % 2), {"q": places, "k": places}, {}, {})
>>> e, {n: t.tolist() for n, t in tables.items()}
(at_0[q] >= at_0[k] & at_1[q] == at_1[k], {'at_0': [0, 2, 1, 3], 'at_1': [0, 0, 1, 1]})
>>> both = {"q": np.array([2, 3, 0, 1]), "k": np.array([2, 3, 0, 1])}
>>> e, tables = folded(lookup("t", (q // 2, k // 2)), both, {}, {"t": np.array([[1, 2], [3, 4]])})
>>> e, {n: t.tolist() for n, t in tables.items()}
(at_0[q // 2, k // 2], {'at_0': [[4, 3], [2, 1]]})
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate, table_array
from frisket.dsl.ir import Expr, lookup, rebuild, transform, uses, var, walk
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.expr import same_remainder

Array = NDArray[Any]


def folded(
    e: Expr, places: Mapping[str, Array], scalars: Mapping[str, Any], tables: Mapping[str, Array],
    taken: Collection[str] = (),
) -> tuple[Expr, dict[str, Array]]:  # fmt: skip
    """`e` at `places` of q and of k, either or both, and the tables it reads then. Each largest part that depends on
    one of them becomes a table: `doc[q]` is read in one step, not through the position, and its order can be seen.
    A table of several axes, such as `t[q // 16, k // 16]`, has the values of each axis in the order they are read. The
    rest of `e` is as it was, with its own scalars and tables. `scalars` may have Q_LEN, KV_LEN, B and H; `taken`
    are names that a table may not have, besides those of `scalars` and `tables`."""
    e = transform(e, same_remainder)
    made: dict[str, Array] = {}
    others = {*taken, *scalars, *tables}
    prefix = "at_"
    while any(n.startswith(prefix) for n in others):
        prefix += "_"

    def kept(value: Array) -> str:
        values = value if value.dtype.kind in "bf" else _narrow(value)
        same = (n for n, t in made.items() if t.dtype == values.dtype and np.array_equal(t, values))
        label = next(same, None) or f"{prefix}{len(made)}"
        made[label] = values
        return label

    def read(node: Expr, name: str) -> Array:
        return np.broadcast_to(evaluate(node, {**scalars, name: places[name]}, tables), places[name].shape)

    def table(node: Expr, name: str) -> Expr:
        return lookup(kept(read(node, name)), (var(name),), node.type)

    def in_turn(node: Expr) -> Expr:
        """A lookup of a table whose axes have their values in the order in which a coordinate reads them."""
        values, args = table_array(tables, node.name), [known[a] for a in node.args]
        for axis, (a, name) in enumerate(zip(node.args, map(whole.get, node.args), strict=True)):
            if name:
                at, numbers = numbered(read(a, name).clip(0, values.shape[axis] - 1))
                values = values.take(at, axis)
                n = int((numbers == 0).sum())
                regular = np.array_equal(numbers, np.arange(len(numbers)) // n)
                place = var(name) // n if n > 1 else var(name)
                args[axis] = place if regular else lookup(kept(numbers), (var(name),))
        return lookup(kept(values), tuple(args), node.type)

    known: dict[Expr, Expr] = {}
    free: dict[Expr, frozenset[int]] = {}  # the variables of reductions that a node reads and does not bind
    whole: dict[Expr, str | None] = {}  # the only coordinate that a node depends on
    for node in walk(e):
        below = frozenset[int]().union(*(free[a] for a in node.args))
        free[node] = (
            below | {node.name} if node.op == "bound" else below - {node.name[1]} if node.op == "reduce" else below
        )
        whole[node] = None if free[node] else _coordinate(node, places, scalars)
        known[node] = node
        if whole[node] is None and node.op == "lookup" and any(whole[a] for a in node.args):
            known[node] = in_turn(node)
        elif whole[node] is None:
            args = [table(a, name) if (name := whole[a]) else known[a] for a in node.args]
            known[node] = rebuild(node, tuple(args))
    root = whole[e]
    return (table(e, root) if root else known[e]), made


def _coordinate(node: Expr, places: Mapping[str, Array], scalars: Mapping[str, Any]) -> str | None:
    """The coordinate, q or k, that an Int or Bool depends on, if nothing else in it lacks a value."""
    names = uses(node) - scalars.keys()
    return next(iter(names)) if node.type is not FLOAT and len(names) == 1 and names <= places.keys() else None


def numbered(x: Array) -> tuple[Array, Array]:
    """The values of an array, each once, as they come, and the number of each element among them."""
    values, first, which = np.unique(x, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return values[order], np.argsort(order)[which]


def _narrow(x: Array) -> Array:
    """Ints in 32 bits, where they fit."""
    fits = not len(x) or (x.min() >= -(1 << 31) and x.max() < 1 << 31)
    return x.astype(np.int32) if fits else x
