"""A first call lays out one set of tiles: what chooses them needs no layout of its own."""

import numpy as np
import pytest

import frisket as fk
from frisket.lowering.analysis import tiling

torch = pytest.importorskip("torch")

DOC = np.repeat(np.arange(5), 211)


@pytest.mark.parametrize(
    ("text", "tiles"),
    [("causal & window(91)", (64, 32)), ("causal & window(907)", (128, 32)), ("causal & same(doc)", (128, 32))],
)
def test_a_first_call_analyses_one_layout(monkeypatch, text, tiles):
    monkeypatch.setenv("FRISKET_BACKEND", "aten")
    laid = []
    real = tiling.analyse
    monkeypatch.setattr(tiling, "analyse", lambda *a, **more: laid.append(a[2]) or real(*a, **more))
    q = torch.randn(1, 2, 1055, 8)
    fk.attention(q, q, q, text, **({"doc": DOC} if "doc" in text else {}))
    assert laid == [tiles]


@pytest.mark.parametrize(("width", "length", "narrow"), [(385, 4096, True), (386, 4096, False), (4096, 512, True)])
def test_narrow_mask_is_known_by_formula_and_by_layout(width, length, narrow):
    plan = fk.compile(f"causal & window({width})").plan(length, length)
    made = plan.work((128, 128)).layout
    by_formula, by_layout = made.reads_at_most(4), made.analysis and made.reads_at_most(4)
    assert by_formula == by_layout == plan.narrow == narrow
