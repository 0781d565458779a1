"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: views of torch mean what copies of them mean."""

import pytest
import torch
from support.torch import views as torch_views
from support.torch.views import SHAPES, VIEWS

import frisket as fk


@pytest.mark.parametrize("kind", VIEWS)
def test_triton_views_give_the_results_of_copies(kind):
    torch_views.check(kind, "triton", torch.float32, SHAPES)


def test_triton_tensors_may_be_negated_views():
    torch_views.check("negated", "triton", torch.float32, *([name] for name in SHAPES))


def test_triton_planner_reads_negated_tables():
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    doc, start = -(torch.arange(40, dtype=torch.int32) // 9), -torch.tensor([3])
    att = fk.compile("doc[q] == doc[k] & k >= start[b]", backend="triton")
    outs = []
    for t, s in ((-doc, -start), (torch._neg_view(doc), torch._neg_view(start))):
        outs.append(att(q, k, v, plan=att.plan(40, 40, 1, 2, flat=True, doc=t, start=s)))
    torch.testing.assert_close(*outs)


def test_rows_of_a_table_that_are_far_apart():
    """A tile of the backward reads queries of a table that lie more than 2**31 entries from its first."""
    q, k, v, dout = torch.randn(4, 1, 1, 40, 16, generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    apart = 5 << 24
    bias = torch.randn(40, 40, generator=torch.Generator(torch.get_default_device()).manual_seed(1)).half()
    far = torch.empty(40 * apart, dtype=torch.half).as_strided((40, 40), (apart, 1))  # most of it is never touched
    far.copy_(bias)
    att = fk.compile("causal", "score + bias[q, k]", backend="triton")
    found = [torch.autograd.grad(att(*leaves, bias=x), leaves, dout) for x in (far, bias)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
