"""Runs the Triton kernels on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.forward import emit
from frisket.lowering.kernels.triton.writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from . import decode as triton_decode
from . import rows as triton_rows
from .arguments import Access, Bound, Launch, Values, blocks, bound, emitted_kernels, far, near
from .grids import forward_plan, of_forward

Tensor = Any


def forward(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target, *, sinks: Tensor | None = None,
    top: bool = False, softmax_stats: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(out [batch, heads, q_len, v_dim], lse float32 [batch, heads, q_len], largest scores or None), with
    `softmax_stats` also the rounding error of lse, for torch tensors of any strides, q [batch, heads, q_len, head_dim]
    and k, v [batch, kv_heads, kv_len, dim], or where the plan has pages [pages, kv_heads, tokens of a page, dim].

    `spans` may be None where the plan has closed-form bounds. Runs on CUDA and ROCm devices, and on the CPU in
    Triton's interpreter; BackendError where neither is possible.
    """
    g = geometry
    if far(q, k, v):
        q, k, v = (near(x, max(target.block_q, target.block_k)) for x in (q, k, v))
    context = bound(plan, spans, g, target, q, k)
    values = context.values(slots, tables)
    described = (
        target.descriptors and (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0 and context.describes(q, k, v)
    )
    kind = values.device_slots, sinks is not None, top, softmax_stats, described
    return launched(context, kind, lambda: _launch(context, spans, *kind), values, (q, k, v), sinks, top, softmax_stats)


def launched(
    context: Bound, kind: Any, make: Callable[[], Any], values: Values, arrays: tuple[Tensor, ...],
    sinks: Tensor | None, top: bool, softmax_stats: bool,
) -> tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """The results of a forward whose launches `make` lays out for calls of one kind."""
    import torch

    g, q = context.geometry, arrays[0]
    out = torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((g.batch, g.heads, g.q_len), dtype=torch.float32, device=q.device)
    largest, lse_residual = (torch.empty_like(lse) if use else None for use in (top, softmax_stats))
    more = [x for x in (largest, lse_residual) if x is not None]
    if sinks is not None:
        more.append(sinks.contiguous().resolve_neg())
    context.run(kind, make, values, *arrays, out, lse, *more)
    return (out, lse, largest, lse_residual) if softmax_stats else (out, lse, largest)


def _launch(
    context: Bound,
    spans: SpanSource | None,
    device_slots: tuple[str, ...],
    sinks: bool,
    top: bool,
    lse_residual: bool,
    described: bool,
) -> Launch | triton_decode.Parts | triton_rows.RowLaunches:
    g = context.geometry
    plan = forward_plan(context.plan, g)
    dims = context.dims(device_slots)
    described = described and triton_forward.describable(plan, dims)
    target = replace(context.target, descriptors=described)
    check_keys(dims, context.device)
    processors = triton_decode.processors(context.device)
    chosen = triton_decode.shares(plan, spans, g, target, dims, processors)
    if chosen is not None:
        return triton_decode.Parts(context, plan, spans, chosen, device_slots, sinks, top, lse_residual)
    inputs: dict[str, Access] = {"Q": "q", "K": "k", "V": "v"}
    if described:
        inputs |= {n: block for n, block in blocks(g, target).items() if n in inputs}
    results: dict[str, Access] = {"Out": "o", "Lse": ""}
    results |= dict.fromkeys([n for n, needed in (("Top", top), ("Low", lse_residual), ("Sinks", sinks)) if needed], "")
    parts = triton_rows.of_call(plan, spans, g, target, processors)
    kernels = emitted_kernels(
        emit, plan, target, dims, sinks=sinks, top=top, low=lse_residual, listed=parts is not None
    )
    if spans is not None and parts is not None:
        names = "attention_forward", "attention_combine"
        sums = {"Acc": (g.v_dim,), "Tops": (), "Totals": ()}
        return triton_rows.RowLaunches(
            context, kernels, names, target, parts, spans.rows, inputs, sums, results, device_slots
        )
    return context.launch(
        kernels, "attention_forward", of_forward(g, target), target, inputs | results,
        records=None if spans is None else spans.rows, device_slots=device_slots,
    )  # fmt: skip


def check_keys(dims: Dims, device: Any) -> None:
    """Raise where a GPU of NVIDIA is too old to convert keys of 8 bits."""
    import torch

    if dims.kv_dtype.startswith("float8") and device.type == "cuda" and not torch.version.hip:
        have = torch.cuda.get_device_capability(device)
        if have < (8, 9):
            raise BackendError(
                f"keys and values of {dims.kv_dtype} need compute capability 8.9, this GPU has {have[0]}.{have[1]}\n"
                "  convert them to the dtype of the queries"
            )
