"""flex_attention on PyTorch's own words: every mask and score mod of the table, traced unchanged, beside torch's
flex_attention run eagerly, and gradients beside autograd through the dense formula in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.attention.flex_attention as theirs  # noqa: E402
from support.torch_callables import MASKS, SCORES, in_torch, mask_case, score_case  # noqa: E402

from frisket.flex import AuxOutput, AuxRequest, create_block_mask, flex_attention  # noqa: E402
from frisket.runtime.flex.function_state import state_of  # noqa: E402

UNMAPPED = ("softcap by a function of its own", "module")  # torch's own does not take these


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "aten")
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(  # torch's own derivative of an index of a part of a tensor has the wrong shape
        torch._dynamo._trace_wrapped_higher_order_op, "mod_index", lambda x, index: torch.ops.aten.index(x, list(index))
    )


def arrays(case, dtype=torch.float32, grad=False):
    g = torch.Generator().manual_seed(4)
    b, h, q_len, kv_len = case.shape
    shapes = (b, h, q_len, 16), (b, h, kv_len, 16), (b, h, kv_len, 8)
    return [torch.randn(s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def words(kind, name):
    """(case, score_mod, block mask of torch, block mask of ours)."""
    if kind == "score":
        case = score_case(name)
        return case, case.fn, None, None
    case = mask_case(name)
    b, h, q_len, kv_len = case.shape
    ours = create_block_mask(case.fn, b, h, q_len, kv_len, device="cpu")
    torchs = None if name in UNMAPPED else theirs.create_block_mask(case.fn, b, h, q_len, kv_len, device="cpu")
    return case, None, torchs, ours


ALL = [*(("score", n) for n in SCORES), *(("mask", n) for n in MASKS)]


@pytest.mark.parametrize(("kind", "name"), [x for x in ALL if x[1] not in UNMAPPED], ids=lambda x: x)
def test_as_torch_computes_it(kind, name):
    case, mod, torchs, ours = words(kind, name)
    q, k, v = arrays(case)
    with torch.no_grad():
        want, lse = theirs.flex_attention(q, k, v, mod, torchs, return_lse=True)
        out, aux = flex_attention(q, k, v, mod, ours, return_aux=AuxRequest(lse=True))
        again = flex_attention(q, k, v, mod, torchs)  # torch's BlockMask
    assert isinstance(aux, AuxOutput)
    assert aux.max_scores is None
    assert aux.lse.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(again, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(aux.lse, lse.float(), rtol=1e-4, atol=2e-5)  # a float64 table makes theirs float64


def dense(q, k, v, score, visible):
    """(out, lse, max) by the formula; a query that sees nothing has 0, -inf, -inf."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = score(scores) if score else scores
    scores = torch.where(visible, scores, -torch.inf)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, scores).softmax(-1)
    lse = torch.where(empty, 0.0, scores).logsumexp(-1)
    return torch.where(empty, 0.0, weights) @ v, torch.where(empty[..., 0], -torch.inf, lse), scores.amax(-1)


@pytest.mark.parametrize(("kind", "name"), [x for x in ALL if x[1] != UNMAPPED[0]], ids=lambda x: x)
def test_gradients_are_those_of_the_formula(kind, name):
    case, mod, _, ours = words(kind, name)
    q, k, v = arrays(case, torch.float64, grad=True)
    captured = [] if mod is None else [x for x in state_of(mod)[1] if x.is_floating_point()]
    asked = [x.requires_grad for x in captured]
    try:
        for x in captured:
            x.requires_grad_(True)
        visible = torch.ones((), dtype=torch.bool) if kind == "score" else in_torch(case)
        wants = dense(q, k, v, mod and (lambda s: in_torch(case, s)), visible)
        out, aux = flex_attention(q, k, v, mod, ours, return_aux=AuxRequest(lse=True, max_scores=True))
        finds = out, aux.lse, aux.max_scores
        for found, want in zip(finds, wants, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
        assert not aux.max_scores.requires_grad
        g = torch.Generator().manual_seed(5)
        seeds = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in finds[:2]]

        def gradients(out, lse):
            lse = torch.where(torch.isneginf(lse), 0.0, lse)
            total = (out * seeds[0]).sum() + (lse * seeds[1]).sum()
            return torch.autograd.grad(total, [q, k, v, *captured], allow_unused=True, materialize_grads=True)

        for found, want in zip(gradients(*finds[:2]), gradients(*wants[:2]), strict=True):
            size = float(want.nan_to_num().abs().max())  # NaN: a root at 0, by hand
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5 * (1 + size), equal_nan=True)
    finally:
        for x, before in zip(captured, asked, strict=True):
            x.requires_grad_(before)
