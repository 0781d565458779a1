"""frisket as an attention mechanism of EasyDeL: `register()`, then `attn_mechanism="frisket"` in a model's config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from frisket.dsl.errors import MissingPackageError, ParameterError
from frisket.operations import AttentionMetadata, AttentionRegistry
from frisket.runtime.operations.operators import CallSizes, sinks_of_heads
from frisket.runtime.sharding.partition import fitting, names_of, spec_of

__all__ = ["register"]


def register(name: str = "frisket", operator: str = "frisket") -> type[Any]:
    """Register an operator of frisket with EasyDeL under a name, and return EasyDeL's class of it.

    A model whose config has the name trains, prefills and decodes with it:

        import easydel as ed
        from frisket.integrations import easydel

        easydel.register()
        config = ed.LlamaConfig(attn_mechanism="frisket", ...)

    Parameters
    ----------
    name
        The value of `attn_mechanism` or `decode_attn_mechanism`. A name that EasyDeL has is replaced, with a warning of
        EasyDeL's: `register("vanilla")`.
    operator
        What runs: a name of `frisket.operations.AttentionRegistry`.

    Raises
    ------
    MissingPackageError
        EasyDeL is not installed.
    ParameterError
        There is no operator of this name. A call raises it for `cum_seqlens_q` and `cum_seqlens_k`.
    """
    AttentionRegistry.get(operator)  # an unknown name is an error before a model is made
    try:
        from easydel.operations import (  # type: ignore[import-not-found]
            AttentionOutput,
            OperationRegistry,
            VanillaAttn,
        )
    except ModuleNotFoundError as missing:
        if missing.name != "easydel":  # a package that EasyDeL itself misses
            raise
        raise MissingPackageError("easydel is not installed: pip install easydel", name=missing.name) from None

    class FrisketAttn(VanillaAttn):  # type: ignore[misc]
        """EasyDeL's vanilla attention, with the same caches and calls, computed by frisket."""

        @classmethod
        def get_impl_name(cls) -> str:
            return name

        @classmethod
        def get_requirements(cls, *mode: Any, **cache: Any) -> Any:
            return replace(super().get_requirements(*mode, **cache), name=name)

        def forward_native(self, query: Any, key: Any, value: Any, **call: Any) -> Any:
            outputs = _attend(self.metadata, operator, query, key, value, call)
            return AttentionOutput(attention_weights=None, attention_outputs=outputs)

    return OperationRegistry.register(FrisketAttn)  # type: ignore[no-any-return]


def _attend(theirs: Any, operator: str, query: Any, key: Any, value: Any, call: dict[str, Any]) -> Any:
    """A call of EasyDeL's on every device of its mesh: batches and heads are split as its partition axes say."""
    mask_info, bias, init_bias = (call.get(n) for n in ("mask_info", "bias", "init_bias"))
    lengths = CallSizes(query.shape[0], query.shape[2], query.shape[1], key.shape[1], key.shape[2])
    if bias is None and mask_info is None and init_bias is not None:
        bias = init_bias()
    arrays = {**_mask(lengths, mask_info), "bias": bias, "dropout_rng": call.get("dropout_rng")}
    arrays["softmax_aux"] = sinks_of_heads(call.get("softmax_aux"), lengths)
    arrays = {n: x for n, x in arrays.items() if x is not None}  # specs are for arrays alone
    settings = {"align": "start", **_flags(lengths, call)}

    metadata = AttentionMetadata(theirs.runtime_dtype, mesh=theirs.mesh, partition_manager=theirs.partition_manager)
    # without a mesh: inside shard_map arrays are those of one device
    op, mesh = AttentionRegistry.create(operator, metadata.replace(mesh=None)), theirs.mesh
    of_query, of_key, *_ = metadata.get_shardings(op.get_mode(query))
    batch = fitting(mesh.shape, of_query[0], lengths.batch)
    heads = fitting(mesh.shape, of_key[2], lengths.kv_heads, {*names_of(batch)})

    def spec(name: str, x: Any) -> Any:
        if name in ("softmax_aux", "dropout_rng"):
            return spec_of(heads) if name == "softmax_aux" else spec_of()
        rows = batch if jax.tree.leaves(x)[0].shape[0] == lengths.batch else None  # one for all entries is not split
        return spec_of(rows) if name == "segment_ids" else spec_of(rows, None if x.shape[1] == 1 else heads)

    def local(query: Any, key: Any, value: Any, arrays: dict[str, Any]) -> Any:
        return op(query, key, value, **arrays, **settings).attention_outputs

    # A program of EasyDeL's may have a second mesh, for experts. JAX refuses that to operations that it is to split
    # over devices, and not under shard_map.
    split = spec_of(batch, None, heads)
    specs = (split, split, split, {n: spec(n, x) for n, x in arrays.items()})
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split)(query, key, value, arrays)


def _mask(lengths: CallSizes, mask_info: Any) -> dict[str, Any]:
    """EasyDeL's mask or segment ids as arrays, which may be as long as the cache."""
    if mask_info is None:
        return {}
    if mask_info._attention_mask is None and mask_info._q_segment_ids is not None:
        # EasyDeL's property would make a dense mask of them
        ids = mask_info.q_segment_ids[:, : lengths.q_len], mask_info.kv_segment_ids[:, : lengths.kv_len]
        return {"segment_ids": ids}
    return {"mask": mask_info.get_or_compute_attention_mask()[..., : lengths.q_len, : lengths.kv_len]}


# keywords of a call of EasyDeL's that say something to frisket; others speak of EasyDeL's kernels
DEFAULTS: dict[str, Any] = {"causal": False, "sliding_window": None, "softmax_scale": None, "logits_soft_cap": None}
DEFAULTS |= {"deterministic": True, "dropout_prob": 0.0}


def _flags(lengths: CallSizes, call: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call of EasyDeL's that say something to frisket."""
    if call.get("cum_seqlens_q") is not None or call.get("cum_seqlens_k") is not None:
        text = "cum_seqlens_q and cum_seqlens_k are not read here; give segment ids: "
        raise ParameterError(f"{text}mask_info=MaskInfo.from_segments(ids)")
    settings = {n: call.get(n, default) for n, default in DEFAULTS.items()}
    if (mask_info := call.get("mask_info")) is not None:
        # a cache writes the window into the mask, and then keys may begin in the middle of the sequence
        settings["causal"] = settings["causal"] and not mask_info.causal_mask_baked_in
        settings["sliding_window"] = None if mask_info.sliding_window_baked_in else settings["sliding_window"]
    # of a step of decoding the mask hides what follows
    return settings | {"causal": settings["causal"] and lengths.q_len > 1}
