"""The fused Gluon backward against the reference's gradients, in the interpreter of tests/support/gluon: masks and
score mods, in any order of warps, copies and products that the scheduler draws, and of programs that run together."""

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support.attention_cases import CASES, DOCUMENTS, Case, causal
from support.gluon import language
from support.gluon.call import install
from support.gluon.machine import DeadlockError, FaultError
from support.tiers import default_only
from support.torch import gradients as torch_gradients

from frisket.dsl import ir
from frisket.dsl.sugar import eq, h, k, q, score
from frisket.lowering.kernels.gluon.backward import emit
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import KernelInputs, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.gluon import torch as gluon_launch
from frisket.runtime.backends.triton import torch as triton_torch


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    install(monkeypatch)
    # whatever calls Triton's kernels would be no test of this one
    monkeypatch.setattr(triton_torch, "backward", None)


class Both(torch_gradients.Both):
    """A case run by the Gluon kernels and by the reference."""

    forward, backward = staticmethod(gluon_launch.forward), staticmethod(gluon_launch.backward)
    stored = ("out",)

    def __init__(self, case, *, ordered=True, order="longest-first", **options):
        super().__init__(case, wanted=frozenset("qkv"), **options)
        self.spans, self.ordered = cases.Source(case), ordered
        queries = gluon_launch.gluon_backward.queries_of(case.dim)
        fused = Target("gluon", queries, 128, 4, 2, order=order)
        self.target = Target("gluon", *case.block, 4, 2, order=order, fused=fused)
        self.sinks = None if self.sinks is None else self.sinks.float()

    @property
    def inputs(self):
        parts = self.plan, self.spans, self.g, self.target, self.slots, self.tables, self.sinks
        return KernelInputs(*parts, deterministic=self.ordered)


def half(case, **changes):
    return case.but(**{"dtype": "bfloat16", "block": (128, 64), "dim": 64, "v_dim": 64} | changes)


MASKS = {
    "full": Case(q_len=130, kv_len=150),
    "causal": Case(causal, q_len=200, kv_len=200),
    "window": Case(causal & (q - k < 60), q_len=300, kv_len=300),
    "documents": Case(causal & eq(q // 90, k // 90), q_len=200, kv_len=200),
    "ranges": Case(causal & ((k < 4) | (q - k < 40)), q_len=300, kv_len=330),
    "holes": Case(eq(k // 64 % 2, 0), q_len=140, kv_len=270),
    "empty rows": Case((k < 20) & (q % 32 >= 20), q_len=140, kv_len=60),
    "soft cap": Case(causal, 3.0 * torch_gradients.function("tanh", score / 3.0), q_len=150, kv_len=150),
    "by head": Case(causal & (q - k < 40 * (h + 1)), score + 0.01 * ir.to_float(k - q), q_len=150, kv_len=170),
    "grouped": Case(causal & (q - k < 40 * (h + 1)), heads=2, kv_heads=1, q_len=140, kv_len=150),
}


@pytest.mark.parametrize("ordered", default_only([True, False], True), ids=["ordered", "any order"])
@pytest.mark.parametrize("name", default_only(list(MASKS), "grouped"))
def test_fused_gradients_equal_the_reference(name, ordered):
    Both(half(MASKS[name]), ordered=ordered).check_half()


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"sinks": True}, {"dlse": False}], ids=str)
def test_fused_gradients_with_sinks_or_without_lse_cotangents(options):
    Both(half(MASKS["grouped"]), **options).check_half()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("dropout", "nothing")])
def test_fused_gradients_of_all_cases_equal_the_reference(name):
    case = CASES[name]
    if case.sizes is None:
        case = case.but(q_len=min(case.q_len, 140), kv_len=min(case.kv_len, 150))
    Both(half(case)).check_half()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DOCUMENTS)
def test_fused_gradients_of_documents_equal_the_reference(name):
    Both(half(DOCUMENTS[name][0])).check_half()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["causal", "grouped", "full"])
def test_fused_gradients_of_wide_heads_equal_the_reference(name):
    Both(half(MASKS[name], dim=128, v_dim=128, dtype="float16")).check_half()


PAIRS = Case(k % 7 > 0, q_len=130, kv_len=600, heads=1, kv_heads=1)  # five programs add to each tile


def together(monkeypatch, seed, resident=3, change=str, **options):
    """`PAIRS` run by the kernels, so many programs at a time, and its gradients, with dq in float32 as "Acc"."""
    install(monkeypatch, lambda text: change(text) if "attention_backward" in text else text, seed, bool(seed % 2))
    monkeypatch.setattr(language, "RESIDENT", resident)
    both, zeros, acc = Both(half(PAIRS), **options), torch.zeros, []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *shape, **more: acc.append(zeros(*shape, **more)) or acc[-1])
        gradients = both.ours()
    (sums,) = (x for x in acc if x.ndim == 4)
    return both, {**gradients, "Acc": sums}


@pytest.mark.parametrize("order", default_only(["longest-first", "longest-of-all-first"], "longest-first"))
def test_ordered_sums_are_equal_bit_for_bit(monkeypatch, order):
    """Whichever programs run, and whenever their sums arrive."""
    first, again = (together(monkeypatch, seed, order=order)[1] for seed in (0, 1))
    assert all(x.equal(again[n]) for n, x in first.items())


@pytest.mark.exhaustive
def test_sums_in_any_order_differ_between_runs(monkeypatch):
    """Or else the interpreter would not show what order is for."""
    found = [together(monkeypatch, seed, ordered=False)[1]["Acc"] for seed in range(4)]
    assert any(not x.equal(found[0]) for x in found)


@pytest.mark.exhaustive
def test_programs_together_equal_the_reference(monkeypatch):
    for ordered in (True, False):
        together(monkeypatch, 5, ordered=ordered)[0].check_half()


TEXT = emit(make_plan(ProgramExprs(causal)), Target("gluon", 64, 128, 4, 2), Dims(128, 128, "bfloat16"))


def some(monkeypatch, seeds, **options):
    for seed in range(seeds):
        together(monkeypatch, seed, **options)


def replaced(before, after):
    def change(text):
        assert before in text
        return text.replace(before, after)

    return change


@pytest.mark.exhaustive
def test_sums_that_are_not_waited_for_are_seen(monkeypatch):
    """A program whose sums are under way when the next one is told of them."""
    wait = next(x for x in TEXT.splitlines() if "cp.async.bulk.wait_group" in x)
    first, *others = (together(monkeypatch, n, change=replaced(wait.strip(), "pass"))[1]["Acc"] for n in range(6))
    assert any(not x.equal(first) for x in others)


def test_a_turn_that_never_comes_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(language, "MOST_POLLS", 500)
    turn = "turn = gl.load(Turns + entry * tiles + tile)"
    with pytest.raises(DeadlockError, match="wait for a counter"):
        together(monkeypatch, 0, change=replaced(turn, f"{turn} + 1"))


def test_rows_by_program_number_may_wait_without_end(monkeypatch):
    """Why rows are given in the order in which programs begin: here one runs at a time, and they begin in any order."""
    monkeypatch.setattr(language, "MOST_POLLS", 500)
    by_place = replaced("number = gl.atomic_add(Added, 1)", "number = gl.program_id(0)")
    with pytest.raises(DeadlockError, match="wait for a counter"):
        some(monkeypatch, 4, resident=2, change=by_place)


FAULTS = {
    "weights are read before both groups have written": (
        "mbarrier.wait(ds_full.index(pair), n // 2 & 1)", "pass",
    ),
    "weights of one buffer": ("pair = n & 1", "pair = 0 * n"),
    "no fence": ("hopper.fence_async_shared()", "pass"),
    "a part is written before it is read": ("mbarrier.wait(dq_free.index(half), n & 1 ^ 1)", "pass"),
    "queries are freed early": ("dk = hopper.warpgroup_mma_wait(2, [dk])", "pass"),
    "a part is added before it is written": ("mbarrier.wait(dq_full.index(half), n & 1)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", default_only(list(FAULTS), "weights of one buffer", "no fence"))
def test_faults_of_the_fused_kernel_are_seen(monkeypatch, name):
    with pytest.raises(FaultError):
        some(monkeypatch, 3, resident=1, change=replaced(*FAULTS[name]))


def test_turns_count_smaller_rows_that_see_a_tile():
    bounds = np.array([[[[0, 0, 2, 2], [3, 3, 4, 4]], [[1, 1, 4, 4], [0, 0, 9, 9]]]], np.int32)
    records = type("Records", (), {"bounds": bounds, "count": np.array([[2, 1]], np.int32)})
    assert gluon_launch.turns(records, np.arange(4)).tolist() == [[[0, 0, 0, 0], [1, 1, 0, 1]]]
    on_device = type("Records", (), {n: torch.from_numpy(getattr(records, n)) for n in ("bounds", "count")})
    assert gluon_launch.turns(on_device, torch.arange(4)).tolist() == [[[0, 0, 0, 0], [1, 1, 0, 1]]]
