"""New tokens written into caches of torch by C++: the very same bits as by operations of torch."""

import pytest

from frisket.caches import PagePool
from frisket.runtime.machine.cpp_build import reason

torch = pytest.importorskip("torch")
caches = pytest.importorskip("frisket.caches.torch")
plain = pytest.importorskip("frisket.runtime.caches.torch_plain")
pytestmark = pytest.mark.skipif(bool(reason()), reason="no compiler")
APPEND = plain.native_append

BATCH, HEADS, DIM, V_DIM = 3, 2, 20, 7
NARROW = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
READ = torch.float32, torch.float16, torch.bfloat16
# new tokens, and how many of them are real
CHUNKS = (5, (5, 0, 3)), (1, None), (1, (0, 1, 1)), (3, (0, 0, 0)), (2, None), (30, (30, 1, 24)), (1, None), (9, None)


def made(kind, dtype):
    if kind == "paged":
        cache = caches.PagedKVCache.create(30, 16, BATCH, 6, HEADS, DIM, V_DIM, dtype)
        pool = PagePool(30, 16)
        for b in reversed(range(BATCH)):
            pool.allocate(b, 80)
        return cache.seat(pool, range(BATCH), 80)
    if kind in ("ring", "pinned"):
        return caches.RingKVCache.create(BATCH, 8, HEADS, DIM, V_DIM, dtype, sinks=3 if kind == "pinned" else 0)
    return caches.KVCache.create(BATCH, 80, HEADS, DIM, V_DIM, dtype)


def chunk(new, dtype, g):
    """k in the layout of a projection, v with entries that are not neighbours; some numbers are special."""
    k = torch.randn(BATCH, new, HEADS, DIM, generator=g).transpose(1, 2)
    v = torch.randn(BATCH, HEADS, V_DIM, new, generator=g).transpose(2, 3)
    k[:, :, -1] *= torch.tensor([1e-30, 1e4, 1e-41])[:, None, None]
    v[0, 0, 0], k[1, 1, 0, 3], v[1, 0, 0, 2], k[2, 0, 0, 5] = 0, torch.nan, torch.inf, -torch.inf
    return k.to(dtype), v.to(dtype)


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def same(one, two):
    """The same bits, but for NaN, which is NaN."""
    assert torch.equal(one.lengths, two.lengths)
    for name in ("k", "v"):
        x, y = getattr(one, name), getattr(two, name)
        scales = [getattr(c, f"{name}_scale") for c in (one, two)]
        if scales[0] is not None:
            finite = scales[0].isfinite()
            assert torch.equal(bits(scales[0])[finite], bits(scales[1])[finite])
            assert torch.equal(bits(x)[finite], bits(y)[finite])
            x, y = (c.float() * s[..., None] for c, s in zip((x, y), scales))
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(bits(x)[~x.isnan()], bits(y)[~y.isnan()])


def both(kind, held, given, chunks, monkeypatch, seed=0):
    """A cache that C++ has written to, and one that torch has; how often C++ has."""
    g, wrote = torch.Generator().manual_seed(seed), []

    def seen(*what):
        wrote.append(APPEND(*what))
        return wrote[-1]

    one, two = made(kind, held), made(kind, held)
    for new, counts in chunks:
        k, v = chunk(new, given, g)
        monkeypatch.setattr(plain, "native_append", seen)
        one.append(k, v, counts)
        monkeypatch.setattr(plain, "native_append", lambda *_: False)
        two.append(k, v, counts)
    return one, two, wrote


@pytest.mark.parametrize("kind", ["plain", "paged", "ring", "pinned"])
def test_native_append_writes_the_bits_of_torch(kind, monkeypatch):
    pairs = [(held, given) for held in NARROW for given in READ]
    for held, given in [*pairs, *((x, x) for x in (*READ, torch.float64))]:
        one, two, wrote = both(kind, held, given, CHUNKS, monkeypatch)
        assert wrote == [True] * len(CHUNKS)
        same(one, two)


@pytest.mark.parametrize("held", NARROW, ids=str)
def test_native_append_rounds_8_bit_ties_like_torch(held):
    """Beside the largest number every scale is 1."""
    top = torch.finfo(held).max if held.is_floating_point else 127.0
    numbers = torch.arange(256).to(torch.uint8).view(held).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= top)].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    given = torch.cat([x for y in (numbers, ties) for x in (y, y.nextafter(y + 1), y.nextafter(y - 1))])
    given = torch.cat([given.clamp(-top, top), torch.tensor([top, -0.0, 1e-38, -1e-42])])
    cache = caches.KVCache.create(1, 4, 1, len(given), dtype=held)
    assert plain.native_append(cache._buffers, given.view(1, 1, 1, -1), -given.view(1, 1, 1, -1), None)
    assert cache.k_scale[0, 0, 0] == 1
    want = given.round() if held == torch.int8 else given
    assert torch.equal(bits(cache.k[0, 0, 0]), bits(want.to(held)))
    assert torch.equal(bits(cache.v[0, 0, 0]), bits((-want).to(held)))


def test_native_append_leaves_other_dtypes_to_torch(monkeypatch):
    for held, given, new in (
        (torch.int8, torch.float64, 1), (torch.float32, torch.float16, 1), (torch.int8, torch.float32, 65),
    ):  # fmt: skip
        one, two, wrote = both("plain", held, given, [(new, None)], monkeypatch)
        assert wrote == [False]
        same(one, two)


SPOILT = {
    "too long": ("plain", lambda cache: cache.lengths.fill_(100)),
    "negative": ("ring", lambda cache: cache.lengths[2:].fill_(-1)),
    "behind the table": ("paged", lambda cache: cache.lengths[:1].fill_(96)),
    "no such page": ("paged", lambda cache: cache.pages[2].fill_(30)),
}


@pytest.mark.parametrize("case", SPOILT)
def test_native_append_writes_nothing_to_spoilt_buffers(case):
    kind, spoil = SPOILT[case]
    cache = made(kind, torch.int8)
    spoil(cache)
    assert not plain.native_append(cache._buffers, *chunk(2, torch.float32, torch.Generator()), None, cache.slots or 0)
    assert not cache.k.any()
    assert not cache.v_scale.any()


def test_native_append_bumps_tensor_versions():
    cache = made("plain", torch.int8)
    before = [x._version for x in (cache.k, cache.v, cache.k_scale, cache.v_scale)]
    assert plain.native_append(cache._buffers, *chunk(1, torch.float32, torch.Generator().manual_seed(0)), None)
    assert all(x._version > n for x, n in zip((cache.k, cache.v, cache.k_scale, cache.v_scale), before))


def test_a_compiler_that_was_killed_is_asked_again(monkeypatch, tmp_path):
    """Operations of torch write the first tokens; once the compiler lives, C++ writes."""
    from frisket.runtime.machine import cpp_build

    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in --version) ;; *) [ -e {tmp_path}/lives ] || kill -9 $$;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    assert cpp_build.reason() == ""  # the probe was built by the usual compiler
    monkeypatch.setattr(plain.native_build, "reason", lambda: "")
    monkeypatch.setattr(cpp_build.LaterError, "wait", 0.0)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path / "cache"))
    plain._loaded.memo.empty()
    try:
        with pytest.warns(UserWarning, match="was killed by SIGKILL"):
            assert plain._function() is None
        (tmp_path / "lives").touch()
        assert plain._function() is not None
    finally:
        plain._loaded.memo.empty()
