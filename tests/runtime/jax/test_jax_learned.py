"""Values that JAX traces, captured by functions or given to a call: gradients, no copies, nothing compiled again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax.dense import dense

import frisket as fk
from frisket.dsl.errors import ParameterError

S, H = 70, 2
q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((1, S, H, 8)).astype("f")) for i in range(3))
BIAS = jnp.asarray(np.random.default_rng(5).standard_normal((H, 40)).astype("f"))
at = np.arange(S, dtype=np.int32)
gap = at[:, None] - at[None]


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "library")


def close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), got, want)


def test_tracers_do_not_outlive_their_step():
    att = fk.compile("causal", "param bias: float[_, _]\nscore = score + bias[h, q - k]")
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda bias: att(q, k, v, bias=bias).sum()))(BIAS)


def test_a_score_mod_captures_what_is_learned():
    def loss(bias, slope):
        out = fk.attention(q, k, v, "causal", lambda score, h, q, k: score * slope + jnp.tanh(bias)[h, q - k])
        return (out**2).sum()

    def want(bias, slope):
        clamped = jnp.clip(gap, 0, 39)
        return (dense(q, k, v, gap >= 0, lambda s: s * slope + jnp.tanh(bias)[:, clamped])[0] ** 2).sum()

    want = jax.jit(jax.value_and_grad(want, (0, 1)))
    expected = want(BIAS, 1.5)
    close(jax.value_and_grad(loss, (0, 1))(BIAS, 1.5), expected)
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    close(step(BIAS, 1.5), expected)
    close(step(BIAS * 2, 0.5), want(BIAS * 2, 0.5))


def test_a_mask_captures_documents():
    @jax.jit
    def step(doc):
        att = fk.compile(lambda q, k: (doc[q] == doc[k]) & (q >= k))
        return att(q, k, v), att(q, k, v, plan=att.plan(S, S, 1, H))

    for length in (10, 23):
        doc = at // length
        want, _ = jax.jit(lambda seen: dense(q, k, v, seen))((gap >= 0) & (doc[:, None] == doc[None]))
        close(step(doc), (want, want))


def test_a_mask_that_captures_a_traced_array_has_no_picture():
    with pytest.raises(ParameterError) as caught:
        jax.jit(lambda doc: fk.mask(lambda q, k: doc[q] == doc[k]).dense(5, 5))(at)
    assert str(caught.value) == (
        "`doc` is traced by jax.jit or another transform, and this takes values; attention takes the array as it is: "
        "frisket.compile(...), or frisket.attention, of the function that captures it"
    )


@pytest.mark.exhaustive
def test_documents_change_every_step_and_nothing_compiles():
    att, traces = fk.compile("causal & same(doc)", "score + bias[h, q - k]"), []

    @jax.jit
    def step(x, doc, bias):
        traces.append(1)
        return jax.value_and_grad(lambda x, b: (att(x, k, v, doc=doc, bias=b) ** 2).sum(), (0, 1))(x, bias)

    @jax.jit
    @jax.grad
    def want(bias, seen):
        return (dense(q, k, v, seen, lambda s: s + bias[:, jnp.clip(gap, 0, 39)])[0] ** 2).sum()

    for length in (7, 30, S):
        doc = np.arange(S) // length
        seen = (gap >= 0) & (doc[:, None] == doc[None])
        got = step(q, doc, BIAS)
        close(got[1][1], want(BIAS, seen))
    assert len(traces) == step._cache_size() == 1


def test_seeds_sinks_and_largest_scores():
    att = fk.compile("causal", dropout=0.5)
    step = jax.jit(lambda seed, sinks: att(q, k, v, seed=seed, sinks=sinks, return_lse=True, return_max=True))
    none, shift = np.zeros(H, np.float32), np.array([1e-2, 0.0], np.float32)
    a, b = step(3, none), att(q, k, v, seed=3, sinks=np.zeros(H), return_lse=True, return_max=True)
    close(a, b)
    assert np.abs(np.asarray(a[0]) - step(4, none)[0]).max() > 0.1
    f = jax.jit(jax.value_and_grad(lambda s: (att(q, k, v, seed=3, sinks=s) ** 2).sum()))
    np.testing.assert_allclose(f(none)[1][0], (f(shift)[0] - f(-shift)[0]) / 2e-2, rtol=2e-3)
