"""Blocks on threads, and without: an interpreter that ends starts none, and a process may have too many."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from frisket.grammar import memo
from frisket.lowering.aten import steps

AT_EXIT = """
import atexit, torch, frisket as fk
torch.set_num_threads(2)
q, k, v = torch.randn(3, 1, 4, 300, 16)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
def call(text):
    out = fk.compile(text, backend="aten")(q, k, v)
    print((out - want).abs().max().item() < 1e-5)
{before}
atexit.register(call, "causal & window(900)")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "before",
    [pytest.param("", id="no pool", marks=pytest.mark.exhaustive), pytest.param("call('causal')", id="a pool")],
)
def test_calls_at_exit(before):
    text = AT_EXIT.format(before=before)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * (1 + bool(before)), done.stderr
    assert not done.stderr


def test_thread_pool_works_where_no_second_thread_starts(monkeypatch):
    """The first thread of a pool does not wait for a second one that cannot be started."""
    before, started, start = torch.get_num_threads(), [], threading.Thread.start

    def one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    torch.set_num_threads(3)
    steps._pool.memo.clear()
    monkeypatch.setattr(threading.Thread, "start", one)
    try:
        done = []
        steps.spread(done.append, [1, 2, 3, 4])
        assert sorted(done) == [1, 2, 3, 4]
        memo.clear()
        started[0].join(30)
        assert not started[0].is_alive()
    finally:
        monkeypatch.undo()
        torch.set_num_threads(before)
        steps._pool.memo.clear()
