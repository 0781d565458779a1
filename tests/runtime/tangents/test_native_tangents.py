"""Native kernels of tangents: out and lse, and the tangents of both, compared with dense attention in float64."""

import warnings
from functools import partial
from itertools import product

import pytest
import torch
from support.tiers import default_only
from torch.autograd import forward_ad

import frisket as fk
from frisket.runtime.torch import tangents
from runtime.torch import test_derivatives

pytestmark = pytest.mark.skipif(bool(fk.backends()["cpp"]), reason="no compiler")

F = torch.func
COMBINATIONS = [which for which in product([False, True], repeat=3) if any(which)]


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch, request):
    """Torch's operators compute no tangent here, unless a test asks for derivatives of tangents."""
    if "derivatives" not in request.node.name:
        monkeypatch.setattr(tangents, "attend_recorded", None)


def scores_of(score, s, at):
    if score == "softcap(2)":
        return 2 * torch.tanh(s / 2)
    if score == "score + bias[q - k]":
        return s + BIAS[(at[0][:, None] - at[1]).clamp(0, len(BIAS) - 1)].double()
    if score == "log(abs(score))":
        return s.abs().log()
    return s


MASKS = {
    "causal & window(9)": lambda q, k: (q >= k) & (q - k < 9),
    "causal": lambda q, k: q >= k,
    "q - k > 2 & k % 3 != 1": lambda q, k: (q - k > 2) & (k % 3 != 1),
    "window(5) | k < 3": lambda q, k: ((q - k).abs() < 5) | (k < 3),
}
BIAS = torch.linspace(-1, 1, 20)


def dense(mask, score, q, k, v):
    at = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    seen = MASKS[mask](at[0][:, None], at[1])
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    m = scores_of(score, q @ k.mT * q.shape[-1] ** -0.5, at).masked_fill(~seen, -torch.inf)
    some = seen.any(-1)
    lse = torch.where(some, m.logsumexp(-1), 0.0)
    return torch.where(some[:, None], (m - lse[..., None]).exp() @ v, 0.0), lse


def native(att, *arrays):
    out, lse = att(*arrays, return_lse=True)
    return out, torch.where(lse.isinf(), 0.0, lse)


def drawn(dtype, q_len=70, kv_len=83, heads=4, kv_heads=2, dim=20, v_dim=33):
    torch.manual_seed(0)
    shapes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim)
    return tuple(torch.randn(2, *shape).to(dtype) for shape in shapes)


CASES = {
    "window": ("causal & window(9)", None),
    "softcap": ("causal & window(9)", "softcap(2)"),
    "bias": ("causal", "score + bias[q - k]"),
    "holes": ("q - k > 2 & k % 3 != 1", None),
    "columns": ("window(5) | k < 3", "softcap(2)"),
}
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", default_only(DTYPES, torch.float32))
@pytest.mark.parametrize("name", default_only(CASES, "softcap", "holes"))
def test_native_tangents_are_those_of_dense_attention(name, dtype):
    """All combinations of tangents, with groups of heads, lengths that end inside tiles and rows without keys."""
    mask, score = CASES[name]
    params = {"bias": BIAS} if score and "bias" in score else {}
    att = fk.compile(mask, score, backend="cpp", **params)
    arrays = drawn(dtype)
    along = [torch.randn_like(x) for x in arrays]
    for which in COMBINATIONS:
        some = [i for i in range(3) if which[i]]

        def jvp(f, cast, some=some):
            whole = [x.to(cast) for x in arrays]

            def of_some(*varying):
                both = list(whole)
                for i, x in zip(some, varying, strict=True):
                    both[i] = x
                return f(*both)

            return F.jvp(of_some, tuple(whole[i] for i in some), tuple(along[i].to(cast) for i in some))

        got, want = jvp(partial(native, att), dtype), jvp(partial(dense, mask, score), torch.float64)
        for x, y in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
            assert (x.double() - y).abs().max() <= DTYPES[dtype] * max(1, y.abs().max())


def test_native_tangents_take_strides_and_orders_of_axes():
    """forward_ad, arrays [batch, length, heads, dim], a tangent that is one number, and keys that nobody sees."""
    q, k, v = drawn(torch.float32)
    k, v = k.clone(), v.clone()
    k[:, :, 75:], v[:, :, 75:] = torch.nan, torch.inf  # behind the last query
    along = torch.randn_like(q), torch.ones(()).expand(k.shape), torch.full_like(v, 2.0)
    along[2][:, :, 75:] = torch.nan
    att = fk.compile("causal & window(9)", "softcap(2)", backend="cpp")
    want = F.jvp(partial(dense, "causal & window(9)", "softcap(2)"),
                 *(tuple(x[:, :, :75].double() for x in y) for y in ((q, k, v), along)))[1][0]  # fmt: skip
    with forward_ad.dual_level():
        duals = (
            forward_ad.make_dual(x.transpose(1, 2), t.transpose(1, 2)) for x, t in zip((q, k, v), along, strict=True)
        )
        got = forward_ad.unpack_dual(att(*duals, layout="bshd")).tangent
    torch.testing.assert_close(got.transpose(1, 2).double(), want, rtol=1e-4, atol=1e-5)


ATT = fk.compile("causal & window(7)", "softcap(2)", backend="cpp", tile=(16, 16))
OFTEN = "jacfwd", "jvp(jvp)", "grad(jvp)", "vmap(jvp)", "jvp(grad)"


@pytest.mark.parametrize("name", default_only(test_derivatives.TRANSFORMS, *OFTEN))
def test_derivatives_of_native_tangents_are_those_of_dense(name):
    arrays = [x.detach() for x in test_derivatives.drawn(20, heads=4, kv_heads=2)]

    def of(attention):
        return lambda x: attention(arrays[0], x, *arrays[2:]).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (test_derivatives.TRANSFORMS[name](of(f), arrays[1]) for f in (ATT, test_derivatives.dense))
    torch.testing.assert_close(got, want)


def learned(attention, with_tangent, again=False):
    """The gradient of weights by out and, `with_tangent`, by its tangent: a step of training of MeanFlow."""
    q, k, v = (x.detach() for x in test_derivatives.drawn(20))
    weights = torch.eye(3, dtype=torch.float64).requires_grad_()

    def call(q):
        return attention(q @ weights, k @ weights, v @ weights)

    out, tangent = F.jvp(call, (q,), (v,))
    target = tangent if with_tangent else tangent.detach()
    (grad,) = torch.autograd.grad((out - target).square().sum(), weights, create_graph=again)
    return torch.autograd.grad(grad.square().sum(), weights)[0] if again else grad


def test_gradients_beside_native_tangents_are_by_kernels():
    """A tangent without a gradient costs the backward nothing."""
    torch.testing.assert_close(learned(ATT, False), learned(test_derivatives.dense, False))


@pytest.mark.parametrize("again", [False, True])
def test_derivatives_through_native_tangents_are_those_of_dense(again):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(learned(ATT, True, again), learned(test_derivatives.dense, True, again))


def test_nested_vmaps_of_native_tangents_are_those_of_dense():
    """The outer axis is of q, the inner one of tangents."""
    q, k, v = (x.detach() for x in test_derivatives.drawn(20))
    along = torch.stack([q, v, -k])

    def of(attention):
        def one(q, t):
            return F.jvp(lambda x: attention(x, k, v), (q,), (t,))

        return F.vmap(lambda q: F.vmap(partial(one, q))(along))(torch.stack([q, 2 * q]))

    torch.testing.assert_close(of(ATT), of(test_derivatives.dense))
