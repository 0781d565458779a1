"""Operators and partition managers in a process with eight CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "children/operations_on_a_mesh.py"
USUAL = ["managers", "modes", "rings", "explicit", "inside shard map"]


@pytest.mark.parametrize(
    ("which", "checks"),
    [
        pytest.param("usual", USUAL, marks=pytest.mark.exhaustive),
        pytest.param("all", [*USUAL, "gradients", "partial fit", "linen cache"], marks=pytest.mark.slow),
    ],
)
def test_on_a_mesh(which, checks):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(SCRIPT), which], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == checks
