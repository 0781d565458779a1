"""Every score mod and weight of the library against its formula, in numpy and from other people's words."""

from __future__ import annotations

import math

import cases
import numpy as np
import pytest
from support.words import call

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.lowering.dense import coordinates
from frisket.lowering.plan import Problem

MODS = cases.mods(24)
SIZE, HEADS = 24, 4
B, H, Q, K = np.ogrid[:1, :HEADS, :SIZE, :SIZE]
RNG = np.random.default_rng(3)
SCORE = RNG.standard_normal((1, HEADS, SIZE, SIZE)) * 20


def applied(mod: fk.ScoreMod, s=SCORE):
    """The mod at every position, float64."""
    env = {**coordinates(Problem(SIZE, SIZE, 1, HEADS)), **mod.scalars, "score": s}
    return np.broadcast_to(evaluate(mod.expr, env, mod.tables), s.shape)


def t5_bucket(distance, buckets, far, bidirectional):
    """T5's description: half of the buckets for keys ahead; of those left, half exact, half in growing steps."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if distance > 0 else 0  # T5 counts from the query to the key
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    steps = [exact * (far / exact) ** (i / (buckets - exact)) for i in range(buckets - exact)]
    return offset + exact + sum(distance >= step * (1 - 1e-12) for step in steps) - 1


def pointwise(f, *tables):
    out = np.empty(SCORE.shape)
    for i in np.ndindex(out.shape):
        out[i] = f(SCORE[i], *i, *tables)
    return out


def edges(s, b, h, q, k, edge, size, table):
    n = size[b, q, k]
    return s + (np.mean([float(table[h, j, edge[b, q, k, j]]) for j in range(n)]) if n else 0.0)


FORMULAS = {
    "alibi": lambda: SCORE - (Q - K) * 2.0 ** (-8.0 * (H + 1) / HEADS),
    "alibi(slopes)": lambda slopes: SCORE - slopes[H] * (Q - K),
    "relative_bias(table)": lambda table: pointwise(lambda s, b, h, q, k: s + list(table)[::-1][k - q + SIZE - 1]),
    "t5_bias(table, buckets, far)": lambda table, n, far: pointwise(
        lambda s, b, h, q, k: s + table[t5_bucket(k - q, n, far, True), h]
    ),
    "t5_decoder_bias(table, buckets, far)": lambda table, n, far: pointwise(
        lambda s, b, h, q, k: s + table[t5_bucket(k - q, n, far, False), h]
    ),
    "rope_bias(qr, kr, n, c)": lambda qr, kr, n, c: (
        SCORE + c * np.einsum("bhqd,bhkd->bhqk", qr.astype(float), np.repeat(kr.astype(float), n, 1))
    ),
    "sandwich(rel, c)": lambda rel, c: SCORE + rel[Q - K + SIZE - 1].astype(float) * c[H],
    "soft_window(w)": lambda w: np.where(abs(Q - K) <= w, SCORE, SCORE - (abs(Q - K) - w) / w),
    "inverse_distance(e)": lambda e: SCORE / (1 + e * (Q - K) ** 2.0),
    "softcap(c)": lambda c: c * (1 - 2 / (np.exp(2 * SCORE / c) + 1)),
    "sigmoid_gate(g)": lambda g: SCORE / (1 + np.exp(-g[H].astype(float))),
    "scale_by(t)": lambda t: SCORE * t[B, H],
    "graphormer(dist, table)": lambda dist, table: pointwise(lambda s, b, h, q, k: s + table[h, dist[b, q, k]]),
    "graphormer_edges(edge, len, table)": lambda *tables: pointwise(edges, *tables),
}
ELSEWHERE = {"softcap_fraction(c)", "activation(f, n)"}


def test_library_score_mods_each_have_a_reference_formula():
    assert {*FORMULAS, *ELSEWHERE} == set(MODS)


@pytest.mark.parametrize("signature", FORMULAS)
def test_mods_are_their_formulas(signature):
    one = MODS[signature]
    want = FORMULAS[signature](*call(one.text, one.params)[1])
    np.testing.assert_allclose(applied(one.score), want, rtol=1e-12, atol=1e-12)


WEIGHTS = {
    "sigmoid_attention(bias)": lambda: 1 / (1 + np.exp(math.log(SIZE) - SCORE)),
    "relu2": lambda: np.where(SCORE > 0, SCORE * SCORE, 0),
    "retention(gamma)": lambda gamma: SCORE * np.exp((Q - K) * np.log(gamma.astype(float)[H])),
    "polynomial(p)": lambda p: SCORE * SCORE * SCORE * SCORE,
    "linear": lambda: SCORE,
    "softmax1": lambda: np.minimum(np.exp(SCORE), math.exp(60)),
}


@pytest.mark.parametrize(("signature", "one"), cases.weights(SIZE).items())
def test_library_weights_are_their_formulas(signature, one):
    arguments = [] if signature.startswith("sigmoid") else call(one.text, one.params)[1]
    np.testing.assert_allclose(applied(one.program.weight), WEIGHTS[signature](*arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (16, 64), (8, 20), (64, 1000)])
def test_t5_buckets_at_every_distance(buckets, far):
    table = np.arange(buckets, dtype=np.float32)[:, None]
    for name, both in (("t5_bias", True), ("t5_decoder_bias", False)):
        mod = fk.score(f"{name}(table, {buckets}, {far})", table=table)
        q, k = np.ogrid[0:1, 0:3000]
        for place, where in ((q, k), (k, q)):
            env = {**coordinates(Problem(1, 1)), "q": place, "k": where, "score": 0.0}
            have = evaluate(mod.expr, env, mod.tables)
            distances = (where - place).reshape(-1)
            want = [t5_bucket(int(d), buckets, far, both) for d in distances]
            np.testing.assert_array_equal(have.reshape(-1), want)


def test_t5_buckets_are_the_same_in_float32():
    """On the border of two buckets the logarithm falls a hair short in float32; the sum is moved over it."""
    half, far = 16, 128
    x = np.arange(8, 3000, dtype=np.float32)
    log = np.log(x / np.float32(8)) / np.float32(math.log(16)) * np.float32(8)
    moved = np.minimum(8 + np.floor(log + np.float32(1e-5)), half - 1)
    want = [t5_bucket(-int(d), half, far, False) for d in x]
    np.testing.assert_array_equal(moved, want)
    for border in (16, 32, 64):
        assert t5_bucket(-border, half, far, False) == t5_bucket(1 - border, half, far, False) + 1


def test_softcap_fraction_is_near_tanh():
    x = np.linspace(-1000, 1000, 400_001)
    mod = fk.score("softcap_fraction(c)", c=1.0)
    have = evaluate(mod.expr, {"score": x, "c": 1.0})
    assert np.abs(have - np.tanh(x)).max() < 1e-4
    assert np.abs(have).max() <= 1
    near = np.abs(x) < 1
    assert np.abs(have - np.tanh(x))[near].max() < 1e-6
    assert np.abs(applied(fk.score("softcap_fraction(50)")) - applied(fk.score("softcap(50)"))).max() < 0.005


@pytest.mark.parametrize("name", ["relu", "sigmoid", "gelu", "softplus", "silu"])
def test_softmax_of_an_activation_undone_is_the_activation(name):
    """out exp(lse) - n sum(v) is the sum of f(s) v."""
    f = {
        "relu": lambda x: np.maximum(x, 0),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "gelu": lambda x: x * np.vectorize(lambda y: (1 + math.erf(y / math.sqrt(2))) / 2)(x),
        "softplus": lambda x: np.log1p(np.exp(x)),
        "silu": lambda x: x / (1 + np.exp(-x)),
    }[name]
    s, v = RNG.standard_normal((1, HEADS, SIZE, SIZE)), RNG.standard_normal((SIZE, 5))
    weights = np.exp(applied(fk.score(f"activation({name}(score), 1.0)"), s))
    lse = np.log(weights.sum(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(out * np.exp(lse) - 1.0 * v.sum(0), f(s) @ v, rtol=1e-9, atol=1e-9)


def test_score_mods_compose_by_then():
    both = applied(fk.score("alibi then softcap(50)"))
    np.testing.assert_allclose(both, 50 * np.tanh(FORMULAS["alibi"]() / 50))
