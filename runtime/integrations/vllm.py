"""An attention backend for vLLM: `vllm serve MODEL --attention-backend CUSTOM`, with frisket installed beside vLLM.

vLLM finds `register` by its entry point `vllm.general_plugins` and takes the classes below for `CUSTOM`. They follow
its V1 interface: the metadata builder makes a `PagedBatch` of a step, and every layer is a `ServedLayer`.

A mask and a score mod of frisket's language replace those of the model. They are fields of the model's config, as with
transformers, or of `--additional-config`, which comes first:

    vllm serve MODEL --attention-backend CUSTOM \\
        --additional-config '{"frisket_mask": "causal & (q - k < reach | k < 4)", "frisket_params": {"reach": 4096}}'
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from frisket.dsl.errors import MissingPackageError, ParameterError
from frisket.runtime.caches.torch_plain import PLAIN

from .transformers_loading import FIELDS, check_fields
from .vllm_pages import PagedBatch, ServedLayer, steps_in_front, write

try:
    from vllm.v1.attention import backend as interface  # type: ignore[import-not-found]
except ModuleNotFoundError as missing:
    raise MissingPackageError("vllm is not installed: pip install vllm", name=missing.name) from None

NAME = "CUSTOM"  # the one place that vLLM keeps for backends from outside


def register() -> None:
    """Make this vLLM's backend `CUSTOM`, unless another plug-in has that name. vLLM calls this in each process."""
    from vllm.v1.attention.backends.registry import (  # type: ignore[import-not-found]
        AttentionBackendEnum,
        register_backend,
    )

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{VllmBackend.__name__}")


class VllmBackend(interface.AttentionBackend):  # type: ignore[misc]
    """The description of the backend for vLLM: its classes, the shape of the KV cache, what it can do."""

    accept_output_buffer = True
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    # fmt: off
    @staticmethod
    def get_name() -> str: return NAME
    @staticmethod
    def get_impl_cls() -> type[VllmAttention]: return VllmAttention
    @staticmethod
    def get_metadata_cls() -> type[PagedBatch]: return PagedBatch
    @staticmethod
    def get_builder_cls() -> type[VllmBatchBuilder]: return VllmBatchBuilder
    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]: return [interface.MultipleOf(16)]
    @classmethod
    def supports_sink(cls) -> bool: return True
    @staticmethod
    def use_cascade_attention(*_: Any, **__: Any) -> bool: return False
    # fmt: on

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[keys and values, blocks, tokens of a block, key heads, head_dim]."""
        if block_size % 16:
            raise ParameterError(f"blocks of {block_size} tokens\n  give --block-size a multiple of 16")
        return 2, num_blocks, block_size, num_kv_heads, head_size


class VllmBatchBuilder(interface.AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the `PagedBatch` of a step from what vLLM knows of it. Requests with one new token come first."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page: int = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedBatch:
        """The batch of a step. A common prefix needs no treatment of its own: the blocks of all are read anyway."""
        m = common_attn_metadata
        if m.causal is not True:
            raise ParameterError("this model asks for attention that is not causal; choose another --attention-backend")
        n, steps = m.num_reqs, steps_in_front(m.query_start_loc_cpu[: m.num_reqs + 1])
        return PagedBatch.of(
            steps, m.query_start_loc[: n + 1], m.seq_lens[:n], m.block_table_tensor[:n], m.slot_mapping,
            m.num_actual_tokens, self.page,
        )  # fmt: skip


class VllmAttention(interface.AttentionImpl):  # type: ignore[misc]
    """Attention of one layer of a model in vLLM, under the model's mask or the config's."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.shared = kv_sharing_target_layer_name is not None  # another layer writes the keys
        if attn_type != "decoder":
            raise ParameterError(f"attention of type {attn_type}: this backend is for decoders\n  {ELSEWHERE}")
        if asked := [n for n, x in more.items() if x not in (None, False)]:
            raise ParameterError(f"this backend does not know {asked[0]}={more[asked[0]]!r}\n  {ELSEWHERE}")
        mask, score, params = _told()
        self.served = ServedLayer(
            _of_kind(mask, sliding_window), _of_kind(score, sliding_window), params, scale=self.scale,
            window=sliding_window, softcap=logits_soft_cap, slopes=alibi_slopes,
            spare=isinstance(mask, dict) or isinstance(score, dict),
        )  # fmt: skip

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: PagedBatch | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write key and value [tokens, kv_heads, head_dim] to `kv_cache`, and attention of query [tokens, heads,
        head_dim] to `output`; tokens behind those of the batch are padding. Without a batch vLLM measures memory."""
        if output_scale is not None or output_block_scale is not None:
            raise ParameterError(f"output of 8 bits is not fused with this attention\n  {ELSEWHERE}")
        if attn_metadata is None:
            return output.zero_()
        batch, n = attn_metadata, attn_metadata.tokens
        if kv_cache.dtype not in PLAIN:
            raise ParameterError(f"a KV cache of {kv_cache.dtype}; give --kv-cache-dtype auto\n  {ELSEWHERE}")
        if key is not None and value is not None and not self.shared:
            shape = -1, self.num_kv_heads, self.head_size
            write(kv_cache, key.view(shape)[:n], value.view(shape)[:n], batch.slots)
        query = query.view(-1, self.num_heads, self.head_size)
        found = self.served.attend(query[:n], kv_cache, batch, self.sinks)
        output.view(-1, self.num_heads, self.head_size)[:n] = found
        return output


ELSEWHERE = "choose another --attention-backend"


def _told() -> list[Any]:
    """The values of the fields, of `--additional-config` or else of the model's config."""
    from vllm.config import get_current_vllm_config  # type: ignore[import-not-found]

    config = get_current_vllm_config()
    more = config.additional_config if isinstance(config.additional_config, dict) else {}
    model = config.model_config.hf_text_config
    check_fields(more, "--additional-config: ")
    check_fields(vars(model), "config.")
    return [getattr(model, n, None) if more.get(n) is None else more[n] for n in FIELDS]


def _of_kind(texts: Any, window: int | None) -> Any:
    """The text for a layer with a sliding window, or without one."""
    return texts.get("full_attention" if window is None else "sliding_attention") if isinstance(texts, dict) else texts
