"""`python tests/compiled/pallas_gpu.py`: the Pallas kernels for Hopper compiled for GPUs that are not here, as far as
machine code, with what ptxas says of them. Compared with benchmarks/results/compiled/pallas-gpu-jax-*.txt, which
`--update-results` writes; words choose kernels (`python tests/compiled/pallas_gpu.py causal 256`); `--keep=FOLDER`
keeps their machine code and a list of them, which `benchmarks/gpu_model.py mosaic` reads.
Needs JAX's CUDA plugin, nvcc and libdevice, and no GPU.

A line of the table: kernel, head size, dtype, tile, tiles read ahead, registers, bytes spilled (stores and loads),
bytes of shared memory. What a causal dk and dv spill are numbers of a row, beside whose sums no register is left:
none of it is in a loop over tiles. Registers are those a thread starts with; warpgroups then give and take (240 and
24)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["MOSAIC_GPU_DUMP_TO"] = tempfile.mkdtemp(prefix="frisket-gpu-")  # ptxas' report is read from there
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"

import jax
from jax.experimental import topologies
from support.pallas_cases import LENGTH, LONG, long_plan, shapes_of

from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.pallas_gpu import backward as pallas_gpu_backward
from frisket.lowering.kernels.pallas_gpu import forward as pallas_gpu_forward
from frisket.lowering.plan import RATE, SEED, Geometry, Target
from frisket.runtime.backends.pallas_gpu import jax as runtime
from frisket.runtime.machine.modules import load_source

DUMP = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
KEEP = next((Path(a.removeprefix("--keep=")) for a in sys.argv if a.startswith("--keep=")), None)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled"
TABLE = RESULTS / f"pallas-gpu-jax-{version('jax').rpartition('.')[0]}.txt"
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

PTXAS = [str(Path(find_spec("nvidia.cu13").submodule_search_locations[0]) / "bin" / "ptxas"), "-arch=sm_90a"]


@dataclass(frozen=True)
class Kernel:
    """A line of the table; `call` and `shapes` of its arguments, given where they are to be."""

    name: str
    dim: int
    dtype: str
    tile: str
    call: Callable[..., Any]
    shapes: Callable[[jax.sharding.Sharding], Any]

    def __str__(self) -> str:
        return f"{self.name:26} {self.dim:3} {self.dtype:8} {self.tile:14}"


def forward(
    name: str, dim: int = 128, dtype: str = "bfloat16", block: tuple[int, int] | None = None, v_dim: int = 0,
    full: bool = False, length: int = LENGTH,
) -> Kernel:  # fmt: skip
    """The forward kernel of a case, at the tiles it has when nothing else is said; `full` with all options."""
    case = LONG[name]
    plan = long_plan(case, dropout=full)
    geometry = Geometry(2, 8, 4, length, length, dim, v_dim or dim, dim**-0.5)
    target = runtime.target(plan, geometry, dtype, block)
    run = runtime.kernel(pallas_gpu_forward.emit, plan, target, geometry, dtype, full, False, full)
    slots = list(plan.slot_values({SEED: 1, RATE: 0.1} if full else {}).values())
    numbers = geometry.origin, geometry.full, slots, [plan.table_values(case.tables)[t.name] for t in plan.tables]

    def shapes(where: jax.sharding.Sharding) -> Any:
        def one(dtype: str, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

        rows, n = -(-length // target.block_q), "int32"
        qkv = [one(dtype, 2, length, heads, d) for heads, d in ((8, dim), (4, dim), (4, v_dim or dim))]
        walk = [one(n, 2, 8), one(n, 1, rows), one(n, 1, rows, 2), one(n, 1, rows, 2, 4)]
        return [*qkv, *walk, *shapes_of(numbers, where), *[one("float32", 8)] * full]

    tile = f"{target.block_q} x {target.block_k} x {target.num_stages}"
    return Kernel(f"{name}{', all options' if full else ''}", dim, dtype, tile, run, shapes)


def backward(
    name: str, wanted: str, dim: int = 128, dtype: str = "bfloat16", dropout: bool = False, length: int = LENGTH
) -> Kernel:
    """A backward kernel of a case: of "q", and of the case's captured tables if `wanted` has "t"; of "k", "v"."""
    case = LONG[name]
    plan = long_plan(case, dropout=dropout)
    geometry = Geometry(2, 8, 4, length, length, dim, dim, dim**-0.5)
    of_q = "q" in wanted
    target = Target(runtime.BACKEND, *pallas_gpu_backward.tiles(geometry)[not of_q], tanh="approximate")
    captured = {g.source for g in backward_of(plan).gradients} if "t" in wanted else set()
    source = pallas_gpu_backward.emit(plan, target, geometry, {*wanted} - {"t"} | captured)
    run = jax.jit(load_source(source)["attention_dq" if of_q else "attention_dkv"])
    slots = list(plan.slot_values({SEED: 1, RATE: 0.1} if dropout else {}).values())
    numbers = geometry.origin, geometry.full, slots, [plan.table_values(case.tables)[t.name] for t in plan.tables]
    own, walked = (target.block_q, target.block_k) if of_q else (target.block_k, target.block_q)

    def shapes(where: jax.sharding.Sharding) -> Any:
        def one(dtype: str, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

        rows, n = -(-length // own), "int32"
        arrays = [one(dtype, 2, length, heads, dim) for heads in (8, 4, 4, 8)]
        walk = [one(n, 2, 8), one(n, 1, rows), one(n, 1, rows, 2), one(n, 1, rows, 2, 4)]
        return [*arrays, *[one("float32", 2, 8, length)] * 3, *walk, *shapes_of(numbers, where)]

    tile = f"{target.block_q} x {target.block_k} x {pallas_gpu_backward.stages(geometry, own, walked)}"
    found = " ".join(f"d{x}" for x in wanted)
    return Kernel(f"{name}{', dropout' if dropout else ''}: {found}", dim, dtype, tile, run, shapes)


def kernels() -> Iterator[Kernel]:
    for name in LONG.keys() - {"relation", "plane"}:
        yield forward(name)
    yield forward("plane", length=8192)
    yield forward("causal", full=True)
    yield forward("causal", dtype="float16")
    for dim in (64, 192, 256):
        yield forward("causal", dim)
        yield forward("documents", dim)
    yield forward("causal", 192, v_dim=128)
    yield forward("window", 64)
    yield from backwards()


def backwards() -> Iterator[Kernel]:
    for name in LONG.keys() - {"relation", "plane"}:
        yield backward(name, "q")
        yield backward(name, "kv")
    for name in ("causal", "documents"):
        yield backward(name, "q", 64)
        yield backward(name, "kv", 64)
        for wanted in "qkv":
            yield backward(name, wanted, 256)
    yield backward("causal", "q", dropout=True)
    yield backward("causal", "kv", dropout=True)
    yield backward("alibi", "qt")


def compiled(kernel: Kernel, device: Any) -> str:
    """What ptxas says."""
    where = jax.sharding.SingleDeviceSharding(device)
    for old in DUMP.iterdir():
        old.unlink()
    try:
        kernel.call.trace(*kernel.shapes(where)).lower(lowering_platforms=("cuda",)).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    dumped = list(DUMP.iterdir())
    said = "".join(p.read_text() for p in dumped if p.suffix == ".ptxas")
    steps = "".join(p.read_text() for p in dumped if p.name.endswith("mlir-passes.log"))
    shared = max((int(n) for n in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", steps)), default=0)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", " ".join(re.findall("stack frame.*", said))))
    registers = re.findall(r"Used (\d+) registers", said)[0]
    return f"{registers} registers, {spills} spilled, {shared} shared"


def keep(kernel: Kernel, number: int, said: str) -> None:
    """Keep the machine code of what was compiled last, and its line of the list."""
    assert KEEP
    (ptx,) = DUMP.glob("*.ptx")
    file = f"{number}.cubin"
    subprocess.run([*PTXAS, str(ptx), "-o", str(KEEP / file)], check=True)
    with (KEEP / "kernels.jsonl").open("a") as lines:
        line = {n: getattr(kernel, n) for n in ("name", "dim", "dtype", "tile")} | {"file": file, "said": said}
        lines.write(json.dumps(line) + "\n")


def main() -> int:
    words = [a for a in sys.argv[1:] if not a.startswith("-")]
    device = topologies.get_topology_desc(
        platform="cuda", topology_name="H100", target_config=H100, topology="1x1x1"
    ).devices[0]
    lines = []
    if KEEP:
        KEEP.mkdir(parents=True)
    for kernel in kernels():
        if all(w in str(kernel) for w in words):
            start = time.perf_counter()
            said = compiled(kernel, device)
            if KEEP and "registers" in said:
                keep(kernel, len(lines), said)
            lines.append(f"{kernel} {said}")
            print(f"{lines[-1]}  ({time.perf_counter() - start:.1f} s)", flush=True)
    lines.sort()
    if "--update-results" in sys.argv and not words:
        TABLE.write_text(f"jax {version('jax')}\n" + "\n".join(lines) + "\n")
    wanted = set(TABLE.read_text().splitlines()[1:])
    for line in (other := [x for x in lines if x not in wanted]):
        print(f"not in {TABLE.name}: {line}")
    for line in (missing := [] if words else sorted(wanted - {*lines})):
        print(f"only in {TABLE.name}: {line}")
    shutil.rmtree(DUMP)
    return int(bool(other or missing))


if __name__ == "__main__":
    sys.exit(main())
