"""The text of Triton's kernels for one geometry, and the resources that they take of a machine.

Resources come from compiling kernels ahead of time: no device is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import SIZES
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.architectures import GPUS, H100
from frisket.lowering.dtypes import DTYPES
from frisket.lowering.kernels.triton import captured
from frisket.lowering.kernels.triton.forward import OptionalArrays, emit_decode
from frisket.lowering.kernels.triton.module import Dims, arguments
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource
from frisket.runtime.machine.modules import load_from_file, pip_install

from . import tiles
from .grids import OF_GRADIENTS, PACK, of_kernels, shares
from .launch import blocks

call_target, target, pays = tiles.target, tiles.jax_target, tiles.pays
# int32; what else begins with a capital and is no array is float32
INTEGERS = ("Spans", "Count", "Order", "SliceOf", "Parts", "Rows", "At", "Counts")
QUERIES, KEYS = ("Q", "Out", "DOut", "DQ"), ("K", "V", "DK", "DV")  # of the dtype of q; of that of k and v


def text(
    plan: LoopPlan,
    target: Target,
    g: Geometry,
    dtype: str,
    sinks: bool = False,
    learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:
    """The module's text and the target it runs with. `learned` are the user's names of what gradients flow to besides
    the arrays; `spans` say which rows of tiles are long, so that a call divides them."""
    dims = dims_of(plan, g, dtype, learned)
    at = spans if g.q_len >= PACK else None  # a step of decoding is shown as where queries see all keys
    few = shares(plan, at, g, target, dims_of(plan, g, dtype), tiles.processors())  # of this machine's GPU or an H100
    if few is not None and g.q_len < PACK:
        decode_target = replace(few.target, splits=0) if few.balanced else few.target
        return emit_decode(plan, decode_target, dims, OptionalArrays(sinks=sinks), **few.flags), few.target
    grad_names = captured.QKV.union(dims.device_slots, (t.name for t in plan.tables if t.source in learned))
    names = OF_GRADIENTS if few is not None else ("attention_forward", *OF_GRADIENTS)
    listed = of_kernels(names, plan, spans, g, target, tiles.processors())
    return captured.emit_all(plan, target, dims, grad_names=grad_names, sinks=sinks, listed=listed), target


def dims_of(plan: LoopPlan, g: Geometry, dtype: str, learned: Collection[str] = ()) -> Dims:
    """The part of a call that kernels' texts depend on. They load the values of slots that gradients flow to."""
    device_slots = tuple(s.name for s in plan.slots if s.source in learned)
    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype, device_slots)


# -- resources ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelReport:
    """The resources that one kernel takes of one machine. They are a tile of `block_q` queries and `block_k` keys,
    registers of a thread, `spills` in bytes of stack per thread, `shared` in bytes of a block, of `shared_limit`. `mma`
    are the matrix instructions in its text."""

    kernel: str
    arch: str
    block_q: int
    block_k: int
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    shared_limit: int
    mma: int

    @property
    def fits(self) -> bool:
        return self.shared <= self.shared_limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def compile_reports(source: str, plan: LoopPlan, target: Target, dims: Dims, arch: str = H100.name) -> Reports:
    """`compile_reports(emit(plan, target, dims), plan, target, dims, "gfx942")`: every kernel of a module, one by one
    as they are compiled, with the tiles that `target` gives it.

    BackendError for an architecture that is not in GPUS, where triton is missing, and where it interprets.
    """
    check_compiles(arch)
    for name, kernel in vars(load_from_file(source)).items():
        if not name.startswith("attention_"):
            continue
        if type(kernel).__name__ == "InterpretedFunction":
            raise BackendError("TRITON_INTERPRET=1 is set: start Python without it to compile kernels")
        mine = tiles.of_kernel(name, target)
        compiled = compiled_for(arch, kernel, plan, mine, dims)
        gpu = GPUS[arch]
        registers, spills, mma = (_amd if gpu.vendor == "amd" else resources)(compiled, gpu.mma)
        shared = int(compiled.metadata.shared)
        block = mine.block_q, mine.block_k, mine.num_warps, mine.num_stages
        yield KernelReport(name, arch, *block, registers, spills, shared, gpu.shared, mma)


Reports = Iterator[KernelReport]


def check_compiles(arch: str) -> None:
    """Raise where no kernel can be compiled for `arch`."""
    if arch not in GPUS:
        known = f"{', '.join(GPUS)}\n  `frisket doctor` says which GPUs these are"
        raise BackendError(f"no figures for {arch!r}; ahead-of-time reports know {known}")
    if not find_spec("triton"):
        raise BackendError(f"triton is not installed: {pip_install('triton')}")


def compiled_for(arch: str, kernel: Any, plan: LoopPlan, target: Target, dims: Dims) -> Any:
    """Triton's compilation of one kernel, called as on contiguous arrays."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    types, constants = signature(kernel, plan, target, dims)
    aligned = [type[0] == "*" or (n.startswith("stride_") and n not in constants) for n, type in types.items()]
    hints: dict[tuple[int, ...], Any] = {(i,): [["tt.divisibility", 16]] for i, hint in enumerate(aligned) if hint}
    if GPUS[arch].vendor == "amd":  # its launcher says of arrays below 2 GiB that offsets have 32 bits
        for i, type in enumerate(types.values()):
            hints.get((i,), []).extend([["tt.pointer_range", 32]] * (type[0] == "*"))
    gpu = GPUTarget(*GPUS[arch].compiler)
    try:
        return triton.compile(ASTSource(kernel, types, constants, hints), target=gpu, options=target.options)
    except triton.TritonError as error:
        if re.search(r"Value '\S+' is not defined for option 'gpu-name'", str(error)):
            reason = f"the assembler of Triton {triton.__version__} does not know {arch}; install a newer Triton"
            raise BackendError(reason) from None  # whose text is the whole kernel
        raise


def signature(
    kernel: Any, plan: LoopPlan, target: Target, dims: Dims, **more: int
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types by parameter and values of constants, `more` among them, as the launcher would have them for contiguous
    arrays."""
    scalar, pointer = {INT: "i32", FLOAT: "fp32", BOOL: "i1"}, {INT: "*i32", FLOAT: "*fp32", BOOL: "*i8"}
    parameters = arguments(plan)
    known: dict[str, str] = dict.fromkeys(SIZES, "i32") | dict.fromkeys(INTEGERS, "*i32") | {"scale": "fp32"}
    known["Counted"] = "*i64"
    of_queries, of_keys = (f"*{DTYPES[n].triton}" for n in (dims.dtype, dims.kv_dtype or dims.dtype))
    known |= dict.fromkeys(QUERIES, of_queries) | dict.fromkeys(KEYS, of_keys)
    known |= {parameters[s.name].name: "*fp32" if s.name in dims.device_slots else scalar[s.type] for s in plan.slots}
    known |= {parameters[t.name].name: pointer[t.type] for t in plan.every_table}
    values: dict[str, Any] = {n: 1 for n in kernel.arg_names if re.fullmatch(r"stride_\w+d", n)}
    values |= {parameters[t.name].strides[-1]: 1 for t in plan.every_table}
    values |= {"BLOCK_Q": target.block_q, "BLOCK_K": target.block_k, "ORIGIN_PER_BATCH": False, "NEAR": True} | more
    types: dict[str, str] = {}
    if "K" in kernel.arg_names and "stride_ks" not in kernel.arg_names:
        described = {n: block for n, block in blocks(dims, target).items() if n in kernel.arg_names}
        known |= {n: f"tensordesc<{known[n][1:]}{list(block)}>" for n, block in described.items()}
    for p in kernel.params:
        if p.is_constexpr or p.name in values:
            types[p.name] = "constexpr"
        else:
            types[p.name] = known.get(p.name) or ("*fp32" if p.name[0].isupper() else "i32")
    if missing := [n for n, type in types.items() if type == "constexpr" and n not in values]:
        raise BackendError(f"no value for the constant {missing[0]} of {kernel.__name__}")
    return types, {n: x for n, x in values.items() if n in types}


def resources(compiled: Any, mma: str) -> tuple[int, int, int]:
    """(registers, bytes of stack, matrix instructions) by the cuobjdump that comes with Triton. Matrix instructions are
    those of the PTX where it cannot disassemble, as Triton 3.6 cannot for sm_121."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:  # cuobjdump reads no pipe
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=what != "-sass")
            for what in ("-res-usage", "-sass")
        )
    usages = re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    products = len(re.findall(mma, sass.stdout)) if sass.returncode == 0 else compiled.asm["ptx"].count("mma.sync")
    # a cubin may hold other functions too, and the largest of them counts
    return max(int(r) for r, _ in usages), max(int(s) for _, s in usages), products


def _amd(compiled: Any, mma: str) -> tuple[int, int, int]:
    text = compiled.asm["amdgcn"]
    counts = "vgpr_count", "private_segment_fixed_size"
    registers, spills = (int(re.findall(rf"\.{n}:\s+(\d+)", text)[0]) for n in counts)
    return registers, spills, len(re.findall(mma, text))
