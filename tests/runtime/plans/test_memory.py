"""Memory over many different calls, where the tables of remembered answers grow, up to bounds, and nothing else does;
and of one call, beside its arrays and its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiers import default_only

from frisket.grammar import memo
from frisket.runtime.machine import cpp_build

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
PROGRAM = """
import gc, sys
sys.path.insert(0, {folder!r})
import torch
import memory
memory.DTYPES = (torch.float64,)
gc.freeze()  # what was imported is not looked through again, ten times
{leak}
found = list(memory.many({calls}))
print(memory.grown(found), found[-1][2])
"""
LEAK = """
call, kept = memory.call, []
memory.call = lambda draw: kept.append(call(draw) or bytearray(200_000))
"""


def grown(calls: int, leak: str = "") -> tuple[float, float]:
    """MiB that a process grew beyond its tables over calls, and MiB of its tables."""
    program = PROGRAM.format(folder=str(BENCHMARKS), leak=leak, calls=calls)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    beyond, tables = map(float, done.stdout.split())
    return beyond, tables


linux = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux counts memory so")


@pytest.mark.exhaustive
@linux
@pytest.mark.parametrize("calls", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_calls(calls):
    beyond, tables = grown(calls)
    assert beyond < 32
    assert tables < memo.BUDGET / 2**20


@linux
@pytest.mark.exhaustive
def test_a_leak_would_be_seen():
    assert grown(400, LEAK)[0] > 48


BESIDE = """
import json, sys
sys.path.insert(0, {folder!r})
import torch
import memory
torch.set_num_threads({threads})
print(json.dumps([memory.beside({mask!r}, length, {run!r}) for length in {lengths}]))
"""


def beside(run: str, mask: str, threads: int, *lengths: int) -> list[dict[str, float]]:
    """MiB that a call takes beside its arrays and its results, for each length."""
    program = BESIDE.format(folder=str(BENCHMARKS), run=run, mask=mask, threads=threads, lengths=lengths)
    env = {n: x for n, x in os.environ.items() if n != "XLA_FLAGS"}  # more devices bring more threads
    env |= {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads)}  # each keeps memory
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout)


@linux
@pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason())
@pytest.mark.parametrize("mask", default_only(["causal & window(256)", "causal & doc[q] == doc[k]"]))
def test_memory_of_a_native_call_grows_with_its_tokens_alone(mask):
    few, many = beside("torch, cpp", mask, 24, 1 << 15, 1 << 18)
    more = many["query"] - few["query"]  # 14 MiB; a score a pair of tokens would be 256 GiB
    assert many["forward"] - few["forward"] < 6 * more  # a query for each thread would be 24 of them
    assert many["forward and backward"] - few["forward and backward"] < 12 * more


@linux
@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["torch, aten", "jax, cpp", "jax, xla"])
@pytest.mark.parametrize("mask", ["causal & window(256)", "causal & doc[q] == doc[k]"])
def test_memory_of_a_call_is_not_that_of_its_pairs(mask, run):
    few, many = beside(run, mask, 2, 1 << 14, 1 << 17)
    for kind in ("forward", "forward and backward"):
        assert many[kind] - few[kind] < 16 * (many["query"] - few["query"])
