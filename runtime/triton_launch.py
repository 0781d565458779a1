"""Runs the Triton kernels on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import SCORE
from frisket.lowering.emit.triton_forward import emit
from frisket.lowering.emit.triton_writer import Dims
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from .triton_bind import Made, common, launch, made, runs_here, span_tables

Tensor = Any


def forward(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target, *, sinks: Tensor | None = None,
    top: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [batch, heads, q_len, v_dim], lse float32 [batch, heads, q_len], largest scores or None) for torch tensors
    of any strides, q [batch, heads, q_len, head_dim] and k, v [batch, kv_heads, kv_len, dim].

    `spans` may be None where the plan has closed-form bounds. Runs on CUDA and ROCm devices, and on the CPU in
    Triton's interpreter; BackendError where neither is possible.
    """
    import torch

    g = geometry
    if not g.scale > 0 and plan.score is None:
        plan = replace(plan, score=SCORE)  # the folded scale needs max(x * scale) = max(x) * scale
    known = _made(plan, target, dims_of(g, q, k))
    kernel = known.kernels["attention_forward"]
    runs_here(kernel, q.device)
    out = torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((g.batch, g.heads, g.q_len), dtype=torch.float32, device=q.device)
    values = common(plan, g, known, slots, tables, q.device, {"q": q, "k": k, "v": v, "o": out})
    values |= {"Q": q, "K": k, "V": v, "Out": out, "Lse": lse}
    block = target.block_q, target.block_k
    if "Spans" in kernel.arg_names:
        if spans is None:
            raise BackendError("this plan has no closed-form bounds: pass the spans of its layout")
        values |= span_tables(spans.rows(block), q.device)
    launch(kernel, (-(-g.q_len // block[0]), g.heads, g.batch), values, target, q.device)
    return out, lse, None


def dims_of(g: Geometry, q: Tensor, k: Tensor) -> Dims:
    """What of a call the kernels' texts depend on."""
    dtype, keys = (str(x.dtype).removeprefix("torch.") for x in (q, k))
    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, "" if keys == dtype else keys)


@lru_cache(maxsize=256)
def _made(plan: LoopPlan, target: Target, dims: Dims) -> Made:
    return made(emit(plan, target, dims), plan)
