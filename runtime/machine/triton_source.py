"""Loads the text of a Triton module as kernels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

from frisket.dsl.errors import BackendError

from .cpp_build import kernel_step, ours, put, sweep, writable


def load(source: str) -> ModuleType:
    """The module of a generated source, imported from its file in the cache."""
    path = write(source)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # Not the import system: its bytecode cache goes by time and size, and here only the text counts.
    exec(compile(source, str(path), "exec"), module.__dict__)
    kernel_step.set("built")  # Triton compiles it at its first launch
    return module


def write(source: str) -> Path:
    """The file that holds `source`, named by its hash; rewritten unless it holds just that. Triton and
    tracebacks read it."""
    folder = writable("triton")
    if folder is None:
        raise BackendError(
            "there is no folder for Triton kernels that others cannot write to\n  set FRISKET_CACHE_DIR to another"
        )
    data = source.encode()
    path = folder / f"attention_{hashlib.sha256(data).hexdigest()[:20]}.py"
    if not (ours(path) and path.read_bytes() == data):
        put(path, data)
        sweep(folder)
    return path
