"""Gradients where scores are large: the weights of a row sum to 1 in the backward, whatever the size of its lse.

What a backward computes anew it has to normalise by more than a float of the size of lse holds: at 1e5 the next float
is 0.008 further, and weights by it would be wrong in the third digit. Summed over keys, dv is dout times the sum of a
row's weights: so their sum is seen, beside dv itself where a row sees one key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax.dense import dense
from support.tiers import thinned

import frisket as fk

SIZES = (1e-3, 10.0, 1e5, 1e30)
EVERY = (1e-3, 1.0, 10.0, 1e3, 1e5, 1e9, 1e15, 1e30)


@dataclass(frozen=True)
class Case:
    mask: str | None
    score: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def _table(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32)


CASES = {
    "one key": Case("k == q"),
    "everything": Case(None),
    "causal": Case("causal"),
    "documents": Case("causal & same(doc)", params={"doc": np.arange(96, dtype=np.int32) // 20}),
    "empty rows": Case("causal & q >= 7 & k < 80"),
    "affine": Case("causal", "score * 1.5 + 0.1 * (k - q)"),
    "slope": Case("causal", "score + slope[h] * (k - q)", {"slope": _table(2)}),
    "softcap": Case("causal", "100000 * tanh(score / 100000)"),
    "distance": Case("causal", "score + bias[q - k + 5]", {"bias": _table(200)}),
    "gate": Case("causal", "score * 1.1 + gate[h, k]", {"gate": _table(2, 96)}),
    "sinks": Case("causal", None, {"sinks": 1e5 * _table(2)}),
    "dropout": Case("k == q", None, {"seed": 3}, {"dropout": 0.5}),
}
PART = ("one key", "everything", "affine", "empty rows")


def made(size: float, dtype: str = "float32", length: int = 96, dim: int = 16) -> list[jax.Array]:
    """q, k, v and dout of two heads that share keys, with scores of about this size."""
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, length, heads, dim)) for heads in (2, 1, 1, 2))
    grow = np.sqrt(size * dim**0.25)
    return [jnp.asarray(x, dtype) for x in (q * grow, k * grow, v, dout)]


def gradients(case: Case, backend: str, size: float, **how: Any) -> tuple[list[np.ndarray], np.ndarray, Any, Any]:
    """(dq, dk, dv), dout as float64, what the gradients of captured tables are, and the sums of weights [1, length,
    heads, 1] as the forward has them."""
    att = fk.compile(case.mask, case.score, backend=backend, **case.options)
    q, k, v, dout = made(size, **how)
    learned = {n: x for n, x in case.params.items() if isinstance(x, jax.Array)}
    rest = {n: x for n, x in case.params.items() if n not in learned}
    _, back = jax.vjp(lambda q, k, v, learned: att(q, k, v, **learned, **rest), q, k, v, learned)
    *found, tables = back(dout)
    sums = np.asarray(att(q, k, jnp.ones_like(v), **learned, **rest), np.float64)
    return [np.asarray(x, np.float64) for x in found], np.asarray(dout, np.float64), tables, sums


def check(case: Case, backend: str, size: float, near: float = 4e-6, **how: Any) -> None:
    (dq, dk, dv), dout, tables, sums = gradients(case, backend, size, **how)
    for name, x in {"dq": dq, "dk": dk, "dv": dv, **tables}.items():
        assert np.isfinite(np.asarray(x)).all(), name
    if not {"sinks", "seed"} & case.params.keys():
        assert np.isin(sums.round(2), (0, 1)).all()
    assert np.abs(dv.sum(1)[:, 0] - (dout * sums).sum((1, 2))).max() < near * np.sqrt(2 * dout.shape[1])
    if case.mask == "k == q":
        assert np.abs(dv[:, :, 0] - (dout * sums).sum(2)).max() < near


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", thinned(PART))
def test_weights_of_a_row_sum_to_one_by_xla(name: str, size: float) -> None:
    check(CASES[name], "xla", size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [pytest.param("one key", marks=pytest.mark.exhaustive), "affine"])
def test_weights_of_a_row_sum_to_one_by_pallas_for_tpus(name: str) -> None:
    check(CASES[name], "pallas-tpu", 1e9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["xla", "pallas-tpu"])
def test_weights_of_a_row_sum_to_one(backend: str, name: str, size: float) -> None:
    check(CASES[name], backend, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1e3, 1e9])
@pytest.mark.parametrize("name", ["one key", "causal", "affine"])
def test_weights_of_a_row_sum_to_one_by_pallas_for_hopper(name: str, size: float) -> None:
    check(CASES[name], "pallas-mosaic-gpu", size, near=0.02, dtype="bfloat16", dim=64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["xla", "pallas-tpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_sixteen_bits_sum_to_one(backend: str, dtype: str) -> None:
    check(CASES["one key"], backend, 1e3, near=0.02, dtype=dtype)


@pytest.mark.parametrize("size", [1e-3, 1e9])
def test_gradients_of_lse_are_the_weights(size: float) -> None:
    att = fk.compile("k == q", backend="xla")
    q, k, v, _ = made(size)
    _, back = jax.vjp(lambda q: att(q, k, v, return_lse=True)[1], q)
    (dq,) = back(jnp.ones((1, 2, q.shape[1])))
    np.testing.assert_allclose(dq, jnp.broadcast_to(k / 4, q.shape), rtol=1e-6)


def plain(case: Case, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by one softmax, in the dtype of the arrays."""
    at = np.arange(q.shape[1])
    rows, columns = at[:, None], at[None]
    visible = {"k == q": columns == rows, None: rows >= 0, "causal": columns <= rows}[case.mask]
    score = (lambda s: s * 1.5 + q.dtype.type(0.1) * (columns - rows)) if case.score else None
    return dense(q, k, v, visible, score)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "size"), [*(("xla", x) for x in EVERY), *(("pallas-tpu", x) for x in SIZES)])
@pytest.mark.parametrize("name", ["one key", "everything", "causal", "affine"])
def test_gradients_are_as_good_as_those_of_one_softmax(backend: str, name: str, size: float) -> None:
    """Twice its error, and what comes of delta, the row's sum of dout * out: out is a rounded float. One softmax has
    that sum of the very products it takes it from."""
    case = CASES[name]
    found, dout, *_ = gradients(case, backend, size)
    with jax.enable_x64(True):
        given = [x.astype(jnp.float64) for x in made(size)]
        exact = jax.vjp(lambda *x: plain(case, *x), *given[:3])[1](given[3])
        exact = [np.asarray(x) for x in exact]
    given = made(size)
    rival = [np.asarray(x, np.float64) for x in jax.vjp(lambda *x: plain(case, *x), *given[:3])[1](given[3])]
    q, k, v = (np.abs(np.asarray(x, np.float64)).max() for x in given[:3])
    dim, of_dm = given[0].shape[-1], 2.0**-22 * np.abs(dout).max() * v
    rounding = {"dq": of_dm * k * dim**0.5, "dk": of_dm * q * dim**0.5 * 4, "dv": 2.0**-22 * np.abs(dout).sum(1).max()}
    for name, mine, other, right in zip(rounding, found, rival, exact, strict=True):
        assert np.abs(mine - right).max() <= 2 * np.abs(other - right).max() + rounding[name], name
