"""Folded masks are the mask at the positions of the arrays."""

import cases
import numpy as np
import pytest

from frisket.dsl.evaluate import evaluate
from frisket.lowering.dense import coordinates
from frisket.lowering.orders.candidates import folded
from frisket.lowering.plan import Problem

LENGTH = 48
ENTRIES = cases.masks(LENGTH)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_folded_library_masks_keep_their_values(name, sides):
    case = ENTRIES[name]
    shape = case.batch, case.heads, case.q_len, case.kv_len
    rng = np.random.default_rng(len(name))
    lengths = {"q": case.q_len, "k": case.kv_len}
    places = {n: rng.permutation(lengths[n]) for n in sides}
    sizes = {"Q_LEN": case.q_len, "KV_LEN": case.kv_len}
    e, made = folded(case.mask.expr, places, {**case.mask.scalars, **sizes}, case.mask.tables)
    env = {**coordinates(Problem(*shape[2:], *shape[:2])), **case.mask.scalars}
    whole = evaluate(case.mask.expr, env, case.mask.tables)
    whole = np.broadcast_to(whole, shape)
    for axis, n in ((2, "q"), (3, "k")):
        whole = whole.take(places[n], axis) if n in places else whole
    assert np.array_equal(np.broadcast_to(evaluate(e, env, {**case.mask.tables, **made}), shape), whole)
