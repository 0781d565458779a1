"""Caches of JAX against the reference: every cache, prompts in chunks, ragged batches, 8 bits, drafts; in place,
compiled once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.caches import PagePool
from frisket.caches.jax import KVCache, PagedKVCache, RingKVCache, quantized
from frisket.runtime.caches.pool import PagedRows, seated
from frisket.runtime.caches.positions import APPENDED, PADDED, SHARD, Ring, placed
from frisket.runtime.modeling.layers import concatenate_to_cache, init_cache
from runtime.caches import llama_jax

B, T, H, G, D, V = 2, 40, 4, 2, 16, 24
COUNTS = [(9, 3), (0, 9), (9, 9), (1, 1), (1, 0), (9, 9), (9, 8)]  # of chunks of 9: prompts and steps
EXHAUSTIVE = pytest.mark.exhaustive
BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")
draw = np.random.default_rng(3)
Q, K, VALUES = (draw.standard_normal((B, T, h, d)).astype(np.float32) for h, d in ((H, D), (G, D), (G, V)))
SLOPE = draw.standard_normal((B, H)).astype(np.float32)
PROBLEMS = {
    "window": ("causal & window(16)", "alibi", {}, None),
    "tables": ("causal & window(w)", "softcap(5) + slope[b, h] * (k - q)", {"slope": SLOPE, "w": 13}, None),
    "sinks": ("q - 16 < k <= q", None, {}, np.float32([0.5, 1, -1, 2])),
    "ahead": ("abs(q - k) < 4", None, {}, None),  # keys after the query, as far as they are there
}


def dequantized(x, dtype):
    values, scale = map(np.asarray, jax.jit(quantized, static_argnums=1)(x, jnp.dtype(dtype)))
    return values.astype(np.float32) * scale[..., None]


def made(kind, dtype="float32"):
    if kind == "plain":
        return KVCache.create(B, 64, G, D, V, dtype)
    if kind == "paged":
        return PagedKVCache.create(12, 16, B, 4, G, D, V, dtype)
    return RingKVCache.create(B, 16 if kind == "ring" else 40, G, D, V, dtype)


def driven(cache, att, counts, new=9, **params):
    """(real tokens, out, lse) of each chunk of `new` tokens, jitted and donated, and the cache; `counts` [chunks,
    batch] of them are real, the next ones of each sequence."""
    pool = PagePool(12, 16)
    for b in range(B):
        pool.allocate(b)
    step = jax.jit(lambda cache, *given: cache.attention(att, *given, return_lse=True, **params), donate_argnums=0)
    at, found = np.zeros(B, int), []
    for real in counts:
        if isinstance(cache, PagedKVCache):  # pages of the two are neither in order nor beside one another
            cache = cache.seat(pool, range(B), real, pool.append(dict(enumerate(real))))
        rows = (at[:, None] + np.arange(new)) % T
        given = (jnp.asarray(np.take_along_axis(x, rows[:, :, None, None], 1)) for x in (Q, K, VALUES))
        (out, lse), cache = step(cache, *given, jnp.asarray(real))
        found.append((real, np.asarray(out), np.asarray(lse)))
        at += real
    assert step._cache_size() == 1
    assert cache.lengths.tolist() == at.tolist()
    return found, cache


def close(found, wanted, sinks=None, atol=3e-6):
    nothing = np.full((H, 1), -np.inf) if sinks is None else sinks[:, None]  # what a query that sees no key has
    out, lse = wanted
    at = np.zeros(B, int)
    for real, mine, my_lse in found:
        for b, n in enumerate(real):
            np.testing.assert_allclose(mine[b, :n], out[b, at[b] : at[b] + n], atol=atol)
            np.testing.assert_allclose(my_lse[b, :, :n], lse[b, :, at[b] : at[b] + n], atol=atol)
            assert not mine[b, n:].any()  # padding sees nothing
            np.testing.assert_allclose(my_lse[b, :, n:], np.broadcast_to(nothing, my_lse[b, :, n:].shape), rtol=1e-6)
        at += real


def wanted(mask, score, params, sinks, dtype="float32", n=T):
    k, v = (x[:, :n] if dtype == "float32" else dequantized(x[:, :n], dtype) for x in (K, VALUES))
    return fk.reference(Q[:, :n], k, v, mask, score, layout="bshd", sinks=sinks, return_lse=True, **params)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("plain", "tables"), ("ring", "sinks")]
    + [pytest.param("plain", name, marks=EXHAUSTIVE) for name in ("window", "sinks")]
    + [
        pytest.param(*both, marks=EXHAUSTIVE)
        for both in (("paged", "window"), ("paged", "sinks"), ("long ring", "sinks"))
    ],
)
def test_prompts_chunks_and_steps_under_one_mask(kind, name):
    """Prompts, chunks and steps of a ragged batch."""
    mask, score, params, sinks = PROBLEMS[name]
    given = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in params.items()}
    found, _ = driven(made(kind), fk.compile(mask, score, sinks=sinks), COUNTS, **given)
    close(found, wanted(*PROBLEMS[name]), sinks)


def test_keys_that_are_not_there_yet_are_not_seen():
    mask, *_ = PROBLEMS["ahead"]
    found, _ = driven(made("plain"), fk.compile(mask), [(9, 9), (9, 9)])
    ends = np.repeat([9, 18], 9)
    close(found, wanted(f"({mask}) & k < end[q]", None, {"end": ends}, None, n=18))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("plain", "int8"), *(pytest.param("plain", t, marks=EXHAUSTIVE) for t in BYTES[1:])]
    + [pytest.param(kind, "int8", marks=EXHAUSTIVE) for kind in ("paged", "ring")],
)
def test_jax_caches_store_8_bits_with_scales(kind, dtype):
    found, cache = driven(made(kind, dtype), fk.compile(*PROBLEMS["window"][:2]), [(9, 9)] * 4)
    assert {cache.k.dtype.name, cache.v.dtype.name} == {dtype}
    assert cache.k_scale.dtype == jnp.float32
    close(found, wanted(*PROBLEMS["window"], dtype))
    if dtype == "int8":
        out, exact = np.concatenate([x for _, x, _ in found], 1), wanted(*PROBLEMS["window"])[0][:, :36]
        assert 1e-4 < np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2


def test_jax_quantization_of_zeros_and_the_largest_number():
    x = np.zeros((1, 3, 1, 8), np.float32)
    x[0, 1, 0, 2], x[0, 2] = -3.0, 1e-30
    made = jax.jit(quantized, static_argnums=1)
    for dtype, most in zip(BYTES, (127, 448, 57344), strict=True):
        values, scale = map(np.asarray, made(x, jnp.dtype(dtype)))
        assert float(values[0, 1, 0, 2]) == -most
        assert not scale[0, 0].any()
        assert not values[0, 0].any()
        np.testing.assert_allclose(values.astype(np.float32) * scale[..., None], x, rtol=1e-6)


def test_jax_quantization_refuses_other_dtypes():
    for dtype in (jnp.float16, jnp.int32, "int16"):
        with pytest.raises(fk.ParameterError, match="caches hold int8, float8_e4m3fn, float8_e5m2 in 8 bits"):
            quantized(jnp.ones((2, 8)), dtype)


# -- in place, compiled once ---------------------------------------------------------------------------------


def step_of(att):
    return jax.jit(lambda cache, q, k, v: cache.attention(att, q, k, v)[::-1], donate_argnums=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=EXHAUSTIVE), "int8"])
def test_a_step_keeps_no_copy_of_the_cache(dtype):
    """Neither of the buffer it appends to, nor of what 8 bits stand for."""
    cache = KVCache.create(1, 1 << 15, 2, 64, dtype=dtype)
    q, k = (jnp.asarray(np.zeros((1, 1, heads, 64), np.float32)) for heads in (4, 2))
    step = step_of(fk.compile("causal")).lower(cache, q, k, k).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < 4 * cache.k.size // 16  # of one float32 copy of k
    assert step.as_text().partition("\n")[0].count("-alias)") == len(jax.tree.leaves(cache))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("places", "keys"), [
    (APPENDED, 1024), (Ring(256).places(), 256),
    *(pytest.param(places, 1024, marks=pytest.mark.exhaustive) for places in (PADDED, SHARD)),
])  # fmt: skip
def test_a_step_reads_the_tiles_of_its_window(places, keys):
    att = placed(fk.compile("causal & window(64)"), places)
    known = {"cache_first": jnp.int32(0), "cache_batch": 0, "cache_head": 0}
    tables = {n: x for n, x in known.items() if n in att.program.names}
    start = jnp.array([900])
    plan = att.plan(1, keys, 1, 4, cache_start=start, cache_end=start + 1, flat=True, **tables)
    read = np.asarray(plan.rows((16, 64)).bounds)[..., 3] - np.asarray(plan.rows((16, 64)).bounds)[..., 0]
    assert read.sum() == 2  # positions 837..900 are in two tiles of 64


def test_growing_compiles_nothing():
    cache, count = made("plain"), 0
    att = fk.compile("causal & window(16)")

    @jax.jit
    def step(cache, q, k, v):
        nonlocal count
        count += 1
        return cache.attention(att, q, k, v)[1]

    for i in range(12):
        cache = step(cache, *(jnp.asarray(x[:, i : i + 1]) for x in (Q, K, VALUES)))
    assert count == 1
    assert cache.lengths.tolist() == [12, 12]


def test_jax_cache_refuses_more_tokens_than_its_room():
    cache = jax.jit(KVCache.append)(KVCache.create(B, 10, G, D, V), K[:, :8], VALUES[:, :8], np.array([8, 3]))
    with pytest.raises(fk.CapacityError, match="sequence 0 has 8 tokens and 4 new ones, the cache has room for 10"):
        cache.append(K[:, 8:12], VALUES[:, 8:12])
    full = jax.jit(KVCache.append)(cache, K[:, 8:12], VALUES[:, 8:12])
    assert full.overflowed.tolist() == [True, False]
    assert full.lengths.tolist() == [10, 7]
    np.testing.assert_array_equal(full.k[0, 8:], K[0, 8:10])  # the rest is dropped
    np.testing.assert_array_equal(full.k[1, :7], np.concatenate([K[1, :3], K[1, 8:12]]))
    emptied = full.truncate([0, 5])
    assert emptied.lengths.tolist() == [0, 5]
    assert emptied.overflowed.tolist() == [False, False]


# -- pages -----------------------------------------------------------------------------------------------


def test_jax_forks_share_pages_until_a_write():
    pool, att = PagePool(8, 16), fk.compile("causal")
    cache = PagedKVCache.create(8, 16, B, 3, G, D, V)
    step = step_of(att)
    pool.allocate("a", 20)
    new = (np.repeat(x[:1, :20], B, 0) for x in (K, VALUES))
    cache = jax.jit(PagedKVCache.append)(cache.seat(pool, ["a", None], [20, 0]), *new)
    assert cache.overflowed.tolist() == [False, True]  # a row of no sequence has no page
    pool.fork("a", "b")
    copies = pool.append({"a": 1, "b": 1})
    assert len(copies) == 1
    assert pool.available == 8 - 3
    cache, out = step(cache.seat(pool, ["a", "b"], 1, copies), *(jnp.asarray(x[:, 20:21]) for x in (Q, K, VALUES)))
    for b in range(B):
        k, v = (np.concatenate([x[:1, :20], x[b : b + 1, 20:21]], 1) for x in (K, VALUES))
        ref = fk.reference(Q[b : b + 1, 20:21], k, v, layout="bshd")
        np.testing.assert_allclose(out[b : b + 1], ref, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_cache_of_pages_is_donated_before_it_is_seated(dtype):
    first, second = (PagedKVCache.create(8, 16, B, 3, G, D, V, dtype) for _ in range(2))
    held = jax.jit(lambda cache: cache, donate_argnums=0)(first)
    assert held.lengths.tolist() == held.room.tolist() == [0] * B
    pool = PagePool(8, 16)
    pool.allocate("a", 9)
    pool.fork("a", "b")
    assert second.seat(pool, ["a", "b"], 9, pool.own({"b": 0})).room.tolist() == [16, 16]


def test_pages_that_are_not_there():
    pool = PagePool(2, 16)
    pool.allocate("a", 16)
    cache = PagedKVCache.create(2, 16, 1, 2, G, D, V).seat(pool, ["a"], 16)
    new = jnp.asarray(K[:1, :17]), jnp.asarray(VALUES[:1, :17])
    with pytest.raises(fk.CapacityError, match="room for 16\n  let its pool hand out pages"):
        cache.append(*new)
    full = jax.jit(PagedKVCache.append)(cache, *new)
    assert full.overflowed.tolist() == [True]
    assert full.lengths.tolist() == [16]
    page = pool.pages_of("a")[0]
    np.testing.assert_array_equal(full.k[page], K[0, :16])  # nothing is written where there is no page
    assert not full.k[1 - page].any()
    with pytest.raises(fk.ShapeError, match="this cache has 1 rows and 2 pages of 16"):
        cache.seat(PagePool(3, 16), ["a"])
    with pytest.raises(fk.ShapeError, match="17 new tokens of the sequence 'a', which has 16; append them"):
        cache.seat(pool, ["a"], 17)
    with pytest.raises(fk.CapacityError, match="'a' has 1 pages, a row of this cache 0"):
        seated(pool, ["a"], 0, PagedRows(2, 16, 1, 0))
    with pytest.raises(fk.ShapeError, match="a multiple of 16"):
        PagedKVCache.create(2, 24, 1, 2, G, D)


# -- rings -----------------------------------------------------------------------------------------------


def test_rings_ask_how_far_back_a_mask_sees():
    ring = RingKVCache.create(1, 16, G, D, V)
    new = [jnp.asarray(x[:1, :3]) for x in (Q, K, VALUES)]
    with pytest.raises(
        fk.ShapeError, match="keeps 16 before new ones, and the mask lets query 17 see key 0, 17 before it"
    ):
        ring.attention(fk.compile("causal & window(18)"), *new)
    with pytest.raises(fk.ShapeError, match="nothing but tables says how far back"):
        ring.attention(fk.compile("same(doc)"), *new, doc=jnp.zeros(99, jnp.int32))
    with pytest.raises(fk.ParameterError, match="the mask reads KV_LEN, and what a ring holds has no length"):
        ring.attention(fk.compile("bottom_right & window(4)"), *new)
    later = jax.jit(RingKVCache.append)(ring, *new[1:])
    with pytest.raises(fk.ShapeError, match="with 3 new ones keeps 13 before them"):
        later.attend(fk.compile("causal & window(16)"), new[0])
    for mask, values in (("causal & window(14)", {}), ("causal & window(w)", {"w": np.int64(14)})):
        out = jax.eval_shape(partial(later.attend, fk.compile(mask), **values), new[0])
        assert out.shape == (1, 3, H, V)
    assert [int(later.truncate(n).lengths[0]) for n in (0, 3, 9)] == [0, 3, 3]
    with pytest.raises(fk.ParameterError, match="can only be emptied"):
        later.truncate([2])
    with pytest.raises(fk.ShapeError, match="each is 0 or more"):
        later.truncate(-1)
    with pytest.raises(fk.ParameterError, match="take a KVCache"):
        later.attend(fk.compile("causal & window(4)"), new[0], tree=[-1, 0, 0])


# -- drafts ----------------------------------------------------------------------------------------------

#        0      a tree of six drafts behind 10 and 7 tokens
#      1   2
#     3 4   5
PARENTS = np.array([-1, 0, 0, 1, 1, 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["trees", *(pytest.param(kind, marks=EXHAUSTIVE) for kind in ("plain", "paged"))])
def test_jax_cache_attends_to_trees_of_drafts(kind):
    """A draft is attention to its own path alone; what is kept of the tree is a sequence like any other."""
    att, lengths, n = fk.compile("causal & window(9)", "alibi"), (10, 7), len(PARENTS)
    parents = np.stack([PARENTS, [-1, 0, 1, 2, 3, 3]]) if kind == "trees" else PARENTS
    cache, pool = made("paged" if kind == "paged" else "plain"), PagePool(12, 16)
    new = [jnp.asarray(x[:, :10]) for x in (K, VALUES)]
    if kind == "paged":
        for b in range(B):
            pool.allocate(b, lengths[b])
        cache = cache.seat(pool, range(B), lengths)
    cache = jax.jit(type(cache).append)(cache, *new, np.array(lengths))
    if kind == "paged":
        cache = cache.seat(pool, range(B), n, pool.append(dict.fromkeys(range(B), n)))
    drafts = [x[:, 20 : 20 + n] for x in (Q, K, VALUES)]
    step = jax.jit(lambda cache, q, k, v, tree: cache.attention(att, q, k, v, tree=tree))
    out, cache = step(cache, *map(jnp.asarray, drafts), jnp.asarray(parents))

    def behind(b, path, q):
        k, v = (
            np.concatenate([x[b : b + 1, : lengths[b]], y[b : b + 1, path]], 1)
            for x, y in ((K, drafts[1]), (VALUES, drafts[2]))
        )
        origin = 0, 0, k.shape[1] - q.shape[1], 0
        return fk.reference(q, k, v, "causal & window(9)", "alibi", layout="bshd", origin=origin)

    for b in range(B):
        mine = parents if parents.ndim == 1 else parents[b]
        for i in range(n):
            path = [i]
            while mine[path[0]] >= 0:
                path.insert(0, mine[path[0]])
            np.testing.assert_allclose(out[b, i], behind(b, path, drafts[0][b : b + 1, i : i + 1])[0, 0], atol=3e-6)
    paths, counts = [[0, 2, 5], [0, 1, 1]], [3, 2]
    cache = jax.jit(lambda cache: cache.keep(np.array(paths), n, np.array(counts)))(cache)
    assert cache.lengths.tolist() == [13, 9]
    if kind == "paged":
        for b in range(B):
            pool.truncate(b, lengths[b] + counts[b])
        cache = cache.seat(pool, range(B), 1, pool.append(dict.fromkeys(range(B), 1)))
    step = jax.jit(lambda cache, q, k, v: cache.attention(att, q, k, v))
    out, _ = step(cache, *(x[:, 30:31] for x in (Q, K, VALUES)))
    for b in range(B):
        drafts = [np.concatenate([x[:, :n], y[:, 30:31]], 1) for x, y in zip(drafts, (Q, K, VALUES), strict=True)]
        path = [*paths[b][: counts[b]], n]
        np.testing.assert_allclose(out[b : b + 1], behind(b, path, Q[b : b + 1, 30:31]), atol=3e-6)


# -- a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=EXHAUSTIVE) for kind in ("int8", "plain", "float8_e4m3fn", "paged", "ring")]
)
def test_jax_model_generates_from_each_cache(kind):
    """256 tokens; logits are those of the whole sequence at once, dense, on the same stored numbers."""
    prompt, new = 9, 256
    w, batch, dims = llama_jax.weights(), 2, (llama_jax.KV_HEADS, llama_jax.DIM)
    text, seat, pools = "causal & window(40)" if kind == "ring" else "causal", None, []
    if kind == "paged":
        pools = [PagePool(40, 16)]
        for b in range(batch):
            pools[0].allocate(b)
        caches = [PagedKVCache.create(40, 16, batch, 17, *dims) for _ in w["layers"]]

        def seat(caches, n):
            copies = pools[0].append(dict.fromkeys(range(batch), n))
            return [c.seat(pools[0], range(batch), n, copies) for c in caches]
    elif kind == "ring":
        caches = [RingKVCache.create(batch, 40, *dims) for _ in w["layers"]]
    else:
        dtype = "float32" if kind == "plain" else kind
        caches = [KVCache.create(batch, 272, *dims, dtype=dtype) for _ in w["layers"]]
    first = jnp.asarray(draw.integers(0, llama_jax.VOCAB, (batch, prompt)))
    tokens, logits, caches, traced = llama_jax.generated(w, fk.compile(text), caches, first, new, seat)
    assert traced == [(batch, prompt), (batch, 1)]
    n = tokens.shape[1] - 1
    attend = plain = llama_jax.attend_densely(fk.mask(text).dense(n, n)[0, 0])
    if kind in BYTES:

        def attend(i, q, k, v):
            c = caches[i]
            held = [(x.astype(jnp.float32) * s[..., None])[:, :n] for x, s in ((c.k, c.k_scale), (c.v, c.v_scale))]
            assert all(abs(x - y).max() < (0.1 if kind == "int8" else 0.3) for x, y in zip(held, (k, v), strict=True))
            return plain(i, q, *held)

    positions = jnp.broadcast_to(jnp.arange(n), (batch, n))
    np.testing.assert_allclose(logits, llama_jax.forward(w, tokens[:, :-1], positions, attend), atol=2e-4)
    assert len(np.unique(tokens)) > 10  # not one token again and again


# -- the door of model code ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=EXHAUSTIVE)])
def test_concatenate_to_cache(dtype):
    cache = init_cache(B, 24, G, D, V, dtype)
    step = jax.jit(concatenate_to_cache, donate_argnums=0)
    causal = np.tri(20, 24, dtype=bool)
    for start, n in ((0, 9), (9, 1), (10, 10)):
        at = slice(start, start + n)
        cache, mask = step(cache, K[:, at], VALUES[:, at], causal[None, None, at])
        assert mask.shape == (B, 1, n, 24)
        np.testing.assert_array_equal(mask, np.broadcast_to(causal[at] & (np.arange(24) < start + n), mask.shape))
    assert cache.lengths.tolist() == [20, 20]
    held = np.asarray(cache.k.astype(jnp.float32) * (1 if dtype == "float32" else cache.k_scale[..., None]))
    np.testing.assert_allclose(
        held[:, :20], K[:, :20] if dtype == "float32" else dequantized(K[:, :20], dtype), rtol=1e-6
    )
    cache, mask = jax.jit(concatenate_to_cache)(cache, K[:, :1], VALUES[:, :1])
    np.testing.assert_array_equal(mask[:, 0, 0], np.broadcast_to(np.arange(24) < 21, (B, 24)))
    with pytest.raises(fk.ShapeError, match=r"it is \[batch, heads, 1, 24\]"):
        concatenate_to_cache(cache, K[:, :1], VALUES[:, :1], np.ones((1, 1, 1, 20), bool))


@pytest.mark.exhaustive
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_masks_of_combine_masks(whole):
    """Whatever flax's `combine_masks` takes beside ours: any dtype, any axes of 1; a bias is none of them."""
    combine = pytest.importorskip("flax.linen").combine_masks
    draw = np.random.default_rng(2)
    for shape in ((B, 1, 3, 24), (1, H, 3, 1), (B, 1, 1, 24), (3, 24), (1, 1, 1, 1), (3, 1)):
        for dtype in (bool, np.int32, np.float32, jnp.bfloat16) if whole or shape == (3, 24) else (bool,):
            mask = jnp.asarray(draw.integers(0, 2, shape)).astype(dtype)
            cache = init_cache(B, 24, G, D, V)
            _, ours = concatenate_to_cache(cache, K[:, :3], VALUES[:, :3])
            _, found = concatenate_to_cache(cache, K[:, :3], VALUES[:, :3], mask)
            wanted = combine(ours, mask.reshape((1,) * (4 - mask.ndim) + shape), dtype=bool)
            np.testing.assert_array_equal(found, wanted)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        concatenate_to_cache(init_cache(B, 24, G, D, V), K[:, :3], VALUES[:, :3], np.ones((3, 24), np.int32))
        paged = PagedKVCache.create(12, 16, B, 4, G, D, V)
        paged.truncate([0, 0]).keep(np.zeros((B, 1), np.int32), 0, [0, 0])
    bias = np.where(np.tri(3, 24), 0, -np.inf)
    with pytest.raises(fk.ParameterError, match=r"negative numbers, as a bias .*: mask=bias == 0"):
        concatenate_to_cache(init_cache(B, 24, G, D, V), K[:, :3], VALUES[:, :3], bias)
    with pytest.raises(fk.ParameterError, match="give mesh= too"):
        init_cache(B, 24, G, D, V, head_axis="tp")


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
@pytest.mark.parametrize("step", [lambda f: f, jax.jit])
def test_jax_cache_of_float8_that_was_cast_is_refused(kind, step):
    """Their scales were of another dtype's largest number: results were wrong, or NaN."""
    cache = made(kind, "float8_e4m3fn")
    cast = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype("float32")) if x.dtype.kind in "fV" else x, cache)
    k, v = (jnp.asarray(x[:, :1]) for x in (K, VALUES))
    with pytest.raises(fk.ParameterError, match="has scales, and its k and v are float32"):
        step(lambda cache: cache.append(k, v))(cast)


def test_jax_caches_refuse_bad_arguments():
    cache = KVCache.create(B, 16, G, D, V)
    q, k, v = (jnp.asarray(x[:, :1]) for x in (Q, K, VALUES))
    for att, what in (
        ("causal", r"give an attention: frisket.compile\('causal'\)"),
        (fk.compile("causal", dropout=0.1), "without dropout"),
        (fk.compile("causal & q < cache_end[b]"), "`cache_end` is a name of the caches' own"),
    ):
        with pytest.raises(fk.ParameterError, match=what):
            cache.attend(att, q)
    for given, what in (
        ((K[:1, :1], VALUES[:1, :1]), r"k has the shape \(1, 1, 2, 16\)"),
        ((K[:, :1], VALUES[:, :1, :1]), r"\[batch, new, kv_heads, dim\] = \[2, 1, 2, 24\]"),
        ((k, v, jnp.array([1.0, 2.0])), r"counts are float32\[2\]"),
        ((k, v, jnp.array([1, 2])), r"counts are \[1 2\], of 1 new tokens"),
    ):
        with pytest.raises(fk.ShapeError, match=what):
            cache.append(*given)
    for one in (cache, PagedKVCache.create(2, 16, B, 1, G, D, V)):
        for path in ([0, 1], [[0, 1]], [[0.0], [1.0]]):
            with pytest.raises(fk.ShapeError, match=r"it is nodes, integers \[2, m\]"):
                one.keep(jnp.array(path), 1)
        for wrong in (-1, 1.5, [[1], [1]], [1, 2, 3]):
            with pytest.raises(fk.ShapeError, match="lengths are"):
                one.truncate(wrong)
        for tree, what in (([-1, 0], r"for 2 x 1 queries; these are int64\[2\]"), ([0], "node 0 of a tree leads back")):
            with pytest.raises(fk.ShapeError, match=what):
                one.attend(fk.compile("causal"), q, tree=tree)
        for what in ("origin", "sizes"):
            with pytest.raises(fk.ParameterError, match=f"`{what}` is given, and a cache knows it itself"):
                one.attend(fk.compile("causal"), q, **{what: (0, 0, 0, 0)})
        with pytest.raises(fk.ShapeError, match=r"q has the shape \(2, 1, 4\)"):
            one.attend(fk.compile("causal"), jnp.asarray(Q[:, :1, :, 0]))
        with pytest.raises(fk.ShapeError, match="drafted are"):
            one.keep([[0], [0]], [1.0, 2.0])
    for n in (1, 20):  # one token beside the ring's others, and more than it has room for
        with pytest.raises(fk.ParameterError, match="take a KVCache"):
            RingKVCache.create(B, 16, G, D, V).attention(
                fk.compile("causal & window(9)"), *(jnp.asarray(x[:, :n]) for x in (Q, K, VALUES)), tree=[-1] * n
            )
    assert cache.append(k, v, 1).lengths.tolist() == [1, 1]  # one number for all, as in torch
    for wrong in ("int32", "foo"):
        with pytest.raises(fk.ParameterError, match="caches hold float16"):
            KVCache.create(B, 16, G, D, dtype=wrong)
    with pytest.raises(fk.ShapeError, match="every size is at least 1"):
        KVCache.create(B, 0, G, D)
