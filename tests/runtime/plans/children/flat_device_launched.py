"""Run by test_flat_device.py without an interpreter: tables of a device planned by kernels that are launched into
nothing, so no value is there to look at."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import triton
from support.lowering.device_tables import NoLook, NoWait, pose
from support.triton import null as triton_null

import frisket as fk
from frisket.runtime.backends import triton as backend
from frisket.runtime.plans import run as flat_triton

triton_null.install(watch=True)
backend._on_torch = lambda: ""
S = 640
PLANS = ["lines", "windows", "windows", "plan_spans", "longest_first"]  # windows: a launch for five levels


@pytest.fixture(autouse=True)
def posed(monkeypatch):
    pose(monkeypatch)


def arrays(s=S, h=2):
    return [torch.zeros(1, h, s, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def names(run):
    """The kernels that a call launches, in their order."""
    triton_null.launched.clear()
    run()
    return [kernel.name for kernel, *_ in triton_null.launched]


def pointers():
    """What each launch was given, as pointers."""
    given = [arguments for *_, arguments in triton_null.launched]
    return [
        {x if type(x) is int else x.data_ptr() for x in g if type(x) is int or hasattr(x, "data_ptr")} for g in given
    ]


MASKS = {
    "causal & same(doc)": PLANS,
    "param doc: sorted int[Q_LEN]\nmask = causal & same(doc)": PLANS[3:],
    "causal & q - k < doc[q]": PLANS,
    "causal & document(doc)": PLANS[3:],
}


@pytest.mark.parametrize("mask", MASKS)
def test_device_plans_read_no_value_on_the_host(mask):
    """From the tables to the last launch, forward and backward, at the first call and at later ones."""
    att, given = fk.compile(mask), arrays()

    def train(doc):
        out = att(*given, doc=doc)
        grads = torch.autograd.grad(out, given, torch.zeros_like(out))
        assert all(x.shape == given[0].shape for x in grads)

    with NoLook(), NoWait():
        first = names(lambda: train(torch.arange(S) // 100))
        again = names(lambda: train(torch.arange(S) // 50))
        with torch.no_grad():
            plan = att.plan(S, S, 1, 2, doc=torch.arange(S) // 9)
            planned = names(lambda: att(*given, plan=plan))
            assert names(lambda: att(*given, plan=plan)) == planned[-1:]  # for the next layer it is there
    own = MASKS[mask]
    assert sorted(first) == sorted(again)
    assert [n for n in again if n not in PLANS] == [
        "attention_forward",
        "attention_delta",
        "attention_dq",
        "attention_dkv",
    ]
    assert again[: len(own) + 1] == planned == [*own, "attention_forward"]
    assert again.count("plan_spans") <= 3  # rows for the forward and perhaps dq's tile, columns for dk and dv
    assert again.count("lines") == own.count("lines")  # what is made of a table serves them all


def test_device_plan_of_each_step_reads_new_tables():
    att, given = fk.compile("causal & same(doc)"), arrays()
    with torch.no_grad():
        seen = []
        for n in (100, 50):
            doc = (torch.arange(S) // n).clone()
            assert names(lambda: att(*given, doc=doc)) == [*PLANS, "attention_forward"]  # noqa: B023
            lines, _, _, planner, order, forward = pointers()
            assert doc.data_ptr() in lines & forward
            assert len(planner & forward) >= 2  # bounds and counts
            assert order & forward
            seen.append(doc)


@pytest.mark.parametrize("planned", [False, True])
def test_device_call_of_each_step_reads_new_score_tables(planned):
    """Also where no table decides the spans: those of the mask are laid out once."""
    att, given = fk.compile("causal", "param n: int[_]\nscore = score + n[k]"), arrays()
    with torch.no_grad():
        for step in range(3):
            n = torch.full((S,), step)
            more = {"plan": att.plan(S, S, 1, 2, n=n)} if planned else {"n": n}
            assert names(lambda: att(*given, **more)) == ["attention_forward"]  # noqa: B023
            assert n.data_ptr() in pointers()[0]


def test_changed_lengths_compile_nothing():
    att = fk.compile("causal & same(doc)")
    with torch.no_grad():
        att(*arrays(), doc=torch.arange(S) // 100)
        before = len(triton_null.compiled)
        for s in (500, 1024, 777):
            att(*arrays(s), doc=torch.arange(s) // 7)
        assert triton_null.compiled[before:] == []
        att(*arrays(), doc=(torch.arange(S + 1) // 100)[1:])  # a pointer that 16 does not divide
    assert triton_null.compiled[before:] == ["attention_forward"]


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_leaves_nothing_behind(planned):
    """Plans and tables of steps are gone when the steps are, before any collection of garbage."""
    att, given, alive = fk.compile("causal & same(doc)"), arrays(), []
    gc.disable()
    try:
        for _ in range(4):
            triton_null.launched.clear()
            doc = torch.arange(S) // 100
            if planned:
                plan = att.plan(S, S, 1, 2, doc=doc)
                out = att(*given, plan=plan) + att(*given, plan=plan)
                alive.append(weakref.ref(plan))
                del plan
            else:
                out = att(*given, doc=doc)
            out.sum().backward()
            alive.append(weakref.ref(doc))
            del doc, out
    finally:
        gc.enable()
    assert [x() for x in alive[2 + 2 * planned :]] == [None] * len(alive[2 + 2 * planned :])


def test_tables_of_many_axes_and_kinds():
    """Bool maps of tiles, a table for every batch entry, offsets."""
    given = arrays()
    tile_map = torch.ones(40, 40, dtype=torch.bool)
    with torch.no_grad(), NoLook(), NoWait():
        found = names(lambda: fk.compile("causal & m[q // 16, k // 16]")(*given, m=tile_map))
        assert set(found) == {"halves", "plan_spans", "longest_first", "attention_forward"}
        found = names(
            lambda: fk.compile("causal & doc[b, q] == doc[b, k]")(*given, doc=torch.zeros(1, S, dtype=torch.int16))
        )
        assert found == [*PLANS, "attention_forward"]


def test_warm_steps_ask_triton_for_no_kernel(monkeypatch):
    """Which compiled kernel a launch takes is known after the first step; asking takes longer than planning."""
    given, tile_map = arrays(), torch.ones(40, 40, dtype=torch.bool)
    steps = [
        (fk.compile("causal & same(doc)"), {"doc": torch.arange(S) // 100}, PLANS),
        (fk.compile("causal & m[q // 16, k // 16]"), {"m": tile_map}, ["halves"] * 8 + PLANS[3:]),
    ]
    with torch.no_grad():
        for att, tables, _ in steps:
            att(*given, **tables)
        monkeypatch.setattr(triton.JITFunction, "run", None)
        for att, tables, planned in steps:
            found = names(lambda: att(*given, **{n: x.clone() for n, x in tables.items()}))  # noqa: B023
            assert found == [*planned, "attention_forward"]


def test_without_triton_torch_plans(monkeypatch):
    """The text of torch's operators looks at no value, too."""
    monkeypatch.setattr(flat_triton, "runs", lambda device: False)
    monkeypatch.setattr("frisket.runtime.plans.run._reachable", lambda *given: False)
    att, given = fk.compile("causal & same(doc)"), arrays()
    with torch.no_grad(), NoLook(), NoWait():
        assert names(lambda: att(*given, doc=torch.arange(S) // 100)) == ["attention_forward"]
        plan = att.plan(S, S, 1, 2, doc=torch.arange(S) // 100)
        rows, columns = plan.rows((64, 32)), plan.columns((64, 32))
    assert (rows.count.shape, columns.count.shape) == ((1, 10), (1, 20))
