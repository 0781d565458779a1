"""Weights in place of the softmax in torch: against dense attention written out in torch's own operators."""

import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiers import default_only
from support.torch.weighted import CASES, DIM, HEADS, KV_HEADS, V_DIM, arrays

import frisket as fk
from frisket.caches import torch as caches
from frisket.dsl.errors import BackwardError, ParameterError
from frisket.runtime.masks.mask import program

NATIVE = pytest.mark.skipif(bool(fk.backends()["cpp"]), reason="no C++ compiler")
EVERY = default_only(CASES, "sigmoid", "retention", "hidden by a table")


def near(got, want, tolerance=1e-10):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_weighted_rows_and_first_gradients_are_dense_ones(name):
    case, qkv = CASES[name], arrays()
    params = {n: x.clone().requires_grad_() for n, x in case.params.items()}
    leaves = [*(x.requires_grad_() for x in qkv), *params.values()]
    out = case.attention(backend="aten")(*qkv, **params)
    want, _ = case.dense(*qkv, **params)
    dout = torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, leaves, dout)
    near([out, *got], [want, *torch.autograd.grad(want, leaves, dout)])


@pytest.mark.parametrize("name", EVERY)
def test_weighted_rows_have_derivatives_of_any_order(name):
    case, qkv = CASES[name], arrays(13, 13)
    params = {n: x[:13] if n == "t" else x for n, x in case.params.items()}
    att = case.attention(backend="aten")
    tangents = tuple(torch.randn_like(x) for x in qkv)

    def ours(*qkv):
        return (att(*qkv, **params) ** 2).sum()

    def theirs(*qkv):
        return (case.dense(*qkv, **params)[0] ** 2).sum()

    def second(f):
        return torch.func.jvp(torch.func.grad(f, (0, 1, 2)), tuple(qkv), tangents)

    near(torch.func.jvp(ours, tuple(qkv), tangents), torch.func.jvp(theirs, tuple(qkv), tangents))
    for x, y in zip(second(ours), second(theirs), strict=True):
        near(x, y, 1e-9)


@pytest.mark.parametrize("divide", ["w[h] * count", "abs(total) + count"])
def test_counted_keys_of_mapped_calls_have_derivatives(divide):
    """A score mod that may give -inf: which keys are counted hangs on mapped scores."""
    q, k, v = arrays(13, 13)
    t, w = torch.linspace(-1, 1, 13, dtype=q.dtype), torch.linspace(0.5, 1, HEADS, dtype=q.dtype)
    att = fk.compile("causal", "score * t[k]", weight="sigmoid(score)", divide=divide, backend="aten", t=t)
    learned = {"w": w} if "w" in divide else {}
    func = torch.func

    def loss(q):
        return att(q, k, v, **learned).sin().sum()

    mapped = torch.stack([q, 2 * q])
    for one in (lambda q: func.jvp(loss, (q,), (q,))[1], lambda q: func.jvp(func.grad(loss), (q,), (q,))[1],
                func.grad(lambda q: func.grad(loss)(q).square().sum())):  # fmt: skip
        near([func.vmap(one)(mapped)], [torch.stack([one(x) for x in mapped])])


@pytest.mark.parametrize("name", EVERY)
def test_compiled_graphs_weigh_pairs_as_eager_calls_do(name):
    case, qkv = CASES[name], arrays(dtype=torch.float32)
    att, params = case.attention(backend="aten"), {n: x.float() for n, x in case.params.items()}
    run = torch.compile(lambda *qkv: att(*qkv, **params), fullgraph=True, backend="aot_eager")
    qkv = [x.requires_grad_() for x in qkv]
    got, want = run(*qkv), att(*qkv, **params)
    near([got, *torch.autograd.grad(got.sum(), qkv)], [want, *torch.autograd.grad(want.sum(), qkv)], 1e-5)


def test_texts_of_a_weight_are_compiled_in_a_graph():
    q, k, v = arrays(dtype=torch.float32)

    def attend(q, k, v):
        return fk.attention(q, k, v, "causal", "softcap(9)", weight="relu(score) ** 2", divide="count")

    near([torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)], [attend(q, k, v)], 1e-6)


def test_softmax_written_as_a_weight_is_the_same_attention():
    """It is one attention with one plan, so it has the kernels, the lse and the sinks of the softmax."""
    att = fk.compile("causal", "softcap(5)", weight="exp(score)", divide="total")
    assert att == fk.compile("causal", "softcap(5)")
    assert att.program.weight is None


def test_positive_weights_have_an_lse_that_merges():
    q, k, v = arrays()
    parts = [
        fk.attention(q, k, v, m, weight="sigmoid(score)", divide="total", backend="aten", return_lse=True)
        for m in ("causal & k < 9", "causal & k >= 9")
    ]
    whole = fk.attention(q, k, v, "causal", weight="sigmoid(score)", divide="total", backend="aten", return_lse=True)
    near(fk.merge(*parts), whole)


def test_dropout_is_behind_the_sum_of_weights():
    q, k, v = arrays()
    att = fk.compile("causal", weight="sigmoid(score)", divide="total", dropout=0.4, backend="aten")
    assert att.check(q, k, v, seed=3).good
    plain = fk.compile("causal", weight="sigmoid(score)", divide="total", backend="aten")
    ones = torch.ones_like(v)
    near([plain(q, k, ones)], [torch.ones_like(plain(q, k, ones))])
    assert att(q, k, ones, seed=3).std() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_of_weighted_rows_pass_the_check(dtype):
    for case in CASES.values():
        if case.divide is None or "total" not in case.divide or "abs" not in case.divide:
            params = {n: x.float() for n, x in case.params.items()}
            assert case.attention(backend="aten").check(*arrays(dtype=dtype), **params).good


def test_rows_that_see_nothing_take_any_cotangent():
    q, k, v = (x.requires_grad_() for x in arrays())
    for case in (CASES["nothing to divide"], CASES["off by one"]):
        out = case.attention(backend="aten")(q, k, v, **case.params)
        dout = torch.ones_like(out)
        dout[:, :, 0] = torch.nan
        assert not out[:, :, 0].any()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out, (q, k, v), dout))


def test_rows_of_tiles_without_keys_are_zero_and_learn_nothing():
    q, k, v = (x.requires_grad_() for x in arrays())
    att = fk.compile("k + 20 < q", weight="sigmoid(score)", divide="total", backend="aten", tile=(16, 16))
    for case in (att, fk.compile(att.mask, weight="sigmoid(score)", backend="aten", tile=(16, 16))):
        out = case(q, k, v)
        of_q, of_k, _ = torch.autograd.grad((out**2).sum(), (q, k, v))
        assert not any(x[:, :, :21].any() for x in (out, of_q))
        assert all(x.any() for x in (out[:, :, 21:], of_q[:, :, 21:], of_k[:, :, :16]))


@pytest.mark.parametrize("backend", ["aten", "xla"])
def test_a_divisor_may_read_a_table_in_two_places(backend):
    q, k, v = arrays(7, 9)
    c, g = torch.rand(4, dtype=torch.float64, requires_grad=True), torch.rand(2, HEADS, 7, V_DIM).double()
    w = torch.sigmoid(q @ k.repeat_interleave(2, 1).mT / DIM**0.5)
    divisor = w.sum(-1) + c[:, None] * c[torch.arange(7) % 4]
    want = torch.autograd.grad((w @ v.repeat_interleave(2, 1) / divisor[..., None] * g).sum(), c)
    att = fk.compile(weight="sigmoid(score)", divide="total + c[h] * c[q % 4]", backend=backend)
    if backend == "aten":
        near(torch.autograd.grad((att(q, k, v, c=c) * g).sum(), c), want)
    else:
        q, k, v, x, g = (jnp.asarray(x.detach().numpy(), jnp.float32) for x in (q, k, v, c, g))
        got = jax.jit(jax.grad(lambda x: (att(q, k, v, layout="bhsd", c=x) * g).sum()))(x)
        np.testing.assert_allclose(got, want[0], rtol=1e-4)


@pytest.mark.parametrize("backend", ["aten", "xla"])
def test_nan_cotangents_of_visible_rows_reach_their_keys(backend):
    """A row of opposite weights has a total of 0 and an entry of 0, as a row has that sees no key."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    v, dout = torch.tensor([[2.0, 5.0], [2.0, 1.0]])[None, None], torch.full((1, 1, 1, 2), torch.nan)
    att = fk.compile(weight="score", divide="count", backend=backend)
    if backend == "aten":
        (dv,) = torch.autograd.grad(att(q, k, v.requires_grad_()), v, dout)
    else:
        q, k, v, dout = (jnp.asarray(x.numpy()) for x in (q, k, v, dout))
        (dv,) = jax.vjp(lambda v: att(q, k, v, layout="bhsd"), v)[1](dout)
    assert np.isnan(np.asarray(dv)).all()


def test_hidden_keys_of_a_weighted_cache_may_hold_anything():
    q, k, v = arrays()
    k[:, :, 30:], v[:, :, 30:] = torch.nan, torch.inf
    for case in (CASES["sigmoid"], CASES["relu squared"], CASES["retention"]):
        att = fk.compile(f"({case.mask}) & k < 30", weight=case.weight, divide=case.divide, backend="aten")
        assert att(q, k, v, **case.params).isfinite().all()


def test_weights_survive_copies_and_pickles():
    att = fk.compile("causal", weight=fk.weight("sigmoid(score + bias)", bias=-1.0), backend="aten")
    again = pickle.loads(pickle.dumps(att))
    q, k, v = arrays()
    assert again == att
    assert torch.equal(again(q, k, v), att(q, k, v))
    assert att != fk.compile("causal", weight=fk.weight("sigmoid(score + bias)", bias=-2.0), backend="aten")


def test_functions_are_weights_and_capture_tables():
    q, k, v = arrays()
    gamma = CASES["retention"].params["gamma"].clone().requires_grad_()
    att = fk.compile("causal", weight=lambda score, b, h, q, k: score * gamma[h] ** (q - k), backend="aten")
    text = fk.compile("causal", weight="score * gamma[h] ** (q - k)", backend="aten")
    one, other = att(q, k, v), text(q, k, v, gamma=gamma)
    near([one, *torch.autograd.grad(one.sum(), [gamma])], [other, *torch.autograd.grad(other.sum(), [gamma])])


def test_five_weights_of_one_mask_and_score_stay_apart():
    """In both orders, on every way to call: no memo of one weight serves another."""
    q, k, v = arrays(dtype=torch.float32)
    weights = [(None, None), ("exp(score)", None), ("exp(score)", "count"), ("relu(score)", "count"), ("score", None)]

    def calls(weight, divide):
        att = fk.compile("causal", "softcap(7)", weight=weight, divide=divide, backend="aten")
        yield att(q, k, v)
        yield fk.attention(q, k, v, "causal", "softcap(7)", weight=weight, divide=divide, backend="aten")
        yield att(q, k, v, plan=att.plan(37, 37, batch=2, heads=HEADS))
        yield torch.vmap(lambda q, k, v: att(q[None], k[None], v[None])[0])(q, k, v)
        yield att(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bshd").transpose(1, 2)
        text = "mask = causal\nscore = softcap(7)" + (f"\nweight = {weight}" if weight else "")
        whole = program(text + (f"\ndivide = {divide}" if divide else ""))
        yield fk.compile(whole, backend="aten")(q, k, v)
        yield torch.as_tensor(
            fk.reference(q, k, v, "causal", "softcap(7)", weight=weight, divide=divide), dtype=torch.float32
        )

    first = [list(calls(*w)) for w in weights]
    second = [list(calls(*w)) for w in reversed(weights)][::-1]
    for of_weight in (*first, *second):
        for x in of_weight[1:]:
            torch.testing.assert_close(x, of_weight[0], rtol=1e-5, atol=1e-5)
    for i, x in enumerate(first):
        assert all((x[0] - y[0]).abs().max() > 1e-3 for y in first[:i])


@NATIVE
def test_calls_after_the_first_have_its_gradients():
    """Native kernels take later calls by the addresses of arrays, unless rows are weighted."""
    case, qkv = CASES["relu squared"], [x.requires_grad_() for x in arrays(dtype=torch.float32)]
    att = case.attention(backend="cpp")
    want = torch.autograd.grad(case.dense(*qkv)[0].sum(), qkv)
    for _ in range(3):
        near(torch.autograd.grad(att(*qkv).sum(), qkv), want, 1e-4)


def test_parts_of_a_weighted_text_are_read_or_refused():
    whole = fk.compile("mask = causal\nscore = softcap(5)\nweight = relu2\ndivide = count")
    assert fk.compile("mask = causal\nscore = softcap(5)\nweight = relu2", divide="count") == whole
    assert fk.compile("causal", "softcap(5)", weight="weight = relu2\ndivide = count") == whole
    assert fk.compile(fk.Program(fk.mask("causal"), fk.score("softcap(5)")), weight="relu2", divide="count") == whole
    for why, parts in {
        "has a line `weight = ...`\n  give the whole": {"score": "score = softcap(5)\nweight = relu2"},
        "has a line `mask = ...`": {"weight": "mask = causal\nweight = relu2"},
        "a Program has its divide already": {"mask": "weight = relu2\ndivide = count", "divide": "total"},
        "there is a `divide` and no weight": {"mask": fk.Program(fk.mask("causal")), "divide": "total"},
        "weight is a text or a function, not int; a parameter has another name": {"mask": "causal", "weight": 3},
        'divide is a text, not function.*\n  write what to compute: divide="count"': {
            "weight": "relu2",
            "divide": lambda total: total,
        },
        'divide is a text, not float.*\n  write what to compute: divide="96.0"': {"weight": "relu2", "divide": 96.0},
    }.items():
        with pytest.raises(ParameterError, match=why):
            fk.compile(**parts)
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ParameterError, match="did you mean `score`"):
        fk.attention(x, x, x, "causal", weight="sigmoid(scoer)")


@pytest.mark.parametrize(
    ("weight", "score", "exponent"),
    [
        ("exp(score)", None, "score"),
        ("1 + exp(2 * score)", "score + t[k]", "2 * (score + t[k])"),
        ("exp(min(score, c))", None, "min(score, c)"),
        ("exp(min(score, 90))", None, "min(score, 90.0)"),
        ("2.0 ** score", None, "score"),
        ("exp(min(score, 8))", None, None),
        ("exp(score)", "softcap(20)", None),
        ("exp(-(score ** 2))", None, None),
        ("sigmoid(score + c)", None, None),
        ("relu(score) ** 2", None, None),
        ("score * 0.9 ** (q - k)", None, None),
    ],
)
def test_facts_name_exponentials_that_may_overflow(weight, score, exponent):
    att = fk.compile("causal", score, weight=weight)
    names = {n: torch.zeros(64) if n == "t" else 100.0 for n in ("t", "c") if n in att.program.names}
    facts = att.stages(q_len=64, **names).text("facts")
    assert ("overflow" in facts) == (exponent is not None)
    if exponent and not names:
        assert f"where `{exponent}` is above" in facts
    if "c" in names:  # a value decides
        assert "overflow" not in att.stages(q_len=64, c=8.0).text("facts")


def test_parts_of_a_softmax_alone_are_refused():
    q, k, v = arrays()
    att = fk.compile("causal", weight="relu(score)", divide="count", backend="aten")
    for options, why in (
        ({"sinks": torch.zeros(HEADS)}, "sinks are logits of a softmax"),
        ({"return_max": True}, "return_max belongs to a softmax"),
        ({"return_lse": True}, "the sum of positive numbers\n  leave out return_lse"),
    ):
        with pytest.raises(ParameterError, match=why):
            att(q, k, v, **options)
    with pytest.raises(ParameterError, match="add them to `divide`"):
        fk.compile("causal", weight="relu(score)", sinks=1.0)
    with pytest.raises(ParameterError, match='give weight=, such as weight="exp'):
        fk.compile("causal", divide="total")
    gamma = torch.ones(HEADS, requires_grad=True)
    both = fk.compile("gamma[h] > 0.5 & q >= k", weight="score * gamma[h]", backend="aten")
    with pytest.raises(BackwardError, match="both the mask and the weight read it"):
        both(q, k, v, gamma=gamma)


def test_sequences_of_a_nested_tensor_are_weighted_apart():
    att, g = CASES["relu squared"].attention(backend="aten"), torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 2, 8, generator=g) for n in (5, 19, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    wanted = [att(x, x, x)[0] for x in (part.transpose(0, 1)[None] for part in parts)]
    near(att(nested, nested, nested).unbind(), wanted, 1e-5)


def test_weighted_rows_reordered_planned_and_at_an_origin():
    q, k, v = arrays(64, 64)
    program = {"weight": "relu(score) ** 2", "divide": "count", "backend": "aten"}
    att = fk.compile("causal & same(doc) & q % 4 == k % 4", doc=torch.arange(64) // 16, **program)
    want = att(q, k, v)
    order = fk.reorder(att.mask, 64, 64, block=(16, 16), moving=0.0)
    near([fk.compile(att.mask, reorder=order, **program)(q, k, v)], [want])
    near([att(q[:, :, 32:], k, v, origin=(0, 0, 32, 0), sizes=(2, HEADS, 64, 64))], [want[:, :, 32:]])
    flat = fk.compile("causal & same(doc) & q % 4 == k % 4", **program)
    plan = flat.plan(64, 64, batch=2, heads=HEADS, flat=True, doc=torch.arange(64) // 16)
    near([flat(q, k, v, plan=plan)], [want])


def test_sequences_divide_rows_at_their_own_positions():
    q, k, v = (x.requires_grad_() for x in arrays(9, 40, torch.float32))
    att = fk.compile("causal", weight="sigmoid(score)", divide="total + float(q)", backend="aten")
    starts, dout = torch.tensor([3, 31]), torch.randn(2, HEADS, 9, V_DIM)
    together = att(q, k, v, origin=(0, 0, starts, 0))
    alone = [att(*(x[b : b + 1] for x in (q, k, v)), origin=(0, 0, int(n), 0)) for b, n in enumerate(starts)]
    grads = [torch.autograd.grad(x, (q, k, v), dout) for x in (together, torch.cat(alone))]
    near([together, *grads[0]], [torch.cat(alone), *grads[1]], 1e-5)
    sums = att(q, k, v, origin=(0, 0, starts, 0), return_sums=True)[0]
    near([sums], [together], 1e-5)


def test_steps_over_a_cache_have_the_lse_of_a_call_or_refuse():
    q, k, v = arrays(30, 30, torch.float32)
    cache = caches.KVCache.create(2, 40, KV_HEADS, DIM, V_DIM).append(k, v)
    att = fk.compile("causal", weight="sigmoid(score)", divide="total", backend="aten")
    near(cache.attend(att, q[:, :, -1:], return_lse=True), [x[:, :, -1:] for x in att(q, k, v, return_lse=True)], 1e-5)
    ring = caches.RingKVCache.create(2, 10, KV_HEADS, DIM, V_DIM)  # shorter than the call, whose results are merged
    local = fk.compile("causal & window(9)", weight="sigmoid(score)", divide="total", backend="aten")
    ring.append(*(x[:, :, :9] for x in (k, v)))
    merged = ring.attention(local, *(x[:, :, 9:] for x in (q, k, v)), return_lse=True)
    near(merged, [x[:, :, 9:] for x in local(q, k, v, return_lse=True)], 1e-5)
    refused = {"return_max": True, "sinks": torch.zeros(HEADS)}
    for name, value in refused.items():
        with pytest.raises(ParameterError, match=r"belongs to a softmax|logits of a softmax"):
            cache.attend(att, q[:, :, -1:], **{name: value})
    with pytest.raises(ParameterError, match="the sum of positive numbers"):
        cache.attend(fk.compile("causal", weight="score", backend="aten"), q[:, :, -1:], return_lse=True)


@pytest.mark.parametrize("kind", ["plain", "ring", "int8"])
def test_steps_over_a_cache_are_weighted_as_the_whole_is(kind):
    q, k, v = arrays(30, 30, torch.float32)
    seen = lambda q, k: (q >= k) & (q - k < 24)  # noqa: E731
    case = replace(CASES["relu squared"], mask="causal & window(24)", seen=seen)
    att, cache = case.attention(backend="aten"), {
        "plain": lambda: caches.KVCache.create(2, 40, KV_HEADS, DIM, V_DIM),
        "ring": lambda: caches.RingKVCache.create(2, 24, KV_HEADS, DIM, V_DIM),
        "int8": lambda: caches.KVCache.create(2, 40, KV_HEADS, DIM, V_DIM, dtype=torch.int8),
    }[kind]()  # fmt: skip
    want, _ = case.dense(q, k, v)
    for i, n in ((0, 10), (10, 1), (11, 6), (17, 13)):
        got = cache.attention(att, *(x[:, :, i : i + n] for x in (q, k, v)))
        near([got], [want[:, :, i : i + n]], 0.05 if kind == "int8" else 1e-5)
