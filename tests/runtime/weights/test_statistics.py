"""`Attention.statistics` and that of caches, compared with dense weights in float64."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import default_only

import frisket as fk
from frisket.caches import PagePool
from frisket.lowering import dense as reference
from frisket.lowering.simplify import ProgramExprs

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
dense = pytest.importorskip("support.torch.dense").dense
weighted = pytest.importorskip("support.torch.weighted")
jnp = pytest.importorskip("jax.numpy")
recorded = pytest.importorskip("frisket.runtime.torch.differentiable")
torch_op = pytest.importorskip("frisket.runtime.torch.op")
torch_caches = pytest.importorskip("frisket.caches.torch")
jax_caches = pytest.importorskip("frisket.caches.jax")

BATCH, HEADS, KV_HEADS, DIM, LENGTH = 2, 4, 2, 8, 45
DOC = np.repeat(np.arange(3), 15)
SINKS = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)
CASES = {
    "full": (None, None, {}),
    "causal": ("causal", "softcap(2)", {}),
    "window": ("causal & window(9)", None, {}),
    "documents": ("causal & same(doc)", "score - 0.1 * (q - k)", {"doc": DOC}),
    "empty rows": ("k > q + 3", None, {}),
    "heads": ("causal & (h % 2 == b)", None, {}),
    "hidden in score": (None, "-inf if k % 3 == 1 else score", {}),
}
ALL = {"columns": True, "entropy": True, "argmax": True, "top": 3}
MODS = {
    "softcap(2)": lambda s: 2 * torch.tanh(s / 2),
    "score - 0.1 * (q - k)": lambda s: s - 0.1 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).double(),
    "-inf if k % 3 == 1 else score": lambda s: torch.where(torch.arange(LENGTH) % 3 == 1, -math.inf, s),
    None: None,
}


def arrays(dtype=torch.float32, length=LENGTH, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (HEADS, LENGTH), (KV_HEADS, length), (KV_HEADS, length)
    return [torch.randn(BATCH, *shape, DIM, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def visible(mask, **params):
    shape = BATCH, HEADS, LENGTH, LENGTH
    seen = fk.mask("true" if mask is None else mask, **params).dense(LENGTH, LENGTH, batch=BATCH, heads=HEADS)
    return torch.from_numpy(np.broadcast_to(seen, shape).copy())


def weights(q, k, seen, score=None, sinks=None):
    """The weights [batch, heads, q_len, kv_len] of dense attention."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return dense(q, k, eye, seen, score, sinks)[0]


def wanted(p, sinks=None):
    """The statistics of weights, in float64, with `top` 3 and columns of query heads."""
    rest = 0 if sinks is None else 1 - p.sum(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    if sinks is not None:
        entropy = entropy - torch.where(rest > 1e-12, rest * rest.clamp_min(1e-300).log(), 0.0)
    order = p.argsort(dim=-1, descending=True, stable=True)[..., :3]
    weight = p.gather(-1, order)
    order = torch.where(weight > 0, order, -1)
    return fk.Statistics(p.sum(2), entropy, order[..., 0], weight[..., 0], order, weight)


def compare(found, want, atol=2e-6):
    for name, a, b in zip(fk.Statistics._fields, found, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-5, err_msg=name)


def of_keys(want):
    return want._replace(columns=want.columns.unflatten(1, (KV_HEADS, -1)).sum(2))


def turned(*tensors):
    return [jax.numpy.asarray(x.transpose(1, 2).numpy()) for x in tensors]


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", CASES)
def test_statistics_of_torch_equal_dense_weights(name, sinks):
    mask, score, params = CASES[name]
    q, k, v = arrays()
    att = fk.compile(mask, score, backend="aten", tile=(16, 16), sinks=sinks)
    logits = None if sinks is None else torch.from_numpy(sinks).double()
    p = weights(q.double(), k.double(), visible(mask, **params), MODS[score], logits)
    params = {n: torch.from_numpy(x) for n, x in params.items()}
    want = wanted(p, sinks)
    compare(att.statistics(q, k, v, per="query", **ALL, **params), want)
    lse = att(q, k, v, return_lse=True, **params)[1]
    compare(att.statistics(q, k, v, lse=lse, **ALL, **params), of_keys(want))


@pytest.mark.parametrize("name", ["documents", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES)])
def test_statistics_of_jax_equal_dense_weights(name):
    mask, score, params = CASES[name]
    q, k, v = arrays()
    att = fk.compile(mask, score, backend="xla", tile=(16, 16), sinks=SINKS, **params)
    p = weights(q.double(), k.double(), visible(mask, **params), MODS[score], torch.from_numpy(SINKS).double())
    want = wanted(p, SINKS)
    q, k, v = turned(q, k, v)
    compare(jax.jit(lambda q, k, v: att.statistics(q, k, v, per="query", **ALL))(q, k, v), want)


@pytest.mark.parametrize("name", default_only(CASES, "empty rows"))
def test_jax_statistics_given_lse_equal_dense_weights(name):
    mask, score, params = CASES[name]
    q, k, v = arrays()
    att = fk.compile(mask, score, backend="xla", tile=(16, 16), **params)
    want = of_keys(wanted(weights(q.double(), k.double(), visible(mask, **params), MODS[score])))

    @jax.jit
    def both(q, k, v):
        return att.statistics(q, k, v, lse=att(q, k, v, return_lse=True)[1], **ALL)

    compare(both(*turned(q, k, v)), want)


def test_reference_weights_equal_dense_weights():
    q, k, _ = arrays(torch.float64)
    call = reference.DenseCall(ProgramExprs(fk.mask("causal").expr), DIM**-0.5, {}, {}, sinks=SINKS)
    p, _ = reference.weights(q.numpy(), k.numpy(), call)
    np.testing.assert_allclose(p, weights(q, k, visible("causal"), None, torch.from_numpy(SINKS).double()), atol=1e-12)


@pytest.mark.parametrize("given_lse", [False, True])
@pytest.mark.parametrize("name", ["causal", "documents", "empty rows"])
def test_gradients_of_statistics_equal_dense_ones(name, given_lse):
    mask, score, params = CASES[name]
    q, k, v = arrays(torch.float64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, sinks)]
    params = {n: torch.from_numpy(x) for n, x in params.items()}
    att = fk.compile(mask, score, backend="aten", tile=(16, 16))
    lse = att(q, k, v, sinks=sinks, return_lse=True, **params)[1] if given_lse else None
    found = att.statistics(q, k, v, columns=True, entropy=True, sinks=sinks, lse=lse, per="query", **params)
    p = weights(q, k, visible(mask, **params), MODS[score], sinks)
    rest = 1 - p.sum(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1) - rest * rest.clamp_min(1e-300).log()
    draw = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in found[:2]]
    ours = torch.autograd.grad(found[:2], leaves, cotangents)
    theirs = torch.autograd.grad([p.sum(2), entropy], leaves, cotangents)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


def test_gradients_of_a_score_mod_that_reads_no_score():
    """Its values had the shape of what it reads, and gradients counted each hidden position of all pairs."""
    q, k, v = (x[..., :9, :] for x in arrays(torch.float64))
    table = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    att = fk.compile("causal", "sin(t[k % 7])", backend="aten")
    lse = att(q, k, v, t=table, return_lse=True)[1]
    found = att.statistics(q, k, v, columns=True, entropy=True, lse=lse, t=table)
    p = weights(q, k, torch.ones(9, 9).tril().bool(), lambda s: table[torch.arange(9) % 7].sin().expand(s.shape))
    want = [p.sum(2).unflatten(1, (KV_HEADS, -1)).sum(2), -(p * p.clamp_min(1e-300).log()).sum(-1)]
    draw = [torch.linspace(0, 1, x.numel(), dtype=torch.float64).view(x.shape) for x in want]
    (ours,), (theirs,) = (torch.autograd.grad(x, [table], draw) for x in (found[:2], want))
    np.testing.assert_allclose(ours, theirs, atol=1e-10)


def test_jax_gradients_of_statistics_equal_those_of_torch():
    q, k, v = arrays()
    att = fk.compile("causal & window(9)", backend="xla", tile=(16, 16))
    torch_att = fk.compile("causal & window(9)", backend="aten", tile=(16, 16))

    def loss(found):
        return (found.columns**2).sum() + (found.entropy**2).sum()

    both = jax.jit(jax.grad(lambda q, k, v: loss(att.statistics(q, k, v, columns=True, entropy=True)), (0, 1)))
    ours = both(*turned(q, k, v))
    leaves = [x.requires_grad_() for x in (q, k)]
    theirs = torch.autograd.grad(loss(torch_att.statistics(q, k, v, columns=True, entropy=True)), leaves)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.transpose(1, 2), atol=2e-5)


def test_ties_go_to_the_first_key_and_missing_keys_are_minus_one():
    q = torch.zeros(1, 1, 5, 4)
    found = fk.compile("causal & k > 0", backend="aten").statistics(q, q, q, argmax=True, top=7, entropy=True)
    assert found.argmax[0, 0].tolist() == [-1, 1, 1, 1, 1]
    assert found.top[0, 0].tolist()[3] == [1, 2, 3, -1, -1, -1, -1]
    assert found.top_weight[0, 0].tolist()[2] == [0.5, 0.5, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(found.entropy[0, 0], [0, 0, math.log(2), math.log(3), math.log(4)], atol=1e-6)
    k = jax.numpy.zeros((1, 5, 1, 4))
    found = fk.compile("causal & k > 0", backend="xla").statistics(k, k, k, top=3)
    assert found.top[0, 0].tolist() == [[-1, -1, -1], [1, -1, -1], [1, 2, -1], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("backend", ["aten", "xla"])
def test_a_sink_far_above_all_scores_takes_all_weight(backend):
    """Its exponential above the largest score is no number of float32."""
    draw = [x[:, :, :5] for x in arrays()]
    q, k, v = draw if backend == "aten" else turned(*draw)
    att = fk.compile("causal", backend=backend)
    found = att.statistics(q, k, v, columns=True, entropy=True, argmax=True, sinks=np.full(HEADS, 200, np.float32))
    for x in (found.columns, found.entropy, found.argmax_weight):
        assert not np.asarray(x).any()
    np.testing.assert_array_equal(found.argmax, att.statistics(q, k, v, argmax=True).argmax)


@pytest.mark.parametrize("backend", ["aten", "xla"])
def test_statistics_are_alike_in_both_axis_orders(backend):
    first = [x[:, :, :9] for x in arrays()]
    later = [x.transpose(1, 2) for x in first]
    if backend == "xla":
        first, later = ([jnp.asarray(x.numpy()) for x in qkv] for qkv in (first, later))
    att = fk.compile("causal", backend=backend)
    found = [att.statistics(*x, layout=n, **ALL) for x, n in ((first, "bhsd"), (later, "bshd"))]
    compare(*found, 1e-6)


def test_statistics_that_are_not_asked_for_are_none():
    q, k, v = arrays()
    found = fk.compile("causal", backend="aten").statistics(q, k, v, argmax=True)
    assert [n for n, x in found._asdict().items() if x is not None] == ["argmax", "argmax_weight"]


def test_statistics_of_dropout_are_those_before_it():
    q, k, v = arrays()
    plain, dropped = (fk.compile("causal", backend="aten", dropout=x).statistics(q, k, v, **ALL) for x in (0.0, 0.5))
    compare(dropped, plain, 0)


def test_statistics_of_an_order_are_those_of_its_tokens():
    q, k, v = arrays()
    att = fk.compile("q % 5 == k % 5", backend="aten", reorder="auto")
    compare(att.statistics(q, k, v, **ALL), fk.compile("q % 5 == k % 5", backend="aten").statistics(q, k, v, **ALL), 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_an_lse_of_integers_is_refused(dtype):
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    att = fk.compile("causal", backend="aten")
    lse = att(q, k, v, return_lse=True)[1]
    with pytest.raises(fk.ParameterError, match=f"lse has the dtype {dtype}; it has Floats"):
        att.statistics(q, k, v, columns=True, lse=lse.to(dtype))


def test_lse_of_merged_parts_gives_weights_among_all_keys():
    q, k, v = arrays()
    att, halves = fk.compile("causal", backend="aten"), ((0, 20), (20, LENGTH))
    where = [{"origin": (0, 0, 0, lo), "sizes": (BATCH, HEADS, LENGTH, LENGTH)} for lo, _ in halves]
    parts = [(q, k[:, :, lo:hi], v[:, :, lo:hi]) for lo, hi in halves]
    _, lse = fk.merge(*(att(*part, return_lse=True, **at) for part, at in zip(parts, where, strict=True)))
    found = [att.statistics(*part, columns=True, entropy=True, lse=lse, **at) for part, at in zip(parts, where)]
    want = att.statistics(q, k, v, columns=True, entropy=True)
    np.testing.assert_allclose(torch.cat([x.columns for x in found], -1), want.columns, atol=1e-5)
    np.testing.assert_allclose(sum(x.entropy for x in found), want.entropy, atol=1e-5)


def test_rows_of_tiles_never_hold_all_pairs():
    """Rows that see the same keys are one step, which was one row of tiles: all pairs of a call without a mask."""
    q, k, v = (torch.zeros(1, 2, 4096, 8) for _ in range(3))
    ready = torch_op.kept_ready(fk.compile(None, backend="aten"), torch_op.CallArgs(q, k, v))
    rows = recorded.DifferentiableCall(ready.inputs, ()).rows
    assert max((r.stop - r.start) * 2 * 4096 for r in rows) <= recorded.ROOM
    assert [r.start for r in rows[1:]] == [r.stop for r in rows[:-1]]


def test_empty_calls_have_empty_statistics():
    q, k, v = arrays()
    found = fk.compile("causal", backend="aten").statistics(q, k[:, :, :0], v[:, :, :0], **ALL)
    assert found.columns.shape == (BATCH, KV_HEADS, 0)
    assert not found.entropy.any()
    assert (found.top == -1).all()
    q, k, v = turned(q, k, v)
    found = fk.compile("causal").statistics(q[:, :0], k, v, **ALL)
    assert found.columns.shape == (BATCH, KV_HEADS, LENGTH)
    assert found.top.shape == (BATCH, HEADS, 0, 3)


@settings(max_examples=20, deadline=None)
@given(
    mask=st.sampled_from([None, "causal", "causal & window(4)", "k > q", "q // 7 == k // 7", "q + k == 9", "h > k"]),
    q_len=st.integers(1, 20),
    kv_len=st.integers(1, 20),
    group=st.sampled_from([1, 2]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_statistics_keep_the_laws_of_weights(mask, q_len, kv_len, group, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = (2 * group, q_len), (2, kv_len), (2, kv_len)
    q, k, v = (torch.randn(1, *shape, 4, generator=draw) for shape in shapes)
    att = fk.compile(mask, scale=scale, backend="aten", tile=(4, 8))
    found = att.statistics(q, k, v, columns=True, entropy=True, argmax=True, top=4)
    seen = fk.mask(mask or "true").dense(q_len, kv_len, heads=2 * group)
    count = torch.from_numpy(np.broadcast_to(seen, (1, 2 * group, q_len, kv_len)).copy()).sum(-1)
    assert found.columns.sum().item() == pytest.approx((count > 0).sum().item(), abs=1e-4)
    assert (found.columns >= 0).all()
    assert (found.entropy > -1e-4).all()
    assert (found.entropy <= count.clamp_min(1).log() + 1e-4).all()
    assert (found.argmax == found.top[..., 0]).all()
    assert ((found.top >= 0).sum(-1) == count.clamp_max(4)).all()
    assert (found.top_weight[..., :-1] >= found.top_weight[..., 1:]).all()
    assert (found.top_weight.sum(-1) < 1 + 1e-4).all()


# -- caches -----------------------------------------------------------------------------------------------------------

TOKENS, NEW, WINDOW = 40, 3, 16
KINDS = ["plain", "paged", "ring"]


def stored(kind, dtype, module, k, v):
    """A cache of a framework with the tokens of `k` and `v`, as its `append` takes them."""
    if kind == "plain":
        return module.KVCache.create(BATCH, 64, KV_HEADS, DIM, dtype=dtype).append(k, v)
    if kind == "ring":
        return module.RingKVCache.create(BATCH, WINDOW, KV_HEADS, DIM, dtype=dtype).append(k, v)
    pool = PagePool(12, 16)
    for name in range(BATCH):
        pool.allocate(name, TOKENS)
    cache = module.PagedKVCache.create(12, 16, BATCH, 4, KV_HEADS, DIM, dtype=dtype)
    return cache.seat(pool, [*range(BATCH)], TOKENS).append(k, v)


@pytest.fixture
def no_native_append(monkeypatch):
    """Tokens are written by operations of torch, for which nothing is compiled."""
    monkeypatch.setattr("frisket.runtime.caches.torch_plain.MAX_NATIVE_TOKENS", 0)


def check_cache(kind, dtype, module, turn):
    q, k, v = (x[:, :, :TOKENS] for x in arrays())
    cache = stored(kind, dtype, module, *turn(k, v))
    window = WINDOW - NEW
    att = fk.compile(f"causal & window({window})", backend="aten" if module is torch_caches else "xla")
    if dtype == "int8":
        codes, scale = torch_caches.quantized(k, torch.int8)
        k = codes * scale[..., None]
    (queries,) = turn(q[:, :, -NEW:])
    found = cache.statistics(att, queries, per="query", **ALL)
    seen = visible(f"causal & window({window})")[:, :, TOKENS - NEW : TOKENS, :TOKENS]
    want = wanted(weights(q[:, :, -NEW:].double(), k.double(), seen))
    if kind == "ring":  # the token of position p is in slot p % WINDOW
        slots = want.columns.new_zeros(BATCH, HEADS, WINDOW)
        for p in range(TOKENS - WINDOW, TOKENS):
            slots[..., p % WINDOW] = want.columns[..., p]
        want = want._replace(columns=slots, argmax=want.argmax % WINDOW, top=want.top % WINDOW)
    columns = np.asarray(found.columns)
    assert not columns[..., TOKENS:].any()
    compare(found._replace(columns=columns[..., :TOKENS]), want)


@pytest.mark.usefixtures("no_native_append")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_torch_caches_equal_dense_weights(kind, dtype):
    check_cache(kind, dtype, torch_caches, lambda *x: x)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["paged", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("plain", "ring"))])
def test_statistics_of_jax_caches_equal_dense_weights(kind, dtype):
    check_cache(kind, dtype, jax_caches, turned)


@pytest.mark.usefixtures("no_native_append")
def test_padding_of_a_cache_sees_no_key():
    q, k, v = (x[:, :, :6] for x in arrays())
    cache = torch_caches.KVCache.create(BATCH, 16, KV_HEADS, DIM).append(k, v, [6, 4])
    found = cache.statistics(fk.compile("causal", backend="aten"), q[:, :, :3], [3, 1], argmax=True, entropy=True)
    assert (found.argmax[1, :, 1:] == -1).all()
    assert (found.argmax[1, :, 0] >= 0).all()
    assert not found.entropy[1, :, 1:].any()


@pytest.mark.usefixtures("no_native_append")
def test_ring_without_room_refuses_statistics():
    q, k, v = arrays()
    cache = torch_caches.RingKVCache.create(BATCH, WINDOW, KV_HEADS, DIM).append(k, v)
    with pytest.raises(fk.ShapeError, match="a ring of 16 tokens"):
        cache.statistics(fk.compile("causal & window(16)", backend="aten"), q[:, :, :4], columns=True)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "no statistic is asked for; say which: columns=True, entropy=True, argmax=True or top=4"),
        ({"column": True}, "did you mean the keyword `columns`?"),
        ({"columns": 1}, "columns is 1; it is True or False"),
        ({"top": -1}, "top is -1; it is how many keys to name for each query, 0 or more"),
        ({"top": True}, "top is True; it is how many keys"),
        ({"top": 2.5}, "top is 2.5; it is how many keys"),
        ({"columns": True, "per": "head"}, 'per is \'head\'; write "key" or "query"'),
        ({"columns": True, "seed": 1}, "`seed`"),
    ],
)
def test_wrong_statistics_are_refused(keywords, message):
    q, k, v = arrays()
    with pytest.raises(fk.ParameterError, match=re.escape(message)):
        fk.compile("causal", backend="aten").statistics(q, k, v, **keywords)


def test_lse_of_another_shape_is_refused():
    q, k, v = arrays()
    with pytest.raises(fk.ShapeError, match=r"lse has the shape \(2, 45, 4\); it is \[batch, heads, q_len\]"):
        fk.compile("causal", backend="aten").statistics(q, k, v, columns=True, lse=torch.zeros(2, 45, 4))
    with pytest.raises(fk.ShapeError, match=r"q has 2 axes, shape \(45, 8\)"):  # not of lse
        fk.compile("causal", backend="aten").statistics(q[0, 0], k, v, columns=True, lse=torch.zeros(45))


@pytest.mark.parametrize("per", ["key", "query"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", ["sigmoid", "relu squared", "retention"])
def test_statistics_of_other_weights_equal_dense_ones(name, framework, per):
    case = weighted.CASES[name]
    draw = torch.Generator().manual_seed(3)
    shapes = [(2, weighted.HEADS, 45, weighted.DIM), (2, weighted.KV_HEADS, 45, weighted.DIM)]
    q, k = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)
    eye = torch.eye(45, dtype=torch.float64).expand(2, weighted.KV_HEADS, -1, -1)
    p = case.dense(q, k, eye, **case.params)[0]
    columns = p.sum(2) if per == "query" else p.sum(2).unflatten(1, (weighted.KV_HEADS, -1)).sum(2)
    cotangent = torch.randn(columns.shape, generator=draw, dtype=torch.float64)
    wanted = torch.autograd.grad(columns, (q, k), cotangent)
    top = p.detach().max(-1)
    at = torch.where(top.values > 0, top.indices, -1)
    att, asked = case.attention(tile=(16, 16)), {"columns": True, "argmax": True, "per": per}
    if framework == "torch":
        results = att.statistics(q, k, torch.zeros_like(k), **asked, **case.params)
        grads = torch.autograd.grad(results.columns, (q, k), cotangent)
        close = {"rtol": 1e-9, "atol": 1e-9}
    else:
        params = {n: jnp.asarray(x.numpy(), jnp.float32) for n, x in case.params.items()}

        def of_jax(q, k):
            return att.statistics(q, k, jnp.zeros_like(k), **asked, **params)

        arrays_of = [jnp.asarray(x.detach().transpose(1, 2).numpy(), jnp.float32) for x in (q, k)]
        results = jax.jit(of_jax)(*arrays_of)
        ct = jnp.asarray(cotangent.numpy(), jnp.float32)
        grads = jax.grad(lambda *x: (of_jax(*x).columns * ct).sum(), (0, 1))(*arrays_of)
        grads = [torch.from_numpy(np.array(x)).transpose(1, 2) for x in grads]
        results = type(results)(*(None if x is None else torch.from_numpy(np.array(x)) for x in results))
        close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(results.columns, columns, check_dtype=False, **close)
    torch.testing.assert_close(results.argmax_weight, top.values.clamp_min(0), check_dtype=False, **close)
    assert (results.argmax == at).all()
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, **close)


@pytest.mark.parametrize("keywords", [{"entropy": True}, {"top": 2}, {"columns": True, "lse": torch.zeros(2, 4, 45)}])
def test_statistics_that_other_weights_lack_are_refused(keywords):
    q, k, v = arrays()
    att = fk.compile("causal", weight="sigmoid(score)", backend="aten")
    with pytest.raises(fk.ParameterError, match="ask for columns and argmax alone"):
        att.statistics(q, k, v, **keywords)


def test_statistics_under_torch_func_are_refused():
    q, k, v = arrays()
    att = fk.compile("causal", backend="aten")
    with pytest.raises(fk.ParameterError, match=r"outside of torch\.compile"):
        torch.func.grad(lambda q: att.statistics(q, k, v, entropy=True).entropy.sum())(q)
