"""The list of stages is the record's fields and the order of the page that tells of them."""

import io
from contextlib import redirect_stderr

import pytest

import frisket as fk
from frisket.lowering.pipeline import NAMES, PIPELINE


def test_pipeline_lists_each_stage_in_order():
    assert tuple(stage.__name__ for stage in PIPELINE) == NAMES


def test_a_call_shows_the_stages_that_are_printed_without_it(monkeypatch):
    torch = pytest.importorskip("torch")
    att, q = fk.compile("causal & window(9)", backend="aten"), torch.randn(1, 2, 128, 8)
    want = att.stages(q, q, q)
    monkeypatch.setenv("FRISKET_SHOW", "plan,target,simplified")
    with redirect_stderr(io.StringIO()) as shown:
        att(q, q, q)
        att(q, q, q)
    assert shown.getvalue() == "\n\n".join(want.text(n) for n in ("plan", "target", "simplified")) + "\n"
