"""`frisket.merge`: attention over parts of the keys, put together, is attention over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import frisket as fk
from frisket.dsl.sugar import k as key
from frisket.dsl.sugar import q as query
from frisket.lowering import dense
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs

B, H, M, N, D = 2, 3, 5, 12, 4
CUTS = (0, 3, 4, 12)
MASK = (query >= key) & (query <= 9)


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((B, H, n, D)) for n in (M, N, N))


def attended(q, k, v, lo, hi, q0=0):
    """Attention over keys lo..hi of queries from q0 on: early queries see none of the later keys."""
    problem = Problem(q.shape[2], hi - lo, B, H, (0, 0, q0, lo), (B, H, N, N))
    return dense.attention(
        q,
        k[:, :, lo:hi],
        v[:, :, lo:hi],
        dense.DenseCall(ProgramExprs(MASK), scale=0.5, params={}, tables={}, problem=problem),
    )


def parts(seed=0, q0=0):
    q, k, v = arrays(seed)
    return [attended(q, k, v, lo, hi, q0) for lo, hi in itertools.pairwise(CUTS)], attended(q, k, v, 0, N, q0)


def torch_parts(found, dtype="float64"):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    return [(torch.tensor(o).to(kind), torch.tensor(x).to(wide)) for o, x in found]


@pytest.mark.parametrize("q0", [0, 7])  # from 7 on, queries 10 and 11 see nothing at all
def test_merged_parts_equal_attention_over_all_keys(q0):
    found, (want, want_lse) = parts(q0=q0)
    assert np.isneginf(want_lse).any() == (q0 == 7)
    out, lse = fk.merge(*found, layout="bhsd")
    np.testing.assert_allclose(out, want, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, atol=1e-14)
    turned = [(o.swapaxes(1, 2), x) for o, x in found]
    out, lse = fk.merge(*turned, layout="bshd")
    np.testing.assert_allclose(out.swapaxes(1, 2), want, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, atol=1e-14)


def test_torch_and_jax():
    found, (want, want_lse) = parts()
    out, lse = fk.merge(*torch_parts(found))
    np.testing.assert_allclose(out.numpy(), want, atol=1e-14)
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=1e-14)
    jax = pytest.importorskip("jax")
    given = [(jax.numpy.asarray(o.swapaxes(1, 2), "float32"), jax.numpy.asarray(x, "float32")) for o, x in found]
    out, lse = jax.jit(fk.merge)(*given)
    np.testing.assert_allclose(np.asarray(out).swapaxes(1, 2), want, atol=3e-7)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6)


def test_merge_is_independent_of_order():
    found, _ = parts()
    one = fk.merge(*found, layout="bhsd")
    left = fk.merge(fk.merge(*found[:2], layout="bhsd"), found[2], layout="bhsd")
    right = fk.merge(found[2], fk.merge(*found[1::-1], layout="bhsd"), layout="bhsd")
    for x, y, z in zip(one, left, right):
        np.testing.assert_allclose(x, y, atol=1e-15)
        np.testing.assert_allclose(x, z, atol=1e-15)
    alone = fk.merge(found[0], layout="bhsd")
    np.testing.assert_array_equal(alone[0], found[0][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_kept(dtype):
    found, (want, _) = parts()
    given = torch_parts(found, dtype)
    out, lse = fk.merge(*given)
    assert str(out.dtype) == f"torch.{dtype}"
    assert str(lse.dtype) == "torch.float32"
    exact = fk.merge(*[(o.double().numpy(), x.double().numpy()) for o, x in given], layout="bhsd")[0]
    step = {"float32": 2e-7, "bfloat16": 4e-3, "float16": 5e-4}[dtype]  # one rounding, of the result
    assert (abs(out.double().numpy() - exact) <= step * abs(exact) + 1e-7).all()
    assert want.shape == tuple(out.shape)


def test_merge_gradients_in_torch_pass_gradcheck():
    torch = pytest.importorskip("torch")
    found, _ = parts()
    flat = [x.requires_grad_() for part in torch_parts(found) for x in part]

    def run(*x):
        out, lse = fk.merge(*zip(x[::2], x[1::2]))
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    finite = [torch.where(x == -torch.inf, -30.0, x).detach().requires_grad_() for x in flat]
    assert torch.autograd.gradcheck(run, finite)
    for q0 in (0, 7):  # empty parts and empty rows, which may hold anything
        flat = [x for part in torch_parts(parts(q0=q0)[0]) for x in part]
        for out, lse in zip(flat[::2], flat[1::2]):
            out[lse == -torch.inf] = torch.nan
        flat = [x.requires_grad_() for x in flat]
        out, lse = fk.merge(*zip(flat[::2], flat[1::2]))
        assert not out.isnan().any()
        assert not out[lse == -torch.inf].any()
        grads = torch.autograd.grad([out, lse], flat, [torch.ones_like(out), torch.ones_like(lse)])
        assert all(g.isfinite().all() for g in grads)
        for given, g in zip(flat[1::2], grads[1::2]):
            assert not g[given == -torch.inf].any()


def test_merge_gradients_in_jax_equal_torch():
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    found = parts(q0=7)[0]
    rng = np.random.default_rng(3)
    shape = found[0][0].shape
    dout, dlse = rng.standard_normal(shape), rng.standard_normal(shape[:3])
    given = [(np.float32(o.swapaxes(1, 2)), np.float32(x)) for o, x in found]
    pullback = jax.jit(lambda given, along: jax.vjp(lambda *p: fk.merge(*p), *given)[1](along))
    got = pullback(given, (np.float32(dout.swapaxes(1, 2)), np.float32(dlse)))
    flat = [x.requires_grad_() for part in torch_parts(found) for x in part]
    out, lse = fk.merge(*zip(flat[::2], flat[1::2]))
    want = torch.autograd.grad([out, lse], flat, [torch.tensor(dout), torch.tensor(dlse)])
    for (do, dl), wo, wl in zip(got, want[::2], want[1::2]):
        np.testing.assert_allclose(np.asarray(do).swapaxes(1, 2), wo, atol=2e-6)
        np.testing.assert_allclose(dl, wl, atol=5e-6)


def test_merge_gradients_reach_both_halves_of_the_keys():
    """Two halves of the keys, each attended with its own layout, and their gradients."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x).requires_grad_() for x in arrays())

    def scores(lo, hi):
        s = q @ k[:, :, lo:hi].mT
        return s.softmax(-1) @ v[:, :, lo:hi], s.logsumexp(-1)

    whole, joined = scores(0, N), fk.merge(scores(0, 5), scores(5, N))
    for x, y in zip(whole, joined):
        torch.testing.assert_close(x, y)
    weights = [torch.randn_like(x) for x in whole]
    for x, y in zip(torch.autograd.grad(whole, (q, k, v), weights), torch.autograd.grad(joined, (q, k, v), weights)):
        torch.testing.assert_close(x, y)


def pair(*shape, rows=None, dtype="float32"):
    return np.zeros(shape, dtype), np.zeros(rows if rows is not None else shape[:3], "float32")


@pytest.mark.parametrize(
    ("given", "layout", "text"),
    [
        ((), None, "nothing to merge; give it pairs"),
        ((np.zeros(3),), "bhsd", "part 0 is a ndarray; a part is a pair"),
        ((pair(1, 2, 3, 4),), None, "numpy arrays have no usual axis order"),
        ((pair(1, 2, 3, 4),), "sbhd", "the axis order is 'sbhd'"),
        ((pair(1, 2, 3, 4, rows=(1, 3, 2)),), "bhsd", r"part 0 has out \(1, 2, 3, 4\) and lse \(1, 3, 2\)"),
        ((pair(1, 2, 3, 4),), "bshd", r"part 0 has out \(1, 2, 3, 4\) and lse \(1, 2, 3\)"),
        ((pair(2, 3, 4),), "bhsd", r"part 0 has out \(2, 3, 4\)"),
        (
            (pair(1, 2, 3, 4), pair(1, 2, 5, 4)),
            "bhsd",
            r"part 0 has out .* of float32, part 1 \(1, 2, 5, 4\)",
        ),
        ((pair(1, 2, 3, 4), pair(1, 2, 3, 4, dtype="float64")), "bhsd", "part 1 .* of float64; parts are attention of"),
        ((pair(1, 2, 3, 4, dtype="int32"),), "bhsd", "out of part 0 is int32; attention gives float16"),
        (((np.zeros((1, 2, 3, 4)), [0.0]),), "bhsd", r"the parts are \(ndarray, list\); give arrays of one framework"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_merge_refuses_shapes_that_do_not_fit(given, layout, text):
    with pytest.raises(fk.ShapeError, match=text):
        fk.merge(*given, layout=layout)
