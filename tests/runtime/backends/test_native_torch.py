"""The native kernels on torch tensors: strides, tables, what is kept between calls; the rest is kernels' own tests."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from support.attention_cases import CASES, causal
from support.native.image import Problem
from support.native.shared import DIM
from support.tiers import default_only

import frisket as fk
from frisket.dsl.ir import param
from frisket.dsl.sugar import k, q
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs, Target
from frisket.runtime.backends.cpp import torch as native_torch
from frisket.runtime.backends.registry import choose
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())


class Run:
    """A problem on tensors."""

    def __init__(self, name: str, **changes) -> None:
        self.problem = p = Problem(CASES[name].but(dim=DIM, v_dim=DIM, **changes))
        self.q, self.k, self.v, self.dout = (torch.from_numpy(x) for x in (p.q, p.k, p.v, p.dout))
        self.tables = {n: torch.from_numpy(np.array(t)) for n, t in p.plan.table_values(p.case.tables).items()}
        self.slots = p.plan.slot_values(p.params)
        self.target = Target("cpp", *p.case.block)

    def inputs(self, slots=None):
        p = self.problem
        return KernelInputs(p.plan, p.spans, p.g, self.target, slots or self.slots, self.tables)

    def forward(self, top=True):
        return native_torch.forward(self.inputs(), self.q, self.k, self.v, top=top)

    def backward(self, out, lse, wanted="qkv", dlse=True, dout=None):
        p = self.problem
        cotangent = torch.where(lse.isfinite(), torch.from_numpy(p.dlse), 0.0) if dlse else None
        dout = self.dout if dout is None else dout
        rows = ForwardResults(out, lse), Cotangents(dout, cotangent)
        return native_torch.backward(self.inputs(), self.q, self.k, self.v, *rows, grad_names=frozenset(wanted))

    def check(self, backward: bool = True) -> None:
        out, lse, top = self.forward()
        found = {f"d{n}": x.numpy() for n, x in self.backward(out, lse).items()} if backward else {}
        self.problem.check({"out": out.numpy(), "lse": lse.numpy(), "top": top.numpy(), **found})


WINDOW = causal & (q - k <= param("w"))  # as `window(n)` is simplified: the same kernel
STRIDES = {
    "as they are": lambda x: x,
    "rows of heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a larger one": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every other row": lambda x: torch.stack([x, x + 1], 3).flatten(2, 3)[:, :, ::2],
    "columns": lambda x: x.mT.contiguous().mT,
    "backwards in memory": lambda x: x.flip(2).contiguous().flip(2),
}


@pytest.mark.parametrize("change", STRIDES)
def test_native_torch_calls_take_any_strides(change):
    run = Run("causal")
    run.q, run.k, run.v, run.dout = (STRIDES[change](x) for x in (run.q, run.k, run.v, run.dout))
    run.check()


def test_native_torch_calls_take_expanded_tensors():
    """Expanded tensors have strides of 0."""
    run = Run("causal")
    out, lse, _ = run.forward()
    run.dout = torch.ones(()).expand(run.dout.shape)
    one = run.backward(out, lse, dlse=False)
    run.dout = torch.ones(run.dout.shape)
    two = run.backward(out, lse, dlse=False)
    assert all(torch.equal(one[n], two[n]) for n in "qkv")
    heads = run.k[:, :1].expand(run.k.shape)
    run.k = heads
    shared = run.forward()[0]
    run.k = heads.contiguous()
    assert torch.equal(shared, run.forward()[0])


TABLES = ("relation", "bool-table", "relative-bias", "switch", "origin-by-batch")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", default_only(TABLES, "bool-table", "relative-bias", "origin-by-batch"))
def test_tables_and_origins(name):
    Run(name).check(backward=name == "relative-bias")


def test_tables_of_any_strides_and_types():
    run = Run("relative-bias")
    want = run.forward()[0]
    (table,) = run.tables.values()
    for other in (table.double(), table.mT.contiguous().mT, torch.stack([table, table], -1)[..., 0]):
        run.tables = dict.fromkeys(run.tables, other)
        assert torch.equal(run.forward()[0], want)


def test_a_converted_table_that_is_written_to():
    run = Run("relative-bias")
    (name,) = run.tables
    run.tables[name] = given = run.tables[name].double()
    before = run.forward()[0]
    assert torch.equal(run.forward()[0], before)
    given.mul_(3)
    assert not torch.equal(run.forward()[0], before)
    given.div_(3)
    assert torch.equal(run.forward()[0], before)


def test_slots_of_a_call():
    run = Run("window", mask=WINDOW)
    narrow = run.forward()[1]
    run.slots = {n: 300 if x == 40 else x for n, x in run.slots.items()}
    assert not torch.equal(run.forward()[1], narrow)


def test_native_torch_computes_requested_results_alone():
    run = Run("relative-bias")
    out, lse, top = run.forward(top=False)
    assert top is None
    found = run.backward(out, lse, wanted=["q", "t0"])
    assert set(found) == {"q", "t0"}
    assert found["t0"].shape == run.tables["t0"].shape
    everything = run.backward(out, lse, wanted=["q", "k", "v", "t0"])
    assert all(torch.equal(everything[n], found[n]) for n in found)
    assert run.backward(out, lse, wanted=[]) == {}


@pytest.mark.parametrize(("q_len", "kv_len"), [(1 << 15, 24), (24, 1 << 15)])
def test_sums_over_many_tiles_round_once_a_tile(q_len, kv_len):
    """A gradient of a key is a sum over queries. Added to one number query by query, 32,768 of them were wrong by 8e-6
    of the largest, which `check` took for a bug."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=draw) for n in (q_len, kv_len, kv_len))
    place = {"origin": (0, 0, kv_len, 0), "sizes": (1, 1, q_len + kv_len, q_len + kv_len)}  # where every key is seen
    report = fk.compile("causal", backend="cpp").check(q, k, v, **place)
    assert max(report.out, *(ours for ours, _ in report.gradients.values())) < 1.5e-6, report


def test_records_keep_plans_and_are_few():
    records = native_torch._launches
    records.clear()
    run = Run("causal")
    run.forward()
    (made,) = records._entries.values()
    run.forward()
    assert list(records._entries.values()) == [made]
    copies = [dataclasses.replace(run.problem.spans) for _ in range(native_torch.KEPT + 5)]
    for run.problem.spans in copies:
        run.forward()
    assert records.info().entries == native_torch.KEPT


def test_native_torch_calls_keep_no_tensor_alive():
    run = Run("causal")
    q = run.q = run.q.clone()
    out = run.forward()[0]
    alive = weakref.ref(q), weakref.ref(out)
    del q, out, run
    gc.collect()
    assert [x() for x in alive] == [None, None]


def test_several_threads_with_one_record():
    run, failures = Run("window", mask=WINDOW), []
    slots = [{n: w if x == 40 else x for n, x in run.slots.items()} for w in (3, 40, 90, 300)]

    def forward(given) -> torch.Tensor:
        return native_torch.forward(run.inputs(given), run.q, run.k, run.v)[0]

    def many(given, want) -> None:
        failures.extend(given for _ in range(20) if not torch.equal(forward(given), want))

    threads = [threading.Thread(target=many, args=(x, forward(x))) for x in slots]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# -- the backend of calls that name none --------------------------------------------------------------


@pytest.fixture
def nothing_set(monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    return monkeypatch


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_on_a_cpu_the_native_kernels_are_the_default(framework, nothing_set):
    library = {"torch": "aten", "jax": "xla"}[framework]
    assert choose(None, framework, "cpu") == choose("native", framework, "cpu") == "cpp"
    assert choose("library", framework, "cpu") == library
    nothing_set.setenv("FRISKET_BACKEND", "library")
    assert choose(None, framework, "cpu") == library
    assert choose("native", framework, "cpu") == "cpp"
    nothing_set.setenv("FRISKET_BACKEND", "native")
    assert choose(None, framework, "cpu") == "cpp"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_without_a_compiler_the_library_tier_takes_over(framework, nothing_set, tmp_path):
    nothing_set.setenv("CXX", str(tmp_path / "none"))
    assert choose(None, framework, "cpu") == {"torch": "aten", "jax": "xla"}[framework]
    for name in ("cpp", "native"):
        with pytest.raises(fk.BackendError, match="'cpp' does not run here: no C\\+\\+ compiler: CXX is"):
            choose(name, framework, "cpu")


def test_a_call_runs_on_them(nothing_set):
    run = Run("gqa")
    want = run.forward()[0]
    att = fk.compile("causal")
    assert torch.allclose(att(run.q, run.k, run.v), want, atol=1e-5)
    assert att.stages(run.q, run.k, run.v).target.backend == "cpp"
    assert "frisket_forward" in att.source("cpp", run.q, run.k, run.v)


SHAPE = "causal & window({0}) & same({1})", "score + {2} * tanh(score)"


@pytest.mark.exhaustive
def test_a_shape_of_text_is_one_kernel(monkeypatch, nothing_set):
    """Whatever the lengths, names and numbers: right with each, forward and backward."""
    texts = set()
    monkeypatch.setattr(native_torch, "library", lambda text: texts.add(text) or native_build.library(text))
    native_torch._kernel.memo.clear()
    for number, window, name in ((50, 200, "doc"), (30, 64, "ids")):
        att = fk.compile(*(text.format(window, name, number) for text in SHAPE), engines=False)
        for length in (5, 40, 130, 600, 2000):
            q, k, v = (torch.randn(1, 2, length, 16, requires_grad=length < 1000) for _ in range(3))
            given = {name: torch.arange(length) // 90}
            out = att(q, k, v, **given)
            if q.requires_grad:
                out.sum().backward()
                att.check(q, k, v, **given)
    assert len(texts) == 2


@pytest.mark.parametrize("mask", ["causal & k >= {}", "q >= k & k < {}", "{} <= k"])
def test_masks_of_other_bounds_have_one_kernel(mask):
    """A bound that is one number was a literal of the kernel's text."""
    q = torch.zeros(1, 1, 64, 16)
    texts = [fk.compile(mask.format(n)).source("cpp", q, q, q) for n in (30, 40)]
    assert len({text.partition("#include")[2] for text in texts}) == 1  # above it are the numbers of a mask


@pytest.fixture
def texts(monkeypatch, nothing_set):
    """The sources of the kernels that calls ask for."""
    found = set()
    monkeypatch.setattr(native_torch, "library", lambda text: found.add(text) or native_build.library(text))
    native_torch._kernel.memo.clear()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mask", "literal"),
    [
        ("causal & window(n)", "causal & window(300)"),
        pytest.param("prefix_lm(n)", "prefix_lm(300)", marks=pytest.mark.exhaustive),
    ],
)
def test_a_parameter_takes_the_kernels_of_a_literal(mask, literal, texts):
    """Right with each value, forward and backward; values that a plan does not lift share one kernel of any value."""
    q, k, v = torch.randn(3, 1, 2, 200, 16)
    named = fk.compile(f"param n: int\nmask = {mask}", engines=False)
    fk.compile(literal, engines=False).check(q, k, v)
    for n in (300, 41, 3, 1 << 20):
        named.check(q, k, v, n=n)
    assert len(texts) == 2
    for n in (2, 1, 0, -1, -70):
        named.check(q, k, v, n=n, gradients=False)
    assert len(texts) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mask", default_only(["(q - k) % n == 0", "(q + n) % 7 >= k % 7", "2 * n + q - k > 5"], "(q + n) % 7 >= k % 7")
)
def test_scalars_beyond_comparisons_do_not_recompile(mask, texts):
    """No value makes another kernel."""
    q, k, v = torch.randn(3, 1, 2, 60, 16)
    att = fk.compile(f"param n: int\nmask = {mask}", engines=False)
    for n in (3, 4, 5, 8):
        att.check(q, k, v, n=n, gradients=False)
    assert len(texts) == 1


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_literals_of_any_size_are_right_in_one_kernel(dtype, texts):
    q, k, v = torch.randn(3, 1, 2, 70, 16).to(dtype)
    for number in ("50.0", "0.3", "-7.3", "1234.9", "0.1000000001"):
        att = fk.compile(*(text.format(60, "doc", number) for text in SHAPE), engines=False)
        att.check(q, k, v, doc=torch.arange(70) // 30)
    assert len(texts) == 2
