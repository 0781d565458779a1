"""Sums of weighted rows over disjoint keys: added and divided once they are the rows of all keys."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiers import default_only
from support.torch.weighted import CASES, DIM, HEADS, KV_HEADS, V_DIM, arrays

import frisket as fk
from frisket.caches import PagePool
from frisket.caches import jax as jax_caches
from frisket.caches import torch as caches
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.torch import decode

CUT, CUTS = "k >= low & k < high", [(0, 5), (5, 30), (30, 99), (99, 999)]  # the last part sees no key
EVERY = default_only(CASES, "off by one", "retention", "nothing to divide")


def near(got, want, tolerance=1e-10):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def in_parts(case, q, k, v, params, **options):
    """(out, sums) of a case, from parts of its keys."""
    mask = CUT if case.mask is None else f"({case.mask}) & {CUT}"
    layout = options.pop("layout", None)
    how = {"weight": case.weight, "divide": case.divide, **options}
    att = fk.compile(mask, case.score, **how)
    parts = [att(q, k, v, return_sums=True, low=a, high=b, layout=layout, **params) for a, b in CUTS]
    read = {n: x for n, x in params.items() if case.divide and f"{n}[" in case.divide}
    return fk.merge_sums(*parts, divide=case.divide, axes=layout, **read)


@pytest.mark.parametrize("name", CASES)
def test_merged_sums_and_their_gradients_are_dense_ones(name):
    case, qkv = CASES[name], arrays()
    params = {n: x.clone().requires_grad_() for n, x in case.params.items()}
    leaves = [*(x.requires_grad_() for x in qkv), *params.values()]
    out, sums = in_parts(case, *qkv, params, backend="aten")
    want, total = case.dense(*qkv, **params)
    cotangents = torch.randn(out.shape, dtype=out.dtype), torch.randn(total.shape, dtype=out.dtype)
    got = torch.autograd.grad([out, sums.total], leaves, cotangents)
    near([out, sums.total, *got], [want, total, *torch.autograd.grad([want, total], leaves, cotangents)])


@pytest.mark.parametrize("name", EVERY)
def test_jax_merged_sums_and_gradients_are_dense_ones(name):
    case, qkv = CASES[name], arrays()
    leaves = {n: x.clone().requires_grad_() for n, x in case.params.items()}
    want, total = case.dense(*(x.requires_grad_() for x in qkv), **leaves)
    cotangents = torch.randn(want.shape, dtype=want.dtype), torch.randn(total.shape, dtype=want.dtype)
    grads = torch.autograd.grad([want, total], [*qkv, *leaves.values()], cotangents)

    def of_jax(x):
        return jnp.asarray(x.detach().numpy(), jnp.float32)

    @jax.jit
    def both(qkv, params, cotangents):
        def run(qkv, params):
            out, sums = in_parts(case, *qkv, params, backend="xla", layout="bhsd")
            return out, sums.total

        results, pull = jax.vjp(run, qkv, params)
        return results, pull(cotangents)

    results, (of_arrays, of_params) = both(
        [of_jax(x) for x in qkv], {n: of_jax(x) for n, x in leaves.items()}, tuple(map(of_jax, cotangents))
    )
    for x, y in zip([*results, *of_arrays, *of_params.values()], [want, total, *grads], strict=True):
        np.testing.assert_allclose(x, y.detach().numpy(), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["aten", "xla"])
def test_sums_of_narrow_dtypes_are_near_dense_rows(backend, dtype):
    case = CASES["relu squared"]
    qkv = arrays(dtype=dtype)
    want, total = case.dense(*(x.double() for x in qkv))
    if backend == "xla":
        given = [jnp.asarray(x.float().numpy(), str(dtype).removeprefix("torch.")) for x in qkv]
        out, sums = in_parts(case, *given, {}, backend=backend, layout="bhsd")
        assert (out.dtype, sums.numerator.dtype) == (given[0].dtype, jnp.float32)
        out, sums = torch.from_numpy(np.array(out, np.float64)), torch.from_numpy(np.array(sums.total))
    else:
        out, sums = in_parts(case, *qkv, {}, backend=backend)
        assert (out.dtype, sums.numerator.dtype) == (dtype, torch.float32)
        sums = sums.total
    step = torch.finfo(dtype).eps
    assert (out.double() - want).abs().max() <= (2 * step + 1e-6) * want.abs().max()
    assert (sums.double() - total).abs().max() <= 1e-5 * total.abs().max()


def test_sums_of_float16_may_leave_its_range():
    q, k, v = arrays(dtype=torch.float16)
    how = {"weight": "exp(min(score, 8) + 40)", "divide": "total"}
    parts = [fk.attention(q, k, v, m, return_sums=True, backend="aten", **how) for m in ("k < 9", "k >= 9")]
    out, sums = fk.merge_sums(*parts, divide="total")
    assert sums.numerator.isfinite().all()
    assert sums.total.max() > 1e17
    near([out.float()], [fk.attention(q, k, v, backend="aten").float()], 2e-3)


def test_compiled_attention_gives_its_own_rows_with_sums():
    q, k, v = arrays()
    gamma = torch.linspace(0.8, 0.97, HEADS, dtype=torch.float64)
    program = {"weight": "retention(gamma)", "divide": "max(abs(total), c + q)", "gamma": gamma, "backend": "aten"}
    for known, params in (({}, {"c": 0.5}), ({"c": 0.5}, {})):
        att = fk.compile("causal", **program, **known)
        out, sums = att(q, k, v, return_sums=True, **params)
        near([out], [att(q, k, v, **params)])
        assert sums.count[0, 0].tolist() == [*range(1, 38)]
        near([sums.numerator / torch.maximum(sums.total.abs(), 0.5 + torch.arange(37))[..., None]], [out])


def test_divisors_of_parts_read_places_sizes_and_segments():
    q, k, v = arrays()
    cu = torch.tensor([0, 10, 25, 37])
    divide = "float(segment(cu, q) + 1) + float(q) / float(Q_LEN) + total * total + float(b)"
    program = {"weight": "sigmoid(score)", "divide": divide, "cu": cu, "backend": "aten"}
    whole = fk.attention(q, k, v, "causal", **program)
    out, _ = fk.attention(q, k, v, "causal", return_sums=True, **program)
    near([out], [whole])
    some = [
        fk.attention(
            q[:, :, 20:], k[:, :, a:b], v[:, :, a:b], "causal", return_sums=True,
            origin=(0, 0, 20, a), sizes=(2, HEADS, 37, 37), **program,
        )
        for a, b in ((0, 8), (8, 37))
    ]  # fmt: skip
    out, _ = fk.merge_sums(*some, divide=divide, cu=cu, origin=(0, 0, 20, 0), sizes=(2, HEADS, 37, 37))
    near([out], [whole[:, :, 20:]])


def test_sums_of_an_order_are_those_of_its_tokens():
    q, k, v = torch.randn(3, 1, 2, 256, 16, dtype=torch.float64)
    program = {"weight": "sigmoid(score)", "divide": "count + float(q)", "backend": "aten"}
    order = fk.reorder("causal & k % 4 == 0", 256, 256, block=(32, 32))
    out, sums = fk.compile("causal & k % 4 == 0", reorder=order, **program)(q, k, v, return_sums=True)
    want, plain = fk.attention(q, k, v, "causal & k % 4 == 0", return_sums=True, **program)
    near([out, *sums], [want, *plain])


def test_rows_without_a_divisor_are_zero_with_their_gradients():
    q, k, v = (x.requires_grad_() for x in arrays())
    parts = [fk.attention(q, k, v, m, weight="score", return_sums=True, backend="aten") for m in ("k < 9", "k >= 9")]
    out, sums = fk.merge_sums(*parts, divide="total - total")
    assert not out.any()
    assert sums.numerator.abs().min() > 0
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_numpy_sums_are_merged_by_a_named_layout():
    q, k, v = arrays()
    program = {"weight": "sigmoid(score)", "return_sums": True, "backend": "aten"}
    parts = [fk.attention(q, k, v, CUT, low=a, high=b, **program) for a, b in CUTS]
    of_numpy = [(out.numpy(), fk.Sums(*(x.numpy() for x in sums))) for out, sums in parts]
    got, _ = fk.merge_sums(*of_numpy, divide="total + t[h]", axes="bhsd", t=np.arange(4.0))
    near([torch.from_numpy(got)], [fk.merge_sums(*parts, divide="total + t[h]", t=torch.arange(4.0))[0]])


def test_parts_in_numpy_are_merged_without_jax(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax")
    q, k, v = arrays()
    parts = [fk.attention(q, k, v, m, backend="aten", return_lse=True) for m in ("k < 9", "k >= 9")]
    out, _ = fk.merge(*(tuple(x.numpy() for x in part) for part in parts), axes="bhsd")
    near([torch.from_numpy(out)], [fk.attention(q, k, v, backend="aten")])


def test_sums_of_a_paged_cache_are_those_of_its_tokens():
    q, k, v = arrays(1, 37)
    pool = PagePool(8, 16)
    for name in range(2):
        pool.allocate(name, 37)
    cache = caches.PagedKVCache.create(8, 16, 2, 3, KV_HEADS, DIM, V_DIM, dtype=q.dtype)
    cache = cache.seat(pool, [0, 1], 37).append(k, v)
    att = fk.compile("causal", weight="sigmoid(score)", divide="total + float(KV_LEN)", backend="aten")
    out, sums = cache.attend(att, q, return_sums=True)
    near([out], [cache.attend(att, q)])
    plain = fk.compile("causal", weight="sigmoid(score)", backend="aten")
    near(sums, plain(q, k, v, origin=(0, 0, 36, 0), return_sums=True)[1])


def test_calls_without_keys_have_sums_of_zero():
    q, k, v = arrays()
    for weight, divide in (("sigmoid(score)", "total + 1"), ("score", None)):
        out, sums = fk.attention(q, k[:, :, :0], v[:, :, :0], weight=weight, divide=divide, return_sums=True)
        assert not any(x.any() for x in (out, *sums))
        assert sums.count.shape == q.shape[:3]
    _, lse = fk.attention(q, k[:, :, :0], v[:, :, :0], weight="sigmoid(score)", divide="total", return_lse=True)
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", ["dense", "cpp"])
@pytest.mark.skipif(bool(fk.backends()["cpp"]), reason="no C++ compiler")
def test_backends_count_keys_for_sums_alike(backend):
    case, qkv = CASES["off by one"], arrays(dtype=torch.float32)
    params = {n: x.float() for n, x in case.params.items()}
    near(in_parts(case, *qkv, params, backend=backend)[1], in_parts(case, *qkv, params, backend="aten")[1], 1e-5)


@pytest.mark.parametrize("name", default_only(CASES, "off by one", "linear"))
def test_compiled_graphs_hold_sums_as_eager_calls_do(name):
    case, qkv = CASES[name], [x.requires_grad_() for x in arrays(dtype=torch.float32)]
    params = {n: x.float().requires_grad_() for n, x in case.params.items()}
    att = case.attention(backend="aten")

    def run(q, k, v, params):
        parts = [
            att(
                q, k[:, :, a:b], v[:, :, a:b], origin=(0, 0, 0, a), sizes=(2, HEADS, 37, 37), return_sums=True, **params
            )
            for a, b in ((0, 9), (9, 37))
        ]
        read = {n: x for n, x in params.items() if case.divide and f"{n}[" in case.divide}
        out, sums = fk.merge_sums(*parts, divide=case.divide, **read)
        return parts[0][0] + out, *sums

    leaves = [*qkv, *params.values()]
    got, want = torch.compile(run, fullgraph=True, backend="aot_eager")(*qkv, params), run(*qkv, params)
    near(got, want, 1e-5)
    (got, want) = (torch.autograd.grad(sum(x.sum() for x in out[:3]), leaves) for out in (got, want))
    near(got, want, 1e-5)


def test_numbers_of_sums_change_between_calls_of_a_graph():
    """torch.compile makes a Float symbolic when it changes."""
    q, k, v = arrays(dtype=torch.float32)
    att = fk.compile("causal", weight="relu2", divide="count + c")

    def run(c):
        out, sums = att(q, k, v, c=c, return_sums=True)
        return out, fk.merge_sums((out, sums), (out, sums), divide="count + c", c=c)[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for c in (0.5, 0.25, 0.75):
        near(compiled(c), run(c), 1e-5)


def test_functional_gradients_of_sums_are_eager_ones():
    q, k, v = arrays()

    def run(q):
        out, sums = fk.attention(q, k, v, "causal", weight="sigmoid(score)", divide="total", return_sums=True)
        return (out.sum() + sums.total.sum()) ** 2

    q_ = q.clone().requires_grad_()
    near([torch.func.grad(run)(q)], torch.autograd.grad(run(q_), q_))


@pytest.mark.parametrize(
    ("program", "keywords", "message"),
    [
        ({}, {}, "this one is a softmax"),
        ({"weight": "exp(score)", "divide": "total"}, {}, "give return_lse=True, and frisket.merge"),
        ({"weight": "score"}, {"return_lse": True}, "leave out return_lse"),
        ({"weight": "score"}, {"return_max": True}, "leave out return_max"),
        ({"weight": "score"}, {"return_sums": 1}, "return_sums is 1"),
        ({"weight": "score"}, {"t": 3}, "`t` is given"),
        ({"weight": "score", "divide": "count + t[h]"}, {}, "`t` has no value"),
    ],
)
def test_sums_of_other_calls_are_refused(program, keywords, message):
    q, k, v = arrays()
    with pytest.raises(ParameterError, match=message):
        fk.compile("causal", **program)(q, k, v, **{"return_sums": True, **keywords})


def test_parts_that_are_no_sums_are_refused():
    q, k, v = arrays()
    part = fk.attention(q, k, v, weight="score", return_sums=True, backend="aten")
    other = fk.attention(q[:, :, :9], k, v, weight="score", return_sums=True, backend="aten")
    for parts, message in (
        ((), "nothing to merge"),
        ((part, (part[0], part[1].total)), "part 1 has a Tensor; a part is a pair .out, sums."),
        ((part, other), "parts are attention of the same queries"),
        (((part[0], part[1]._replace(count=part[1].count[0])),), "part 0 has out"),
    ):
        with pytest.raises(ShapeError, match=message):
            fk.merge_sums(*parts, divide="count")
    with pytest.raises(ParameterError, match="`divide` reads KV_LEN"):
        fk.merge_sums(part, divide="count / float(KV_LEN)")
    with pytest.raises(ParameterError, match="`t` is given"):
        fk.merge_sums(part, divide=None, t=3)
    plan = fk.compile("causal", weight="score").plan(37, 37, 2, 4)
    with pytest.raises(ParameterError, match="leave out plan"):
        fk.compile("causal", weight="score")(q, k, v, plan=plan, return_sums=True)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_chunks_longer_than_a_ring_are_sums_of_two_parts(framework, monkeypatch):
    monkeypatch.setattr(decode, "MAX_STEP_QUERIES", 0)  # the parts need no planner of their own
    q, k, v = arrays(30, 30, torch.float32)
    case = CASES["relu squared"]
    want, _ = case.dense(q, k, v)
    plain = fk.attention(q, k, v, case.mask, weight=case.weight, return_sums=True, backend="aten")[1]
    att = case.attention(backend="aten" if framework == "torch" else "xla")
    make = caches.RingKVCache if framework == "torch" else jax_caches.RingKVCache
    cache = make.create(2, 10, KV_HEADS, DIM, V_DIM)
    for i, n in ((0, 4), (4, 12), (16, 14)):
        new = [x[:, :, i : i + n] for x in (q, k, v)]
        if framework == "jax":
            (out, sums), cache = cache.attention(
                att, *(jnp.asarray(x.transpose(1, 2).numpy()) for x in new), return_sums=True
            )
            out = torch.from_numpy(np.array(out)).transpose(1, 2)
            count = torch.from_numpy(np.array(sums.count))
        else:
            out, (_, _, count) = cache.attention(att, *new, return_sums=True)
        near([out, count], [want[:, :, i : i + n], plain.count[:, :, i : i + n]], 1e-4)
