"""Integers of traced functions wrap at their dtype, as torch and JAX compute them; `wrap` stands nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.dsl.ir import walk
from frisket.flex import create_block_mask, flex_attention

N = 40
NATIVE = pytest.param("cpp", marks=needs_compiler)
RANDOM = np.random.default_rng(7)
LONG, INT, SHORT, BYTE = (
    RANDOM.integers(np.iinfo(d).min, np.iinfo(d).max, N, d) for d in (np.int64, np.int32, np.int16, np.uint8)
)
FIELD = np.where(np.arange(N) % 5 == 0, 63, 3)
bits, ids, short, byte, field = map(torch.from_numpy, (LONG, INT, SHORT, BYTE, FIELD))
jids, jshort, jwords = jnp.asarray(INT), jnp.asarray(SHORT), jnp.asarray(INT.astype(np.uint32))


def shifted(x: Any) -> Any:
    x = x ^ (x << 13)
    x = x ^ (x >> 7)
    return x ^ (x << 17)


TORCH: dict[str, Callable[..., Any]] = {
    "bit of a table": lambda b, h, q, k: (bits[q] & (1 << field[k])) != 0,
    "sign bit": lambda b, h, q, k: (bits[q] & (1 << 63)) != 0,
    "congruence": lambda b, h, q, k: ((q * 6364136223846793005 + k * 1442695040888963407) >> 33) % 3 != 0,
    "large factors": lambda b, h, q, k: q * (2**62 + 12345) >= k * (2**61 + 77),
    "xorshift": lambda b, h, q, k: shifted(bits[q] - k * 88172645463325252) % 3 != 0,
    "power": lambda b, h, q, k: (q - k) ** 13 % 7 >= 1,
    "varying shift": lambda b, h, q, k: (q - k) * 2**58 << (k % 70) > -5,
    "int32": lambda b, h, q, k: (ids[q] * 31 - ids[k]) % 3 != 0,
    "int32 meets int64": lambda b, h, q, k: (ids[q] * k) % 3 != 0,
    "least int32": lambda b, h, q, k: -ids[q] - 2**31 < ids[k],
    "int16": lambda b, h, q, k: short[q] * short[k] > 5,
    "uint8": lambda b, h, q, k: byte[q] * byte[k] - 7 > 5,
    "uint8 meets int16": lambda b, h, q, k: byte[q] * short[k] > 5,
}
JAX: dict[str, Callable[..., Any]] = {
    "hash": lambda b, h, q, k: jnp.less((q * 73856093 ^ k * 19349663) % 8, 3),
    "xorshift": lambda b, h, q, k: jnp.less(shifted(q * 8817263 + k) % 5, 3),
    "shift": lambda b, h, q, k: jnp.left_shift(1, q) > k,
    "power": lambda b, h, q, k: jnp.less_equal((q * 1000 - k) ** 5 % 7, 3),
    "quotient": lambda b, h, q, k: jnp.greater_equal(q * 73856093 // 7, k * 1234567 // -3),
    "logical shift": lambda b, h, q, k: jax.lax.shift_right_logical(q * 88172631 - k, 5) < 33333,
    "int32": lambda b, h, q, k: (jids[q] * 31 + jids[k]) % 8 < 3,
    "least int32": lambda b, h, q, k: -jids[q] >= jids[k],
    "int16": lambda b, h, q, k: jshort[q] * jshort[k] > 5,
    "uint32": lambda b, h, q, k: jwords[q] * jnp.uint32(2654435761) - jwords[k] < jnp.uint32(2**30),
    "cast to uint32": lambda b, h, q, k: (q - k).astype(jnp.uint32) * jnp.uint32(2654435761) >> 16 < jnp.uint32(2**15),
    "cast to int8": lambda b, h, q, k: jnp.asarray(q).astype(jnp.int8) * 3 <= k,
    "not of uint32": lambda b, h, q, k: (~jnp.asarray(q).astype(jnp.uint32)) % jnp.uint32(3) == jnp.uint32(1),
}
# what XLA refuses without 64-bit integers, though JAX computes it in 32: rules for exact integers make factors of a
# shift one literal past 32 bits, or move a term to the other side of a comparison; a logical shift takes % 2**32
WIDE = ("xorshift", "quotient", "logical shift", "least int32")
EXACT = [
    lambda b, h, q, k: (q >= k) & (q - k < 256),
    lambda b, h, q, k: (q * 2047 - k * 31 + 7) % 64 < 16,
    lambda b, h, q, k: (q - k) ** 2 + (q // 32 - k // 32) ** 2 <= 400,
    lambda b, h, q, k: (q % 1024) * 100000 >= k,
    lambda b, h, q, k: (q ^ (q << 8)) & 0xFF == k & 0xFF,
]


def eager(f: Callable[..., Any], places: Any, axis: Any = None) -> Any:
    found = f(0, 0, places[:, None], places[None])
    return np.broadcast_to(np.asarray(found), (N, N))


def attended(mask: Any) -> Any:
    q, k, v = (torch.randn(1, 1, N, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    return q, k, v, torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.tensor(mask)).nan_to_num(0.0)


@pytest.mark.parametrize("name", TORCH)
def test_integers_of_torch_functions_wrap_as_in_torch(name):
    want = eager(TORCH[name], torch.arange(N))
    mask = fk.mask(TORCH[name])
    np.testing.assert_array_equal(mask.dense(N, N)[0, 0], want)
    np.testing.assert_array_equal(fk.mask(str(mask), **mask.params).dense(N, N)[0, 0], want)  # its text is a mask too


@pytest.mark.parametrize("name", JAX)
def test_integers_of_jax_functions_wrap_as_in_jax(name):
    want = eager(JAX[name], jnp.arange(N))
    np.testing.assert_array_equal(fk.mask(JAX[name]).dense(N, N)[0, 0], want)


@pytest.mark.parametrize("name", ["hash", "xorshift", "shift", "power", "quotient", "logical shift", "least int32"])
def test_integers_of_jax_functions_are_int64_with_x64(name):
    with jax.enable_x64(True):
        want = eager(JAX[name], jnp.arange(N))
        np.testing.assert_array_equal(fk.mask(JAX[name]).dense(N, N)[0, 0], want)


@pytest.mark.parametrize("f", EXACT)
def test_masks_within_their_dtype_have_no_wrap(f):
    through_jax = fk.mask(lambda b, h, q, k: jnp.logical_and(f(b, h, q, k), True))
    for mask in (fk.mask(f), through_jax):
        assert all(e.op != "wrap" for e in walk(mask.expr)), mask


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n != "int32" else n for n in TORCH])
@pytest.mark.parametrize("backend", ["aten", NATIVE])
def test_kernels_wrap_integers_as_torch_does(name, backend):
    q, k, v, want = attended(eager(TORCH[name], torch.arange(N)))
    found = fk.attention(q, k, v, TORCH[name], backend=backend)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n != "shift" else n for n in JAX])
@pytest.mark.parametrize("backend", [NATIVE, "xla"])
def test_kernels_wrap_integers_as_jax_does(name, backend):
    q, k, v, want = attended(eager(JAX[name], jnp.arange(N)))
    arrays = [jnp.asarray(x.numpy().swapaxes(1, 2)) for x in (q, k, v)]
    call = jax.jit(lambda q, k, v: fk.attention(q, k, v, JAX[name], backend=backend))
    if backend == "xla" and ("uint32" in name or name in WIDE):
        with pytest.raises(fk.FrisketError, match="32 bits and JAX has 64-bit integers switched off"):
            call(*arrays)
        return
    np.testing.assert_allclose(np.asarray(call(*arrays)).swapaxes(1, 2), want.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["bit of a table", "congruence"])
def test_compiled_flex_attention_wraps_integers(name):
    q, k, v, want = attended(eager(TORCH[name], torch.arange(N)))

    def attend(q, k, v):
        return flex_attention(q, k, v, None, create_block_mask(TORCH[name], None, None, N, N, device="cpu"))

    torch.testing.assert_close(attend(q, k, v), want, atol=1e-5, rtol=1e-5)
    found = torch.compile(attend, fullgraph=True, backend="eager")(q, k, v)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_wrapped_text_is_modulo_any_width():
    for width, dtype in ((8, np.int8), (16, np.int16), (32, np.int32), (64, np.int64)):
        text = f"wrap((q * 2654435761 - k * 40503) << 40, {width}) >= wrap(-q * 77, {width})"
        found, (q, k) = fk.mask(text).dense(N, N)[0, 0], np.ogrid[:N, :N]
        want = (((q * 2654435761 - k * 40503) << 40).astype(dtype)) >= (-q * 77).astype(dtype)
        np.testing.assert_array_equal(found, want)
