"""Each primitive of JAX on positions: the Expr, and JAX's own values."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from support.tiers import thinned

from frisket.dsl.evaluate import evaluate
from frisket.dsl.from_python.trace import trace
from frisket.dsl.ir import free_names
from frisket.dsl.program import read
from frisket.lowering.simplify import canonical

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
S = 9
doc = jnp.asarray(np.array([0, 0, 0, 1, 1, 2, 2, 2, 2], np.int32))
small = jnp.asarray(np.array([3, 1, 2], np.uint8))
grid = jnp.asarray(np.random.default_rng(0).normal(size=(S, S)).astype(np.float32))
cube = jnp.asarray(np.arange(24, dtype=np.int32).reshape(2, 3, 4))
spread = jnp.asarray(np.linspace(-2, 2, S).astype(np.float32))
seen = jnp.asarray(np.asarray(grid) > 0.3)
steps = jnp.asarray(np.arange(S, dtype=np.int32) ** 2)
width = jnp.asarray(np.int32(4))


@jax.custom_jvp
def twice(x):
    return 2 * x


twice.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))


@jax.custom_vjp
def thrice(x):
    return 3 * x


thrice.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))

MASKS = [
    (lambda q, k: lax.div(q - 4, 2 * k - 5) == -1, None),
    (lambda q, k: lax.rem(q - 4, 3) == lax.rem(k - 4, -3), None),
    (lambda q, k: jnp.fmod(q - k, 3) == -1, None),
    (lambda q, k: (q - k) // 2 == (k - q) // -3, "(q - k) // 2 == (-q + k) // -3"),
    (lambda q, k: (q - k) % 4 == 3, "(q - k) % 4 == 3"),
    (lambda q, k: jnp.divmod(q - k, 3)[0] + jnp.divmod(q, 4)[1] > 1, "q % 4 + (q - k) // 3 >= 2"),
    (lambda q, k: (small[k] // 2 + small[q] % jnp.uint8(2)).astype(jnp.int32) > 1, None),
    (lambda q, k: jnp.sign(q - k) + jnp.abs(q - k) - (-k) > 5, None),
    (lambda q, k: (q**2 + k**0 + jnp.square(k) > 20), "q * q + k * k >= 20"),
    (lambda q, k: 2**q > k, "wrap(1 << q, 64) > k"),
    (lambda q, k: (q << 2 >> 1) + lax.shift_right_logical(k, 1) > 9, None),
    (lambda q, k: lax.shift_right_logical(q - 9, 28) == 15, "(q - 9) % 4294967296 >> 28 == 15"),
    (lambda q, k: (q & 5 | k ^ 3) == ~(-q - 1) | 1, None),
    (lambda q, k: (q > k) ^ ~(k > 3) == (q < 2), None),
    (lambda q, k: ((q > 2) < (k > 3)) | ((q > 2) <= (k > 5)) & ((q > 5) >= (k > 1)) & ((q > 6) > (k > 1)), None),
    (lambda q, k: jnp.where(q > 3, k < 4, k > 6), "where(q > 3, k < 4, k > 6)"),
    (lambda q, k: jnp.select([q < 2, q < 5], [k < 3, k > 3], k == 8),
     "where(q < 2, k < 3, where(q < 5, k > 3, k == 8))"),
    (lambda q, k: lax.select_n(q // 3, k < 2, k > 2, k == 2), None),
    (lambda q, k: lax.switch(q // 2, [lambda: k < 2, lambda: k > 2, lambda: k == 2]), None),
    (lambda q, k: lax.cond(q > k, lambda x: x > 3, lambda x: doc[x] == 1, k), None),
    (lambda q, k: lax.clamp(2, q, 5) > jnp.clip(k, 1, 6), "min(max(q, 2), 5) > min(max(k, 1), 6)"),
    (lambda q, k: (q > k).astype(jnp.float32) * 2 > (k > 3), None),
    (lambda q, k: (q - 3).astype(bool) & (q / 4 - 1).astype(bool), "q != 3 & q / 4.0 - 1.0 != 0.0"),
    (lambda q, k: (q / 2).astype(int) == k, "int(q / 2.0) == k"),
    (lambda q, k: jnp.floor(q / 2) + 1 > jnp.ceil(k / 3), "floor(q / 2.0) + 1 > -floor(-(k / 3.0))"),
    (lambda q, k: jnp.round((q - 4) / 2) == k - 3, None),
    (lambda q, k: lax.round((q - 4) / 2, lax.RoundingMethod.AWAY_FROM_ZERO) == k - 3, None),
    (lambda q, k: jnp.trunc((q - 4) / 3) == k - 4, None),
    (lambda q, k: jnp.isfinite(1 / (q - 4)) & jnp.isnan(0 / (k * 1.0)) | jnp.isinf(1 / (k - 2)), None),
    (lambda q, k: jnp.logical_and(q, k) & jnp.logical_or(q > 1, k) & ~jnp.logical_xor(q > 3, k > 3), None),
    (lambda q, k: jnp.logical_not(q) | jnp.equal(q, k), "q == 0 | q == k"),
    # tables
    (lambda q, k: doc[-1] > doc[q] + 0 * k, "doc[8] > doc[q]"),
    (lambda q, k: jnp.take(doc, q) == doc.at[k].get(mode="clip"), "doc[q] == doc[k]"),
    (lambda q, k: jnp.take_along_axis(doc, jnp.stack([q, k]), 0)[1] == 1, "doc[k] == 1"),
    (lambda q, k: grid[q][k] > grid.T[q, k], "grid[q, k] > grid[k, q]"),
    (lambda q, k: jnp.transpose(cube, (1, 2, 0))[q % 3, k % 4, q % 2] > 8, None),
    (lambda q, k: lax.dynamic_slice(steps, (q,), (3,))[k % 3] > 40, None),
    (lambda q, k: lax.dynamic_slice(steps + width, (k,), (4,))[q % 4] > 45, None),
    (lambda q, k: (steps + q)[1:7:2][k] > 20, None),
    (lambda q, k: jnp.swapaxes(cube, 0, 2)[q % 4, 1, k % 2] > 8, None),
    (lambda q, k: cube[1, :, q % 4][k % 3] > cube[0][2][k % 4] + 5, None),
    (lambda q, k: cube[:, 1:, 1:3][k % 2, q % 2, q % 2] > 9, None),
    (lambda q, k: cube.reshape(-1)[q + k] > 9, None),
    (lambda q, k: cube.reshape(6, 4)[q % 6, k % 4] > 9, None),
    (lambda q, k: (cube + q).reshape(6, 4)[k % 6, q % 4] > 14, None),
    (lambda q, k: jnp.flip(cube + q, 0)[k % 2, 1, q % 4] > 14, None),
    (lambda q, k: jnp.expand_dims(doc, 1)[q, 0] > jnp.squeeze(doc[None])[k], "doc[q] > doc[k]"),
    (lambda q, k: jnp.flip(doc)[q] > doc[::2][k // 2], None),
    (lambda q, k: (doc * 2 + width)[q] > k, "2 * doc[q] + width > k"),
    (lambda q, k: jnp.cumsum(doc)[q] > jnp.max(doc) + k, None),
    (lambda q, k: jnp.argsort(-doc)[q] > k, None),
    (lambda q, k: jnp.searchsorted(doc, q // 3) == jnp.searchsorted(doc, k // 3, side="right"), None),
    (lambda q, k: jnp.arange(9)[q] * jnp.ones(9, int)[k] > 3, None),
    (lambda q, k: jnp.tril(jnp.ones((9, 9), bool))[q, k], None),
    (lambda q, k: jnp.array([4, 1, 5])[q % 3] > jnp.concatenate([doc[:2], small[:1]])[k % 3], None),
    (lambda q, k: (jnp.array([q, k, 3]) + doc[:3])[q % 3] > 3, None),
    (lambda q, k: jnp.split(doc[:8] + q, 2)[1][k % 4] > 5, None),
    # reductions
    (lambda q, k: jnp.any(cube[q % 2, 1] == k), "any(j in 0..extent(cube, 2): cube[q % 2, 1, j] == k)"),
    (lambda q, k: jnp.all(cube[q % 2] > k), None),
    (lambda q, k: cube[q % 2, 1].sum() > cube[k % 2].max() + cube[k % 2].min(axis=0)[1], None),
    (lambda q, k: jnp.argmax(jnp.array([q, k, 5])) > jnp.argmin(cube[0, q % 3] - k), None),
    (lambda q, k: jnp.argmin(jnp.stack([q > 2, k > 3])) == 1, None),
    (lambda q, k: jnp.prod(cube[0, 1, 1:3] - q) > k, None),
    (lambda q, k: jnp.vdot(cube[q % 2, 1], cube[k % 2, 2]) > 300, None),
    (lambda q, k: jnp.einsum("ij,ij->", cube[q % 2], cube[k % 2]) > 300, None),
    (lambda q, k: (cube[q % 2] @ cube[0].T)[k % 3, 1] > 70, None),
    (lambda q, k: jnp.all(jnp.stack([q > 2, k > 3])), "q > 2 & k > 3"),
    (lambda q, k: jnp.mean(grid[q]) > jnp.mean(grid[k]), None),
    (lambda q, k: lax.fori_loop(0, 4, lambda i, total: total + doc[i] * q, k) > 9, None),
    (lambda q, k: lax.scan(lambda c, x: (c + x, c * q), k, doc)[1][3] > 9, None),
    (lambda q, k: lax.scan(lambda c, x: (c + x, c * q), k, doc, reverse=True)[1][3] > 9, None),
    # calls
    (lambda q, k: jax.checkpoint(lambda x: x > 3)(q) & jax.jit(lambda x: doc[x] > 0)(k), "q > 3 & doc[k] > 0"),
    (lambda q, k: twice(q) > thrice(k), "2 * q > 3 * k"),
    (lambda q, k: lax.stop_gradient(q) > lax.optimization_barrier(k), "q > k"),
    (lambda q, k: jax.vmap(lambda d: d == q)(doc)[k], "doc[k] == q"),
]  # fmt: skip

SCORES = [
    lambda score, q: jnp.exp(score) + jnp.exp2(score) + jnp.expm1(score),
    lambda score, q: jnp.log(abs(score)) + jnp.log2(abs(score)) + jnp.log1p(abs(score)) + jnp.log10(abs(score)),
    lambda score, q: jnp.sin(score) * jnp.cos(score) + jnp.tan(score / 4) + jnp.tanh(score),
    lambda score, q: jnp.sqrt(abs(score)) + lax.rsqrt(abs(score)) + score**-2 + abs(score) ** 1.5 + 2.0**score,
    lambda score, q: lax.erf(score) + lax.erfc(score) + jax.nn.sigmoid(score) + jnp.sign(score),
    lambda score, q: jax.nn.silu(score) + jax.nn.relu(score) + jax.nn.softplus(score) + jax.nn.gelu(score),
    lambda score, q: jax.nn.gelu(score, approximate=False) + jax.nn.leaky_relu(score) + jax.nn.log_sigmoid(score),
    lambda score, q: jnp.hypot(score, spread[q]) + jnp.logaddexp(score, spread[q]) + jnp.maximum(score, q),
    lambda score, q: score + spread[q] * jnp.power(q, 2) / jnp.float_power(2, q),
    lambda score, q: score * jnp.linalg.norm(grid[q] - grid[0]) + jnp.sum(grid[q, :3] * jnp.array([1.0, 2.0, 3.0])),
    lambda score, q: jnp.where(seen[q, 0], score, jnp.nan_to_num(score / 0, posinf=3.0, neginf=2.0)),
]


def values(fn, kind):
    """(the Expr's, JAX's) over all positions, and what was traced."""
    found = trace(fn, kind)
    env = dict(zip("qk", (g.ravel() for g in np.indices((S, S)))))
    env["score"] = np.linspace(-3, 3.1, S * S).astype(np.float32)
    names = inspect.signature(fn).parameters
    want = np.asarray(jax.jit(jax.vmap(fn))(*(jnp.asarray(env[n], None if n == "score" else jnp.int32) for n in names)))
    tables = {n: np.asarray(t) for n, t in found.tables.items()}
    env |= {n: tables[n] for n in free_names(found.expr)[0]}
    return np.broadcast_to(evaluate(found.expr, env, tables), want.shape), want, found


@pytest.mark.parametrize(("fn", "text"), thinned(MASKS), ids=[str(i) for i in range(len(MASKS))])
def test_jax_primitives_in_masks_have_the_values_of_jax(fn, text):
    got, want, found = values(fn, "mask")
    np.testing.assert_array_equal(got, want)
    if text is not None:
        used = {n: np.asarray(v)[()] for n, v in found.tables.items()}
        assert canonical(read(text, kind="mask", params=used).mask).expr is canonical(found.expr).expr


@pytest.mark.parametrize("fn", SCORES, ids=[str(i) for i in range(len(SCORES))])
def test_jax_primitives_in_score_mods_have_the_values_of_jax(fn):
    got, want, _ = values(fn, "score")
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
