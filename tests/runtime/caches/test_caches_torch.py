"""Caches of torch: prompts, chunks and steps under one mask are rows of the dense run."""

import copy
import pickle
from weakref import ref

import numpy as np
import pytest
from support.lowering.effort import at_most
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.caches import PagePool
from frisket.dsl.errors import BackwardError
from frisket.lowering import pipeline as bind
from frisket.runtime.machine.cpp_build import reason

torch = pytest.importorskip("torch")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")
caches = pytest.importorskip("frisket.caches.torch")
quantized = caches.quantized
llama_torch = pytest.importorskip("runtime.caches.llama_torch")
torch_decode = pytest.importorskip("frisket.runtime.torch.decode")
native_torch = pytest.importorskip("frisket.runtime.backends.cpp.torch")
NATIVE = pytest.mark.skipif(bool(reason()), reason="no compiler")
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
        stored, scale = quantized(x, dtype)
        return stored.double() * scale.double()[..., None]
    return x.to(dtype).double()


def test_quantization_takes_names_and_refuses_other_dtypes():
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    for name, dtype in (("int8", torch.int8), ("float8_e5m2", torch.float8_e5m2)):
        assert quantized(x, name)[0].dtype == dtype
    for dtype in (torch.float16, "int16"):
        with pytest.raises(fk.ParameterError, match="caches hold int8, float8_e4m3fn, float8_e5m2"):
            quantized(x, dtype)


def dense(case, q, k, v, **more):
    mask, score, tables = MASKS[case]
    return fk.reference(q.double(), k, v, mask, score, layout="bhsd", **tables, **more)


@pytest.fixture
def called(monkeypatch):
    """Every call of a cache is one of its attention, without a planner compiled for its steps."""
    monkeypatch.setattr(torch_decode, "MAX_STEP_QUERIES", 0)


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


EXHAUSTIVE = pytest.mark.exhaustive
CASES = [
    ("plain", "int8", "window"), ("paged", "int8", "documents"), ("ring", "float32", "window"),
    *(pytest.param("plain", dtype, "window", marks=EXHAUSTIVE) for dtype in DTYPES if dtype != "int8"),
    *(pytest.param("plain", "int8", mask, marks=EXHAUSTIVE) for mask in MASKS if mask != "window"),
    pytest.param("paged", "float32", "causal", marks=EXHAUSTIVE),
    pytest.param("paged", "bfloat16", "window", marks=EXHAUSTIVE),
    pytest.param("ring", "int8", "documents", marks=EXHAUSTIVE),
]  # fmt: skip


@pytest.mark.sampled(3)
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


def test_few_rows_are_asked_at_positions_of_their_own(called):
    """Without counts the last tokens are meant; padding between two calls is none."""
    q, k, v = streams()
    att, cache = fk.compile("causal & window(24)", backend="aten"), made("plain", torch.float32)
    cache.append(k[:, :, :30], v[:, :, :30])
    out, lse = cache.attend(att, q[:, :, 27:30], return_lse=True)
    want, want_lse = fk.reference(
        q[:, :, 27:30], k[:, :, :30], v[:, :, :30], "causal & window(24)", layout="bhsd", origin=(0, 0, 27, 0),
        return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)


def test_sinks_count_once(called):
    q, k, v = streams()
    sinks = torch.linspace(-1, 2, HEADS)
    want = fk.reference(q[:, :, :60], k[:, :, :60], v[:, :, :60], "causal & window(24)", layout="bhsd", sinks=sinks)
    for given in ({"sinks": sinks}, {}):
        att = fk.compile("causal & window(24)", backend="aten", sinks=None if given else sinks)
        cache = made("ring", torch.float32)
        parts = [slice(0, 40), slice(40, 41), slice(41, 60)]
        out = [cache.attention(att, *(x[:, :, p] for x in (q, k, v)), **given) for p in parts]
        np.testing.assert_allclose(torch.cat(out, 2), want, atol=2e-6)


# -- 8 bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 1e-2), ("float8_e4m3fn", 4e-2), ("float8_e5m2", 8e-2)])
def test_eight_bits_are_near_the_numbers(dtype, bound):
    x = torch.randn(2, 2, 100, 64, generator=torch.Generator().manual_seed(0))
    assert (kept(x, DTYPES[dtype]) - x).norm() / x.norm() < bound


def test_torch_quantization_of_zeros_and_the_largest_number():
    x = torch.tensor([[0.0, 0.0], [-3e38, 1.0], [1e-38, -1e-38]])
    for name in ("int8", "float8_e4m3fn", "float8_e5m2"):
        stored, scale = quantized(x, DTYPES[name])
        assert stored.dtype == DTYPES[name]
        assert torch.isfinite(scale).all()
        assert not stored[0].float().any()
        np.testing.assert_allclose(stored[1, 0].double() * scale[1].double(), -3e38, rtol=1e-6)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("backend", ["aten", pytest.param("cpp", marks=NATIVE)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("paged", marks=EXHAUSTIVE)])
def test_torch_cache_step_copies_no_cache(kind, backend):
    capacity, threads = 2048, torch.get_num_threads()
    if kind == "plain":
        cache = KVCache.create(1, capacity, 2, 16, dtype=torch.int8)
    else:
        pool = PagePool(capacity // 64, 64)
        cache = PagedKVCache.create(capacity // 64, 64, 1, capacity // 64, 2, 16, dtype=torch.int8)
        cache.seat(pool, ["a"], capacity - 1, pool.allocate("a", capacity - 1))
    x = torch.randn(1, 2, capacity - 1, 16)
    cache.append(x, x)
    if kind == "paged":
        cache.seat(pool, ["a"], 1, pool.append({"a": 1}))
    att, q = fk.compile("causal", backend=backend), torch.randn(1, 4, 1, 16)
    torch.set_num_threads(1)
    try:
        with Largest() as largest:
            cache.attention(att, q, x[:, :, :1], x[:, :, :1])
    finally:
        torch.set_num_threads(threads)
    assert 0 < largest.bytes <= cache.k.nbytes // 2  # an eighth of the keys in float32, at most


SLOPED = fk.score("score - slope[h] * (q - k)", slope=[0.5, 0.25, 0.1, 0.0])

# -- growing -----------------------------------------------------------------------------------------------


@NATIVE
@pytest.mark.parametrize("kind", ["plain", pytest.param("ring", marks=EXHAUSTIVE)])
def test_growing_plans_and_compiles_nothing(kind, monkeypatch):
    q, k, v = streams()
    mask = MASKS["window" if kind == "ring" else "causal"][0]
    att, cache = fk.compile(mask, SLOPED, backend="cpp"), made(kind, torch.float32)
    token = [x[:, :, :1] for x in (q, k, v)]
    cache.attention(att, *token)
    counted = []
    for module, name in ((bind, "make_plan"), (native_torch, "library"), (bind, "work")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, run=run, name=name, **b: counted.append(name) or run(*a, **b))
    at = cache.k.data_ptr()
    for _ in range(70):
        cache.attention(att, *token)
    assert counted == []
    assert cache.k.data_ptr() == at
    with at_most(400):  # Python's work in a step, whatever is stored
        cache.attention(att, *token)


WRITTEN = "causal & same(doc) & q - k < w", "score + bias[k]"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=NATIVE), "aten"])
@pytest.mark.parametrize("inference", [False, True])
def test_tables_and_numbers_may_be_written_to(backend, inference):
    """In place, by numpy and through `.data`, which torch does not count, and in inference mode."""
    (q, k, v), at = streams(), torch.arange(LENGTH)
    att, cache = fk.compile(*WRITTEN, backend=backend), made("plain", torch.float32)
    with torch.inference_mode(inference):
        doc, w, bias = at // 9, torch.tensor(20), torch.linspace(0, 1, LENGTH)
        writes = {
            8: lambda: doc.copy_(at // 4), 12: lambda: doc.numpy().__setitem__(..., 0), 15: lambda: w.data.fill_(5),
            18: lambda: bias.numpy().__setitem__(..., np.linspace(3, 0, LENGTH)), 20: lambda: w.numpy().fill(9),
        }  # fmt: skip
        for i in range(25):
            writes.get(i, lambda: None)()
            out = cache.attention(att, *(x[:, :, i : i + 1] for x in (q, k, v)), doc=doc, w=w, bias=bias)
            keys, values = (x[:, :, : i + 1].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            seen = (doc[: i + 1] == doc[i]) & (i - at[: i + 1] < w)
            want = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, i : i + 1], keys, values, bias[None, : i + 1].where(seen, -torch.inf)
            )
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@NATIVE
def test_converted_tables_live_until_the_kernel_has_run(monkeypatch):
    """Tables of inference mode are converted at every call, and nothing but the call keeps the conversion."""
    (q, k, v), conversions, runs = streams(), [], []
    att, cache = fk.compile(*WRITTEN, backend="cpp"), made("plain", torch.float32)
    convert, slots_of = native_torch.NativeKernel.table, native_torch.NativeKernel.slots_of

    def watched(self, *arguments):
        conversion = convert(self, *arguments)
        if conversion is not arguments[1]:
            conversions.append(ref(conversion))
        return conversion

    def checked(self, *arguments):
        run, slots = slots_of(self, *arguments)
        return lambda record: runs.append(all(x() is not None for x in conversions)) or run(record), slots

    monkeypatch.setattr(native_torch.NativeKernel, "table", watched)
    monkeypatch.setattr(native_torch.NativeKernel, "slots_of", checked)
    with torch.inference_mode():
        doc, bias = torch.arange(LENGTH) // 4, torch.linspace(0, 1, LENGTH)  # int64, which kernels read as int32
        for i in range(3):
            conversions.clear()
            cache.attention(att, *(x[:, :, i : i + 1] for x in (q, k, v)), doc=doc, w=20, bias=bias)
    assert conversions
    assert runs
    assert all(runs)


@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=NATIVE), "aten"])
@pytest.mark.parametrize("kept", [lambda q: q, torch._neg_view, lambda q: torch._efficientzerotensor(q.shape)])
@torch.inference_mode()
def test_steps_in_inference_mode_with_a_table_of_the_attention(kept, backend):
    """Steps of queries that a view negates and zeros without memory, too."""
    att = fk.compile("causal", SLOPED, backend=backend)
    cache, dense, (q, k, v) = made("plain", torch.float32), fk.compile(att.mask, att.score, backend="aten"), streams()
    for i in range(3):
        asked = kept(q[:, :, i : i + 1].contiguous())
        out = cache.attention(att, asked, k[:, :, i : i + 1], v[:, :, i : i + 1])
        want = dense(asked.clone(), k[:, :, : i + 1], v[:, :, : i + 1], origin=(0, 0, i, 0))
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_torch_cache_refuses_more_tokens_than_its_room():
    _, k, v = streams()
    cache = made("plain", torch.int8).append(k[:, :, :70], v[:, :, :70])
    before = {n: x.clone() for n, x in cache.state_dict().items()}
    with pytest.raises(fk.CapacityError, match="sequence 1 has 70 tokens and 11 new ones, the cache has room for 80"):
        cache.append(k[:, :, :12], v[:, :, :12], [10, 11, 0])
    assert all(torch.equal(x, before[n]) for n, x in cache.state_dict().items())
    cache.append(k[:, :, :12], v[:, :, :12], [10, 9, 0])
    assert cache.lengths.tolist() == [80, 79, 70]


def test_a_device_that_nobody_waits_for_drops_what_does_not_fit(monkeypatch):
    _, k, v = streams()
    cache = made("plain", torch.float32).append(k[:, :, :70], v[:, :, :70])
    monkeypatch.setattr(KVCache, "known", lambda self: None)
    cache.append(k[:, :, :12], v[:, :, :12], [10, 12, 0])
    assert cache.lengths.tolist() == [80, 80, 70]
    assert cache.overflowed.tolist() == [False, True, False]
    for b, n in enumerate((10, 10, 0)):
        assert torch.equal(cache.k[b, :, :70], k[b, :, :70])
        assert torch.equal(cache.k[b, :, 70 : 70 + n], k[b, :, :n])
        assert not cache.k[b, :, 70 + n :].any()
    cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.overflowed.tolist() == [True, True, False]
    assert torch.equal(cache.v[:, :, :70], v[:, :, :70])


# -- modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_a_state_goes_round(kind, called):
    q, k, v = streams()
    att, parts = fk.compile("causal & window(24)", backend="aten"), []
    first, second = (made(kind, torch.int8) for _ in range(2))
    first.attention(att, q[:, :, :20], k[:, :, :20], v[:, :, :20], None)
    cache = getattr(first, "cache", first)
    if kind == "paged":
        second.pool = copy.deepcopy(first.pool)
    getattr(second, "cache", second).load_state_dict(cache.state_dict())
    third = copy.deepcopy(first)
    for each in (first, second, third):
        parts.append(each.attention(att, *(x[:, :, 20:21] for x in (q, k, v)), None))
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])
    assert cache.lengths.tolist() == [21] * BATCH
    assert pickle.loads(pickle.dumps(cache)).lengths.tolist() == [21] * BATCH


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_module_casts_keep_8_bit_keys_and_scales(kind, dtype):
    q, k, v = streams()
    att, held = fk.compile("causal & window(24)"), made(kind, dtype)
    held.attention(att, q[:, :, :20], k[:, :, :20], v[:, :, :20], None)
    parts, token = [], [x[:, :, 20:21] for x in (q, k, v)]
    for change in ("float", "half", "bfloat16", "double"):
        each = copy.deepcopy(held)
        cache = getattr(each, "cache", each)
        assert getattr(cache, change)() is cache
        assert (cache.dtype, cache.k_scale.dtype, cache.lengths.dtype) == (dtype, torch.float32, torch.int32)
        parts.append(each.attention(att, *token, None))
    parts.append(held.attention(att, *token, None))
    assert all(torch.equal(part, parts[0]) for part in parts)


@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_assigned_cast_state_has_float32_scales(kind):
    held = made(kind, torch.int8)
    cache, (q, k, v) = getattr(held, "cache", held), streams()
    cast = {n: x.bfloat16() if x.is_floating_point() else x.clone() for n, x in cache.state_dict().items()}
    cache.load_state_dict(cast, assign=True)
    assert cache.k_scale.dtype == cache.v_scale.dtype == torch.float32
    att, new = fk.compile("causal & window(24)"), [x[:, :, :9] for x in (q, k, v)]
    assert torch.equal(held.attention(att, *new, None), made(kind, torch.int8).attention(att, *new, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_cache_ignores_strides_of_assigned_states(kind, dtype):
    q, k, v = streams()
    att, held = fk.compile("causal & window(24)"), made(kind, dtype)
    held.attention(att, q[:, :, :9], k[:, :, :9], v[:, :, :9], [9, 4, 0])
    last, assigned = copy.deepcopy(held), copy.deepcopy(held)
    state = getattr(held, "cache", held).state_dict()
    wide = {n: x if x.is_floating_point() or n in "kv" or x.dtype == torch.bool else x.long() for n, x in state.items()}
    apart = {n: x.mT.contiguous().mT if x.ndim > 1 else x.clone() for n, x in wide.items()}
    getattr(last, "cache", last).to(memory_format=torch.channels_last)
    getattr(assigned, "cache", assigned).load_state_dict(apart, assign=True)
    for each in (last, assigned):
        out = each.attention(att, *(x[:, :, 9:11] for x in (q, k, v)), None)
        assert torch.equal(out, copy.deepcopy(held).attention(att, *(x[:, :, 9:11] for x in (q, k, v)), None))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_cache_ignores_the_default_dtype_and_device(kind, default):
    q, k, v = streams()
    att, found = fk.compile("causal & window(24)", sinks=torch.zeros(HEADS)), []
    for here in (torch.float32, default):
        torch.set_default_dtype(here)
        try:
            held = made(kind, torch.int8)
            with torch.device("cpu" if here == torch.float32 else "meta"):
                steps = (20, None), (4, [4, 0, 2]), (30, None), (1, None)
                found.append([held.attention(att, *(x[:, :, :n] for x in (q, k, v)), counts) for n, counts in steps])
        finally:
            torch.set_default_dtype(torch.float32)
    assert getattr(held, "cache", held).k_scale.dtype == torch.float32
    assert all(map(torch.equal, *found))


def test_dtypes_that_no_cache_becomes(called):
    cache = made("plain", torch.float32)
    for wrong in (torch.int8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(fk.FrisketError, match="dtype is torch"):
            cache.type(wrong)
    assert cache.type(torch.float16).lengths.dtype == torch.int32
    assert cache.dtype == torch.float16


@pytest.mark.parametrize("kind", ["plain", "paged", "ring"])
def test_a_state_of_other_8_bits_is_refused(kind):
    held = (made(kind, dtype) for dtype in (torch.float8_e5m2, torch.int8, torch.float32))
    one, other, plain = (getattr(each, "cache", each) for each in held)
    for into, state, strict in ((other, one, True), (one, other, True), (plain, one, False), (one, plain, False)):
        with pytest.raises(RuntimeError, match="make one of the state's dtype"):
            into.load_state_dict(state.state_dict(), strict=strict)


@EXHAUSTIVE
def test_a_step_that_torch_compiles():
    q, k, v = streams()
    att, caches = fk.compile("causal", backend="aten"), [made("plain", torch.float32) for _ in range(2)]

    def step(cache, q, k, v):
        return cache.attention(att, q * 2, k, v) + 1

    compiled = torch.compile(step, backend="eager")
    for at in range(3):
        token = [x[:, :, at : at + 1] for x in (q, k, v)]
        assert torch.equal(compiled(caches[0], *token), step(caches[1], *token))
    assert caches[0].lengths.tolist() == [3] * BATCH


def test_torch_forks_share_pages_until_a_write(called):
    q, k, v = streams()
    pool, att = PagePool(6, 16), fk.compile("causal", backend="aten")
    cache = PagedKVCache.create(6, 16, BATCH, 3, KV_HEADS, DIM, V_DIM)
    cache.seat(pool, ["a", None, None], [20, 0, 0], pool.allocate("a", 20))
    cache.append(k[:, :, :20], v[:, :, :20], [20, 0, 0])
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.available == 4
    cache.seat(pool, "abc", 1, pool.append(dict.fromkeys("abc", 1)))
    assert pool.available == 2
    out = cache.attention(att, q[:, :, 20:21], k[:, :, 20:21], v[:, :, 20:21])
    for b in range(BATCH):
        keys, values = (torch.cat([x[:1, :, :20], x[b : b + 1, :, 20:21]], 2) for x in (k, v))
        want = fk.reference(q[b : b + 1, :, 20:21], keys, values, layout="bhsd")
        np.testing.assert_allclose(out[b : b + 1], want, atol=2e-6)
    with pytest.raises(fk.CapacityError, match="sequence 0 has 21 tokens and 12 new ones, the cache has room for 32"):
        cache.append(*(torch.zeros(BATCH, KV_HEADS, 12, d) for d in (DIM, V_DIM)))


# -- drafts -------------------------------------------------------------------------------------------------

#        0      a tree of six drafts behind 10, 7 and 8 tokens
#      1   2
#     3 4   5
PARENTS = np.array([-1, 0, 0, 1, 1, 2])


@pytest.mark.parametrize("kind", ["paged", *(pytest.param(kind, marks=EXHAUSTIVE) for kind in ("plain", "trees"))])
def test_torch_cache_attends_to_trees_of_drafts(kind, called):
    """A draft is attention to its own path alone; what is kept of the tree is a sequence like any other."""
    q, k, v = streams()
    lengths, n = [10, 7, 8], len(PARENTS)
    att = fk.compile("causal & window(9)", "alibi", backend="aten")
    parents = np.stack([PARENTS, [-1, 0, 1, 2, 3, 3], [-1, -1, 0, 1, 2, 0]]) if kind == "trees" else PARENTS
    store = made("paged" if kind == "paged" else "plain", torch.float32)
    pool, cache = getattr(store, "pool", None), getattr(store, "cache", store)
    if pool:
        cache.seat(pool, range(BATCH), lengths, pool.append(dict(enumerate(lengths))))
    cache.append(k[:, :, :10], v[:, :, :10], lengths)
    if pool:
        cache.seat(pool, range(BATCH), n, pool.append(dict.fromkeys(range(BATCH), n)))
    drafts = [x[:, :, 20 : 20 + n] for x in (q, k, v)]
    out = cache.attention(att, *drafts, tree=parents)

    def behind(b, path, q, k, v):
        """Attention of one query behind the prefix and the drafts on a path."""
        k, v = (torch.cat([x[b : b + 1, :, : lengths[b]], y], 2) for x, y in zip(streams()[1:], (k, v)))
        q = q[b : b + 1]
        return fk.reference(q, k, v, "causal & window(9)", "alibi", layout="bhsd", origin=(0, 0, k.shape[2] - 1, 0))

    for b in range(BATCH):
        mine = parents if parents.ndim == 1 else parents[b]
        for i in range(n):
            path = [i]
            while mine[path[0]] >= 0:
                path.insert(0, mine[path[0]])
            want = behind(b, path, drafts[0][:, :, i : i + 1], *(x[b : b + 1, :, path] for x in drafts[1:]))
            np.testing.assert_allclose(out[b : b + 1, :, i : i + 1], want, atol=3e-6)
    paths, counts = [[0, 2, 5], [0, 1, 1], [0, 0, 0]], [3, 2, 0]
    cache.keep(paths, n, counts)
    assert cache.lengths.tolist() == [13, 9, 8]
    if pool:
        for b in range(BATCH):
            pool.truncate(b, lengths[b] + counts[b])
        cache.seat(pool, range(BATCH), 1, pool.append(dict.fromkeys(range(BATCH), 1)))
    token = [x[:, :, 30:31] for x in (q, k, v)]
    out = cache.attention(att, *token)
    for b in range(BATCH):
        path = paths[b][: counts[b]]
        after = (torch.cat([x[b : b + 1, :, path], y[b : b + 1]], 2) for x, y in zip(drafts[1:], token[1:]))
        np.testing.assert_allclose(out[b : b + 1], behind(b, path, token[0], *after), atol=3e-6)


# -- a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=EXHAUSTIVE) for kind in ("plain", "float8_e4m3fn", "paged", "ring"))]
)
def test_torch_model_generates_from_each_cache(kind):
    """96 tokens; logits are those of the whole sequence at once, dense, on the same stored numbers."""
    w, batch, dims, seat = llama_torch.weights(), 2, (llama_torch.KV_HEADS, llama_torch.DIM), None
    text = "causal & window(40)" if kind == "ring" else "causal"
    if kind == "paged":
        pool = PagePool(40, 16)
        for b in range(batch):
            pool.allocate(b)
        caches = [PagedKVCache.create(40, 16, batch, 17, *dims) for _ in w["layers"]]

        def seat(n):
            copies = pool.append(dict.fromkeys(range(batch), n))
            for cache in caches:
                cache.seat(pool, range(batch), n, copies)
    elif kind == "ring":
        caches = [RingKVCache.create(batch, 40, *dims) for _ in w["layers"]]
    else:
        caches = [KVCache.create(batch, 272, *dims, dtype=DTYPES.get(kind, torch.float32)) for _ in w["layers"]]
    first = torch.randint(llama_torch.VOCAB, (batch, 9), generator=torch.Generator().manual_seed(0))
    tokens, logits = llama_torch.generated(w, fk.compile(text), caches, first, 96, seat)
    n = tokens.shape[1] - 1
    attend = plain = llama_torch.attend_densely(torch.from_numpy(fk.mask(text).dense(n, n)[0, 0]))
    if kind in DTYPES:

        def attend(i, q, k, v):
            c = caches[i]
            held = [(x.float() * s[..., None])[:, :, :n] for x, s in ((c.k, c.k_scale), (c.v, c.v_scale))]
            assert all((x - y).abs().max() < 0.2 for x, y in zip(held, (k, v)))
            return plain(i, q, *held)

    want = llama_torch.forward(w, tokens[:, :-1], torch.arange(n).expand(batch, n), attend)
    np.testing.assert_allclose(logits, want, atol=2e-4)
    assert len(tokens.unique()) > 10  # not one token again and again


# -- what is refused ----------------------------------------------------------------------------------------


def test_torch_caches_refuse_bad_arguments(called):
    q, k, v = streams()
    cache, ring = made("plain", torch.float32), made("ring", torch.float32)
    att = fk.compile("causal")
    for wrong, error, text in (
        (lambda: KVCache.create(1, 8, 1, 8, dtype=torch.int32), fk.ParameterError, "caches hold float16"),
        (lambda: KVCache.create(1, 8, 1, 8, dtype="int4"), fk.ParameterError, "caches hold float16"),
        (lambda: KVCache.create(1, 0, 1, 8), fk.ShapeError, "each of them is at least 1"),
        (lambda: PagedKVCache.create(4, 8, 1, 2, 1, 8), fk.ShapeError, "a multiple of 16 tokens"),
        (lambda: cache.append(k[:2], v[:2]), fk.ShapeError, r"\[batch, kv_heads, new, dim\] = \[3, 2, 80, 16\]"),
        (lambda: cache.append(k, v[:, :, :3]), fk.ShapeError, "v has the shape"),
        (lambda: cache.append(k, v[..., :4]), fk.ShapeError, "make the cache with v_dim=4"),
        (lambda: cache.append(k, v, [1, 2]), fk.ShapeError, r"counts are \[1, 2\]; they are integers \[batch\]"),
        (lambda: cache.append(k[:, :, :2], v[:, :, :2], [1, 3, 0]), fk.ShapeError, "of 2 new tokens; each is from 0"),
        (lambda: cache.append(k.clone().requires_grad_(), v), BackwardError, "none flows through a cache"),
        (lambda: cache.attend(fk.compile("causal", dropout=0.5), q), fk.ParameterError, "without dropout"),
        (lambda: cache.attend(att, q[:, :, :3], tree=[0.5] * 3), fk.ShapeError, "a tree is parents"),
        (
            lambda: cache.attend(att, q[:, :, :3], tree=[-1, 0]),
            fk.ShapeError,
            r"for 3 x 3 queries; these are int64\[2\]",
        ),
        (lambda: cache.truncate(-1), fk.ShapeError, r"lengths are \[-1, -1, -1\]; each is 0 or more"),
        (lambda: cache.keep([[0]] * 3, 9), fk.ShapeError, "there are not as many"),
        (lambda: ring.attention(att, q[:, :, :1], k[:, :, :1], v[:, :, :1]), fk.ShapeError, "lets query 25 see key 0"),
        (lambda: ring.truncate(3), fk.ParameterError, "can only be emptied"),
        (lambda: ring.keep([[0]] * 3, 1), fk.ParameterError, "take a KVCache"),
        (lambda: ring.attend(att, q[:, :, :1], tree=[-1]), fk.ParameterError, "take a KVCache"),
    ):
        ring.lengths.fill_(5)
        with pytest.raises(error, match=text):
            wrong()
    assert cache.lengths.tolist() == [0] * BATCH


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("way", ["assigned", "replaced"])
def test_native_code_refuses_values_of_other_dtypes_than_keys(dtype, way):
    """It wrote past their end."""
    cache, (q, k, v) = made("plain", dtype), (x[:, :, :1] for x in streams())
    room = torch.zeros(8, *cache.v.shape, dtype=torch.float8_e5m2 if dtype == "float32" else torch.float16)
    if way == "assigned":
        cache.load_state_dict({"v": room[0]}, strict=False, assign=True)
    else:
        cache.v = room[0]
    with pytest.raises(fk.FrisketError, match="have dtypes"):
        cache.attention(fk.compile("causal"), q, k, v)
    where = room.float().nonzero()
    assert not where[:, 0].any()  # past its end
    assert not where[:, 3].any()  # behind the first token


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_lengths_of_64_bits_that_replace_those_of_a_cache(dtype):
    caches = [made("plain", dtype) for _ in range(2)]
    caches[1].lengths = caches[1].lengths.long()
    for n in (5, 1, 3):
        new = [x[:, :, :n] for x in streams()]
        outs = [cache.attention(fk.compile("causal"), *new) for cache in caches]
        np.testing.assert_allclose(*outs, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize(("dtype", "names"), [("float32", "k"), ("float32", "v"), ("int8", "kv")])
def test_native_code_refuses_buffers_of_unequal_length(dtype, names):
    """What had fewer places than the keys was written past its end."""
    cache, att, new = made("plain", dtype), fk.compile("causal"), [x[:, :, :1] for x in streams()]
    cache.attention(att, *new)  # a step that is prepared
    for n in names:
        setattr(cache, n, torch.cat(2 * [getattr(cache, n)], 2))
    with pytest.raises(fk.ShapeError, match=r"k and v have|of the whole problem"):
        cache.attention(att, *new)


def test_pages_that_are_a_part_of_a_larger_table():
    """New tokens went to the pages that stand first in its memory."""
    caches, new = [made("paged", "float32") for _ in "ab"], [x[:, :, :17] for x in streams()]
    pages = caches[1].cache.pages
    caches[1].cache.pages = torch.cat((pages, pages.flip(0)), 1)[:, : pages.shape[1]]
    np.testing.assert_allclose(*(c.attention(fk.compile("causal"), *new, None) for c in caches), atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "ring"])
def test_learned_sinks_get_their_gradient_in_a_step(kind):
    """Steps left it out, where longer chunks had it."""
    mask, new = MASKS["window"][0], [x[:, :, :1] for x in streams()]
    att, held = fk.compile(mask), fk.compile(mask, sinks=torch.nn.Parameter(torch.ones(HEADS)))
    sinks = torch.ones(HEADS, requires_grad=True)
    for call, given, learned in ((att, {"sinks": sinks}, sinks), (held, {}, held.options.sinks)):
        cache = made(kind, torch.float32)
        with torch.no_grad():
            want = cache.attention(call, *new, **given)
        found = cache.truncate(0).attention(call, *new, **given)
        np.testing.assert_allclose(found.detach(), want, atol=1e-6)
        own = torch.full((HEADS,), 1.0, requires_grad=True)
        one = att(*new, sinks=own).square().sum()
        np.testing.assert_allclose(
            *(torch.autograd.grad(x, s)[0] for x, s in ((found.square().sum(), learned), (one, own))), atol=1e-6
        )


@pytest.mark.parametrize("backend", ["aten", pytest.param("cpp", marks=[NATIVE, EXHAUSTIVE])])
@pytest.mark.parametrize("name", ["q", "sinks", "slope"])
def test_steps_pass_tangents_on(name, backend):
    """A prepared step saw none of forward_ad's tangents, and gave none."""
    q, k, v = streams()
    new = q[:, :, LENGTH - 1 :]
    att = fk.compile("causal", "score + slope[h] * (k - q)", backend=backend)
    cache = KVCache.create(BATCH, LENGTH, KV_HEADS, DIM, V_DIM).append(k, v)
    given = {"q": new, "sinks": torch.ones(HEADS), "slope": torch.full((HEADS,), 0.1)}
    whole = fk.compile("causal", "score + slope[h] * (k - q)", backend="aten")
    for _ in range(2):
        with forward_ad.dual_level():
            duals = {**given, name: forward_ad.make_dual(given[name], given[name])}
            found = cache.attend(att, **duals)
            want = whole(k=k, v=v, origin=(0, 0, LENGTH - 1, 0), **duals)
            for x, y in zip(forward_ad.unpack_dual(found), forward_ad.unpack_dual(want)):
                np.testing.assert_allclose(x, y, atol=1e-5)


def test_torch_cache_refuses_keys_with_tangents():
    q, k, v = (x[:, :, :2] for x in streams())
    cache = made("plain", torch.float32)
    with forward_ad.dual_level(), pytest.raises(BackwardError, match="v has a tangent, and none flows through a cache"):
        cache.attention(fk.compile("causal"), q, k, forward_ad.make_dual(v, v))
    assert cache.known() == [0] * BATCH


SHORT = {
    "documents": ("causal & doc[q] == doc[k]", None, {"doc": torch.arange(9)}),
    "slopes": ("causal", "score + slope[h] * (k - q)", {"slope": torch.ones(HEADS - 1)}),
}


@pytest.mark.parametrize(("kind", "name"), [("plain", "documents"), ("plain", "slopes"), ("ring", "slopes")])
def test_a_step_refuses_a_table_that_ends_before_what_it_sees(kind, name):
    """Steps read its last entry instead, where longer chunks were refused."""
    mask, score, tables = SHORT[name]
    mask = f"{mask} & window(9)"
    cache, (q, k, v) = made(kind, torch.float32), (x[:, :, :12] for x in streams())
    with pytest.raises(fk.ParameterError, match=r"has \d entries on axis 0 and is read at"):
        cache.attention(fk.compile(mask, score), q, k, v, **tables)
    cache = made("plain", torch.float32)
    found = cache.attention(fk.compile("causal & k < 9 & t[k]"), q, k, v, t=torch.arange(9) % 2 == 0)
    assert found[:, :, 0].any()


def test_a_step_sees_a_table_that_was_transposed_in_place():
    """`t_()` swaps the strides of a tensor and leaves its memory as it is."""
    att, cache, seen = fk.compile("causal & t[q, k]"), made("plain", torch.float32), torch.eye(LENGTH).bool()
    seen[:, 0], (q, k, v) = True, (x[:, :, :3] for x in streams())
    outs = [cache.append(k, v).attend(att, q, t=seen)]
    seen.t_()
    outs.append(cache.attend(att, q, t=seen))
    np.testing.assert_array_equal(outs[1], cache.attend(att, q, t=seen.clone()))
    assert not torch.equal(*outs)


Q, K, V = (x[:, :, :3] for x in streams())
MISASKED = {
    "three axes": (Q[:, :, 0], {}, r"q has the shape \(3, 4, 16\); queries of this cache are \[batch, heads, new, he"),
    "a list": ([1], {}, "q is a list; give a torch tensor"),
    "another batch": (Q[:2], {}, r"\[3, 2 n, new, 16\]"),
    "odd heads": (Q[:, :3], {}, r"\[3, 2 n, new, 16\]"),
    "another dim": (Q[..., :8], {}, r"\[3, 2 n, new, 16\]"),
    "another dtype": (Q.bfloat16(), {}, "q is bfloat16, and this cache holds float32"),
    "fewer queries": (Q[:, :, :1], {"counts": [1, 1, 1]}, "q has 1 tokens, k and v 3"),
    "a tree of others": (Q, {"tree": [-1, 0]}, r"a tree is parents.* these are int64\[2\]"),
    "a circle": (Q, {"tree": [[-1, 0, 1], [-1, 2, 1], [-1, 0, 0]]}, "node 1 of a tree leads back to itself"),
    "no such node": (Q, {"tree": [-1, 0, 3]}, "parents of 3 nodes are from 0 to 2, and -1 for a root"),
    "no parameter": (Q, {"width": 3}, "`width` is given and no mask"),
    "no value": (Q, {"att": "causal & window(w)"}, "`w` has no value; give it"),
    "an origin": (Q, {"origin": (0, 0, 0, 0)}, "`origin` is given, and a cache knows it itself"),
    "sizes": (Q, {"sizes": (3, 4, 80, 80)}, "`sizes` is given, and a cache knows it itself"),
    "dropout": (Q, {"att": fk.compile("causal", dropout=0.5)}, "without dropout"),
    "no attention": (Q, {"att": None}, "att is a NoneType; give an attention"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "ring"])
@pytest.mark.parametrize("what", MISASKED)
def test_cache_stores_nothing_for_queries_that_do_not_fit(what, kind):
    q, more, text = MISASKED[what]
    cache, att = made(kind, torch.float32), more.get("att", "causal & window(8)")
    att = fk.compile(att) if isinstance(att, str) else att
    if kind == "ring" and "tree" in more:
        text = "take a KVCache"
    with pytest.raises(fk.FrisketError, match=text):
        cache.attention(att, q, K, V, **{n: x for n, x in more.items() if n != "att"})
    assert not cache.lengths.any()
    assert not cache.k.any()


def test_padding_of_a_long_chunk_sees_the_sinks_alone():
    """As everywhere: its lse is that of the sinks."""
    q, k, v = streams()
    ring, sinks = made("ring", torch.float32), torch.linspace(-1, 1, HEADS)
    found = []
    for n in (9, 24):  # beside room for all of it, and beside what it overwrites
        parts = (x[:, :, :n] for x in (q, k, v))
        att = fk.compile(MASKS["window"][0])
        found.append(ring.attention(att, *parts, [2, n, 0], sinks=sinks, return_lse=True))
    for out, lse in found:
        np.testing.assert_array_equal(lse[2], sinks[:, None].expand(lse[2].shape))
        np.testing.assert_array_equal(lse[0, :, 2:], sinks[:, None].expand(lse[0, :, 2:].shape))
        assert not out[2].any() and not out[0, :, 2:].any()  # noqa: PT018


def test_large_arrays_ask_for_huge_pages(monkeypatch):
    """Keys and values of a pool are read in any order; what is small or elsewhere is not asked for."""
    from frisket.runtime.caches import torch_plain

    asked = []
    monkeypatch.setattr(torch_plain, "huge", lambda x: asked.append(x.shape))
    KVCache.create(1, 64, KV_HEADS, DIM)
    KVCache.create(1, 1 << 16, KV_HEADS, DIM, device="meta")
    with torch._subclasses.FakeTensorMode():
        KVCache.create(1, 1 << 16, KV_HEADS, DIM)
    assert not asked
    plain = KVCache.create(1, 1 << 16, KV_HEADS, DIM)
    paged = PagedKVCache.create(1 << 12, 16, 1, 1 << 12, KV_HEADS, DIM)
    assert asked == [plain.k.shape, plain.v.shape, paged.k.shape, paged.v.shape]
    assert not any(x.count_nonzero() for x in (plain.k, plain.v, paged.k, paged.v))
