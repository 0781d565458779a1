"""Run by test_triton_table.py without TRITON_INTERPRET: what AMD's compiler makes of kernels for GPUs that are not
here."""

import re
from dataclasses import replace
from itertools import product

import pytest

import frisket as fk
from frisket.lowering.architectures import GPUS
from frisket.lowering.kernels.triton.module import Dims
from frisket.runtime.backends.triton.kernels import compile_reports, compiled_for
from frisket.runtime.backends.triton.tiles import of_kernel
from frisket.runtime.machine.modules import load_from_file

FIRST = 64, "float32"
AMD = [n for n, x in GPUS.items() if x.vendor == "amd"]


def stages(arch, dim=64, dtype="bfloat16", mask="causal", **sizes):
    return fk.compile(mask).stages(
        backend="triton", arch=arch, head_dim=dim, dtype=dtype, **{"q_len": 512, "kv_len": 512, "heads": 8} | sizes
    )


def assembly(made, arch, kernel="forward", dim=64, **options):
    name = f"attention_{kernel}"
    target = replace(of_kernel(name, made.target), **options)
    dims = Dims(dim, dim, "bfloat16")
    return compiled_for(arch, vars(load_from_file(made.source))[name], made.plan, target, dims).asm["amdgcn"]


@pytest.mark.parametrize("arch", AMD)
def test_keys_and_values_are_read_by_buffer_loads(arch):
    """As in launches, which say of arrays below 2 GiB that offsets have 32 bits."""
    text = assembly(stages(arch), arch)
    assert text.count("buffer_load") >= 6
    assert "global_load" not in text


def test_a_stage_ahead_is_copied_to_lds_past_registers():
    """Triton 3.6 does so where TRITON_HIP_USE_ASYNC_COPY=1 is set."""
    import triton

    text = assembly(stages("gfx950", 128), "gfx950", dim=128)
    copies = len(re.findall(r"buffer_load_\w+ .*\blds\b", text))
    assert copies >= 16 if triton.__version__ >= "3.9" else copies == 0


@pytest.mark.parametrize(("rows", "shape"), [(16, "16x16x16"), (32, "32x32x8")])
def test_rows_of_a_product_reach_the_compiler(rows, shape):
    text = assembly(stages("gfx942"), "gfx942", mfma=rows)
    assert set(re.findall(r"v_mfma_f32_(\w+?)_", text)) == {shape}


def test_wavefronts_of_a_simd_reach_the_compiler():
    """Registers for four wavefronts are a quarter of 512."""
    made = stages("gfx942", 128)
    texts = [assembly(made, "gfx942", dim=128, waves=n) for n in (0, 4)]
    few, many = (int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]) for text in texts)
    assert many <= 128 < few


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        FIRST,
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in product((64, 128, 256), ("float16", "float32"))
            if x != FIRST
        ),
    ],
)
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_kernels_of_radeon_gpus_compile(arch, dim, dtype):
    """Kernels of other dtypes than bfloat16, which the table of tiles_compiled.py has."""
    for sizes in ({}, {"q_len": 1, "kv_heads": 1}):
        made = stages(arch, dim, dtype, **sizes)
        for r in compile_reports(made.source, made.plan, made.target, Dims(dim, dim, dtype, 8 if sizes else 1), arch):
            assert r.fits, r
            assert r.mma or dtype == "float32" or r.kernel.endswith(("delta", "combine")), r
            if dim == 64 and dtype != "float32":
                assert r.spills == 0, r
