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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate, table_array
from frisket.dsl.ir import Expr, uses, walk
from frisket.dsl.work import steps

from .candidates import Candidate
from .folded import numbered

Array = NDArray[Any]
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
