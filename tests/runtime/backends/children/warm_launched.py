"""Run by test_warm_gpu.py without an interpreter: kernels compiled by `fk.warm(arch="sm_90")` in another process, and
calls that launch them by Triton's own code, up to the functions of the CUDA driver."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton
from runtime.backends.children import triton_driver
from triton import knobs

import frisket as fk
from frisket.runtime.backends import triton as triton_backend
from frisket.runtime.backends.base import RECORDS, register
from frisket.runtime.backends.triton import grids

BIAS = "param bias: float[_, _]\nscore = score + bias[h, k]"
SIZES = {"q_len": 4096, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
KERNELS = {"attention_forward", "attention_delta", "attention_dq", "attention_dkv"}
FUSED = {
    "attention_forward",
    "attention_delta",
    "attention_backward",
    "attention_convert",
}  # of a call that names Gluon
WARM = "import sys; from runtime.backends.children import warm_launched as x; print(x.warmed(sys.argv[1]))"


def attention(name):
    if name == "gluon":
        return fk.compile("causal", backend="gluon")
    if name == "learned":
        return fk.compile("causal & window(99)", BIAS, bias=torch.zeros(4, 4096, requires_grad=True), backend="triton")
    return fk.compile("causal & window(99)", sinks=0.5, dropout=0.1, backend="triton")


def warmed(name):
    return fk.warm(attention(name), SIZES, arch="sm_90")


@pytest.fixture
def misses(monkeypatch):
    """The kernels that were not on disk."""
    found = []
    triton_driver.install()
    register(replace(RECORDS["gluon"], reason=lambda framework=None: ""))
    monkeypatch.setattr(triton_backend, "_on_torch", lambda: "")
    monkeypatch.setattr(grids, "INTERPRETED", 132)
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: None if cache_hit else found.append(src.name)
    )
    return found


@pytest.mark.parametrize("name", ["gluon", "learned", "sinks"])
def test_calls_find_every_kernel_that_was_warmed(name, misses, monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    where = {"TRITON_CACHE_DIR": str(tmp_path), "FRISKET_CACHE_DIR": str(tmp_path / "text")}
    env = {**os.environ, **where, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", WARM, name], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    kernels = FUSED if name == "gluon" else KERNELS
    assert len(lines) >= len(kernels)
    assert all(line.startswith("built") for line in lines), lines
    shapes = ((SIZES["heads"], 64), (SIZES["kv_heads"], 64), (SIZES["kv_heads"], 64))
    q, k, v = (torch.zeros(2, h, 4096, d, dtype=torch.bfloat16, requires_grad=True) for h, d in shapes)
    att, more = attention(name), {"seed": 3} if name == "sinks" else {}
    compiled, launched = len(triton_driver.compiled), len(triton_driver.launched)
    with torch.no_grad():
        att(q, k, v, **more)
    out = att(q, k, v, **more)
    out.backward(torch.ones_like(out))
    ran = {x.kernel for x in triton_driver.launched[launched:]}
    assert ran >= kernels
    assert len(triton_driver.compiled) - compiled >= len(ran)
    assert misses == []
    # another mask is on no disk: the count counts
    fk.compile(f"causal & q % {'gls'.index(name[0]) + 7} < 4", backend="triton")(q.detach(), k.detach(), v.detach())
    assert misses == ["attention_forward"]


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_kernels_of_other_architectures_compile(arch, monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    report = fk.warm("causal", SIZES, gradients=False, arch=arch)
    assert [row.state for row in report.rows] == ["built"], report
    assert fk.warm("causal", SIZES, gradients=False, arch=arch).built == 0


def test_a_process_with_another_gpu_is_refused(misses):
    with pytest.raises(fk.FrisketError, match="this process runs Triton kernels for 90, and arch='sm_80' is another"):
        fk.warm("causal", SIZES, gradients=False, arch="sm_80")


def test_a_kernel_that_cannot_be_compiled_is_a_row(monkeypatch):
    def refuses(src, **more):
        raise RuntimeError("first line\nPassManager::run failed")

    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    monkeypatch.setattr(triton.compiler, "compile", refuses)
    (row,) = fk.warm("causal & q % 9 < 2", SIZES, gradients=False, arch="sm_90").rows
    assert (row.state, row.why) == ("failed", "PassManager::run failed")
