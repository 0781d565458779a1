"""Tiny models of transformers with random weights, the same under two attention implementations."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from frisket.integrations.transformers import register

WINDOW, VOCABULARY, LENGTH = 8, 61, 24
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 9, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "gpt-oss": ("GptOssConfig", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Config", {}),
}  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    kind, special = MODELS[name]
    return getattr(transformers, kind)(**{**SIZES, **special, **changes})


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """The model under eager attention, and under frisket's."""
    return twins(AutoModelForCausalLM, config(name, **changes))


def twins(kind: Any, config: Any) -> tuple[Any, Any]:
    register()
    torch.manual_seed(0)
    eager, ours = (
        kind.from_config(copy.deepcopy(config), attn_implementation=name).eval() for name in ("eager", "frisket")
    )
    with torch.no_grad():
        for p in eager.parameters():  # so large that attention matters
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim > 1 else 1))
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randint(3, VOCABULARY, (batch, length))


def padded(left: int = 0, right: int = 0, holes: tuple[int, ...] = ()) -> torch.Tensor:
    """An attention_mask [2, LENGTH] whose first row is padded."""
    found = torch.ones(2, LENGTH, dtype=torch.int64)
    found[0, :left] = 0
    found[0, LENGTH - right :] = 0
    found[0, list(holes)] = 0
    return found


def packed(*lengths: int) -> torch.Tensor:
    """position_ids [1, LENGTH] of documents one after the other."""
    return torch.cat([torch.arange(n) for n in lengths])[None]
