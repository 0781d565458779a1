"""Second and third derivatives of attention on torch tensors, and tangents, compared with differences of float64 and
with dense attention."""

import re
import warnings

import numpy as np
import pytest
import torch
from cases import masks, mods
from support.tiers import default_only, thinned
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import frisket as fk
from frisket.flex import create_block_mask, flex_attention
from frisket.runtime.torch import differentiable

LENGTH, DIM = 32, 3
MASKS = list(masks(LENGTH))
SCORES = list(mods(LENGTH))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def drawn(q_len=LENGTH, kv_len=None, batch=1, heads=2, kv_heads=None, dim=DIM):
    torch.manual_seed(0)
    shapes = ((heads, q_len), *2 * ((kv_heads or heads, kv_len or q_len),))
    return [torch.randn(batch, h, n, dim, dtype=torch.float64, requires_grad=True) for h, n in shapes]


def finite(out, lse):
    return out, torch.where(lse.isinf(), 0.0, lse)


def check(att, arrays, learned=None):
    learned = learned or {}
    given = [*arrays, *learned.values()]

    def call(q, k, v, *values):
        return finite(*att(q, k, v, return_lse=True, **dict(zip(learned, values, strict=True))))

    assert torch.autograd.gradcheck(call, given, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("name", thinned(MASKS, 12))
def test_library_masks_pass_gradgradcheck(name):
    case = masks(LENGTH)[name]
    att = fk.compile(case.mask, backend="aten", tile=(16, 16))
    check(att, drawn(case.q_len, case.kv_len, case.batch, max(case.heads, 2)))


@pytest.mark.parametrize("name", thinned(SCORES, 4))
def test_library_score_mods_pass_gradgradcheck(name):
    case = mods(LENGTH)[name]
    tables = {n: torch.as_tensor(x, dtype=torch.float64) for n, x in case.params.items() if np.ndim(x)}
    tables = {n: x.requires_grad_() for n, x in tables.items() if case.params[n].dtype.kind == "f"}
    rest = {n: x for n, x in case.params.items() if n not in tables}
    att = fk.compile("causal & window(20)", case.text, backend="aten", tile=(16, 16), **rest)
    check(att, drawn(case.q_len, case.kv_len, case.batch, case.heads), tables)


NO_SCORE = {
    "entries at a distance": "cos(t[clamp(q - k, 0, 6)])",  # a derivative has another index for the same entries
    "entries of a head": "tanh(t[h])",
    "entries of a key": "t[k] * t[k]",
    "a learned number": "gelu(c)",
    "a number": "0.5",
}


@pytest.mark.parametrize("name", NO_SCORE)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_score_mods_without_the_score_pass_gradgradcheck(name, mask):
    """Their values have fewer axes than the scores."""
    att = fk.compile(mask, NO_SCORE[name], backend="aten", tile=(16, 16))
    values = {"t": torch.randn(20, dtype=torch.float64), "c": torch.tensor(0.7, dtype=torch.float64)}
    learned = {n: x.requires_grad_() for n, x in values.items() if re.search(rf"\b{n}\b", NO_SCORE[name])}
    check(att, drawn(20, batch=2), learned)


@pytest.mark.parametrize("backend", ["aten", pytest.param("cpp", marks=pytest.mark.exhaustive)])
def test_sinks_groups_dropout_and_orders_pass_gradgradcheck(backend):
    q, k, v = drawn(heads=4, kv_heads=2)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    doc = np.repeat([0, 1, 2], [5, 20, 7]).astype(np.int32)
    mask, score = "causal & same(doc) & (h % 2 == 0 | q - k < 9)", "score + sin(score) * slope[h]"
    slope = torch.randn(4, dtype=torch.float64, requires_grad=True)
    att = fk.compile(mask, score, dropout=0.3, backend=backend, doc=doc)

    def call(q, k, v, sinks, slope):
        return finite(*att(q, k, v, sinks=sinks, slope=slope, seed=3, return_lse=True))

    assert torch.autograd.gradgradcheck(call, (q, k, v, sinks, slope), fast_mode=True)
    order = fk.reorder("causal & k % 4 == q % 4", LENGTH, block=(16, 16))
    check(fk.compile("causal & k % 4 == q % 4", backend=backend, reorder=order), drawn())


@pytest.mark.parametrize("divide", ["count", "total", "c * c + count", None])
def test_learned_numbers_of_weights_pass_gradgradcheck(divide):
    """A scale, and a number that the score mod, the weight and the divisor read."""
    q, k, v = drawn(12)
    scale, c = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 0.7))

    def call(q, k, v, scale, c):
        return fk.attention(
            q, k, v, "causal", "score * c", weight="softplus(score)", divide=divide, scale=scale, c=c, backend="aten"
        )

    assert torch.autograd.gradgradcheck(call, (q, k, v, scale, c), fast_mode=True)


PART = "(q >= k & (b + h) % 2 == 0) | (q - k < 3 & k % 3 != q % 3)", "score * slope[h] + near[b, k] * sin(0.1 * q)"
PLACE = {"origin": (1, 2, np.array([13, 4]), 5), "sizes": (3, 6, 40, 40)}


def test_parts_of_a_problem_pass_gradgradcheck():
    """Batch entries, heads, queries and keys that do not begin at 0; queries of each batch entry elsewhere."""
    att = fk.compile(*PART, backend="aten", tile=(16, 16))
    q, k, v = drawn(19, 23, batch=2, heads=4, kv_heads=2)
    slope, near = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((6,), (3, 40)))

    def call(q, k, v, slope, near):
        return finite(*att(q, k, v, slope=slope, near=near, return_lse=True, **PLACE))

    assert torch.autograd.gradcheck(call, (q, k, v, slope, near), fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (q, k, v, slope, near), fast_mode=True)


def test_plans_of_tensors_pass_gradgradcheck():
    """The layout is planned from a tensor, on its device."""
    q, k, v = drawn(40)
    att, doc = fk.compile("causal & same(doc)", backend="aten"), torch.arange(40) // 13
    plan = att.plan(40, 40, 1, 2, flat=True, doc=doc)
    assert torch.autograd.gradgradcheck(lambda *x: att(*x, plan=plan), (q, k, v), fast_mode=True)


def test_third_derivatives_pass_gradcheck():
    att = fk.compile("causal & q - k != 3", "softcap(2)", backend="aten", tile=(16, 16))

    def second(q, k, v):
        (dq,) = torch.autograd.grad(att(q, k, v).pow(3).sum(), q, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), (q, k), create_graph=True)

    assert torch.autograd.gradcheck(second, drawn(18), fast_mode=True)


def dense(q, k, v):
    """Causal attention to the last 7 keys, its scores capped at 2, written with all pairs."""
    at = torch.arange(q.shape[-2])
    hidden = (at[:, None] < at) | (at[:, None] - at >= 7)
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = 2 * torch.tanh(q @ k.mT * DIM**-0.5 / 2)
    return s.masked_fill(hidden, -torch.inf).softmax(-1) @ v


F = torch.func
TRANSFORMS = {
    "jvp": lambda f, x: F.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: F.jacfwd(f)(x),
    "hessian": lambda f, x: F.hessian(f)(x),
    "jacrev(jacrev)": lambda f, x: F.jacrev(F.jacrev(f))(x),
    "grad(grad)": lambda f, x: F.grad(lambda x: F.grad(f)(x).square().sum())(x),
    "jvp(grad)": lambda f, x: F.jvp(F.grad(f), (x,), (x,)),
    "grad(jvp)": lambda f, x: F.grad(lambda y: F.jvp(f, (y,), (x,))[1])(x),
    "jvp(jvp)": lambda f, x: F.jvp(lambda y: F.jvp(f, (y,), (x,))[1], (x,), (x,)),
    "grad(jvp(jvp))": lambda f, x: F.grad(lambda z: F.jvp(lambda y: F.jvp(f, (y,), (x,))[1], (z,), (x,))[1])(x),
    "vmap(jvp)": lambda f, x: F.vmap(lambda y: F.jvp(f, (y,), (x,))[1])(torch.stack([x, 2 * x])),
    "vmap(grad(grad))": lambda f, x: F.vmap(F.grad(lambda y: F.grad(f)(y).square().sum()))(torch.stack([x, -x])),
    "jacfwd(jacrev)": lambda f, x: F.jacfwd(F.jacrev(f))(x),
    "linearize": lambda f, x: F.linearize(f, x)[1](x),
    "functional.hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
}
ATT = fk.compile("causal & window(7)", "softcap(2)", backend="aten", tile=(16, 16))


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_transforms_are_those_of_dense_attention(name, which):
    arrays = [x.detach() for x in drawn(20, heads=4, kv_heads=2)]

    def of(attention):
        def loss(x):
            return attention(*arrays[:which], x, *arrays[which + 1 :]).square().sum()

        return loss

    got, want = (TRANSFORMS[name](of(f), arrays[which]) for f in (ATT, dense))
    torch.testing.assert_close(got, want)


def test_tangents_of_a_table_and_of_sinks_are_differences():
    q, k, v = (x.detach() for x in drawn(20))
    att = fk.compile("causal", "score + bias[q - k]", backend="aten", bias=torch.randn(20, dtype=torch.float64))
    bias, sinks = torch.randn(20, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def call(bias, sinks):
        return att(q, k, v, bias=bias, sinks=sinks)

    got = F.jvp(call, (bias, sinks), (bias, sinks))[1]
    step = 1e-6
    want = (call(bias * (1 + step), sinks * (1 + step)) - call(bias * (1 - step), sinks * (1 - step))) / (2 * step)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(x, x) for x in (bias, sinks))
        torch.testing.assert_close(forward_ad.unpack_dual(call(*duals)).tangent, got)


TABLED = "score + bias[q - k]"
HELD = {
    "scale": lambda qkv, x: fk.compile("causal", scale=x[0], backend="aten")(*qkv),
    "sinks": lambda qkv, x: fk.compile("causal", sinks=x[:2], backend="aten")(*qkv),
    "bound": lambda qkv, x: fk.compile("causal", TABLED, backend="aten", bias=x)(*qkv),
    "captured": lambda qkv, x: fk.attention(*qkv, "causal", lambda s, b, h, q, k: s + x[q - k], backend="aten"),
    "planned": lambda qkv, x: TABLE(*qkv, plan=TABLE.plan(20, 20, 1, 2, bias=x)),
    "planned on the host": lambda qkv, x: TABLE(*qkv, plan=TABLE.plan(20, 20, 1, 2, bias=x, flat=False)),
    "mask of sdpa": lambda qkv, x: fk.sdpa(*qkv, attn_mask=x[None]),
}
TABLE = fk.compile("causal", TABLED, backend="aten")


@pytest.mark.parametrize(
    ("name", "transform"),
    # a function reads no values of tensors that torch.func wraps, and says so
    [(n, t) for n in HELD for t in ("forward_ad", "torch.func.jvp") if (n, t) != ("captured", "torch.func.jvp")],
)
def test_tangents_of_what_an_attention_holds_are_differences(name, transform):
    """They were left out without a word, as of a number."""
    qkv = [x.detach() for x in drawn(20)]
    x, along, step = *torch.rand(2, 20, dtype=torch.float64), 1e-6
    want = (HELD[name](qkv, x + step * along) - HELD[name](qkv, x - step * along)) / (2 * step)
    if transform == "torch.func.jvp":
        got = F.jvp(lambda x: HELD[name](qkv, x), (x,), (along,))[1]
    else:
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(HELD[name](qkv, forward_ad.make_dual(x, along))).tangent
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weights", [{}, {"weight": "sigmoid(score)"}], ids=str)
def test_hessians_of_mapped_cotangents_are_those_of_one_by_one(weights):
    """`vectorize=True` is `is_grads_batched` of torch.autograd.grad."""
    q, k, v = (x.detach() for x in drawn(12))
    att = fk.compile("causal", backend="aten", **weights)
    x = torch.linspace(-1, 1, DIM, dtype=torch.float64)

    def loss(x):
        return att(q + x, k, v * x).sin().sum()

    hessian = torch.autograd.functional.hessian
    torch.testing.assert_close(hessian(loss, x, vectorize=True), hessian(loss, x))


def test_forward_ad_over_reverse_is_double_backward():
    """A backward of duals used the score's leaves without their tangents."""
    x, k, v = drawn(20)
    along = torch.randn_like(x)
    (grad,) = torch.autograd.grad(ATT(x, k, v).pow(3).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad((grad * along).sum(), x)
    with forward_ad.dual_level():
        loss = ATT(forward_ad.make_dual(x, along), k, v).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(forward_ad.unpack_dual(grad).tangent, want)


@pytest.mark.parametrize("dtype", default_only([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
def test_derivatives_of_narrow_dtypes_are_near_those_of_float64(dtype):
    exact = [x.detach() for x in drawn(40, heads=4, kv_heads=2, dim=16)]
    narrow = [x.to(dtype) for x in exact]

    def second(arrays):
        arrays = [x.clone().requires_grad_() for x in arrays]
        grads = torch.autograd.grad(ATT(*arrays).float().square().sum(), arrays, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in grads), arrays)

    for got, want in zip(second(narrow), second([x.double() for x in narrow]), strict=True):
        assert got.dtype == dtype
        steps = 16 if dtype == torch.float32 else 4  # sums of float32; those of 16 bits are rounded once
        assert (got.double() - want).abs().max() <= steps * torch.finfo(dtype).eps * want.abs().max()


def test_rows_without_keys_and_hidden_infinities_have_zeros():
    """A row that sees no key, and log(score), whose slope at a hidden score of 0 is infinite."""
    q, k, v = drawn(12)
    with torch.no_grad():
        k[:, :, 3] = 0.0  # scores of 0, hidden below
    att = fk.compile("q - k > 2 & k != 3", "log(abs(score))", backend="aten", tile=(16, 16))
    (dq,) = torch.autograd.grad(att(q, k, v).square().sum(), q, create_graph=True)
    assert (dq[:, :, :3] == 0).all()
    for grad in torch.autograd.grad(dq.square().sum(), (q, k, v)):
        assert grad.isfinite().all()
    assert F.jvp(lambda q: att(q, k, v), (q.detach(),), (q.detach(),))[1].isfinite().all()


@pytest.mark.parametrize("weights", [{}, {"weight": "relu2", "divide": "count"}, {"weight": "sigmoid(score)"}], ids=str)
@pytest.mark.parametrize("hidden", [torch.nan, torch.inf])
def test_derivatives_of_calls_whose_hidden_keys_are_anything(weights, hidden):
    """Keys that no query of a row of tiles sees, as those of a cache that is used again, and the cotangent of a row
    that sees none."""
    q, k, v = (x.detach() for x in drawn(20))
    t = torch.randn_like(q)
    att = fk.compile("causal & k < 13 & q >= 2", backend="aten", tile=(16, 16), **weights)

    def derivatives(value):
        both = [x.index_fill(2, torch.arange(13, 20), value) for x in (k, v)]
        dout = torch.cat([t[:, :, :2] * value, t[:, :, 2:]], 2).requires_grad_()
        learned = [x.clone().requires_grad_() for x in (q, *both)]
        firsts = torch.autograd.grad(att(*learned), learned, dout, create_graph=True)
        seconds = torch.autograd.grad(sum((g * g).sum() for g in firsts), [*learned, dout])

        def loss(q):
            return (att(q, *both) * t).sin().sum()

        return *firsts, *seconds, F.jvp(loss, (q,), (t,))[1], F.jvp(F.grad(loss), (q,), (t,))[1]

    for got, want in zip(derivatives(hidden), derivatives(0.0), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 4, 4), (1, 0, 5), (1, 5, 0)])
@pytest.mark.parametrize("weights", [{}, {"weight": "sigmoid(score)"}], ids=str)
def test_calls_of_nothing_have_derivatives_of_any_order(batch, q_len, kv_len, weights):
    """Without batch entries, queries or keys out is 0, and lse the sink."""
    q, k = (torch.randn(batch, 2, n, DIM, dtype=torch.float64) for n in (q_len, kv_len))
    sinks = None if weights else torch.tensor([0.5, -1.0], dtype=torch.float64)
    att = fk.compile("causal", "score * c", backend="aten", **weights)
    c = torch.tensor(0.7, dtype=torch.float64)

    def call(q, k, c, *sinks):
        if not sinks:
            return att(q, k, k, c=c).sum()
        out, lse = att(q, k, k, c=c, sinks=sinks[0], return_lse=True)
        return out.sum() + lse.exp().sum()

    def of_dense(q, k, c, *sinks):
        rows = batch * q_len * sinks[0].exp().sum() if sinks else 0.0
        return c * 0.0 + q[:, :, :0].sum() + k[:, :, :0].sum() + rows

    arrays = (q, k, c) if sinks is None else (q, k, c, sinks)
    every = tuple(range(len(arrays)))
    transforms = (
        lambda f: F.jvp(f, arrays, arrays),
        lambda f: F.grad(f, every)(*arrays),
        lambda f: F.jvp(F.grad(f, every), arrays, arrays),
        lambda f: F.hessian(f, every[-1])(*arrays),
    )
    for transform in transforms:
        torch.testing.assert_close(transform(call), transform(of_dense))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert forward_ad.unpack_dual(att(dual, k, k, c=c)).tangent.shape == q.shape


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_compiled_calls_of_nothing_have_second_derivatives(q_len, kv_len):
    q, k = (torch.randn(1, 2, n, DIM, dtype=torch.float64, requires_grad=True) for n in (q_len, kv_len))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    att = fk.compile("causal", backend="aten")

    def second(call):
        out, lse = call(q, k, sinks)
        grads = torch.autograd.grad(out.sum() + lse.exp().sum(), (q, k, sinks), create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in grads), sinks)

    def call(q, k, sinks):
        return att(q, k, k, sinks=sinks, return_lse=True)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(second(compiled), second(call))


def test_a_step_of_second_derivatives_keeps_one_row_of_tiles():
    """The largest array that the second derivative makes is of one row of tiles, not of all pairs."""
    n, block = 512, 64
    arrays = drawn(n, heads=1, dim=8)
    att = fk.compile("causal", backend="aten", tile=(block, block))
    grads = torch.autograd.grad(att(*arrays).square().sum(), arrays, create_graph=True)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Sizes():
        torch.autograd.grad(sum(g.square().sum() for g in grads), arrays)
    assert block * n <= largest < n * n // 4


def test_cost_of_higher_derivatives_is_told_once(monkeypatch):
    monkeypatch.setattr("frisket.runtime.machine.caller.SAID", set())
    x = torch.randn(1, 1, 8, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            F.jvp(lambda q: fk.attention(q, q, q, "causal"), (x,), (x,))
    assert [str(w.message) for w in seen] == [differentiable.WARNING]


def test_first_gradients_run_the_kernels_that_they_ran_before(monkeypatch):
    """create_graph=True alone asks for nothing more."""
    monkeypatch.setattr(differentiable, "attend", None)
    monkeypatch.setattr(differentiable.DifferentiableCall, "result", None)
    arrays = drawn()
    with_graph = torch.autograd.grad(ATT(*arrays).square().sum(), arrays, create_graph=True)
    without = torch.autograd.grad(ATT(*arrays).square().sum(), arrays)
    torch.testing.assert_close([x.detach() for x in with_graph], list(without), rtol=0, atol=0)


def in_flex(q, k, v):
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 7), None, None, q.shape[2], k.shape[2], "cpu")
    return flex_attention(q, k, v, lambda s, b, h, q, k: 2 * torch.tanh(s / 2), mask, enable_gqa=True)


def in_sdpa(q, k, v):
    at = torch.arange(q.shape[2])
    return fk.sdpa(q, k, v, (at[:, None] >= at) & (at[:, None] - at < 7), enable_gqa=True)


def uncapped(q, k, v):
    """`dense` without the soft cap, which SDPA has not."""
    at = torch.arange(q.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    hidden = (at[:, None] < at) | (at[:, None] - at >= 7)
    return (q @ k.mT * DIM**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


ENTRIES = {
    "attention": (lambda *x: fk.attention(*x, "causal & window(7)", "softcap(2)", backend="aten"), dense),
    "checkpoint": (lambda *x: torch.utils.checkpoint.checkpoint(ATT, *x, use_reentrant=False), dense),
    "torch.compile": (lambda *x: torch.compile(ATT, backend="eager", fullgraph=True)(*x), dense),
    "vmap": (lambda *x: F.vmap(ATT)(*(y[None] for y in x))[0], dense),
    "flex_attention": (in_flex, dense),
    "sdpa": (in_sdpa, uncapped),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_points_pass_second_derivatives_on(name, monkeypatch):
    """Double backward, and the jvp of a gradient where a graph or a checkpoint does not stand between."""
    monkeypatch.setenv("FRISKET_BACKEND", "aten")
    call, exact = ENTRIES[name]
    arrays = drawn(20, heads=4, kv_heads=2)

    def double(f):
        grads = torch.autograd.grad(f(*arrays).pow(3).sum(), arrays, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), arrays)

    torch.testing.assert_close(double(call), double(exact))
    if name not in ("torch.compile", "checkpoint"):  # torch's, which see no transforms of torch.func
        of = tuple(x.detach() for x in arrays)
        got, want = (F.jvp(F.grad(lambda *x, f=f: f(*x).pow(3).sum(), (0, 1, 2)), of, of)[1] for f in (call, exact))
        torch.testing.assert_close(got, want)
