"""Run by test_invariant_triton.py with TRITON_INTERPRET=1. numpy's products sum in an order of their own, which depends
on the shapes: here they have one order, so that equal bits mean equal tiles in an equal order."""

import numpy as np
import pytest
import torch

import frisket as fk
from frisket.dsl.errors import ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:backend 'triton' runs in:UserWarning")
PROGRAMS = {
    "causal": ("causal", None, {}),
    "window": ("causal & window(w)", "softcap(20)", {"w": 50}),
    "documents": ("causal & doc[q] == doc[k]", None, {"doc": np.arange(150) // 40}),
    "everything": (None, None, {}),
}


def in_order(a, b, dtype=None):
    total = np.zeros((a.shape[0], b.shape[1]), dtype or a.dtype)
    for i in range(a.shape[1]):
        total += a[:, i, None] * b[i]
    return total


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch):
    monkeypatch.setattr(np, "matmul", in_order)


def drawn():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 150, 32, generator=draw) for n in (4, 2, 2)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_chunks_have_equal_tiles_and_order(name):
    mask, score, values = PROGRAMS[name]
    (q, k, v), sizes = drawn(), (2, 4, 150, 150)
    att = fk.compile(mask, score, invariant=True, backend="triton", **values)
    out, lse = att(q, k, v, return_lse=True)
    usual = fk.attention(q, k, v, mask, score, backend="aten", **values)
    torch.testing.assert_close(out, usual, rtol=1e-4, atol=1e-5)
    for n, end in ((1, 150), (1, 64), (5, 97), (64, 128)):
        end = end if mask else 150
        more = {"origin": (0, 0, end - n, 0), "sizes": sizes, "return_lse": True}
        found = att(q[1:, :, end - n : end], k[1:, :, :end], v[1:, :, :end], **more)
        assert torch.equal(found[0], out[1:, :, end - n : end])
        assert torch.equal(found[1], lse[1:, :, end - n : end])


def test_pages_and_plain_keys_have_equal_order():
    q, k, v = (x[:1] for x in drawn())
    att = fk.compile("causal", invariant=True, backend="triton")
    out = att(q, k, v)
    pool = [torch.zeros(12, 2, 16, 32) for _ in range(2)]
    pages = torch.tensor([[3, 7, 1, 9, 0, 11, 5, 2, 8, 4]], dtype=torch.int32)
    for i, page in enumerate(pages[0]):
        for x, held in zip((k, v), pool, strict=True):
            part = x[0, :, 16 * i : 16 * i + 16]
            held[page, :, : part.shape[1]] = part
    whole = {"origin": (0, 0, 149, 0), "sizes": (1, 4, 160, 160)}
    assert torch.equal(att(q[:, :, -1:], *pool, pages=pages, **whole), out[:, :, -1:])


def test_keys_between_parts_are_refused():
    q, k, v = drawn()
    with pytest.raises(ShapeError, match="keys begin at position 3"):
        fk.attention(q, k, v, "causal", origin=(0, 0, 3, 3), invariant=True, backend="triton")
