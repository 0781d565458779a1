"""Memory over many different calls: the tables of remembered answers grow, up to bounds, and nothing else does."""

import subprocess
import sys
from pathlib import Path

import pytest

from frisket.grammar import memo

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import torch
import memory
memory.DTYPES = (torch.float64,)
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


@linux
@pytest.mark.parametrize("calls", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_calls(calls):
    beyond, tables = grown(calls)
    assert beyond < 32
    assert tables < memo.BUDGET / 2**20


@linux
@pytest.mark.matrix
def test_a_leak_would_be_seen():
    assert grown(400, LEAK)[0] > 48
