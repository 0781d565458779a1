"""CUDA graphs of torch.compile: which operators they may hold, and these operators inside of one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.triton.process import run
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import is_cudagraph_unsafe_fx_node

import frisket as fk

SCALED = "param c: float\nscore = c * score"
DOC = torch.zeros(64, dtype=torch.int32, device="meta")
DOC_OF_HOST = torch.zeros(64, dtype=torch.int32)
NUMBER = torch.zeros((), device="meta")
NAMED, LIBRARY = (fk.compile("causal", backend=x) for x in ("triton", "aten"))


@pytest.mark.exhaustive
def test_cuda_graphs_are_replayed_without_a_gpu():
    run(Path(__file__).parent / "children/graphs_interpreted.py", TRITON_INTERPRET="1")


def test_selected_cuda_graph_is_replayed_without_a_gpu():
    child = Path(__file__).parent / "children/graphs_interpreted.py"
    run(f"{child}::test_replay_equals_the_reference_for_new_contents[parts]", TRITON_INTERPRET="1")


def operators(call, *given, learns=False):
    """(name, whether torch's graph partition leaves it out) of the operators of a graph and its backward; tensors
    without memory stand for those of a GPU."""
    torch._dynamo.reset()
    seen = []

    def compiled(graph, inputs):
        nodes = [n for n in graph.graph.nodes if "frisket" in str(n.target)]
        seen.extend((str(n.target).split(".")[1], is_cudagraph_unsafe_fx_node(n)) for n in nodes)
        return graph.forward

    q = torch.zeros(1, 2, 64, 16, device="meta", requires_grad=learns)
    backend = aot_autograd(fw_compiler=compiled)
    out = torch.compile(call, fullgraph=True, backend=backend)(q, *given)
    if learns:
        out.sum().backward()
    return seen


IN_A_GRAPH = {
    "plain": (lambda q: fk.attention(q, q, q, "causal & window(9)"), ()),
    "documents": (lambda q, doc: fk.attention(q, q, q, "causal & same(doc)", doc=doc), (DOC,)),
    "a number of a score mod": (lambda q, c: fk.attention(q, q, q, "causal", SCALED, c=c), (NUMBER,)),
    "named": (lambda q: NAMED(q, q, q), ()),
}
OUTSIDE = {
    "table of the host": (lambda q, doc: fk.attention(q, q, q, "same(doc)", doc=doc), (DOC_OF_HOST,)),
    "a number of a mask": (lambda q, w: fk.attention(q, q, q, "window(w)", w=w), (DOC[0],)),
    "a number of the call": (lambda q: fk.attention(q, q, q, "window(w)", w=9), ()),
    "a place": (lambda q: fk.attention(q, q, q, "causal", origin=(0, 0, 64, 0), sizes=(1, 2, 128, 128)), ()),
    "dropout": (lambda q: fk.attention(q, q, q, "causal", dropout=0.1), ()),
    "library calls": (lambda q: LIBRARY(q, q, q), ()),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_cuda_graphs_hold_calls_of_tensors_of_the_gpu(name, learns):
    call, given = IN_A_GRAPH[name]
    want = [("attend", False), ("attend_backward", False)] if learns else [("attend_alone", False)]
    with torch.set_grad_enabled(learns):
        assert operators(call, *given, learns=learns) == want


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_calls_that_read_the_host_stay_out_of_cuda_graphs(name, learns):
    call, given = OUTSIDE[name]
    want = ["attend_reads_host", "attend_backward_reads_host"] if learns else ["attend_alone_reads_host"]
    with torch.set_grad_enabled(learns):
        assert operators(call, *given, learns=learns) == [(n, True) for n in want]


def test_tables_of_an_attention_stay_out_of_cuda_graphs():
    """They are arrays of the host. As tensors of the GPU, given to the call, they are planned there."""
    att, bare = fk.compile("same(doc)", doc=np.arange(64) // 9), fk.compile("same(doc)")
    with torch.no_grad():
        assert operators(lambda q: att(q, q, q)) == [("attend_alone_reads_host", True)]
        assert operators(lambda q: bare(q, q, q, doc=DOC)) == [("attend_alone", False)]


def test_operators_that_read_the_host_give_equal_results():
    """With gradients and inside of torch.func, on a CPU."""
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    spec, ops = fk.compile("causal").spec, torch.ops.frisket

    def outputs(op, names):
        leaf = q.clone().requires_grad_()
        out = op(leaf, k, v, None, [], [], spec, names)[0]
        mapped = torch.func.vmap(lambda x: op(x, k, v, None, [], [], spec, names)[0])(torch.stack([q, q + 1]))
        grad = torch.func.grad(lambda x: op(x, k, v, None, [], [], spec, names)[0].sum())(q)
        return out, torch.autograd.grad(out.sum(), leaf)[0], grad, mapped

    for got, want in zip(outputs(ops.attend_reads_host, "host"), outputs(ops.attend, ""), strict=True):
        assert torch.equal(got, want)
