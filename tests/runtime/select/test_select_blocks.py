"""Blocks chosen by scores, in torch and JAX, compared with loops over rows and pairs in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from outside.choices import chosen, keep, mass, threshold
from torch._dynamo.exc import Unsupported

import frisket as fk
from frisket import select

RNG = np.random.default_rng(0)
FRAMEWORKS = ["torch", "jax"]


def array(x, framework):
    """An array [batch, heads, length, dim] of numpy in the framework and its axis order."""
    x = np.asarray(x, np.float32)
    return torch.from_numpy(x) if framework == "torch" else jnp.asarray(x.swapaxes(1, 2))


def run(framework, fn, *arrays):
    """A result as numpy's; of JAX as one program."""
    return np.asarray((jax.jit(fn) if framework == "jax" else fn)(*arrays))


def table(x, framework):
    return torch.from_numpy(x) if framework == "torch" else jnp.asarray(x)


def blocks_with(pair, q_len, kv_len, bq, bk):
    """Blocks with a pair of positions for which `pair(q, k)` holds."""
    found = np.zeros((-(-q_len // bq), -(-kv_len // bk)), bool)
    for q in range(q_len):
        for k in range(kv_len):
            found[q // bq, k // bk] |= pair(q, k)
    return found


CAUSAL, FULL = (lambda q, k: q >= k), (lambda q, k: True)
NEAR = lambda q, k: q >= k and (k < 2 or q - k < 5)  # noqa: E731
RULES = {
    "keep": ({"keep": 3}, keep(3)),
    "more than all": ({"keep": 99}, keep(99)),
    "share": ({"keep": 0.3}, keep(lambda n: -(-3 * n // 10))),
    "function": ({"keep": lambda n: 1 + n // 4}, keep(lambda n: 1 + n // 4)),
    "mass": ({"mass": 0.8}, mass(0.8)),
    "threshold": ({"threshold": 0.2}, threshold(0.2)),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("always", [None, "sinks(2) | window(5)"])
def test_choice_by_every_rule_equals_loops(framework, rule, always):
    q_len, kv_len, bq, bk = 37, 45, 8, 4
    scores = RNG.normal(size=(2, 4, 5, 12)) * 2
    keywords, count = RULES[rule]
    seen = blocks_with(CAUSAL, q_len, kv_len, bq, bk)
    forced = blocks_with(NEAR, q_len, kv_len, bq, bk) if always else np.zeros_like(seen)
    given = table(scores.astype(np.float32), framework)
    for share in ("group", "head"):
        place = {"q_len": q_len, "kv_len": kv_len, "kv_heads": 2, "share": share, "always": always}
        got = run(framework, lambda s, place=place: select.choose(s, (bq, bk), **keywords, **place), given)
        np.testing.assert_array_equal(got, chosen(scores, seen, forced, count, 2, share))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("pool", ["mean", "max", "min", "function"])
def test_scores_of_pooled_tokens_equal_loops(framework, pool):
    q, k = RNG.normal(size=(2, 4, 21, 8)), RNG.normal(size=(2, 2, 26, 8))
    reduce = {"mean": np.mean, "max": np.max, "min": np.min, "function": lambda x, axis: 2 * x[:, 0]}[pool]
    want = np.zeros((2, 4, 3, 7))
    for b, h, i, j in np.ndindex(want.shape):
        one = reduce(q[b, h, i * 8 : i * 8 + 8][None], axis=1) @ reduce(k[b, h // 2, j * 4 : j * 4 + 4][None], axis=1).T
        want[b, h, i, j] = one.item() / math.sqrt(8)
    how = (lambda x: 2 * x[:, :, :, 0]) if pool == "function" else pool
    got = run(framework, lambda q, k: select.scores(q, k, (8, 4), pool=how), array(q, framework), array(k, framework))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_pool_functions_get_blocks_that_have_tokens():
    """A function may divide by the number of blocks, and compute for nothing."""
    for length, shapes in ((3, [(1, 3)]), (8, [(1, 8)]), (16, [(2, 8)]), (19, [(2, 8), (1, 3)])):
        x, calls = torch.ones(1, 2, length, 4), []
        select.pooled(x, 8, lambda x, calls=calls: calls.append(x.shape[2:4]) or x[:, :, :, 0])
        assert calls == shapes


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_blocks_choose_by_scores_of_pooled_tokens(framework):
    q, k = RNG.normal(size=(1, 4, 64, 8)), RNG.normal(size=(1, 2, 64, 8))
    x, y = array(q, framework), array(k, framework)
    found = run(framework, lambda x, y: select.scores(x, y, 8), x, y)
    got = run(framework, lambda x, y: select.blocks(x, y, 8, keep=3, mask="full"), x, y)
    everything = np.ones((8, 8), bool)
    np.testing.assert_array_equal(got, chosen(found, everything, ~everything, keep(3), 2))
    swapped = "bshd" if framework == "torch" else "bhsd"
    x, y = x.swapaxes(1, 2), y.swapaxes(1, 2)
    other = run(framework, lambda x, y: select.blocks(x, y, 8, keep=3, mask="full", axes=swapped), x, y)
    np.testing.assert_array_equal(other, got)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_of_equal_scores_as_many_are_taken(framework):
    scores = table(np.zeros((1, 1, 1, 6), np.float32), framework)
    for rule in ({"keep": 2}, {"keep": 1 / 3}, {"mass": 0.3}):
        got = run(framework, lambda s, rule=rule: select.choose(s, (1, 4), mask="full", **rule), scores)
        assert got.sum() == 2
        assert framework == "torch" or got[0, 0, 0, :2].all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_that_see_nothing_choose_nothing(framework):
    scores = table(np.ones((1, 1, 2, 3), np.float32), framework)
    for rule in ({"keep": 2}, {"keep": 0.5}, {"mass": 0.5}, {"threshold": 0.1}):
        got = run(framework, lambda s, rule=rule: select.choose(s, 4, mask="k < q - 3", **rule), scores)
        assert not got[0, 0, 0].any()
        assert got[0, 0, 1].tolist() == [True, False, False]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scores_far_apart_keep_their_order_in_a_group(framework):
    """Weights of exp(-400) are 0 in float32; their order is not lost."""
    scores = np.array([0, -400, -300, -500, -350], np.float32).reshape(1, 1, 1, 5).repeat(2, 1)
    scores = table(scores, framework)
    got = run(framework, lambda s: select.choose(s, (1, 4), mask="full", keep=3, kv_heads=1), scores)
    assert got[0, 1, 0].tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scores_that_are_nan_come_last(framework):
    scores = np.array([np.nan, 1, 2, np.nan], np.float32).reshape(1, 1, 1, 4)
    for rule in ({"keep": 2}, {"mass": 1.0}, {"keep": 0.5}):
        scores = table(np.asarray(scores), framework)
        got = run(framework, lambda s, rule=rule: select.choose(s, (1, 4), mask="full", **rule), scores)
        assert got[0, 0, 0].tolist() == [False, True, True, False]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_mask_with_tables_limits_the_choice(framework):
    doc = np.repeat([0, 1, 2], [20, 13, 15])
    scores = RNG.normal(size=(1, 2, 6, 6)).astype(np.float32)
    seen = blocks_with(lambda q, k: q >= k and doc[q] == doc[k], 48, 48, 8, 8)
    forced = blocks_with(lambda q, k: q == k, 48, 48, 8, 8)
    given = {"mask": "causal & same(doc)", "always": "window(1)", "doc": table(doc, framework)}
    got = run(framework, lambda s: select.choose(s, 8, keep=2, **given), table(scores, framework))
    np.testing.assert_array_equal(got, chosen(scores, seen, forced, keep(2)))


@pytest.mark.parametrize("rule", RULES)
def test_masks_that_differ_by_head_limit_each_head(rule):
    """In a group, what one of its heads must read is read by all of them."""
    scores, w, near = RNG.normal(size=(1, 4, 6, 6)).astype(np.float32), [8, 16, 24, 48], [1, 1, 1, 12]
    keywords, count = RULES[rule]
    seen, forced = (
        np.stack([blocks_with(lambda q, k, n=n: 0 <= q - k < n, 48, 48, 8, 8) for n in many])[None]
        for many in (w, near)
    )
    masks = {"mask": "causal & q - k < w[h]", "w": np.array(w), "always": "q - k < n[h]", "n": np.array(near)}
    for share in ("group", "head"):
        got = select.choose(torch.from_numpy(scores), 8, kv_heads=2, share=share, **keywords, **masks)
        np.testing.assert_array_equal(got, chosen(scores, seen, forced, count, 2, share))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_mask_of_a_choice_has_its_own_parameters(framework):
    """A parameter of `always` alone was refused, as none of the mask."""
    scores = RNG.normal(size=(1, 2, 6, 6)).astype(np.float32)
    seen, forced = (blocks_with(lambda q, k, n=n: 0 <= q - k < n, 48, 48, 8, 8) for n in (24, 9))
    given = {"mask": "causal & q - k < w", "always": "q - k < near", "w": 24, "near": 9}
    got = run(framework, lambda s: select.choose(s, 8, keep=3, **given), table(scores, framework))
    np.testing.assert_array_equal(got, chosen(scores, seen, forced, keep(3)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_chunk_of_a_prefill_chooses_like_the_whole(framework):
    q, k = RNG.normal(size=(1, 2, 64, 8)), RNG.normal(size=(1, 2, 64, 8))
    x, y = array(q, framework), array(k, framework)
    cut = (slice(None), slice(None), slice(32, 64)) if framework == "torch" else (slice(None), slice(32, 64))
    near, at = {"keep": 2, "always": "window(4)"}, {"origin": (0, 0, 32, 0), "sizes": (1, 2, 64, 64)}
    whole = run(framework, lambda x, y: select.blocks(x, y, 8, **near), x, y)
    part = run(framework, lambda x, y: select.blocks(x, y, 8, **near, **at), x[cut], y)
    np.testing.assert_array_equal(part, whole[:, :, 4:])


def test_traced_choice_plans_attention_inside_jit():
    """Scattered blocks of a traced table: the planner of the device reads no tile that was not chosen."""
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 160, 2, 8)).astype(np.float32)) for _ in range(3))
    att = fk.compile("causal & topk_tiles(map, 4)")

    @jax.jit
    def attend(q, k, v):
        map = select.blocks(q, k, 4, keep=12, always="window(1)")
        plan = att.plan(160, 160, 1, 2, map=map)
        spans = plan.spans((4, 4))
        return att(q, k, v, plan=plan), map, spans.bounds, spans.count, plan.overflow

    out, map, bounds, count, overflow = attend(q, k, v)
    assert not overflow
    read = np.zeros((2, 40, 40), bool)
    for h, i in np.ndindex(2, 40):
        for lo, _, _, hi in np.asarray(bounds)[h, i, : int(count[h, i])]:
            read[h, i, lo:hi] = True
    np.testing.assert_array_equal(read, np.asarray(map)[0])
    np.testing.assert_array_equal(map, select.blocks(q, k, 4, keep=12, always="window(1)"))
    want = fk.reference(q, k, v, "causal & topk_tiles(map, 4)", map=np.asarray(map))
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_compiled_torch_function_chooses_in_one_graph():
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)

    def choice(q, k):
        """Rules with other masks in one graph, as layers have them."""
        by_number = select.blocks(q, k, 8, keep=3, always="sinks(1)")
        by_mass = select.blocks(q, k, 8, mass=0.7, mask="full"), select.blocks(q, k, 8, threshold=0.2)
        of_heads = select.blocks(q, k, 8, keep=2, mask="q - k <= 8 * h & q - k >= b")
        later = select.blocks(q[:, :, :16], k, 8, keep=2, origin=(0, 0, 48, 0), sizes=(1, 4, 64, 64))
        moba = select.moba(q, k, 8, keep=2), select.moba(q + 1, k, 16, keep=2)
        return by_number, *by_mass, of_heads, later, *moba

    torch._dynamo.reset()
    compiled = torch.compile(choice, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q, k), choice(q, k)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("held", [True, False])
def test_graphs_end_at_masks_with_tables(held):
    q, k, doc = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8), np.arange(64) // 20
    mask = fk.mask("causal & same(doc)", doc=doc) if held else "causal & same(doc)"
    values = {} if held else {"doc": torch.from_numpy(doc)}

    def choice(q, k):
        return select.blocks(q, k, 8, keep=2, mask=mask, **values)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(choice, backend="aot_eager")(q, k), choice(q, k))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="it runs between two graphs"):
        torch.compile(choice, fullgraph=True, backend="aot_eager")(q, k)


def test_scores_have_gradients_and_choices_have_none():
    q, k = (torch.randn(1, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda q, k: select.scores(q, k, 4), (q, k))
    assert not select.blocks(q, k, 4, keep=2).requires_grad
    x, y = (jnp.asarray(a.detach().numpy().swapaxes(1, 2), jnp.float32) for a in (q, k))
    got = jax.grad(lambda x, y: (select.scores(x, y, 4) ** 2).sum())(x, y)
    want = torch.autograd.grad((select.scores(q, k, 4) ** 2).sum(), q)[0]
    np.testing.assert_allclose(np.asarray(got).swapaxes(1, 2), want, rtol=1e-4, atol=1e-5)


def test_gate_in_a_score_mod_gets_its_gradient():
    """A gate of blocks may weigh what it chooses: the gradient of a captured table."""
    q, k, v = torch.randn(3, 1, 2, 32, 8)
    gate = torch.randn(1, 2, 4, 4, requires_grad=True)
    map = select.choose(gate, 8, keep=2, always="window(1)")
    text = "causal & topk_tiles(map, 8)", "score + gate[b, h, q // 8, k // 8]"
    fk.compile(*text, backend="aten").check(q, k, v, map=map, gate=gate).require()


def test_strict_promotion_of_jax_is_left_alone():
    x = jnp.asarray(RNG.normal(size=(1, 32, 2, 8)), jnp.bfloat16)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for rule in ({"keep": 2}, {"mass": 0.5}, {"threshold": 0.2}):
            choice = jax.jit(lambda x, rule=rule: select.blocks(x, x, 8, always="sinks(1)", **rule))
            assert choice(x).shape == (1, 2, 4, 4)


def test_half_precision_adds_up_in_float32():
    """A mean of 8 keys of 4,096 would overflow float16 while it is added up."""
    q, k = torch.ones(1, 1, 8, 4, dtype=torch.float16), torch.full((1, 1, 32, 4), 60_000.0, dtype=torch.float16)
    assert select.scores(q, k, 8).dtype == torch.float32
    assert torch.isfinite(select.scores(q, k, 8)).all()


Q = torch.ones(1, 4, 32, 8)
BAD = {
    "none": (lambda: select.blocks(Q, Q), "give one of keep, mass and threshold; this call has none of them"),
    "two": (lambda: select.blocks(Q, Q, keep=2, mass=0.5), "this call has keep and mass"),
    "keep": (lambda: select.blocks(Q, Q, keep=0), "keep is 0; it is a number of blocks, 1 or more"),
    "keep is True": (lambda: select.blocks(Q, Q, keep=True), "keep is True; it is a number of blocks"),
    "share of nothing": (lambda: select.blocks(Q, Q, keep=0.0), "keep is 0.0; it is a number of blocks"),
    "share too large": (lambda: select.blocks(Q, Q, keep=1.5), "keep is 1.5; it is a number of blocks"),
    "mass": (lambda: select.blocks(Q, Q, mass=95), "mass is 95; it is above 0 and at most 1"),
    "threshold": (lambda: select.blocks(Q, Q, threshold=0.0), "threshold is 0.0; it is above 0"),
    "block": (lambda: select.blocks(Q, Q, 0, keep=2), "block is 0; it is a number of tokens, or a pair"),
    "blocks": (lambda: select.blocks(Q, Q, (8, 8, 8), keep=2), r"block is \(8, 8, 8\)"),
    "pool": (lambda: select.blocks(Q, Q, 8, keep=2, pool="sum"), "the pool is 'sum'; it is 'mean', 'max', 'min'"),
    "pool's shape": (lambda: select.scores(Q, Q, 8, pool=lambda x: x), r"the pool gives \[1, 4, 4, 8, 8\] for \["),
    "share": (lambda: select.blocks(Q, Q, 8, keep=2, share="all"), "share is 'all'; it is 'group' or 'head'"),
    "axes": (lambda: select.blocks(Q[0], Q, keep=2), r"q is \[4, 32, 8\]; it is \(batch, heads, length, head_dim\)"),
    "no keys": (lambda: select.blocks(Q, Q[:, :, :0], keep=2), r"k is \[1, 4, 0, 8\]"),
    "integers": (lambda: select.blocks(Q.int(), Q, keep=2), "q is an array of int32; give one of float16"),
    "heads": (lambda: select.blocks(Q, Q[:, :3], keep=2), "the heads of q are a multiple of those of k"),
    "batch": (lambda: select.blocks(Q, torch.ones(2, 4, 32, 8), keep=2), "with one batch and head_dim"),
    "head_dim": (lambda: select.blocks(Q, torch.ones(1, 4, 32, 4), keep=2), "with one batch and head_dim"),
    "frameworks": (lambda: select.blocks(Q, jnp.ones((1, 4, 32, 8)), keep=2), "q and k are arrays of different"),
    "numpy": (lambda: select.blocks(Q.numpy(), Q, keep=2), "q is a ndarray; give arrays of torch or JAX"),
    "layout": (lambda: select.blocks(Q, Q, keep=2, axes="bsd"), "the axis order is 'bsd'"),
    "parameter": (lambda: select.blocks(Q, Q, keep=2, w=3), "`w` is no parameter of 'causal'"),
    "no value": (lambda: select.blocks(Q, Q, keep=2, mask="window(w)"), "`w` has no value"),
    "lengths": (lambda: select.choose(Q, 8, keep=2, q_len=300), "scores has 32 x 8 blocks; 300 queries and 64"),
    "kv_heads": (lambda: select.choose(Q, 8, keep=2, kv_heads=3), "kv_heads is 3; scores has 4 heads"),
    "negative kv_heads": (lambda: select.choose(Q, 8, keep=2, kv_heads=-2), "kv_heads is -2; scores has 4 heads"),
    "scores": (lambda: select.choose(Q[0], 8, keep=2), r"scores is \[4, 32, 8\]; it is \[batch, heads, query blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unsuitable_arguments_of_choices_are_refused(case):
    call, text = BAD[case]
    with pytest.raises((fk.ParameterError, fk.ShapeError), match=text):
        call()
