"""No keys, no queries, no batch entries, no heads: what torch's own attention gives, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.native.compiler import needs_compiler  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.flex import AuxRequest, create_block_mask, flex_attention  # noqa: E402

SHAPES = {  # batch, heads, queries, keys
    "no keys": (2, 4, 5, 0), "no queries": (2, 4, 0, 5), "neither": (1, 2, 0, 0), "no batch": (0, 4, 5, 6),
    "no heads": (2, 0, 5, 6),
}  # fmt: skip


def arrays(b, h, s, n):
    q, k = torch.randn(b, h, s, 8), torch.randn(b, h // 2, n, 8)
    return [x.requires_grad_() for x in (q, k, torch.randn(b, h // 2, n, 6))]


def gradients(out, given):
    out.sum().backward()
    found = [x.grad for x in given]
    for x in given:
        x.grad = None
    return found


def sdpa(q, k, v):
    groups = 2 if k.shape[1] else 1
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def rarely(*first):
    """Every shape; those that are not named are exhaustive."""
    return [pytest.param(n, marks=[] if n in first else pytest.mark.exhaustive) for n in SHAPES]


@pytest.mark.parametrize("backend", ["aten", pytest.param("native", marks=pytest.mark.exhaustive), "dense"])
@pytest.mark.parametrize("name", SHAPES)
def test_torch_calls_without_keys_or_queries_equal_sdpa(name, backend):
    given = arrays(*SHAPES[name])
    want = sdpa(*given)
    slopes = torch.rand(8, requires_grad=True)
    calls = [
        lambda *x: fk.compile("causal", backend=backend)(*x),
        lambda *x: fk.attention(*x, "same(doc)", "score + slope[h]", doc=np.arange(9), slope=slopes, backend=backend),
        lambda *x: fk.compile(backend=backend)(*(y.transpose(1, 2) for y in x), layout="bshd").transpose(1, 2),
    ]
    for call in calls:
        out = call(*given)
        torch.testing.assert_close(out, want)
        if backend != "dense":
            assert all(x.shape == y.shape and not x.any() for x, y in zip(gradients(out, given), given, strict=True))
    assert backend == "dense" or not slopes.grad.any()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", SHAPES)
def test_flex_attention_without_keys_or_queries_gives_zeros(name, compiled):
    run = torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if compiled else flex_attention
    given, (b, h, s, _) = arrays(*SHAPES[name]), SHAPES[name]
    slopes = torch.rand(8, requires_grad=True)
    mod = lambda s, b, h, q, k: s + slopes[h] * (q - k)  # noqa: E731
    for score in (None, mod):
        out, aux = run(*given, score, None, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
        torch.testing.assert_close(out, sdpa(*given))
        assert aux.lse.shape == aux.max_scores.shape == (b, h, s)
        assert (aux.lse == -torch.inf).all()
        assert all(x.shape == y.shape and not x.any() for x, y in zip(gradients(out, given), given, strict=True))


def test_lse_is_that_of_sinks():
    q, k, v = arrays(2, 4, 5, 0)
    for graph in (False, True):
        sinks = torch.arange(4.0, requires_grad=True)
        att = fk.compile("causal", sinks=sinks)
        run = torch.compile(att, backend="aot_eager", fullgraph=True) if graph else att
        out, lse = run(q, k, v, return_lse=True)
        assert not out.any()
        assert torch.equal(lse, sinks[None, :, None].expand(2, 4, 5))
        lse.sum().backward()
        assert torch.equal(sinks.grad, torch.full((4,), 10.0))


@needs_compiler
@pytest.mark.parametrize("name", rarely("no keys"))
def test_jax_calls_without_keys_or_queries_give_zeros(name):
    jax = pytest.importorskip("jax")
    b, h, s, n = SHAPES[name]
    shapes = ((b, s, h, 8), (b, n, h // 2, 8), (b, n, h // 2, 6))
    q, k, v = (jax.numpy.asarray(np.random.default_rng(0).standard_normal(x, np.float32)) for x in shapes)
    for backend in (None, "xla", "native", "dense"):
        att = fk.compile("causal & k < w", "score * f", w=3, backend=backend)
        for run in (att, jax.jit(att)) if backend != "dense" else (att,):
            out, lse = run(q, k, v, f=2.0, return_lse=True) if run is att else (run(q, k, v, f=2.0), None)
            assert out.shape == (b, s, h, 6)
            assert not np.asarray(out).any()
            assert lse is None or (np.asarray(lse) == -np.inf).all()
    gradients = jax.grad(lambda *x: fk.attention(*x[:3], "causal", "score * f", f=x[3]).sum(), (0, 1, 2, 3))
    found = jax.jit(gradients)(q, k, v, 2.0)
    assert [x.shape for x in found] == [*shapes, ()]
    assert not any(np.asarray(x).any() for x in found)


def test_reference_and_packed_rows():
    q, k, v = (x.detach().numpy() for x in arrays(1, 2, 3, 0))
    out, lse = fk.reference(q, k, v, "causal", layout="bhsd", return_lse=True)
    assert out.shape == (1, 2, 3, 6)
    assert not out.any()
    assert (lse == -np.inf).all()
    empty = torch.nested.nested_tensor([torch.zeros(0, 2, 8)] * 3, layout=torch.jagged).transpose(1, 2)
    assert fk.compile("causal")(empty, empty, empty).values().shape == (2, 0, 8)
    assert flex_attention(empty, empty, empty).values().shape == (2, 0, 8)


@pytest.mark.parametrize(("s", "n"), [(0, 5), (5, 0), pytest.param(0, 0, marks=pytest.mark.exhaustive)])
def test_masks_of_nothing(s, n):
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    made, want = (
        f(lambda b, h, q, k: q >= k, 1, 2, s, n, "cpu", 4) for f in (create_block_mask, theirs.create_block_mask)
    )
    assert made.shape == want.shape
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(made, name), getattr(want, name)), name
    q, k = torch.randn(1, 2, s, 8), torch.randn(1, 2, n, 8)
    assert torch.equal(flex_attention(q, k, k, block_mask=made), torch.zeros(1, 2, s, 8))
    layout = fk.mask("causal").layout(s, n, block=(4, 4))
    assert str(layout.counts) == "Counts(empty=0, partial=0, full=0)"
    assert layout.visible_pairs == 0
    assert layout.kinds().shape == (1, 1, -(-s // 4), -(-n // 4))
    assert layout.density == 0
    assert fk.mask("causal").dense(s, n).shape == (1, 1, s, n)
    assert str(layout)
    assert layout._repr_html_() is None
    with pytest.raises(fk.ExportError, match=f"to_bsr.. of a layout of {s} x {n} tokens"):
        layout.to_bsr()
    assert fk.mask("causal").implies("window(2)", s, n)


def test_empty_calls_still_refuse_bad_arguments():
    q, k, v = (x.detach() for x in arrays(2, 4, 5, 0))
    with pytest.raises(fk.FrisketError, match="`w` has no value"):
        fk.compile("k < w")(q, k, v)
    with pytest.raises(fk.FrisketError, match="`f` is given and no mask"):
        fk.compile("causal")(q, k, v, f=1)
    with pytest.raises(fk.FrisketError, match="a head size is zero"):
        fk.compile("causal")(q[..., :0], k[..., :0], v)
    with pytest.raises(fk.FrisketError, match="4 query heads do not divide among 0"):
        fk.compile("causal")(q, k[:, :0], v[:, :0])
