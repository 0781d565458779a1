"""The oldest and the newest versions that frisket's extras allow: `python tests/versions.py [NAME ...] [--list]`.

Each environment is made in a temporary folder, with packages from PyPI, runs a slice of the tests on the CPU, and is
deleted. Results go to tests/versions.json, which `python docs/compatibility.py` puts on a page. Pythons are
found on the PATH, or with pyenv. `--python FOLDER/bin/python` runs the slice in an environment that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "versions.json"
TOOLS = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "absl-py", "cloudpickle>=3", "flatbuffers"]
OLDEST = ["lark==1.2.1", "rich==13.0.0", "platformdirs==4.0.0", "shtab==1.13.0"]
NEWEST = ["lark", "rich", "platformdirs", "shtab", "numpy", "torch", "jax", "triton"]
LANGUAGE = [
    "tests/dsl/test_language.py", "tests/dsl/test_bad_text.py", "tests/dsl/test_library.py",
    "tests/lowering/test_dense.py", "tests/lowering/analysis/test_layout_exact.py", "tests/runtime/explore",
]  # fmt: skip
FRAMEWORKS = [
    "tests/runtime/attention/test_attention.py", "tests/runtime/attention/test_both_worlds.py",
    "tests/runtime/attention/test_decode_steps.py", "tests/runtime/torch/test_autograd_torch.py",
    "tests/runtime/torch/test_torch_compile.py", "tests/runtime/jax/test_jax_transforms.py",
    "tests/runtime/jax/test_jax_learned.py", "tests/runtime/backends/test_native_torch.py",
    "tests/runtime/backends/test_native_jax.py", "tests/runtime/flex/test_flex_attention.py",
    "tests/runtime/flex/test_flex_compile.py", "tests/runtime/flex/test_flex_graph_masks.py",
    "tests/runtime/caches/test_caches_torch.py", "tests/runtime/caches/test_caches_jax.py",
    "tests/lowering/kernels/triton/test_triton_interpret.py", "tests/runtime/weights", "tests/runtime/select",
    "tests/runtime/tangents", "tests/runtime/torch/test_derivatives.py", "tests/runtime/jax/test_derivatives_jax.py",
    "tests/runtime/invariant/test_invariant_rows.py", "tests/runtime/invariant/test_invariant_jax.py",
]  # fmt: skip
ALL = [*LANGUAGE, *FRAMEWORKS]
INTEGRATIONS = "tests/runtime/integrations/test_"
FLAX = [f"{INTEGRATIONS}flax_layer.py", f"{INTEGRATIONS}flax_attention.py", "tests/runtime/modeling/test_modeling.py"]
TRANSFORMERS = [f"{INTEGRATIONS}transformers{x}.py" for x in ("", "_masks", "_models", "_paged")]
PLOT = ["tests/runtime/draw/test_draw_plot.py"]
# name: the Python, what is installed, and tests. JAX 0.10.0 asks for numpy 2, Python 3.13 for numpy 2.1, and
# continuous batching of transformers for psutil on a CPU.
ENVIRONMENTS = {
    "3.11, oldest, no framework": ("3.11", [*OLDEST, "numpy==1.26.0"], LANGUAGE),
    "3.11, oldest": ("3.11", [*OLDEST, "numpy==2.0.0", "torch==2.11.0", "jax==0.10.0", "triton==3.6.0"], ALL),
    "3.11, newest": ("3.11", NEWEST, ALL),
    "3.12, oldest": ("3.12", [*OLDEST, "numpy==2.0.0", "torch==2.11.0", "jax==0.10.0", "triton==3.6.0"], ALL),
    "3.12, newest": ("3.12", NEWEST, ALL),
    "3.13, oldest": ("3.13", [*OLDEST, "numpy==2.1.0", "torch==2.11.0", "jax==0.10.0", "triton==3.6.0"], ALL),
    "3.13, newest": ("3.13", NEWEST, ALL),
    "3.11, oldest plot": ("3.11", [*OLDEST, "numpy==1.26.0", "matplotlib==3.8.0"], PLOT),
    "3.11, oldest flax, quantized": (
        "3.11", [*OLDEST, "numpy==2.0.0", "torch==2.11.0", "jax==0.10.0", "flax==0.12.2", "qwix==0.1.8"], FLAX,
    ),
    "3.13, newest flax, quantized, transformers": (
        "3.13", [*NEWEST, "flax", "qwix", "transformers", "psutil"], [*FLAX, *TRANSFORMERS],
    ),
    "3.11, oldest transformers": (
        "3.11", [*OLDEST, "numpy==2.0.0", "torch==2.11.0", "transformers==5.19.0", "psutil"], TRANSFORMERS,
    ),
}  # fmt: skip
EXTRAS = ("matplotlib", "flax", "qwix", "transformers")
SHOWN = ("numpy", "torch", "jax", "triton", "lark", "rich", "platformdirs", "shtab", *EXTRAS)


def interpreter(version: str) -> str | None:
    """A Python of this version; None where there is none. pyenv puts programs on the PATH that only say they fail."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    named = [found] if (found := shutil.which(f"python{version}")) else []
    runs = (x for x in [*named, *map(str, pyenv)] if not subprocess.run([x, "-c", ""], capture_output=True).returncode)
    return next(runs, None)


def run(name: str, python: str, files: list[str]) -> dict[str, object]:
    """The slice in an environment: versions, counts of outcomes, the names of what failed."""
    wanted = (
        f"import importlib.metadata as m, json, platform; v = {{}}\nfor n in {SHOWN!r}:\n try: v[n] = m.version(n)\n"
    )
    wanted += " except m.PackageNotFoundError: pass\nprint(json.dumps({'python': platform.python_version(), **v}))"
    versions = json.loads(subprocess.run([python, "-c", wanted], capture_output=True, text=True, check=True).stdout)
    start = time.monotonic()
    path = os.pathsep.join(
        [str(ROOT / "benchmarks" / "uninstalled"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
    )  # fmt: skip
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode not in (0, 1) or not counts:
        failed.append((done.stdout + done.stderr)[-400:])
    print(name, versions, counts, *failed[:20], sep="\n  ", flush=True)
    return {"versions": versions, **counts, "failures": failed, "seconds": round(time.monotonic() - start)}


def environment(name: str) -> dict[str, object]:
    """Makes an environment, runs its slice and deletes it; `why` says what was missing where it cannot be made."""
    version, packages, files = ENVIRONMENTS[name]
    python = interpreter(version)
    if python is None:
        return {"why": f"no Python {version} here"}
    with tempfile.TemporaryDirectory(prefix="frisket-versions-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = f"{folder}/bin/python"
        done = subprocess.run([inside, "-m", "pip", "install", "-q", *packages, *TOOLS], capture_output=True, text=True)
        if done.returncode:
            return {"why": done.stderr.strip()[-400:]}
        return run(name, inside, files)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="environments; all of them unless named")
    options.add_argument("--list", action="store_true", help="print the environments")
    options.add_argument("--python", help="of an environment that is there, for the one NAME")
    arguments = options.parse_args()
    if arguments.list:
        raise SystemExit("\n".join(f"{n}: {' '.join(p)}" for n, (_, p, _) in ENVIRONMENTS.items()))
    for name in arguments.names or ENVIRONMENTS:
        result = run(name, arguments.python, ENVIRONMENTS[name][2]) if arguments.python else environment(name)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = {"date": str(datetime.date.today()), **result}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
