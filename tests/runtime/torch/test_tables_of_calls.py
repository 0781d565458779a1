"""Tables that calls bring: a table that was written to is seen, an equal one prepares nothing."""

import weakref

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.caches.torch import KVCache
from frisket.runtime.torch import op
from frisket.runtime.torch.ready import KEPT_TABLES, ChangingTables

S = 40
Q, K, V = torch.randn(3, 1, 2, S, 16, generator=torch.Generator().manual_seed(0)).unbind()
DOC = np.arange(S) // 9


def documents(**options):
    return fk.compile("causal & same(doc)", engines=False, **options)


def kept(att):
    """The prepared calls of `att` with tables of the host, the latest of each kind first."""
    kinds = [x for x in att.calls.values() if type(x) is ChangingTables]
    return [ready for changing in kinds for _, ready in changing.latest]


def right(att, doc):
    want = documents()(Q, K, V, doc=torch.as_tensor(doc).clone())
    return torch.equal(att(Q, K, V, doc=doc), want)


def write_data(x):
    x.data[5:] = 2


def write_memory(x):
    x.numpy()[5:] = 2


def write_under_a_view(x):
    x[:].view(-1)[5:] = 2


WRITES = {
    "in place": lambda x: x[5:].fill_(2), "data": write_data, "numpy's memory": write_memory,
    "view": write_under_a_view,
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_tensor_that_is_written_to(write):
    att, doc = documents(), torch.from_numpy(DOC.copy())
    assert right(att, doc)
    write(doc)
    assert right(att, doc)


@pytest.mark.parametrize("form", [np.copy, torch.tensor])
def test_large_tables_of_calls_are_not_copied(monkeypatch, form):
    att, doc = documents(), form(DOC)
    monkeypatch.setattr(op, "COPIED", doc.nbytes - 1)
    assert right(att, doc)
    assert not kept(att)
    monkeypatch.setattr(op, "COPIED", doc.nbytes)
    assert right(att, doc)
    assert len(kept(att)) == 1


def test_an_array_that_is_written_to():
    att, doc = documents(), DOC.copy()
    closed = doc.view()
    closed.flags.writeable = False
    for x in (doc, closed):
        doc[:] = DOC
        assert right(att, x)
        doc[7:] += 3
        assert right(att, x)
        doc[:] = DOC
        assert right(att, x)


def test_zeros_of_both_signs_are_two_numbers():
    att, cache, x = fk.compile("1.0 / c > 0.0", engines=False), KVCache.create(1, S, 2, 16), jnp.ones((1, 4, 2, 16))
    token = [y[:, :, :1] for y in (Q, K, V)]
    for c in (0.0, 0.0, -0.0, -0.0, 0.0):
        for out in (att(Q, K, V, c=c), att(x, x, x, c=c), cache.attention(att, *token, c=c)):
            assert bool((out != 0).any()) == (str(c) == "0.0")


def test_bits_are_compared():
    """-0.0 is equal to 0.0, and numbers of two dtypes may have equal bits."""
    att = fk.compile("1.0 / t[k] > 0.0", engines=False)
    table = torch.zeros(S)
    assert att(Q, K, V, t=table).abs().sum() > 0
    assert att(Q, K, V, t=-table).abs().sum() == 0
    att = fk.compile("t[k] > 0", engines=False)
    signed = np.full(S, -1, np.int32)
    signed[0] = 1
    assert not torch.equal(att(Q, K, V, t=signed), att(Q, K, V, t=signed.view(np.uint32)))


KINDS = {torch.int32: "int", torch.bool: "bool", torch.float64: "float", torch.bfloat16: "float"}
KINDS[torch.float8_e4m3fn] = "float"


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_equal_tables_prepare_nothing(dtype, monkeypatch):
    att = fk.compile(f"param t: {KINDS[dtype]}[_]\nmask = causal & t[q] == t[k]", engines=False)
    table = (torch.arange(S) // 20).to(dtype)
    first, calls, call = att(Q, K, V, t=table), [], att.call
    monkeypatch.setattr(att, "call", lambda request: calls.append(request) or call(request))
    for same in (table, table.clone(), torch.stack([table, table], 1)[:, 0]):
        assert torch.equal(att(Q, K, V, t=same), first)
    assert not calls
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    att(*leaves, t=table).sum().backward()
    assert not calls
    assert leaves[0].grad.abs().sum() > 0
    att(Q, K, V, t=torch.zeros(S, dtype=dtype))
    assert len(calls) == 1


def test_few_are_kept():
    att = documents()
    for n in range(2 * KEPT_TABLES):
        att(Q, K, V, doc=DOC + n * DOC)
    for n in range(2):
        att(Q, K, V, doc=DOC.astype(np.int32) + n)  # another kind of table
    assert len(kept(att)) == KEPT_TABLES
    last = weakref.ref(kept(att)[-1])
    del att
    assert last() is None


def test_tables_beside_what_is_learned():
    """The values of a learned table are the call's, whatever call was prepared for the table beside it."""
    att = fk.compile("causal & same(doc)", "param slope: float[_]\nscore = score + slope[h] * (k - q)", engines=False)
    for seed in (1, 2):
        slope = torch.randn(2, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        att(Q, K, V, doc=DOC, slope=slope).square().sum().backward()
        att.check(Q, K, V, doc=DOC, slope=slope.detach())
        assert slope.grad.abs().min() > 0
