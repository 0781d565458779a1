"""`python tests/compiled/triton_jax.py`: the Triton kernels as JAX calls them, lowered and compiled for GPUs that are
not here, where jax-triton can be imported (the extra gpu-compile). Numbers are checked by
tests/runtime/backends/children/triton_jax_interpreted.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jax import export
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.jax.gradients import LEARNED

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import BackendError
from frisket.dsl.sugar import k, q
from frisket.lowering.architectures import architecture_of
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import Bounds, Cotangents, ForwardResults, KernelInputs, LoopPlan, ProgramFacts, make_plan
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import jax as triton_jax
from frisket.runtime.backends.triton import tiles as triton_tiles

triton_jax.triton_call()  # before jax_triton, whose import has a side effect that it undoes
import jax_triton.triton_lib as jax_triton  # noqa: E402

GPUS = {"sm_90": ("NVIDIA H100 80GB HBM3", 132), "sm_80": ("NVIDIA A100-SXM4-80GB", 108)}
WHOLE = Case(causal, q_len=1024, kv_len=1024, batch=8, heads=8, kv_heads=2, dim=128, v_dim=128, dtype="bfloat16")
WINDOW = WHOLE.but(mask=causal & (q - k < ir.param("w")), slots={"w": 100}, dim=64, v_dim=64)


class Compiler:
    """What jax-triton compiles and calls, as it does."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[str]] = {}
        self.grids: list[tuple[int, int, int]] = []
        compile_, call = jax_triton.compile_ttir_inplace, jax_triton.triton_kernel_call_lib.TritonKernelCall

        def compiled(*given: Any) -> Any:
            found = compile_(*given)
            self.kernels.setdefault(found.name, []).append(found.binary)
            return found

        def called(kernel: Any, x: int, y: int, z: int, parameters: Any) -> Any:
            self.grids.append((x, y, z))
            return call(kernel, x, y, z, parameters)

        jax_triton.compile_ttir_inplace = compiled
        jax_triton.triton_kernel_call_lib.TritonKernelCall = called

    @contextmanager
    def watched(self) -> Iterator[tuple[dict[str, list[str]], list[Any]]]:
        """The kernels compiled and the grids called in the meantime."""
        self.kernels, self.grids = {}, []
        yield self.kernels, self.grids


compiler = Compiler()


@contextmanager
def gpu(arch: str) -> Iterator[None]:
    """JAX lowers for such a GPU."""
    kind, cores = GPUS[arch]
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def lowered(run: Any, *arrays: Any, platform: str = "cuda") -> str:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    unchecked = [export.DisabledSafetyCheck.custom_call("triton_kernel_call")]
    exported = export.export(jax.jit(run), platforms=[platform], disabled_checks=unchecked)(*shapes)
    return "\n".join(line.split(" loc(")[0] for line in exported.mlir_module().splitlines() if line[:4] != "#loc")


def plan(case: Case) -> LoopPlan:
    """With the closed form of a causal mask."""
    if case.mask is not causal:
        return cases.plan(case)
    q0, q1, k0 = (ir.var(n) for n in ("q0", "q1", "k0"))
    return make_plan(
        ProgramExprs(causal, case.score), facts=ProgramFacts(bounds=Bounds(k0, k0, q0, q1), rows_nonempty=True)
    )


def forward(case: Case, platform: str = "cuda", **changes: Any) -> str:
    """The module of a forward whose slots, tables, origin and spans are arguments."""
    made, g = plan(case), cases.geometry(case)
    target = triton_tiles.jax_target(made, g, case.dtype)
    spans = Spans(case)

    def run(q: Any, k: Any, v: Any, numbers: Any) -> Any:
        own = replace(g, origin=numbers["origin"], sizes=g.full)
        of = made, spans.traced(numbers["spans"]), own, target, numbers["slots"], numbers["tables"]
        return triton_jax.forward(KernelInputs(*of, platform=platform, **changes), q, k, v)

    return lowered(run, *cases.arrays(case), spans.numbers(case, made), platform=platform)


def backward(case: Case, platform: str = "cuda") -> str:
    made, g = plan(case), cases.geometry(case)
    target = triton_tiles.jax_target(made, g, case.dtype)
    spans = Spans(case)
    wanted = frozenset({"q", "k", "v", *(x.source for x in backward_of(made).gradients)})
    rows = (case.batch, case.heads, case.q_len)
    out = jnp.zeros((case.batch, case.q_len, case.heads, case.v_dim), case.dtype)

    def run(q: Any, k: Any, v: Any, out: Any, lse: Any, numbers: Any) -> Any:
        of = made, spans.traced(numbers["spans"]), g, target, numbers["slots"], numbers["tables"]
        given = ForwardResults(out, lse), Cotangents(out, lse)
        return triton_jax.backward(KernelInputs(*of, platform=platform), q, k, v, *given, grad_names=wanted)

    return lowered(run, *cases.arrays(case), out, jnp.zeros(rows), spans.numbers(case, made), platform=platform)


class Spans:
    """Spans as arguments of a jitted function: of any tile, they show everything."""

    def __init__(self, case: Case) -> None:
        self.case, self.heads = case, np.zeros((case.batch, case.heads), np.int32)

    def numbers(self, case: Case, made: Any) -> dict[str, Any]:
        slots = {n: jnp.asarray(x) for n, x in cases.slots(case, made).items()}
        origin = tuple(jnp.asarray(x, jnp.int32) for x in case.origin)
        spans = jnp.zeros((1, 1, 2, 4), jnp.int32)
        return {"slots": slots, "tables": cases.tables(case, made), "origin": origin, "spans": spans}

    def traced(self, records: Any) -> Any:
        self.records = records
        return self

    def rows(self, block: tuple[int, int]) -> DeviceSpans:
        return self._of(-(-self.case.q_len // block[0]))

    def columns(self, block: tuple[int, int]) -> DeviceSpans:
        return self._of(-(-self.case.kv_len // block[1]))

    def _of(self, rows: int) -> DeviceSpans:
        return DeviceSpans(jnp.tile(self.records, (1, rows, 1, 1)), jnp.ones((1, rows), jnp.int32), None, self.heads)


def assembled(ptx: str) -> tuple[str, int]:
    """(architecture, bytes that spill), by Triton's own ptxas, the newest it has."""
    (arch,) = re.findall(r"\.target (\w+)", ptx)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = next(p for p in (folder / "ptxas-blackwell", folder / "ptxas") if p.exists())
    with tempfile.TemporaryDirectory() as into:
        path = Path(into, "kernel.ptx")
        path.write_text(ptx)
        command = [str(ptxas), "-v", f"-arch={arch}", str(path), "-o", str(Path(into, "kernel.cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (spills,) = re.findall(r"(\d+) bytes spill stores", said)
    return arch, int(spills)


def calls(module: str) -> int:
    return len(re.findall(r"custom_call @triton_kernel_call", module))


# -- the checks -----------------------------------------------------------------------------------------


def check_forward_and_backward(arch: str) -> None:
    """One custom call for each kernel, compiled for the architecture; on Hopper without a spill in default tiles."""
    with gpu(arch), compiler.watched() as (kernels, grids):
        target = triton_tiles.jax_target(plan(WHOLE), cases.geometry(WHOLE), "bfloat16")
        assert calls(forward(WHOLE)) == 1
        assert grids == [(1024 // target.block_q, 8, 8)]
        assert calls(backward(WHOLE)) == 3
        assert grids[2] == (1024 // target.dq.block_q, 8, 8)
        assert grids[3] == (1024 // target.dkv.block_k, 2, 8)
    names = ("forward", "delta", "dq", "dkv")
    assert list(kernels) == [f"attention_{n}_from_jax" for n in names], list(kernels)
    for name, (ptx,) in kernels.items():
        found, spills = assembled(ptx)
        assert found == {"sm_90": "sm_90a", "sm_80": "sm_80"}[arch]
        assert spills == 0 or arch == "sm_80", f"{name} spills {spills} bytes"  # there those of torch do, too
        if "delta" not in name:
            assert "cp.async.cg.shared.global" in ptx, f"{name} loads byte by byte: strides are not known to be aligned"
            assert ("wgmma" if arch == "sm_90" else "mma.sync") in ptx, name


def check_few_queries() -> None:
    case = WHOLE.but(q_len=1, kv_len=4096, batch=1, origin=(0, 0, 4095, 0), sizes=(1, 8, 4096, 4096))
    with gpu("sm_90"), compiler.watched() as (kernels, grids):
        assert calls(forward(case)) == 2
    assert list(kernels) == ["attention_decode_from_jax", "attention_combine_from_jax"]
    assert grids[0][1] == 2
    assert grids[0][0] > 8  # parts of the keys


def check_values_compile_nothing() -> None:
    """Windows, lengths and places are run-time numbers of one kernel."""
    with gpu("sm_90"), compiler.watched() as (kernels, _):
        first = forward(WINDOW)
        assert len(kernels) == 1
    with gpu("sm_90"), compiler.watched() as (kernels, _):
        assert forward(WINDOW.but(slots={"w": 999})) == first
        forward(WINDOW.but(q_len=512, kv_len=1536, batch=4, heads=16, kv_heads=4))
        assert not kernels


def check_captured_gradients() -> None:
    """Gradients of every kind: sums of rows, columns and heads, by distance, planes, and in fixed point."""
    seen: set[str] = set()
    for name in ("by-column", "by-diagonal", "plane-by-head", "nested"):
        with gpu("sm_90"), compiler.watched() as (kernels, _):
            backward(LEARNED[name])
        seen |= {n.removeprefix("attention_").removesuffix("_from_jax") for n in kernels}
    assert seen >= {"delta", "dq", "dkv", "diagonal", "plane", "total", "scatter"}, seen


def check_kinds_of_tables() -> None:
    for name in ("bool-by-head", "origin-by-batch", "switch"):
        with gpu("sm_80"), compiler.watched() as (kernels, _):
            module = forward(CASES[name].but(dtype="float16"))
        assert kernels.keys() & {"attention_forward_from_jax", "attention_decode_from_jax"}, name
        assert calls(module) == len(kernels), name


def check_64_bits() -> None:
    """Without 64-bit integers in JAX."""
    case = WINDOW.but(mask=(q << 40) - k * 2**33 >= ir.param("w"), slots={"w": 5 * 2**35})
    made = make_plan(ProgramExprs(case.mask), facts=ProgramFacts(limits={"q": 2**12, "k": 2**12, "w": 2**40}))
    assert made.int64
    with gpu("sm_90"), compiler.watched() as (kernels, _):
        target = triton_tiles.jax_target(made, cases.geometry(case), case.dtype)
        source = Spans(case).traced(jnp.zeros((1, 1, 1, 4), jnp.int32))
        inputs = cases.kernel_inputs(case, target, made, spans=source, tables={}, platform="cuda")
        lowered(lambda *qkv: triton_jax.forward(inputs, *qkv), *cases.arrays(case))
    assert len(kernels) == 1


def check_amd() -> None:
    """As far as it goes without a device: compiled for gfx942, where JAX's plugin of CUDA takes the result for PTX."""
    device = jax_triton.triton_kernel_call_lib
    device.get_arch_details, device.get_compute_capability = lambda device: "gfx942", lambda device: 94
    triton_tiles._first_of_jax = lambda: triton_tiles.Gpu(architecture_of("gfx942"), 304, 0)
    with compiler.watched() as (kernels, _):
        try:
            assert calls(forward(WHOLE, platform="rocm")) == 1
        except BackendError as error:
            assert triton.__version__ >= "3.9" and "with Triton 3.9" in str(error)  # noqa: PT017, PT018
            return
    ((binary,),) = kernels.values()
    assert Path(binary).read_bytes()[:4] == b"\x7fELF"
    Path(binary).unlink()


def check_calls_of_users() -> None:
    """What is asked for and what jax-triton compiles: short rows of small heads, forward, beside Mosaic's kernels."""
    x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.bfloat16)
    for text, kernels in (("causal & window(128)", ["triton_kernel_call"]), ("causal", ["mosaic_gpu_v2"])):
        att = fk.compile(text)

        def loss(*qkv: Any, att: fk.Attention = att) -> Any:
            return att(*qkv).astype(jnp.float32).sum()

        for run, wanted in ((att, kernels), (jax.grad(loss, (0, 1, 2)), kernels + ["mosaic_gpu_v2"] * 2)):
            module = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
            found = re.findall(r"custom_call @([\w$.]+)", module)
            assert sorted(found) == sorted(wanted), found


def main() -> int:
    assert os.environ.get("TRITON_CACHE_DIR") != "", "jax-triton's import has changed the environment"
    checks = [lambda: check_forward_and_backward("sm_90"), lambda: check_forward_and_backward("sm_80")]
    checks += [check_few_queries, check_values_compile_nothing, check_captured_gradients, check_kinds_of_tables]
    for check in (*checks, check_64_bits, check_calls_of_users, check_amd):
        check()
    assert "torch" not in sys.modules
    print(f"triton {triton.__version__} from jax {jax.__version__}: good")
    return 0


if __name__ == "__main__":
    sys.exit(main())
