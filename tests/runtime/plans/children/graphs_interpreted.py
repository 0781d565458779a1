"""Run by test_cuda_graphs.py with TRITON_INTERPRET=1: operators of attention inside of a CUDA graph without a GPU."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from support.lowering.device_tables import pose
from support.triton.graphs import Graph

import frisket as fk
from frisket.grammar import memo
from frisket.runtime.calls import arrays as frameworks
from frisket.runtime.torch import running

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
S, D = 36, 16
G = torch.Generator().manual_seed(0)
BIAS = "param bias: float[_, _]\nscore = score + bias[h, k]"
CAP = "param c: float\nscore = c * tanh(score / c)"
DOC = torch.arange(S, dtype=torch.int32) // 9
# mask, score mod, tables of the device with the contents of two steps
CASES = {
    "causal": ("causal", None, {}),
    "window": ("causal & window(11)", None, {}),
    "parts": ("abs(q - k) <= 9 | k < 3", None, {}),
    "documents": ("causal & same(doc)", None, {"doc": (DOC, (torch.arange(S, dtype=torch.int32) + 5) // 13)}),
    "narrow": ("same(doc)", None, {"doc": (DOC.to(torch.int16), DOC.flip(0).to(torch.int16))}),
    "offsets": ("document(off) & causal", None, {"off": (torch.tensor([0, 7, S]), torch.tensor([0, 30, S]))}),
    "flags": ("keep[k]", None, {"keep": (DOC % 2 == 0, DOC % 3 == 1)}),
    "learned": ("causal", BIAS, {"bias": (torch.randn(2, S, generator=G), torch.randn(2, S, generator=G))}),
    "number": ("causal", CAP, {"c": (torch.tensor(3.0), torch.tensor(0.5))}),
}


def arrays(*names):
    return {n: torch.randn(1, 1 if n in "kv" else 2, S, D, generator=G) for n in names}


class Step:
    """The operators of one call, forward and backward, with inputs in memory that stays."""

    def __init__(self, name):
        mask, score, tables = CASES[name]
        text = f"param keep: bool[_]\nmask = {mask}" if name == "flags" else mask
        self.texts = text, score
        self.att = fk.compile(text, score, tile=(16, 16), backend="triton")
        self.inputs = arrays("q", "k", "v", "dout")
        self.tables = {n: first.clone() for n, (first, _) in tables.items()}
        self.later = {n: second for n, (_, second) in tables.items()}
        self.spec = self.att.spec
        self.names = "".join(f",tensor {n}" for n in self.tables)

    def __call__(self):
        q, k, v, dout = self.inputs.values()
        values = list(self.tables.values())
        out, lse, _, stats = running.attend(q, k, v, None, values, [], self.spec, self.names)
        needed = [True, True, True, False, *(True for x in values if x.is_floating_point())]
        rest = (values, out, lse, stats, [], self.spec, self.names, needed)
        return out, lse, *running.attend_backward(dout, None, q, k, v, None, *rest)

    def change(self):
        for x in self.inputs.values():
            x.copy_(torch.randn(x.shape, generator=G))
        for n, x in self.tables.items():
            x.copy_(self.later[n])

    def wanted(self):
        """The results by another backend, in float64 until the end."""
        exact = [x.double().requires_grad_() for n, x in self.inputs.items() if n != "dout"]
        tables = {n: x.double().requires_grad_() if x.is_floating_point() else x for n, x in self.tables.items()}
        peer = fk.compile(*self.texts, backend="aten")
        out, lse = peer(*exact, return_lse=True, **tables)
        learned = [x for x in tables.values() if x.requires_grad]
        grads = torch.autograd.grad(out, [*exact, *learned], self.inputs["dout"].double())
        return [x.detach().float() for x in (out, lse, *grads)]


@pytest.fixture
def graph(monkeypatch):
    pose(monkeypatch)
    memo.clear()
    frameworks._of_graphs.clear()
    yield Graph(monkeypatch)
    frameworks._of_graphs.clear()


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_the_reference_for_new_contents(name, graph, monkeypatch):
    """Of every input and table; what frisket remembers of the attention is forgotten before."""
    step = Step(name)
    with graph.warm_up():
        step()
    with graph.record():
        results = step()
    assert graph.steps
    step.att.calls.clear()
    memo.clear()
    gc.collect()
    monkeypatch.undo()
    for _ in range(2):
        step.change()
        graph.replay()
        for got, want in zip(results, step.wanted(), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_operators_keep_no_memory_of_a_graph(name, graph):
    """All that they make in a warm-up or while they are recorded is gone with the results: torch refuses graphs whose
    memory somebody else keeps."""
    step = Step(name)
    with graph.warm_up():
        results = step()
    assert not graph.left(results)
    with graph.record():
        results = step()
    assert not graph.left(results)


def test_tables_of_the_host_outlive_what_uploaded_them(graph, monkeypatch):
    """A call captured by hand, with a table of the host, narrow integers and Floats: a replay reads the copies."""
    table, bias = np.arange(S, dtype=np.int16) // 9, np.linspace(-1, 1, S)
    texts = "param doc: int[_]\nmask = same(doc) & q >= k - 3", "param bias: float[_]\nscore = score + bias[k]"
    monkeypatch.setattr("frisket.runtime.plans.device._stays", lambda x, *more: False)
    q, k, v = arrays("q", "k", "v").values()
    att = fk.compile(*texts, doc=table, bias=bias, tile=(16, 16), backend="triton")
    with graph.warm_up():
        att(q, k, v)
    with graph.record():
        out = att(q, k, v)
    del att
    memo.clear()
    gc.collect()
    monkeypatch.undo()
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, generator=G))
    graph.replay()
    exact = [x.double() for x in (q, k, v)]
    want = fk.compile(*texts, doc=table, bias=bias, backend="aten")(*exact)
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)


def test_capture_without_a_warm_up_says_so(graph):
    """Of what the host planned: the records of tiles cannot be copied any more."""
    q, k, v = arrays("q", "k", "v").values()
    with graph.record(), pytest.raises(AssertionError, match="cannot copy from the host"):
        fk.compile("abs(q - k) <= 9 | k < 3", tile=(16, 16), backend="triton")(q, k, v)
