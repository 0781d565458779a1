"""flex_attention on callables of the table, beside the dense formula and autograd through it, in float64."""

from __future__ import annotations

import torch
from support.torch.callables import in_torch
from support.torch.dense import dense

from frisket.flex import AuxRequest, create_block_mask, flex_attention
from frisket.runtime.flex.score_mod import state_of


def arrays(case, dtype=torch.float32, grad=False):
    g = torch.Generator().manual_seed(4)
    b, h, q_len, kv_len = case.shape
    shapes = (b, h, q_len, 16), (b, h, kv_len, 16), (b, h, kv_len, 8)
    return [torch.randn(s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def block_mask_of(case, make=create_block_mask):
    return make(case.fn, case.batch, case.heads, case.q_len, case.kv_len, device="cpu")


def check_gradients(score, mask, dtype, tolerance):
    """Compare out, lse, max, and the gradients of q, k, v and every Float tensor that the score mod captured."""
    case, mod = score or mask, score and score.fn
    given = arrays(case, dtype, grad=True)
    captured = [x for x in state_of(mod)[1] if x.is_floating_point()] if mod else []
    asked = [x.requires_grad for x in captured]
    try:
        for x in captured:
            x.requires_grad_(True)
        visible = in_torch(mask) if mask else torch.ones((), dtype=torch.bool)
        wide = [x.detach().double().requires_grad_() for x in given]
        wants = dense(*wide, visible, mod and (lambda s: in_torch(score, s)))
        out, aux = flex_attention(
            *given, mod, mask and block_mask_of(mask), return_aux=AuxRequest(lse=True, max_scores=True)
        )
        assert not aux.max_scores.requires_grad
        finds = out, aux.lse, aux.max_scores
        g = torch.Generator().manual_seed(5)
        seeds = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in finds[:2]]

        def gradients(out, lse, *inputs):
            lse = torch.where(torch.isneginf(lse), 0.0, lse)
            total = (out * seeds[0]).sum() + (lse * seeds[1]).sum()
            return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)

        found = [*finds, *gradients(*finds[:2], *given, *captured)]
        for x, want in zip(found, [*wants, *gradients(*wants[:2], *wide, *captured)], strict=True):
            size = float(want.nan_to_num(neginf=0).abs().max())  # NaN: a root at 0, by hand
            torch.testing.assert_close(
                x.double(), want.double(), rtol=tolerance, atol=tolerance * (1 + size), equal_nan=True
            )
    finally:
        for x, before in zip(captured, asked, strict=True):
            x.requires_grad_(before)
