"""Dropout, sinks, seeds, max scores: what calls take and give, what they refuse, on torch and JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.dsl.errors import ParameterError, ShapeError

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, h, 33, 16)).astype(np.float32) for h in (4, 2, 2))
SINKS = RNG.standard_normal(4).astype(np.float32)


def arrays(framework):
    if framework == "torch":
        return [torch.from_numpy(x) for x in (Q, K, V)]
    return [jnp.asarray(x.swapaxes(1, 2)) for x in (Q, K, V)]


def bhsd(x, framework):
    return np.asarray(x) if framework == "torch" else np.asarray(x).swapaxes(1, 2)


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("sinks", [SINKS, 0.5, -np.inf])
def test_results_with_options_equal_the_reference(framework, sinks):
    given = {"dropout": 0.3, "seed": 9, "sinks": sinks, "return_lse": True, "return_max": True}
    want = fk.reference(Q, K, V, "causal & q > 2", "softcap(3)", layout="bhsd", **given)
    got = fk.attention(*arrays(framework), "causal & q > 2", "softcap(3)", **given)
    close(bhsd(got[0], framework), want[0])
    close(got[1], want[1])
    close(got[2], want[2])
    dense = fk.attention(*arrays(framework), "causal & q > 2", "softcap(3)", backend="dense", **given)
    for a, b in zip(dense, got, strict=True):
        close(a, b)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask", "backend"), [
    ("causal", "cpp"), ("q <= k & k < 20", "aten"), ("q <= k & k < 20", "xla"),
    *(pytest.param(*x, marks=pytest.mark.exhaustive)
      for x in (("causal", "aten"), ("causal", "xla"), ("q <= k & k < 20", "cpp"))),
])  # fmt: skip
def test_infinite_sink_logit_takes_all_weight(mask, backend):
    """The limit of softmax: 0, lse inf, and a gradient of 1 through lse; NaN also where a row sees no key."""
    sinks = np.array([np.inf, 0.5, np.nan, -np.inf], np.float32)
    want = fk.reference(Q, K, V, mask, layout="bhsd", sinks=sinks, return_lse=True)
    assert (want[0][:, 0] == 0).all()
    assert (want[1][:, 0] == np.inf).all()
    assert np.isnan(want[1][:, 2]).all()
    att = fk.compile(mask, backend=backend)
    if backend == "xla":
        q, k, v = arrays("jax")

        @jax.jit
        def run(q, sinks):
            found, pull = jax.vjp(lambda q, sinks: att(q, k, v, sinks=sinks, return_lse=True), q, sinks)
            return found, pull(tuple(map(jnp.ones_like, found)))

        found, (dq, dsinks) = run(q, jnp.asarray(sinks))
    else:
        q, k, v = arrays("torch")
        q, given = q.requires_grad_(), torch.from_numpy(sinks).requires_grad_()
        found = att(q, k, v, sinks=given, return_lse=True)
        dq, dsinks = torch.autograd.grad(found, (q, given), tuple(map(torch.ones_like, found)))
        found = [x.detach() for x in found]
    close(bhsd(found[0], "jax" if backend == "xla" else "torch"), want[0])
    close(found[1], want[1])
    assert (bhsd(dq, "jax" if backend == "xla" else "torch")[:, 0] == 0).all()
    close(np.asarray(dsinks)[[0, 3]], [want[1][:, 0].size, 0])


def test_results_come_in_one_order():
    q, k, v = arrays("torch")
    out, lse, top = fk.attention(q, k, v, "causal", return_lse=True, return_max=True)
    assert lse.shape == top.shape == (2, 4, 33)
    assert out.shape == (2, 4, 33, 16)
    one, two = fk.attention(q, k, v, "causal", return_lse=True), fk.attention(q, k, v, "causal", return_max=True)
    close(one[1], lse)
    close(two[1], top)
    assert (top <= lse).all()
    assert isinstance(fk.attention(q, k, v, "causal"), torch.Tensor)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_files_for_other_machines(framework):
    """In the other order of bytes, and of more bits than a framework reads: as tables, captured arrays and sinks."""
    q, k, v = arrays(framework)
    doc, bias = (np.arange(q.shape[2 if framework == "torch" else 1]) // n for n in (7, 9))
    big = doc.astype(">i4"), bias.astype(">f8"), SINKS.astype(">f4")
    want = fk.attention(q, k, v, "same(doc)", "score + bias[k]", doc=doc, bias=bias * 1.0, sinks=SINKS)
    long = doc * np.longdouble(1), bias.astype(np.dtype(np.longdouble).newbyteorder(">")), SINKS.astype(np.longdouble)
    for given in (big, long):
        found = fk.attention(q, k, v, "same(doc)", "score + bias[k]", doc=given[0], bias=given[1], sinks=given[2])
        close(found, want)
    close(fk.attention(q, k, v, lambda q, k: big[0][q] == big[0][k], "score + bias[k]", bias=bias, sinks=SINKS), want)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", [np.longdouble, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_arrays_of_dtypes_that_torch_cannot_take_from_numpy(framework, dtype):
    q, k, v = arrays(framework)
    bias, sinks = (np.arange(n).astype(np.float32).astype(dtype) for n in (16, 4))
    given = {"bias": bias.astype(np.float32), "sinks": sinks.astype(np.float32)}
    want = fk.attention(q, k, v, "causal", "score + bias[k // 3]", **given)
    close(fk.attention(q, k, v, "causal", "score + bias[k // 3]", bias=bias, sinks=sinks), want)
    close(fk.compile("causal", "score + bias[k // 3]", bias=bias)(q, k, v, sinks=sinks), want)
    one, nothing = bias[1], np.zeros((), dtype)
    captured = fk.compile("causal", lambda score, b, h, q, k: score * one + (bias[k // 3] + nothing))
    close(captured(q, k, v, sinks=sinks), want)


def test_float64_sinks_stay_so():
    sinks = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    _, lse = fk.reference(*np.zeros((3, 1, 4, 2, 8)), "k < 0", sinks=sinks, layout="bhsd", return_lse=True)
    assert (lse[0, :, 0] == sinks.numpy()).all()


def test_sinks_are_the_calls_or_the_attentions():
    q, k, v = arrays("torch")
    att = fk.compile("causal", sinks=torch.from_numpy(SINKS))
    close(att(q, k, v), fk.attention(q, k, v, "causal", sinks=SINKS))
    close(att(q, k, v, sinks=2.0), fk.attention(q, k, v, "causal", sinks=[2.0] * 4))
    close(att(q, k, v, sinks=jnp.asarray(SINKS)), att(q, k, v))
    _, lse = fk.attention(q, k, v, "q > 40", sinks=SINKS, return_lse=True)
    close(lse, np.broadcast_to(SINKS[:, None], (2, 4, 33)))


def test_seeds_of_torch():
    q, k, v = arrays("torch")
    att = fk.compile("causal", dropout=0.5)
    torch.manual_seed(3)
    one, two = att(q, k, v), att(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(att(q, k, v), one)
    assert not torch.equal(one, two)
    assert torch.equal(att(q, k, v, seed=5), att(q, k, v, seed=torch.tensor(5)))
    assert torch.equal(att(q, k, v, seed=np.int64(5)), att(q, k, v, seed=5))
    state = torch.random.get_rng_state()
    plain = fk.compile("causal", dropout=0.0)
    assert torch.equal(plain(q, k, v), plain(q, k, v, seed=5))
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing is drawn without dropout


def test_seeds_of_jax():
    att, (q, k, v) = fk.compile("causal", dropout=0.5), arrays("jax")
    run = jax.jit(lambda seed: att(q, k, v, seed=seed))
    close(run(7), att(q, k, v, seed=7))
    close(att(q, k, v, seed=jnp.int32(7)), att(q, k, v, seed=7))
    close(bhsd(att(q, k, v, seed=7), "jax"), att(*arrays("torch"), seed=7))
    assert run._cache_size() == 1


def test_a_dropped_weight_depends_on_its_place_in_the_whole():
    """A crop drops what the whole call drops there."""
    q, k, v = arrays("torch")
    att = fk.compile("causal", dropout=0.5)
    whole = att(q, k, v, seed=1)
    part = att(q[:, 2:, 20:], k[:, 1:], v[:, 1:], seed=1, origin=(0, 2, 20, 0), sizes=(2, 4, 33, 33))
    close(part, whole[:, 2:, 20:])


def test_dropout_keeps_the_mean_of_weights():
    ones = torch.ones(1, 1, 400, 8)
    out = fk.attention(ones, ones, ones, dropout=0.25, seed=0)
    assert abs(out.mean().item() - 1) < 0.01
    assert fk.compile(dropout=0.1).options.dropout == float(np.float32(0.1))


def test_a_plan_knows_of_dropout():
    q, k, v = arrays("torch")
    plain, dropped = fk.compile("causal"), fk.compile("causal", dropout=0.5)
    plan = dropped.plan(33, 33, 2, 4)
    close(dropped(q, k, v, plan=plan, seed=1), dropped(q, k, v, seed=1))
    with pytest.raises(ParameterError) as error:
        plain(q, k, v, plan=plan)
    assert str(error.value) == (
        "the plan is for attention with dropout, this one is without\n  make it with this attention's own `plan`"
    )


def call(**more):
    return fk.attention(*arrays("torch"), "causal", **more)


BAD = {
    "deterministic": (lambda: call(deterministic=0), ParameterError, "deterministic is 0; it is True or False"),
    "rate of 1": (
        lambda: call(dropout=1), ParameterError,
        "dropout is 1; it is the share of weights to drop, at least 0 and below 1",
    ),
    "nearly 1": (
        lambda: call(dropout=1 - 1e-12), ParameterError,
        "dropout is 0.999999999999; it is the share of weights to drop, at least 0 and below 1",
    ),
    "rate of a flag": (
        lambda: fk.compile(dropout=True), ParameterError,
        "dropout is True; it is the share of weights to drop, at least 0 and below 1",
    ),
    "large seed": (
        lambda: call(dropout=0.1, seed=1 << 31), ParameterError,
        "seed is 2147483648; it is an integer, 0 <= seed < 2**31",
    ),
    "float seed": (
        lambda: call(dropout=0.1, seed=0.5), ParameterError, "seed is 0.5; it is an integer, 0 <= seed < 2**31"
    ),
    "no seed": (
        lambda: fk.attention(*arrays("jax"), "causal", dropout=0.1), ParameterError,
        "dropout needs a seed under JAX, another one at every step: seed=<int>, or a key: "
        "seed=jax.random.key(<int>)",
    ),
    "seed of a reference": (
        lambda: fk.reference(Q, K, V, layout="bhsd", dropout=0.1), ParameterError, "dropout needs a seed: seed=<int>"
    ),
    "seeds": (
        lambda: fk.attention(*arrays("jax"), "causal", dropout=0.1, seed=jnp.zeros(2, int)), ParameterError,
        "seed is int32[2]; it is one integer, 0 <= seed < 2**31, or one key: "
        "seed=jax.random.key(<int>)",
    ),
    "keys for a seed": (
        lambda: fk.attention(*arrays("jax"), "causal", dropout=0.1, seed=jax.random.split(jax.random.key(0))),
        ParameterError, "seed is key<fry>[2]; it is one integer, 0 <= seed < 2**31, or one key: "
        "seed=jax.random.key(<int>)",
    ),
    "scale of words": (
        lambda: call(scale="half"), ParameterError,
        "scale is 'half'; it is one finite number, or an array of one without axes",
    ),
    "scale without a value": (
        lambda: call(scale=float("nan")), ParameterError, "scale is nan; ",
    ),
    "traced scale of a reference": (
        lambda: jax.jit(lambda s: fk.reference(Q, K, V, scale=s, layout="bhsd"))(0.5), ParameterError,
        "scale is JitTracer(~float32[]); it is one finite number, or an array of one without axes\n"
        "  multiply q by a factor that is learned or traced, and give scale=1",
    ),
    "too few sinks": (
        lambda: call(sinks=torch.zeros(2)), ShapeError,
        "sinks are float32[2]; they are one number, or one for each of the 4 query heads",
    ),
    "sinks of flags": (
        lambda: call(sinks=torch.zeros(4, dtype=torch.bool)), ShapeError,
        "sinks are bool[4]; they are one number, or one for each of the 4 query heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_attention_options_are_refused(name):
    run, kind, text = BAD[name]
    with pytest.raises(kind) as error:
        run()
    assert str(error.value).startswith(text) if text.endswith("; ") else str(error.value) == text


def test_score_table_reaches_the_executor_without_a_copy():
    """A bias that only the score mod reads goes to the executor as it is: same memory, no digest."""
    from frisket.lowering.aten import forward as aten
    from frisket.runtime.plans.device import FlatPlan

    q, k, v = arrays("torch")
    bias, seen = torch.zeros(33, 33), []
    real = aten.forward
    att = fk.compile("causal", "param bias: float[_, _]\nscore = score + bias[q, k]", backend="aten")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten, "forward", lambda *a, **kw: seen.append(a[0].tables["t0"]) or real(*a, **kw))
        for _ in range(2):
            att(q, k, v, bias=bias)
    assert [t.data_ptr() for t in seen] == [bias.data_ptr()] * 2
    (plan,) = (x for x in att.calls.values() if isinstance(x, FlatPlan))
    assert not plan.device_values


def test_tables_of_the_mask_are_read_by_value():
    """The plan hangs on what they hold, so a change in place is seen."""
    q, k, v = arrays("torch")
    doc, att = torch.arange(33) // 5, fk.compile("same(doc)")
    before = att(q, k, v, doc=doc)
    doc //= 3
    after = att(q, k, v, doc=doc)
    close(after, fk.reference(Q, K, V, "same(doc)", layout="bhsd", doc=doc.numpy()))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("scale", [None, 0.125, 1e-300])
def test_a_spec_holds_any_scale(scale):
    from frisket.runtime.torch.spec import attention_of

    assert attention_of(fk.compile("causal", scale=scale).spec, ()).options.scale == scale


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_spec_says_whether_sums_are_in_order(deterministic):
    from frisket.runtime.torch.spec import attention_of

    spec = fk.compile("causal", deterministic=deterministic).spec
    assert f"'deterministic': {deterministic}, " in spec
    assert attention_of(spec, ()).options.deterministic is deterministic


def test_named_arguments_in_a_mask_are_no_program_lines():
    """A text with `=` is a whole program only where a line begins with `mask =`, `score =` and the like."""
    text = "at(flag[k], q = q, k = k)"
    att = fk.compile(text, "softcap(5)")
    assert att == fk.compile("flag[k]", "softcap(5)")
    q, flag = torch.randn(1, 1, 6, 8), torch.arange(6) % 2 == 0
    torch.testing.assert_close(att(q, q, q, flag=flag), fk.attention(q, q, q, text, "softcap(5)", flag=flag))
