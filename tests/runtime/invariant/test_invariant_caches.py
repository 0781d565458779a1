"""`invariant=True` over KV caches: a plain, a paged and a ring cache give the bits of one call."""

import pytest
import torch
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.caches import PagePool
from frisket.caches.torch import KVCache, PagedKVCache, RingKVCache
from frisket.dsl.errors import ParameterError

pytestmark = [needs_compiler, pytest.mark.usefixtures("automatic")]
BATCH, HEADS, KV_HEADS, DIM, LENGTH, PROMPT = 2, 4, 2, 64, 620, 600
WINDOW, PAGE = 24, 16
MASK = f"causal & window({WINDOW})"


def drawn(dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, n, LENGTH, DIM, generator=draw).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]


class Pages:
    """A paged cache whose pool hands out the pages of each step."""

    def __init__(self, dtype):
        self.pool = PagePool(pages=100, page=PAGE)
        sizes = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
        self.cache = PagedKVCache.create(pages=100, page=PAGE, batch=BATCH, width=48, **sizes)

    def attention(self, att, q, k, v):
        new, copies = q.shape[2], []
        for b in range(BATCH):
            known = self.cache.lengths[b] > 0
            copies += (self.pool.append({b: new}) if known else self.pool.allocate(b, new)) or []
        self.cache.seat(self.pool, list(range(BATCH)), new, copies)
        return self.cache.attention(att, q, k, v)


def made(kind, dtype):
    if kind == "paged":
        return Pages(dtype)
    if kind == "ring":
        return RingKVCache.create(BATCH, WINDOW + 88, KV_HEADS, DIM, dtype=dtype)
    return KVCache.create(BATCH, 768, KV_HEADS, DIM, dtype=dtype)


def over(cache, att, qkv, chunk):
    """A prompt, in chunks or at once, and then steps of one token or chunks."""
    results, start = [], 0
    while start < LENGTH:
        n = PROMPT if not start and chunk == 1 else min(chunk, LENGTH - start)
        results.append(cache.attention(att, *(x[:, :, start : start + n] for x in qkv)))
        start += n
    return torch.cat(results, 2)


@pytest.mark.parametrize("chunk", [1, 150])
@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_caches_give_the_bits_of_one_call(kind, chunk):
    att, qkv = fk.compile(MASK, invariant=True), drawn()
    assert torch.equal(over(made(kind, torch.float32), att, qkv, chunk), att(*qkv))


def test_int8_caches_agree_with_one_another():
    att, qkv = fk.compile(MASK, invariant=True), drawn()
    first = over(made("plain", torch.int8), att, qkv, 1)
    assert torch.equal(over(made("paged", torch.int8), att, qkv, 77), first)
    torch.testing.assert_close(first, att(*qkv), rtol=0.1, atol=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_caches_agree_in_each_dtype_and_chunk(kind, dtype):
    qkv = drawn(torch.float32 if dtype == torch.int8 else dtype)
    att = fk.compile("causal & window(w)", "softcap(30)", invariant=True, w=WINDOW)
    wanted = over(made("plain", dtype), att, qkv, 1)
    for chunk in (2, 7, 64, 512):
        assert torch.equal(over(made(kind, dtype), att, qkv, chunk), wanted)


@pytest.mark.exhaustive
def test_ring_with_padded_steps_keeps_the_bits():
    att, (q, k, v) = fk.compile("causal & window(w)", invariant=True, w=WINDOW), drawn()
    whole, ring = att(q, k, v), made("ring", torch.float32)
    ring.attention(att, *(x[:, :, :PROMPT] for x in (q, k, v)))
    arrays = (x[:, :, PROMPT : PROMPT + 8] for x in (q, k, v))
    out = ring.attention(att, *arrays, counts=[8, 3])
    assert torch.equal(out[0], whole[0, :, PROMPT : PROMPT + 8])
    assert torch.equal(out[1, :, :3], whole[1, :, PROMPT : PROMPT + 3])


def test_rings_and_cascades_without_one_order_are_refused():
    att, (q, k, v) = fk.compile(MASK, invariant=True), drawn()
    step = [x[:, :, :1] for x in (q, k, v)]
    for options, why in ({"window": 30}, "window=30"), ({"window": 32, "sinks": 4}, "sinks"):
        ring = RingKVCache.create(BATCH, kv_heads=KV_HEADS, head_dim=DIM, **options)
        with pytest.raises(ParameterError, match=f"reads no ring with {why}"):
            ring.attention(att, *step)
    pages = Pages(torch.float32)
    pages.attention(att, *step)
    with pytest.raises(ParameterError, match="a cascade sums up parts of the keys by itself"):
        pages.cache.attend(att, step[0], cascade=True)
