"""Calls on machines that lack small packages, and this checkout where nothing is installed, as images for GPUs are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import warnings
warnings.simplefilter("ignore")
import frisket as fk
"""
SMALL = {"platformdirs", "rich", "shtab", "lark"}
SAID = """
try:
    {call}
except fk.FrisketError as error:
    print(error)
"""
CALL = "print(*fk.compile('causal', backend={backend!r})(q, q, q).shape)\n"
CALLS = {
    "torch": "import torch; q = torch.randn(1, 2, 40, 16)\n" + CALL,
    "jax": "import jax.numpy as jnp; q = jnp.ones((1, 40, 2, 16))\n" + CALL,
}


def python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    known = {n: x for n, x in os.environ.items() if n not in ("FRISKET_CACHE_DIR", "PYTHONPATH")}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=known | {"OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True)


@pytest.mark.exhaustive
def test_small_packages_are_asked_for_where_no_folder_is_set(tmp_path):
    """A call of C++ without a cache folder, and one of Triton with it."""
    folder = f"import os; os.environ['FRISKET_CACHE_DIR'] = {str(tmp_path)!r}\n"
    calls = "import torch; q = torch.randn(1, 2, 40, 16)\n" + SAID.format(call=CALL.format(backend="cpp").strip())
    done = python(WITHOUT.format(names=SMALL) + calls + folder + CALL.format(backend="triton"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    *words, shape = done.stdout.splitlines()
    assert "platformdirs is not installed" in words[-1]
    assert "pip install platformdirs, or set FRISKET_CACHE_DIR" in words[-1]
    assert shape == "1 2 40 16"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("framework", "backend"),
    [("torch", "triton"), ("torch", "cpp"), ("torch", "aten"), ("jax", "cpp"), ("jax", "xla")],
)
def test_call_with_a_cache_folder_imports_no_small_package(framework, backend, tmp_path):
    code = WITHOUT.format(names=SMALL) + CALLS[framework].format(backend=backend)
    done = python(code, FRISKET_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == {"torch": ["1", "2", "40", "16"], "jax": ["1", "40", "2", "16"]}[framework]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_without_a_folder_the_error_says_what_to_set(backend):
    code = WITHOUT.format(names={"platformdirs"}) + CALLS["torch"].format(backend=backend)
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("frisket.dsl.errors.")
    assert "platformdirs is not installed" in last
    assert "pip install platformdirs, or set FRISKET_CACHE_DIR" in last


def test_benchmarks_run_from_a_checkout_without_installation(tmp_path):
    """-S leaves out what installs: packages come by PYTHONPATH, and no `.pth` file is read."""
    packages = [p for p in sys.path if p.endswith("site-packages")]
    path = os.pathsep.join([str(BENCHMARKS), *packages])
    code = """
import importlib.util, os, subprocess, sys
assert importlib.util.find_spec("frisket") is None
import checkout, frisket, frisket.dsl, frisket.integrations, frisket.lowering.plan, frisket.runtime.masks.mask
print(frisket.__file__)
print(frisket.mask("causal").visible_pairs(9, 9))
print(subprocess.run([sys.executable, "-S", "-c", "import frisket; print(frisket.__version__)"],
                     capture_output=True, text=True, check=True).stdout, end="")
"""
    done = python(code, "-S", PYTHONPATH=path, FRISKET_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    where, pairs, version = done.stdout.splitlines()
    assert Path(where) == BENCHMARKS.parent / "runtime" / "facade" / "__init__.py"
    assert pairs == "45"
    assert version.count(".") == 2
