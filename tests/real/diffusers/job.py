"""Tiny random transformers of diffusers, whose `flex` backend calls frisket, compared with dense attention."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AnyFlowFARTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    Kandinsky6SRTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers import transformer_kandinsky6_sr as kandinsky
from torch.nn.attention import flex_attention as flex

import frisket.flex

torch.set_num_threads(1)
TORCH = flex.flex_attention, flex.BlockMask  # in a tuple, since install replaces attributes of modules
calls: list[torch.Size] = []


def counted(query, *args, **kwargs):
    calls.append(query.shape)
    return frisket.flex.flex_attention(query, *args, **kwargs)


def dense(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, **_):
    """SDPA under the tiles that lists name: whole in a full tile, and in a partial one where mask_mod is true."""
    assert score_mod is None
    batch, heads, queries, keys = torch.meshgrid(*map(torch.arange, (*query.shape[:3], key.shape[2])), indexing="ij")
    seen = tiles(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)[..., : query.shape[2], : key.shape[2]]
    seen = seen & block_mask.mask_mod(batch, heads, queries, keys)
    if block_mask.full_kv_num_blocks is not None:
        full = tiles(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        seen = seen | full[..., : query.shape[2], : key.shape[2]]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=scale)


def tiles(block_mask, count, indices):
    """Which pairs lie in the tiles of a list."""
    listed = torch.arange(indices.shape[-1]) < count[..., None]
    height, width = block_mask.BLOCK_SIZE
    seen = torch.zeros_like(listed).scatter(-1, indices.long(), listed)
    return seen.repeat_interleave(height, -2).repeat_interleave(width, -1)


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """Puts another object into the place of a name of PyTorch's; frisket, whose calls are counted, is there first."""
    calls.clear()
    # set_attention_backend also changes the backend of models that name none, until the end of this block
    with frisket.flex.install(), attention_backend("native"), monkeypatch.context() as patch:

        def replace(x, name="flex_attention"):
            patch.setattr(flex, name, x)

        replace(counted)
        yield replace


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def padding(batch, length):
    """The last text tokens of every row but the first are padding."""
    return torch.arange(length)[None] < length - 3 * torch.arange(batch)[:, None]


def hunyuan():
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
        guidance_embeds=False,
    )  # fmt: skip
    return model, {
        "hidden_states": random(2, 4, 3, 16, 16), "timestep": torch.tensor([7, 900]),
        "encoder_hidden_states": random(2, 12, 16), "encoder_attention_mask": padding(2, 12),
        "pooled_projections": random(2, 8),
    }  # fmt: skip


def flux():
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": random(2, 144, 4), "encoder_hidden_states": random(2, 20, 32),
        "pooled_projections": random(2, 32), "timestep": torch.tensor([0.3, 0.9]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(12.0), torch.arange(12.0)),
        "txt_ids": torch.zeros(20, 3),
    }  # fmt: skip


def qwen_image():
    model = QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": random(2, 144, 16), "encoder_hidden_states": random(2, 20, 16),
        "encoder_hidden_states_mask": padding(2, 20).long(), "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [[(1, 12, 12)]] * 2,
    }  # fmt: skip


def wan():
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": random(1, 4, 2, 24, 24), "timestep": torch.tensor([500]),
        "encoder_hidden_states": random(1, 12, 16),
    }  # fmt: skip


def anyflow():
    model = AnyFlowFARTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32, chunk_partition=(1, 2, 2, 1), full_chunk_limit=2,
    )  # fmt: skip
    return model, {
        "hidden_states": random(1, 6, 4, 16, 16), "timestep": torch.full((1, 6), 500.0),
        "r_timestep": torch.full((1, 6), 300.0), "encoder_hidden_states": random(1, 12, 16),
        "chunk_partition": [1, 2, 2, 1], "clean_hidden_states": random(1, 3, 4, 16, 16),
        "clean_timestep": torch.zeros(1, 3),
    }  # fmt: skip


def kandinsky6():
    model = Kandinsky6SRTransformer3DModel(
        in_visual_dim=2, out_visual_dim=4, time_dim=16, model_dim=32, ff_dim=32, num_visual_blocks=2,
        axes_dims=(4, 6, 6), nabla_window=(3, 1, 1), nabla_threshold=0.3,
    )  # fmt: skip
    return model, {"hidden_states": random(1, 3, 24, 16, 5), "timestep": torch.tensor([500.0])}


def sd3():
    model = SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        caption_projection_dim=16, joint_attention_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": random(1, 4, 16, 16), "encoder_hidden_states": random(1, 12, 16),
        "pooled_projections": random(1, 16), "timestep": torch.tensor([500]),
    }  # fmt: skip


def results(model, inputs):
    """The output, and the gradient of every parameter that it depends on."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    (out * random(*out.shape)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def seeded(make):
    torch.manual_seed(0)
    model, inputs = make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))  # some layers begin as 0, and would hide their attention
    return model, inputs


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max() + 1))


@pytest.mark.parametrize("make", [hunyuan, flux, qwen_image, wan])
def test_models_equal_native_attention(make):
    model, inputs = seeded(make)
    expected = results(model, inputs)
    assert not calls
    model.set_attention_backend("flex")
    close(results(model, inputs), expected)
    assert calls


@pytest.mark.parametrize("make", [anyflow, kandinsky6])
def test_models_equal_their_lists_read_densely(make, use):
    model, inputs = seeded(make)
    found = results(model, inputs)
    assert calls
    use(dense)
    close(found, results(model, inputs))


def test_compiled_blocks_equal_eager_ones():
    model, inputs = seeded(kandinsky6)
    expected = results(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    close(results(model, inputs), expected)


def test_torch_ignores_lists_without_compile(use):
    """Without torch.compile, torch's flex_attention asks mask_mod alone, and NABLA's is true everywhere."""
    model, inputs = seeded(kandinsky6)

    def everything(query, key, value, **_):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    outs = {}
    for function in (counted, TORCH[0], dense, everything):
        use(function)
        use(frisket.flex.BlockMask if function is counted else TORCH[1], "BlockMask")
        with torch.no_grad():
            outs[function] = model(**inputs, return_dict=False)[0]
    off = float((outs[TORCH[0]] - outs[dense]).abs().max())
    print("torch's eager flex_attention is off by", off, "of", float(outs[dense].abs().max()))
    close([outs[counted]], [outs[dense]])
    close([outs[TORCH[0]]], [outs[everything]])
    assert off > 0.1


def test_warning_of_kandinsky_ends_with_its_logger_level(caplog):
    """It says that flex_attention runs eagerly and makes the whole matrix, whichever function runs."""
    model, inputs = seeded(kandinsky6)
    for level, printed in ((logging.WARNING, True), (logging.ERROR, False)):
        caplog.clear()
        kandinsky._warn_uncompiled_flex_attention.cache_clear()
        logging.getLogger("diffusers.models.transformers.transformer_kandinsky6_sr").setLevel(level)
        model(**inputs)
        assert ("materializes the full attention matrix" in caplog.text) is printed


def test_sd3_asks_no_backend():
    model, inputs = seeded(sd3)
    expected = results(model, inputs)
    model.set_attention_backend("flex")
    close(results(model, inputs), expected)
    assert not calls
    with frisket.sdpa_for(model) as places:
        close(results(model, inputs), expected)
    assert places


def test_processor_of_the_page_equals_a_dense_mask(monkeypatch):
    """The class of docs/diffusers.md: text of 20 tokens, then 12 x 12 patches that see 5 x 3 of them."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "diffusers.md").read_text(encoding="utf-8")
    (block,) = (x for x in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "class WindowProcessor" in x)
    model, inputs = seeded(flux)
    names = {}
    exec(block[: block.index("\n\nmodel.")], names)

    def nearest(n, size, window):
        start = min(max(n - window // 2, 0), size - window)
        return range(start, start + window)

    seen = torch.zeros(164, 164, dtype=torch.bool)
    seen[:20] = seen[:, :20] = True
    for row, column in np.ndindex(12, 12):
        for r in nearest(row, 12, 5):
            for c in nearest(column, 12, 3):
                seen[20 + 12 * row + column, 20 + 12 * r + c] = True

    def masked(query, key, value, **_):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    everything = results(model, inputs)[0]
    with monkeypatch.context() as patch:
        patch.setattr("diffusers.models.transformers.transformer_flux.dispatch_attention_fn", masked)
        expected = results(model, inputs)
    model.set_attn_processor(names["WindowProcessor"]((1, 12, 12), (1, 5, 3)))
    close(results(model, inputs), expected)
    assert (everything - expected[0]).abs().max() > 1e-3
