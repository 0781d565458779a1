"""The Gluon forward with queries, keys and values of float8_e4m3fn, in the interpreter of tests/support/gluon, against
FlashAttention 3's definition: scales of heads and of blocks, in any order of warps, copies and products."""

import re

import numpy as np
import pytest
import torch
from fuzz.kernels import stand_in
from support.eight_bits import Call, check, run
from support.gluon import language
from support.gluon.machine import FaultError

import frisket as fk
from frisket.dsl.errors import BackwardError, LoweringError
from frisket.lowering.dense import e4m3, in_8_bits

DOC = np.arange(300) // 70
CALLS = {
    "causal": Call(q_len=300, kv_len=300),
    "no mask": Call(None, q_len=200, kv_len=330),
    "no scales": Call(scaled=False),
    "blocks of a tile": Call(q_len=300, kv_len=300, blocks=(128, 128)),
    "blocks of part of a tile": Call(q_len=300, kv_len=300, blocks=(64, 32)),
    "tokens": Call(q_len=200, kv_len=200, blocks=(1, 1)),
    "groups of heads": Call(q_len=200, kv_len=200, heads=(4, 2), blocks=(64, 128)),
    "window": Call("causal & window(50)", q_len=300, kv_len=300, blocks=(32, 64)),
    "documents": Call("causal & same(doc)", q_len=300, kv_len=300, values={"doc": DOC}, blocks=(128, 128)),
    "several runs": Call("k < 64 | k >= 192", "score + 0.03 * k", q_len=300, kv_len=330, blocks=(128, 128)),
    "empty rows": Call("q >= k & k >= 20", blocks=(32, 32)),
    "softcap": Call("causal", "softcap(5)", q_len=200, kv_len=200, blocks=(64, 128)),
    "alibi": Call("causal", "score - 0.25 * (q - k)", q_len=200, kv_len=200, blocks=(64, 64)),
    "table": Call("causal", "score + t[h, q - k]", values={"t": np.ones((2, 150), np.float32)}),
    "heads of 128": Call(q_len=200, kv_len=200, dims=(128, 128), blocks=(128, 128)),
    "values of 128": Call(q_len=150, kv_len=200, dims=(192, 128), blocks=(128, 128)),
    "two parts": Call(dims=(160, 160)),
    "heads of 96": Call(dims=(96, 72)),
    "heads of 256": Call(dims=(256, 256), blocks=(128, 128)),
    "origin": Call(q_len=100, more={"origin": (0, 0, 60, 7), "sizes": (1, 2, 200, 200)}, blocks=(32, 64)),
    "scale below 0": Call(blocks=(32, 64), more={"scale": -0.1}),
    "batch": Call(batch=2, heads=(2, 1), blocks=(64, 128)),
    "one query": Call(None, q_len=1, kv_len=300, blocks=(0, 128)),
    "sinks": Call(more={"sinks": torch.tensor([0.5, -1.0])}),
}


@pytest.fixture(autouse=True)
def interpreted():
    with stand_in("gluon", "sm_90"):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_8_bits_err_as_flash_attention_3_defines(name):
    check(CALLS[name], *run(CALLS[name]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [True, False])
def test_schedules_of_8_bits_give_the_same_bits(seed, late, monkeypatch):
    call = CALLS["documents"]
    out, lse = run(call)
    monkeypatch.setattr(language, "SEED", seed)
    monkeypatch.setattr(language, "LATE", late)
    again, lse_again = run(call)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_dropout_of_8_bits_is_that_of_the_reference():
    call = Call(q_len=140, kv_len=200, blocks=(64, 128))
    (q, k, v), scales = call.arrays()
    att = fk.compile("k < 190", backend="gluon", dropout=0.3)
    report = att.check(q, k, v, seed=3, **scales)
    assert 0 < report.out <= 2 * report.dense_out


def test_plan_serves_calls_with_scales():
    call = Call(blocks=(64, 64))
    (q, k, v), scales = call.arrays()
    att = fk.compile("causal", backend="gluon")
    out, lse = att(q, k, v, plan=att.plan(150, 150, heads=2), return_lse=True, **scales)
    check(call, out, lse)


def test_largest_scores_are_those_of_unscaled_weights():
    call = Call(q_len=140, blocks=(64, 64))
    (q, k, v), scales = call.arrays()
    _, top = fk.compile("causal", backend="gluon")(q, k, v, return_max=True, **scales)
    _, want = fk.reference(q, k, v, "causal", layout="bhsd", return_max=True, **scales)
    np.testing.assert_allclose(top.numpy(), want, rtol=2e-6, atol=6e-6)


def test_scale_of_0_hides_nothing():
    """A quantiser gives 0 where all numbers of a block are 0."""
    (q, k, v), scales = Call(blocks=(64, 64)).arrays()
    q[:, :, 64:128] = 0
    scales["q_scale"][:, :, 1] = 0
    out = fk.compile("causal", backend="gluon")(q, k, v, **scales)
    want = fk.reference(q, k, v, "causal", layout="bhsd", **scales)
    assert np.abs(out.double().numpy() - want)[:, :, 64:128].max() < 0.02 * np.abs(want).max()


def test_scale_that_is_no_number_shows():
    (q, k, v), scales = Call(blocks=(64, 64)).arrays()
    scales["q_scale"][:, :, 1] = torch.nan
    out = fk.compile("causal", backend="gluon")(q, k, v, **scales)
    assert out[:, :, 64:128].isnan().all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_arrays_of_8_bits_may_have_any_strides(layout):
    call = Call(q_len=150, kv_len=150, heads=(4, 2), blocks=(64, 64))
    arrays, scales = call.arrays()
    turned = []
    for x in arrays:
        x = x if layout == "bhsd" else x.transpose(1, 2)
        whole = torch.full([n + 8 for n in x.shape], torch.nan).to(x.dtype)
        inner = whole[tuple(slice(n) for n in x.shape)]
        inner.copy_(x)
        turned.append(inner)
    if layout == "bshd":
        scales = {n: x.transpose(1, 2) if x.ndim == 3 else x for n, x in scales.items()}
    out, lse = fk.compile("causal", backend="gluon")(*turned, layout=layout, return_lse=True, **scales)
    check(call, out if layout == "bhsd" else out.transpose(1, 2), lse)


def test_scales_of_other_values_compile_no_kernel():
    call = Call(blocks=(64, 64))
    (q, k, v), scales = call.arrays()
    att = fk.compile("causal", backend="gluon")
    att(q, k, v, **scales)
    known = len(att.compiled())
    att(q, k, v, **{n: 2 * x for n, x in scales.items()})
    assert len(att.compiled()) == known


def test_gradients_of_8_bits_are_refused():
    (q, k, v), scales = CALLS["causal"].arrays()
    for x, more in ((q, {}), (q, scales)):
        with pytest.raises(BackwardError, match="for the forward alone"):
            fk.compile("causal", backend="gluon")(x.clone().requires_grad_(), k, v, **more)


def test_head_sizes_are_multiples_of_32():
    (q, k, v), _ = Call(dims=(48, 48)).arrays()
    with pytest.raises(LoweringError, match=r"multiples of 32, not 48\n  pad q and k with zeros"):
        fk.compile("causal", backend="gluon")(q, k, v)


def test_blackwell_refuses_8_bits_in_words():
    with stand_in("gluon", "sm_100"):
        (q, k, v), _ = CALLS["causal"].arrays()
        with pytest.raises(LoweringError, match="for Hopper alone"):
            fk.compile("causal", backend="gluon")(q, k, v)


def test_values_that_are_not_transposed_are_a_fault(monkeypatch):
    """A product of 8 bits reads both operands along the summed axis."""
    from frisket.runtime.backends.triton import launch

    load = launch.loaded_kernels
    change = re.compile(r"values\.index\(before\)\.reshape\(\[DIM_V, BLOCK_K\]\)\.permute\(\(1, 0\)\)")
    monkeypatch.setattr(
        launch, "loaded_kernels", lambda text: load(change.sub("values.index(before).reshape([BLOCK_K, DIM_V])", text))
    )
    with pytest.raises(FaultError, match="lie along the summed axis"):
        run(Call(dims=(128, 128), q_len=130, kv_len=130))


def test_numbers_are_rounded_to_8_bits_as_torch_rounds():
    draw = np.random.default_rng(0)
    x = np.concatenate([draw.uniform(0, 448, 1000), 2.0 ** draw.uniform(-12, 8, 1000), np.arange(449) / 2, [0.0]])
    want = torch.as_tensor(x).to(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(e4m3(x), want)
    assert e4m3(np.array([-500.0, 1e9])).tolist() == [-448, 448]


def test_softmax_of_8_bits_keeps_its_largest_weight():
    p = np.array([[0.5, 0.25, 2.0**-16], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(in_8_bits(p), p)
