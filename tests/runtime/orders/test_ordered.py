"""Attention that moves its tokens: results, gradients and dropout as without an order, on every framework."""

import pickle
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tiers import default_only

import frisket as fk
from frisket.caches.torch import KVCache
from frisket.dsl.errors import ParameterError
from frisket.runtime.attention import ordered as cpu_time
from frisket.runtime.attention.order import CPU

BLOCK = (16, 16)
DOC = np.random.default_rng(0).permutation(np.arange(192) % 8).astype(np.int32)
NEAR = np.random.default_rng(1).permutation(48)
NEAR = abs(NEAR[:, None] - NEAR) <= 2
CASES = {  # a formula for both, a table for both, keys alone, an unsorted table, a grid, a graph
    "causal & dilated(64, 4)": (192, {}),
    "causal & (q - k) % 7 == 0": (150, {}),
    "causal & k % 4 == 0": (192, {}),
    "causal & same(doc)": (192, {"doc": DOC}),
    "natten2d(16, 32, 5, 5)": (512, {}),
    "causal & near[q // 4, k // 4]": (192, {"near": NEAR}),
}
OFTEN = ["causal & (q - k) % 7 == 0", "causal & same(doc)"]  # of JAX and C++, which compile for seconds


def drawn(length, heads=4, kv_heads=2, dim=16, **options):
    make = torch.Generator().manual_seed(length)
    return [torch.randn(2, h, length, dim, generator=make, **options) for h in (heads, kv_heads, kv_heads)]


def both(text, score=None, **options):
    length, given = CASES[text]
    order = fk.reorder(text, length, block=BLOCK, moving=0, **given)
    assert order.gain > 1
    plain = fk.compile(text, score, **given, **options)
    return plain, fk.compile(text, score, reorder=order, **given, **options), length


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("text", "backend"), [
    pytest.param(*case, marks=() if case[0] == OFTEN[0] or case[1] == "aten" else pytest.mark.exhaustive)
    for case in product(CASES, ["aten", "cpp", "dense"])
])  # fmt: skip
def test_reordered_results_and_gradients_equal_plain_ones(text, backend):
    score = "score + 0.02 * (k - q) then softcap(20)"
    (plain, *_), (_, att, length) = both(text, score, backend="aten"), both(text, score, backend=backend)
    q, k, v = (x.requires_grad_(backend != "dense") for x in drawn(length))
    want, lse = plain(q, k, v, return_lse=True)
    got, of_got = att(q, k, v, return_lse=True)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(of_got, lse, atol=2e-6, rtol=2e-5)
    if backend != "dense":
        along = torch.randn(want.shape)
        for x, y in zip(*(torch.autograd.grad(o, (q, k, v), along) for o in (got, want)), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("text", default_only(CASES, *[x for x in CASES if "natten" not in x]))
def test_check_holds_it_to_the_oracle(text):
    _, att, length = both(text)
    assert att.check(*drawn(length)).good
    assert att.check(*drawn(length), gradients=False).good


def results_in_jax(attend):
    """A function to the output, and gradients in q, k and v."""

    def run(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(jnp.ones_like(out))

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", default_only(CASES, OFTEN[1]))
def test_jax_under_jit_and_grad(text):
    plain, att, length = both(text)
    q, k, v = (jnp.asarray(x.transpose(1, 2).numpy()) for x in drawn(length))
    (got, want), gradients = zip(*(jax.jit(results_in_jax(f))(q, k, v) for f in (att, plain)), strict=True)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("text", CASES)
def test_dropout_drops_the_same_positions(text):
    plain, att, length = both(text, dropout=0.3)
    q, k, v = drawn(length)
    torch.testing.assert_close(att(q, k, v, seed=5), plain(q, k, v, seed=5), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("text", CASES)
def test_a_model_that_keeps_its_tokens_in_order(text):
    plain, ordered, length = both(text)
    order = ordered.order
    q, k, v = drawn(length)
    at = fk.compile(plain.mask).at(**order.coordinates)
    out = at(order.apply(q), order.apply(k, keys=True), order.apply(v, keys=True))
    torch.testing.assert_close(order.undo(out), plain(q, k, v), atol=2e-6, rtol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", default_only(CASES, *OFTEN))
def test_graphs_of_torch(text):
    _, att, length = both(text)
    q, k, v = drawn(length)
    compiled = torch.compile(lambda q, k, v: att(q, k, v), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), att(q, k, v), atol=2e-6, rtol=2e-5)


def test_auto_finds_an_order_for_each_length():
    att = fk.compile("causal & dilated(w, 4)", reorder="auto")
    plain = fk.compile("causal & dilated(w, 4)")
    q, k, v = drawn(512, 1, 1)
    torch.testing.assert_close(att(q, k, v, w=256), plain(q, k, v, w=256), atol=2e-6, rtol=2e-5)
    assert att.order_of(512, 512, w=256).gain > 1
    assert att.order_of(64, 64, w=256).gain == 1
    short = drawn(64, 1, 1)
    assert torch.equal(att(*short, w=256), plain(*short, w=256))


@pytest.mark.parametrize("queries", [1, 5, 7, 14, 16])
def test_auto_for_few_queries(queries):
    """Their tiles have as many rows, no whole number of groups of six."""
    q, k = torch.randn(1, 2, queries, 16), torch.randn(1, 2, 400, 16)
    doc = np.random.default_rng(0).integers(0, 6, 400)
    ours, want = (fk.compile("same(doc)", doc=doc, reorder=how) for how in ("auto", None))
    torch.testing.assert_close(ours(q, k, k), want(q, k, k), rtol=1e-5, atol=1e-5)


def test_auto_compares_the_time_of_a_cpu(monkeypatch):
    """A neighbourhood of 7 x 7 ran 0.83 times as fast in its order; rows that take long to move stay."""
    assert fk.reorder("natten2d(128, 64, 7, 7)", 8192, block=CPU[0], moving=CPU[1]).gain > 1
    assert fk.compile("natten2d(128, 64, 7, 7)", reorder="auto").order_of(8192, 8192).queries is None
    assert fk.compile("causal & dilated(1024, 4)", reorder="auto").order_of(8192, 8192).gain > 1.25
    slow = {name: (*times[:-1], 1e5) for name, times in cpu_time.TIMES.items()}
    monkeypatch.setattr(cpu_time, "TIMES", slow)
    assert fk.compile("causal & dilated(1024, 4)", reorder="auto").order_of(8192, 8192).queries is None


def test_a_table_that_comes_with_a_call():
    att = fk.compile("causal & same(doc)", reorder="auto")
    q, k, v = drawn(192)
    want = fk.compile("causal & same(doc)", doc=DOC)(q, k, v)
    torch.testing.assert_close(att(q, k, v, doc=DOC), want, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(att(q, k, v, doc=torch.tensor(DOC)), want, atol=2e-6, rtol=2e-5)


def test_a_value_given_anew_is_used():
    order = fk.reorder("causal & dilated(64, w)", 192, w=4, block=BLOCK, moving=0)
    att = fk.compile("causal & dilated(64, w)", w=4, reorder=order)
    q, k, v = drawn(192)
    want = fk.compile("causal & dilated(64, 2)")(q, k, v)
    torch.testing.assert_close(att(q, k, v, w=2), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("backend", default_only(["aten", "cpp"], "aten"))
def test_ids_that_float64_cannot_tell_apart(backend):
    """An order is kept for the values of a call: ids above 2^53, such as hashes, were compared in float64."""
    att, plain = (fk.compile("same(doc) & k < w", backend=backend, reorder=how) for how in ("auto", None))
    (q, k, v), ids = drawn(192), DOC + np.int64(1 << 60)
    for doc, w in ((ids * 0 + (1 << 60), 192), (ids, 192), (ids, 100)):
        given = {"doc": doc, "w": w}
        torch.testing.assert_close(att(q, k, v, **given), plain(q, k, v, **given), atol=2e-6, rtol=2e-5)
    with pytest.raises(ParameterError, match="`doc` has masked entries"):
        att(q, k, v, doc=np.ma.masked_array(doc, doc % 2), w=100)


@pytest.mark.parametrize("score", [None, "score + 0.01 * w", "score + 0.1 * doc[k]"])
@pytest.mark.parametrize("given", ["auto", "order"])
def test_an_order_by_a_table_holds_the_values_of_its_mask(given, score):
    """Where a part of the mask, or the score mod, still read the name, that part alone had the new value."""
    values = {"doc": DOC, "w": 150}
    mask = fk.mask("same(doc) & k < w & q - k < w", **values)
    order = "auto" if given == "auto" else fk.reorder(mask, 192, block=BLOCK, moving=0)
    att, qkv = fk.compile(mask, score, reorder=order, **values if score else {}), drawn(192)
    assert att.order_of(192, 192).by_table
    for name, x in {"w": 30, "doc": np.roll(DOC, 5)}.items():
        for call in (att, att.check, att.stages):
            with pytest.raises(ParameterError, match=f"`{name}` is given, and the order of this attention is a table"):
                call(*qkv, **{name: x})


@pytest.mark.parametrize("name", ["at_0", "at_1", "at__0", "order_q"])
def test_names_of_the_user_keep_their_values(name):
    """Tables that an order makes have other names, beside those of the mask and of the score mod."""
    text, table = f"causal & (q - k) % 7 == 0 & ({name}[q, k] > 0 | q == k)", np.random.default_rng(0)
    seen, bias = table.integers(0, 2, (150, 150)).astype(np.int32), table.standard_normal(150).astype(np.float32)
    q, k, v = drawn(150)
    for mask, score, given in (
        (text, None, {name: seen}), ("causal & (q - k) % 7 == 0", f"score + {name}[k]", {name: bias}),
    ):  # fmt: skip
        held = {n: x for n, x in given.items() if score is None}
        order = fk.reorder(mask, 150, block=BLOCK, moving=0, **held)
        assert order.by_table
        got = fk.compile(mask, score, reorder=order, **given)(q, k, v)
        torch.testing.assert_close(got, fk.compile(mask, score, **given)(q, k, v), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("gradients", [False, True])
def test_check_takes_values_of_a_call(gradients):
    att, given = fk.compile("causal & same(doc)", "score * s", reorder="auto"), {"doc": DOC, "s": 0.5}
    assert att.check(*drawn(192), gradients=gradients, **given).good
    assert "q - k" not in str(att.stages(*drawn(192), **given).expr)
    with pytest.raises(ParameterError, match="origin is given, and this attention reorders whole sequences"):
        att.check(*drawn(192), gradients=gradients, origin=(0, 0, 5, 0), **given)


def test_reordered_calls_take_empty_and_refuse_nested_tensors():
    att = fk.compile("causal & k % 4 == 0", reorder="auto")
    q, k, v = drawn(64)
    assert att(q[:, :, :0], k, v).shape == (2, 4, 0, 16)
    assert not att(q, k[:, :, :0], v[:, :, :0]).any()
    rows = [torch.randn(n, 2, 16) for n in (5, 7)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ParameterError, match="q is a nested tensor, and an order is of sequences of one length"):
        att(nested, nested, nested)


@pytest.mark.parametrize("given", ["auto", "order"])
def test_a_cache_keeps_tokens_as_they_come(given):
    text = "causal & k % 4 == 0"
    order = fk.reorder(text, 12, block=(4, 4), moving=0)
    assert order.gain > 1
    plain, att = fk.compile(text), fk.compile(text, reorder="auto" if given == "auto" else order)
    caches = [KVCache.create(batch=2, capacity=32, kv_heads=2, head_dim=16) for _ in "ab"]
    for new in (slice(12), slice(1)):  # a prompt and a step
        qkv = [x[:, :, new] for x in drawn(192)]
        got, want = (c.attention(f, *qkv) for c, f in zip(caches, (att, plain), strict=True))
        assert torch.equal(got, want)


def test_copies_and_stages():
    _, att, length = both("causal & dilated(64, 4)")
    copy = pickle.loads(pickle.dumps(att))
    q, k, v = drawn(length)
    assert torch.equal(copy(q, k, v), att(q, k, v))
    assert "q // 48" in str(att.stages(q_len=length).expr)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without messages")
@pytest.mark.parametrize("by_table", [False, True])
def test_context_parallel_takes_tokens_that_are_in_order(by_table, tmp_path):
    """A deal of the mask in order; an attention that moves tokens itself is refused."""
    doc = np.random.default_rng(0).permutation(np.arange(192) % 6).astype(np.int32)
    mask, given = ("causal & same(doc)", {"doc": doc}) if by_table else ("causal & k % 4 == q % 4", {})
    order = fk.reorder(mask, 192, block=BLOCK, moving=0, **given)
    assert order.by_table == by_table
    assert order.gain > 1
    score = "score - 0.01 * (q - k)"
    x = drawn(192)
    deal = fk.parallel.deal(order.moved, 192, 1, tile=16)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        shards = [deal.permute(order.apply(y), 2) for y in x]
        moved = fk.compile(mask, score, **given).at(**order.coordinates)
        out = fk.parallel.attend(moved, *shards, deal=deal)
        with pytest.raises(ParameterError, match="a rank holds a part of a sequence"):
            fk.parallel.attend(fk.compile(mask, score, reorder=order, **given), *shards, deal=deal)
    finally:
        torch.distributed.destroy_process_group()
    want = fk.compile(mask, score, **given)(*x)
    torch.testing.assert_close(order.undo(deal.unpermute(out, 2)), want, atol=1e-5, rtol=1e-5)


def test_a_table_of_another_width_is_the_same_table():
    doc = np.arange(192) % 3
    order = fk.reorder("same(doc)", 192, block=BLOCK, moving=0, doc=doc)
    narrow = fk.mask("same(doc)", doc=doc.astype(np.int32))
    assert narrow == order.mask
    assert hash(narrow) == hash(order.mask)
    assert narrow != fk.mask("same(doc)", doc=doc + 1)
    x = drawn(192)
    torch.testing.assert_close(fk.compile(narrow, reorder=order)(*x), fk.compile(narrow)(*x), atol=1e-5, rtol=1e-5)


def test_reorder_refuses_bad_orders_and_options():
    order = fk.reorder("causal & k % 4 == 0", 192, block=BLOCK, moving=0)
    with pytest.raises(ParameterError, match="the order was found for another mask"):
        fk.compile("causal", reorder=order)
    for other in (True, np.arange(192)[::-1], torch.arange(192)):
        with pytest.raises(ParameterError, match='it is "auto", None, or what'):
            fk.compile("causal", reorder=other)
    att = fk.compile("causal & k % 4 == 0", reorder=order)
    with pytest.raises(ParameterError, match="origin is given, and this attention reorders whole sequences"):
        att(*drawn(192), origin=(0, 0, 5, 0))
    with pytest.raises(ParameterError, match=r"reorder= plans its calls itself"):
        att.plan(192, 192)
    with pytest.raises(fk.ShapeError, match="this order is of 192 queries and 192 keys"):
        att(*drawn(100))
    auto = fk.compile("causal & k % 4 == 0", reorder="auto")
    with pytest.raises(Exception, match="has no lengths to look at"):
        torch.compile(lambda q, k, v: auto(q, k, v), fullgraph=True, backend="eager")(*drawn(192))


def test_an_order_that_moves_nothing_looks_at_arrays_too():
    """An array of another length, and what is no array, passed through unseen."""
    order = fk.reorder("causal", 64)
    x = torch.ones(64, 4)
    assert order.apply(x) is order.undo(x) is x
    for move in (order.apply, order.undo):
        with pytest.raises(fk.ShapeError, match=r"the array is \(5, 4\), and axis -2 is to have 64 places"):
            move(x[:5])
        with pytest.raises(fk.ShapeError, match="the array is list, and axis -2 is to have 64 places"):
            move(x.tolist())
