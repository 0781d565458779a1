"""Gradients of the reference, against its central differences and against torch's autograd on attention written out by
hand."""

from __future__ import annotations

import numpy as np
import pytest

from frisket.dsl.ir import build, lookup, param, random
from frisket.dsl.sugar import b, eq, function, h, k, maximum, q, score, where
from frisket.dsl.types import FLOAT, INT
from frisket.lowering import dense
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs

B, H, KV, M, N, D, E = 2, 4, 2, 7, 9, 3, 5
ORIGIN, SIZES = (0, 0, 2, 0), (B, H, 9, 9)
CAP = param("cap", FLOAT)
MOD = (
    CAP * function("tanh", score / CAP)
    + lookup("slope", (h,), FLOAT) * (k - q)
    + lookup("bias", (maximum(q - k, 0),), FLOAT) * lookup("gate", (b, k), FLOAT)
)
KEPT = build("ge", random(param("seed", INT), b, h, q, k), param("rate", FLOAT))
RATE = 0.3


def case(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    return {
        "q": normal(B, H, M, D), "k": normal(B, KV, N, D), "v": normal(B, KV, N, E), "sinks": normal(H),
        "dout": normal(B, H, M, E), "dlse": normal(B, H, M),
        "params": {"cap": 1.7, "seed": 11, "rate": float(np.float32(RATE))},
        "tables": {"slope": normal(H), "bias": normal(5), "gate": normal(B, N)},
    }  # fmt: skip


def options(c: dict) -> dict:
    return {
        "scale": 0.6, "params": c["params"], "tables": c["tables"], "problem": Problem(M, N, B, H, ORIGIN, SIZES),
        "sinks": c["sinks"], "keep_mask": KEPT, "rate": RATE,
    }  # fmt: skip


def mask():
    return (q >= k) & ~eq(q, 4)


def loss(c: dict) -> float:
    out, lse = dense.attention(c["q"], c["k"], c["v"], dense.DenseCall(ProgramExprs(mask(), MOD), **options(c)))
    seen = np.isfinite(lse)
    return float((out * c["dout"]).sum() + np.where(seen, lse * c["dlse"], 0).sum())


def found(c: dict) -> dict:
    return dense.gradients(
        c["q"], c["k"], c["v"], dense.DenseCall(ProgramExprs(mask(), MOD), **options(c)), c["dout"], c["dlse"]
    )


def test_dense_gradients_equal_central_differences():
    c, step = case(), 1e-6
    grads = found(c)
    places = [(c, n, grads[f"d{n}"]) for n in ("q", "k", "v", "sinks")]
    places += [(c["tables"], n, g) for n, g in grads["dtables"].items()]
    assert set(grads["dtables"]) == {"slope", "bias", "gate"}
    assert set(grads["dscalars"]) == {"cap"}
    places += [(c["params"], "cap", np.asarray(grads["dscalars"]["cap"]))]
    for holder, name, got in places:
        kept = np.array(holder[name], float)
        want = np.zeros_like(kept)
        for at in np.ndindex(kept.shape):
            ends = []
            for sign in (1, -1):
                moved = kept.copy()
                moved[at] += sign * step
                holder[name] = moved
                ends.append(loss(c))
            want[at] = (ends[0] - ends[1]) / (2 * step)
        holder[name] = kept
        np.testing.assert_allclose(got, want, rtol=2e-7, atol=2e-8, err_msg=name)


@pytest.mark.parametrize("dropped", [False, True])
def test_dense_gradients_equal_torch_autograd(dropped):
    torch = pytest.importorskip("torch")
    c = case(1)
    grads = dense.gradients(
        c["q"],
        c["k"],
        c["v"],
        dense.DenseCall(ProgramExprs(mask(), MOD), **options(c) | ({} if dropped else {"keep_mask": None})),
        c["dout"],
        c["dlse"],
    )
    t = {n: torch.tensor(c[n], requires_grad=True) for n in ("q", "k", "v", "sinks")}
    t |= {n: torch.tensor(x, requires_grad=True) for n, x in c["tables"].items()}
    t["cap"] = torch.tensor(c["params"]["cap"], dtype=torch.float64, requires_grad=True)
    i, j = torch.arange(2, 2 + M)[:, None], torch.arange(N)[None, :]
    s = t["q"] @ t["k"].repeat_interleave(H // KV, 1).mT * 0.6
    s = t["cap"] * torch.tanh(s / t["cap"]) + t["slope"][:, None, None] * (j - i)
    s = s + t["bias"][(i - j).clamp(0, 4)] * t["gate"][:, None, None, :]
    hidden = (i < j) | (i == 4)
    s = s.masked_fill(hidden, -torch.inf)
    s = torch.cat([s, t["sinks"][None, :, None, None].expand(B, H, M, 1)], -1)
    p, lse = s.softmax(-1)[..., :-1], s.logsumexp(-1)
    if dropped:
        env = {**dense.coordinates(Problem(M, N, B, H, ORIGIN, SIZES)), **c["params"]}
        p = p * torch.tensor(dense.evaluate(KEPT, env)) / (1 - float(np.float32(RATE)))
    out = p @ t["v"].repeat_interleave(H // KV, 1)
    ((out * torch.tensor(c["dout"])).sum() + (lse * torch.tensor(c["dlse"])).sum()).backward()
    got = {n: grads[f"d{n}"] for n in ("q", "k", "v", "sinks")} | grads["dtables"] | grads["dscalars"]
    for name, x in t.items():
        np.testing.assert_allclose(got[name], x.grad.numpy(), rtol=1e-12, atol=1e-13, err_msg=name)


def test_rows_without_a_key_give_no_gradient_and_no_nan():
    c = case(2)
    bare = options(c) | {"sinks": None, "keep_mask": None}
    out, lse = dense.attention(c["q"], c["k"], c["v"], dense.DenseCall(ProgramExprs(mask(), MOD), **bare))
    assert np.isneginf(lse[:, :, 2]).all()
    assert not out[:, :, 2].any()
    grads = dense.gradients(
        c["q"], c["k"], c["v"], dense.DenseCall(ProgramExprs(mask(), MOD), **bare), c["dout"], c["dlse"]
    )
    assert not grads["dq"][:, :, 2].any()
    assert all(np.isfinite(grads[n]).all() for n in ("dq", "dk", "dv"))
    assert grads["dsinks"] is None
    top = dense.top(
        c["q"],
        c["k"],
        dense.DenseCall(ProgramExprs(mask(), MOD), **{n: bare[n] for n in ("scale", "params", "tables", "problem")}),
    )
    assert np.isneginf(top[:, :, 2]).all()
    assert (top[:, :, 3:] <= lse[:, :, 3:]).all()


def test_an_infinite_slope_where_nothing_is_visible_does_no_harm():
    """log(score) at scores of 0: -inf, so no weight, and a slope of 1 / 0."""
    c = case(3)
    c["k"][:, :, 1] = 0.0
    grads = dense.gradients(
        np.abs(c["q"]),
        np.abs(c["k"]),
        c["v"],
        dense.DenseCall(ProgramExprs(score=function("log", score)), scale=1.0, params={}, tables={}),
        c["dout"],
    )
    assert all(np.isfinite(grads[n]).all() for n in ("dq", "dk", "dv"))
    assert not grads["dk"][:, :, 1].any()
    assert grads["dk"][:, :, 0].any()


def test_reductions_are_written_out_with_the_values_of_the_call():
    import frisket as fk

    mod = fk.score("score + sum(j in 0..extent(x, 1): x[q, j] * y[k, j])", x=np.ones((M, 4)), y=np.ones((N, 4)))
    c = case(4)
    grads = dense.gradients(
        c["q"],
        c["k"],
        c["v"],
        dense.DenseCall(ProgramExprs(score=mod.expr), scale=1.0, params={}, tables=mod.tables),
        c["dout"],
    )
    assert grads["dtables"]["x"].shape == (M, 4)
    np.testing.assert_allclose(grads["dtables"]["x"], grads["dtables"]["x"][:, :1].repeat(4, 1))
    assert abs(grads["dtables"]["y"]).max() > 0.1


def test_where_is_not_followed_into_the_branch_not_taken():
    c = case(5)
    safe = where(score > 0.0, function("sqrt", score), score)
    grads = dense.gradients(
        c["q"], c["k"], c["v"], dense.DenseCall(ProgramExprs(score=safe), scale=1.0, params={}, tables={}), c["dout"]
    )
    assert all(np.isfinite(grads[n]).all() for n in ("dq", "dk", "dv"))
