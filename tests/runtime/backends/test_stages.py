"""The list of stages is the record's fields and the order of the page that tells of them."""

import io
from contextlib import redirect_stderr
from dataclasses import fields

import pytest

import frisket as fk
from frisket.runtime.backends.stages import Stages
from frisket.runtime.machine.settings import STAGES


def test_pipeline_lists_each_stage_in_order():
    assert tuple(field.name for field in fields(Stages))[: len(STAGES)] == STAGES


def test_a_call_shows_the_stages_that_are_printed_without_it(monkeypatch):
    torch = pytest.importorskip("torch")
    att, q = fk.compile("causal & window(9)", backend="aten"), torch.randn(1, 2, 128, 8)
    want = att.stages(q, q, q)
    monkeypatch.setenv("FRISKET_SHOW", "plan,target,simplified")
    with redirect_stderr(io.StringIO()) as shown:
        att(q, q, q)
        att(q, q, q)
    assert shown.getvalue() == "\n\n".join(want.text(n) for n in ("plan", "target", "simplified")) + "\n"


@pytest.mark.parametrize("backend", ["cpp", "gluon", "flash", "pallas-tpu", "pallas-mosaic-gpu"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 64), (4, 0), (0, 0)])
def test_stages_of_calls_without_tokens_have_a_kernel(backend, q_len, kv_len):
    pytest.importorskip("jax" if backend.startswith("pallas") else "torch")
    stages = fk.compile("causal").stages(q_len=q_len, kv_len=kv_len, backend=backend, dtype="float16")
    assert stages.source
    assert stages.target
