"""What people write with arrays of torch and JAX: `tests/typecheck.py` reads it as type checkers do, a test runs it."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import frisket as fk
from frisket.caches.jax import KVCache as JaxCache
from frisket.caches.torch import KVCache as TorchCache
from frisket.flex import BlockMask, and_masks, create_block_mask, flex_attention


def with_torch() -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    att = fk.compile("causal & window(w)", "softcap(50)", w=16, backend="library")
    assert_type(att(q, k, v), torch.Tensor)
    out, lse = att(q, k, v, return_lse=True)
    assert_type(out, torch.Tensor)
    assert_type(lse, torch.Tensor)
    assert_type(att(q, k, v, return_max=True), Any)
    assert_type(att(q, k, v, plan=att.plan(64, 64, heads=2)), torch.Tensor)
    assert_type(fk.attention(q, k, v, mask="causal", scale=0.5, backend="library"), torch.Tensor)
    assert_type(fk.attention(q, k, v, "causal", backend="library", return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(fk.merge((out, lse), (out, lse)), tuple[torch.Tensor, torch.Tensor])
    assert_type(fk.sdpa(q, k, v, q[0, 0] @ k[0, 0].mT > 0, is_causal=True, enable_gqa=True), torch.Tensor)
    with fk.sdpa_for(torch.nn.Identity()) as places:
        assert_type(places, list[str])
    report = att.check(q, k, v)
    assert_type(report, fk.Report)
    assert_type(report.good, bool)
    assert_type(fk.mask("causal").layout(256, 256).to_block_mask("cpu").sparsity(), float)
    att.stages(q, k, v)


def with_flex() -> None:
    def causal(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return q_idx >= kv_idx

    def alibi(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return score - 0.5 * (q_idx - kv_idx)

    q = torch.randn(1, 2, 64, 16)
    block_mask = create_block_mask(and_masks(causal, causal), None, None, 64, 64, device="cpu")
    assert_type(block_mask, BlockMask)
    assert_type(flex_attention(q, q, q, alibi, block_mask=block_mask), torch.Tensor)
    assert_type(flex_attention(q, q, q, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(flex_attention(q, q, q, return_aux=AuxRequest(lse=True)), tuple[torch.Tensor, AuxOutput])


def with_jax() -> None:
    q = jnp.ones((1, 64, 2, 16))
    att = fk.compile("causal & same(doc)", backend="library")
    doc = jnp.arange(64) // 16
    assert_type(att(q, q, q, doc=doc), jax.Array)
    out, lse = att(q, q, q, doc=doc, return_lse=True)
    assert_type(out, jax.Array)
    assert_type(fk.merge((out, lse)), tuple[jax.Array, jax.Array])
    assert_type(fk.attention(q, q, q, "causal", backend="library"), jax.Array)


def with_caches() -> None:
    att = fk.compile("causal", backend="library")
    cache = TorchCache.create(batch=1, capacity=64, kv_heads=2, head_dim=16, dtype="int8")
    assert_type(cache, TorchCache)
    q = torch.randn(1, 2, 4, 16)
    print(cache.attention(att, q, q, q).shape, cache.lengths)
    assert_type(JaxCache.create(batch=1, capacity=64, kv_heads=2, head_dim=16), JaxCache)


def main() -> None:
    with_torch()
    with_flex()
    with_jax()
    with_caches()
