"""A stand-in for the part of vLLM that an attention backend meets: its abstract classes, its registry of backends, its
configuration, and what it tells a metadata builder of a step."""

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

config = SimpleNamespace(additional_config={}, model_config=SimpleNamespace(hf_text_config=SimpleNamespace()))
registered: dict[Any, str] = {}


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


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
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]: ...


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
    def __init__(self, num_heads: int, head_size: int, scale: float) -> None: ...

    @abstractmethod
    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any
    ) -> Any: ...


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "flash"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in registered


@dataclass
class CommonMetadata:
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
    causal: bool = True


def modules() -> dict[str, ModuleType]:
    """What `import vllm` and its parts are to find, by name."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            x.__name__: x for x in (AttentionBackend, AttentionMetadataBuilder, AttentionImpl, MultipleOf)
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum, "register_backend": registered.__setitem__,
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
