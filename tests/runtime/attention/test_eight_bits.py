"""Queries, keys and values of float8_e4m3fn: which backend takes them, what others say, and the shapes of scales."""

import numpy as np
import pytest
import torch
from support.eight_bits import Call

import frisket as fk
from frisket.dsl.errors import BackendError, LoweringError, ShapeError
from frisket.lowering.dtypes import OPERANDS, Operand
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.arrays import tokens_of

ARRAYS, SCALES = Call(blocks=(64, 128), dims=(32, 32)).arrays()


def test_automatic_choice_says_what_to_cast():
    with pytest.raises(BackendError, match="for Hopper alone, backend='gluon'; cast q to bfloat16: k and v may stay"):
        fk.attention(*ARRAYS, "causal", **SCALES)


@pytest.mark.parametrize("name", ["aten", "cpp", "triton", "sdpa"])
def test_backends_refuse_8_bit_queries_in_the_same_words(name):
    record = RECORDS[name]
    assert "cast q to bfloat16" in record.features["float8_e4m3fn"]
    with pytest.raises(BackendError):
        fk.compile("causal", backend=name)(*ARRAYS, **SCALES)


@pytest.mark.parametrize("name", ["triton", "cpp", "pallas-tpu", "pallas-mosaic-gpu"])
def test_kernels_of_others_are_not_printed_for_8_bit_queries(name):
    with pytest.raises((LoweringError, BackendError)):
        fk.compile("causal").source(name, q_len=256, dtype="float8_e4m3fn")


def test_jax_refuses_8_bit_queries():
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.ones((1, 128, 2, 32), "float8_e4m3fn")
    with pytest.raises(BackendError, match="cast q to bfloat16"):
        fk.attention(q, q, q, "causal")


def test_cast_queries_run_with_keys_of_8_bits():
    """The way that the error shows: bfloat16 holds the numbers of 8 bits, and the scale of a head goes to the keys."""
    (q, k, v), scales = Call(blocks=(0, 1), dims=(32, 32)).arrays()
    want = fk.reference(q, k, v, "causal", layout="bhsd", **scales)
    k_scale = scales["k_scale"] * scales["q_scale"][..., None]
    v_scale = scales["v_scale"][..., None].expand(*v.shape[:3])
    out = fk.attention(q.bfloat16(), k, v, "causal", k_scale=k_scale, v_scale=v_scale.contiguous())
    assert np.abs(out.double().numpy() - want).max() < 2**-7 * np.abs(want).max()


def test_reference_and_dense_take_8_bit_queries():
    (q, k, v), scales = ARRAYS, SCALES
    of_q = scales["q_scale"].repeat_interleave(64, -1)[..., :150, None]
    of_k = scales["k_scale"].repeat_interleave(128, -1)[..., :150, None]
    plain = q.double() * of_q, k.double() * of_k, v.double() * scales["v_scale"][..., None, None]
    want = fk.reference(*plain, "causal", layout="bhsd")
    np.testing.assert_allclose(fk.reference(q, k, v, "causal", layout="bhsd", **scales), want, rtol=1e-6, atol=1e-6)
    out = fk.compile("causal", backend="dense")(q, k, v, **scales)
    assert out.dtype is torch.bfloat16
    np.testing.assert_allclose(out.double().numpy(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("lengths", [(0, 150), (150, 0)])
def test_empty_calls_give_bfloat16(lengths):
    q, k = (torch.zeros(1, 2, n, 32).to(torch.float8_e4m3fn) for n in lengths)
    assert fk.compile("causal", backend="dense")(q, k, k).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"q_scale": torch.ones(1, 2, 7)}, r"q_scale has the shape \(1, 2, 7\).*\(1, 2\), or \[batch, heads, blocks\]"),
        ({"k_scale": torch.ones(1, 3)}, r"k_scale has the shape \(1, 3\).*every head of k, \(1, 2\)"),
        ({"v_scale": torch.ones(1, 2, 150)}, "weights are rounded to 8 bits"),
        ({"q_scale": torch.ones(1, 2).double()}, "q_scale is torch.float64|q_scale is float64; it is float32"),
    ],
)
def test_scales_of_other_shapes_are_refused(more, words):
    with pytest.raises(ShapeError, match=words):
        fk.reference(*ARRAYS, "causal", layout="bhsd", **{**SCALES, **more})


def test_query_scales_are_for_8_bit_queries():
    q = torch.ones(1, 2, 64, 32)
    with pytest.raises(ShapeError, match="q_scale is for q of float8_e4m3fn, and q is float32\n  multiply q"):
        fk.attention(q, q, q, "causal", q_scale=torch.ones(1, 2))


def test_8_bit_queries_need_keys_and_values_of_their_dtype():
    q, k, v = ARRAYS
    with pytest.raises(ShapeError, match="convert them to one"):
        fk.attention(q, k.bfloat16(), v.bfloat16())
    with pytest.raises(ShapeError, match=r"float8_e5m2; attention takes .* or float8_e4m3fn for all three"):
        fk.attention(*(x.float().to(torch.float8_e5m2) for x in (q, k, v)))
    with pytest.raises(ShapeError, match="no kernel reads pages"):
        fk.attention(q, k, v, pages=torch.zeros(1, 1, dtype=torch.int32))


def test_mask_parameter_is_no_scale_of_queries():
    with pytest.raises(fk.ParameterError, match="`q_scale` is a parameter of the mask"):
        fk.compile("q >= k + q_scale")(*ARRAYS, q_scale=SCALES["q_scale"])


@pytest.mark.parametrize(
    ("length", "blocks", "tokens"),
    [(1000, 8, 128), (1000, 1000, 1), (1000, 500, 2), (1000, 7, 0), (1000, 1, 1024), (1000, 0, 0), (100, 101, 0)],
)
def test_blocks_of_a_length_are_powers_of_two(length, blocks, tokens):
    assert tokens_of(length, blocks) == tokens


def test_forms_that_kernels_read():
    eight = OPERANDS["float8_e4m3fn"]
    block, token = Operand("float8_e4m3fn", (128, 64)), Operand("int8", (1, 64))
    for q, k, v in ((eight, eight, eight), (block, block, eight), (OPERANDS["bfloat16"], token, token)):
        Geometry(1, 1, 1, 8, 8, 64, 64, 1.0, q=q, k=k, v=v)
    for q in (Operand("bfloat16", (1, 64)), Operand("int8"), Operand("float8_e4m3fn", (128, 32))):
        with pytest.raises(LoweringError, match="together may be of float8_e4m3fn"):
            Geometry(1, 1, 1, 8, 8, 64, 64, 1.0, q=q)


def test_graph_of_torch_gives_bfloat16():
    from torch._subclasses.fake_tensor import FakeTensorMode

    import frisket.runtime.torch.operators  # noqa: F401  # registers them

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in ARRAYS)
        out = torch.ops.frisket.attend_alone(q, k, v, None, [], [], fk.compile("causal").spec, "")
        assert out.dtype is torch.bfloat16
