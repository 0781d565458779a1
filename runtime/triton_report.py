"""What Triton kernels take of a machine, from compiling them ahead of time."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.emit.triton_parameters import arguments
from frisket.lowering.plan import LoopPlan, Target

from .triton_source import load

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
    signature, constants = _signature(kernel.arg_names, plan, target, dtype)
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


def _signature(names: list[str], plan: LoopPlan, target: Target, dtype: str) -> tuple[dict[str, str], dict[str, Any]]:
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
    constants |= {"BLOCK_Q": target.block_q, "BLOCK_K": target.block_k}
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
