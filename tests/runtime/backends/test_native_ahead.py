"""Native kernels before a call needs them, `fk.warm` and `frisket emit --build`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import frisket as fk
from frisket.dsl.errors import ParameterError
from frisket.runtime.cli.main import main
from frisket.runtime.machine import cpp_build, once
from frisket.runtime.machine.cpp_build import reason
from tests.support.forget import forget

pytestmark = pytest.mark.skipif(bool(reason()), reason=reason())

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo a compiler && exit
for last; do :; done
if ! grep -q frisket_probe "$last"; then
  echo run >> {folder}/runs
  while [ -e {folder}/wait ]; do sleep 0.02; done
  [ -e {folder}/fail ] && echo "it does not want to" >&2 && exit 1
fi
exec {real} "$@"
"""


class Machine:
    """A cache of its own and a compiler that waits, or fails, when it is told."""

    def __init__(self, folder):
        self.folder, self.cache = folder, folder / "cache"
        self.path = folder / "compiler"
        self.path.write_text(COMPILER.format(folder=folder, real=cpp_build.compiler()[0]))
        self.path.chmod(0o755)

    def tell(self, what, so=True):
        (self.folder / what).touch() if so else (self.folder / what).unlink()

    @property
    def runs(self):
        at = self.folder / "runs"
        return at.read_text().count("run") if at.exists() else 0

    @property
    def left(self):
        """Files that are neither a library nor a text."""
        return [p.name for p in (self.cache / "native").iterdir() if p.suffix not in (".so", ".cpp")]

    def script(self, text, **env):
        return subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", text], capture_output=True, text=True, timeout=300,
            env=os.environ | env,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(made.cache))
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setattr(once, "SAID", set())
    forget()
    yield made
    (tmp_path / "wait").unlink(missing_ok=True)
    forget()
    gc.collect()


SHAPE = {"q_len": 200, "head_dim": 16, "heads": 2}
DOC = np.repeat(np.arange(4), 50)
CALLS = """
import torch, numpy as np, frisket as fk
for mask, params, n, dtype in {calls!r}:
    params = {{name: np.array(x) for name, x in params.items()}}
    q = torch.randn(1, 2, n, 16, dtype=getattr(torch, dtype), requires_grad=True)
    k, v = (torch.randn(1, 2, 200, 16, dtype=q.dtype, requires_grad=True) for _ in "kv")
    fk.compile(mask, engines=False)(q, k, v, **params).float().sum().backward()
print("done")
"""


def test_calls_after_warm_start_no_compiler(machine):
    doc = {"doc": DOC.tolist()}
    calls = [
        ("causal & window(60)", {}, 200, "float32"), ("causal & window(60)", {}, 200, "bfloat16"),
        ("causal & same(doc)", doc, 200, "float32"), ("bottom_right", {}, 1, "float32"),
    ]  # fmt: skip
    wide = {"kv_len": 200, "head_dim": 16, "heads": 2}
    atts = [fk.compile(mask, engines=False, **({"doc": DOC} if given else {})) for mask, given, *_ in calls]
    sizes = [{"q_len": n, "dtype": dtype, **wide} for *_, n, dtype in calls]
    made = [fk.warm(att, x) for att, x in zip(atts, sizes, strict=True)]
    assert all(x.good for x in made), made
    assert made[0].built == 3, made
    again = fk.warm(fk.compile("causal & window(60)", engines=False), {"q_len": 200, **wide})
    assert again.built == 0
    assert {row.state for row in again.rows} == {"there"}
    runs = machine.runs
    machine.tell("fail")
    done = machine.script(CALLS.format(calls=calls))
    assert done.stdout == "done\n", done.stderr
    assert machine.runs == runs
    assert not machine.left
    new = machine.script(CALLS.format(calls=[("causal & window(60) | k < 3", {}, 200, "float32")]))
    assert "could not be built" in new.stderr, "the compiler does fail"
    assert machine.runs > runs


def test_a_call_of_jax_after_warm_starts_no_compiler(machine):
    pytest.importorskip("jax")
    made = fk.warm("causal & window(60)", SHAPE, framework="jax")
    assert made.good
    assert made.built == 3
    machine.tell("fail")
    text = """
import jax, frisket as fk
q = jax.numpy.ones((1, 200, 2, 16))
att = fk.compile("causal & window(60)")
jax.block_until_ready([att(q, q, q), jax.jit(jax.grad(lambda q: att(q, q, q).sum()))(q)])
print("done")
"""
    runs = machine.runs
    done = machine.script(text, JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR="")
    assert done.stdout == "done\n", done.stderr
    assert machine.runs == runs


def test_compilers_run_side_by_side(machine):
    machine.tell("wait")
    import threading

    told = threading.Thread(target=lambda: fk.warm("causal", SHAPE, {**SHAPE, "dtype": "bfloat16"}))
    told.start()
    cores, end = len(os.sched_getaffinity(0)), time.monotonic() + 60
    while machine.runs < min(cores, 5) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)
    assert machine.runs == min(cores, 5)
    machine.tell("wait", False)
    told.join()


def test_what_warm_cannot_compile(machine, monkeypatch):
    machine.tell("fail")
    made = fk.warm("causal", SHAPE)
    assert not made.good
    assert {row.state for row in made.rows} == {"failed"}
    assert "it does not want to" in made.rows[0].why
    assert "failed" in str(made).split()
    assert not machine.left
    assert not list((machine.cache / "native").glob("*.so"))[1:], "the probe alone"
    library = fk.warm(fk.compile("causal", backend="aten"), SHAPE)
    assert library.good
    assert library.rows[0].why == "backend 'aten' has no native kernel"
    engine = fk.warm("causal", {"q_len": 2048, "heads": 8}, gradients=False)
    assert [row.state for row in engine.rows] in (["none"], ["failed", "failed"])
    monkeypatch.setenv("CXX", "nobody")
    assert "no C++ compiler" in fk.warm("causal", SHAPE).rows[0].why


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (({"qlen": 3},), "a shape has no 'qlen'; it has q_len, kv_len"),
        (({"dtype": "int8"},), "dtype='int8': write float32"),
        (({"q_len": -3},), "q_len=-3: sizes are positive integers"),
    ],
)
def test_words_for_wrong_shapes(given, words):
    with pytest.raises(ParameterError, match="^" + words.replace("(", r"\(")):
        fk.warm("causal", *given)


def test_words_for_a_wrong_framework():
    with pytest.raises(ParameterError, match="framework='numpy': write 'torch' or 'jax'"):
        fk.warm("causal", framework="numpy")


def test_the_command_builds_what_calls_load(machine, capsys):
    command = ["emit", "causal & window(60)", "--build", "--q-len", "200", "--head-dim", "16"]
    first, again = [(main([*command, "--json"]), json.loads(capsys.readouterr().out))[1] for _ in range(2)]
    assert {row["state"] for row in first["kernels"]} == {"built"}
    assert {row["state"] for row in again["kernels"]} == {"there"}
    machine.tell("fail")
    done = machine.script(
        "import frisket as fk, torch; q, k, v = torch.randn(3, 1, 2, 200, 16, requires_grad=True); "
        "fk.compile('causal & window(60)', engines=False)(q, k, v).sum().backward()"
    )
    assert not done.returncode, done.stderr


def test_another_platform_has_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setenv("CXX", "another")  # the answer is kept by the environment
    (row,) = fk.warm("causal", SHAPE).rows
    assert row.state == "failed"
    assert "built on Linux only; this is darwin" in row.why
