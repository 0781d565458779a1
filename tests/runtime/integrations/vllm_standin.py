"""A stand-in for the part of vLLM that an attention backend meets: its abstract classes, its registry of backends, its
configuration, and what it tells a metadata builder of a step. tests/real/vllm-cpu compares it with vLLM."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


def fresh_config() -> SimpleNamespace:
    """What vLLM knows when a model is made."""
    hf = SimpleNamespace()
    return SimpleNamespace(
        additional_config={},
        model_config=SimpleNamespace(
            hf_text_config=hf, hf_config=hf, dtype=torch.float32, is_mm_prefix_lm=False, rswa_window=None,
            runner_type="generate", use_mla=False, max_model_len=512, is_hybrid=False,
        ),
        attention_config=SimpleNamespace(backend=AttentionBackendEnum.CUSTOM, backend_per_kind={}),
        speculative_config=None,
        kv_transfer_config=None,
    )  # fmt: skip


@dataclass(frozen=True)
class MultipleOf:
    base: int

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True


class AttentionMetadataBuilder(ABC):
    reorder_batch_threshold: int | None = None

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any: ...


class AttentionImpl(ABC):
    @abstractmethod
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any: ...  # fmt: skip


class AttentionBackendEnum(Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in registered

    def get_path(self, include_classname: bool = True) -> str:
        return registered.get(self) or self.value


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
    registered[backend] = class_path


class Platform:
    """vLLM's platform of CPUs, which counts the configs it sees."""

    device_name = "cpu"

    def __init__(self) -> None:
        self.updated: list[Any] = []

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda_alike(self) -> bool:
        return False

    def check_and_update_config(self, vllm_config: Any) -> None:
        self.updated.append(vllm_config)


@dataclass
class CommonAttentionMetadata:
    """What vLLM knows of a step."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


registered: dict[Any, str | None] = {}
config = fresh_config()
platform = Platform()


def modules() -> dict[str, ModuleType]:
    """What `import vllm` and its parts are to find, by name."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info_once=lambda *_: None)},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            x.__name__: x
            for x in (AttentionBackend, AttentionMetadataBuilder, AttentionImpl, CommonAttentionMetadata, MultipleOf)
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.cpu_attn": {"CPUAttentionBackend": "vLLM's own"},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend,
        },
    }  # fmt: skip
    found: dict[str, ModuleType] = {}
    for name, names in parts.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(names)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(found[parent], last, found[name])
    return found


@contextmanager
def installed() -> Iterator[ModuleType]:
    """frisket's backend for vLLM, imported beside the stand-in; both are gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        try:
            yield import_module("frisket.integrations.vllm")
        finally:
            sys.modules.pop("frisket.integrations.vllm", None)
