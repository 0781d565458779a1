"""The Triton kernels from JAX: every case in Triton's interpreter, in a process of its own (test_triton_slice.py runs
some in every run); here what needs no kernel to run. tests/compiled/triton_jax.py compiles them for GPUs."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support.attention_cases import Case, causal
from support.triton.process import run

from frisket.dsl import ir
from frisket.dsl.errors import BackendError
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import h, k, q, score
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.architectures import architecture_of
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton import module as triton_module
from frisket.lowering.kernels.triton.module import Dims, Form
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Cotangents, ForwardResults, Geometry, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import jax as triton_jax
from frisket.runtime.backends.triton import tiles as triton_tiles
from frisket.runtime.backends.triton.tiles import TABLE, shared
from frisket.runtime.machine.modules import pip_install

CHILDREN = Path(__file__).parent / "children"
G = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)


@pytest.mark.parametrize("part", [
    pytest.param("jax_triton_cases", marks=pytest.mark.exhaustive),
    pytest.param("jax_triton_gradients", marks=pytest.mark.slow),
    pytest.param("jax_triton_gradients and by-diagonal", marks=pytest.mark.exhaustive),
    pytest.param("not jax_triton_", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_triton_jax_kernels_pass_in_the_interpreter(part):
    run(CHILDREN / "triton_jax_interpreted.py", only=part, TRITON_INTERPRET="1")


def test_jax_entry_of_a_triton_kernel_passes_known_sizes():
    mask = causal & (q - k < ir.param("w")) & (lookup("keep", (h, q, k), BOOL) | ir.param("on", BOOL))
    made = make_plan(ProgramExprs(mask, score * ir.param("c", FLOAT)))
    dims = Dims(64, 48, "float16", 2)
    source = triton_forward.emit(made, Target("triton", 64, 64), dims)
    named = triton_module.parameters(source)["attention_forward"]
    form = Form(dims, pairs=frozenset({"Counted"}), aligned=frozenset({"keep_stride1"}))
    found = triton_module.entry("attention_forward", named, made, form, ("Out", "Lse"))
    assert (
        found.text
        == """\
@triton.jit
def attention_forward_from_jax(
    Q, K, V, Spans, Count, Order, SliceOf, keep, Whole, Real,
    scale, heads, q_len, kv_len, records, keep_size0, keep_size1, keep_size2,
    Out, Lse,
    ORIGIN_PER_BATCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):
    attention_forward(
        Q=Q,
        K=K,
        V=V,
        Out=Out,
        Lse=Lse,
        stride_qb=tl.cast(q_len, tl.int64) * (heads * 64),
        stride_qh=64,
        stride_qs=heads * 64,
        stride_qd=1,
        stride_kb=tl.cast(kv_len, tl.int64) * (heads // 2 * 64),
        stride_kh=64,
        stride_ks=heads // 2 * 64,
        stride_kd=1,
        stride_vb=tl.cast(kv_len, tl.int64) * (heads // 2 * 48),
        stride_vh=48,
        stride_vs=heads // 2 * 48,
        stride_vd=1,
        stride_ob=tl.cast(q_len, tl.int64) * (heads * 48),
        stride_oh=48,
        stride_os=heads * 48,
        stride_od=1,
        scale=tl.cast(scale, tl.float32),
        heads=tl.cast(heads, tl.int32),
        q_len=tl.cast(q_len, tl.int32),
        kv_len=tl.cast(kv_len, tl.int32),
        Spans=Spans,
        Count=Count,
        Order=Order,
        SliceOf=SliceOf,
        records=tl.cast(records, tl.int32),
        h_origin=tl.load(Whole + 0),
        q_origin=tl.load(Whole + 1),
        k_origin=tl.load(Whole + 2),
        s0=tl.load(Whole + 3),
        s1=tl.load(Whole + 4) != 0,
        s2=tl.load(Real + 0),
        keep=keep,
        keep_size0=tl.cast(keep_size0, tl.int32),
        keep_size1=tl.cast(keep_size1, tl.int32),
        keep_size2=tl.cast(keep_size2, tl.int32),
        keep_stride0=keep_size1 * tl.cast(keep_size2, tl.int64),
        keep_stride1=(keep_size2) // 16 * 16,
        keep_stride2=1,
        ORIGIN_PER_BATCH=ORIGIN_PER_BATCH,
        BLOCK_Q=BLOCK_Q,
        BLOCK_K=BLOCK_K,
    )
"""
    )


def closed(mask):
    return make_plan(
        ProgramExprs(mask), facts=ProgramFacts(bounds=Bounds(*(ir.var(n) for n in ("k0", "k0", "q0", "q1"))))
    )


def block(made, **options):
    found = triton_tiles.jax_target(made, G, "bfloat16", **options)
    return found.block_q, found.block_k


def test_tiles_are_those_of_the_mask():
    window = causal & (q - k < ir.param("w"))
    long, medium, short = (
        tuple(TABLE["sm_90 by pointers"]["forward"][w][str(G.head_dim)][:2]) for w in ("long", "medium", "short")
    )
    assert block(closed(causal)) == long
    assert block(make_plan(ProgramExprs(causal))) == medium  # reads a table of spans
    assert block(closed(causal & (q - k < 128))) == short
    assert block(closed(window)) == long
    assert block(closed(window), narrow=True) == medium
    assert block(closed(causal), tile=(64, 32)) == (64, 32)


def test_jax_tiles_fit_the_gpu_that_is_here(monkeypatch):
    device = SimpleNamespace(compute_capability="12.1", core_count=48, shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(jax, "devices", lambda kind: [device])
    monkeypatch.setattr(triton_tiles, "_first_of_jax", triton_tiles._first_of_jax.__wrapped__)
    assert triton_tiles.jax_gpu() == (architecture_of("sm_121"), 48, 101_376)
    found = triton_tiles.jax_target(closed(causal), G, "bfloat16")
    assert found.limit == 101_376
    assert shared("forward", 128, found.block_q, found.block_k, found.num_stages, products="mma") <= 101_376


def test_float32_is_multiplied_as_jax_is_told():
    made = closed(causal)
    assert triton_tiles.jax_target(made, G, "float32").precision == "ieee"
    with jax.default_matmul_precision("tensorfloat32"):
        found = triton_tiles.jax_target(made, G, "float32")
    assert {t.precision for t in (found, found.dq, found.dkv, found.decode)} == {"tf32"}


def test_a_gpu_that_is_not_here_is_named_by_the_mesh():
    assert triton_tiles.jax_gpu() == (architecture_of("sm_90"), 132, 0)
    named = {"NVIDIA A100-SXM4-80GB": "sm_80", "NVIDIA L40S": "sm_89", "AMD Instinct MI300X": "gfx942"}
    named |= {"NVIDIA GB10": "sm_121", "NVIDIA GB200": "sm_100", "Tesla T4": "sm_75", "NVIDIA Thor": "sm_110"}
    for kind, arch in named.items():
        device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            assert triton_tiles.jax_gpu()[:2] == (architecture_of(arch), 100)


@pytest.mark.parametrize(
    ("changes", "dtype", "expected"),
    [
        ({}, "bfloat16", ""),
        ({}, "float64", "the Triton kernel takes float32, float16 or bfloat16, not float64; float64 runs on the CPU"),
        ({"heads": 65_536, "kv_heads": 1}, "float16", "a call of Triton's kernels has at most 65535 heads, this one"),
        ({"batch": 70_000}, "float16", "a call of Triton's kernels has at most 65535 batch entries, this one 70000"),
    ],
)
def test_triton_jax_refuses_unsupported_calls(changes, dtype, expected):
    found = triton_jax.refuses(make_plan(ProgramExprs(causal)), replace(G, **changes), dtype, {})
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_a_table_of_another_rank_is_a_reason():
    made = make_plan(ProgramExprs(lookup("doc", (q,)) >= k))
    assert triton_jax.refuses(made, G, "float16", {"t0": (4096,)}) == ""
    assert triton_jax.refuses(made, G, "float16", {"t0": (2, 9)}) == (
        "table `doc` has 1 axes of at least one entry, not shape [2, 9]"
    )


def test_a_cpu_needs_the_interpreter(monkeypatch):
    case = Case(causal)

    def call(platform):
        inputs = cases.kernel_inputs(case, Target("triton", 64, 64), platform=platform)
        return triton_jax.forward(inputs, *cases.arrays(case))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="Triton kernels need a GPU: on the CPU take backend='xla' or 'cpp', or set"):
        call("cpu")
    with pytest.raises(BackendError, match="no Triton kernel runs on tpu; they run on cuda and rocm"):
        call("tpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1 is set, so that no Triton kernel is compiled; unset it"):
        call("cuda")


def test_without_jax_triton_the_extra_is_named(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    triton_jax.triton_call.memo.clear()
    with pytest.raises(BackendError, match="(?s)cannot be imported here: .*" + re.escape(pip_install("jax-gpu"))):
        triton_jax.triton_call()
    triton_jax.triton_call.memo.clear()


def test_triton_jax_calls_without_queries_give_zeros():
    case = Case(causal, score * lookup("x", (k,), FLOAT), q_len=0, tables={"x": np.ones(150, np.float32)})
    inputs, arrays = cases.kernel_inputs(case, Target("triton", 64, 64), spans=None), cases.arrays(case)
    out, lse, top = triton_jax.forward(inputs, *arrays)
    assert (out.shape, lse.shape, top.shape) == ((1, 0, 2, 32), (1, 2, 0), (1, 2, 0))
    given = ForwardResults(out, lse), Cotangents(out)
    found = triton_jax.backward(inputs, *arrays, *given, grad_names=frozenset({"k", "t0"}))
    assert {n: (x.shape, bool(jnp.any(x))) for n, x in found.items()} == {
        "k": ((1, 150, 2, 32), False), "t0": ((150,), False),
    }  # fmt: skip
