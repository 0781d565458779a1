"""What type checkers are shown as use of the public names runs (`tests/typecheck.py` has them read it)."""

import importlib.util
from pathlib import Path
from types import ModuleType

TYPES = Path(__file__).resolve().parents[1] / "types"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TYPES / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_typed_example_without_frameworks_runs(tmp_path):
    module("understand").main(tmp_path)


def test_arrays_of_torch_and_jax():
    module("attend").main()
