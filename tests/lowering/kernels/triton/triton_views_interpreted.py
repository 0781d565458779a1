"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: views of torch mean what copies of them mean."""

import pytest
import torch
from support.torch import torch_views
from support.torch.torch_views import SHAPES, VIEWS

import frisket as fk


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_means_what_its_copy_means(kind):
    torch_views.check(kind, "triton", torch.float32, SHAPES)


def test_every_tensor_may_be_a_negated_view():
    torch_views.check("negated", "triton", torch.float32, *([name] for name in SHAPES))


def test_the_planner_reads_negated_tables():
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    doc, start = -(torch.arange(40, dtype=torch.int32) // 9), -torch.tensor([3])
    att = fk.compile("doc[q] == doc[k] & k >= start[b]", backend="triton")
    outs = []
    for t, s in ((-doc, -start), (torch._neg_view(doc), torch._neg_view(start))):
        outs.append(att(q, k, v, plan=att.plan(40, 40, 1, 2, flat=True, doc=t, start=s)))
    torch.testing.assert_close(*outs)
