"""Rings that keep their first tokens, of torch and JAX, against attention to the visible tokens, written out pair by
pair: ragged chunks, drafts, 8 bits, and positions of the sequence or inside the cache."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest

import frisket as fk

B, H, G, D, V = 2, 4, 2, 16, 8  # sequences, heads, key heads, dim, dim of values
SINKS, SEEN, WINDOW, DRAFTS = 3, 10, 16, 5  # of the window's tokens a query sees 10
SLOTS = SINKS + WINDOW
MASK = f"causal & (window({SEEN}) | sinks({SINKS}))"
TREE = [-1, 0, 0, 1, 2]
# how many tokens each sequence gets; chunks of 9 or 30 overwrite what they see; a tree's path, of which some are kept
TREES = ([0, 2, 4], [2, 1]), ([0, 1, 3], [0, 2])
CHUNKS = [9, 2], [1, 0], [30, 21], [1, 1], [9, 9], TREES[0], [1, 1], [9, 7], TREES[1], [1, 1], [1, 0]
FEW = [9, 9], [9, 4], [9, 9], [9, 1]  # one program of JAX
EXHAUSTIVE = pytest.mark.exhaustive
_draw = np.random.default_rng(5)
Q, K, VALUES = (_draw.standard_normal((B, 60, n, d)).astype(np.float32) for n, d in ((H, D), (G, D), (G, V)))


def angles(at):
    return at[..., None] * 10.0 ** -np.linspace(0, 3, D // 2)


def rotated(x, at):
    """x [tokens, heads, dim] of numpy at positions [tokens]."""
    cos, sin = (f(angles(at))[:, None] for f in (np.cos, np.sin))
    x, y = np.split(x, 2, -1)
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], -1)


class OfTorch:
    def __init__(self, dtype, **ring):
        self.torch = pytest.importorskip("torch")
        self.module = pytest.importorskip("frisket.caches.torch")
        self.cache = self.module.RingKVCache.create(B, WINDOW, G, D, V, dtype, sinks=SINKS, **ring)
        self.farthest = 0

    def rotary(self, x, at):
        self.farthest = max(self.farthest, int(at.max()))
        cos, sin = (f(angles(at.numpy()))[:, None] for f in (np.cos, np.sin))
        cos, sin = (self.torch.from_numpy(np.float32(y)) for y in (cos, sin))
        x, y = x.chunk(2, -1)
        return self.torch.cat([x * cos - y * sin, y * cos + x * sin], -1)

    def stored(self, x):
        if self.cache.k_scale is None:
            return x
        values, scale = self.module.quantized(self.torch.from_numpy(x), self.torch.int8)
        return (values.float() * scale[..., None]).numpy()

    def attention(self, att, q, k, v, counts, rotary, tree=None):
        q, k, v = (self.torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
        more = {"rotary": self.rotary} if rotary else {}
        return self.cache.attention(att, q, k, v, counts, tree=tree, **more).transpose(1, 2).numpy()

    def keep(self, path, drafted, counts):
        self.cache.keep(path, drafted, counts)


class OfJax:
    def __init__(self, dtype, **ring):
        self.jax = pytest.importorskip("jax")
        self.module = pytest.importorskip("frisket.caches.jax")
        self.cache = self.module.RingKVCache.create(B, WINDOW, G, D, V, dtype, sinks=SINKS, **ring)
        self.farthest, self.steps = 0, {}

    def rotary(self, x, at):
        at = at[..., None, None] * 10.0 ** -np.linspace(0, 3, D // 2, dtype=np.float32)
        cos, sin = self.jax.numpy.cos(at), self.jax.numpy.sin(at)
        x, y = self.jax.numpy.split(x, 2, -1)
        return self.jax.numpy.concatenate([x * cos - y * sin, y * cos + x * sin], -1)

    def stored(self, x):
        if self.cache.k_scale is None:
            return x
        values, scale = map(np.asarray, self.jax.jit(self.module.quantized, static_argnums=1)(x, np.dtype("int8")))
        return values.astype(np.float32) * scale[..., None]

    def attention(self, att, q, k, v, counts, rotary, tree=None):
        more = {"rotary": self.rotary} if rotary else {}
        key = q.shape[1], tree is None
        if key not in self.steps:
            run = partial(self.module.RingKVCache.attention, att=att, tree=tree, **more)
            self.steps[key] = self.jax.jit(
                lambda cache, q, k, v, n: run(cache, q=q, k=k, v=v, counts=n), donate_argnums=0
            )
        out, self.cache = self.steps[key](self.cache, q, k, v, np.array(counts))
        assert self.steps[key]._cache_size() == 1
        return np.asarray(out)

    def keep(self, *path):
        if "keep" not in self.steps:
            self.steps["keep"] = self.jax.jit(self.module.RingKVCache.keep, donate_argnums=0)
        self.cache = self.steps["keep"](self.cache, *map(np.array, path))
        assert not self.cache.overflowed.any()


def held(start, end, new):
    """The tokens that a call reads: the sinks and the last ones, of before the chunk where that overwrites some that it
    sees; and how many others there were."""
    last = end if new <= WINDOW - SEEN + 1 else start
    dropped = max(0, last - SLOTS)
    return [t for t in range(end) if t < SINKS or t >= dropped + SINKS], dropped


def dense(q, k, v, at, where, seen, rotary):
    """Attention of q [n, heads, dim] at positions `at` to keys at `where`, under alibi, in float64."""
    if rotary:
        q, k = rotated(q, at), rotated(k, where)
    k, v = (np.repeat(x, H // G, 1) for x in (k, v))
    distance = at[:, None] - where
    slope = 2.0 ** (-8 / H * (1 + np.arange(H)))
    scores = np.einsum("qhd,khd->hqk", q, k, dtype=float) / np.sqrt(D) - slope[:, None, None] * abs(distance)
    scores[:, ~seen] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def visible(at, where):
    return (at[:, None] >= where) & ((at[:, None] - where < SEEN) | (where < SINKS))


def streamed(of, dtype, absolute, rotary, chunks=CHUNKS):
    """The answers to all chunks, compared; the cache."""
    ring = of(dtype, drafts=DRAFTS, absolute=absolute)
    mine = {"backend": "aten"} if of is OfTorch else {}
    att = fk.compile(MASK, "alibi", **mine)
    stored_k, stored_v = map(ring.stored, (K, VALUES))
    tokens, drawn = [[] for _ in range(B)], 0
    for chunk in chunks:
        tree = TREE if isinstance(chunk, tuple) else None
        counts = [len(TREE)] * B if tree else chunk
        new = max(counts)
        rows = np.arange(drawn, drawn + new) % K.shape[1]
        drawn += new
        given = [x[:, rows].copy() for x in (Q, K, VALUES)]
        for x in given:
            for b, n in enumerate(counts):
                x[b, n:] = 1e4  # padding
        out = ring.attention(att, *given, counts, rotary, tree)
        for b, n in enumerate(counts):
            if not n:
                continue
            start, ids = len(tokens[b]), [*tokens[b], *rows[:n]]
            keys, dropped = held(start, start + n, new)
            at, where = np.arange(start, start + n), np.array(keys)
            seen = np.ones((n, len(keys)), bool)
            if tree:
                above = [{i} for i in range(n)]
                for i, parent in enumerate(TREE):
                    above[i] |= above[parent] if parent >= 0 else set()
                depth = np.array([len(x) - 1 for x in above])
                at = start + depth
                seen = np.array([[t < start or t - start in above[i] for t in keys] for i in range(n)])
                where = np.array([t if t < start else start + depth[t - start] for t in keys])
            if not absolute:
                at, where = at - dropped, np.where(np.array(keys) < SINKS, where, where - dropped)
            read = [ids[t] for t in keys]
            want = dense(
                Q[b, rows[:n]], stored_k[b, read], stored_v[b, read], at, where, seen & visible(at, where), rotary
            )
            np.testing.assert_allclose(out[b, :n], want, atol=5e-6)
            assert not out[b, n:].any()
        if tree:
            path, kept = chunk
            ring.keep([path] * B, len(TREE), kept)
            counts = kept
        for b, n in enumerate(counts):
            tokens[b] += list(rows[:n] if tree is None else rows[chunk[0][:n]])
    assert ring.cache.lengths.tolist() == [len(x) for x in tokens]
    return ring


@pytest.fixture
def called(monkeypatch):
    """Every call of torch's caches is one of their attention, with appends of torch: nothing is compiled for them."""
    monkeypatch.setattr(pytest.importorskip("frisket.runtime.torch.decode"), "MAX_STEP_QUERIES", 0)
    monkeypatch.setattr(pytest.importorskip("frisket.runtime.caches.torch_plain"), "native_append", lambda *_: False)


WAYS = [  # dtype, absolute, rotary
    ("float32", False, True), ("int8", True, False),
    *(pytest.param(*x, marks=EXHAUSTIVE) for x in (
        ("int8", False, True), ("float32", True, False), ("float32", True, True), ("float32", False, False),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "absolute", "rotary"), WAYS)
def test_torch_pinned_ring_attends_to_visible_tokens(dtype, absolute, rotary, called):
    ring = streamed(OfTorch, dtype, absolute, rotary)
    assert ring.farthest < SLOTS + 30 or absolute  # tokens of the cache, and of a chunk


def test_jax_pinned_ring_attends_to_visible_tokens():
    streamed(OfJax, *WAYS[0], FEW)


@EXHAUSTIVE
@pytest.mark.parametrize(("dtype", "absolute", "rotary"), WAYS)
def test_jax_pinned_ring_attends_to_all_chunks(dtype, absolute, rotary):
    streamed(OfJax, dtype, absolute, rotary)


@EXHAUSTIVE
@pytest.mark.parametrize("absolute", [True, False])
def test_native_steps_of_pinned_rings_are_called_ones(absolute, monkeypatch):
    """The planned step and append of C++, and the call."""
    torch, module = pytest.importorskip("torch"), pytest.importorskip("frisket.runtime.torch.decode")
    att, rings = fk.compile(MASK, "alibi", backend="cpp"), [OfTorch("int8", absolute=absolute).cache for _ in range(2)]
    torch.manual_seed(0)
    for n in (9, *[1] * 30, 4, 40, 1, 1):
        q, k, v = (torch.randn(B, heads, n, dim) for heads, dim in ((H, D), (G, D), (G, V)))
        native = rings[0].attention(att, q, k, v)
        with monkeypatch.context() as patched:
            patched.setattr(module, "MAX_STEP_QUERIES", 0)
            patched.setattr("frisket.runtime.caches.torch_plain.native_append", lambda *_: False)
            np.testing.assert_allclose(native, rings[1].attention(att, q, k, v), atol=2e-6)
    assert rings[0]._steps
    assert all(torch.equal(x, y) for x, y in zip(rings[0].buffers(), rings[1].buffers(), strict=True))


def test_step_of_a_pinned_ring_reads_sinks_and_window():
    jax = pytest.importorskip("jax")
    from frisket.runtime.caches.positions import Ring, placed

    att, start = placed(fk.compile("causal & (window(64) | sinks(4))"), Ring(1024, 4).places()), jax.numpy.array([9000])
    plan = att.plan(1, 1028, 1, 4, cache_start=start, cache_end=start + 1, flat=True)
    bounds = np.asarray(plan.rows((16, 64)).bounds)
    assert (bounds[..., 3] - bounds[..., 0]).sum() == 3  # the tile of the sinks, and two of the window


# -- what is refused, and what goes round -------------------------------------------------------------------------


def module_of(framework):
    pytest.importorskip(framework)
    return pytest.importorskip(f"frisket.caches.{framework}")


SIZES = {
    "sinks=-1 of a ring; it is a number of tokens, 0 or more": {"sinks": -1},
    "sinks=2.0 of a ring; it is a number of tokens, 0 or more": {"sinks": 2.0},
    "window=0 of a ring; it is a number of tokens, 1 or more": {"window": 0, "sinks": 4},
    "drafts=16 leave nothing before them in a ring of window=16 tokens": {"drafts": 16},
    "absolute='no'; give True or False": {"absolute": "no"},
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("message", SIZES)
def test_pinned_ring_refuses_sizes_in_words(framework, message):
    sizes = {"window": 16, **SIZES[message]}
    with pytest.raises(fk.FrisketError, match=message):
        module_of(framework).RingKVCache.create(B, kv_heads=G, head_dim=D, **sizes)


ADVICE = {  # the mask, the ring, and what is said
    (
        "causal & (window(10) | sinks(5))",
        "",
    ): r"a ring of 16 tokens keeps 16 .*\n.*\n  the first 5 .* with sinks=5, which",
    (
        "causal & (window(10) | sinks(5))",
        "sinks=3",
    ): "16 tokens and the first 3 keeps 16 before.*lets query 20 see key 3, 17",
    ("causal & (window(18) | sinks(3))", "sinks=3"): "make the ring larger, the chunk shorter, or add `& window",
    (
        "causal & (window(14) | sinks(3))",
        "sinks=3 drafts=5",
    ): "with 5 drafts keeps 11 before them, and the mask lets query 15",
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("mask", "ring"), ADVICE)
def test_pinned_ring_says_which_keys_it_drops(framework, mask, ring):
    sizes = {n: int(x) for n, x in (part.split("=") for part in ring.split())}
    cache = module_of(framework).RingKVCache.create(1, 16, 1, 8, **sizes)
    x = np.zeros((1, 1, 1, 8), np.float32)
    if framework == "torch":
        x = pytest.importorskip("torch").from_numpy(x)
    with pytest.raises(fk.ShapeError, match=f"(?s){ADVICE[mask, ring]}"):
        cache.attention(fk.compile(mask), x, x, x)
    assert not np.asarray(cache.lengths).any()


@pytest.mark.parametrize("of", [OfTorch, OfJax])
def test_pinned_ring_takes_back_no_more_than_its_drafts(of, called):
    ring = of("float32", drafts=3)
    given = [x[:, :9].copy() for x in (Q, K, VALUES)]
    if of is OfTorch:
        given = [ring.torch.from_numpy(x).transpose(1, 2) for x in given]
    cache = ring.cache.append(*given[1:])
    cache = cache.truncate(np.array([7, 9]))
    assert cache.lengths.tolist() == [7, 9]
    with pytest.raises(fk.ParameterError, match="at most 3 of its last can be taken back\n  make it with drafts="):
        cache.truncate(np.array([5, 9]))  # four fewer than it has had
    with pytest.raises(fk.ParameterError, match="at most 3 of its last"):
        cache.keep(np.array([[0], [0]]), np.array([4, 4]), np.array([0, 0]))
    att = fk.compile(MASK)
    new = [x[:, :, :4] if of is OfTorch else x[:, :4] for x in given]
    with pytest.raises(fk.ParameterError, match="this one has room for 3\n  make it with drafts=<nodes"):
        cache.attention(att, *new, tree=[-1, 0, 1, 2])
    assert cache.lengths.tolist() == [7, 9]
    assert cache.truncate(np.array([0, 6])).lengths.tolist() == [0, 6]
    with pytest.raises(fk.ParameterError, match="rotary is a str; give a function"):
        cache.attend(att, new[0], rotary="yes")
    with pytest.raises(fk.ShapeError, match=r"rotary\(x, positions\) has the shape"):
        cache.attend(att, new[0], rotary=lambda x, at: x[..., :1])


def test_overflowed_reports_drafts_taken_back_under_jit():
    ring = OfJax("float32", drafts=3)
    cache = ring.cache.append(K[:, :9], VALUES[:, :9])
    cache = ring.jax.jit(ring.module.RingKVCache.truncate)(cache, np.array([5, 6]))
    assert cache.overflowed.tolist() == [True, False]
    assert ring.jax.jit(ring.module.RingKVCache.truncate)(cache, np.array([0, 5])).overflowed.tolist() == [False, True]


def test_state_of_a_pinned_ring_goes_round(called):
    ring = OfTorch("int8", drafts=3, absolute=False)
    torch, att, first = ring.torch, fk.compile(MASK, backend="aten"), ring.cache
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in (Q, K, VALUES))
    first.attention(att, *(x[:, :, :30] for x in (q, k, v)))
    first.truncate([28, 30])
    second = OfTorch("int8", drafts=3, absolute=False).cache
    second.load_state_dict(first.state_dict())
    token = [x[:, :, 40:41] for x in (q, k, v)]
    want = copy.deepcopy(first).attention(att, *token)
    for cache in (second, pickle.loads(pickle.dumps(first)), first):
        with pytest.raises(fk.ParameterError, match="at most 3"):
            cache.truncate([26, 30])
        assert torch.equal(cache.attention(att, *token), want)
        assert cache.known() == [29, 31]
    assert first.extra_repr().endswith("int8, sinks=3, drafts=3, absolute=False")
    assert (first.window, first.capacity, first.k.shape[2]) == (16, 19, 19)


def test_pinned_ring_is_carried_by_a_scan():
    ring, att = OfJax("float32", drafts=2), fk.compile(MASK)

    def step(cache, x):
        out, cache = cache.attention(att, *(y[:, None] for y in x))
        return cache, out[:, 0]

    run = ring.jax.jit(lambda cache, *xs: ring.jax.lax.scan(step, cache, xs))
    cache, out = run(ring.cache, *(x.swapaxes(0, 1) for x in (Q, K, VALUES)))
    want = fk.reference(Q, K, VALUES, MASK, layout="bshd")
    np.testing.assert_allclose(np.swapaxes(out, 0, 1), want, atol=3e-6)
    assert cache.lengths.tolist() == [60, 60]
