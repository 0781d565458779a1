"""What jax's tests ask of `jax.nn.dot_product_attention`, written anew: results, gradients and residuals of its options
beside frisket's attention under the same mask in words.

Queries that see no key are left out: jax gives them the mean of all values, frisket zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk

BATCH, SIZE = 2, 16
LENGTHS = {"square": (40, 40), "few queries": (9, 40), "many queries": (40, 9)}
GROUPS = {"heads": (4, 4), "groups": (4, 2), "one key head": (4, 1)}
DTYPES = ("float32", "bfloat16", "float16")
ENDS = np.array([7, 33], np.int32)  # of sequences


@dataclass
class Case:
    """frisket's mask and score mod with their values, and the options of jax that mean the same."""

    mask: str | None = None
    score: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None


def table(kind, *shape):
    """What a bias or a mask is in a case, made for the lengths of a call: "q" and "k" stand for them."""
    return kind, shape


CASES = {
    "everything": Case(),
    "scale": Case(scale=0.3),
    "causal": Case("causal", options={"is_causal": True}),
    "window": Case("q - k <= 3 & k - q <= 5", options={"local_window_size": (3, 5)}),
    "window of one number": Case("abs(q - k) <= 4", options={"local_window_size": 4}),
    "causal window": Case("causal & window(5)", options={"is_causal": True, "local_window_size": (4, 0)}),
    "lengths of keys": Case("k < ends[b]", options={"key_value_seq_lengths": ENDS}, values={"ends": ENDS}),
    "lengths of both": Case(
        "k < ends[b] & q < ends[b]", values={"ends": ENDS},
        options={"key_value_seq_lengths": ENDS, "query_seq_lengths": ENDS},
    ),
    "causal, lengths of keys": Case(
        "causal & k < ends[b]", options={"is_causal": True, "key_value_seq_lengths": ENDS}, values={"ends": ENDS}
    ),
    "mask": Case("seen[b, h, q, k]", options={"mask": table("seen", BATCH, 4, "q", "k")}),
    "mask of all heads": Case("seen[b, 0, q, k]", options={"mask": table("seen", BATCH, 1, "q", "k")}),
    "mask of all": Case("seen[0, 0, q, k]", options={"mask": table("seen", 1, 1, "q", "k")}),
    "mask of keys": Case("seen[b, 0, 0, k]", options={"mask": table("seen", BATCH, 1, 1, "k")}),
    "bias": Case(None, "score + bias[b, h, q, k]", {"bias": table("bias", BATCH, 4, "q", "k")}),
    "bias of heads": Case(None, "score + bias[0, h, q, k]", {"bias": table("bias", 1, 4, "q", "k")}),
    "bias of batches": Case(None, "score + bias[b, 0, q, k]", {"bias": table("bias", BATCH, 1, "q", "k")}),
    "bias of all": Case(None, "score + bias[0, 0, q, k]", {"bias": table("bias", 1, 1, "q", "k")}),
    "bias of keys": Case(None, "score + bias[0, 0, 0, k]", {"bias": table("bias", 1, 1, 1, "k")}),
    "bias of queries": Case(None, "score + bias[0, h, q, 0]", {"bias": table("bias", 1, 4, "q", 1)}),
    "causal, mask and bias": Case(
        "causal & seen[b, 0, q, k]", "score + bias[0, h, q, k]",
        {"is_causal": True, "mask": table("seen", BATCH, 1, "q", "k"), "bias": table("bias", 1, 4, "q", "k")},
    ),
}  # fmt: skip


def made(case, q_len, kv_len, heads, kv_heads, dtype, rng):
    """(q, k, v, bias or None, values of frisket's names, options of jax)."""

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    qkv = draw(BATCH, q_len, heads, SIZE), *(draw(BATCH, kv_len, kv_heads, SIZE) for _ in "kv")
    values, options, lengths = dict(case.values), dict(case.options), {"q": q_len, "k": kv_len}
    for name, x in case.options.items():
        if isinstance(x, tuple) and x[0] in ("seen", "bias"):
            shape = tuple(lengths.get(n, n) for n in x[1])
            options[name] = (
                draw(*shape) if x[0] == "bias" else jnp.asarray(rng.random(shape) < 0.7).at[..., 0].set(True)
            )
            values[x[0]] = options[name]
    return qkv, options.pop("bias", None), values, options


def both(case, given):
    """frisket's function of (q, k, v, bias), jax's, and the queries that see a key."""
    (q, k, _), bias, values, options = given
    values.pop("bias", None)

    def ours(q, k, v, bias):
        more = {} if bias is None else {"bias": bias}
        return fk.attention(q, k, v, case.mask, case.score, case.scale, return_lse=True, **values, **more)

    def theirs(q, k, v, bias):
        out, lse = jax.nn.dot_product_attention(
            q, k, v, bias, scale=case.scale, return_residual=True, implementation="xla", **options
        )
        return out, lse.swapaxes(1, 2)

    seen = ours(q, k, k, bias)[1] > -jnp.inf  # [batch, heads, queries]
    return ours, theirs, seen


def results(run, given, seen, weights, dtype):
    """out, lse and gradients, in a dtype; those of queries without a key are 0."""
    (q, k, v), bias = given[:2]
    args = [None if x is None else x.astype(dtype) for x in (q, k, v, bias)]
    there = seen.swapaxes(1, 2)[..., None]

    def rows(*args):
        out, lse = run(*args)
        return jnp.where(there, out, 0), jnp.where(seen, lse, 0)

    def loss(*args):
        return (rows(*args)[0].astype(jnp.float32) * weights).sum()

    wrt = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    return *rows(*args), *jax.grad(loss, wrt)(*args)


def check(case, lengths, heads, dtype):
    rng = np.random.default_rng(len(str(case)))
    given = made(case, *lengths, *heads, dtype, rng)
    ours, theirs, seen = both(case, given)
    weights = jnp.asarray(rng.standard_normal(given[0][0].shape), jnp.float32)
    got, jaxs = (results(run, given, seen, weights, dtype) for run in (ours, theirs))
    exact = results(theirs, given, seen, weights, "float32")
    for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv", "dbias"), got, jaxs, exact, strict=False):
        mine, other = (float(jnp.abs(a.astype(jnp.float32) - z).max()) for a in (x, y))
        assert mine <= 2 * other + 1e-5 * (1 + float(jnp.abs(z).max())), (name, mine, other)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_jax_attention_options_equal_jax(name, lengths):
    check(CASES[name], LENGTHS[lengths], GROUPS["heads"], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("name", ["causal", "causal, mask and bias", "lengths of keys"])
def test_heads_and_dtypes(name, heads, dtype):
    check(CASES[name], LENGTHS["square"], GROUPS[heads], dtype)


@pytest.mark.parametrize("name", ["causal", "causal window"])
def test_vmap_and_jit(name):
    case, rng = CASES[name], np.random.default_rng(0)
    stacked = [made(case, 24, 24, 4, 2, "float32", rng)[0] for _ in range(3)]
    q, k, v = (jnp.stack(x) for x in zip(*stacked, strict=True))
    ours = jax.jit(jax.vmap(lambda q, k, v: fk.attention(q, k, v, case.mask)))
    theirs = jax.vmap(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **case.options))
    np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("promotion", ["allow", "raise"])
def test_under_the_settings_of_jaxs_tests(promotion):
    with jax.numpy_rank_promotion(promotion), jax.numpy_dtype_promotion("strict"):
        q = jnp.asarray(np.random.default_rng(0).standard_normal((BATCH, 24, 4, SIZE)), jnp.float32)
        found = jax.value_and_grad(lambda q: fk.attention(q, q, q, "causal & k < ends[b] + 9", ends=ENDS).sum())(q)
    want = jax.value_and_grad(
        lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, key_value_seq_lengths=ENDS + 9).sum()
    )(q)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-4)
    np.testing.assert_allclose(found[1], want[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 8, 4, 16), (2, 8, 3, 16), (2, 8, 3, 16)),  # heads that do not divide
        ((2, 8, 4, 16), (3, 8, 4, 16), (3, 8, 4, 16)),
        ((2, 8, 4, 16), (2, 8, 4, 8), (2, 8, 4, 8)),
        ((2, 8, 4, 16), (2, 8, 4, 16), (2, 9, 4, 16)),
        ((4, 16), (4, 16), (4, 16)),
    ],
)
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(fk.ShapeError):
        fk.attention(*(jnp.ones(s) for s in shapes), "causal")
