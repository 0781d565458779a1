"""Weights and factors that people asked torch's flex_attention for, against dense attention in float64.

attention-gym 116 asks for sigmoid attention; 117 for a constant in place of the maximum, softmax1 and a learned term of
the divisor; pytorch 153221 for factors, convolutions and mixing of heads after the softmax (multi-token attention).
"""

from __future__ import annotations

import pytest
import torch

import frisket as fk

BATCH, HEADS, LENGTH, SIZE = 2, 4, 48, 16
BACK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
RNG = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, generator=RNG)


def arrays(learned=()):
    qkv = [drawn(BATCH, n, LENGTH, SIZE).requires_grad_() for n in (HEADS, 2, 2)]
    return [*qkv, *(x.clone().requires_grad_() for x in learned)]


def scores(q, k):
    return q @ k.repeat_interleave(2, 1).mT / SIZE**0.5


def agree(ours, dense, *learned):
    """Results and gradients in float32, of every backend that this machine has, with those of float64."""
    leaves = arrays(learned)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = dense(*wide)
    wanted = [want, *torch.autograd.grad(want.square().sum(), wide)]
    for backend in ("aten", "cpp"):
        got = ours(backend, *leaves)
        for x, y in zip([got, *torch.autograd.grad(got.square().sum(), leaves)], wanted, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def values(v):
    return v.repeat_interleave(2, 1)


def test_requested_sigmoid_attention_sees_both_ways():
    """A protein language model: padding on the right, and a learned bias."""
    lengths = torch.tensor([48, 31])

    def ours(backend, q, k, v, bias):
        weight = "sigmoid_attention(bias)"
        return fk.attention(q, k, v, "padding(lengths)", weight=weight, lengths=lengths, bias=bias, backend=backend)

    def dense(q, k, v, bias):
        seen = torch.arange(LENGTH) < lengths[:, None, None, None]
        seen = seen & seen.mT
        return torch.where(seen, (scores(q, k) + bias).sigmoid(), 0) @ values(v)

    agree(ours, dense, torch.tensor(-3.9))


def test_requested_constant_takes_the_place_of_the_maximum():
    """Scores that a soft cap bounds need no maximum."""

    def ours(backend, q, k, v):
        return fk.attention(q, k, v, "causal", "softcap(20)", weight="exp(score - 20)", divide="total", backend=backend)

    def dense(q, k, v):
        return (20 * (scores(q, k) / 20).tanh()).masked_fill(~BACK, -torch.inf).softmax(-1) @ values(v)

    agree(ours, dense)


@pytest.mark.parametrize("learned", [False, True])
def test_requested_softmax1_and_a_learned_term_of_the_divisor(learned):
    def ours(backend, q, k, v, *term):
        how = {"divide": "total + exp(term[h])", "term": term[0]} if learned else {"divide": "total + 1"}
        return fk.attention(q, k, v, "causal", weight="softmax1", backend=backend, **how)

    def dense(q, k, v, *term):
        e = scores(q, k).exp() * BACK
        more = term[0].exp()[:, None, None] if learned else 1
        return e @ values(v) / (e.sum(-1, keepdim=True) + more)

    agree(ours, dense, *([drawn(HEADS)] if learned else []))


def softmax(q, k):
    return scores(q, k).masked_fill(~BACK, -torch.inf).softmax(-1)


@pytest.mark.parametrize("signs", ["positive", "both"])
def test_requested_factors_after_the_softmax(signs):
    def part(backend, q, k, v, f, lse):
        how = {"f": f, "backend": backend, "return_lse": True}
        out, other = fk.attention(q, k, v, "causal", "score + log(max(f[q, k], 0.0))", **how)
        return out * (other - lse).exp()[..., None]

    def ours(backend, q, k, v):
        _, lse = fk.attention(q, k, v, "causal", return_lse=True, backend=backend)
        out = part(backend, q, k, v, factor, lse)
        return out if signs == "positive" else out - part(backend, q, k, v, -factor, lse)

    factor = drawn(LENGTH, LENGTH)
    factor = factor.abs() + 0.1 if signs == "positive" else factor
    agree(ours, lambda q, k, v: softmax(q, k) * factor.double() @ values(v))


def test_requested_convolution_over_keys_shifts_values():
    """p convolved over keys that lie back, as multi-token attention does after the softmax."""
    kernel = torch.tensor([0.6, 0.3, 0.1])

    def shifted(x, n):
        return torch.nn.functional.pad(x, (0, 0, n, 0))[:, :, :LENGTH]

    def ours(backend, q, k, v):
        moved = sum(float(c) * shifted(v, n) for n, c in enumerate(kernel))
        return fk.attention(q, k, moved, "causal", backend=backend)

    def dense(q, k, v):
        p, out = softmax(q, k), 0
        for n, c in enumerate(kernel.double()):
            out = out + c * torch.nn.functional.pad(p, (0, n))[..., n:]  # p of key j + n goes to the value of key j
        return out @ values(v)

    agree(ours, dense)


def test_requested_head_mixing_of_shared_values():
    """Heads that share values are mixed behind attention; heads with different values are not."""
    mix = drawn(HEADS, HEADS)

    def ours(backend, q, k, v):
        out = fk.attention(q, k[:, :1], v[:, :1], "causal", backend=backend)
        return torch.einsum("gh,bhqd->bgqd", mix, out)

    def dense(q, k, v):
        p = (q @ k[:, :1].mT / SIZE**0.5).masked_fill(~BACK, -torch.inf).softmax(-1)
        return torch.einsum("gh,bhqk->bgqk", mix.double(), p) @ v[:, :1]

    agree(ours, dense)
