"""What runs here: `frisket doctor` says which backends do and why the rest does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil

from rich.console import Console

from .backends import HOW, backends
from .cli_answer import Answer, rows
from .packed import installed
from .settings import VARIABLES

PACKAGES = ("frisket", "numpy", "lark", "rich", "platformdirs", "torch", "jax", "triton", "matplotlib")


def doctor(args: argparse.Namespace, console: Console) -> Answer:
    """Versions, the machine, the backends, the settings in the environment."""
    versions = {name: version(name) for name in PACKAGES}
    ready = {name: why or "runs here" + HOW.get(name, "") for name, why in backends().items()}
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    given = {v.name: os.environ[v.name] for v in VARIABLES if v.name in os.environ}
    where = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", "cpus": cpus()}
    data = {**where, "compiler": compiler, "packages": versions, "backends": ready, "settings": given}
    machine = f"{where['system']}, {cpu_count()}, C++ compiler: {compiler or 'none'}"
    text = rows([
        ("python", f"{where['python']}"), ("machine", machine),
        ("packages", "\n".join(f"{name:18} {v or 'not installed'}" for name, v in versions.items())),
        ("backends", "\n".join(f"{name:18} {why}" for name, why in ready.items())),
        ("settings", "\n".join(f"{v.name:18} {given.get(v.name, 'not set')}" for v in VARIABLES)),
    ])  # fmt: skip
    if not installed():
        text.append("neither torch nor JAX is installed: pip install 'frisket[torch]' or 'frisket[jax]'")
    return Answer(data, text)


def version(name: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpus() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_count() -> str:
    return f"{cpus()} CPU{'s' if cpus() != 1 else ''}"
