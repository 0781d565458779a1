"""C++ that gets no memory says so: every allocation in turn fails, and a process that may have no more."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import frisket as fk
from frisket.dsl.errors import BackendError
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

SCARCE = """
#include <stdint.h>
#include <stdlib.h>
extern "C" {
int64_t left;
void *scarce_malloc(size_t n) { return left-- > 0 ? malloc(n) : nullptr; }
void *scarce_calloc(size_t n, size_t m) { return left-- > 0 ? calloc(n, m) : nullptr; }
void *scarce_realloc(void *p, size_t n) { return left-- > 0 ? realloc(p, n) : nullptr; }
}
#define malloc scarce_malloc
#define calloc scarce_calloc
#define realloc scarce_realloc
"""


@pytest.fixture
def scarce(monkeypatch):
    """`scarce(n)`: libraries built from here on get n allocations each."""
    real, built = native_build.library, []

    def library(source, *rest):
        built.append(real(SCARCE + source, *rest))
        return built[-1]

    def allow(n):
        for one in built:
            ctypes.c_int64.in_dll(one, "left").value = n

    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setattr(native_build, "library", library)
    return allow


def refused(allow, run, match):
    """How many allocations `run` takes: with fewer it raises."""
    for n in range(100):
        allow(n)
        try:
            run()
            return n
        except BackendError as error:
            if match not in str(error):
                raise
    raise AssertionError("it never had enough")


@pytest.mark.parametrize(
    ("text", "shape", "least"),
    [
        ("causal & t[q] == t[k]", (300,), 4),  # the trees of a table, and pieces that grow
        pytest.param("t[h, q] >= t[h, k]", (2, 300), 4, marks=pytest.mark.exhaustive),
        pytest.param("t[q, k] > 3", (300, 300), 4, marks=pytest.mark.exhaustive),
    ],
)
def test_native_planner_reports_each_failed_allocation(scarce, text, shape, least):
    torch = pytest.importorskip("torch")
    table = torch.from_numpy(np.random.default_rng(0).integers(0, 9, shape))
    att = fk.compile(text, backend="cpp")
    made = []

    def run():
        made.append(att.plan(300, 300, 1, 2, flat=True, t=table).spans((16, 16)))

    assert refused(scarce, run, "the planner of this mask ran out of memory") >= least
    scarce(10**6)
    run()
    torch.testing.assert_close(made[0].bounds, made[1].bounds)


@pytest.mark.parametrize(
    "length", [pytest.param(200, id="rows"), pytest.param(1, id="one query", marks=pytest.mark.exhaustive)]
)
def test_native_kernel_reports_each_failed_allocation(scarce, monkeypatch, length):
    torch = pytest.importorskip("torch")
    from frisket.runtime.backends.cpp import torch as native_torch

    monkeypatch.setattr(native_torch, "library", native_build.library)
    q, k, v = (torch.randn(1, 2, n, 16 if length > 1 else 24) for n in (length, 200, 200))
    bias = torch.randn(400, requires_grad=True)  # its gradient is summed in memory of its own
    att = fk.compile("q + 201 >= k", score="score + bias[q - k + 200]", backend="cpp")  # a kernel of this test alone
    out = []

    def forward():
        out.append(att(*(x.detach().requires_grad_() for x in (q, k, v)), bias=bias))

    needed = refused(scarce, forward, "ran out of memory")
    assert needed >= 2
    assert refused(scarce, lambda: out[-1].sum().backward(retain_graph=True), "ran out of memory") >= 3


CHILD = """
import resource
import numpy as np
import frisket as fk
from frisket.dsl.errors import BackendError
from frisket.lowering.planner import planner as flat
from frisket.runtime.plans import run_cpp as flat_native

mask = fk.mask("t[q, k] > 3").bind(t=np.zeros((2, 2), np.int64))
plan = flat.planner(mask.expr, frozenset())
run = flat_native.function(plan)
at = (np.zeros(1, np.int64),) * 4

def planned(n):
    return flat_native.called(run, plan, at, (1, 1, n, n), {"t": np.ones((n, n), np.int64)}, n, n, (256, 256), 64)

planned(2)
held = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (held + (96 << 20),) * 2)
try:
    planned(2048)
except BackendError as error:
    print(error)
print(planned(64)[1].sum())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit is not kept")
def test_a_process_that_may_have_no_more():
    found = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == [
        "the planner of this mask ran out of memory; free some, or give it shorter tables", "0",
    ], found.stderr  # fmt: skip


def test_native_code_calls_no_function_that_ends_the_process():
    root = Path(fk.__file__).parents[2]
    words = re.compile(r"\b(abort|exit|_exit|terminate|throw|assert|std::\w+|new)\b *\(?")
    found = {
        f"{path.name}: {line.strip()}"
        for folder in ("lowering", "runtime")
        for path in (root / folder).rglob("*.[ch]pp")
        for line in path.read_text().splitlines()
        if words.search(line.split("//")[0])
    }
    assert not found


COUNTED = """
#include <stdint.h>
#include <stdlib.h>
extern "C" {
int64_t largest;
void *counted_malloc(size_t n) { if ((int64_t)n > largest) largest = n; return malloc(n); }
}
#define malloc counted_malloc
"""


@pytest.mark.parametrize(("keys", "least", "most"), [(5_000, 74, 80), (24_000, 200, 256)])
def test_sums_of_parts_take_no_more_than_256_mebibytes(monkeypatch, keys, least, most):
    """Eight threads divide a key head into eight parts, which add up all keys each; where they would take more, there
    are fewer parts."""
    torch = pytest.importorskip("torch")
    from frisket.runtime.backends.cpp import torch as native_torch

    built, real = [], native_build.library
    monkeypatch.setattr(native_torch, "library", lambda x, *rest: built.append(real(COUNTED + x, *rest)) or built[-1])
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        q, k, v = (torch.randn(1, 1, n, 256, requires_grad=True) for n in (512, keys, keys))
        att = fk.compile("k < 1 | k >= n - 1", n=keys, backend="cpp")
        out = att(q, k, v)
        torch.autograd.grad(out.sum(), (q, k, v))
    finally:
        torch.set_num_threads(threads)
    assert least << 20 <= max(ctypes.c_int64.in_dll(x, "largest").value for x in built) - 64 <= most << 20
