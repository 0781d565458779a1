"""The public run-time: torch and JAX arrays in, attention out, checked against the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.runtime.attention import attention as module
from frisket.runtime.machine.settings import VARIABLES, Settings

RNG = np.random.default_rng(5)
DOC = np.sort(RNG.integers(0, 4, 96))


def qkv(framework="torch", batch=2, heads=4, kv_heads=2, q_len=96, kv_len=96, dim=16, v_dim=16):
    """q, k, v in the framework's own layout."""
    shapes = [(batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)]
    found = [RNG.standard_normal(s).astype(np.float32) for s in shapes]
    if framework == "torch":
        return [torch.from_numpy(x) for x in found]
    return [jnp.asarray(x.swapaxes(1, 2)) for x in found]


def reference(arrays, mask=None, score=None, **more):
    return fk.reference(*arrays, mask, score, return_lse=True, **more)


CASES = {
    "plain": ({}, {}),
    "window": ({"mask": "causal & window(w)"}, {"w": 30}),
    "documents": ({"mask": "causal & same(doc)", "score": "softcap(5)"}, {"doc": DOC}),
    "bias": ({"score": "score + bias[q, k]"}, {"bias": RNG.standard_normal((96, 96)).astype(np.float32)}),
    "slopes": ({"mask": "causal", "score": "score + slope[h] * (k - q)"}, {"slope": np.array([0.5, 0.25, 0.1, 0.0])}),
    "batch": ({"mask": "k < n[b]"}, {"n": np.array([10, 96])}),
    "lambda": ({"mask": lambda q, k: (q >= k) & (DOC[q] == DOC[k])}, {}),
    "one name, two uses": ({"mask": "window(w)", "score": "score + w"}, {"w": 9}),
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_the_reference_in_torch_and_jax(case, framework):
    how, params = CASES[case]
    arrays = qkv(framework)
    out, lse = fk.attention(*arrays, **how, **params, return_lse=True)
    want, want_lse = reference(arrays, **how, **params)
    assert type(out) is type(arrays[0])
    assert out.shape == arrays[0].shape
    assert lse.shape == (2, 4, 96)
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_crop_in_global_coordinates(framework):
    arrays = qkv(framework, q_len=20, kv_len=96)
    place = {"origin": (0, 0, 76, 0), "sizes": (2, 4, 96, 96)}
    got = fk.attention(*arrays, "causal & q < Q_LEN - 5", **place)
    want, _ = reference(arrays, "causal & q < Q_LEN - 5", **place)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)
    per_batch = {"origin": (0, 0, [10, 76], 0), "sizes": (2, 4, 96, 96)}
    got = fk.attention(*arrays, "causal", **per_batch)
    want, _ = reference(arrays, "causal", **per_batch)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_attention_takes_a_named_axis_order(framework):
    arrays = qkv(framework)
    natural = {"torch": "bhsd", "jax": "bshd"}
    other = {"torch": "bshd", "jax": "bhsd"}
    turned = [x.swapaxes(1, 2) for x in arrays]
    want = fk.attention(*arrays, "causal", layout=natural[framework])
    got = fk.attention(*turned, "causal", layout=other[framework])
    np.testing.assert_allclose(np.asarray(got).swapaxes(1, 2), np.asarray(want), rtol=1e-6, atol=1e-6)


def test_torch_and_jax_agree():
    arrays = qkv()
    same = [jnp.asarray(x.numpy().swapaxes(1, 2)) for x in arrays]
    ours, theirs = (fk.attention(*a, "causal & window(9)") for a in (arrays, same))
    np.testing.assert_allclose(ours.numpy(), np.asarray(theirs).swapaxes(1, 2), rtol=1e-5, atol=1e-5)


def test_attention_inside_jit_equals_eager():
    arrays = qkv("jax")
    att = fk.compile("causal & same(doc)", doc=DOC)
    np.testing.assert_allclose(jax.jit(att)(*arrays), att(*arrays), rtol=1e-6, atol=1e-6)


def test_compile_holds_a_program():
    att = fk.compile(fk.mask("causal"), fk.score("softcap(5)"), scale=0.5)
    arrays = qkv()
    want, _ = reference(arrays, "causal", "softcap(5)", scale=0.5)
    np.testing.assert_allclose(att(*arrays).numpy(), want, rtol=1e-5, atol=1e-5)
    assert repr(att) == "Attention(mask = causal; score = softcap(5))"


def test_parameters_given_at_the_call():
    att = fk.compile("causal & same(doc) & window(w)", w=20)
    arrays = qkv()
    for doc, w in ((DOC, 20), (DOC[::-1].copy(), 7)):
        want, _ = reference(arrays, "causal & same(doc) & window(w)", doc=doc, w=w)
        np.testing.assert_allclose(att(*arrays, doc=doc, w=w).numpy(), want, rtol=1e-5, atol=1e-5)


def test_a_table_changed_in_place_is_a_new_layout():
    doc = DOC.copy()
    att, arrays = fk.compile("same(doc)"), qkv()
    before = att(*arrays, doc=doc)
    doc[:] = np.arange(96) // 3
    after = att(*arrays, doc=doc)
    want, _ = reference(arrays, "same(doc)", doc=doc)
    np.testing.assert_allclose(after.numpy(), want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(before, after)


def test_a_plan_is_shared_by_layers():
    att = fk.compile("causal & same(doc)")
    plan = att.plan(96, 96, 2, 4, doc=DOC)
    for _ in range(2):
        arrays = qkv()
        want, _ = reference(arrays, "causal & same(doc)", doc=DOC)
        np.testing.assert_allclose(att(*arrays, plan=plan).numpy(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(fk.ShapeError, match="the plan is for"):
        att(*qkv(q_len=95), plan=plan)
    with pytest.raises(fk.ParameterError, match="the plan holds"):
        att(*qkv(), plan=plan, doc=DOC)


def test_where_a_plan_begins_may_be_numpys():
    """Positions come out of arrays, in a decoding loop say; sizes may be a list."""
    att = fk.compile("causal & window(9)")
    arrays = qkv(q_len=5)
    kv_len = arrays[1].shape[2]
    want = att(*arrays, origin=(0, 0, kv_len - 5, 0))
    at, sizes = (0, 0, np.int64(kv_len - 5), np.int32(0)), [*arrays[0].shape[:2], kv_len, kv_len]
    plan = att.plan(5, kv_len, *arrays[0].shape[:2], origin=at, sizes=sizes)
    assert (att(*arrays, plan=plan) == want).all()
    assert (att(*arrays, origin=at, sizes=sizes) == want).all()
    doc = torch.zeros(kv_len, dtype=torch.int64)
    att = fk.compile("causal & window(9) & same(doc)")
    flat = att.plan(5, kv_len, *arrays[0].shape[:2], origin=at, sizes=sizes, doc=doc, flat=True)
    np.testing.assert_allclose(att(*arrays, plan=flat), want, rtol=1e-5, atol=1e-5)


def test_an_empty_row_is_zero():
    out, lse = fk.attention(*qkv(), "causal & q > 5", return_lse=True)
    assert (out[:, :, :6] == 0).all()
    assert torch.isneginf(lse[:, :, :6]).all()
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_check_in_other_dtypes(dtype):
    arrays = [x.to(getattr(torch, dtype)) for x in qkv()]
    report = fk.compile("causal", "softcap(5)").check(*arrays)
    assert report.good
    assert str(report).startswith(dtype)


def test_check_raises_on_a_wrong_result(monkeypatch):
    att = fk.compile("causal")
    real = module.Attention.run
    monkeypatch.setattr(module.Attention, "run", lambda *a: [*(x + 1e-3 for x in real(*a)[:2]), None])
    with pytest.raises(fk.MismatchError, match="may be twice that of dense attention"):
        att.check(*qkv(), gradients=False)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_dense_backend_equals_the_default(framework):
    arrays = qkv(framework)
    want = fk.attention(*arrays, "causal")
    got = fk.attention(*arrays, "causal", backend="dense")
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_sources_and_stages():
    att = fk.compile("causal & window(256)")
    shape = {"q_len": 1024, "kv_len": 1024, "heads": 8, "head_dim": 64, "dtype": "float32"}
    assert "@triton.jit" in att.source("triton", **shape)
    assert "def attention_forward" in att.source("pallas-tpu", **shape)
    assert att.source("triton", *qkv()) == att.source("triton", *qkv())
    stages = att.stages(**shape)
    assert str(stages.simplified).startswith("mask = q >= k")
    assert stages.source == ""
    with pytest.raises(fk.LoweringError, match="'aten' runs library calls and has no kernel text"):
        att.source("aten", **shape)
    with pytest.raises(fk.LoweringError, match="the Gluon kernel takes float16 and bfloat16"):
        att.source("gluon", **shape)
    assert "@gluon.jit" in att.source("gluon", **{**shape, "dtype": "bfloat16"})


@pytest.mark.parametrize("backend", ["pallas-tpu", "pallas-mosaic-gpu"])
def test_a_source_for_sizes_has_a_scale_of_zero(backend):
    zero, usual = (fk.compile("causal", scale=scale) for scale in (0, 0.125))
    shape = {"q_len": 256, "head_dim": 64, "dtype": "bfloat16"}
    assert zero.source(backend, **shape) != usual.source(backend, **shape)


def test_backends_say_why():
    found = fk.backends()
    assert found["aten"] == found["xla"] == found["dense"] == ""
    assert found["gluon"] == "no GPU of NVIDIA is visible to torch; its source can be printed all the same"
    assert "runs here" in str(found)


# -- settings -------------------------------------------------------------------------------------


def test_backend_keyword_overrides_the_environment(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "xla")
    with pytest.raises(
        fk.BackendError,
        match="'xla' does not take torch arrays; they run on aten, cpp, triton, gluon, flash, sdpa, cudnn, dense",
    ):
        fk.attention(*qkv(), "causal")
    fk.attention(*qkv(), "causal", backend="aten")
    fk.attention(*qkv(), "causal", backend="library")


def test_stages_are_shown_once(monkeypatch, capsys):
    monkeypatch.setenv("FRISKET_SHOW", "simplified,target")
    att, arrays = fk.compile("causal & causal"), qkv()
    att(*arrays)
    att(*arrays)
    assert capsys.readouterr().err.count("mask = q >= k") == 1


def test_calls_are_compared_under_frisket_check(monkeypatch):
    monkeypatch.setenv("FRISKET_CHECK", "1")
    real = module.Attention.run
    monkeypatch.setattr(module.Attention, "run", lambda *a: [*(x + 1e-3 for x in real(*a)[:2]), None])
    with pytest.raises(fk.MismatchError):
        fk.attention(*qkv(), "causal")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FRISKET_BACKEND", "cuda", "FRISKET_BACKEND=cuda: there are aten, xla, cpp, triton, gluon, flash, pallas-tpu, "
         "pallas-mosaic-gpu, sdpa, cudnn, splash, dense, library, native"),
        ("FRISKET_CHECK", "yes", "FRISKET_CHECK=yes: write 0 or 1"),
        ("FRISKET_SHOW", "sorce", "FRISKET_SHOW=sorce: no stage 'sorce'; there are expr, simplified, facts, layout, "
         "plan, target, source, compiles"),
    ],
)  # fmt: skip
def test_bad_settings_list_the_good_ones(name, value, text):
    with pytest.raises(fk.ParameterError) as error:
        Settings.read({name: value})
    assert str(error.value) == text


def test_settings_are_one_table():
    assert len(VARIABLES) <= 8
    assert Settings.read({"FRISKET_CACHE_DIR": "x", "FRISKET_CHECK": "1"}) == Settings(cache_dir="x", check=True)


@pytest.mark.parametrize(
    ("mask", "shape", "guard"),
    [
        ("causal & window(5)", (16, 16, 0), False),
        ("causal & same(doc)", (16, 16, 0), False),
        ("q > k", (16, 16, 0), True),
        ("causal", (16, 8, 0), True),  # queries past the last key: not proved by the diagonal
        ("causal", (8, 16, 8), False),
        ("causal & window(5)", (8, 16, 20), True),
    ],
)
def test_empty_row_guard_is_dropped_where_queries_see_a_key(mask, shape, guard):
    q_len, kv_len, start = shape
    params = {"doc": np.zeros(64, int)} if "doc" in mask else {}
    made = fk.compile(mask, **params).plan(q_len, kv_len, 1, 1, origin=(0, 0, start, 0)).work((8, 8))
    assert made.plan.guard is guard
