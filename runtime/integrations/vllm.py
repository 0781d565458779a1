"""An attention backend for vLLM 0.29 to 0.33: `vllm serve MODEL --attention-backend CUSTOM`, with frisket installed.

vLLM finds `register` by its entry point `vllm.general_plugins` and takes the classes below for `CUSTOM`. They follow
its V1 interface: the metadata builder makes a `PagedBatch` of a step, and every layer is a `ServedLayer`.

A mask and a score mod of frisket's language replace those of the model. They are fields of the model's config, as with
transformers, or of `--additional-config`, which comes first:

    vllm serve MODEL --attention-backend CUSTOM \\
        --additional-config '{"frisket_mask": "causal & (q - k < reach | k < 4)", "frisket_params": {"reach": 4096}}'
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from frisket.dsl.errors import MissingPackageError, ParameterError
from frisket.lowering.dtypes import HALVES
from frisket.runtime.calls.arrays import MULTIPLE

from .transformers import FIELDS as SHARED_FIELDS
from .transformers import INVARIANT, check_fields
from .vllm_pages import PagedBatch, ServedLayer, require_room, steps_in_front, write

try:
    from vllm.config import get_current_vllm_config  # type: ignore[import-not-found]
    from vllm.logger import init_logger  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]
    from vllm.v1.attention import backend as interface  # type: ignore[import-not-found]
    from vllm.v1.attention.backends.registry import (  # type: ignore[import-not-found]
        AttentionBackendEnum,
        register_backend,
    )
except ModuleNotFoundError as missing:
    raise MissingPackageError("vllm is not installed: pip install vllm", name=missing.name) from None

CUSTOM, CPU = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN
PATH, CPU_PATH = f"{__name__}.VllmBackend", f"{__name__}.CpuBackend"
FIELDS = *SHARED_FIELDS, "frisket_select"
SIZES = interface.MultipleOf(MULTIPLE)  # of blocks
ELSEWHERE = "choose another --attention-backend"
log = init_logger(f"vllm.{__name__}")  # vLLM shows what is logged under `vllm`


def register() -> None:
    """Make this vLLM's backend `CUSTOM`, unless another plug-in has that name. vLLM calls this in each process.

    On CPUs vLLM takes `CPU_ATTN` whatever is chosen; there `CPU_ATTN` becomes this backend where `CUSTOM` is chosen."""
    if not CUSTOM.is_overridden():
        register_backend(CUSTOM, PATH)
    if current_platform.is_cpu() and CUSTOM.get_path() == PATH and not CPU.is_overridden():
        register_backend(CPU, CPU_PATH)
    update = current_platform.check_and_update_config
    if not hasattr(update, "frisket"):  # the one call of vLLM on the way of every config
        current_platform.check_and_update_config = _checked(update)


def _checked(update: Any) -> Any:
    def check_and_update_config(config: Any) -> None:
        update(config)
        check_served(config)

    check_and_update_config.frisket = True  # type: ignore[attr-defined]
    return check_and_update_config


def check_served(config: Any) -> None:
    """Raise `ParameterError` for a vLLM config with a mask or score mod that frisket would not compute."""
    model, attention = config.model_config, config.attention_config
    if model is None or model.runner_type == "draft":  # the model checks what a draft model proposes
        return
    values = dict(zip(FIELDS, _fields(config), strict=True))
    names = [n for n, x in values.items() if x is not None]
    if values[INVARIANT]:
        text = f"{INVARIANT} is set, and in vLLM's own layers a token's bits depend on the batch"
        raise ParameterError(f"{text}\n  leave it out, or decode with transformers' `generate`")
    chosen = {attention.backend, *attention.backend_per_kind.values()}
    takes_custom = current_platform.is_cpu() or current_platform.is_cuda_alike()
    reasons = {
        "add --attention-backend CUSTOM, for all kinds of layers": chosen != {CUSTOM},
        f"leave out the plug-in whose CUSTOM is {CUSTOM.get_path()}": CUSTOM.get_path() != PATH,
        "take a model without MLA, whose attention vLLM keeps": model.use_mla,
        f"take a GPU or a CPU, as vLLM does not take CUSTOM on {current_platform.device_name}": not takes_custom,
    }
    if names and (why := [text for text, present in reasons.items() if present]):
        text = f"{names[0]} is set, and vLLM would serve this model without frisket"
        raise ParameterError(f"{text}\n  {why[0]}, or leave {names[0]} out")


def __getattr__(name: str) -> Any:
    """`CpuBackend`, looked up by vLLM for each kind of layer: this backend where `CUSTOM` is chosen, else vLLM's."""
    if name != "CpuBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if get_current_vllm_config().attention_config.backend is CUSTOM:
        return VllmBackend
    module, _, theirs = CPU.value.rpartition(".")
    return getattr(import_module(module), theirs)


class VllmBackend(interface.AttentionBackend):  # type: ignore[misc]
    """The description of the backend for vLLM: its classes, and what it can do. Its KV cache is vLLM's."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", *HALVES]

    # fmt: off
    @staticmethod
    def get_name() -> str: return str(CUSTOM.name)
    @staticmethod
    def get_impl_cls() -> type[VllmAttention]: return VllmAttention
    @staticmethod
    def get_builder_cls() -> type[VllmBatchBuilder]: return VllmBatchBuilder
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]: return [SIZES]
    @classmethod
    def supports_sink(cls) -> bool: return True
    @classmethod
    def supports_sliding_window(cls) -> bool: return True
    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool: return False  # the builder counts steps on the host
    # fmt: on


class VllmBatchBuilder(interface.AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the `PagedBatch` of a step from what vLLM knows of it. Requests with one new token come first."""

    reorder_batch_threshold = 1  # vLLM puts requests with at most this many new tokens first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page: int = kv_cache_spec.block_size
        if self.page % MULTIPLE:
            raise ParameterError(f"blocks of {self.page} tokens\n  give --block-size a multiple of {MULTIPLE}")
        self.select = _fields(vllm_config)[-1]
        require_room(self.select, self.page, vllm_config.model_config.max_model_len)
        # vLLM derives builders for chunked attention and the like, whose requests begin elsewhere
        if type(self) is not VllmBatchBuilder and any(x is not None for x in _fields(vllm_config)):
            text = f"{layer_names[0]} counts positions from another token than the first ({type(self).__name__}); "
            raise ParameterError(f"{text}there the frisket_ fields mean something else\n  leave them out")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedBatch:
        """The batch of a step. A common prefix needs no separate treatment: the blocks of all are read anyway."""
        m = common_attn_metadata
        if m.causal is not True:
            raise ParameterError(f"this model asks for attention that is not causal\n  {ELSEWHERE}")
        # the host's copy of the starts: nothing waits for the device
        n, steps = m.num_reqs, steps_in_front(m.query_start_loc_cpu[: m.num_reqs + 1])
        starts, blocks, tokens = m.query_start_loc[: n + 1], m.block_table_tensor[:n], m.num_actual_tokens
        if self.select is not None:  # the table has room for max_model_len, and bounds of all its blocks are read
            blocks = blocks[:, : -(-m.max_seq_len // self.page)].contiguous()
        return PagedBatch.of(steps, starts, m.seq_lens[:n], blocks, m.slot_mapping, tokens, self.page)


class VllmAttention(interface.AttentionImpl):  # type: ignore[misc]
    """Attention of one layer of a model in vLLM, under the model's mask or the config's."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.shared = kv_sharing_target_layer_name is not None  # another layer writes the keys
        config = get_current_vllm_config()
        model, dtype = config.model_config, str(config.model_config.dtype).removeprefix("torch.")
        if kv_cache_dtype not in ("auto", dtype):
            text = f"a KV cache of {kv_cache_dtype} for a model of {dtype}: give --kv-cache-dtype auto"
            raise ParameterError(f"{text}\n  or {ELSEWHERE}")
        refused = {  # vLLM asks a backend about these on GPUs, and on CPUs does not
            f"attention of type {attn_type}": attn_type != "decoder",
            "images whose tokens see each other": model.is_mm_prefix_lm,
            "R-SWA, a window beyond the prompt": model.rswa_window is not None,
            **{f"{n}={x!r}": x not in (None, False) for n, x in more.items()},
        }
        if what := [name for name, present in refused.items() if present]:
            raise ParameterError(f"frisket's backend of vLLM does not know {what[0]}\n  {ELSEWHERE}")
        *texts, params, _, select = _fields(config)  # `check_served` has refused `frisket_invariant`
        spare = any(isinstance(x, dict) for x in texts)  # one value may be for the other kind of layer
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        texts = [x.get(kind) if isinstance(x, dict) else x for x in texts]
        how: dict[str, Any] = {"scale": self.scale, "window": sliding_window, "softcap": logits_soft_cap}
        how |= {"slopes": alibi_slopes, "spare": spare, "select": select}
        mask, score, weight, divide = texts
        self.served = ServedLayer(mask, score, weight, divide, params, **how)
        clashes = {  # keys that blocks hold and `add_bounds` has not seen, or holds after they have gone
            "speculative decoding, whose rejected drafts are keys for a step": config.speculative_config is not None,
            "a KV connector, which writes keys past this backend": config.kv_transfer_config is not None,
            "Mamba layers, with which vLLM copies blocks that requests share in part": model.is_hybrid,
            "keys that layers share": self.shared,
        }
        if select is not None and (what := [name for name, present in clashes.items() if present]):
            raise ParameterError(f"frisket_select does not go with {what[0]}\n  leave one of them out")
        log.info_once("frisket serves layers by %s", str(self.served.attention))
        if select is not None:
            log.info_once("and steps of one token by the blocks of frisket_select = %s", str(select))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: PagedBatch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write key and value [tokens, kv_heads, head_dim] to `kv_cache`, and attention of query [tokens, heads,
        head_dim] to `output`; tokens behind those of the batch are padding. Without a batch vLLM measures memory."""
        if output_scale is not None or output_block_scale is not None:
            raise ParameterError(f"output of 8 bits is not fused with this attention\n  {ELSEWHERE}")
        if attn_metadata is None:
            return output.zero_()
        batch, n = attn_metadata, attn_metadata.tokens
        if key is not None and value is not None and not self.shared:
            write(kv_cache, key[:n], value[:n], batch.slots)
            self.served.add_bounds(kv_cache, key[:n], batch.slots)
        output[:n] = self.served.attend(query[:n], kv_cache, batch, self.sinks)
        return output


def _fields(config: Any) -> list[Any]:
    """The values of the fields, of `--additional-config` or else of the model's config."""
    more = config.additional_config if isinstance(config.additional_config, dict) else {}
    model = config.model_config
    parts = [("--additional-config: ", more)]
    # the part for text of a multimodal model comes before the whole
    parts += [("config.", vars(x)) for x in (model.hf_text_config, model.hf_config)]
    for where, names in parts:
        check_fields(names, where, FIELDS)
    return [next((x[n] for _, x in parts if x.get(n) is not None), None) for n in FIELDS]
