"""Weights in place of the softmax in JAX: against dense attention written out in torch's own operators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads
from support.tiers import default_only
from support.torch.weighted import CASES, arrays

import frisket as fk

EVERY = default_only(CASES, "off by one", "retention")


def of_jax(x):
    return jnp.asarray(x.detach().numpy(), jnp.float32)


def call_of(name, **options):
    case = CASES[name]
    return case, case.attention(backend="xla", **options), {n: of_jax(x) for n, x in case.params.items()}


@pytest.mark.parametrize("name", EVERY)
def test_jax_weighted_rows_and_gradients_are_dense_ones(name):
    case, att, params = call_of(name)
    qkv, leaves = arrays(), {n: x.clone().requires_grad_() for n, x in case.params.items()}
    want, _ = case.dense(*(x.requires_grad_() for x in qkv), **leaves)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad(want, [*qkv, *leaves.values()], dout)

    @jax.jit
    def both(qkv, params, dout):
        out, pull = jax.vjp(lambda qkv, params: att(*qkv, layout="bhsd", **params), qkv, params)
        return out, pull(dout)

    out, (of_arrays, of_params) = both([of_jax(x) for x in qkv], params, of_jax(dout))
    for x, y in zip([out, *of_arrays, *of_params.values()], [want, *grads], strict=True):
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", default_only(CASES, "off by one"))
def test_jax_weighted_rows_pass_check_grads(name):
    with jax.enable_x64(True):
        case = CASES[name]
        params = {n: jnp.asarray((x[:7] if n == "t" else x).numpy()) for n, x in case.params.items()}
        qkv = [jnp.asarray(x.numpy()) for x in arrays(7, 7)]
        att = case.attention(backend="xla")
        check_grads(lambda *qkv: att(*qkv, layout="bhsd", **params), qkv, order=2, rtol=1e-4, atol=1e-4)


def test_instances_of_vmap_have_their_own_weights():
    _, att, _ = call_of("sigmoid")
    q, k, v = (of_jax(x) for x in arrays())

    def one(bias):
        return att(q, k, v, layout="bhsd", bias=bias)

    biases = jnp.asarray([-1.0, 0.5])
    got = jax.vmap(jax.grad(lambda b: one(b).sum()))(biases)
    np.testing.assert_allclose(got, [jax.grad(lambda b: one(b).sum())(b) for b in biases], rtol=1e-5)


@pytest.mark.parametrize("name", ["off by one", "sums"])
def test_jax_rows_that_see_nothing_take_any_cotangent(name):
    case, qkv = CASES["off by one"], [of_jax(x) for x in arrays(7, 7)]
    att = fk.compile(case.mask, weight=case.weight, divide=case.divide if name == "off by one" else None, backend="xla")
    params = {n: of_jax(x) for n, x in case.params.items()} if name == "off by one" else {}

    @jax.jit
    def grads(dout):
        return jax.vjp(lambda *qkv: att(*qkv, layout="bhsd", **params), *qkv)[1](dout)

    dout = jnp.ones((2, 4, 7, 8)).at[:, :, 0].set(0)
    for x, y in zip(grads(dout.at[:, :, 0].set(jnp.nan)), grads(dout), strict=True):
        np.testing.assert_array_equal(x, y)


def test_jax_rows_without_a_divisor_have_zero_gradients():
    """What divides is 0 in half of the heads, whose rows have weights."""
    q, k, v = (of_jax(x) for x in arrays(5, 9))
    att = fk.compile(weight="sigmoid(score)", divide="total * float(h % 2)", backend="xla")
    grads = jax.jit(jax.grad(lambda *x: att(*x, layout="bhsd").sum(), (0, 1, 2)))(q, k, v)
    some = fk.compile("h % 2 == 1", weight="sigmoid(score)", divide="total", backend="xla")
    want = jax.jit(jax.grad(lambda *x: some(*x, layout="bhsd").sum(), (0, 1, 2)))(q, k, v)
    for x, y in zip(grads, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_jax_sequences_divide_rows_at_their_own_positions():
    q, k, v = (of_jax(x) for x in arrays(9, 40))
    att = fk.compile("causal", weight="sigmoid(score)", divide="total + float(q)", backend="xla")
    starts, dout = jnp.asarray([3, 31]), jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 9, 8)), jnp.float32)

    def loss(q, starts):
        return (att(q, k, v, layout="bhsd", origin=(0, 0, starts, 0)) * dout).sum((1, 2, 3))

    got, grads = loss(q, starts), jax.grad(lambda q: loss(q, starts).sum())(q)
    for b, n in enumerate((3, 31)):
        np.testing.assert_allclose(got[b], loss(q, n)[b], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grads[b], jax.grad(lambda q, b=b, n=n: loss(q, n)[b])(q)[b], rtol=1e-4, atol=1e-5)


def test_traced_positions_divide_sums_of_known_problems():
    q, k, v = (of_jax(x) for x in arrays(9, 40))
    att = fk.compile("causal", weight="sigmoid(score)", divide="total + float(q)", backend="xla")

    def run(n, sizes=None):
        return att(q, k, v, layout="bhsd", origin=(0, 0, n, 0), sizes=sizes, return_sums=True)[0]

    sizes = (2, 4, 40, 40)
    starts = jnp.asarray([3, 31])
    np.testing.assert_allclose(jax.jit(lambda n: run(n, sizes))(starts), run(starts), rtol=1e-5)
    with pytest.raises(fk.ParameterError, match=r"give its lengths: sizes=\(B, H, Q_LEN, KV_LEN\)"):
        jax.jit(run)(3)


def test_weighted_rows_are_wrapped_by_scan_and_remat():
    _, att, params = call_of("retention")
    q, k, v = (of_jax(x) for x in arrays())
    k, v = (jnp.repeat(x, 2, 1) for x in (k, jnp.concatenate([v, v], -1)))

    def layers(q):
        step = jax.checkpoint(lambda x, _: (att(x, k, v, layout="bhsd", **params), None))
        return jax.lax.scan(step, q, None, length=3)[0].sum()

    def unrolled(x):
        for _ in range(3):
            x = att(x, k, v, layout="bhsd", **params)
        return x.sum()

    np.testing.assert_allclose(jax.grad(layers)(q), jax.grad(unrolled)(q), rtol=1e-4, atol=1e-5)


def test_lse_of_positive_weights_is_the_same_in_both_frameworks():
    q, k, v = arrays(dtype=torch.float32)
    att = fk.compile("causal", weight="sigmoid(score)", divide="total")
    ours = att(*map(of_jax, (q, k, v)), layout="bhsd", return_lse=True)
    for x, y in zip(ours, att(q, k, v, return_lse=True), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
