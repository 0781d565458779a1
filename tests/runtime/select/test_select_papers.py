"""Choices of published methods, compared with their dense definitions, in loops and float64."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket import select

RNG = np.random.default_rng(1)
FRAMEWORKS = ["torch", "jax"]


def arrays(*shapes):
    return [RNG.normal(size=shape) for shape in shapes]


def run(framework, fn, *xs):
    """The tables of a choice for arrays [batch, heads, length, dim] of numpy."""
    if framework == "torch":
        out = fn(*(torch.from_numpy(x.astype(np.float32)) for x in xs))
    else:
        out = jax.jit(fn)(*(jnp.asarray((x.swapaxes(1, 2) if x.ndim == 4 else x).astype(np.float32)) for x in xs))
    return tuple(map(np.asarray, out)) if isinstance(out, tuple) else np.asarray(out)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def dense(q, k, v, seen, bias=0.0):
    """Attention over the pairs of `seen`, heads grouped; 0 where a query sees nothing."""
    size = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, size, 1) for x in (k, v))
    score = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3]) + bias
    score = np.where(seen, score, -np.inf)
    top = score.max(-1, keepdims=True)
    w = np.exp(score - np.where(top > -np.inf, top, 0))
    total = w.sum(-1, keepdims=True)
    return np.where(total > 0, w / np.where(total > 0, total, 1), 0) @ v


def tokens_of(map, block, length):
    """A table of blocks of keys as one of keys."""
    return np.repeat(map, block, -1)[..., :length]


def best(scores, n, forced=()):
    """The `n` indices with the largest finite scores, `forced` ones first."""
    order = sorted((j for j in range(len(scores)) if scores[j] > -np.inf), key=lambda j: (j not in forced, -scores[j]))
    return order[:n]


# -- MoBA ------------------------------------------------------------------------------------------------------------


def moba_definition(q, k, block, keep):
    """Equations 5 and 6: the gate is +inf in the own block, -inf in later ones."""
    batch, heads, length, _ = q.shape
    n = -(-length // block)
    seen = np.zeros((batch, heads, length, n), bool)
    for b, h, t in np.ndindex(batch, heads, length):
        head = k[b, h * k.shape[1] // heads]
        gate = np.array([q[b, h, t] @ head[i * block : i * block + block].mean(0) for i in range(n)])
        gate[t // block + 1 :] = -np.inf
        seen[b, h, t, best(gate, keep, [t // block])] = True
    return seen


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("length", [64, 53])
def test_moba_equals_its_definition(framework, length):
    q, k = arrays((2, 4, length, 8), (2, 2, length, 8))
    got = run(framework, lambda q, k: select.moba(q, k, block=8, keep=3), q, k)
    np.testing.assert_array_equal(got, moba_definition(q, k, 8, 3))


def test_moba_attention_and_gradients_equal_the_reference():
    q, k, v = arrays(*[(1, 2, 48, 8)] * 3)
    x, y, z = (torch.from_numpy(a.astype(np.float32)) for a in (q, k, v))
    att = fk.compile("causal & map[b, h, q, k // 8]", backend="aten")
    map = select.moba(x, y, block=8, keep=2)
    seen = tokens_of(moba_definition(q, k, 8, 2), 8, 48) & np.tril(np.ones((48, 48), bool))
    np.testing.assert_allclose(att(x, y, z, map=map), dense(q, k, v, seen), atol=2e-6)
    att.check(x, y, z, map=map).require()


# -- NSA -------------------------------------------------------------------------------------------------------------


def nsa_importance(q, compressed, length, stride, block):
    """Equations 8 to 10, of 0-based indices: a compressed key counts once for each piece it shares with a block."""
    batch, heads, tokens, dim = q.shape
    groups, spans = compressed.shape[1], compressed.shape[2]
    weights = np.zeros((batch, heads, tokens, spans))
    importance = np.zeros((batch, groups, tokens, -(-tokens // block)))
    for b, h, t in np.ndindex(batch, heads, tokens):
        g = h * groups // heads
        passed = [c for c in range(spans) if c * stride + length - 1 <= t]
        if passed:
            weights[b, h, t, passed] = softmax(compressed[b, g, passed] @ q[b, h, t] / math.sqrt(dim))
        for c in passed:
            for piece in range(c, c + length // stride):
                importance[b, g, t, piece * stride // block] += weights[b, h, t, c]
    return weights, importance


def nsa_choice(importance, heads, block, keep):
    batch, groups, tokens, n = importance.shape
    seen = np.zeros((batch, heads, tokens, n), bool)
    for b, h, t in np.ndindex(batch, heads, tokens):
        own = t // block
        score = importance[b, h * groups // heads, t].copy()
        score[own + 1 :] = -np.inf
        seen[b, h, t, best(score, keep, {0, own, max(own - 1, 0)})] = True
    return seen


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("length", "stride", "block"), [(8, 4, 16), (8, 8, 8), (12, 4, 8)])
def test_nsa_choice_equals_its_definition(framework, length, stride, block):
    tokens = 96
    q, k = arrays((1, 4, tokens, 8), (1, 2, (tokens - length) // stride + 1, 8))
    got = run(framework, lambda q, k: select.nsa(q, k, length=length, stride=stride, block=block, keep=4), q, k)
    _, importance = nsa_importance(q, k, length, stride, block)
    want = nsa_choice(importance, 4, block, 4)
    # blocks of equal importance, such as 0, may be taken in any order
    for at in np.ndindex(want.shape[:-1]):
        values = importance[at[0], at[1] // 2, at[2]]
        np.testing.assert_allclose(np.sort(values[got[at]]), np.sort(values[want[at]]), atol=1e-6)
        own = at[2] // block
        assert got[at][[0, own, max(own - 1, 0)]].all()
        assert not got[at][own + 1 :].any()


def test_nsa_branches_add_up_to_the_dense_definition():
    """Compression, selection and a window, each times its gate, and gradients of all three."""
    tokens, span, block, window = 64, 8, 8, 16
    q, k, v = arrays((1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8))
    gates = 1 / (1 + np.exp(-RNG.normal(size=(3, 1, 4, tokens, 1))))
    x, y, z = (torch.from_numpy(a).requires_grad_() for a in (q, k, v))
    g = torch.from_numpy(gates)
    short = [select.pooled(a, span) for a in (y, z)]  # the compression: a mean stands for the learned one
    map = select.nsa(x, short[0], length=span, stride=span, block=block, keep=4)
    branches = (
        fk.attention(x, *short, "8 * k + 7 <= q", backend="aten"),
        fk.attention(x, y, z, "causal & map[b, h, q, k // 8]", map=map, backend="aten"),
        fk.attention(x, y, z, "causal & window(16)", backend="aten"),
    )
    out = sum(gate * branch for gate, branch in zip(g, branches))
    at = np.arange(tokens)
    causal = at[:, None] >= at
    pooled = [a.reshape(1, 2, -1, span, 8).mean(3) for a in (k, v)]
    importance = nsa_importance(q, pooled[0], span, span, block)[1]
    parts = (
        dense(q, *pooled, (span * np.arange(tokens // span) + span - 1 <= at[:, None])),
        dense(q, k, v, tokens_of(np.asarray(map), block, tokens) & causal),
        dense(q, k, v, causal & (at[:, None] - at < window)),
    )
    np.testing.assert_allclose(out.detach(), (gates * parts).sum(0), atol=1e-12)
    assert np.asarray(map).sum() == nsa_choice(importance, 4, block, 4).sum()
    out.square().sum().backward()
    step = 1e-6
    for a in (x, y, z):
        assert a.grad.abs().sum() > 0
    # the gradient along one direction, by differences of the same choice
    move = torch.from_numpy(RNG.normal(size=v.shape))
    more = branches_of(x, y, z + step * move, map, g).detach() - branches_of(x, y, z - step * move, map, g).detach()
    loss = (2 * out.detach() * more).sum() / (2 * step)
    np.testing.assert_allclose((z.grad * move).sum(), loss, rtol=1e-6)


def branches_of(x, y, z, map, g):
    short = [select.pooled(a, 8) for a in (y, z)]
    return (
        g[0] * fk.attention(x, *short, "8 * k + 7 <= q", backend="aten")
        + g[1] * fk.attention(x, y, z, "causal & map[b, h, q, k // 8]", map=map, backend="aten")
        + g[2] * fk.attention(x, y, z, "causal & window(16)", backend="aten")
    )


# -- Quest -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_quest_takes_pages_with_the_largest_bounds(framework):
    length, page, keep = 75, 8, 4
    q, k = arrays((2, 4, 1, 8), (2, 4, length, 8))
    pages = [k[:, :, i : i + page] for i in range(0, length, page)]
    low, high = (np.stack([f(p, 2) for p in pages], 2) for f in (np.min, np.max))
    want = np.zeros((2, 4, 1, len(pages)), bool)
    for b, h in np.ndindex(2, 4):
        bound = [np.maximum(q[b, h, 0] * low[b, h, i], q[b, h, 0] * high[b, h, i]).sum() for i in range(len(pages))]
        want[b, h, 0, best(np.array(bound), keep)] = True
        assert all(bound[i] >= (pages[i][b, h] @ q[b, h, 0]).max() - 1e-12 for i in range(len(pages)))
    choice = {"page": page, "keep": keep, "mask": "full", "kv_len": length}
    got = run(framework, lambda q, low, high: select.quest(q, low, high, **choice), q, low, high)
    np.testing.assert_array_equal(got, want)
    if framework == "torch":
        x, y = torch.from_numpy(q), torch.from_numpy(k)
        for how, made in (("min", low), ("max", high)):
            np.testing.assert_array_equal(select.pooled(y, page, how), made)
        out = fk.attention(x, y, y, "map[b, h, 0, k // 8]", map=torch.from_numpy(got), backend="aten")
        np.testing.assert_allclose(out, dense(q, k, k, tokens_of(want, page, length)), atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_quest_shares_pages_by_weights_at_its_scale(framework):
    """The query heads of a key head average weights, a softmax of the bounds times the scale."""
    draw = np.random.default_rng(1)  # whose numbers no other test moves: these choose differently at the two scales
    q, k = (draw.normal(size=shape).astype(np.float32) for shape in ((1, 4, 1, 8), (1, 1, 80, 8)))
    low, high = (f(k.reshape(1, 1, 10, 8, 8), 3) for f in (np.min, np.max))
    tables = []
    for scale in (0.01, 5.0):
        bounds = np.maximum(q * low, q * high).sum(-1)[0] * scale
        weights = softmax(bounds).mean(0)
        want = np.zeros((1, 4, 1, 10), bool)
        want[0, :, 0, best(weights, 3)] = True
        how = {"page": 8, "keep": 3, "mask": "full", "kv_len": 80, "scale": scale}
        got = run(framework, lambda q, low, high, how=how: select.quest(q, low, high, **how), q, low, high)
        np.testing.assert_array_equal(got, want)
        tables.append(got)
    assert (tables[0] != tables[1]).any()


# -- DSA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lightning_indexer_takes_the_best_tokens(framework):
    length, keep = 40, 7
    q, k, weights = *arrays((2, 3, length, 4), (2, 1, length, 4)), RNG.uniform(size=(2, 3, length))
    want = np.zeros((2, 1, length, length), bool)
    for b, t in np.ndindex(2, length):
        index = np.array([(weights[b, :, t] * np.maximum(q[b, :, t] @ k[b, 0, s], 0)).sum() for s in range(length)])
        index[t + 1 :] = -np.inf
        order = best(index, keep)
        want[b, 0, t, order] = True
        if sum(index[order] == 0) and t >= keep:  # tokens that no head sees tie
            want[b, 0, t] = False
    got = run(framework, lambda q, k, w: select.lightning(q, k, w, keep), q, k, weights)
    assert (got.sum(-1) == np.minimum(np.arange(length) + 1, keep)).all()
    rows = want.any(-1)
    np.testing.assert_array_equal(got[rows], want[rows])


# -- VSA -------------------------------------------------------------------------------------------------------------


def test_vsa_stages_equal_the_dense_definition():
    """Coarse attention of pooled cubes, whose best cubes the fine attention reads; each has a gate."""
    length, cube, keep = 64, 8, 3
    q, k, v = arrays(*[(1, 2, length, 8)] * 3)
    gates = RNG.normal(size=(2, 1, 2, length, 1))
    x, y, z = (torch.from_numpy(a) for a in (q, k, v))
    small = [select.pooled(a, cube) for a in (x, y, z)]
    coarse = fk.attention(*small, backend="aten").repeat_interleave(cube, 2)
    map = select.blocks(x, y, cube, keep=keep, mask="full", share="head")
    fine = fk.attention(x, y, z, "topk_tiles(map, 8)", map=map, backend="aten")
    out = torch.from_numpy(gates[0]) * coarse + torch.from_numpy(gates[1]) * fine
    pooled = [a.reshape(1, 2, -1, cube, 8).mean(3) for a in (q, k, v)]
    score = pooled[0] @ pooled[1].swapaxes(2, 3) / math.sqrt(8)
    seen = np.zeros(score.shape, bool)
    for at in np.ndindex(score.shape[:-1]):
        seen[(*at, best(score[at], keep))] = True
    whole = np.repeat(tokens_of(seen, cube, length), cube, 2)
    far = np.repeat(softmax(score) @ pooled[2], cube, 2)
    np.testing.assert_allclose(out, gates[0] * far + gates[1] * dense(q, k, v, whole), atol=1e-12)


# -- MInference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("last", [16, 100])
def test_vertical_slash_equals_its_definition(framework, last):
    length, vertical, slash, sinks, window = 70, 12, 9, 3, 4
    q, k = arrays((1, 4, length, 8), (1, 2, length, 8))
    sums = np.zeros((2, 1, 4, length))  # by key, by distance
    for h in range(4):
        for t in range(max(length - last, 0), length):
            w = softmax(k[0, h // 2, : t + 1] @ q[0, h, t] / math.sqrt(8))
            for s in range(t + 1):
                sums[0, 0, h, s] += w[s]
                sums[1, 0, h, t - s] += w[s]
    want = np.zeros(sums.shape, bool)
    for h in range(4):
        want[0, 0, h, best(sums[0, 0, h], vertical, set(range(sinks)))] = True
        want[1, 0, h, best(sums[1, 0, h], slash, set(range(window)))] = True
    sizes = {"vertical": vertical, "slash": slash, "last": last, "sinks": sinks, "window": window}
    got = run(framework, lambda q, k: select.vertical_slash(q, k, **sizes), q, k)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


# -- XAttention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("length", [64, 56])
def test_antidiagonal_choice_equals_its_definition(framework, length):
    block, stride, mass = 16, 4, 0.8
    q, k = arrays((1, 2, length, 8), (1, 2, length, 8))
    squares, n = length // stride, -(-length // block)
    want = np.zeros((1, 2, n, n), bool)
    for h in range(2):
        sums = np.zeros((n, n))
        for i in range(squares):
            score = np.array([
                sum(q[0, h, i * stride + stride - 1 - a] @ k[0, h, j * stride + a] for a in range(stride))
                for j in range(i + 1)
            ])  # fmt: skip
            w = softmax(score / math.sqrt(8) / stride)
            for j in range(i + 1):
                sums[i * stride // block, j * stride // block] += w[j]
        for i in range(n):
            order, total = sorted(range(i + 1), key=lambda j: -sums[i, j]), 0.0
            for j in order:
                if total >= mass * sums[i].sum():
                    break
                want[0, h, i, j], total = True, total + sums[i, j]
    got = run(framework, lambda q, k: select.antidiagonal(q, k, block, stride, mass=mass), q, k)
    np.testing.assert_array_equal(got, want)


# -- SeerAttention ---------------------------------------------------------------------------------------------------


def test_learned_gate_chooses_and_gets_gradients():
    """A gate of projected, pooled queries and keys, trained on the pooled maximum of the dense weights."""
    length, block = 32, 8
    q, k = (torch.from_numpy(a) for a in arrays((1, 2, length, 8), (1, 2, length, 8)))
    wq, wk = (torch.from_numpy(RNG.normal(size=s)).requires_grad_() for s in ((8, 4), (24, 4)))

    def gate(wq, wk):
        keys = torch.cat([select.pooled(k, block, how) for how in ("max", "min", "mean")], -1) @ wk
        return select.scores(select.pooled(q, block) @ wq, keys, 1)

    scores = gate(wq, wk)
    want = np.zeros((1, 2, 4, 4))
    for h, i, j in np.ndindex(2, 4, 4):
        a, b = q[0, h, i * 8 : i * 8 + 8].numpy(), k[0, h, j * 8 : j * 8 + 8].numpy()
        keys = np.concatenate([b.max(0), b.min(0), b.mean(0)]) @ wk.detach().numpy()
        want[0, h, i, j] = (a.mean(0) @ wq.detach().numpy()) @ keys / 2
    np.testing.assert_allclose(scores.detach(), want, atol=1e-12)
    map = select.choose(scores, block, threshold=0.2, share="head")
    causal = np.tril(np.ones((4, 4), bool))
    weights = np.where(causal, np.exp(want), 0)
    np.testing.assert_array_equal(map, (weights / weights.sum(-1, keepdims=True) >= 0.2) & causal)
    assert torch.autograd.gradcheck(gate, (wq, wk))


# -- all -------------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "moba": {"block": 512, "keep": 3},
    "nsa": {"length": 32, "stride": 16, "block": 64, "keep": 16, "first": 1, "last": 2},
    "quest": {"page": 16},
    "lightning": {"keep": 2048},
    "antidiagonal": {"block": 128, "stride": 8},
    "vertical_slash": {"vertical": 1000, "slash": 6096, "last": 64, "sinks": 30, "window": 100},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_of_a_method_are_the_published_ones(name):
    parameters = inspect.signature(getattr(select, name)).parameters
    assert {n: p.default for n, p in parameters.items() if isinstance(p.default, int)} == PUBLISHED[name]


BAD = {
    "stride": (lambda q: select.nsa(q, q[:, :, :1], stride=5), "stride is 5; it divides length, 32, and block, 64"),
    "spans": (lambda q: select.nsa(q, q[:, :, :2]), "k has 2 compressed keys; 32 queries have 1"),
    "pages": (lambda q: select.quest(q, q, q[:, :, :4], keep=2), "they describe the same pages"),
    "weights": (lambda q: select.lightning(q, q[:, :1], q[0]), r"weights is \[2, 32, 8\]; it is \[batch, heads, q"),
    "length": (lambda q: select.antidiagonal(q, q, 24, 5, mass=0.9), "stride is 5; it divides block, 24"),
    "tokens": (lambda q: select.antidiagonal(q, q, 24, 12, mass=0.9), "stride is 12; it divides block, 24, and"),
    "lengths": (lambda q: select.vertical_slash(q, q[:, :, :8]), "q has 32 tokens and k 8; they have the same length"),
    "keys": (lambda q: select.antidiagonal(q, q[:, :, :16], 8, 4, mass=0.9), "the length of q and k, 32 and 16, which"),
    "vertical": (lambda q: select.vertical_slash(q, q, vertical=0), "vertical is 0; it is a number of tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_unsuitable_arguments_of_papers_are_refused(case):
    call, text = BAD[case]
    with pytest.raises((fk.ParameterError, fk.ShapeError), match=text):
        call(torch.ones(1, 2, 32, 8))
