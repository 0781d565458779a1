"""Orders by the graph of a table: shuffled bands are narrow again, and large or missing graphs give no order."""

import sys

import numpy as np
import pytest

from frisket.dsl.ir import lookup, var
from frisket.dsl.sugar import k, q
from frisket.dsl.types import BOOL, INT
from frisket.dsl.work import steps
from frisket.lowering.orders import candidates
from frisket.lowering.orders.candidates import by_graph

NODES, WIDTH, SIZE = 96, 3, 4  # of a band of nodes, each of so many positions
LENGTH = NODES * SIZE
draws = np.random.default_rng(0)
ROWS, COLUMNS = draws.permutation(NODES), draws.permutation(NODES)
BAND = abs(np.arange(NODES)[:, None] - np.arange(NODES)) <= WIDTH
BLOCKS = lookup("t", (q // SIZE, k // SIZE), BOOL)


def ways(mask, table, q_len=LENGTH, kv_len=LENGTH, **tables):
    return list(by_graph(mask, {}, {"t": table, **tables}, q_len, kv_len))


def width(seen, queries, keys):
    """The widest distance between nodes that see each other, at the places of positions."""
    found = [
        (np.argsort(c.places(n)).reshape(-1, n // m).min(1) // (n // m)) if m < n else np.argsort(c.places(n))
        for c, n, m in zip((queries, keys), (LENGTH, LENGTH), seen.shape, strict=True)
    ]
    rows, columns = np.nonzero(seen)
    return int(abs(found[0][rows] - found[1][columns]).max())


@pytest.mark.parametrize("mask", [BLOCKS, BLOCKS & (q >= k), lookup("t", (var("h"), q // SIZE, k // SIZE), BOOL)])
def test_a_shuffled_band_is_narrow_again(mask):
    seen = BAND[ROWS][:, ROWS]
    heads = mask.op == "lookup" and len(mask.args) == 3
    (both, same), (queries, keys) = ways(mask, np.stack([seen, ~seen]) if heads else seen)
    assert both is same
    assert width(seen, both, both) <= WIDTH
    if mask.op == "lookup":  # of a causal mask the bipartite graph has other shortest paths
        assert width(seen, queries, keys) <= 2 * WIDTH
    assert str(both) == "reverse Cuthill-McKee of t"
    for c in (both, queries, keys):  # positions of a node stay together, in order
        assert (np.diff(c.places(LENGTH).reshape(-1, SIZE)) == 1).all()


def test_rows_and_columns_that_are_shuffled_apart():
    seen = BAND[ROWS][:, COLUMNS]
    (both, _), (queries, keys) = ways(BLOCKS, seen)
    assert width(seen, both, both) > NODES // 2
    assert width(seen, queries, keys) <= 2 * WIDTH


def test_tokens_and_nodes_that_a_table_names():
    seen = BAND[ROWS][:, ROWS]
    doc = draws.permutation(np.arange(NODES).repeat(SIZE))
    (both, _), _ = ways(lookup("t", (lookup("doc", (q,), INT), lookup("doc", (k,), INT)), BOOL), seen, doc=doc)
    at = doc[both.places(LENGTH)].reshape(-1, SIZE)
    assert (at == at[:, :1]).all()
    assert seen[at[:-1, 0], at[1:, 0]].all()
    whole = np.kron(seen, np.ones((SIZE, SIZE), bool))
    both, _ = ways(lookup("t", (q, k), BOOL), whole)[0]
    assert width(whole, both, both) <= 2 * SIZE * WIDTH


@pytest.mark.parametrize(("q_len", "kv_len"), [(LENGTH // 2, LENGTH), (LENGTH, LENGTH // 2 + 1)])
def test_lengths_that_differ_have_the_bipartite_graph_alone(q_len, kv_len):
    ((queries, keys),) = ways(BLOCKS, BAND[ROWS][:, ROWS], q_len, kv_len)
    for c, length in ((queries, q_len), (keys, kv_len)):
        assert sorted(c.places(length).tolist()) == list(range(length))


@pytest.mark.parametrize("name", ["STEPS", "EDGES"])
def test_graphs_that_are_too_large_are_left_out(name, monkeypatch):
    seen = BAND[ROWS][:, ROWS]
    most = {"STEPS": NODES * NODES * steps(BLOCKS), "EDGES": int(seen.sum())}[name]
    monkeypatch.setattr(candidates, "CHUNK", 5 * NODES)
    monkeypatch.setattr(candidates, name, most)
    assert len(ways(BLOCKS, seen)) == 2
    monkeypatch.setattr(candidates, name, most - 1)
    assert ways(BLOCKS, seen) == []


def test_masks_without_a_graph():
    assert ways(BLOCKS, np.zeros((NODES, NODES), bool)) == []
    assert ways(lookup("t", (q,), BOOL) & lookup("t", (k,), BOOL), np.ones(LENGTH, bool)) == []
    assert ways(lookup("t", (q - k + LENGTH, k), BOOL), np.ones((2 * LENGTH, LENGTH), bool)) == []
    assert len(ways(BLOCKS & lookup("t", (q // SIZE, k // SIZE), BOOL), BAND)) == 2  # one table, read twice


def test_without_scipy_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    assert ways(BLOCKS, BAND[ROWS][:, ROWS]) == []
