"""Run by test_flex_attention.py in Triton's interpreter: flex_attention, forward and backward, on PyTorch's words."""

from __future__ import annotations

import pytest
import torch
from runtime.flex.cases import check_gradients
from support.torch.callables import mask_case, score_case

PAIRS = [
    ("same table twice", "document by batch and head"), ("cpb gather", "window complement"),
    ("learned slopes", "vsa top-k"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "triton")
    monkeypatch.setattr(
        torch._dynamo._trace_wrapped_higher_order_op, "mod_index", lambda x, index: torch.ops.aten.index(x, list(index))
    )


@pytest.mark.parametrize(("score", "mask"), PAIRS)
def test_as_the_formula_says(score, mask):
    check_gradients(score_case(score), mask_case(mask), torch.float32, 2e-5)
