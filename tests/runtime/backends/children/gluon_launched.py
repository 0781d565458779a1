"""Run by test_gluon_launch.py without an interpreter: Gluon kernels compiled for Hopper and launched by Triton's own
code, up to the functions of the CUDA driver."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from runtime.backends.children import triton_driver
from runtime.backends.children.triton_driver import SHARED, STREAM, Map, compiled, launched

import frisket as fk
from frisket.caches.torch import PagedKVCache
from frisket.dsl.errors import BackendError
from frisket.runtime.backends import triton as triton_backend
from frisket.runtime.backends.base import RECORDS, register
from frisket.runtime.backends.gluon import torch as gluon_torch
from frisket.runtime.backends.gluon.torch import addressable

triton_driver.install()
register(replace(RECORDS["gluon"], reason=lambda framework=None: ""))
triton_backend._on_torch = lambda: ""
ONE = {"s": 1, "h": 1, "hkv": 1}  # sizes that Triton would take for constants


def arrays(s=512, h=4, hkv=2, d=64, v_dim=0, b=2, dtype=torch.bfloat16):
    shapes = ((h, d), (hkv, d), (hkv, v_dim or d))
    return [torch.zeros(b, heads, s, dim, dtype=dtype, requires_grad=True) for heads, dim in shapes]


def launches(run, *given, **more):
    """What the driver was given by a call."""
    before = len(launched)
    run(*given, **more)
    return launched[before:]


def causal(*arrays, **more):
    with torch.no_grad():
        return fk.compile("causal", backend="gluon")(*arrays, **more)


def odd(x):
    """The array from an address that 16 does not divide."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def padded(x):
    """The array with strides that 16 does not divide."""
    return torch.cat([x, x[..., :1]], 3)[..., :-1]


# a look of an array, and whether the TMA reads it where it lies
LOOKS = {
    "contiguous": (lambda x: x, True),
    "transposed": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "part": (lambda x: torch.cat([x, x], 3)[..., : x.shape[3]], True),
    "odd": (odd, False),
    "padded": (padded, False),
    "dim first": (lambda x: x.mT.contiguous().mT, False),
    "expanded": (lambda x: x[:, :1].expand(x.shape), False),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("turn", range(3))
def test_descriptors_are_of_the_arrays(look, turn):
    """Descriptors of the first call, which Triton's launcher binds, and of the second, whose arguments are laid out."""
    make, stays = LOOKS[look]
    given = [make(x.detach()) if i == turn else x.detach() for i, x in enumerate(arrays())]
    for _ in range(2):
        (one,) = launches(causal, *given)
        assert (one.kernel, one.grid, one.stream) == ("attention_forward", (4, 4, 2), STREAM)
        assert one.warps == 12  # two groups of four that compute, one warp that loads, and three that fill its group
        for i, (x, made) in enumerate(zip(given, one.maps, strict=False)):
            rows = 64 if i == 0 else 128  # half a tile of queries
            assert made.shape == tuple(x.shape)
            assert (made.swizzle, made.bytes, made.block, made.padding) == (3, 2, (1, 1, rows, 64), 0)
            assert made.strides[-1] == 1
            assert not any(n * x.itemsize % 16 for n in made.strides[:-1])
            if stays or i != turn:
                assert (made.place, made.strides) == (x.data_ptr(), x.stride())
            else:
                assert made.place != x.data_ptr()
                assert made.place % 16 == 0


@pytest.mark.parametrize("look", LOOKS)
def test_copies_have_the_numbers(look):
    x = LOOKS[look][0](torch.randn(2, 3, 5, 16).to(torch.float16))
    made = addressable(x)
    assert made.equal(x)
    assert (made.data_ptr() == x.data_ptr()) is LOOKS[look][1]


@pytest.mark.parametrize(("dim", "v_dim", "boxes"), [(24, 40, (32, 64)), (80, 80, (64, 64)), (256, 64, (64, 64))])
def test_blocks_of_other_head_dims(dim, v_dim, boxes):
    """Blocks are powers of two, in boxes of at most 128 bytes: the rest of an array is read as zeros."""
    q, k, v = (x.detach() for x in arrays(d=dim, v_dim=v_dim, dtype=torch.float16))
    (one,) = launches(causal, q, k, v)
    assert [x.shape[-1] for x in one.maps] == [dim, dim, v_dim, v_dim]
    assert [x.block[-1] for x in one.maps] == [boxes[0], boxes[0], boxes[1], boxes[1]]
    assert [x.block[-2] for x in one.maps] == [64, one.maps[1].block[-2], one.maps[1].block[-2], 64]


@pytest.mark.parametrize(
    ("dim", "v_dim", "boxes", "of"),
    [
        (192, 192, [64] * 8, "qqkkvvoo"),
        (160, 160, [64, 32] * 4, "qqkkvvoo"),
        (192, 128, [64] * 6, "qqkkvo"),
        (96, 192, [64] * 6, "qkvvoo"),
    ],
)
def test_parts_of_a_head_have_descriptors_of_the_same_array(dim, v_dim, boxes, of):
    q, k, v = (x.detach() for x in arrays(d=dim, v_dim=v_dim))
    for _ in range(2):
        (one,) = launches(causal, q, k, v)
        assert [x.block[-1] for x in one.maps] == boxes
        places = dict(zip("qkv", (q, k, v), strict=True))
        for name, made in zip(of, one.maps, strict=True):
            assert made.shape == (*(q if name == "o" else places[name]).shape[:3], dim if name in "qk" else v_dim)
            assert name == "o" or (made.place, made.strides) == (places[name].data_ptr(), places[name].stride())
        assert len({x.place for name, x in zip(of, one.maps, strict=True) if name == "o"}) == 1


def test_numbers_follow_the_descriptors():
    """Each descriptor is a map, its shape and its strides; the other arguments stand behind them in their order."""
    q, k, v = (x.detach() for x in arrays())
    (one,) = launches(causal, q, k, v, origin=(0, 0, 30, 7), sizes=(2, 4, 600, 600))
    at = [i for i, x in enumerate(one.arguments) if isinstance(x, Map)]
    assert at == [0, 9, 18, 27]
    assert all(one.arguments[i + 1 : i + 9] == (*one.arguments[i].shape, *one.arguments[i].strides) for i in at)
    lse, *rest = one.arguments[36:]
    assert hasattr(lse, "data_ptr")
    assert rest == [64**-0.5, 4, 512, 512, 30, 7, False, 128, 128, 4]


def test_lengths_heads_and_windows_compile_nothing():
    att = fk.compile("causal & window(w)", w=100, backend="gluon")
    assert compiled_by(att, *arrays())
    for more in ({"s": 777}, {"s": 640, "h": 8, "hkv": 4}, {"b": 3}, {"s": 500, "h": 2, "hkv": 1}):
        assert not compiled_by(att, *arrays(**more))
    assert not compiled_by(fk.compile("causal & window(w)", w=99, backend="gluon"), *arrays())


def compiled_by(att, *given):
    before = len(compiled)
    with torch.no_grad():
        att(*given)
    return compiled[before:]


CALLS = {
    "nothing hidden": (None, None, {}, {}),
    "window of one": ("causal & window(w)", None, {"w": 1}, {}),
    "documents": ("causal & same(doc)", None, {"doc": np.arange(512) // 100}, {}),
    "residues": ("causal & (q - k) % w == 0", None, {"w": 1}, {}),
    "table": ("causal", "score + bias[h, q - k]", {"bias": np.zeros((4, 512), np.float32)}, {}),
    "softcap": ("causal", "softcap(50)", {}, {}),
    "sinks": ("causal", None, {}, {"sinks": torch.zeros(4)}),
    "dropout": ("causal", None, {"dropout": 0.1}, {"seed": 3}),
    "origins": ("causal", None, {}, {"origin": (0, 0, np.array([3, 9]), 0), "sizes": (2, 4, 600, 600)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_compiled_and_launched(name):
    mask, score, bound, given = CALLS[name]
    att = fk.compile(mask, score, backend="gluon", **bound)
    q, k, v = (x.detach() for x in arrays())
    with torch.no_grad():
        first, again = (launches(att, q, k, v, **given) for _ in range(2))
    assert [x.kernel for x in (*first, *again)] == ["attention_forward"] * 2
    assert first[0].maps[:3] == again[0].maps[:3]
    assert [_plain(x) for x in first[0].arguments[27:]] == [_plain(x) for x in again[0].arguments[27:]]


def _plain(x):
    """An argument but for addresses: those of results are new at every call, and a warm launch brings numbers."""
    if isinstance(x, Map):
        return replace(x, place=0)
    return "pointer" if hasattr(x, "data_ptr") or (type(x) is int and x > 1 << 40) else x


def test_gluon_launch_of_one_query_and_one_key():
    q, k, v = (x.detach() for x in arrays(b=1, **ONE))
    (one,) = launches(causal, q, k, v)
    assert one.grid == (1, 1, 1)
    assert [x.shape for x in one.maps] == [(1, 1, 1, 64)] * 4


TRITONS = [f"attention_{n}" for n in ("delta", "dq", "dkv", "dv")]
FUSED = ["attention_delta", "attention_backward", "attention_convert"]


def gradients(mask, given=(), seed=None, **options):
    """The launches of a forward and its backward."""
    att, more = fk.compile(mask, **options), {} if seed is None else {"seed": seed}
    return launches(lambda: att(*(given or arrays()), **more).sum().backward())


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_are_those_of_the_fused_kernel(deterministic, d):
    """Of the first call, which Triton's launcher binds, and of the second, whose arguments are laid out."""
    given = q, k, v = arrays(d=d)
    att = fk.compile("causal", backend="gluon", deterministic=deterministic)
    first, again = (launches(lambda: att(*given).sum().backward()) for _ in range(2))
    assert [x.kernel for x in first] == [x.kernel for x in again] == ["attention_forward", *FUSED]
    queries = 64 if d == 128 else 128
    for _, _, one, _ in (first, again):
        assert (one.warps, one.grid) == (12, (2, 4, 2))
        q_map, k_map, v_map, dout_map, stats, acc = one.maps
        assert [x.place for x in (q_map, k_map, v_map)] == [x.data_ptr() for x in (q, k, v)]
        assert [x.block for x in (q_map, k_map, dout_map)] == [(1, 1, n, 64) for n in (queries, 64, queries)]
        assert (stats.shape, stats.block, stats.bytes, stats.swizzle) == ((3, 2, 4, 512), (1, 1, 1, queries), 4, 0)
        assert (acc.shape, acc.block, acc.bytes, acc.swizzle) == ((2, 4, 512, d), (1, 1, 64, 32), 4, 3)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in given)


def test_fused_gradients_of_documents_take_turns_of_their_call():
    """Tables of another call have other documents, and another order of programs."""
    att, seen = fk.compile("causal & same(doc)", backend="gluon"), []
    compute = gluon_torch.turns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_torch, "turns", lambda *a: seen.append(compute(*a)) or seen[-1])
        for length in (100, 200):
            made = launches(lambda n=length: att(*arrays(), doc=torch.arange(512) // n).sum().backward())
            assert [x.kernel for x in made][-3:] == FUSED
    assert [x.shape for x in seen] == [(1, 4, 4)] * 2
    assert (np.asarray(seen[0]) != np.asarray(seen[1])).any()


def first_alone():
    return [x.detach().requires_grad_(i == 0) for i, x in enumerate(arrays())]


CALLS_OF_TRITON = {
    "another backend": lambda: gradients("causal", backend="triton"),
    "dropout": lambda: gradients("causal", backend="gluon", dropout=0.1, seed=3),
    "unequal sizes": lambda: gradients("causal", backend="gluon", given=arrays(d=64, v_dim=128)),
    "wide heads": lambda: gradients("causal", backend="gluon", given=arrays(d=256)),
    "some gradients": lambda: gradients("causal", backend="gluon", given=first_alone()),
}


@pytest.mark.parametrize("name", CALLS_OF_TRITON)
def test_triton_computes_the_gradients_that_gluon_lacks(name):
    kernels = [x.kernel for x in CALLS_OF_TRITON[name]()]
    assert kernels[0] == "attention_forward"
    assert not set(FUSED[1:]).intersection(kernels)
    assert set(kernels[1:]) <= set(TRITONS)
    assert len(kernels) >= 3


def test_gluon_tiles_beyond_shared_memory_are_refused(monkeypatch):
    """Triton finds it out where it loads the kernel."""
    monkeypatch.setattr(triton.compiler.compiler, "max_shared_mem", lambda device: SHARED // 4)
    att = fk.compile("causal & window(1234)", backend="gluon")
    given = [x.detach() for x in arrays(d=128)]
    said = (
        r"attention_forward takes \d+ bytes of shared memory in tiles of 128 queries x 128 keys, 4 warps and 3 stages"
    )
    for _ in range(2):
        with pytest.raises(BackendError, match=f"{said}; this GPU has {SHARED // 4}\n  give a smaller tile"):
            att(*given)
    monkeypatch.setattr(triton.compiler.compiler, "max_shared_mem", lambda device: SHARED // 2)
    assert [x.kernel for x in launches(lambda: att(*given))] == ["attention_forward"]  # 64 keys, 2 stages


@pytest.mark.parametrize(("page", "tokens"), [(16, 16), (64, 64), (256, 128)])
def test_prefill_of_a_paged_cache_has_descriptors_of_the_pool(page, tokens):
    """A part of a prompt behind an earlier one: tiles of 128 keys are loaded in pieces of one page."""
    pool = fk.caches.PagePool(pages=4096 // page, page=page)
    cache = PagedKVCache.create(
        pages=4096 // page, page=page, batch=2, width=2048 // page, kv_heads=2, head_dim=128, dtype=torch.bfloat16
    )
    att = fk.compile("causal", backend="gluon")
    q, k, v = (torch.zeros(2, heads, 300, 128, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with torch.no_grad():
        for tokens_so_far in (300, 600, 900):
            grown = dict.fromkeys("ab", 300) if tokens_so_far > 300 else {}
            copies = pool.append(grown) if grown else [*pool.allocate("a", 300), *pool.allocate("b", 300)]
            cache.seat(pool, ["a", "b"], 300, copies)
            (one,) = [x for x in launches(cache.attention, att, q, k, v) if x.kernel == "attention_forward"]
            assert (one.grid, one.warps) == ((3, 4, 2), 12)
            of_q, of_k, of_v, _ = one.maps
            assert of_q.block == (1, 1, 64, 64)
            for array, made in ((cache.k, of_k), (cache.v, of_v)):
                assert (made.place, made.shape, made.strides) == (array.data_ptr(), tuple(array.shape), array.stride())
                assert made.block == (1, 1, tokens, 64)
            assert 4096 // page in [x for x in one.arguments[36:] if type(x) is int]  # the pages of the pool


def test_pools_of_another_size_are_another_launch():
    att = fk.compile("causal", backend="gluon")
    q = torch.zeros(1, 4, 200, 64, dtype=torch.bfloat16)
    pages = torch.arange(8, dtype=torch.int32)[None]
    for count in (8, 12, 8):
        pool = torch.zeros(count, 2, 32, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            (one,) = launches(att, q, pool, pool, pages=pages)
        assert [x.shape[0] for x in one.maps] == [1, count, count, 1]
