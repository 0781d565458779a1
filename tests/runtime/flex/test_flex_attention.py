"""flex_attention on PyTorch's own words: every mask and score mod of the table, traced unchanged, beside torch's
flex_attention run eagerly, and gradients beside autograd through the dense formula in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import thinned

torch = pytest.importorskip("torch")

import torch.nn.attention.flex_attention as theirs  # noqa: E402
from runtime.flex.cases import arrays, block_mask_of, check_gradients  # noqa: E402
from support.torch.callables import MASKS, SCORES, mask_case, score_case  # noqa: E402
from support.torch.dense import dense  # noqa: E402
from support.triton import process as triton_process  # noqa: E402

from frisket.flex import AuxOutput, AuxRequest, flex_attention  # noqa: E402

UNMAPPED = ("softcap by a function of its own", "module")  # torch's own does not take these


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "aten")
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(  # torch's own derivative of an index of a part of a tensor has the wrong shape
        torch._dynamo._trace_wrapped_higher_order_op, "mod_index", lambda x, index: torch.ops.aten.index(x, list(index))
    )


ALL = [*(("score", n) for n in SCORES), *(("mask", n) for n in MASKS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "name"), thinned([x for x in ALL if x[1] not in UNMAPPED]), ids=lambda x: x)
def test_as_torch_computes_it(kind, name):
    case = score_case(name) if kind == "score" else mask_case(name)
    mod, torchs, ours = case.fn, None, None
    if kind == "mask":
        mod, torchs, ours = None, block_mask_of(case, theirs.create_block_mask), block_mask_of(case)
    q, k, v = arrays(case)
    with torch.no_grad():
        want, lse = theirs.flex_attention(q, k, v, mod, torchs, return_lse=True)
        out, aux = flex_attention(q, k, v, mod, ours, return_aux=AuxRequest(lse=True))
        again = flex_attention(q, k, v, mod, torchs)  # torch's BlockMask
    assert isinstance(aux, AuxOutput)
    assert aux.max_scores is None
    assert aux.lse.dtype == torch.float32
    torch.testing.assert_close(out, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(again, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(aux.lse, lse.float(), rtol=1e-4, atol=2e-5)  # a float64 table makes theirs float64


MASKED = [pytest.param("mask", n, marks=[pytest.mark.slow] * bool(i % 4)) for i, n in enumerate(MASKS)]


@pytest.mark.parametrize(("kind", "name"), [*(x for x in ALL[: len(SCORES)] if x[1] != UNMAPPED[0]), *MASKED])
def test_gradients_are_those_of_the_formula(kind, name):
    score, mask = (score_case(name), None) if kind == "score" else (None, mask_case(name))
    check_gradients(score, mask, torch.float64, 1e-5)


def test_a_function_of_its_own_has_the_gradient_of_its_forward():
    case = score_case(UNMAPPED[0])
    found, want = arrays(case, grad=True), arrays(case, grad=True)
    flex_attention(*found, case.fn).sum().backward()
    flex_attention(*want, lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)).sum().backward()
    torch.testing.assert_close(found[0].grad, want[0].grad)


MADE = {
    "lerp": lambda s, b, h, q, k: torch.lerp(s, s * k.double(), 0.7),
    "lerp by a score": lambda s, b, h, q, k: torch.lerp(0.5 * s, s * k.double(), s),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, s, 0.1 * k, value=0.5),
    "addcdiv": lambda s, b, h, q, k: torch.addcdiv(0.1 * k, s, 1.0 + q, value=0.5),
    "logaddexp": lambda s, b, h, q, k: torch.logaddexp(s, 0.1 * (k - q)),
    "logaddexp of equals": lambda s, b, h, q, k: torch.logaddexp(s, 1.0 * s) * s,
    "hypot": lambda s, b, h, q, k: torch.hypot(s, 1.0 + k),
    "copysign": lambda s, b, h, q, k: torch.copysign(s, 0.0 + k - q),
    "sinc": lambda s, b, h, q, k: torch.sinc(torch.where(k == q, 0.0 * s, s)),
    "heaviside": lambda s, b, h, q, k: s * torch.heaviside((k - q).double(), torch.tensor(0.5).double()),
    "signbit": lambda s, b, h, q, k: s + torch.where(torch.signbit(s), 1.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_functions_made_of_others_and_their_derivatives(name):
    g = torch.Generator().manual_seed(6)
    found, want = ([torch.randn(1, 2, 9, 8, generator=g.manual_seed(6), dtype=torch.float64, requires_grad=True)
                    for _ in "qkv"] for _ in range(2))  # fmt: skip
    out = flex_attention(*found, MADE[name])
    places = torch.meshgrid(*map(torch.arange, (1, 2, 9, 9)), indexing="ij")
    plain, *_ = dense(*want, score=lambda s: MADE[name](s, *places))
    out.square().sum().backward()
    plain.square().sum().backward()
    torch.testing.assert_close(out, plain)
    for x, y in zip(found, want):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.exhaustive
def test_on_native_kernels(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "cpp")
    check_gradients(score_case("same table twice"), mask_case("document by batch and head"), torch.float32, 2e-5)


@pytest.mark.exhaustive
def test_on_interpreted_triton():
    triton_process.run(Path(__file__).parent / "children/triton_interpreted.py", TRITON_INTERPRET="1")
