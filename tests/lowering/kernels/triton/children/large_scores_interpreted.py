"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: gradients where scores are large, in torch and JAX. Summed
over keys, dv is dout times the sum of a row's weights, which is 1 however large scores are."""

import numpy as np
import pytest
import torch
from support.triton import dot as triton_dot

import frisket as fk

triton_dot.install()

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
S, SIZES = 40, (1e-3, 1e5, 1e30)
MASKS = {
    "one key": ("k == q", None, {}),
    "everything": (None, None, {}),
    "documents": ("causal & same(doc)", None, {"doc": torch.arange(S) // 9}),
    "empty rows": ("causal & q >= 7 & k < 33", None, {}),
    "affine": ("causal", "score * 1.5 + 0.1 * (k - q)", {}),
    "softcap": ("causal", "100000 * tanh(score / 100000)", {}),
    "slope": ("causal", "score + slope[h] * (k - q)", {"slope": (2,)}),
    "distance": ("causal", "score + bias[q - k + 5]", {"bias": (90,)}),
    "gate": ("causal", "score * 1.1 + gate[h, k]", {"gate": (2, S)}),
    "plane": ("causal", "score + plane[h, q, k]", {"plane": (2, S, S)}),
    "sinks": ("causal", None, {"sinks": (2,)}),
    "dropout": ("k == q", None, {"seed": 3}),
}


def given(size, params, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, heads, S, 16, generator=draw) for heads in (2, 1, 1, 2))
    grown = [(x * (size * 2) ** 0.5).to(dtype) for x in (q, k)]
    tables = {n: torch.randn(x, generator=draw) if isinstance(x, tuple) else x for n, x in params.items()}
    if "sinks" in tables:
        tables["sinks"] *= 1e5
    return [*grown, v.to(dtype)], dout.to(dtype), tables


def check(found, dout, sums, mask, near):
    dq, dk, dv, *more = found
    assert all(np.isfinite(x).all() for x in (dq, dk, dv, *more))
    assert np.abs(dv.sum(2)[:, 0] - (dout * sums).sum((1, 2))).max() < near * (2 * S) ** 0.5
    if mask == "k == q":
        assert np.abs(dv[:, 0] - (dout * sums).sum(1)).max() < near


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_weights_in_torch(name, size):
    weights_in_torch(name, size, torch.float32, 4e-6)


def weights_in_torch(name, size, dtype, near):
    mask, mod, params = MASKS[name]
    att = fk.compile(mask, mod, backend="triton", dropout=0.5 if "seed" in params else 0.0)
    arrays, dout, tables = given(size, params, dtype)
    learned = {n: x.requires_grad_() for n, x in tables.items() if isinstance(params[n], tuple)}
    leaves = [x.requires_grad_() for x in arrays]
    grads = torch.autograd.grad(att(*leaves, **tables), [*leaves, *learned.values()], dout)
    with torch.no_grad():
        sums = att(*leaves[:2], torch.ones_like(leaves[2]), **tables)
    check([x.double().numpy() for x in grads], *(x.double().numpy() for x in (dout, sums)), mask, near)


def test_weights_of_sixteen_bits_in_torch():
    weights_in_torch("one key", 1e3, torch.float16, 0.02)


@pytest.mark.parametrize("size", [1e5])
def test_weights_in_a_graph_of_torch(size):
    att = fk.compile("k == q", backend="triton")
    (q, k, v), dout, _ = given(size, {})
    (found,) = torch.autograd.grad(
        torch.compile(lambda v: att(q, k, v), fullgraph=True, backend="aot_eager")(v.requires_grad_()), v, dout
    )
    assert (found[:, 0] - dout.sum(1)).abs().max() < 1e-6
    (found,) = torch.func.vjp(lambda v: att(q, k, v), v.detach())[1](dout)
    assert (found[:, 0] - dout.sum(1)).abs().max() < 1e-6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_weights_in_jax(name, size):
    import jax
    import jax.numpy as jnp

    mask, mod, params = MASKS[name]
    att = fk.compile(mask, mod, backend="triton", dropout=0.5 if "seed" in params else 0.0)
    arrays, dout, tables = given(size, params)
    tables = {n: x.numpy() if hasattr(x, "numpy") else x for n, x in tables.items()}
    learned = {n: jnp.asarray(x) for n, x in tables.items() if isinstance(params[n], tuple)}
    rest = {n: x for n, x in tables.items() if n not in learned}
    leaves = [jnp.asarray(x.transpose(1, 2).numpy()) for x in arrays]
    _, back = jax.vjp(lambda *x: att(*x[:3], **x[3], **rest), *leaves, learned)
    *found, more = back(jnp.asarray(dout.transpose(1, 2).numpy()))
    sums = att(*leaves[:2], jnp.ones_like(leaves[2]), **learned, **rest)
    *found, sums = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (*found, sums))
    check([*found, *map(np.asarray, more.values())], dout.double().numpy(), sums, mask, 4e-6)
