"""Reports of gradients: dense attention written in torch and in JAX stands in for an executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import frisket as fk
from frisket.runtime.attention.report import Report, differentiated
from frisket.runtime.attention.report import report as compared
from frisket.runtime.calls.arrays import arrays
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.plans.device import CheckedCall

native = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())
B, H, KV, S, D = 2, 4, 2, 12, 8
SLOPES = np.random.default_rng(1).standard_normal(H).astype(np.float32)
WHAT = program_of("causal", "5 * tanh(score / 5) + slopes[h] * (k - q)", {"slopes": SLOPES})


def values(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def in_torch(dtype: str, wrong: str = ""):
    """(Report, inputs) of attention in torch; the gradient of the input named `wrong` is 1.01 times too large."""
    torch = pytest.importorskip("torch")
    from support.torch.dense import dense

    kind = getattr(torch, dtype)
    inputs = {
        "q": torch.tensor(values(B, H, S, D)).to(kind), "k": torch.tensor(values(B, KV, S, D)).to(kind),
        "v": torch.tensor(values(B, KV, S, D)).to(kind), "slopes": torch.tensor(SLOPES),
    }  # fmt: skip
    inputs["sinks"] = torch.tensor(values(H))
    gap = torch.arange(S) - torch.arange(S)[:, None]

    def run(x):
        x = {n: t * 1.01 - t.detach() * 0.01 if n == wrong else t for n, t in x.items()}

        def score(s):
            return 5 * torch.tanh(s / 5) + x["slopes"][:, None, None] * gap

        out, lse, _ = dense(*(x[n].float() for n in "qkv"), gap <= 0, score, x["sinks"])
        return out.to(kind), lse

    return finish("torch", run, inputs)


def in_jax(wrong: str = ""):
    jax = pytest.importorskip("jax")
    from support.jax.dense import dense

    jnp = jax.numpy
    inputs = {
        "q": jnp.asarray(values(B, S, H, D)), "k": jnp.asarray(values(B, S, KV, D)),
        "v": jnp.asarray(values(B, S, KV, D)), "slopes": jnp.asarray(SLOPES), "sinks": jnp.asarray(values(H)),
    }  # fmt: skip
    gap = jnp.arange(S) - jnp.arange(S)[:, None]

    def run(x):
        x = {n: t * 1.01 - jax.lax.stop_gradient(t) * 0.01 if n == wrong else t for n, t in x.items()}

        def score(s):
            return 5 * jnp.tanh(s / 5) + x["slopes"][:, None, None] * gap

        return dense(*(x[n] for n in "qkv"), gap <= 0, score, x["sinks"])

    return finish("jax", jax.jit(run), inputs)


def finish(framework, run, inputs) -> Report:
    out, lse, cotangents = differentiated(framework, run, inputs)
    given = arrays(*(inputs[n] for n in "qkv"))
    g = given.geometry(None, True)
    call = CheckedCall(given, g, None, "cpp", 0.0, None, inputs["sinks"], False)
    return compared(call, out, lse, cotangents, WHAT)


def test_check_reports_torch_gradients():
    for dtype in ("float32", "bfloat16", "float16"):
        report = in_torch(dtype)
        report.require()
        assert list(report.gradients) == ["dq", "dk", "dv", "dslopes", "dsinks"]
        assert max(ours for ours, _ in report.gradients.values()) > 0
        assert str(report).startswith(f"{dtype}: out ")
        assert "dslopes" in str(report)


@pytest.mark.parametrize("wrong", ["q", "k", "v", "slopes", "sinks"])
def test_a_wrong_gradient_in_torch(wrong):
    report = in_torch("float32", wrong)
    bad = [n for n, (ours, plain) in report.gradients.items() if ours > 2 * plain + 1e-6]
    assert bad == [f"d{wrong}"]
    with pytest.raises(fk.MismatchError, match=f"d{wrong} "):
        report.require()


def test_check_reports_jax_gradients():
    in_jax().require()
    with pytest.raises(fk.MismatchError, match="may be twice that of dense attention plus 1e-06"):
        in_jax("slopes").require()


def test_a_result_without_gradients():
    report = in_torch("float32")
    assert replace(report, gradients={}).good
    assert not replace(report, out=1.0).good
    assert str(replace(report, gradients={})).count("(dense") == 2


def test_large_gradients_are_measured_by_their_size():
    report = in_torch("float32")
    table = report.gradients["dslopes"]
    assert table[0] < 1e-6  # of a sum over rows of scores times distances


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["library", pytest.param("cpp", marks=[native, pytest.mark.exhaustive])])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_check_looks_at_gradients(framework, backend):
    pytest.importorskip(framework)
    make = __import__("torch").tensor if framework == "torch" else __import__("jax").numpy.asarray
    turned = (lambda x: x) if framework == "torch" else (lambda x: x.swapaxes(1, 2))
    q, k, v = (make(turned(values(B, h, S, D))) for h in (H, KV, KV))
    att = fk.compile("causal & window(w)", "cap * tanh(score / cap) + slopes[h] * (k - q)", backend=backend, w=5)
    report = att.check(q, k, v, cap=4.0, slopes=SLOPES, sinks=make(values(H)))
    assert set(report.gradients) == {"dq", "dk", "dv", "dcap", "dslopes", "dsinks"}
    plan = att.plan(S, S, B, H, cap=4.0, slopes=SLOPES)
    assert set(att.check(q, k, v, plan=plan).gradients) == {"dq", "dk", "dv"}
    assert att.check(q, k, v, cap=4.0, slopes=SLOPES, gradients=False).gradients == {}


def test_arrays_that_are_not_finite_are_told_apart_from_a_bug():
    """0 times NaN is NaN in other rows of a tile too, which the pages say; an error among finite numbers is a bug."""
    report = in_torch("float32")
    assert report.finite
    with pytest.raises(fk.MismatchError, match="this is a bug of frisket"):
        replace(report, out=1.0).require()
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    k[0, 0, 3] = float("nan")
    with pytest.raises(fk.MismatchError, match="k or v hold NaN or infinity") as caught:
        fk.compile("causal & window(3)").check(q, k, v)
    assert "bug" not in str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [range(48), pytest.param(range(48, 400), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize(
    "backend", [pytest.param("aten", marks=pytest.mark.exhaustive), pytest.param("cpp", marks=native)]
)
def test_score_mods_that_saturate_are_no_bug(backend, seeds):
    """Dense attention in float32 rounds each step of a score mod, and its scores by the order in which it adds up head
    dims. In float64 steps and in one order, it was right by luck where few scores decide, and one call of ten a bug."""
    torch = pytest.importorskip("torch")
    att = fk.compile("causal & window(48)", "softcap(50)", backend=backend)
    for seed in seeds:
        q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(seed))
        att.check(40 * q, k, v).require()


@pytest.mark.parametrize("size", [1, 40])
def test_an_approximate_score_mod_is_a_bug(size):
    """A score of up to 50 that is wrong by 1e-5 of it: more than any order of sums explains."""
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    out, lse = fk.attention(size * q, k, v, "causal", "50.0005 * tanh(score / 50)", return_lse=True)
    given = arrays(size * q, k, v)
    g, meant = given.geometry(None, True), program_of("causal", "softcap(50)", {})
    assert not compared(CheckedCall(given, g, None, "cpp", 0.0, None, None, False), out, lse, program=meant).good
