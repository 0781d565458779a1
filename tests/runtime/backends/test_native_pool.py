"""Threads of native kernels: whose they are, from several Python threads at once, after a fork."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from support.native.pool import pool_threads

from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine import cpp_build as native_pool
from frisket.runtime.machine.cpp_build import ONE_THREAD, Threads, of_torch

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

# Adds 0 .. n - 1, a little work for each, and counts what every worker did.
SUM = """#include <stdint.h>
typedef void (*Work)(void *, int64_t);
typedef void (*Parallel)(void *, Work, void *, int64_t);
struct Task { int64_t next, n, sum, *done; };
static void work(void *data, int64_t worker) {
    Task *task = (Task *)data;
    for (int64_t i; (i = __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED)) < task->n;) {
        volatile float x = 1;
        for (int j = 0; j < 3000; j++) x = x * 1.0001f;
        __atomic_fetch_add(&task->sum, i, __ATOMIC_RELAXED);
        task->done[worker]++;
    }
}
extern "C" int64_t sum(Parallel parallel, void *pool, int64_t n, int64_t workers, int64_t *done) {
    Task task = {0, n, 0, done};
    parallel ? parallel(pool, work, &task, workers) : work(&task, 0);
    return task.sum;
}
"""


def run(threads: Threads, n: int = 2000) -> list[int]:
    """How many items each worker did."""
    function = native_build.library(SUM).sum
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    function.restype = ctypes.c_int64
    workers, parallel, pool = threads
    done = (ctypes.c_int64 * workers)()
    assert function(parallel, pool, n, workers, done) == n * (n - 1) // 2
    assert sum(done) == n
    return list(done)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_follow_torch(two_threads):
    assert of_torch()[0] == 2
    torch.set_num_threads(3)
    assert len(run(of_torch())) == 3
    torch.set_num_threads(1)
    assert of_torch() == ONE_THREAD
    assert run(of_torch()) == [2000]


def child(code: str) -> str:
    """What another process prints; there `from tests_pool import` takes names of this module."""
    load = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tests_pool", {__file__!r})
def load():
    sys.modules["tests_pool"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""
    given = {k: v for k, v in os.environ.items() if not k.startswith("OMP")}
    text = load + textwrap.dedent(code).replace("from tests_pool", "load(); from tests_pool")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_thread_pool_runs_work_on_each_worker(workers):
    for _ in range(50):
        assert len(run(pool_threads(workers), 200)) == workers


def test_several_python_threads_at_once(two_threads):
    failures = []

    def many(number: int) -> None:
        try:
            for _ in range(30):
                run(of_torch() if number % 2 else pool_threads(3), 200)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=many, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert not failures


def forked() -> None:
    """What a child does: both kinds of threads, and torch's own choice."""
    torch.set_num_threads(2)
    for _ in range(5):
        run(of_torch(), 200)
        run(pool_threads(2), 200)


def test_after_a_fork(two_threads):
    """The child of a parent that has run kernels on both kinds of threads; GNU OpenMP alone would wait forever here."""
    forked()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            forked()
            grandchild = os.fork()
            if grandchild == 0:
                forked()
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        finally:
            os._exit(code)
    assert waited(pid) == 0
    forked()


def waited(pid: int) -> int | None:
    """A child's exit status; None if it hangs."""
    for _ in range(600):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.05)
    os.kill(pid, 9)
    return None


def test_a_multiprocessing_child(two_threads):
    forked()
    process = multiprocessing.get_context("fork").Process(target=forked)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.exhaustive
def test_a_child_that_loads_the_pool_itself():
    """The parent has run torch's threads only."""
    code = """
    import multiprocessing, torch
    torch.set_num_threads(2)
    torch.ones(2000, 2000) @ torch.ones(2000, 200)
    def work():
        from tests_pool import forked
        forked()
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    print(process.exitcode)
    """
    assert child(code) == "0"


def test_a_spawned_process_has_torchs_threads():
    assert native_pool._child() is False


THREADS = """
    import os, torch
    torch.set_num_threads(3)
    torch.ones(1000, 1000).sum()
    before = len(os.listdir("/proc/self/task"))
    from tests_pool import run, of_torch
    for _ in range(20): run(of_torch())
    print(len(os.listdir("/proc/self/task")) - before)
"""
PLANNING = """
    import os, threading
    import numpy as np, torch, frisket as fk
    from tests_pool import waited
    from frisket.runtime.torch.ready import CHANGES, ChangingTables

    q, k, v = torch.randn(3, 1, 2, 200, 16)
    att, rng = fk.compile("causal & doc[q] == doc[k]", backend="cpp"), np.random.default_rng(0)
    def call():
        att(q, k, v, doc=np.sort(rng.integers(0, 5, 200)))
    for _ in range(CHANGES[0] + 1):
        call()
    (steps,) = next(x for x in att.calls.values() if type(x) is ChangingTables).planners.values()
    planner, begun, over = steps.prepared, threading.Event(), threading.Event()
    def slow():
        made = planner()
        def plan(tables):
            begun.set()
            over.wait()
            return made(tables)
        plan.types, plan.bounds, plan.count = made.types, made.bounds, made.count
        return plan
    steps.prepared = slow
    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    steps.prepared = planner
    pid = os.fork()
    if pid == 0:
        call()
        os._exit(0)
    print(waited(pid))
    over.set()
    thread.join()
"""


@pytest.fixture(scope="module")
def printed():
    """What a new process prints of its threads, and of a child that plans."""
    return child(THREADS + PLANNING).split()


@pytest.mark.exhaustive
def test_beside_torch_they_are_torchs_own(printed):
    """No more threads are there than torch has anyway."""
    assert printed[0] == "0"


@pytest.mark.exhaustive
def test_a_child_plans_while_a_thread_of_its_parent_does(printed):
    assert printed[1] == "0"
