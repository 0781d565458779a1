"""Tangents and second derivatives that users of other libraries ask for, written anew, under torch and JAX.

Each is compared with dense attention in float64. In all of the libraries these calls raise an error at the time of the
report: `jvp` under FlashAttention 2, xformers, SDPA and flex_attention, `gradgradcheck` under NATTEN, Sophia under
splash attention.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.torch.dense import dense

import frisket as fk
from frisket.flex import create_block_mask, flex_attention

F = torch.func
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of norms


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their cost
        yield


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(got, want, limit):
    assert (got.double() - want).norm() <= limit * want.norm()


def jacobian_vector(call, arrays, along, dtype):
    return F.jvp(call, tuple(x.to(dtype) for x in arrays), tuple(x.to(dtype) for x in along))[1]


CROSS = {  # queries, keys, heads, key heads, dims: of images, of text, of groups
    "self-attention of an image": (64, 64, 8, 8, 40, None),
    "cross-attention to a prompt": (64, 77, 8, 8, 40, None),
    "causal, groups": (70, 70, 4, 2, 64, "causal"),
    "documents": (60, 60, 4, 4, 32, "same(doc)"),
}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", CROSS)
def test_reported_jacobian_vector_products(name, dtype):
    """xformers 552, flash-attention 1672, pytorch 154226 and 165517: a tangent of the whole model, of 16 bits too."""
    q_len, kv_len, heads, kv_heads, dim, mask = CROSS[name]
    shapes = (2, heads, q_len, dim), *2 * ((2, kv_heads, kv_len, dim),)
    arrays, along = ([normal(*s, seed=i + j).to(dtype).double() for i, s in enumerate(shapes)] for j in (0, 9))
    values = {"doc": np.arange(q_len) // 17} if "doc" in str(mask) else {}
    seen = torch.as_tensor(fk.mask(mask or "full", **values).dense(q_len, kv_len))
    want = F.jvp(lambda *x: dense(*x, seen)[0], tuple(arrays), tuple(along))[1]
    got = jacobian_vector(lambda *x: fk.attention(*x, mask, backend="aten", **values), arrays, along, dtype)
    assert got.dtype == dtype
    near(got, want, LIMITS[dtype])


def test_scales_that_depend_on_queries_have_tangents():
    """pytorch 165517: queries and keys are divided by their deviation, which the scale multiplies back."""
    arrays = tuple(normal(1, 4, 30, 16, seed=i) for i in range(3))

    def ours(q, k, v):
        return fk.attention(q / q.std(), k / k.std(), v, scale=q.std() * k.std() / 4, backend="aten")

    got, want = (F.jvp(f, arrays, arrays)[1] for f in (ours, lambda q, k, v: dense(q, k, v)[0]))
    near(got, want, 1e-10)


def test_derivatives_of_neighbourhoods_of_an_image():
    """NATTEN 68, 191 and 224: gradgradcheck, tangents, and a backward through the tangent."""
    mask = "natten2d(5, 6, 3, 3)"
    att, seen = fk.compile(mask, backend="aten"), torch.as_tensor(fk.mask(mask).dense(30, 30))
    arrays = tuple(normal(2, 2, 30, 4, seed=i).requires_grad_() for i in range(3))
    assert torch.autograd.gradgradcheck(att, arrays, fast_mode=True)

    def straight(f):
        """Of a distilled model: the tangent is driven to a constant."""
        tangent = F.jvp(f, tuple(arrays), tuple(x.detach() for x in arrays))[1]
        return torch.autograd.grad((tangent - 1).square().mean(), arrays)

    for got, want in zip(straight(att), straight(lambda *x: dense(*x, seen)[0]), strict=True):
        near(got, want, 1e-10)


def test_flex_attention_has_tangents_that_train():
    """pytorch 154332: `jvp` of flex_attention with a block mask and a score mod, and a backward through it."""
    doc, slopes = torch.arange(40) // 15, normal(4).requires_grad_()
    block_mask = create_block_mask(lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), None, None, 40, 40, "cpu")
    at = torch.arange(40)
    seen = ((at[:, None] >= at) & (doc[:, None] == doc))[None, None]
    arrays = tuple(normal(1, 4, 40, 8, seed=i).requires_grad_() for i in range(3))

    def ours(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, q, k: s + slopes[h] * (k - q), block_mask)

    def theirs(q, k, v):
        return dense(q, k, v, seen, lambda s: s + slopes[:, None, None] * (at - at[:, None]))[0]

    def step(f):
        out, tangent = F.jvp(f, arrays, tuple(x.detach() for x in arrays))
        return torch.autograd.grad((out - (out - tangent).detach()).square().sum() + tangent.sum(), (*arrays, slopes))

    for got, want in zip(step(ours), step(theirs), strict=True):
        near(got, want, 1e-10)


def test_trigflow_tangents_are_those_of_dense_attention():
    """flash-attention 1672: the tangent of sCM, F(x / sigma, t) along (cos(t) dx/dt, cos(t) sin(t))."""
    weights = [normal(8, 8, seed=i) / 8**0.5 for i in range(3)]

    def model(attention):
        def run(x, t):
            h = x + t.sin()
            return attention(*((h @ w).unflatten(-1, (2, 4)).transpose(1, 2) for w in weights))

        return run

    x, t = normal(2, 24, 8), torch.rand(2, 1, 1, dtype=torch.float64)
    along = t.cos() * normal(2, 24, 8, seed=5), t.cos() * t.sin()
    att = fk.compile("sliding(6, 6)", backend="aten")
    seen = torch.as_tensor(fk.mask("sliding(6, 6)").dense(24, 24))
    got, want = (F.jvp(model(f), (x, t), along)[1] for f in (att, lambda *x: dense(*x, seen)[0]))
    near(got, want, 1e-10)


def test_sophia_estimates_a_diagonal_through_layers():
    """levanter 615: Hutchinson's estimate u * (H u) of float32, under jit, a scan over layers and remat."""
    layers = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16, 16)) / 4, jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 32, 16)), jnp.float32)
    u = jnp.asarray(np.random.default_rng(2).choice([-1.0, 1.0], layers.shape), jnp.float32)
    att = fk.compile("causal", backend="xla")

    def exact(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def estimate(attention, layers, u, x):
        @jax.checkpoint
        def layer(x, w):
            q, k, v = ((x @ one).reshape(*x.shape[:2], 4, 4) for one in w)
            return x + jnp.tanh(attention(q, k, v).reshape(x.shape)), None

        def loss(layers):
            return jnp.square(jax.lax.scan(layer, x, layers)[0]).mean()

        return u * jax.jvp(jax.grad(loss), (layers,), (u,))[1]

    got = jax.jit(lambda *a: estimate(att, *a))(layers, u, x)
    with jax.enable_x64(True):
        want = np.asarray(estimate(exact, *(jnp.asarray(np.asarray(a), jnp.float64) for a in (layers, u, x))))
    assert got.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(got) - want) <= 1e-5 * np.linalg.norm(want)


def test_hessian_by_the_bias_of_t5_in_jax():
    """t5x 351: the second derivatives of a loss by relative biases, dense in `jax.numpy`."""
    draws = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draws.standard_normal((1, 12, 2, 4)), jnp.float32) for _ in range(3))
    table = jnp.asarray(draws.standard_normal(23), jnp.float32)
    att, at = fk.compile("full", "score + table[q - k + 11]", backend="xla"), np.arange(12)

    def exact(q, k, v, table):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2 + table[at[:, None] - at + 11]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    def hessian(f, table):
        return jax.hessian(lambda table: jnp.square(f(table)).sum())(table)

    got = hessian(lambda table: att(q, k, v, table=table), table)
    with jax.enable_x64(True):
        doubles = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, table)]
        want = np.asarray(hessian(lambda table: exact(*doubles[:3], table), doubles[3]))
    assert np.linalg.norm(np.asarray(got) - want) <= 1e-5 * np.linalg.norm(want)
