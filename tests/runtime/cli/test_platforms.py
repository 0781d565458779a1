"""Machines without native kernels: library calls, caches and commands run where Python says it is macOS or Windows.

The platform is a pretence in a process of its own: what the other one lacks is taken from `os` and from the modules
once torch and JAX are imported.
"""

import subprocess
import sys

import pytest
from support.tiers import default_only

GONE = {
    "darwin": ("sched_getaffinity",),
    "win32": ("getuid", "geteuid", "fork", "register_at_fork", "sched_getaffinity"),
}
CODE = """
import os, sys
import jax, numpy as np, rich.console, torch
platform, gone, graphs = sys.argv[1], sys.argv[2].split(), sys.argv[3] == "graphs"
if graphs:
    import torch.fx.experimental.validator
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(3))  # imports what it needs
x = jax.numpy.asarray(np.ones((1, 80, 4, 16), np.float32))
sys.platform = platform
for name in gone:
    delattr(os, name)
if platform == "win32":
    sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios")))
import frisket as fk
from frisket.caches.torch import KVCache
from frisket.runtime.cli.main import main

q, k, v = (torch.randn(1, 4, 80, 16, requires_grad=True) for _ in "qkv")
doc = np.arange(80) // 30
att = fk.compile("causal & same(doc) & window(40)", "softcap(20)", doc=doc)
assert att.check(q, k, v).good
if graphs:
    graph = torch.compile(lambda q, k, v: att(q, k, v), backend="aot_eager")
    assert torch.allclose(graph(q, k, v), att(q, k, v), atol=1e-5)
assert np.allclose(jax.jit(att)(x, x, x), 1, atol=1e-5)
cache = KVCache.create(batch=1, capacity=128, kv_heads=4, head_dim=16)
assert cache.attention(fk.compile("causal"), *(x.detach() for x in (q, k, v))).shape == q.shape
(row,) = fk.warm("causal").rows
assert row.state == "failed" and f"Linux only; this is {platform}" in row.why
try:
    fk.compile("causal", backend="cpp")(q, k, v)
except fk.BackendError as error:
    assert "native kernels are built on Linux only" in str(error)
else:
    raise AssertionError
for command in (["doctor"], ["explain", "causal"], ["library"]):
    assert main(command) == 0
print("done")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("graphs", default_only(["graphs", "no graphs"], "no graphs"))
@pytest.mark.parametrize("platform", default_only(GONE, "win32"))
def test_library_calls_run_elsewhere(platform, graphs, tmp_path, monkeypatch):
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    command = [sys.executable, "-c", CODE, platform, " ".join(GONE[platform]), graphs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
