"""Runs a compiled attention on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from frisket.dsl.errors import BackwardError
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import Geometry, Spans, Target

from .bind import Work
from .flat_plan import FlatWork

Tensor = Any
_tables: WeakKeyDictionary[Any, dict[str, dict[str, Tensor]]] = WeakKeyDictionary()


def forward(
    work: Work | FlatWork, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, target: Target
) -> tuple[Tensor, Tensor]:
    """(out [batch, heads, q_len, v_dim], lse [batch, heads, q_len]) for tensors [batch, heads, length, dim]."""
    import torch

    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise BackwardError(
            "q, k or v requires a gradient; the backward comes with the native kernels, in a later version\n"
            "  for the forward alone write `with torch.no_grad():`, or detach the tensors"
        )
    tables = _on_device(work, q.device)
    with torch.no_grad():
        if target.backend == "triton":
            from . import triton_launch

            return triton_launch.forward(work.plan, work.spans, geometry, q, k, v, work.slots, tables, target)
        from frisket.lowering import aten

        return aten.forward(
            work.plan, _on_host(work.spans), geometry, q, k, v, work.slots, tables, target, top=False
        )[:2]  # fmt: skip


def refuse_learned(tables: Mapping[str, Any]) -> None:
    """Raise where a captured or given tensor is learned: its gradient would be missing without a word."""
    import torch

    learned = next((n for n, t in tables.items() if getattr(t, "requires_grad", False)), None)
    if learned is not None and torch.is_grad_enabled():
        raise BackwardError(
            f"`{learned}` requires a gradient; the backward comes with the native kernels, in a later version\n"
            "  for the forward alone write `with torch.no_grad():`, or detach it"
        )


def _on_host(spans: Spans | DeviceSpans) -> Spans:
    """For the CPU's executor, whose steps are Python's; the tensors are on the CPU already."""
    if isinstance(spans, Spans):
        return spans
    return Spans(spans.bounds.numpy(), spans.count.numpy(), spans.slice_of)


def _on_device(work: Work | FlatWork, device: Any) -> dict[str, Tensor]:
    """The tables as tensors, made once for each compilation and device."""
    import torch

    if isinstance(work, FlatWork):
        return {n: t.to(device) for n, t in work.tables.items()}
    known = _tables.setdefault(work.layout, {})
    if str(device) not in known:
        known[str(device)] = {n: torch.from_numpy(np.array(t)).to(device) for n, t in work.tables.items()}
    return known[str(device)]
