"""Loads the text of a Triton module as kernels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

from frisket.runtime.machine.cpp_build import put, sweep
from frisket.runtime.machine.settings import cache_folder


def load(source: str) -> ModuleType:
    """The module of a generated source, imported from its file in the cache."""
    path = write(source)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # Not the import system: its bytecode cache goes by time and size, and here only the text counts.
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def write(source: str) -> Path:
    """The file that holds `source`, named by its hash; rewritten unless it holds just that. Triton and
    tracebacks read it."""
    folder = cache_folder() / "triton"
    data = source.encode()
    path = folder / f"attention_{hashlib.sha256(data).hexdigest()[:20]}.py"
    if not (path.is_file() and path.read_bytes() == data):
        folder.mkdir(parents=True, exist_ok=True)
        put(path, data)
        sweep(folder)
    return path
