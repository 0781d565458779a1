"""Run by test_triton_interpret.py without TRITON_INTERPRET: Triton compiles what is emitted, for machines not here."""

import math
import re
import subprocess

import numpy as np
import pytest
import torch
import triton
from lowering.kernels.triton.children import operators as triton_operators
from lowering.kernels.triton.spills import TABULATED
from support import attention_cases as cases
from support.attention_cases import CASES
from support.torch.gradients import MODS
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import BackendError
from frisket.dsl.sugar import b, eq, function, h, k, q, score
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.forward import OptionalArrays, emit
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Geometry, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton.kernels import compile_reports, compiled_for
from frisket.runtime.backends.triton.tiles import MEDIUM, TABLE, ProgramTraits, default_target, of_kernel, reads_of
from frisket.runtime.backends.triton.torch import forward
from frisket.runtime.machine.modules import load_from_file as load

causal = q >= k
softcap = 50 * function("tanh", score / 50)
w, q0, q1 = ir.param("w"), ir.var("q0"), ir.var("q1")
WINDOW = make_plan(
    ProgramExprs(causal & (q - k < w)),
    facts=ProgramFacts(rows_nonempty=True, bounds=Bounds(q0 - w + 1, q1 - w + 1, q0, q1)),
)
FORTY = Bounds(q0 - 39, q1 - 39, q0, q1)
DOCUMENTS = make_plan(ProgramExprs(causal & eq(ir.lookup("doc", (q,)), ir.lookup("doc", (k,)))))
PLANS = {
    "full": make_plan(ProgramExprs(), facts=ProgramFacts(rows_nonempty=True, score_finite=True)),
    "softcap, alibi": make_plan(ProgramExprs(causal, softcap + ir.lookup("slope", (h,), FLOAT) * (k - q))),
    "bias": make_plan(ProgramExprs(causal, score + ir.lookup("bias", (b, h, q, k), FLOAT))),
    "bias by distance": make_plan(ProgramExprs(causal, score + ir.lookup("bias", (h, q - k + 511), FLOAT))),
}


def report(name, dim, dtype, arch="sm_90"):
    plan = PLANS[name]
    reads, keys = reads_of(plan.mask, plan.score), math.inf if plan.mask is None else MEDIUM
    geometry = Geometry(1, 8, 8, 4096, 4096, dim, dim, dim**-0.5)
    target = default_target(geometry, dtype, ProgramTraits(keys, reads=reads), arch=arch)
    dims = Dims(dim, dim, dtype)
    return next(compile_reports(emit(plan, target, dims), plan, target, dims, arch))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", PLANS)
def test_default_tiles_do_not_spill(name, dim):
    """Tiles that tiles_compiled.py has no line for."""
    found = report(name, dim, "bfloat16")
    assert found.spills == 0
    assert found.fits


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("row", "mask", "mod"), [
    ("each", "causal", "score + table[h, q, k]"), ("each medium", "causal & table[h, q, k] > 0", None),
])  # fmt: skip
def test_tables_per_position_do_not_spill(row, mask, mod, dim):
    """Forward and dq, with the tiles that were searched for them on Hopper."""
    made = fk.compile(mask, mod, table=np.ones((8, 512, 512), np.float32)).stages(
        backend="triton", q_len=512, kv_len=512, heads=8, kv_heads=1, head_dim=dim, dtype="bfloat16"
    )
    reports = compile_reports(made.source, made.plan, made.target, Dims(dim, dim, "bfloat16", 8))
    for kernel, found in zip(("forward", "delta", "dq"), reports):
        assert found.kernel == f"attention_{kernel}"
        if kernel != "delta":
            tile = [found.block_q, found.block_k, found.warps, found.stages]
            assert tile == TABLE["sm_90"][kernel][row][str(dim)][:4]
        assert (found.spills, found.fits) == (0, True)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, "causal", "causal & window(128)", "causal | k < 256", "causal & same(doc)"])
def test_products_run_beside_other_instructions(mask, dim, tmp_path):
    """ptxas says where it makes each WGMMA wait for its end: gradients without a mask took 1.3 times as long so."""
    more = {"doc": np.arange(512, dtype=np.int32) // 100} if mask and "doc" in mask else {}
    sizes = {"q_len": 512, "kv_len": 512, "heads": 8, "kv_heads": 8, "head_dim": dim, "dtype": "bfloat16"}
    made = fk.compile(mask, **more).stages(backend="triton", arch="sm_90", **sizes)
    kernels, ptx = vars(load(made.source)), tmp_path / "kernel.ptx"
    assert ("attention_dv" in kernels) == (dim == 256)
    for name in ("attention_forward", "attention_dq", "attention_dkv", *["attention_dv"] * (dim == 256)):
        own = of_kernel(name, made.target)
        ptx.write_text(compiled_for("sm_90", kernels[name], made.plan, own, Dims(dim, dim, "bfloat16")).asm["ptx"])
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert f"Compiling entry function '{name}'" in said
        assert "wgmma.mma_async instructions are serialized" not in said


def test_triton_float32_forward_fits_without_spills():
    found = report("full", 64, "float32")
    assert found.spills == 0
    assert found.fits


@pytest.mark.parametrize("name", ["crop", "nested", "keep-plane", "switch", "random", "v-wider", "gqa", "scaled"])
def test_triton_cases_fit_when_compiled(name):
    case = CASES[name]
    made, target = cases.plan(case), Target("triton", 64, 32, 4, 2)
    dims = Dims(case.dim, case.v_dim, "float16", case.heads // case.kv_heads)
    assert all(r.fits for r in compile_reports(emit(made, target, dims), made, target, dims))


@pytest.mark.parametrize(("name", "dtype", "live"), [
    ("by column, gqa", "float16", ()), ("learned softcap", "bfloat16", ("s0",)), ("by row, clamped", "float32", ()),
])  # fmt: skip
def test_triton_backward_fits_when_compiled(name, dtype, live):
    """The backward of one group with dropout, formulas in 64 bits, a scalar on the device, few queries of float32."""
    case, target = MODS[name], Target("triton", 16, 16, 4, 1)
    facts = ProgramFacts(limits=dict.fromkeys("qk", 2.0**33), bounds=FORTY)
    wide = {"facts": facts, "keep_mask": survives()}
    many = wide if name == "by column, gqa" else {}
    made = make_plan(ProgramExprs(case.mask, case.score), **many)
    wanted = {g.source for g in backward_of(made).gradients} | (set() if live else {"q", "k", "v"})
    dims = Dims(32, 48, dtype, case.heads // case.kv_heads, device_slots=live)
    found = list(compile_reports(triton_backward.emit(made, target, dims, wanted), made, target, dims))
    assert [r.kernel for r in found] == [f"attention_{n}" for n in ("delta", "dq", "dkv")][: 2 if live else 3]
    assert all(r.fits for r in found)


@pytest.mark.parametrize("mod", [ir.lit(1.5), ir.param("c", FLOAT), ir.lookup("slope", (h,), FLOAT) * q])
def test_score_mods_without_a_score_compile(mod):
    """One number for all keys of a row has the shape of a tile too."""
    made, target, dims = make_plan(ProgramExprs(causal, mod)), Target("triton", 32, 32, 4, 1), Dims(32, 32, "float16")
    for source in (emit(made, target, dims), triton_backward.emit(made, target, dims, {"v"})):
        assert all(r.fits for r in compile_reports(source, made, target, dims))


def test_triton_divisions_of_a_mask_are_rounded_correctly():
    def divisions(mask, score=None):
        made, target, dims = (
            make_plan(ProgramExprs(mask, score)),
            Target("triton", 32, 32, 4, 1),
            Dims(32, 32, "float16"),
        )
        source = triton_backward.emit(made, target, dims, {"k"})
        text = compiled_for("sm_90", load(source).attention_dkv, made, target, dims).asm["ptx"]
        return text.count("div.rn.f32"), len(re.findall(r"div\.(full|approx)", text)), source

    none, own, _ = divisions(causal)  # `own`: one that turns lse into a score
    exact, rough, _ = divisions(eq(*(ir.build("floor", ir.to_float(x) / 41.0) for x in (q, k))))
    assert (none, rough) == (0, own)
    assert exact > 0
    assert "div_rn" not in divisions(causal, score + ir.to_float(q - k) / 41.0)[2]


@pytest.mark.parametrize("arch", TABULATED)
def test_a_table_by_distance_is_loaded_once_a_tile(arch):
    """Loads, asynchronous or not, are those of the kernel without a table, and one vector more in each loop."""

    def counted(plan):
        target, dims = Target("triton", 64, 64, 4, 1), Dims(64, 64, "bfloat16")
        return compiled_for(arch, load(emit(plan, target, dims)).attention_forward, plan, target, dims).asm["ttgir"]

    plain, biased = (counted(PLANS[n] if n else make_plan(ProgramExprs(causal))) for n in ("", "bias by distance"))
    assert biased.count("tt.gather") == 2
    loads = [len(re.findall(r"tt\.load|amdg\.buffer_load", x)) for x in (plain, biased)]
    assert loads[1] - loads[0] == 2
    assert biased.count("async_copy_global") == plain.count("async_copy_global")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # of sm_100 the first round of each loop is written out
def test_a_soft_cap_is_one_product_and_one_tanh(arch):
    """Beside what the kernel without it has: the product `scale * 0.02`, and a tanh for each of a thread's scores. The
    product of a score is there without it too, with the scale."""
    target, dims = Target("triton", 64, 64, 4, tanh="approximate"), Dims(64, 64, "bfloat16")
    operators = ("mul.f32", "tanh.approx.f32", "ex2", "div", "rcp")

    def counted(score):
        made = make_plan(ProgramExprs(causal, score))
        text = compiled_for(arch, load(emit(made, target, dims)).attention_forward, made, target, dims).asm["ptx"]
        return [len(re.findall(rf"\t{op}(?:\.\w+)*[ \t]", text)) for op in operators]

    plain, capped = counted(score), counted(softcap)
    of_a_thread = 2 * 64 * 64 // 128  # in two loops
    assert [b - a for a, b in zip(plain, capped, strict=True)] == [1, of_a_thread, 0, 0, 0]


@pytest.mark.parametrize("arch", TABULATED)
def test_few_queries_compile(arch):
    target, dims = Target("triton", 16, 64, 4, 3), Dims(96, 96, "bfloat16", 8)
    source = triton_forward.emit_decode(DOCUMENTS, target, dims, OptionalArrays(sinks=True, row_max=True))
    found = list(compile_reports(source, DOCUMENTS, target, dims, arch))
    assert [r.kernel for r in found] == ["attention_decode", "attention_combine"]
    assert all(r.fits and not r.spills for r in found)


@pytest.mark.parametrize("keys", ["float8_e4m3fn", "float8_e5m2"])
def test_keys_and_values_of_8_bits_compile(keys):
    target, dims = Target("triton", 64, 64, 4, 2), Dims(64, 64, "bfloat16", 8, keys)
    source = emit(WINDOW, target, dims)
    assert all(r.fits for r in compile_reports(source, WINDOW, target, dims))


@pytest.mark.parametrize("int64", [False, True])
def test_triton_operators_compile_in_32_and_64_bits(int64):
    roots = list(triton_operators.EXPRESSIONS.values())
    kernel = load(triton_operators.module(roots, int64)).attention_forward
    inputs = {p.name.upper(): {INT: "*i32", FLOAT: "*fp32", BOOL: "*i8"}[p.type] for p in triton_operators.free(*roots)}
    outs = {f"Out{i}": {INT: "*i64", FLOAT: "*fp32", BOOL: "*i1"}[e.type] for i, e in enumerate(roots)}
    source = ASTSource(kernel, {**inputs, **outs, "N": "constexpr"}, {"N": 256})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def test_an_assembler_that_is_too_old_is_named(monkeypatch):
    """Triton 3.6 raised 3,000 lines of PTX for sm_110."""
    made, target, dims = cases.plan(CASES["causal"]), Target("triton", 64, 64), Dims(64, 64, "float16")

    def refused(*_, **__):
        raise triton.TritonError("ptxas-blackwell fatal : Value 'sm_110a' is not defined for option 'gpu-name'")

    monkeypatch.setattr(triton, "compile", refused)
    with pytest.raises(BackendError) as caught:
        next(compile_reports(emit(made, target, dims), made, target, dims, "sm_110"))
    assert str(caught.value) == (
        f"the assembler of Triton {triton.__version__} does not know sm_110; install a newer Triton"
    )


def test_triton_compilation_refuses_unknown_machines():
    made = cases.plan(CASES["causal"])
    target = Target("triton", 64, 64)
    source = emit(made, target, Dims(64, 64, "float16"))
    with pytest.raises(BackendError) as caught:
        next(compile_reports(source, made, target, Dims(64, 64, "float16"), "sm_70"))
    assert str(caught.value) == (
        "no figures for 'sm_70'; ahead-of-time reports know sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, "
        "sm_110, sm_120, sm_121, gfx90a, gfx942, gfx950, gfx1100, gfx1201\n  `frisket doctor` says which GPUs these are"
    )
    x = torch.zeros(1, 2, 150, 32)
    with pytest.raises(BackendError) as caught:
        forward(cases.kernel_inputs(CASES["causal"], target, made), x, x, x)
    assert str(caught.value) == (
        "Triton kernels need a GPU: on the CPU take backend='aten', or set TRITON_INTERPRET=1 before "
        "Python starts to run them in Triton's interpreter"
    )
