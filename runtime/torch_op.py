"""Runs a compiled attention on torch tensors, with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from frisket.dsl.errors import BackwardError
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target

from .backends import COMPLETE, FORWARD_ONLY
from .bind import Subject, Work
from .flat_plan import FlatWork
from .parameters import names_of

Tensor = Any
_tables: WeakKeyDictionary[Any, dict[str, dict[str, Tensor]]] = WeakKeyDictionary()


def attend(
    work: Work | FlatWork, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, slots: Mapping[str, Any],
    target: Target, sinks: Tensor | None = None, top: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [batch, heads, q_len, v_dim], lse, top [batch, heads, q_len]) for tensors [batch, heads, length, dim] and
    sinks [heads]. Gradients flow to all of them, and to tables and slots that require one."""
    import torch

    tables = _on_device(work, q.device)
    values = {n: x for n, x in {**tables, **slots}.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    job = Job(work.plan, work.spans, geometry, target, slots, tables, tuple(values), top)
    given = q, k, v, sinks, *values.values()
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        if target.backend in FORWARD_ONLY:
            raise BackwardError(
                f"backend {target.backend!r} has no gradients; {' and '.join(COMPLETE)} have\n"
                "  for the forward alone write `with torch.no_grad():`, or detach the tensors"
            )
        out, lse, top_ = _function().apply(job, *given)
        return out, lse, top_
    with torch.no_grad():
        return job.forward(*given)


@dataclass(frozen=True)
class Job:
    """All of a call but the tensors that gradients flow to."""

    plan: LoopPlan
    spans: Spans | DeviceSpans
    geometry: Geometry
    target: Target
    slots: Mapping[str, Any]
    tables: Mapping[str, Tensor]
    names: tuple[str, ...]  # of the Float tables and slots among the tensors
    top: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.target.backend == "triton":
            from . import triton_launch

            found = triton_launch.forward(self.plan, self.spans, self.geometry, q, k, v, *self._values(q, values))
            return *found, None
        from frisket.lowering import aten

        spans, given = on_host(self.spans), self._values(q, values)
        return aten.forward(self.plan, spans, self.geometry, q, k, v, *given, sinks=sinks, top=self.top)

    def backward(
        self, wanted: frozenset[str], tensors: tuple[Tensor, ...], dout: Tensor, dlse: Tensor | None
    ) -> dict[str, Tensor]:
        """Gradients by "q", "k", "v" and the names of tables and slots; `tensors` as the forward saved them."""
        from frisket.lowering import aten_backward

        q, k, v, sinks, out, lse, *values = tensors
        spans, given = on_host(self.spans), self._values(q, values)
        return aten_backward.backward(
            self.plan, spans, self.geometry, q, k, v, out, lse, dout, dlse, *given, wanted=wanted, sinks=sinks
        )

    def _values(self, q: Tensor, values: Any) -> tuple[dict[str, Any], dict[str, Tensor], Target]:
        """Slots, tables and target, the Floats among them as kernels take them."""
        import torch

        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        named = dict(zip(self.names, values, strict=True))
        slots = {n: float(named[n]) if n in named else x for n, x in self.slots.items()}
        tables = {n: named[n].to(q.device, real) if n in named else x for n, x in self.tables.items()}
        return slots, tables, self.target


_made: list[Any] = []  # the autograd function, once torch is there


def _function() -> Any:
    if not _made:
        from .torch_autograd import Attend

        _made.append(Attend)
    return _made[0]


def refuse_ambiguous(what: Subject, tables: Mapping[str, Any]) -> None:
    """Raise where a learned tensor is read by the mask and the score mod: the gradient of one would be missing."""
    import torch

    if what.mask is None or what.score is None or not torch.is_grad_enabled():
        return
    for name, x in tables.items():
        if getattr(x, "requires_grad", False) and all(name in names_of(p.expr) for p in what.parts):
            raise BackwardError(
                f"`{name}` requires a gradient, and the mask reads it beside the score mod: no gradient flows through "
                "a mask\n  give the mask a detached copy under another name"
            )


def on_host(spans: Spans | DeviceSpans) -> Spans:
    """For the CPU's executors, whose steps are Python's; the tensors are on the CPU already."""
    if isinstance(spans, Spans):
        return spans
    return Spans(spans.bounds.numpy(), spans.count.numpy(), spans.slice_of)


def _on_device(work: Work | FlatWork, device: Any) -> dict[str, Tensor]:
    """The tables as tensors, those of the host made once for each compilation and device."""
    import torch

    if isinstance(work, FlatWork):
        return {n: t.to(device) for n, t in work.tables.items()}
    known = _tables.setdefault(work.layout, {})
    if str(device) not in known:
        known[str(device)] = {n: torch.from_numpy(np.array(t)).to(device) for n, t in work.tables.items()}
    return known[str(device)]
