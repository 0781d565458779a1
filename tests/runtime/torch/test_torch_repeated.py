"""Calls like one before, which ask nothing again but what may have changed."""

import numpy as np
import pytest
import torch

import frisket as fk
from frisket.dsl.errors import BackwardError
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())


def drawn(*, batch=2, heads=4, kv_heads=4, q_len=20, kv_len=20, dim=16, v_dim=16, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    return [torch.randn(s).to(dtype) for s in shapes]


def attention(mask="causal", **more):
    return fk.compile(mask, backend="native", **more)


def repeated(att, arrays):
    """The second call of `att` on arrays like these, and the first of another: their bits are one."""
    for _ in range(2):
        att(*drawn(**shape_of(arrays), seed=1))
    assert len(att.repeats) == 1
    got = att(*arrays)
    torch.testing.assert_close(got, attention(str(att.mask))(*arrays), rtol=0, atol=0)
    return got


def shape_of(arrays):
    q, k, v = arrays
    return {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2], "kv_len": k.shape[2],
        "dim": q.shape[3], "v_dim": v.shape[3], "dtype": q.dtype,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bits(dtype):
    repeated(attention(), drawn(dtype=dtype))


@pytest.mark.parametrize(
    "shape", [{"q_len": 1}, {"kv_heads": 2}, {"v_dim": 24}, {"q_len": 70, "kv_len": 90}, {"heads": 1, "kv_heads": 1}]
)
def test_shapes(shape):
    assert repeated(attention("q + 70 >= k"), drawn(**shape)).is_contiguous()


def test_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn())
    assert repeated(attention(), (q, k, v)).is_contiguous()
    apart = torch.randn(2, 4, 20, 32)[..., ::2]
    repeated(attention(), (apart, k, v))
    repeated(attention(), (q, k[:, :1].expand_as(k), v))


def test_negated_views():
    q, k, v = drawn()
    negated = torch._neg_view(-q)
    assert negated.is_neg()
    att = attention()
    att(q, k, v)
    att(q, k, v)
    torch.testing.assert_close(att(negated, k, v), att(q, k, v), rtol=0, atol=0)


def test_gradients_after_calls_without():
    arrays = drawn()
    att = attention()
    att(*arrays), att(*arrays)
    for x in arrays:
        x.requires_grad_()
        out = att(*arrays)
        assert out.requires_grad
        assert torch.autograd.grad(out.sum(), x)[0].abs().sum() > 0
        with torch.no_grad():
            assert not att(*arrays).requires_grad
        x.requires_grad_(False)


def test_everything_else_that_a_call_may_have():
    arrays = drawn()
    att = attention()
    out = att(*arrays)
    att(*arrays)
    with_lse, lse = att(*arrays, return_lse=True)
    assert lse.isfinite().all()
    assert (with_lse == out).all()
    assert att(*arrays, sinks=torch.zeros(4)).ne(out).any()
    assert att(*arrays, origin=(0, 0, 3, 0), sizes=(2, 4, 30, 30)).ne(out).any()
    turned = [x.transpose(1, 2) for x in arrays]
    torch.testing.assert_close(att(*turned, layout="bshd").transpose(1, 2), out, rtol=0, atol=0)
    assert len(att.repeats) == 1


def test_values_and_tables_are_not_kept():
    arrays = drawn()
    att = attention("k <= n")
    narrow, wide = att(*arrays, n=3), att(*arrays, n=12)
    att(*arrays, n=3)
    assert not att.repeats
    assert narrow.ne(wide).any()
    held = attention("k <= n[h]", n=np.array([3, 4, 5, 6]))
    held(*arrays)
    held(*arrays)
    assert not held.repeats
    dropped = attention(dropout=0.5)
    dropped(*arrays)
    assert dropped(*arrays).ne(dropped(*arrays)).any()
    assert attention(sinks=0.0)(*arrays).ne(attention()(*arrays)).any()


def test_autocast():
    arrays = drawn()
    att = attention()
    att(*arrays)
    att(*arrays)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert att(*arrays).dtype == torch.bfloat16


def test_modes():
    arrays = drawn()
    att = attention()
    out = att(*arrays)
    att(*arrays)
    with torch.device("meta"):
        torch.testing.assert_close(att(*arrays), out, rtol=0, atol=0)
    with torch.inference_mode():
        assert att(*arrays).is_inference()
    with torch._subclasses.FakeTensorMode() as mode:
        assert isinstance(att(*map(mode.from_tensor, arrays)), torch._subclasses.FakeTensor)


def test_settings(monkeypatch):
    arrays = drawn()
    att = fk.compile("causal", engines=False)
    monkeypatch.setenv("FRISKET_BACKEND", "native")
    out = att(*arrays)
    att(*arrays)
    monkeypatch.setenv("FRISKET_BACKEND", "dense")
    assert att(*arrays).ne(out).any()  # of another order
    monkeypatch.setenv("FRISKET_BACKEND", "native")
    torch.testing.assert_close(att(*arrays), out, rtol=0, atol=0)
    monkeypatch.setenv("FRISKET_CHECK", "2")
    with pytest.raises(fk.ParameterError, match="FRISKET_CHECK=2"):
        att(*arrays)


@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_tangents_are_refused_and_zeros_without_memory_are_read(backend):
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    att = fk.compile("causal", "score + w[h] * (k - q)", backend=backend)
    plain = fk.compile("causal", backend=backend)
    zeros = torch._efficientzerotensor(q.shape)
    w = torch.ones(2)
    for _ in range(3):  # anew, prepared, repeated
        torch.testing.assert_close(plain(q, zeros, v), plain(q, torch.zeros_like(k), v))
        plain(q, k, v)
        with torch.autograd.forward_ad.dual_level():
            torch.testing.assert_close(plain(q, k, v), plain(q.clone(), k, v))  # no tangents, no error
            for dual in (torch.autograd.forward_ad.make_dual(x, x) for x in (q, q.clone().requires_grad_())):
                with pytest.raises(BackwardError, match="forward mode is asked for"):
                    plain(dual, k, v)
            with pytest.raises(BackwardError, match="forward mode is asked for"):
                att(q, k, v, w=torch.autograd.forward_ad.make_dual(w, w))
