"""What every Triton kernel of an attention is launched with: arguments by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np

from frisket.dsl.errors import BackendError, ParameterError
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.emit.triton_parameters import Argument, arguments
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import Geometry, LoopPlan, Spans, TableUse, Target

from .triton_source import load

Tensor = Any
SIZES = ("B", "H", "Q_LEN", "KV_LEN")


def made(source: str, plan: LoopPlan) -> Made:
    """The kernels of a module's text, by their names."""
    found = load(source)
    kernels = {n: x for n, x in vars(found).items() if n.startswith("attention_")}
    return Made(kernels, arguments(plan))


def common(
    plan: LoopPlan, g: Geometry, known: Made, slots: Mapping[str, Any], tables: Mapping[str, Tensor], device: Any,
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Values of parameters that kernels share; `tensors` by the letter of their strides."""
    values: dict[str, Any] = {
        "scale": g.scale, "heads": g.heads, "q_len": g.q_len, "kv_len": g.kv_len,
        **dict(zip(SIZES, g.full, strict=True)), **origin(g, device), **known.slots(plan, slots),
        **known.tables(plan, tables),
    }  # fmt: skip
    for letter, tensor in tensors.items():
        values |= {f"stride_{letter}{axis}": s for axis, s in zip("bhsd", tensor.stride(), strict=True)}
    return values


def launch(kernel: Any, grid: tuple[int, ...], values: Mapping[str, Any], target: Target, device: Any) -> None:
    """Run a kernel; of `values` it takes those its parameters name, the tile comes from `target`."""
    import torch

    values = {**values, "BLOCK_Q": target.block_q, "BLOCK_K": target.block_k}
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        kernel[grid](
            *(values[n] for n in kernel.arg_names),
            num_warps=target.num_warps, num_stages=target.num_stages, enable_fp_fusion=True,
        )  # fmt: skip


def runs_here(kernel: Any, device: Any) -> None:
    """Raise where a kernel cannot run on tensors of `device`."""
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    if device.type == "cpu" and not interpreted:
        raise BackendError(
            "Triton kernels need a GPU: on the CPU take backend='aten', or set TRITON_INTERPRET=1 before "
            "Python starts to run them in Triton's interpreter"
        )
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"no Triton kernel runs on {device.type} tensors; move them to 'cuda' or 'cpu'")


@dataclass(frozen=True)
class Made:
    """Kernels and what their parameters are called (another plan of the same shape may name its tables otherwise)."""

    kernels: Mapping[str, Any]
    arguments: Mapping[str, Argument]

    def slots(self, plan: LoopPlan, slots: Mapping[str, Any]) -> dict[str, Any]:
        convert = {INT: int, BOOL: bool, FLOAT: float}
        return {self.arguments[s.name].name: convert[s.type](slots[s.name]) for s in plan.slots}

    def tables(self, plan: LoopPlan, tables: Mapping[str, Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for use in plan.tables:
            table, names = _readable(use, tables[use.name]), self.arguments[use.name]
            found[names.name] = table
            found |= zip(names.sizes, table.shape, strict=True)
            found |= zip(names.strides, table.stride(), strict=True)
        return found


def _readable(use: TableUse, table: Tensor) -> Tensor:
    """The table as the kernel reads it: Bool as bytes, narrow integers as int32, the last axis below 2**31."""
    import torch

    if table.dim() != use.rank or table.numel() == 0:
        shape = list(table.shape)
        raise ParameterError(f"table `{use.source}` has {use.rank} axes of at least one entry, not shape {shape}")
    if use.type is BOOL:
        table = table.to(torch.bool).view(torch.int8)
    elif use.type is INT and table.dtype not in (torch.int32, torch.int64):
        table = table.to(torch.int32)
    if table.shape[-1] * table.stride(-1) >= 2**31:
        table = table.contiguous()
    return table


def origin(g: Geometry, device: Any) -> dict[str, Any]:
    """`b_origin` ... `k_origin`; q and k are int32 [batch] together as soon as one of them is a vector."""
    import torch

    b, h, *starts = g.origin
    per_batch = any(np.ndim(s) or (torch.is_tensor(s) and s.dim()) for s in starts)
    if per_batch:
        starts = [torch.as_tensor(s, dtype=torch.int32, device=device).expand(g.batch).contiguous() for s in starts]
    else:
        starts = [int(s) for s in starts]
    return {
        "b_origin": int(b), "h_origin": int(h), "q_origin": starts[0], "k_origin": starts[1],
        "ORIGIN_PER_BATCH": per_batch,
    }  # fmt: skip


_uploaded: dict[tuple[int, str], dict[str, Any]] = {}


def span_tables(spans: Spans | DeviceSpans, device: Any) -> dict[str, Any]:
    """The span table on the device, uploaded once and kept as long as `spans` lives."""
    import torch

    if isinstance(spans, DeviceSpans):
        width = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1)
        longest = torch.argsort(width, dim=-1, descending=True, stable=True).to(torch.int32)
        slice_of = torch.from_numpy(spans.slice_of).to(device)
        return {
            "Spans": spans.bounds.contiguous(), "Count": spans.count.contiguous(), "SliceOf": slice_of,
            "Order": longest, "records": spans.bounds.shape[2],
        }  # fmt: skip
    key = (id(spans), str(device))
    if key not in _uploaded:
        work = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1)
        order = np.argsort(-work, axis=-1, kind="stable").astype(np.int32)
        named = {"Spans": spans.bounds, "Count": spans.count, "SliceOf": spans.slice_of, "Order": order}
        found = {n: torch.from_numpy(np.ascontiguousarray(a)).to(device) for n, a in named.items()}
        _uploaded[key] = {**found, "records": spans.bounds.shape[2]}
        finalize(spans, _uploaded.pop, key, None)
    return _uploaded[key]
