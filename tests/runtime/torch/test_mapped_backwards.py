"""Cotangents that torch maps (is_grads_batched, vectorised Jacobians, vmap of a backward), compared with the gradients
of one cotangent after another; and torch.func.functionalize."""

import pytest
import torch
from torch.func import functionalize, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import frisket as fk
from frisket.flex import create_block_mask, flex_attention

N = 3
CALLS = {
    "causal": ({"mask": "causal"}, {}),
    "a table of the mask": ({"mask": "causal & same(doc)"}, {"doc": torch.arange(6) // 4}),
    "sinks and a bias": (
        {"mask": "causal", "score": "score + bias[h, q - k]"}, {"bias": torch.rand(2, 6), "sinks": torch.rand(2)}
    ),
    "bfloat16": ({"mask": "causal"}, {"dtype": torch.bfloat16}),
}  # fmt: skip


def drawn(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(1, 2, 6, 8).to(dtype).requires_grad_() for _ in range(3)]


def learned(call, backend="aten"):
    """(attend, its inputs that learn)."""
    how, values = CALLS[call]
    values = dict(values)
    att, qkv = fk.compile(**how, backend=backend), drawn(values.pop("dtype", torch.float32))
    values = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in values.items()}
    names = [n for n, x in values.items() if x.requires_grad]

    def attend(q, k, v, *rest):
        return att(q, k, v, **{**values, **dict(zip(names, rest, strict=True))})

    return attend, (*qkv, *(values[n] for n in names))


def one_by_one(out, inputs, cotangents):
    rows = [torch.autograd.grad(out, inputs, d, retain_graph=True) for d in cotangents]
    return [torch.stack(x) for x in zip(*rows, strict=True)]


def equal(found, want):
    torch.testing.assert_close(list(found), list(want), rtol=0, atol=0)


@pytest.mark.parametrize("call", CALLS)
def test_batched_cotangents_have_the_gradients_of_each(call):
    attend, inputs = learned(call)
    for _ in range(3):  # anew, prepared, repeated
        out = attend(*inputs)
        d = torch.randn(N, *out.shape).to(out)
        want = one_by_one(out, inputs, d)
        equal(torch.autograd.grad(out, inputs, d, is_grads_batched=True, retain_graph=True), want)
        equal(vmap(lambda d: torch.autograd.grad(out, inputs, d, retain_graph=True))(d), want)  # noqa: B023
    nested = vmap(vmap(lambda d: torch.autograd.grad(out, inputs, d, retain_graph=True)))(d[None])
    equal([x[0] for x in nested], want)


def test_vectorized_jacobians_of_some_inputs_and_lse_are_right():
    q, k, v = drawn()
    att = fk.compile("causal", backend="aten")
    for lse in (False, True):

        def call(q, v):
            return att(q, k.detach(), v, return_lse=True)[lse][0, 0, :2]  # noqa: B023

        of = torch.autograd.functional.jacobian
        equal(of(call, (q, v), vectorize=True), of(call, (q, v)))
    kept = torch.autograd.grad(att(q, k, v), q, torch.randn(N, 1, 2, 6, 8), is_grads_batched=True, create_graph=True)[0]
    want = sum(torch.autograd.grad(g.sum(), v, retain_graph=True)[0] for g in kept)
    torch.testing.assert_close(torch.autograd.grad(kept.sum(), v)[0], want)


def test_batched_gradients_pass_gradcheck_natively():
    att = fk.compile("causal")
    small = [x.detach().double()[:, :1, :3, :4].requires_grad_() for x in drawn()]
    assert torch.autograd.gradcheck(lambda *qkv: att(*qkv), small, check_batched_grad=True)


def test_operators_have_gradients_of_batched_cotangents():
    q, k, v = drawn()
    att = fk.compile("causal", backend="aten")
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")
    for attend in (
        functionalize(att),
        lambda *qkv: flex_attention(*qkv, block_mask=mask),
        vmap(lambda *qkv: att(*(x[None] for x in qkv))[0]),
    ):
        out = attend(q, k, v)
        d = torch.randn(N, *out.shape)
        found = torch.autograd.grad(out, (q, k, v), d, is_grads_batched=True, retain_graph=True)
        equal(found, one_by_one(out, (q, k, v), d))


@pytest.mark.parametrize("call", CALLS)
def test_functionalized_calls_are_the_calls_themselves(call):
    attend, inputs = learned(call)
    loss, at = lambda *inputs: attend(*inputs).float().square().sum(), tuple(range(len(inputs)))
    equal([functionalize(attend)(*inputs)], [attend(*inputs)])
    want = grad(loss, at)(*inputs)
    for found in (
        functionalize(grad(loss, at)),
        grad(functionalize(loss), at),
        make_fx(functionalize(grad(loss, at)))(*inputs),
    ):
        equal(found(*inputs), want)


def test_functionalize_sees_writes_and_is_mapped():
    q, k, v = (x.detach() for x in drawn())
    att = fk.compile("causal", backend="aten")
    two = torch.stack([q, 2 * q])
    equal([functionalize(lambda q: att(q.clone().mul_(2), k, v))(q)], [att(2 * q, k, v)])
    equal([functionalize(vmap(att, (0, None, None)))(two, k, v)], [vmap(att, (0, None, None))(two, k, v)])
    equal([vmap(functionalize(att), (0, None, None))(two, k, v)], [vmap(att, (0, None, None))(two, k, v)])
    loss = grad(lambda q: att(q, k, v).sum())
    equal([functionalize(vmap(loss))(two)], [torch.stack([loss(x) for x in two])])
    row = lambda q: att(q, k, v)[0, 0, -1]  # noqa: E731
    equal([functionalize(jacrev(row))(q)], [jacrev(row)(q)])
