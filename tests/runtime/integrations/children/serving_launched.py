"""Run by test_transformers_paged.py without an interpreter: steps of serving engines as on an H200, launched into
nothing, so no value is there to look at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.lowering.device_tables import NoLook, NoWait, pose
from support.triton import null as triton_null

import frisket.integrations.transformers as plugin
from frisket.integrations import vllm_pages
from frisket.runtime.backends import triton as backend
from frisket.runtime.backends.triton import grids as triton_grids

triton_null.install(watch=True)
backend._on_torch = lambda: ""
HEADS, KEY_HEADS, DIM = 8, 2, 64
STEPS = 50


@pytest.fixture(autouse=True)
def posed(monkeypatch):
    pose(monkeypatch)
    monkeypatch.setattr(triton_grids, "INTERPRETED", 132)


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def batched(new, past):
    """What transformers hands to a layer: requests of `new` tokens behind `past` ones."""
    tokens, keys = sum(new), sum(new) + sum(past)

    def update(key, value, layer, rest):
        rest["cu_seq_lens_k"] = rest["cu_seq_lens_k"]["full_attention"]
        return (torch.zeros(1, KEY_HEADS, keys, DIM, dtype=key.dtype) for _ in "kv")

    return torch.zeros(1, HEADS, tokens, DIM, dtype=torch.bfloat16), {
        "cache": SimpleNamespace(layer_to_allocator=[SimpleNamespace(layer_type="full_attention")], update=update),
        "cu_seq_lens_q": ends(new),
        "cu_seq_lens_k": {"full_attention": ends([a + b for a, b in zip(new, past)])},
        "max_length_q": max(new),
        "position_ids": torch.zeros(1, tokens, dtype=torch.int32),
    }  # fmt: skip


def attend(module, new, past):
    q, rest = batched(new, past)
    k = torch.zeros(1, KEY_HEADS, sum(new), DIM, dtype=q.dtype)
    with torch.no_grad(), NoLook(), NoWait():
        out, _ = plugin.attention(module, q, k, k, None, is_causal=True, **rest)
    assert out.shape == (1, sum(new), HEADS, DIM)


def serve(layer, batch, pool):
    """A step of vLLM of two layers."""
    q = torch.zeros(batch[5], HEADS, DIM, dtype=pool.dtype)
    k = torch.zeros(batch[5], KEY_HEADS, DIM, dtype=pool.dtype)
    with torch.no_grad(), NoLook(), NoWait():
        found = vllm_pages.PagedBatch.of(*batch)
        for _ in range(2):
            vllm_pages.write(pool, k, k, found.slots)
            layer.add_bounds(pool, k, found.slots)
            assert layer.attend(q, pool, found).shape == q.shape


def test_steps_of_vllm():
    """Steps alone, and beside a chunk of a prompt."""
    layer = vllm_pages.ServedLayer(window=256, softcap=30.0, slopes=[0.5] * HEADS)
    pool = torch.zeros(260, KEY_HEADS, 16, 2 * DIM, dtype=torch.bfloat16)
    blocks = torch.arange(4 * 64, dtype=torch.int32).view(4, 64)

    def step(n, new):
        lengths = torch.tensor([100 + n, 37 + n, 700 + n, 64 + n + new[3]], dtype=torch.int32)
        return vllm_pages.steps_in_front(ends(new)), ends(new), lengths, blocks, torch.arange(sum(new)), sum(new)

    kinds = [lambda n: [1, 1, 1, 1], lambda n: [1, 1, 1, 48 + n]]
    for kind in kinds:
        for n in range(20):
            serve(layer, step(n, kind(n)), pool)
    triton_null.compiled.clear()
    triton_null.launched.clear()
    for n in range(20, 20 + STEPS):
        for kind in kinds:
            serve(layer, step(n, kind(n)), pool)
    assert triton_null.compiled == []
    planned = [kernel.name for kernel, *_ in triton_null.launched if kernel.name == "plan_spans"]
    assert 3 * STEPS <= len(planned) < 6 * STEPS  # once for both layers


def test_steps_of_vllm_that_choose_blocks():
    """The choice is made on the device, of any length, and blocks that other tokens begin compile nothing."""
    layer = vllm_pages.ServedLayer(window=512, select={"keep": 8, "always": "sinks(4) | window(64)"})
    pool = torch.zeros(260, KEY_HEADS, 16, 2 * DIM, dtype=torch.bfloat16)
    blocks = torch.arange(4 * 64, dtype=torch.int32).view(4, 64)

    def step(n, new):
        lengths = torch.tensor([100 + n, 37 + n, 700 + n, 64 + n + new[3]], dtype=torch.int32)
        longest = -(-(700 + n) // 16)  # as the builder cuts the table
        tables = blocks[:, :longest].contiguous(), torch.arange(sum(new))
        return vllm_pages.steps_in_front(ends(new)), ends(new), lengths, *tables, sum(new)

    kinds = [lambda n: [1, 1, 1, 1], lambda n: [1, 1, 1, 48 + n]]
    for n in range(20):
        for kind in kinds:
            serve(layer, step(n, kind(n)), pool)
    triton_null.compiled.clear()
    triton_null.launched.clear()
    for n in range(20, 20 + STEPS):
        for kind in kinds:
            serve(layer, step(n, kind(n)), pool)
    assert triton_null.compiled == []
    assert any("decode" in kernel.name for kernel, *_ in triton_null.launched)


def test_continuous_batching_steps_do_not_recompile():
    """Steps, and steps beside chunks of a prompt."""
    module = SimpleNamespace(layer_idx=0, config=SimpleNamespace(), is_causal=True)
    kinds = [lambda n: ([1, 1, 1], [100 + n, 37 + n, 900 + n]), lambda n: ([1, 48 + n, 1], [100 + n, 64, 900 + n])]
    for kind in kinds:
        for n in range(17):  # a length that a tile divides has a kernel of its own
            attend(module, *kind(n))
    triton_null.compiled.clear()
    for n in range(17, 17 + STEPS):
        for kind in kinds:
            attend(module, *kind(n))
    assert triton_null.compiled == []
    assert len(triton_null.launched) > 4 * STEPS
