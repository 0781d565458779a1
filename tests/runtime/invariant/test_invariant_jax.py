"""`invariant=True` of JAX: the bits of torch's calls, with and without `jax.jit`, and over a KV cache."""

import numpy as np
import pytest
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.dsl.errors import BackendError, ParameterError

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy
caches = pytest.importorskip("frisket.caches.jax")
pytestmark = [needs_compiler, pytest.mark.usefixtures("automatic")]
LENGTH = 640


def drawn():
    draw = np.random.default_rng(0)
    return [draw.standard_normal((2, LENGTH, n, 64), np.float32) for n in (4, 2, 2)]


def test_rows_of_jax_have_the_bits_of_torch():
    att, qkv = fk.compile("causal", invariant=True), drawn()
    out, lse = att(*map(jnp.asarray, qkv), return_lse=True)
    theirs = att(*(torch.from_numpy(x).transpose(1, 2) for x in qkv), return_lse=True)
    assert np.array_equal(out, theirs[0].transpose(1, 2))
    assert np.array_equal(lse, theirs[1])
    q, k, v = qkv
    step = jax.jit(lambda q, k, v, at: att(q, k, v, origin=(0, 0, at, 0)))
    for n in (1, 7, 64):
        arrays = q[1:, -n:], k[1:], v[1:]
        for call in (step, lambda q, k, v, at: att(q, k, v, origin=(0, 0, at, 0))):
            assert np.array_equal(call(*map(jnp.asarray, arrays), LENGTH - n), out[1:, -n:])


def test_cache_of_jax_gives_the_bits_of_one_call():
    att, qkv = fk.compile("causal", invariant=True), [jnp.asarray(x) for x in drawn()]
    out = att(*qkv)
    cache = caches.KVCache.create(2, 768, 2, 64)
    results, start = [], 0
    for n in (600, 1, 1, 38):
        part, cache = cache.attention(att, *(x[:, start : start + n] for x in qkv))
        results.append(part)
        start += n
    assert np.array_equal(jnp.concatenate(results, 1), out)


def test_gradients_and_tangents_of_jax_are_the_usual_ones():
    qkv = [jnp.asarray(x[:, :130]) for x in drawn()]

    def total(*qkv, **options):
        return (fk.attention(*qkv, "causal", **options) ** 2).sum()

    found = jax.grad(lambda *x: total(*x, invariant=True), (0, 1, 2))(*qkv)
    wanted = jax.grad(lambda *x: total(*x, backend="xla"), (0, 1, 2))(*qkv)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_library_calls_and_traced_origins_of_jax_are_refused():
    q, k, v = (jnp.asarray(x[:, :8]) for x in drawn())
    for name in ("xla", "pallas-tpu"):
        with pytest.raises(BackendError, match="one order of sums for each row"):
            fk.attention(q, k, v, "causal", invariant=True, backend=name)
    att = fk.compile("causal & window(4)", invariant=True)
    with pytest.raises(ParameterError, match="a ring of JAX sums up parts"):
        caches.RingKVCache.create(2, 16, 2, 64).attention(att, q, k, v)
    with pytest.raises(ParameterError, match="origin's k is traced"):
        jax.jit(lambda at: att(q, k, v, origin=(0, 0, at, at)))(3)
