"""The operator that CONTRIBUTING.md adds in one file, on the targets of a CPU, beside the float64 reference."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frisket.runtime.machine.cpp_build import reason

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add an operator\n")[1].split("\n## ")[0]
FILE, TEXT = re.search(r"`(\w+)\.py`\n\n```python\n(.*?)```", SECTION, re.S).groups()

HEAD = f"""
import {FILE}
import numpy as np
import torch

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import build, param, var, walk
from frisket.dsl.program import parse_expression
from frisket.dsl.types import FLOAT

x = np.concatenate([np.linspace(-9, 9, 97), [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1e300]])
with np.errstate(over="ignore"):
    e, want = build("sech", param("x", FLOAT)), 1 / np.cosh(x)
SCORE = "score + sech(score) * sech(float(k - q) * 0.1)"


def attends(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    fk.compile("causal", SCORE, backend=backend).check(q, k, v).require()
"""
TORCH = """
np.testing.assert_allclose(evaluate(e, {"x": x}), want, rtol=1e-15)
assert str(parse_expression("sech(score) > 0.5")) == "sech(score) > 0.5"

from frisket.lowering.aten.expr import TileProgram
found = TileProgram(e, torch.float64)({"x": torch.from_numpy(x)}, {})
np.testing.assert_allclose(found, want, rtol=1e-14)
attends("aten")

from frisket.lowering.kernels.torch_mask_mod import score_mod
names = {"torch": torch}
exec(score_mod(build("sech", var("score", FLOAT)), {}, reach={}), names)
found = names["make"]()(torch.from_numpy(x), *[torch.zeros(())] * 4)
np.testing.assert_allclose(found, want, rtol=1e-14)
"""
JAX = """
from frisket.lowering.kernels.jnp_expr import evaluate as on_jax
found = on_jax(e, {"x": x}, {}, int64=False, float64=False)
np.testing.assert_allclose(found, want, rtol=2e-6, atol=1e-38)
"""
NATIVE = 'attends("cpp")'


def child(tmp_path, text):
    (tmp_path / f"{FILE}.py").write_text(TEXT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    command, env = [sys.executable, "-c", HEAD + text], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_operator_of_contributing_runs_in_torch(tmp_path):
    child(tmp_path, TORCH)  # in a process of its own: modules read the table of operators when they are imported


@pytest.mark.exhaustive
def test_operator_of_contributing_runs_in_jax(tmp_path):
    child(tmp_path, JAX)


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason()), reason=reason())
def test_operator_of_contributing_runs_in_native_code(tmp_path):
    child(tmp_path, NATIVE)
