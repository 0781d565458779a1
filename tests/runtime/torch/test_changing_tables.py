"""Calls that bring another table each: after a few, a planner in C++ makes the spans, and no plan is an older one's."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from support.tiers import default_only

import frisket as fk
from frisket.dsl.ir import walk
from frisket.runtime.machine import cpp_build
from frisket.runtime.torch import ready
from frisket.runtime.torch.ready import CHANGES, ChangingTables

pytestmark = pytest.mark.skipif(bool(cpp_build.reason()), reason="needs a C++ compiler")
S = 200
Q, K, V = torch.randn(3, 2, 2, S, 16, generator=torch.Generator().manual_seed(0)).unbind()
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _native(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "native")
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def documents(n=S, dtype=np.int64):
    return np.sort(RNG.integers(0, 5, n)).astype(dtype)


def planned(text="causal & same(doc)", **rest):
    """An attention whose calls with tables like these are prepared for any entries, as a list of its planners."""
    att = fk.compile(text, engines=False)
    for _ in range(CHANGES[0] + 2):
        att(Q, K, V, doc=documents(), **rest)
    return att


def planners(att):
    return [p for x in att.calls.values() if type(x) is ChangingTables for p in x.planners.values()]


def right(att, text="causal & same(doc)", qkv=(Q, K, V), **tables):
    """Whether a call is that of an attention that has seen no other table."""
    want = fk.compile(text, engines=False)(*qkv, **deepcopy(tables))
    return torch.equal(att(*qkv, **tables), want)


def test_changed_tables_make_no_plan_of_the_host(monkeypatch):
    att, calls = planned(), []
    assert len(planners(att)) == 1
    call = att.call
    monkeypatch.setattr(att, "call", lambda request: calls.append(request) or call(request))
    assert all(right(att, doc=documents()) for _ in range(20))
    assert not calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["causal & same(doc)", "causal & doc[b, q] == doc[b, k]",
                                  pytest.param("doc[q] >= doc[k]", marks=pytest.mark.exhaustive)])  # fmt: skip
def test_planner_reads_the_ends_of_sorted_tables(text):
    att = fk.compile(text, engines=False)
    for _ in range(CHANGES[-1] + 2):
        att(Q, K, V, doc=np.stack([documents(), documents()]) if "[b" in text else documents())
    (steps,) = planners(att)
    _, planner, *_ = steps.prepared.args
    assert not {n.op for n in walk(*planner.roots)} & {"range_min", "range_max"}


def test_backward_reads_the_table_of_its_forward():
    att, doc = planned(), documents()
    grads = []
    for each, table in ((att, doc), (fk.compile("causal & same(doc)", engines=False), doc.copy())):
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        out = each(*leaves, doc=table)
        table[:] = 0
        out.square().sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(map(torch.equal, *grads))


def returning(n=S):
    return np.repeat(RNG.permutation(n // 10) % 9, 10)


UNSORTED = {
    "causal & same(doc)": lambda: {"doc": returning()},
    "causal & keep[k]": lambda: {"keep": np.arange(S) < RNG.integers(50, S)},
    "causal & keep[b, k]": lambda: {"keep": np.arange(S) < RNG.integers(50, S, (2, 1))},
    "causal & same(doc) & keep[k]": lambda: {"doc": documents(), "keep": RNG.random(S) < 0.9},
    "causal | same(kind) & kind[q] > 0": lambda: {"kind": np.repeat(RNG.integers(0, 3, S // 10), 10)},
    "causal & seen[q // 20, k // 20]": lambda: {"seen": RNG.random((S // 20, S // 20)) < 0.3},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", default_only(UNSORTED, "causal & same(doc)"))
def test_tables_in_any_order_make_few_plans_of_the_host(text, monkeypatch):
    att, calls = fk.compile(text, engines=False), []
    for _ in range(CHANGES[0] + 2):
        att(Q, K, V, **UNSORTED[text]())
    assert planners(att)
    call = att.call
    monkeypatch.setattr(att, "call", lambda request: calls.append(request) or call(request))
    assert all(right(att, text, **UNSORTED[text]()) for _ in range(64))
    assert len(calls) <= 6, "at the 2nd, 4th, ... use"


def test_sorted_and_unsorted_tables_have_separate_planners():
    att = fk.compile("causal & same(doc)", engines=False)
    for doc in (documents, returning):
        for _ in range(CHANGES[0] + 2):
            att(Q, K, V, doc=doc())
    assert sorted(len(p.order) for p in planners(att)) == [0, 1]
    assert all(right(att, doc=doc()) for doc in (documents, returning) for _ in range(4))


def test_a_planner_that_comes_to_read_more_tiles_is_let_go(monkeypatch):
    monkeypatch.setattr(ready, "SPARED", 0)
    monkeypatch.setattr(ready, "SPARED_BY_TILE", 0)
    text, (q, k, v) = "causal & same(doc)", torch.randn(3, 1, 1, 1024, 16, generator=torch.Generator().manual_seed(0))
    att = fk.compile(text, engines=False)
    for _ in range(CHANGES[0] + 2):  # as many ids as tiles tell apart
        att(q, k, v, doc=np.repeat(RNG.permutation(16), 64))
    assert planners(att)
    for _ in range(9):  # a key in 256 is of the only document of its kind: hashes tell too little
        assert right(att, text, (q, k, v), doc=RNG.integers(0, 1 << 20, 1024))
    assert not planners(att)


def test_spans_hold_nothing_of_an_earlier_call():
    att = fk.compile("causal & same(doc)", engines=False)
    for _ in range(CHANGES[0] + 2):
        att(Q, K, V, doc=returning())
    (planner,) = planners(att)
    last = planner({"doc": np.zeros(S, np.int64)}).inputs.spans
    used = np.arange(last.bounds.shape[2]) < last.count[..., None]
    assert used.any()
    assert not last.bounds[~used].any()


@pytest.mark.parametrize("form", ["tensor", "array"])
def test_tables_that_are_written_to(form):
    att, array = planned(), documents()
    doc = torch.from_numpy(array) if form == "tensor" else array
    for step in range(1, 8):
        doc[step * 20 :] += 1
        assert right(att, doc=doc)
    array.view()[:] = np.arange(S)
    assert right(att, doc=doc)
    assert right(att, doc=doc[::1][:S])


def test_views_of_one_storage():
    att, base = planned(), torch.from_numpy(np.repeat(documents(), 3))
    for start in range(3):
        base[start * 100 + S // 2 :] += 1
        for doc in (base[start::3][:S], base[start * 100 : start * 100 + S]):
            assert right(att, doc=doc)
    assert right(att, doc=torch.from_numpy(documents()).flip(0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("doc", [
    np.arange(S) // 3 % 7,  # documents that return
    (np.arange(S) // 9) << 32,  # the low 32 bits are equal
    np.full(S, -(1 << 62)), np.zeros(S, np.int64), np.arange(S)[::-1].copy(), np.arange(S, dtype=np.int32) // 50,
    np.arange(S, dtype=np.uint8), np.arange(S, dtype=np.int8) // 9, np.arange(S) / 10, np.arange(S + 50) // 60,
], ids=lambda x: f"{x.dtype}-{len(x)}-{x[-1]}")  # fmt: skip
def test_planner_handles_unusual_tables(doc):
    att = planned()
    if doc.dtype.kind == "f":
        with pytest.raises(fk.ParameterError):
            att(Q, K, V, doc=doc)
        return
    assert right(att, doc=doc)
    assert right(att, doc=documents())


def test_planner_handles_changing_lengths():
    att = planned()
    for n in (1, 17, 64, 150, 199):
        qkv = [x[:, :, :n] for x in (Q, K, V)]
        assert all(right(att, qkv=qkv, doc=documents(n)) for _ in range(CHANGES[0] + 4))
    assert len(planners(att)) >= 4
    with pytest.raises(fk.ParameterError, match="has 100 entries"):
        fk.compile("causal & same(doc)")(Q, K, V, doc=documents(100))
    for _ in range(3):
        with pytest.raises(fk.ParameterError, match="has 100 entries"):
            att(Q, K, V, doc=documents(100))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", default_only([
    "causal & doc[b, q] == doc[b, k]", "causal & doc[q] == doc[k] & k < n[b]", "doc[q] >= doc[k] & window(40)",
    "doc[q] % 3 == doc[k] % 3", "causal & doc[doc[q]] == doc[k]", "k < doc[b]",
], "causal & doc[b, q] == doc[b, k]", "k < doc[b]"))  # fmt: skip
def test_planner_handles_changing_tables_of_many_masks(text):
    def tables():
        found = {"doc": np.sort(RNG.integers(0, 9, (2, S)), -1) if "[b, q]" in text else documents()}
        if "doc[b]" in text:
            found["doc"] = RNG.integers(1, S, 2)
        return {**found, "n": RNG.integers(1, S, 2)} if "n[b]" in text else found

    att = fk.compile(text, engines=False)
    assert all(right(att, text, **tables()) for _ in range(CHANGES[-1] + 8))
    assert planners(att) or "%" in text
