"""Runs the Triton kernels: writes their source to the cache, imports it, launches it, or compiles it ahead of time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import finalize

import numpy as np

from frisket.dsl.errors import BackendError, ParameterError
from frisket.dsl.ir import SCORE
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.emit.expr import POSITION, levels
from frisket.lowering.emit.triton_forward import emit
from frisket.lowering.emit.triton_parameters import Argument, arguments, padded
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import Geometry, LoopPlan, Spans, TableUse, Target

from .settings import Settings

Tensor = Any
SIZES = ("B", "H", "Q_LEN", "KV_LEN")


def forward(
    plan: LoopPlan, spans: Spans | DeviceSpans | None, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [batch, heads, q_len, v_dim], lse float32 [batch, heads, q_len]) for torch tensors of any strides,
    q [batch, heads, q_len, head_dim] and k, v [batch, kv_heads, kv_len, dim].

    `spans` may be None where the plan has closed-form bounds. Runs on CUDA and ROCm devices, and on the CPU in
    Triton's interpreter; BackendError where neither is possible.
    """
    import torch

    g = geometry
    if not g.scale > 0 and plan.score is None:
        plan = replace(plan, score=SCORE)  # the folded scale needs max(x * scale) = max(x) * scale
    dtype = str(q.dtype).removeprefix("torch.")
    made = _kernel(plan, target, g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads)
    _runs_here(made.kernel, q.device)
    out = torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((g.batch, g.heads, g.q_len), dtype=torch.float32, device=q.device)
    values: dict[str, Any] = {
        "Q": q, "K": k, "V": v, "Out": out, "Lse": lse, "scale": g.scale,
        "heads": g.heads, "q_len": g.q_len, "kv_len": g.kv_len, **dict(zip(SIZES, g.full, strict=True)),
        **_origin(g, q.device), **made.slots(plan, slots), **made.tables(plan, tables),
    }  # fmt: skip
    for letter, tensor in zip("qkvo", (q, k, v, out), strict=True):
        values |= {f"stride_{letter}{axis}": s for axis, s in zip("bhsd", tensor.stride(), strict=True)}
    if "Spans" in made.kernel.arg_names:
        if spans is None:
            raise BackendError("this plan has no closed-form bounds: pass the spans of its layout")
        values |= _device_spans(spans, q.device)
    rows = -(-g.q_len // target.block_q)
    with torch.cuda.device(q.device) if q.device.type == "cuda" else torch.no_grad():
        made.kernel[(rows, g.batch * g.heads)](
            *(values[n] for n in made.kernel.arg_names),
            num_warps=target.num_warps, num_stages=target.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out, lse


def _runs_here(kernel: Any, device: Any) -> None:
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    if device.type == "cpu" and not interpreted:
        raise BackendError(
            "Triton kernels need a GPU: on the CPU take backend='aten', or set TRITON_INTERPRET=1 before "
            "Python starts to run them in Triton's interpreter"
        )
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"no Triton kernel runs on {device.type} tensors; move them to 'cuda' or 'cpu'")


# -- arguments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """A kernel and what its parameters are called (another plan of the same shape may name its tables otherwise)."""

    kernel: Any
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


def _origin(g: Geometry, device: Any) -> dict[str, Any]:
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


def _device_spans(spans: Spans | DeviceSpans, device: Any) -> dict[str, Any]:
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


# -- source to kernel ---------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _kernel(plan: LoopPlan, target: Target, head_dim: int, v_dim: int, dtype: str, group: int) -> _Made:
    source = emit(plan, target, head_dim, v_dim, dtype, group)
    return _Made(load(source).attention_forward, arguments(plan))


def load(source: str) -> ModuleType:
    """The module of a generated source, imported from its file in the cache."""
    path = write(source)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # Not the import system: its bytecode cache goes by time and size, and here only the text counts.
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def write(source: str) -> Path:
    """The file that holds `source`, named by its hash; rewritten unless it holds just that. Triton and
    tracebacks read it."""
    from platformdirs import user_cache_dir

    folder = Path(Settings.read().cache_dir or user_cache_dir("frisket")) / "triton"
    data = source.encode()
    path = folder / f"attention_{hashlib.sha256(data).hexdigest()[:20]}.py"
    if not (path.is_file() and path.read_bytes() == data):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    return path


# (16-bit or float32, padded head size) -> block_q, block_k, warps, stages, for Hopper and the like
TILES = {
    (16, 64): (128, 64, 8, 3), (16, 128): (128, 64, 8, 2), (16, 256): (128, 32, 8, 2),
    (32, 64): (32, 32, 8, 2), (32, 128): (32, 16, 8, 2), (32, 256): (16, 16, 4, 2),
}  # fmt: skip


def default_target(plan: LoopPlan, geometry: Geometry, dtype: str, arch: str = "sm_90") -> Target:
    """Tiles as large as registers and shared memory carry without a spill (tests/kernels/triton_compiled.py)."""
    g, bits = geometry, 32 if dtype == "float32" else 16
    dim = max(64, min(256, max(padded(g.head_dim), padded(g.v_dim))))
    block_q, block_k, warps, stages = TILES[bits, dim]
    if bits == 16 and dim == 128 and plan.bounds is not None and plan.score is None:
        block_k, stages = 128, 3  # without a span table the registers suffice
    if bits == 16 and _loads_per_position(plan):
        block_k, stages = min(block_k, 32), 2  # Triton stages such a table through shared memory too
    if arch.startswith("gfx"):
        block_k, stages = min(block_k, 64), 1  # 64 KiB of shared memory
    elif arch == "sm_80":
        stages = min(stages, 2)
    while block_q > 16 and block_q >= 2 * g.q_len:
        block_q, warps = block_q // 2, max(4, warps // 2)
    return Target("triton", block_q, block_k, warps, stages)


def _loads_per_position(plan: LoopPlan) -> bool:
    roots = [e for e in (plan.mask, plan.score) if e is not None]
    return any(n.op == "lookup" and at == POSITION for n, at in levels(*roots).items())


# -- ahead of time --------------------------------------------------------------------------------

ARCHITECTURES = {  # Triton's name, shared memory a block may have (vendors' documents), threads in a warp
    "sm_80": (80, 166_912, 32), "sm_90": (90, 232_448, 32), "sm_100": (100, 232_448, 32),
    "gfx942": ("gfx942", 65_536, 64),
}  # fmt: skip
TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}


@dataclass(frozen=True)
class Report:
    """What one kernel takes of one machine; `spills` are bytes of stack per thread."""

    arch: str
    registers: int
    spills: int
    shared: int
    shared_limit: int

    @property
    def fits(self) -> bool:
        return self.shared <= self.shared_limit


def compile_report(source: str, plan: LoopPlan, target: Target, dtype: str, arch: str = "sm_90") -> Report:
    """`compile_report(emit(plan, target, ...), plan, target, "bfloat16", "gfx942")`: compiled without a device.

    BackendError for an architecture that is not in ARCHITECTURES, and where Triton runs as an interpreter.
    """
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    if arch not in ARCHITECTURES:
        raise BackendError(f"no figures for {arch!r}; ahead-of-time reports know {', '.join(ARCHITECTURES)}")
    kernel = load(source).attention_forward
    if type(kernel).__name__ == "InterpretedFunction":
        raise BackendError("TRITON_INTERPRET=1 is set: start Python without it to compile kernels")
    name, limit, warp = ARCHITECTURES[arch]
    signature, constants = _signature(kernel.arg_names, plan, dtype)
    hints: dict[tuple[int, ...], Any] = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(signature)
        if signature[n][0] == "*" or (n.startswith("stride_") and n not in constants)
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("hip" if arch.startswith("gfx") else "cuda", name, warp),
        options={"num_warps": target.num_warps, "num_stages": target.num_stages, "enable_fp_fusion": True},
    )
    read = _amd if arch.startswith("gfx") else _nvidia
    return Report(arch, *read(compiled), int(compiled.metadata.shared), limit)


def _signature(names: list[str], plan: LoopPlan, dtype: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constants as the launcher would have them for contiguous arrays."""
    scalar = {INT: "i32", FLOAT: "fp32", BOOL: "i1"}
    pointer = {INT: "*i32", FLOAT: "*fp32", BOOL: "*i8"}
    made = arguments(plan)
    types = dict.fromkeys(names, "i32") | {"scale": "fp32", "Lse": "*fp32"}
    types |= dict.fromkeys(("Q", "K", "V", "Out"), TYPES[dtype])
    types |= {n: "*i32" for n in ("Spans", "Count", "Order", "SliceOf") if n in types}
    types |= {made[s.name].name: scalar[s.type] for s in plan.slots}
    types |= {made[t.name].name: pointer[t.type] for t in plan.tables}
    constants: dict[str, Any] = {f"stride_{t}d": 1 for t in "qkvo"}
    constants |= {made[t.name].strides[-1]: 1 for t in plan.tables}
    if "ORIGIN_PER_BATCH" in names:
        constants["ORIGIN_PER_BATCH"] = False
    types |= dict.fromkeys(constants, "constexpr")
    return types, constants


def _nvidia(compiled: Any) -> tuple[int, int]:
    """(registers, stack bytes) by the cuobjdump that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return max(int(r) for r, _ in found), max(int(s) for _, s in found)


def _amd(compiled: Any) -> tuple[int, int]:
    text = compiled.asm["amdgcn"]
    return tuple(int(re.findall(rf"\.{n}:\s+(\d+)", text)[0]) for n in ("vgpr_count", "private_segment_fixed_size"))  # type: ignore[return-value]
