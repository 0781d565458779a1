"""Attention to stored keys and values on native kernels, called as users call it: by torch, under jit and vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.runtime.backends.cpp import torch as native_torch
from frisket.runtime.machine import cpp_build

pytestmark = pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason())


def cached(length, pages):
    """q, k, v, k_scale, v_scale, the table of pages, and what comes out, heads before tokens."""
    draw, page = np.random.default_rng(length), 16
    starts = np.array([length // 2, length - 1], np.int32)
    q = draw.standard_normal((2, 4, 1, 64)).astype(np.float32)
    k, v = (draw.integers(-127, 128, (pages, 2, page, 64)).astype(np.int8) for _ in "kv")
    k_scale, v_scale = (draw.random((pages, 2, page), np.float32) / 100 for _ in "kv")
    table = draw.permutation(pages)[: 2 * (length // page)].reshape(2, -1).astype(np.int32)

    def laid(x, scale):
        found = (x * scale[..., None])[table]
        return found.swapaxes(1, 2).reshape(2, 2, length, 64)

    mask = fk.mask("k <= start[b]", start=starts)
    want = fk.reference(q, laid(k, k_scale), laid(v, v_scale), mask=mask, layout="bhsd")
    return (q, k, v, k_scale, v_scale, table), starts, want


@pytest.mark.exhaustive
def test_torch_calls_compile_one_kernel(monkeypatch):
    """Lengths, pools, tables and values are none of its text's business."""
    texts = []
    build = native_torch.library
    monkeypatch.setattr(native_torch, "library", lambda text: texts.append(text) or build(text))
    att = fk.compile("causal", backend="cpp")
    for length, pages in ((96, 14), (160, 20), (48, 50)):
        arrays, starts, want = cached(length, pages)
        q, k, v, k_scale, v_scale, table = map(torch.from_numpy, arrays)
        step = att.at(q="q + start[b]", start=torch.from_numpy(starts))
        out = step(q, k, v, k_scale=k_scale, v_scale=v_scale, pages=table)
        np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=4e-6)
    assert len(set(texts)) == 1


def test_native_stored_keys_work_under_jit_and_vmap():
    arrays, starts, want = cached(96, 14)
    q, k, v, k_scale, v_scale = (jnp.asarray(x.swapaxes(1, 2)) for x in arrays[:5])
    att = fk.compile("causal", backend="cpp").at(q="q + start[b]", start=jnp.asarray(starts))

    def call(q, k, v):
        return att(q, k, v, k_scale=k_scale, v_scale=v_scale, pages=jnp.asarray(arrays[5]))

    again = jax.vmap(call)(*(jnp.stack([x, x]) for x in (q, k, v)))
    for out in (call(q, k, v), jax.jit(call)(q, k, v), again[0], again[1]):
        np.testing.assert_allclose(np.asarray(out).swapaxes(1, 2), want, rtol=0, atol=4e-6)
