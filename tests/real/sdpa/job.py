"""Models that call torch's scaled_dot_product_attention, with frisket.sdpa in its place."""

import sys

import pytest
import torch
from torch import nn

import frisket
from frisket.integrations import sdpa as front

BOUNDS = {torch.float32: 5e-7, torch.float64: 1e-12}  # over the largest entry
OURS = frisket.sdpa


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The shapes of the masks of the calls that frisket gets; None for calls without one."""
    found = []

    def counted(query, key, value, attn_mask=None, *more, **named):
        found.append(attn_mask)
        return OURS(query, key, value, attn_mask, *more, **named)

    monkeypatch.setattr(front, "sdpa", counted)
    return found


def step(model, *inputs, **named):
    """The output of a model and the gradients of its parameters, one after another."""
    model.zero_grad()
    torch.manual_seed(0)  # of stochastic depth
    out = model(*inputs, **named)
    out = out if isinstance(out, torch.Tensor) else out.sample
    out.square().mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def difference(found, want):
    """The largest difference of outputs, and of gradients, each over the largest entry."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, want, strict=True))


def compare(request, calls, model, *inputs, **named):
    """Outputs and gradients with frisket equal those without. Gives the masks of the calls."""
    want = step(model, *inputs, **named)
    assert not calls
    with frisket.sdpa_for(model):
        error = difference(step(model, *inputs, **named), want)
    assert torch.nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    print(f"{request.node.name}: {error:.1e}")
    assert calls
    assert error < BOUNDS[next(model.parameters()).dtype]
    return calls


# -- x-transformers ---------------------------------------------------------------------------------------------------

LENGTH, LONG, TOKENS = 192, 1024, 64  # tokens; frisket looks for ranges in masks of 1,024 x 1,024


def language_model(layers="Decoder", **options):
    import x_transformers

    torch.manual_seed(0)
    make = getattr(x_transformers, layers)
    attention = make(dim=32, depth=2, heads=2, attn_dim_head=16, attn_flash=True, **options)
    return x_transformers.TransformerWrapper(num_tokens=TOKENS, max_seq_len=LONG, attn_layers=attention)


def tokens(batch=2, length=LENGTH):
    return torch.randint(TOKENS, (batch, length), generator=torch.Generator().manual_seed(0))


def padding():
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [100]])


OPTIONS = {
    "causal": {},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "rotary": {"rotary_pos_emb": True},
    "one head of keys": {"attn_one_kv_head": True},
    "groups of heads": {"attn_kv_heads": 1},
    "query norm": {"attn_qk_norm": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layers", ["Decoder", "Encoder"])
def test_x_transformers_equals_torchs_sdpa(request, calls, name, layers):
    model = language_model(layers, **OPTIONS[name])
    compare(request, calls, model.double() if name == "query norm" else model, tokens())  # which peaks: 5e-7 in float32


@pytest.mark.parametrize("name", ["causal", "alibi"])
@pytest.mark.parametrize("layers", ["Decoder", "Encoder"])
def test_x_transformers_with_padding_equals_torchs_sdpa(request, calls, name, layers):
    masks = compare(request, calls, language_model(layers, **OPTIONS[name]), tokens(), mask=padding())
    assert all(mask is not None for mask in masks)


def test_x_transformers_on_packed_documents_equals_torchs_sdpa(request, calls):
    document = torch.arange(LONG) // 200
    masks = compare(request, calls, language_model(), tokens(1, LONG), attn_mask=document[:, None] == document)
    texts = {front._facts_of(mask, mask[:, :1]).mask for mask in masks}
    assert texts == {"k >= first[0, 0, q] & q >= k"}  # causal documents, found in the dense mask


def test_x_transformers_generates_the_tokens_of_torchs_sdpa(calls):
    import x_transformers

    model = x_transformers.AutoregressiveWrapper(language_model().eval())
    prompt = tokens()[:, :20]
    want = model.generate(prompt, 12, temperature=0.0)
    with frisket.sdpa_for(model):
        assert torch.equal(model.generate(prompt, 12, temperature=0.0), want)
    assert len(calls) >= 24


def test_x_transformers_trains_with_dropout(calls):
    model = language_model(attn_dropout=0.2)
    with frisket.sdpa_for(model):
        assert all(x.isfinite().all() for x in step(model, tokens(), mask=padding()))
    assert calls


def test_compiled_x_transformers_equals_torchs_sdpa(request, calls):
    model, graphs = language_model(alibi_pos_bias=True, alibi_num_heads=2), []

    def backend(graph, examples):
        graphs.append([str(n.target) for n in graph.graph.nodes if "frisket.attend" in str(n.target)])
        return graph

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(tokens(), mask=padding())  # before frisket is there
    assert not any(graphs)
    want = step(model, tokens(), mask=padding())
    with frisket.sdpa_for(compiled):
        error = difference(step(compiled, tokens(), mask=padding()), want)
    assert sum(map(len, graphs)) == 2  # one for each layer
    print(f"{request.node.name}: {error:.1e}")
    assert error < BOUNDS[torch.float32]


# -- timm -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm():
    # timm reads images with torchvision, whose wheel is for CUDA: its operators are declared, and none is called
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm

    timm.layers.set_fused_attn(True, experimental=True)  # Swin has SDPA there
    return timm


def stirred(model):
    """The model with other parameters than its first ones, which hide attention behind factors of 1e-5."""
    for p in model.parameters():
        nn.init.normal_(p, 0.5 if p.ndim < 2 else 0.0, 0.2)
    return model


VISION = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2, "num_heads": 2, "embed_dim": 32},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "window_size": 7,
    },
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "num_heads": 2, "embed_dim": 32},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2, "num_heads": 2, "embed_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", VISION)
def test_timm_equals_torchs_sdpa(request, calls, timm, name):
    torch.manual_seed(0)
    model = stirred(timm.create_model(name, num_classes=5, **VISION[name]))
    size = VISION[name]["img_size"]
    masks = compare(request, calls, model, torch.randn(2, 3, size, size))
    assert any(m is not None and m.requires_grad for m in masks) == name.startswith(("swin", "beit"))  # learned biases


def test_naflex_of_timm_with_padding_equals_torchs_sdpa(request, calls, timm):
    torch.manual_seed(0)
    model = stirred(timm.create_model("naflexvit_base_patch16_gap", num_classes=5, depth=2, num_heads=2, embed_dim=32))
    patches, valid = torch.randn(2, 64, 16 * 16 * 3), torch.arange(64) < torch.tensor([[64], [30]])
    grid = (
        torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1)
        .view(1, 64, 2)
        .expand(2, -1, -1)
    )
    masks = compare(request, calls, model, patches, grid, valid)
    assert any(mask is not None for mask in masks)


# -- models of diffusers that call SDPA themselves --------------------------------------------------------------------


def test_unet_of_diffusers_equals_torchs_sdpa(request, calls):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 32), layers_per_block=1, cross_attention_dim=32, attention_head_dim=16,
        norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    model.double()  # convolutions round more than the bound
    text, seen = torch.randn(2, 20, 32).double(), torch.arange(20) < torch.tensor([[20], [9]])
    masks = compare(
        request, calls, model, torch.randn(2, 4, 16, 16).double(), torch.tensor(3), text, encoder_attention_mask=seen
    )
    assert any(m is not None for m in masks)


def test_stable_diffusion_3_of_diffusers_equals_torchs_sdpa(request, calls):
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip
    compare(
        request,
        calls,
        model,
        torch.randn(2, 4, 16, 16),
        torch.randn(2, 20, 32),
        torch.randn(2, 16),
        torch.tensor([3, 5]),
    )


# -- a module that bound the function when it was imported ------------------------------------------------------------


def test_sdpa_for_finds_names_bound_at_import(calls, tmp_path, monkeypatch):
    (tmp_path / "bound_early.py").write_text(
        "import torch\nfrom torch.nn.functional import scaled_dot_product_attention as attend\n\n\n"
        "class Layer(torch.nn.Module):\n    def forward(self, q):\n        return attend(q, q, q)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from bound_early import Layer

    model = nn.Sequential(Layer())
    q = torch.randn(1, 2, 32, 16)
    want = model(q)
    with frisket.sdpa_for(model) as places:
        torch.testing.assert_close(model(q), want)
    assert "bound_early.attend" in places
    assert len(calls) == 1
    assert sys.modules["bound_early"].attend is torch._C._nn.scaled_dot_product_attention
