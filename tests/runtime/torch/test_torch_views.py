"""Views of torch: negated, expanded, flipped and overlapping tensors mean what copies of them mean."""

import pytest
import torch
from support.native.compiler import needs_compiler
from support.native.shared import ALIBI
from support.torch import views as torch_views
from support.torch.views import SHAPES, VIEWS

import frisket as fk
from frisket.caches.torch import KVCache, RingKVCache
from frisket.flex import create_block_mask, flex_attention


@needs_compiler
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_torch_views_give_the_results_of_copies(backend, kind):
    torch_views.check(kind, backend, torch.float64, SHAPES)


@needs_compiler
@pytest.mark.parametrize("kind", ["negated", "conjugate"])
def test_torch_tensors_may_be_negated_views(kind):
    torch_views.check(kind, "cpp", torch.float64, *([name] for name in SHAPES))


@pytest.mark.parametrize("give", ["compile", "mask", "callable", "plan", "check"])
def test_tables_of_zeros_without_memory_are_zeros(give):
    """autograd makes such tensors; torch gives no numpy array of them, nor their number of bytes."""
    zeros, plain = torch._efficientzerotensor((40,), dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    text = "causal & t[q] == t[k]"

    def result(t):
        if give == "compile":
            return fk.compile(text, t=t)(q, k, v)
        if give == "mask":
            return torch.from_numpy(fk.mask(text, t=t).dense(40, 40))
        if give == "callable":
            return fk.compile(lambda q, k: (q >= k) & (t[q] == t[k]))(q, k, v)
        if give == "plan":
            return fk.compile(text)(q, k, v, plan=fk.compile(text).plan(40, 40, 1, 2, t=t))
        fk.compile(text).check(q, k, v, t=t).require()
        return fk.compile(text)(q, k, v, t=t)

    torch.testing.assert_close(result(zeros), result(plain))


@pytest.mark.parametrize("give", ["compile", "call"])
def test_tables_of_conjugated_numbers_are_refused_as_complex(give):
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    table = torch.ones(40, dtype=torch.complex64).conj()
    more = [{"t": table}, {}]
    with pytest.raises(fk.ParameterError, match="`t` is an array of complex64"):
        fk.compile("causal", "score + t[q]", **more[give == "call"])(q, k, v, **more[give == "compile"])


def same(call, *given):
    """A call of negated views is that of their copies."""
    torch.testing.assert_close(call(*map(torch._neg_view, given)), call(*(-x for x in given)), rtol=0, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_tables_that_are_captured_or_decide_what_is_seen(backend):
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    doc = -(torch.arange(40, dtype=torch.int32) // 9)
    same(lambda t: fk.compile(lambda q, k: (q >= k) & (t[q] == t[k]), backend=backend)(q, k, v), doc)
    same(lambda t: fk.attention(q, k, v, "causal & doc[q] == doc[k]", doc=t, backend=backend), doc)
    same(lambda t: fk.compile("causal & same(doc)", backend=backend)(q, k, v, doc=t), doc.long())
    alibi = lambda t: lambda score, h, q, k: score + t[h] * (k - q)  # noqa: E731
    same(lambda t: fk.compile("causal", alibi(t), backend=backend)(q, k, v), torch.randn(2))
    for text, name, table in (("causal & same(doc)", "doc", doc), ("k < n[b]", "n", -torch.tensor([30]))):
        att = fk.compile(text, backend=backend)
        same(lambda t, a=att, n=name: a(q, k, v, plan=a.plan(40, 40, 1, 2, flat=True, **{n: t})), table)
    same(lambda t: fk.mask("doc[q] == doc[k]", doc=t).dense(40, 40).sum().item(), doc)
    same(lambda t: fk.attention(q, k, v, "causal", origin=(0, 0, t, 0), backend=backend), -torch.tensor([2]))
    same(lambda t: torch.tensor(fk.reference(q.numpy(), k.numpy(), v.numpy(), sinks=t, layout="bhsd")), torch.ones(2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_stored_keys_and_their_scales(backend):
    q, k, v = torch.randn(1, 2, 4, 16), *torch.randint(-99, 99, (2, 3, 2, 16, 16), dtype=torch.int8)
    pages = -torch.tensor([[1, 2]], dtype=torch.int32)
    scales = torch.rand(2, 3, 2, 16).unbind()
    att = fk.compile("causal", backend=backend)
    same(lambda a, b, p: att(q, k, v, k_scale=a, v_scale=b, pages=p, origin=(0, 0, 28, 0)), *scales, pages)


@needs_compiler
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "make"),
    [(torch.int8, KVCache), (torch.float32, RingKVCache),
     *[pytest.param(*x, marks=pytest.mark.exhaustive) for x in ((torch.float32, KVCache), (torch.int8, RingKVCache))]],
)  # fmt: skip
def test_cache_steps_of_views_equal_those_of_copies(make, dtype):
    """A step on the CPU writes the tokens, plans and runs in C++."""
    if make is KVCache:
        new, att = lambda: KVCache.create(2, 32, 2, 16, dtype=dtype), fk.compile("causal", backend="cpp")
    else:
        att = fk.compile("causal & window(24)", backend="cpp")
        new = lambda: RingKVCache.create(2, 24, 2, 16, dtype=dtype)  # noqa: E731

    def steps(q, k, v):
        cache = new()
        return torch.cat([cache.attention(att, q, k, v, [2, 1]) for _ in range(3)], 2)

    same(steps, *torch.randn(3, 2, 2, 3, 16))


def test_flex_attention_of_views_equals_that_of_copies():
    """A table that a mask_mod captured is read anew at every call, and one that was negated in place is another."""
    q, k, v = torch.randn(3, 1, 2, 128, 16)
    doc = -(torch.arange(128) // 40)

    def call(doc, bias):
        seen = create_block_mask(lambda b, h, q, k: doc[q] == doc[k], 1, 2, 128, 128, "cpu")
        return flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[k], seen)

    same(call, doc, torch.randn(128))


def test_complex_numbers_are_refused():
    q = torch.randn(1, 1, 8, 8, dtype=torch.complex64).conj()
    with pytest.raises(fk.ShapeError, match="q, k and v are complex64; attention takes float16"):
        fk.attention(q, q, q, "causal")


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "aten"])
def test_a_default_device_is_not_that_of_calls(backend):
    """Memory of another device was written to: the process ended."""
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    slope, att = torch.randn(2), fk.compile("causal", ALIBI, backend=backend)
    dropped = fk.compile("causal", backend=backend, dropout=0.1)

    def call():
        given = [x.detach().requires_grad_() for x in (q, k, v, slope)]
        out = att(*given[:3], slope=given[3], sinks=0.5)
        return out, *torch.autograd.grad(out.square().sum(), given), dropped(q, k, v, seed=3)

    want, step = call(), KVCache.create(1, 8, 2, 16)
    with torch.device("meta"):
        found = call()
        seeded = dropped(q, k, v)
        local = fk.compile("causal & window(8)", backend=backend)
        decoded = step.attention(local, *(x[:, :, :1] for x in (q, k, v)))
    torch.testing.assert_close(found, want)
    assert seeded.is_cpu
    assert torch.allclose(decoded, v[:, :, :1])
