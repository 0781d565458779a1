"""Engines in graphs of torch: one operator, its fake, and the engine's backward or that of generated kernels."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.flash import engine as stand_in
from support.tiers import thinned

import frisket as fk
from frisket.dsl.errors import BackendError, BackwardError
from frisket.runtime.backends import sdpa
from frisket.runtime.backends.base import RECORDS, register
from frisket.runtime.backends.engines import proof, square
from frisket.runtime.backends.flash import call as flash_call
from frisket.runtime.backends.flash import torch as flash_torch
from frisket.runtime.torch.ready import VendorCall


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No backend is named, and every engine that is proved wins on the CPU."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    kinds = ("float16", "bfloat16", "float32", "float64")
    rows = [proof.CostRow(engine=name, platform="cpu", dtypes=kinds) for name in ("flash", "cudnn", "sdpa")]
    monkeypatch.setattr(proof, "COSTS", tuple(rows))
    torch._dynamo.reset()


@pytest.fixture
def elsewhere(monkeypatch):
    """FlashAttention 4 and cuDNN on the CPU: the stand-in of the one, torch's kernel for CPUs for the other."""
    undo, records = stand_in.install(monkeypatch), {n: RECORDS[n] for n in ("flash", "cudnn")}
    monkeypatch.setattr(flash_call, "architecture", lambda device=None: "sm_90")
    register(replace(RECORDS["flash"], platforms=("cpu",)))
    cudnn = replace(
        records["cudnn"], reason=lambda framework=None: "", platforms=("cpu",), executors=RECORDS["sdpa"].executors,
        engine=_on_the_cpu,
    )  # fmt: skip
    register(cudnn)
    yield
    for was in records.values():
        register(was)
    undo()


def _on_the_cpu(flags, call):
    """The call of cuDNN, for torch's kernel on the CPU: gradients are its own where they need no order."""
    mask = square(flags, call.geometry, "cuDNN", rectangles=False)
    if isinstance(mask, str):
        return mask
    return sdpa.SdpaArguments("cpu", mask, call.geometry.scale * flags.factor, not call.deterministic)


@pytest.fixture
def called(monkeypatch):
    """The engines whose forwards have run, in their order."""
    found, was = [], VendorCall.saving

    def saving(self, *given):
        found.append(self.proof.backend)
        return was(self, *given)

    monkeypatch.setattr(VendorCall, "saving", saving)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("lse", "dynamic"), thinned([(False, False), (False, True), (True, True), (True, False)]))
def test_sdpa_in_a_graph(lse, dynamic, called):
    """No graph break; results and gradients are those of library calls; the engine runs once."""
    att, other = fk.compile("causal"), fk.compile("causal", backend="aten")
    arrays = [torch.randn(1, h, 40, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]

    def loss(att):
        out, rows = att(*arrays, return_lse=True)
        return (out**2).sum() + (rows.sum() if lse else 0)

    graph = torch.compile(lambda: loss(att), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found = graph()
    grads = torch.autograd.grad(found, arrays)
    assert called == ["sdpa"]
    want = loss(other)
    torch.testing.assert_close(found, want)
    for got, wanted in zip(grads, torch.autograd.grad(want, arrays), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("graph", [False, True])
def test_arrays_of_other_strides_than_were_compared(graph, deterministic, called, monkeypatch):
    """An engine that was compared on contiguous arrays takes these by itself, and any strides where it is named."""
    compared = proof.Comparison(engine="cudnn", platform="cpu", contiguous=True)
    monkeypatch.setattr(proof, "CHECKED", (compared,))
    contiguous = [torch.randn(1, h, 40, 16).bfloat16().requires_grad_() for h in (4, 2, 2)]
    own = [x.detach().double().requires_grad_() for x in contiguous]
    out = fk.compile("causal", backend="aten")(*own)
    want = out, *torch.autograd.grad(out, own, torch.ones_like(out))
    axes = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in contiguous]
    strided = [x.detach().transpose(1, 2).requires_grad_() for x in axes]
    assert not any(x.is_contiguous() for x in strided)
    att = fk.compile("causal", deterministic=deterministic)
    named = fk.compile("causal", deterministic=deterministic, engines="cudnn")
    for run, arrays, how, taken in (
        (att, contiguous, {}, ["cudnn"]),
        (att, strided, {}, []),
        (att, axes, {"layout": "bshd"}, []),
        (named, strided, {}, ["cudnn"]),
    ):
        called.clear()
        call = partial(run, **how)
        call = torch.compile(call, fullgraph=True, backend="aot_eager") if graph else call
        out = call(*arrays)
        found = out, *torch.autograd.grad(out, arrays, torch.ones_like(out))
        assert called == taken
        for got, wanted in zip(found, want, strict=True):
            got = got.transpose(1, 2) if how else got
            torch.testing.assert_close(got.double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("engine", "mask", "deterministic"),
    [
        ("cudnn", "causal", True),
        ("cudnn", "causal", False),
        ("flash", "causal & window(9)", True),
        pytest.param("flash", "causal & window(9)", False, marks=pytest.mark.exhaustive),
        ("flash", "causal | k < 7", True),
        pytest.param("flash", "causal | k < 7", False, marks=pytest.mark.exhaustive),
    ],
)
def test_engines_of_gpus_in_a_graph(engine, mask, deterministic, called, monkeypatch):
    """By stand-ins; where an engine's gradients have no order, generated kernels make them of its out and lse:
    native kernels those of cuDNN, library calls those of flash."""
    if engine == "flash":
        monkeypatch.setenv("CXX", "nowhere")
    att = fk.compile(mask, engines=engine, deterministic=deterministic)
    arrays = [torch.randn(1, h, 40, 16).half().requires_grad_() for h in (4, 2, 2)]
    graph = torch.compile(lambda q, k, v: att(q, k, v), fullgraph=True, backend="aot_eager")
    out = graph(*arrays)
    grads = torch.autograd.grad(out, arrays, torch.ones_like(out))
    assert called == [engine]
    own = [x.detach().double().requires_grad_() for x in arrays]
    want = fk.compile(mask, backend="aten")(*own)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-3)
    for got, wanted in zip(grads, torch.autograd.grad(want, own, torch.ones_like(want)), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("how", [{"engines": False}, {"backend": "aten"}])
def test_generated_kernels_in_a_graph(how, called):
    """What is asked for of an attention holds in a graph of it."""
    att = fk.compile("causal", **how)
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    graph = torch.compile(lambda q, k, v: att(q, k, v), fullgraph=True, backend="aot_eager")
    out = graph(q, k, v)
    assert called == []
    torch.testing.assert_close(out, fk.compile("causal", backend="aten")(q, k, v))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("mask", ["causal", "causal | k < 7"])
def test_sinks_of_flash_in_a_graph(mask, called):
    att = fk.compile(mask, engines="flash")
    arrays = [torch.randn(1, h, 40, 16).half().requires_grad_() for h in (4, 2, 2)]
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    graph = torch.compile(lambda *given: att(*given[:3], sinks=given[3]), fullgraph=True, backend="aot_eager")
    out = graph(*arrays, sinks)
    grads = torch.autograd.grad(out.float().square().sum(), (*arrays, sinks))
    assert called == ["flash"]
    own = [x.detach().double().requires_grad_() for x in (*arrays, sinks)]
    want = fk.compile(mask, backend="aten")(*own[:3], sinks=own[3])
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-3)
    for got, wanted in zip(grads, torch.autograd.grad(want.square().sum(), own), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("elsewhere")
def test_gradients_that_flash_lacks_are_refused_early(monkeypatch):
    """Where one would be asked for; under no_grad the forward runs."""
    ran = []
    monkeypatch.setattr(flash_torch, "attend", lambda *given: ran.append(1) or stand_in.attend(*given))
    q, k, v = (torch.randn(1, h, 40, 16).half() for h in (4, 2, 2))
    slopes = torch.zeros(4, requires_grad=True)
    alibi = fk.compile("causal", "alibi(slopes)", backend="flash", deterministic=False)
    odd = fk.compile("causal | k < 7", backend="flash")  # tiles: Hopper's sums have no order
    for att, given, words in ((alibi, {"slopes": slopes}, "no gradient of slopes"), (odd, {}, "any order on Hopper")):
        call = partial(lambda att, given, q: att(q, k, v, **given), att, given)
        graph = torch.compile(call, fullgraph=True, backend="aot_eager")
        asked = q.clone().requires_grad_()
        with pytest.raises((BackendError, BackwardError), match=words):
            graph(asked)
        assert not ran
        with torch.no_grad():
            graph(asked)
        assert ran.pop()
    att = fk.compile("causal", backend="flash")
    even = torch.compile(lambda q: att(q, k, v), fullgraph=True, backend="aot_eager")
    even(q.clone().requires_grad_()).sum().backward()  # flags have an order
    assert ran.pop()


@pytest.mark.exhaustive
def test_sinks_in_a_graph_are_generated_kernels(called):
    att = fk.compile("causal")
    arrays = [torch.randn(1, 2, 30, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    graph = torch.compile(lambda: att(*arrays, sinks=0.5).sum(), fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(graph(), arrays)
    assert called == []
    other = fk.compile("causal", backend="aten")
    for got, wanted in zip(grads, torch.autograd.grad(other(*arrays, sinks=0.5).sum(), arrays), strict=True):
        torch.testing.assert_close(got, wanted)
