"""C++ that gets no memory says so: every allocation in turn fails, and a process that may have no more."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import frisket as fk
from frisket.dsl.errors import BackendError
from frisket.runtime.backends.cpp import torch as native_torch
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

SCARCE = """
#include <stdint.h>
#include <stdlib.h>
extern "C" {
int64_t left, largest, held;
static void *counted(void *made) {
    if (made) __atomic_fetch_add(&held, 1, __ATOMIC_RELAXED);
    return made;
}
void *scarce_malloc(size_t n) {
    if ((int64_t)n > largest) largest = n;
    return left-- > 0 ? counted(malloc(n)) : nullptr;
}
void *scarce_calloc(size_t n, size_t m) { return left-- > 0 ? counted(calloc(n, m)) : nullptr; }
void scarce_free(void *p) {
    if (p) __atomic_fetch_sub(&held, 1, __ATOMIC_RELAXED);
    free(p);
}
void *scarce_realloc(void *p, size_t n) {
    if (left-- <= 0) return nullptr;
    return p ? realloc(p, n) : counted(realloc(p, n));
}
}
#define malloc scarce_malloc
#define calloc scarce_calloc
#define realloc scarce_realloc
#define free scarce_free
"""


class Scarce:
    """`self(n)`: libraries built from here on get n allocations each."""

    def __init__(self):
        self.build, self.built, self.left = native_build.library, [], 0

    def library(self, source, *rest):
        self.built.append(self.build(SCARCE + source, *rest))
        self(self.left)
        return self.built[-1]

    def __call__(self, n):
        self.left = n
        for one in self.built:
            ctypes.c_int64.in_dll(one, "left").value = n

    def held(self):
        """How many allocations have not been freed."""
        return sum(ctypes.c_int64.in_dll(one, "held").value for one in self.built)

    def largest(self):
        """The bytes of the largest allocation since the last call."""
        numbers = [ctypes.c_int64.in_dll(one, "largest") for one in self.built]
        most = max(x.value for x in numbers)
        for x in numbers:
            x.value = 0
        return most


@pytest.fixture(scope="module")
def libraries():
    """One for all tests: a program that two of them call finds its kernel without a look at `library`."""
    return Scarce()


@pytest.fixture
def scarce(libraries, monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setattr(native_build, "library", libraries.library)
    return libraries


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "shape", "least"),
    [
        ("causal & t[q] == t[k]", (300,), 4),  # the trees of a table, and pieces that grow
        pytest.param("t[h, q] >= t[h, k]", (2, 300), 4, marks=pytest.mark.exhaustive),
        pytest.param("t[q, k] > 3", (300, 300), 4, marks=pytest.mark.exhaustive),
    ],
)
def test_native_planner_reports_each_failed_allocation(scarce, text, shape, least):
    table = torch.from_numpy(np.random.default_rng(0).integers(0, 9, shape))
    att = fk.compile(text, backend="cpp")
    made = []

    def run():
        made.append(att.plan(300, 300, 1, 2, flat=True, t=table).spans((16, 16)))

    assert refused(scarce, run, "the planner of this mask ran out of memory") >= least
    scarce(10**6)
    run()
    torch.testing.assert_close(made[0].bounds, made[1].bounds)


ENDS = "k < 1 | k >= n - 1"


def called(q, k, v):
    """The result of a kernel that both tests below build, as training calls it: the gradient of `bias` is summed in
    memory of its own."""
    att = fk.compile(ENDS, score="score + bias[clamp(q - k, 0, 99)]", n=k.shape[2], backend="cpp")
    return att(*(x.detach().requires_grad_() for x in (q, k, v)), bias=torch.ones(100, requires_grad=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "length", [pytest.param(200, id="rows"), pytest.param(1, id="one query", marks=pytest.mark.exhaustive)]
)
def test_native_kernel_reports_each_failed_allocation(scarce, monkeypatch, length):
    monkeypatch.setattr(native_torch, "library", native_build.library)
    q, k, v = (torch.randn(1, 2, n, 256 if length > 1 else 24) for n in (length, 200, 200))
    out = []
    needed = refused(scarce, lambda: out.append(called(q, k, v)), "ran out of memory")
    assert needed >= 2
    held = scarce.held()  # forwards keep memory of their workers
    assert refused(scarce, lambda: out[-1].sum().backward(retain_graph=True), "ran out of memory") >= 3
    assert scarce.held() == held


@pytest.mark.exhaustive
def test_column_sums_report_each_failed_allocation(scarce, monkeypatch):
    monkeypatch.setattr(native_torch, "library", native_build.library)
    q, k, v = (torch.randn(1, 2, 200, 24) for _ in range(3))
    att, found, held = fk.compile(ENDS, n=200, backend="cpp"), [], scarce.held()

    def run():
        found.append(att.statistics(q, k, v, columns=True, lse=torch.zeros(1, 2, 200)).columns)

    assert refused(scarce, run, "ran out of memory") >= 2
    assert scarce.held() == held
    scarce(10**6)
    run()
    assert torch.equal(*found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("keys", "least", "most"), [(5_000, 74, 80), (24_000, 200, 256)])
def test_sums_of_parts_take_no_more_than_256_mebibytes(scarce, monkeypatch, keys, least, most):
    """Eight threads divide a key head into eight parts, which add up all keys each; where they would take more, there
    are fewer parts."""
    monkeypatch.setattr(native_torch, "library", native_build.library)
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    scarce(10**6)
    try:
        out = called(*(torch.randn(1, 1, n, 256) for n in (512, keys, keys)))
        scarce.largest()
        out.sum().backward()
    finally:
        torch.set_num_threads(threads)
    assert least << 20 <= scarce.largest() - 64 <= most << 20


CHILD = """
import resource
import numpy as np
import frisket as fk
from frisket.dsl.errors import BackendError
from frisket.lowering.plan import Problem
from frisket.lowering.planner import planner as flat
from frisket.runtime.plans import run as flat_native

mask = fk.mask("t[q, k] > 3").bind(t=np.zeros((2, 2), np.int64))
plan = flat.planner(mask.expr, frozenset())
run = flat_native.function(plan)
at = (np.zeros(1, np.int64),) * 4

def planned(n):
    place = flat_native.SpanRequest(at, Problem(n, n), (256, 256))
    return flat_native.called(run, plan, place, {"t": np.ones((n, n), np.int64)})

planned(2)
held = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (held + (96 << 20),) * 2)
try:
    planned(2048)
except BackendError as error:
    print(error)
print(planned(64)[1].sum())
"""


@pytest.mark.exhaustive
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
