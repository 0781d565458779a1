"""Runs the Triton kernels of captured gradients that no row or column of tiles can sum: "diagonal" and "scatter"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.derive import Gradient
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

Tensor = Any


def captured(
    plan: LoopPlan, spans: SpanSource | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, lse: Tensor,
    dout: Tensor, delta: Tensor, slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target,
    gradients: Sequence[Gradient], *, deterministic: bool = True,
) -> list[Tensor]:  # fmt: skip
    """One buffer for each of `gradients`, in their order, float32 and of the shape `derive.Gradient` describes.

    `lse` and `delta` are float32 [batch, heads, q_len], contiguous, as `attention_delta` writes them: lse in log2
    units, and both 0 where a row sees nothing. q, k, v and dout have any strides.
    """
    raise BackendError("gradients of tables that are read by distance or position are not there on Triton yet")
