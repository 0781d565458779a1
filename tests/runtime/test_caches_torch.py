"""Caches of torch: prompts, chunks and steps under one mask are rows of the dense run."""

import numpy as np
import pytest

import frisket as fk
from frisket.caches import PagePool

torch = pytest.importorskip("torch")
caches = pytest.importorskip("frisket.caches.torch")
quantised = pytest.importorskip("frisket.runtime.caches.torch_store").quantised
KVCache, PagedKVCache, RingKVCache = caches.KVCache, caches.PagedKVCache, caches.RingKVCache

BATCH, HEADS, KV_HEADS, DIM, V_DIM, LENGTH = 3, 4, 2, 16, 8, 80
DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")}
MASKS = {
    "causal": ("causal", None, {}),
    "window": ("causal & window(24)", "softcap(20)", {}),
    "sinks": ("causal & (sinks(4) | window(24))", "score - 0.1 * (q - k)", {}),
    "documents": (
        "causal & doc[b, q] == doc[b, k] & window(24)",
        "score * gain[h]",
        {
            "doc": torch.from_numpy(np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, LENGTH))).astype(np.int32)),
            "gain": torch.linspace(0.5, 1.5, HEADS),
        },
    ),
}
# new tokens of every sequence, one chunk after another: prompts, padding, single tokens, nothing at all
STEPS = (9, 4, 0), (1, 1, 1), (0, 1, 1), (13, 17, 2), (1, 1, 1), (1, 0, 1), (21, 3, 40), (1, 1, 1), (2, 2, 2)


def streams(seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM)
    return [torch.randn(BATCH, heads, LENGTH, dim, generator=g) for heads, dim in shapes]


def kept(x, dtype):
    """What a cache of `dtype` holds of x, in float64."""
    if dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        stored, scale = quantised(x, dtype)
        return stored.double() * scale.double()[..., None]
    return x.to(dtype).double()


def dense(case, q, k, v, **more):
    mask, score, tables = MASKS[case]
    return fk.reference(q.double(), k, v, mask, score, layout="bhsd", **tables, **more)


class Paged:
    """A paged cache and the pool that its rows are sequences of."""

    def __init__(self, dtype, page=16, spare=0):
        width = -(-LENGTH // page)
        self.pool = PagePool(BATCH * width + spare, page)
        self.cache = PagedKVCache.create(BATCH * width + spare, page, BATCH, width, KV_HEADS, DIM, V_DIM, dtype)
        for b in reversed(range(BATCH)):  # pages are not in order
            self.pool.allocate(b)

    def attention(self, att, q, k, v, counts, **params):
        told = [q.shape[2]] * BATCH if counts is None else counts
        self.cache.seat(self.pool, range(BATCH), told, self.pool.append(dict(enumerate(told))))
        return self.cache.attention(att, q, k, v, counts, **params)


def made(kind, dtype):
    if kind == "paged":
        return Paged(dtype)
    rest = KV_HEADS, DIM, V_DIM, dtype
    return KVCache.create(BATCH, LENGTH, *rest) if kind == "plain" else RingKVCache.create(BATCH, 24, *rest)


def chunk(x, starts, counts):
    """Tokens [starts, starts + counts) of every sequence, padded with what must not matter."""
    out = torch.full((*x.shape[:2], max(counts), x.shape[3]), 1e4)
    for b, (start, n) in enumerate(zip(starts, counts)):
        out[b, :, :n] = x[b, :, start : start + n]
    return out


def generated(cache, att, q, k, v, steps, **params):
    """The outputs of all tokens, as the cache gave them chunk by chunk."""
    starts, out = [0] * BATCH, torch.full((*q.shape[:3], V_DIM), torch.nan)
    for counts in steps:
        parts = [chunk(x, starts, counts) for x in (q, k, v)]
        found = cache.attention(att, *parts, None if len(set(counts)) == 1 else counts, **params)
        for b, n in enumerate(counts):
            out[b, :, starts[b] : starts[b] + n] = found[b, :, :n]
            assert not found[b, :, n:].any()  # padding sees nothing
            starts[b] += n
    return out, starts


CASES = [
    *(("plain", dtype, "window") for dtype in DTYPES),
    *(("plain", "int8", mask) for mask in MASKS if mask != "window"),
    *(("paged", dtype, mask) for dtype, mask in (("float32", "causal"), ("int8", "documents"), ("bfloat16", "window"))),
    *(("ring", dtype, mask) for dtype, mask in (("float32", "window"), ("int8", "documents"))),
]


@pytest.mark.parametrize(("kind", "dtype", "mask"), CASES)
def test_chunks_and_steps_are_rows_of_the_dense_run(kind, dtype, mask):
    text, score, tables = MASKS[mask]
    q, k, v = streams()
    if dtype == "bfloat16":  # such queries beside such keys
        q = q.bfloat16().float()
    att = fk.compile(text, score)
    kind_of = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    cache = made(kind, DTYPES[dtype])
    real = generated(_Cast(cache, kind_of), att, q, k, v, STEPS, **tables)
    out, lengths = real
    want = dense(mask, q, *(kept(x, DTYPES[dtype]) for x in (k, v)))
    bound = 0.02 if dtype == "bfloat16" else 2e-5
    for b, n in enumerate(lengths):
        assert n == sum(c[b] for c in STEPS)
        np.testing.assert_allclose(out[b, :, :n], want[b, :, :n], rtol=bound, atol=bound)
    assert getattr(cache, "cache", cache).lengths.tolist() == lengths


class _Cast:
    """A cache that is given tokens of another dtype."""

    def __init__(self, cache, dtype):
        self.cache, self.dtype = cache, dtype

    def attention(self, att, q, k, v, counts, **params):
        return self.cache.attention(att, *(x.to(self.dtype) for x in (q, k, v)), counts, **params).float()
