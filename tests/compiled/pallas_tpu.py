"""`python tests/compiled/pallas_tpu.py`: libtpu compiles the Pallas kernels for TPUs that are not here, as far as
machine code, and says what does not fit. Compared with benchmarks/results/compiled/pallas-tpu-jax-*.txt, which
`--update-results` writes; a word chooses kernels (`python tests/compiled/pallas_tpu.py distance`).
Needs libtpu and no TPU.

A line of the table: kernel, head size, dtype, tile, TPU, and whether it compiles, with the memory that its program
takes, or why not. Versions of libtpu differ in that; the table names its own.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no machine of a cloud to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compilers beside one another
os.environ.setdefault("TPU_LIBRARY_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.experimental import topologies
from support.pallas_cases import LENGTH, LONG, causal_walk, long_plan, operator_cases, shapes_of

from frisket.dsl.ir import OPERATORS, lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.pallas_tpu import backward as pallas_tpu_backward
from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu
from frisket.lowering.kernels.pallas_tpu.walk import TpuOptions
from frisket.lowering.plan import RATE, SEED, Geometry, Pages, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.pallas_tpu import jax as runtime

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled"
TABLE = RESULTS / f"pallas-tpu-jax-{version('jax').rpartition('.')[0]}.txt"
SMALL = (128, 128)  # tiles of which groups of 8 have more steps than scalar memory has room for
TPUS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
_VMEM = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'


@dataclass(frozen=True)
class Kernel:
    """A line of the table but for the TPU; `call` and `shapes` of its arguments, given where they are to be."""

    name: str
    dim: int
    dtype: str
    block: tuple[int, int]
    call: Callable[..., Any]
    shapes: Callable[[jax.sharding.Sharding], Any]

    def __str__(self) -> str:
        return f"{self.name:36} {self.dim:3} {self.dtype:8} {self.block[0]:4} x {self.block[1]:4}"


def forward(
    name: str, dim: int = 128, dtype: str = "bfloat16", block: tuple[int, int] | None = None, case: Any = None,
    length: int = LENGTH, full: bool = False, strided: bool = True, group: int = 2,
) -> Kernel:  # fmt: skip
    """The forward kernel of a case, at the tiles it has when nothing else is said; `full` with dropout and sinks,
    `group` query heads for each of 4 key heads."""
    case = case or LONG[name]
    plan = long_plan(case, dropout=full)
    geometry = Geometry(2, 4 * group, 4, length, length, dim, dim, dim**-0.5)
    target = runtime.target(plan, geometry, dtype, block)
    block = target.block_q, target.block_k
    walk, heads = shared(geometry, dtype, block)
    options = pallas_tpu.ForwardOptions(strided, heads, runtime.searches(walk), sinks=full, lse_residual=full)
    run = runtime.kernel(pallas_tpu.emit, plan, target, geometry, dtype, options)
    slots = list(plan.slot_values({SEED: 1, RATE: 0.1} if full else {}).values())
    numbers = (
        walk,
        geometry.origin,
        geometry.full,
        slots,
        [plan.table_values(case.tables)[t.name] for t in plan.tables],
    )

    def shapes(where: jax.sharding.Sharding) -> Any:
        qkv = [jax.ShapeDtypeStruct((2, length, n, dim), dtype, sharding=where) for n in (4 * group, 4, 4)]
        sinks = jax.ShapeDtypeStruct((4 * group,), "float32", sharding=where) if full else None
        return (*qkv, *shapes_of(numbers, where), sinks)

    return Kernel(f"{named(name, group, walk)}{', all options' if full else ''}", dim, dtype, block, run, shapes)


def shared(geometry: Geometry, dtype: str, block: tuple[int, int]) -> tuple[Any, int]:
    """The walk of causal attention, and the heads of a program."""
    heads = runtime.together(geometry, dtype, block[0])
    walk = causal_walk(geometry, block, parts=heads)
    return walk, 1 if runtime.searches(walk) else heads


def named(name: str, group: int, walk: Any) -> str:
    return f"{name}{f', groups of {group}' if group != 2 else ''}{', searched' * runtime.searches(walk)}"


def stored(
    kv_dtype: str, page: int = 0, scales: bool = True, dim: int = 128, dtype: str = "bfloat16", queries: int = 1,
    group: int = 2,
) -> Kernel:  # fmt: skip
    """The forward of few queries over keys and values as caches store them."""
    places = (lookup("pages", (b, k // page)), k % page, h // group) if page else (b, k, h // group)
    key, value = (lookup(n, places, FLOAT) for n in ("k_scale", "v_scale"))
    plan = make_plan(
        ProgramExprs((k <= q + lookup("start", (b,))) & (k < lookup("end", (b,))), score * key if scales else None),
        value_scale=value if scales else None,
        pages=Pages("pages", page) if page else None,
    )
    geometry = Geometry(2, 4 * group, 4, queries, 4096, dim, dim, dim**-0.5)
    target = runtime.target(plan, geometry, dtype)
    block = target.block_q, target.block_k
    walk, heads = shared(geometry, dtype, block)
    options = pallas_tpu.ForwardOptions(True, heads, runtime.searches(walk), kv_8bit=kv_dtype != dtype)
    run = runtime.kernel(pallas_tpu.emit, plan, target, geometry, dtype, options)
    pool = (100, page, 4) if page else (2, 4096, 4)
    tables = {"pages": ((2, 4096 // page) if page else (), "int32")} | dict.fromkeys(("start", "end"), ((2,), "int32"))
    tables |= dict.fromkeys(("k_scale", "v_scale"), (pool, "float32"))

    def shapes(where: jax.sharding.Sharding) -> Any:
        def array(shape: tuple[int, ...], kind: str) -> Any:
            return jax.ShapeDtypeStruct(shape, kind, sharding=where)

        arrays = array((2, queries, 4 * group, dim), dtype), *[array((*pool, dim), kv_dtype)] * 2
        numbers = shapes_of((walk, geometry.origin, geometry.full, []), where)
        return (*arrays, *numbers, [array(*tables[t.source]) for t in plan.tables], None)

    name = f"{kv_dtype.replace('float', 'f')}{f', pages of {page}' if page else ''}"
    return Kernel(named(name, group, walk), dim, dtype, block, run, shapes)


def backward(
    which: str, name: str, dim: int = 128, dtype: str = "bfloat16", length: int = LENGTH, strided: bool = True,
    group: int = 2, block: tuple[int, int] | None = None,
) -> Kernel:  # fmt: skip
    """A kernel of the backward, "dq" or "dkv", for all gradients of a case."""
    case = LONG[name]
    plan = long_plan(case)
    geometry = Geometry(2, 4 * group, 4, length, length, dim, dim, dim**-0.5)
    target = pallas_tpu_backward.with_tiles(runtime.target(plan, geometry, dtype, block))
    own = target.dq if which == "dq" else target.dkv
    assert own is not None
    wanted = frozenset("qkv") | {g.source for g in backward_of(plan).gradients}
    block = (own.block_q, own.block_k)
    if which == "dkv":
        walk, heads = causal_walk(geometry, block[::-1], group), 1  # as many words
    elif pallas_tpu_backward.captured(plan, wanted):
        walk, heads = causal_walk(geometry, block), 1
    else:
        walk, heads = shared(geometry, dtype, block)
    options = TpuOptions(strided, heads, runtime.searches(walk))
    made = runtime._gradient_kernel(which, plan, own, geometry, dtype, wanted, options)
    assert made is not None
    slots, tables = list(plan.slot_values({}).values()), [plan.table_values(case.tables)[t.name] for t in plan.tables]

    def shapes(where: jax.sharding.Sharding) -> Any:
        qkv = [jax.ShapeDtypeStruct((2, length, n, dim), dtype, sharding=where) for n in (4 * group, 4, 4, 4 * group)]
        rows = [jax.ShapeDtypeStruct((2, 4 * group, length), "float32", sharding=where)] * 2
        return (*qkv, *rows, *shapes_of((walk, geometry.origin, geometry.full, slots, tables), where))

    call = jax.jit(partial(made[0], fold=group) if which == "dkv" else made[0])
    return Kernel(f"{which} of {named(name, group, walk)}", dim, dtype, block, call, shapes)


def kernels() -> Iterator[tuple[Kernel, tuple[str, ...]]]:
    """Every kernel, and the TPUs it is compiled for."""
    every, one = tuple(TPUS), ("v5e",)
    for name in LONG:
        length = 8192 if name == "plane" else LENGTH  # as large as the square of it
        yield forward(name, length=length), every if name == "causal" else one
    yield forward("relative bias", strided=False), ("v4",)
    yield forward("causal", full=True), ("v4", "v5e", "tpu7x")
    for dim in (64, 80, 192, 256):
        yield forward("causal", dim), one
    for name in ("causal", "relative bias"):
        yield forward(name, dtype="float32"), one
    yield forward("causal", dtype="float16"), one
    for block in ((1024, 1024), (128, 128)):
        yield forward("causal", block=block), one
    yield stored("int8"), every
    yield stored("int8", 128), every
    for page in (16, 64, 256):
        yield stored("int8", page), one
    yield stored("int8", 64, queries=512), one
    yield stored("int8", 64, dim=64, dtype="float32"), one
    for kind in ("float8_e4m3fn", "float8_e5m2"):
        yield stored(kind, 128), ("v5e", "v5p", "v6e", "tpu7x")
    yield stored("bfloat16", 64, scales=False), one
    for which in ("dq", "dkv"):
        yield backward(which, "causal"), every
        for name in ("documents", "softcap", "relative bias"):
            yield backward(which, name), one
        yield backward(which, "relative bias", strided=False), ("v4",)
        for dim in (64, 256):
            yield backward(which, "causal", dim), one
        yield backward(which, "causal", dtype="float32"), one
    for kernel in (forward("causal", group=1), backward("dq", "causal", group=1)):
        yield kernel, one
    for dim in (64, 128, 256):
        for dtype in ("bfloat16", "float32"):
            tpus = every if (dim, dtype) == (128, "bfloat16") else one
            yield forward("causal", dim, dtype, group=8), tpus
            for which in ("dq", "dkv"):
                yield backward(which, "causal", dim, dtype, group=8), tpus
    for name in ("documents", "relative bias"):
        yield forward(name, group=8), one
        yield forward(name, 256, "float32", group=8), one
        yield backward("dq", name, group=8), one
    for dim, dtype in ((128, "float32"), (256, "bfloat16"), (256, "float32")):
        yield forward("relation", dim, dtype), one
    yield forward("plane", 256, "float32", length=8192), one
    yield forward("relation", group=8), one
    yield forward("relative bias", strided=False, group=8), ("v4",)
    yield forward("causal", 256, "float32", full=True, group=8), one
    yield stored("int8", 64, queries=512, group=8), one
    yield forward("causal", block=SMALL, group=8), one
    for which in ("dq", "dkv"):
        yield backward(which, "causal", block=SMALL, group=8), one
    for op in OPERATORS:
        for i, case in enumerate(operator_cases(op)):
            yield forward(f"operator {op} {i or ''}".strip(), 64, "float32", (128, 128), case, 256), one


def compiled(kernel: Kernel, device: Any) -> str:
    """What libtpu says."""
    where = jax.sharding.SingleDeviceSharding(device)
    try:
        found = kernel.call.trace(*kernel.shapes(where)).lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next((line for line in lines if "limit" in line.lower() or "not implemented" in line.lower()), lines[0])
        return f"{type(error).__name__}: {told[:160]}"
    # of vector memory, by the kernel; what XLA keeps there beside it is its own matter
    calls = [line for line in found.as_text().splitlines() if '"tpu_custom_call"' in line]
    sizes = [int(size) for line in calls for size in re.findall(_VMEM, line)]
    beside = found.memory_analysis().temp_size_in_bytes
    return f"compiles, {sum(sizes) // 1024} KiB of vector memory, {beside // 1024} KiB beside operands and results"


def main() -> int:
    words = [a for a in sys.argv[1:] if not a.startswith("-")]
    devices = {
        tpu: topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0] for tpu, name in TPUS.items()
    }
    lines = []
    for kernel, tpus in kernels():
        if all(w in kernel.name for w in words):
            for tpu in tpus:
                start = time.perf_counter()
                lines.append(f"{kernel} {tpu:5} {compiled(kernel, devices[tpu])}")
                print(f"{lines[-1]}  ({time.perf_counter() - start:.1f} s)", flush=True)
    text = f"jax {version('jax')}, libtpu {version('libtpu')}\n" + "\n".join(lines) + "\n"
    if "--update-results" in sys.argv and not words:
        TABLE.write_text(text)
    wanted = set(TABLE.read_text().splitlines())
    other = [line for line in text.splitlines() if line not in wanted]
    missing = [] if words else sorted(wanted - set(text.splitlines()))
    for line in other:
        print(f"not in {TABLE.name}: {line}")
    for line in missing:
        print(f"only in {TABLE.name}: {line}")
    return int(bool(other or missing))


if __name__ == "__main__":
    sys.exit(main())
