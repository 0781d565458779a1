"""A table of a call may be a list or an array of any framework, whatever the entry that takes it."""

import numpy as np
import pytest
import torch

import frisket as fk
from frisket.caches.torch import RingKVCache

jnp = pytest.importorskip("jax.numpy")

NUMBERS = [1.0, 2.0, 3.0, 4.0]
KINDS = {
    "list": NUMBERS,
    "tuple": tuple(NUMBERS),
    "torch": torch.tensor(NUMBERS),
    "JAX": jnp.asarray(NUMBERS),
    "numpy": np.asarray(NUMBERS),
    "reversed": np.asarray(NUMBERS[::-1])[::-1],
    "other bytes": np.asarray(NUMBERS).astype(">f4"),
}
Q, K, V = torch.randn(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
JAX = tuple(jnp.asarray(x.transpose(1, 2).numpy()) for x in (Q, K, V))
WEIGHED = fk.compile("causal", weight="relu2", divide="count + t[h]", backend="library")
WINDOW = fk.compile("causal & window(4)", weight="relu2", divide="count + t[h]", backend="library")
SCORED = fk.compile("causal", "score * t[h]", backend="library")
PARTS = {
    "torch": WEIGHED(Q, K, V, t=KINDS["torch"], return_sums=True),
    "JAX": WEIGHED(*JAX, t=NUMBERS, return_sums=True),
}


def nested(x):
    rows = [y.transpose(0, 1).contiguous() for y in x]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def ring(t):
    cache = RingKVCache.create(batch=2, window=4, kv_heads=4, head_dim=16)
    return cache.attention(WINDOW, Q, K, V, t=t)  # of two parts: the chunk is longer than the ring


def checked(att, arrays, t):
    att.check(*arrays, t=t).require()
    return att(*arrays, t=t)


ENTRIES = {
    "weighed": lambda t: WEIGHED(Q, K, V, t=t),
    "sums": lambda t: WEIGHED(Q, K, V, t=t, return_sums=True)[0],
    "merge_sums": lambda t: fk.merge_sums(PARTS["torch"], divide="count + t[h]", t=t)[0],
    "nested, weighed": lambda t: WEIGHED(*map(nested, (Q, K, V)), t=t).values(),
    "nested": lambda t: SCORED(*map(nested, (Q, K, V)), t=t).values(),
    "ring": ring,
    "call": lambda t: SCORED(Q, K, V, t=t),
    "attention": lambda t: fk.attention(Q, K, V, "causal", "score * t[h]", t=t, backend="library"),
    "bound": lambda t: fk.compile("causal", "score * t[h]", t=t, backend="library")(Q, K, V),
    "plan": lambda t: SCORED(Q, K, V, plan=SCORED.plan(8, 8, batch=2, heads=4, t=t)),
    "vmap": lambda t: torch.func.vmap(lambda q: SCORED(q, K, V, t=t))(Q[None]),
    "statistics": lambda t: SCORED.statistics(Q, K, V, columns=True, t=t).columns,
    "check": lambda t: checked(SCORED, (Q, K, V), t),
    "JAX, weighed": lambda t: WEIGHED(*JAX, t=t),
    "JAX, sums": lambda t: WEIGHED(*JAX, t=t, return_sums=True)[0],
    "JAX, merge_sums": lambda t: fk.merge_sums(PARTS["JAX"], divide="count + t[h]", t=t)[0],
    "JAX, call": lambda t: SCORED(*JAX, t=t),
    "JAX, plan": lambda t: SCORED(*JAX, plan=SCORED.plan(8, 8, batch=2, heads=4, t=t)),
    "JAX, statistics": lambda t: SCORED.statistics(*JAX, columns=True, t=t).columns,
    "JAX, check": lambda t: checked(SCORED, JAX, t),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_tables_of_all_kinds_are_read_as_numpy_arrays(entry):
    want = np.asarray(ENTRIES[entry](np.asarray(NUMBERS, np.float32)))
    for kind, table in KINDS.items():
        if (entry, kind) != ("plan", "JAX"):
            found = np.asarray(ENTRIES[entry](table))
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6, err_msg=kind)


def test_a_plan_with_a_table_of_jax_is_not_of_torch():
    with pytest.raises(fk.ParameterError, match="holds `t`, an array of JAX\n  give `plan` one of torch or of numpy"):
        ENTRIES["plan"](KINDS["JAX"])
