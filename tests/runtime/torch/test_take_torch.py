"""Rows of tensors in another order, beside torch's own index_select, and their gradients without sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.runtime.backends.cpp import torch as native
from frisket.runtime.backends.cpp.torch import HUGE, LARGE, huge
from frisket.runtime.torch.autograd import APART, take

LENGTHS = 96, 12288  # few rows at once, and so many that heads are copied apart, in huge pages
MASK = "causal & k % 4 == 0"


def drawn(length, axis=2, dtype=torch.float32):
    x = torch.randn((2, 3, length, 32) if axis == 2 else (2, length, 3, 32)).to(dtype)
    index = np.random.default_rng(length).permutation(length)
    return x, index, np.argsort(index)


def same(x, index, axis, back):
    """`take` beside index_select: values, and gradients of a cotangent."""
    mine, theirs = x.detach().requires_grad_(), x.detach().requires_grad_()
    got, want = take(mine, index, axis, back, True), theirs.index_select(axis, torch.as_tensor(index))
    assert torch.equal(got, want)
    assert torch.equal(take(x.detach(), index, axis), want)
    assert got.is_contiguous()
    along = torch.randn(want.shape).to(x.dtype)
    assert torch.equal(*(torch.autograd.grad(o, i, along)[0] for o, i in ((got, mine), (want, theirs))))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [1, 2])
def test_values_and_gradients(length, dtype, axis):
    x, index, back = drawn(length, axis, dtype)
    assert (x.nbytes >= LARGE) == (x.nbytes >= 6 * APART) == (length == LENGTHS[1])
    same(x, index, axis, back)


@pytest.mark.parametrize("length", LENGTHS)
def test_gathered_rows_of_any_strides_equal_index_select(length):
    x, index, back = drawn(length)
    wide = torch.randn(2, 3, length, 65)
    for view in (x.transpose(0, 1), wide[..., :32], wide[..., ::2], x[:1].expand(4, -1, -1, -1), x.flip(2)):
        same(view, index, 2, back)
    same(torch.complex(x, x).conj().imag, index, 2, back)  # a view that notes its signs


def test_gradient_of_gathered_rows_is_gathered():
    """No sums; gradients of gradients too."""
    x, index, back = drawn(12288)
    x.requires_grad_()
    out = take(x, index, 2, back)
    assert type(out.grad_fn).__name__ == "MovedBackward"
    (first,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], 6 * x)


def test_scratch_tensors_are_aligned_to_huge_pages():
    x, index, back = drawn(12288)
    assert take(x, index, 2, back, True).data_ptr() % HUGE == 0
    assert take(x, index, 2, back).untyped_storage().nbytes() == x.nbytes


def test_recorded_gathers_are_index_select():
    x, index, back = drawn(12288)
    moved, want = (lambda x: take(x, index, 2, back)), x.index_select(2, torch.as_tensor(index))
    assert torch.equal(torch.func.vmap(moved)(x[None])[0], want)
    assert torch.equal(torch.func.jvp(moved, (x,), (x,))[1], want)
    assert torch.equal(torch.func.grad(lambda x: (moved(x) ** 2).sum())(x), 2 * x)
    graph = torch.fx.experimental.proxy_tensor.make_fx(moved)(x)
    assert "index_select" in graph.code
    assert take(x.to("meta"), index, 2, back).is_meta


def test_gradients_of_jax_are_gathered():
    order = fk.reorder(MASK, 192, block=(16, 16), moving=0)
    att, q = fk.compile(MASK, reorder=order), np.ones((1, 192, 1, 16), np.float32)
    gradient = jax.grad(lambda q: att(q, q, q).sum())
    assert "scatter" not in str(jax.make_jaxpr(gradient)(jnp.asarray(q)))
    plain = fk.compile(MASK)
    got, want = (jax.jvp(lambda q, f=f: f(q, q, q), (q,), (q,))[1] for f in (att, plain))
    np.testing.assert_allclose(got, want, atol=1e-6)
    second = jax.grad(lambda q: (gradient(q) ** 2).sum())
    assert "scatter" not in str(jax.make_jaxpr(jax.linearize(lambda q: order.apply(q, 1), q)[1])(q))
    assert np.isfinite(second(jnp.asarray(q))).all()
    jax.jvp(lambda x: order.apply(x, 1, keys=True), (q,), (q,))
    mapped = jax.jit(jax.vmap(gradient))(np.stack([q, 2 * q]))
    np.testing.assert_allclose(mapped[0], jax.jit(gradient)(q), atol=1e-6)


@needs_compiler
def test_results_of_native_kernels_are_in_huge_pages(monkeypatch):
    """First calls, calls like one before, and gradients; small results are left alone."""
    asked = []
    monkeypatch.setattr(native, "huge", lambda x: (asked.append(x.nbytes) if x.nbytes >= LARGE else None, huge(x)))
    att, want = (fk.compile("causal & window(16)", backend=name) for name in ("cpp", "aten"))
    q = torch.randn(1, 32, 2048, 16, requires_grad=True)
    for expected in (1, 2, 3):
        torch.testing.assert_close(att(*[q.detach()] * 3), want(*[q.detach()] * 3))
        assert asked == expected * [q.nbytes]
    got, of_want = (torch.autograd.grad((f(q, q, q) ** 2).sum(), q)[0] for f in (att, want))
    torch.testing.assert_close(got, of_want, atol=1e-4, rtol=1e-4)
    assert len(asked) == 7
    att(*[q[:, :1].detach()] * 3)
    assert len(asked) == 7
