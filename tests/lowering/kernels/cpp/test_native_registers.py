"""Sums of products stay in registers: what g++ writes for the loops that take the time of a call."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest
from support.attention_cases import Case, causal
from support.native.image import Problem, flags_of

from frisket.runtime.machine import cpp_build

LOOPS = ("multiply", "add_few")  # products of packed tiles; weights of a few queries times values
STORED = re.compile(r"\tvmov[au]p[sd]\t%[yz]mm\d+, -?\d*\(%r[sb]p\)")

pytestmark = pytest.mark.skipif(
    not shutil.which("g++") or platform.machine() != "x86_64", reason="needs g++ for AVX2 and AVX-512"
)


def kept_in_memory(source, variant, folder):
    """How many registers each function of `LOOPS` stores on the stack."""
    (folder / "kernel.cpp").write_text(source)
    command = ["g++", *cpp_build.FLAGS, *flags_of(variant), "-S", "-o", "kernel.s", "kernel.cpp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    found, name = {}, None
    for line in (folder / "kernel.s").read_text().splitlines():
        if label := re.match(r"(_\w+)[.\w]*:", line):
            name = label[1] if any(f"{len(x)}{x}I" in label[1] for x in LOOPS) else None
        if name:
            found[name] = found.get(name, 0) + bool(STORED.match(line))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["avx2", "avx512"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 64), ("float32", 256), ("bfloat16", 128)])
def test_sums_stay_in_registers(dtype, dim, kind, variant, tmp_path):
    problem = Problem(Case(causal, dtype=dtype, dim=dim, v_dim=dim, q_len=1, kv_len=40, heads=4, kv_heads=1))
    found = kept_in_memory(problem.source(kind), variant, tmp_path)
    assert found
    assert not any(found.values()), found


@pytest.mark.exhaustive  # as the test above, of which it is a test
def test_sums_in_memory_are_seen(tmp_path):
    source = Problem(Case(causal, dim=64, v_dim=64, q_len=1, kv_len=40, heads=4, kv_heads=1)).source("forward")
    late = source.replace('_Pragma("GCC unroll 16")', "")
    assert late != source
    assert any(kept_in_memory(late, "avx512", tmp_path).values())
