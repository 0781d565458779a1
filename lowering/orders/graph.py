"""Orders by the graph of a mask that is data: reverse Cuthill-McKee puts queries near the keys that they see.

Its nodes are the rows and columns of a table, `q // 16` of `t[q // 16, k // 16]`: positions that read the same row stay
together. scipy orders them; where it is not installed there is no such order.

>>> from frisket.dsl.ir import lookup
>>> from frisket.dsl.sugar import k, q
>>> import numpy as np
>>> from frisket.dsl.types import BOOL
>>> near = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], bool)  # 0 - 3 - 2 - 1
>>> ways = by_graph(lookup("t", (q // 2, k // 2), BOOL), {}, {"t": near}, 8, 8)
>>> next(ways)[0].places(8).tolist()
[2, 3, 4, 5, 6, 7, 0, 1]

A mask in such an order is read at positions that stand in an array. Parts that depend on one position become tables.
Tables that are read by a query and a key are put in the order of the positions.

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

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate, table_array
from frisket.dsl.ir import Expr, lookup, rebuild, transform, uses, var, walk
from frisket.dsl.types import FLOAT
from frisket.dsl.work import steps
from frisket.lowering.kernels.expr import same_remainder

from .candidates import Candidate

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


STEPS, EDGES = 1 << 30, 1 << 22  # of evaluating all pairs of nodes, and visible pairs among them, at most
CHUNK = 1 << 22  # pairs evaluated at a time


def by_graph(
    mask: Expr, scalars: Mapping[str, Any], tables: Mapping[str, Array], q_len: int, kv_len: int
) -> Iterator[tuple[Candidate, Candidate]]:
    """Orders of queries and of keys for each table that both read: one order for both, where they read it alike, and
    two of the bipartite graph of its rows and columns. The graph is the mask's, of batch entry 0 and head 0, at the
    first position of each node."""
    env = {**scalars, "b": 0, "h": 0, "B": 1, "H": 1, "Q_LEN": q_len, "KV_LEN": kv_len}
    lengths, seen = {"q": q_len, "k": kv_len}, set()
    for node in (n for n in walk(mask) if n.op == "lookup"):
        sides = (_indices(node, name, env, tables, lengths[name]) for name in lengths)
        nodes = [numbered(x)[1] for x in sides if x is not None]
        if len(nodes) < 2:
            continue
        try:  # slow to import, so no sooner
            from scipy.sparse import block_array, csr_array  # type: ignore[import-untyped]
            from scipy.sparse.csgraph import reverse_cuthill_mckee  # type: ignore[import-untyped]
        except ImportError:
            return
        of_q, of_k = nodes
        key = of_q.tobytes(), of_k.tobytes()
        edges = None if key in seen else _edges(mask, env, tables, of_q, of_k)
        seen.add(key)
        if edges is None:
            continue
        shape = int(of_q.max()) + 1, int(of_k.max()) + 1
        graph = csr_array((np.ones(len(edges[0]), np.int8), edges), shape)
        name = f"reverse Cuthill-McKee of {node.name}"
        if np.array_equal(of_q, of_k):
            both = Candidate(name, table=np.argsort(reverse_cuthill_mckee(graph))[of_q])
            yield both, both
        apart = block_array([[None, graph], [graph.T, None]], format="csr")
        found = np.argsort(reverse_cuthill_mckee(apart))
        yield Candidate(name, table=found[of_q]), Candidate(name, table=found[shape[0] :][of_k])


def _indices(node: Expr, name: str, env: Mapping[str, Any], tables: Mapping[str, Array], length: int) -> Array | None:
    """One number for a lookup's indices that depend on a coordinate, at each of its positions; None without any."""
    found = None
    for a, size in zip(node.args, table_array(tables, node.name).shape, strict=False):
        if uses(a) - env.keys() == {name} and all(n.op != "bound" for n in walk(a)):
            index = evaluate(a, {**env, name: np.arange(length)}, tables).clip(0, size - 1)
            found = index if found is None else found * size + index
    return found


def _edges(
    mask: Expr, env: Mapping[str, Any], tables: Mapping[str, Array], of_q: Array, of_k: Array
) -> tuple[Array, Array] | None:  # fmt: skip
    """The visible pairs among the first positions of all nodes; None where there are none or too many."""
    q, k = (np.unique(x, return_index=True)[1] for x in (of_q, of_k))
    if len(q) * len(k) * steps(mask) > STEPS:
        return None
    rows, columns, count = [], [], 0
    height = max(CHUNK // len(k), 1)
    for start in range(0, len(q), height):
        part = q[start : start + height, None]
        found = np.nonzero(np.broadcast_to(evaluate(mask, {**env, "q": part, "k": k}, tables), (len(part), len(k))))
        rows.append(found[0] + start)
        columns.append(found[1])
        count += len(found[0])
        if count > EDGES:
            return None
    return (np.concatenate(rows), np.concatenate(columns)) if count else None
