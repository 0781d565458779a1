"""Calls like one before, which ask nothing again but what may have changed."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import frisket as fk
from frisket.dsl.errors import BackwardError
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.torch import autograd, op
from frisket.runtime.torch.ready import PreparedCall

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())


def drawn(*, batch=2, heads=4, kv_heads=4, q_len=20, kv_len=20, dim=16, v_dim=16, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    return [torch.randn(s).to(dtype) for s in shapes]


def attention(mask="causal", **more):
    return fk.compile(mask, backend="native", **more)


def paths(att):
    """The fast paths of its prepared calls."""
    return [x.fast for x in att.calls.values() if isinstance(x, PreparedCall) and x.fast]


def repeated(att, arrays):
    """The second call of `att` on arrays like these, and the first of another: their bits are one."""
    for _ in range(2):
        att(*drawn(**shape_of(arrays), seed=1))
    assert len(paths(att)) == 1
    got = att(*arrays)
    torch.testing.assert_close(got, attention(str(att.mask))(*arrays), rtol=0, atol=0)
    return got


def shape_of(arrays):
    q, k, v = arrays
    return {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2], "kv_len": k.shape[2],
        "dim": q.shape[3], "v_dim": v.shape[3], "dtype": q.dtype,
    }  # fmt: skip


BAND = "q + 70 >= k & k > 2 * q - 9"
DTYPES = [
    torch.float32,
    torch.bfloat16,
    *(pytest.param(t, marks=pytest.mark.exhaustive) for t in (torch.float64, torch.float16)),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_calls_give_the_bits_of_the_first(dtype):
    repeated(attention(), drawn(dtype=dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "shape", [{"q_len": 1}, {"kv_heads": 2}, {"v_dim": 24}, {"q_len": 70, "kv_len": 90}, {"heads": 1, "kv_heads": 1}]
)
def test_repeated_calls_take_many_shapes(shape):
    assert repeated(attention(BAND), drawn(**shape)).is_contiguous()


def test_repeated_calls_take_any_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn())
    assert repeated(attention(), (q, k, v)).is_contiguous()
    apart = torch.randn(2, 4, 20, 32)[..., ::2]
    repeated(attention(), (apart, k, v))
    repeated(attention(), (q, k[:, :1].expand_as(k), v))


def test_repeated_calls_see_negated_views():
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


DOC = np.repeat([0, 1, 2], [7, 7, 6])
SCALE = torch.rand(2, 4, 20) + 0.1
PAGES = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
KINDS = {
    "lse": ("causal", {"return_lse": True}, {}),
    "origin": ("causal", {"origin": (0, 0, 3, 0), "sizes": (2, 4, 30, 30)}, {"origin": (0, 0, 4, 0)}),
    "number": ("causal & window(n)", {"n": 3}, {"n": 4}),
    "number of another type": ("causal", {"n": 2}, {"n": 2.5}),
    "sinks": ("causal", {"sinks": torch.arange(4.0)}, {"sinks": torch.ones(4)}),
    "table of the attention": ("k < t[b]", {}, {}),
    "plan": ("causal & same(doc)", {"plan": DOC}, {"plan": DOC[::-1].copy()}),
    "plan, lse": ("causal & same(doc)", {"plan": DOC, "return_lse": True}, {"plan": DOC // 2}),
    "scales": ("causal", {"k_scale": SCALE, "v_scale": SCALE}, {"v_scale": 1 + SCALE}),
    "pages": ("causal", {"pages": PAGES}, {"pages": PAGES.flip(0)}),
}


def made(kind, more=None):
    """An attention of KINDS, the arguments of its calls, and how its q, k and v are drawn."""
    mask, how = KINDS[kind][0], {**KINDS[kind][1], **(more or {})}
    score = "score * n + q" if "another type" in kind else None
    att = fk.compile(fk.mask(mask, t=[13, 5]) if "t[" in mask else mask, score, backend="native")
    if "plan" in how:
        how["plan"] = att.plan(20, 20, 2, 4, doc=how["plan"])

    def arrays(seed):
        q, k, v = drawn(seed=seed)
        if "scales" in kind:
            k, v = ((x * 30).to(torch.int8) for x in (k, v))
        if "pages" in kind:
            k, v = torch.randn(2, 4, 4, 16, 16)
        return q, k, v

    return att, how, arrays


@pytest.fixture
def asked(monkeypatch):
    return without_fast_path(monkeypatch)


def without_fast_path(monkeypatch):
    """The calls to come that no fast path runs."""
    found, first, again = [], op._first_call, op.operands_of
    monkeypatch.setattr(op, "_first_call", lambda *given: found.append(given) or first(*given))
    monkeypatch.setattr(op, "operands_of", lambda *given: found.append(given) or again(*given))
    return found


def same(have, want):
    torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "bhsd") for kind in KINDS), ("plan, lse", "bshd"),
     *(pytest.param(kind, "bshd", marks=pytest.mark.exhaustive) for kind in KINDS if kind != "plan, lse")],
)  # fmt: skip
def test_calls_with_more_than_arrays(kind, layout, asked):
    att, how, arrays = made(kind)
    stored = "scales" in kind or "pages" in kind
    if layout == "bshd":
        draw, how = arrays, {**how, "layout": layout}
        arrays = lambda seed: [x.transpose(1, 2).contiguous() for x in draw(seed)]  # noqa: E731
        if "scales" in kind:
            how = {n: x.transpose(1, 2).contiguous() if torch.is_tensor(x) else x for n, x in how.items()}
    for seed in range(2):
        att(*arrays(seed), **how)
    asked.clear()
    found = att(*arrays(2), **how)
    assert len(asked) == (stored and layout == "bshd")  # whose scales have other axes than kernels read
    other = {**how, "plan": made(kind)[1]["plan"]} if "plan" in how else how
    same(found, fk.compile(att.program.mask, att.program.score, backend="native")(*arrays(2), **other))
    if KINDS[kind][2] and layout == "bhsd":
        changed, more, _ = made(kind, KINDS[kind][2])
        more = {**more, "plan": att.plan(20, 20, 2, 4, doc=KINDS[kind][2]["plan"])} if "plan" in how else more
        have, want = att(*arrays(2), **more), changed(*arrays(2), **made(kind, KINDS[kind][2])[1])
        same(have, want)
        first, before = (x[0] if isinstance(x, tuple) else x for x in (have, found))
        assert first.ne(before).any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mask", "score", "values"),
    [("causal & window(n)", None, (1, True)), ("causal", "score + max(min(1.0 / n, 1.0), -1.0) * k", (0.0, -0.0, 1))],
)
def test_types_and_signs_of_numbers_are_told_apart(mask, score, values):
    arrays, att = drawn(), fk.compile(mask, score, backend="native")

    def outcome(of, n):
        try:
            return of(*arrays, n=n)
        except fk.ParameterError as error:
            return str(error)

    for n in values:
        for _ in range(3):
            have, want = outcome(att, n), outcome(fk.compile(mask, score, backend="native"), n)
            assert have == want if isinstance(want, str) else have.equal(want)


@pytest.mark.parametrize("kind", ["plan", "table of the attention"])
def test_gradients_where_the_kernel_reads_tables(kind, generic, asked):
    att, how, arrays = made(kind)

    def gradients(of, **more):
        given = [x.requires_grad_() for x in arrays(3)]
        return torch.autograd.grad(of(*given, **more).square().sum(), given)

    for _ in range(2):
        gradients(att, **how)
    asked.clear(), generic.clear()
    have = gradients(att, **how)
    assert not asked
    assert not generic
    other, more, _ = made(kind)
    same(have, gradients(other, **more))


def test_a_table_of_a_plan_that_is_written_to(asked):
    att, how, arrays = made("plan")
    q, k, v = arrays(0)
    for _ in range(3):
        att(q, k, v, **how)
    with torch.enable_grad():
        for _ in range(3):
            out = att(q.requires_grad_(), k, v, **how)
    (ready,) = how["plan"].calls.values()
    next(iter(ready.inputs.tables.values())).add_(1)
    with pytest.raises(BackwardError, match="changed in place between"):
        out.sum().backward()
    asked.clear()
    att(q.detach(), k, v, **how)
    att(q, k, v, **how)
    assert len(asked) == 2


def test_a_plan_is_refused_by_an_attention_of_another_mask():
    arrays, att = drawn(), attention()
    plan = att.plan(20, 20, 2, 4)
    for _ in range(3):
        att(*arrays, plan=plan)
    with pytest.raises(fk.ParameterError):
        attention("q + 5 >= k")(*arrays, plan=plan)


def test_stored_keys_have_no_gradients_at_any_call():
    att, how, arrays = made("scales")
    q, k, v = arrays(0)
    for _ in range(3):
        att(q, k, v, **how)
    for _ in range(3):
        with pytest.raises(BackwardError, match="for the forward alone"):
            att(q.requires_grad_(), k, v, **how)


def test_sinks_that_learn_after_some_that_do_not(asked):
    att, how, arrays = made("sinks")
    for _ in range(3):
        att(*arrays(0), **how)
    sinks = torch.nn.Parameter(torch.arange(4.0))
    assert att(*arrays(0), sinks=sinks).requires_grad
    with torch.no_grad():
        same(att(*arrays(0), sinks=sinks), att(*arrays(0), **how))
    same(att(*arrays(0), sinks=torch.ones(4, dtype=torch.bfloat16)), att(*arrays(0), sinks=1.0))
    same(att(*arrays(0), sinks=torch.arange(8.0)[::2]), att(*arrays(0), sinks=torch.tensor([0.0, 2, 4, 6])))


def test_sinks_of_another_shape_are_refused_at_every_call():
    att, how, arrays = made("sinks")
    for _ in range(3):
        att(*arrays(0), **how)
        with pytest.raises(fk.ShapeError, match="sinks are"):
            att(*arrays(0), sinks=torch.ones(1))


def test_dropout_and_sinks_of_the_attention_are_asked_for_again():
    arrays = drawn()
    dropped = attention(dropout=0.5)
    dropped(*arrays)
    assert dropped(*arrays).ne(dropped(*arrays)).any()
    assert attention(sinks=0.0)(*arrays).ne(attention()(*arrays)).any()


def test_repeated_calls_follow_autocast():
    arrays = drawn()
    att = attention()
    att(*arrays)
    att(*arrays)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert att(*arrays).dtype == torch.bfloat16


def test_repeated_calls_follow_torch_modes():
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


def test_repeated_calls_follow_changed_settings(monkeypatch):
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
def test_tangents_pass_and_zeros_without_memory_are_read(backend):
    q, k, v = torch.randn(3, 1, 2, 16, 16)
    att = fk.compile("causal", "score + w[h] * (k - q)", backend=backend)
    plain = fk.compile("causal & window(7)", backend=backend)
    zeros = torch._efficientzerotensor(q.shape)
    w = torch.ones(2)
    want = torch.func.jvp(lambda q: plain(q, k, v), (q,), (q,))[1]
    slope = torch.func.jacrev(lambda w: att(q, k, v, w=w))(w).sum(-1)
    for _ in range(3):  # anew, prepared, repeated
        torch.testing.assert_close(plain(q, zeros, v), plain(q, torch.zeros_like(k), v))
        plain(q, k, v)
        with torch.autograd.forward_ad.dual_level():
            torch.testing.assert_close(plain(q, k, v), plain(q.clone(), k, v))  # no tangents, no error
            for dual in (torch.autograd.forward_ad.make_dual(x, x) for x in (q, q.clone().requires_grad_())):
                tangent = torch.autograd.forward_ad.unpack_dual(plain(dual, k, v)).tangent
                torch.testing.assert_close(tangent.detach(), want)
            learned = torch.autograd.forward_ad.unpack_dual(att(q, k, v, w=torch.autograd.forward_ad.make_dual(w, w)))
            torch.testing.assert_close(learned.tangent, slope)


# -- gradients --------------------------------------------------------------------------------------------------------


def learning(att, **more):
    """Arrays that require gradients, after calls of `att` on others like them that leave a record."""
    for _ in range(2):
        arrays = [x.requires_grad_() for x in drawn(seed=1, **more)]
        att(*arrays).sum().backward()
    assert len(paths(att)) == 1
    return [x.requires_grad_() for x in drawn(**more)]


def anew(arrays, cotangent, mask="causal", wanted=None):
    """The output and the gradients of a first call."""
    out = attention(mask)(*arrays)
    return out, *torch.autograd.grad(out, wanted or arrays, cotangent)


@pytest.fixture
def generic(monkeypatch):
    """How often gradients take the way of a first call."""
    seen, gradients = [], autograd.gradients
    monkeypatch.setattr(autograd, "gradients", lambda *given, **how: seen.append(given) or gradients(*given, **how))
    return seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        pytest.param({"kv_heads": 2, "v_dim": 24}, marks=pytest.mark.exhaustive),
        {"q_len": 70, "kv_len": 90},
        {"q_len": 1},
    ],
)
def test_bits_of_gradients(dtype, shape, generic):
    mask = "causal" if dtype == torch.bfloat16 else BAND
    att = attention(mask)
    arrays = learning(att, dtype=dtype, **shape)
    generic.clear()
    out = att(*arrays)
    cotangent = torch.randn(out.shape).to(dtype)
    found = torch.autograd.grad(out, arrays, cotangent)
    assert not generic
    for got, want in zip((out, *found), anew(arrays, cotangent, mask), strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 1, "q_len": 1600, "kv_len": 16},
        {"heads": 2, "q_len": 400, "kv_len": 64},
        {"heads": 1, "q_len": 900, "kv_len": 300},
    ],
)
def test_bits_of_gradients_by_several_threads(shape):
    """Fewer key heads than threads: the first calls, those like one before and those that ask for lse are alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        att = attention()
        arrays = learning(att, batch=1, kv_heads=1, **shape)
        cotangent = torch.randn(1, shape["heads"], shape["q_len"], 16)
        found = torch.autograd.grad(att(*arrays), arrays, cotangent)
        with_lse = torch.autograd.grad(attention()(*arrays, return_lse=True)[0], arrays, cotangent)
        for got, want, other in zip(found, anew(arrays, cotangent)[1:], with_lse, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            torch.testing.assert_close(other, want, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("needed", [(True, True, True), (False, True, False), (True, False, True)])
def test_gradients_that_are_asked_for(needed, generic):
    att = attention()
    arrays = [x.requires_grad_(n) for x, n in zip(learning(att), needed, strict=True)]
    wanted = [x for x in arrays if x.requires_grad]
    generic.clear()
    out = att(*arrays)
    found = torch.autograd.grad(out, wanted, out.detach())
    assert not generic
    for got, want in zip(found, anew(arrays, out.detach(), wanted=wanted)[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_strides_of_gradients():
    att = attention()
    q, k, v = learning(att)
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    wide = torch.randn(2, 4, 20, 32).requires_grad_()
    for arrays, wanted in (((q, k, v), (q, k, v)), ((wide[..., ::2], k, v), (wide, k, v))):
        for cotangent in (
            torch.ones(()).expand(2, 4, 20, 16), torch.randn(2, 20, 4, 16).transpose(1, 2),
            torch._neg_view(torch.randn(2, 4, 20, 16)), torch._efficientzerotensor((2, 4, 20, 16)),
        ):  # fmt: skip
            found = torch.autograd.grad(att(*arrays), wanted, cotangent)
            for got, want in zip(found, anew(arrays, cotangent.clone(), wanted=wanted)[1:], strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_zeros_without_memory(backend):
    """Such tensors have no address: as cotangents, sinks and tables they are written out, and have gradients."""
    arrays = [x.requires_grad_() for x in drawn()]
    att = fk.compile("causal", "score + w[h] * (k - q)", backend=backend)
    zeros = torch._efficientzerotensor
    out, lse = att(*arrays, w=torch.ones(4), return_lse=True)
    for wanted, given in ((out, zeros(out.shape)), (lse, zeros(lse.shape))):
        assert all((g == 0).all() for g in torch.autograd.grad(wanted, arrays, given, retain_graph=True))
    for more in ({"w": torch.ones(4), "sinks": zeros((4,))}, {"w": zeros((4,))}):
        written = {n: x.clone() for n, x in more.items()}
        torch.testing.assert_close(att(*arrays, **more), att(*arrays, **written), rtol=0, atol=0)
    sinks, written = zeros((4,)).requires_grad_(), torch.zeros(4, requires_grad=True)
    found, want = (torch.autograd.grad(att(*arrays, w=torch.ones(4), sinks=x).sum(), x)[0] for x in (sinks, written))
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    want = att(*arrays, w=torch.zeros(4))
    for flat in (None, True):  # a plan holds the table
        torch.testing.assert_close(att(*arrays, plan=att.plan(20, 20, 2, 4, w=zeros((4,)), flat=flat)), want)
    documents = fk.compile("causal & same(doc)", backend=backend)
    want = documents(*arrays, doc=torch.zeros(20, dtype=torch.int64))
    for _ in range(4):  # the last ones find a prepared call by the entries of the table
        torch.testing.assert_close(documents(*arrays, doc=zeros((20,), dtype=torch.int64)), want, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_sparse_arrays_are_refused_by_every_call(backend):
    arrays, att = drawn(), fk.compile("causal", backend=backend)
    for _ in range(4):  # anew, prepared, repeated
        for i, name in enumerate("qkv"):
            for sparse in (arrays[i].to_sparse(), arrays[i].to_mkldnn()):
                with pytest.raises(fk.ShapeError, match=f"{name} is sparse, of layout {sparse.layout}"):
                    att(*arrays[:i], sparse, *arrays[i + 1 :])
        att(*arrays)


@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_a_backward_is_not_recorded_without_its_forward(backend):
    q, k, v = (x.requires_grad_() for x in drawn())
    att = fk.compile("causal", backend=backend)
    for _ in range(4):  # anew, prepared, repeated
        out = att(q, k, v)
        d = torch.ones_like(out)
        torch.autograd.grad(out, q, d, retain_graph=True)
        gradient = lambda d: torch.autograd.grad(out, q, d, retain_graph=True)[0]  # noqa: B023, E731
        for recorded in (make_fx(gradient), torch.func.functionalize(gradient)):
            with pytest.raises(BackwardError, match="its forward ran before"):
                recorded(d)
        with (
            torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(BackwardError, match="its forward ran before"),
        ):
            gradient(d)
        with FlopCounterMode(display=False):
            gradient(d)


def test_lengths_that_vary_and_parameters_are_repeated():
    att = attention()
    for _ in range(2):
        for length in range(1, 40):
            arrays = [x.requires_grad_() for x in drawn(q_len=length, kv_len=length)]
            att(*arrays).sum().backward()
            with torch.no_grad():
                att(*arrays)
    assert len(paths(att)) == 39  # a call with gradients and one without have one
    att = attention()
    q, k, v = drawn()
    for _ in range(2):
        att(torch.nn.Parameter(q), k, v)
        att(q, k, v, sinks=torch.zeros(4))
        att(q, k, v)
    assert len(paths(att)) == 1


def gradients_of_gradients(att, arrays):
    """The gradient by q of a loss, with its graph, and the gradient of that."""
    (first,) = torch.autograd.grad(att(*arrays).square().sum(), arrays[:1], create_graph=True)
    return first, torch.autograd.grad(first.sum(), arrays[0])[0]


def test_repeated_calls_have_gradients_of_gradients():
    att = attention()
    arrays = learning(att)
    for ours, of_a_first_call in zip(gradients_of_gradients(att, arrays), gradients_of_gradients(attention(), arrays)):
        torch.testing.assert_close(ours.detach(), of_a_first_call.detach(), rtol=1e-6, atol=1e-6)
    # float32 has too few digits: tangents take the output from other operators than its gradients do
    q, k, v = (x.detach().double() for x in arrays)
    tangent = torch.func.jvp(
        torch.func.grad(lambda q: att(q, k, v).square().sum()), (q,), (torch.ones_like(q),)
    )[1]  # fmt: skip
    torch.testing.assert_close(gradients_of_gradients(att, [q.requires_grad_(), k, v])[1], tangent)


def test_a_checkpoint_may_run_either_way():
    att = attention()
    q, k, v = (x.requires_grad_() for x in drawn())
    want = anew((q, k, v), torch.ones(2, 4, 20, 16))[1:]
    for _ in range(3):  # the call and its repetition: anew, prepared, repeated
        out = torch.utils.checkpoint.checkpoint(att, q, k, v, use_reentrant=False)
        for got, true in zip(torch.autograd.grad(out.sum(), (q, k, v)), want, strict=True):
            torch.testing.assert_close(got, true, rtol=0, atol=0)


def test_repeated_calls_notice_changed_saved_tensors():
    """Arrays that were written to are noticed, and hooks may give back other tensors of equal entries."""
    att = attention()
    q, k, v = learning(att)
    out = att(q * 1, keys := k * 1, v)
    keys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    cotangent = torch.randn(2, 4, 20, 16)
    apart = lambda x: x.clone().unsqueeze(-1).expand(*x.shape, 2).contiguous()[..., 0]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(apart, lambda x: x):
        out = att(q, k, v)
    found = torch.autograd.grad(out, (q, k, v), cotangent)
    for got, want in zip(found, anew((q, k, v), cotangent)[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_default_device_in_the_backward():
    att = attention()
    arrays = learning(att)
    out = att(*arrays)
    with torch.device("meta"):
        found = torch.autograd.grad(out, arrays, torch.ones(out.shape, device="cpu"))
    assert all(g.is_cpu for g in found)


def test_calls_with_gradients_after_calls_without_are_repeated(generic):
    att = attention()
    plain = drawn()
    att(*plain), att(*plain)
    learning_arrays = [x.requires_grad_() for x in drawn()]
    for _ in range(3):
        generic.clear()
        torch.autograd.grad(att(*learning_arrays).sum(), learning_arrays)
    assert len(paths(att)) == 1
    assert len(generic) == 1  # the cotangent of a sum has no memory of its own


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("data", [torch.ones(64)[:3], torch.ones(4, 4)])
def test_learned_tables_of_a_new_shape_are_checked_again(data, planned):
    """The last entry of a shorter one stood for those that are missing; other axes were errors of other libraries."""
    slope, q = torch.nn.Parameter(torch.ones(4)), torch.randn(1, 4, 64, 16)
    att = fk.compile("causal", fk.score("score + slope[h] * (k - q)", slope=slope))
    how = {"plan": att.plan(64, 64, 1, 4)} if planned else {}
    for _ in range(2):
        want = att(q, q, q, **how)
    slope.data = data
    with pytest.raises(fk.ParameterError, match=r"`slope` (has 3 entries|is a table with 1 axis|has another shape)"):
        att(q, q, q, **how)
    slope.data = torch.ones(8)[::2]
    np.testing.assert_allclose(att(q, q, q, **how).detach(), want.detach(), atol=1e-6)
