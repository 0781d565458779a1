"""Calls of JAX whose plans have queries and keys in another order than the arrays, beside the same call without one:
native kernels read rows by tables, around others arrays are moved. Permutations without structure show a wrong row."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.arrays import TokenPermutation
from frisket.runtime.jax import call
from frisket.runtime.machine import cpp_build

needs_compiler = pytest.mark.skipif(bool(cpp_build.reason()), reason="needs a C++ compiler")
BACKENDS = [pytest.param("cpp", marks=needs_compiler), "xla"]
OFTEN = [pytest.param("cpp", marks=[needs_compiler, pytest.mark.exhaustive]), "xla"]
Q_LEN, KV_LEN = 203, 331
draws = np.random.default_rng(0)
PLACES = draws.permutation(Q_LEN).astype(np.int32), draws.permutation(KV_LEN).astype(np.int32)


def arrays(*front):
    shapes = (*front, 2, Q_LEN, 4, 16), (*front, 2, KV_LEN, 2, 16), (*front, 2, KV_LEN, 2, 16)
    return tuple(jnp.asarray(draws.standard_normal(s).astype(np.float32)) for s in shapes)


def both(text, backend, score=None, **options):
    """XLA's attention of arrays as they come, and one whose plan has them in the order of permutations."""
    plain = fk.compile(text, score, backend="xla", **options)
    queries, keys = PLACES
    made = fk.compile(text, score, backend=backend, **options).at(q="pq[q]", k="pk[k]", pq=queries, pk=keys)
    return plain, Attention(made.program, replace(made.options, rows=TokenPermutation(queries, keys)))


def close(found, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def results(att, q, k, v, **given):
    """(out, lse, max), and the gradients of q, k, v and what is given."""

    def loss(arrays, given):
        out, lse = att(*arrays, return_lse=True, **given)
        return (out * jnp.cos(out)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    forward = att(q, k, v, return_lse=True, return_max=True, **given)
    return forward, jax.jit(jax.grad(loss, (0, 1)))((q, k, v), given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", ["q >= k & q % 3 != 1", pytest.param("q >= k", marks=pytest.mark.exhaustive)])
def test_reordered_jax_results_and_gradients_equal_plain_ones(text, backend, monkeypatch):
    moved = []
    in_order = call.in_order
    monkeypatch.setattr(call, "in_order", lambda *a: (moved.append(a), in_order(*a))[1])
    plain, own = both(text, backend)
    qkv = arrays()
    close(results(own, *qkv), results(plain, *qkv))
    close(jax.jit(own)(*qkv), plain(*qkv))
    assert bool(moved) == (backend == "xla")


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", OFTEN)
def test_learned_tables_sinks_and_dropout(backend):
    plain, own = both("q >= k", backend, "score + bias[h, q - k + 400]", dropout=0.2)
    given = {"bias": draws.standard_normal((4, 800)).astype(np.float32), "sinks": np.arange(4, dtype=np.float32)}
    seeded = [lambda *a, f=f, **more: f(*a, seed=3, **more) for f in (own, plain)]
    qkv = arrays()
    close(*(results(f, *qkv, **given) for f in seeded))


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", OFTEN)
def test_reordered_jax_calls_work_under_vmap(backend):
    plain, own = both("q >= k", backend)
    q, k, v = arrays(3)
    found, want = (jax.jit(jax.vmap(f, (0, None, 0)))(q, k[0], v) for f in (own, plain))
    close(found, want)
    gradients = (jax.jit(jax.grad(lambda *a, f=f: jax.vmap(f)(*a).sum(), (0, 1, 2))) for f in (own, plain))
    found, want = (f(q, k, v) for f in gradients)
    close(found, want)


@pytest.mark.exhaustive
@needs_compiler
def test_an_order_reads_rows(monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    text = "causal & k % 4 == 0"
    order = fk.reorder(text, 192, block=(16, 16), moving=0)
    assert order.rows is not None
    att, plain = fk.compile(text, reorder=order), fk.compile(text, backend="xla")
    q, k, v = (jnp.asarray(draws.standard_normal((1, 192, 2, 16)).astype(np.float32)) for _ in "qkv")
    assert att._reads_rows(q, k, v)
    close(results(att, q, k, v), results(plain, q, k, v))
    close(jax.jit(att)(q, k, v), plain(q, k, v))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:backend 'pallas")
def test_an_order_in_the_interpreter_of_pallas():
    """Arrays are moved around the kernel of a TPU, forward and backward."""
    text = "causal & dilated(16, 4)"
    order = fk.reorder(text, 48, block=(8, 8), moving=0)
    assert order.gain > 1
    shapes = (1, 48, 2, 16), (1, 48, 1, 16), (1, 48, 1, 16)
    qkv = [jnp.asarray(draws.standard_normal(s).astype(np.float32)) for s in shapes]
    score = "score + 0.1 * (k - q)"
    own, plain = fk.compile(text, score, backend="pallas-tpu", reorder=order), fk.compile(text, score, backend="xla")

    @partial(jax.jit, static_argnums=0)
    def run(attend, *arrays):
        out, back = jax.vjp(attend, *arrays)
        return out, back(jnp.cos(out))

    close(run(own, *qkv), run(plain, *qkv))


def test_calls_of_other_orders_differ():
    """Lowered calls are kept by what they are."""
    qkv = arrays()
    _, one = both("q >= k", "xla")
    other = Attention(one.program, replace(one.options, rows=TokenPermutation(PLACES[0][::-1].copy(), PLACES[1])))
    assert not np.allclose(jax.jit(one)(*qkv), jax.jit(other)(*qkv))
