"""What runs here: `frisket doctor` says which backends do and why the rest does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from rich.console import Console

from . import native_build, native_cpu
from .backends import HOW, backends
from .cli_answer import Answer, rows
from .packed import installed
from .settings import VARIABLES, Settings

PACKAGES = ("frisket", "numpy", "lark", "rich", "platformdirs", "torch", "jax", "triton", "matplotlib")


def doctor(args: argparse.Namespace, console: Console) -> Answer:
    """Versions, the machine, the backends, what native kernels are built with, the settings in the environment."""
    versions = {name: version(name) for name in PACKAGES}
    ready = {name: why or "runs here" + HOW.get(name, "") for name, why in backends().items()}
    given = {v.name: os.environ[v.name] for v in VARIABLES if v.name in os.environ}
    where = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", "cpus": cpus()}
    built = native()
    data = {**where, "native": built, "packages": versions, "backends": ready, "settings": given}
    machine = f"{where['system']}, {cpu_count()}"
    text = rows([
        ("python", f"{where['python']}"), ("machine", machine),
        ("packages", "\n".join(f"{name:18} {v or 'not installed'}" for name, v in versions.items())),
        ("backends", "\n".join(f"{name:18} {why}" for name, why in ready.items())),
        ("native", "\n".join(f"{name:18} {x}" for name, x in built.items())),
        ("settings", "\n".join(f"{v.name:18} {given.get(v.name, 'not set')}" for v in VARIABLES)),
    ])  # fmt: skip
    if not installed():
        text.append("neither torch nor JAX is installed: pip install 'frisket[torch]' or 'frisket[jax]'")
    return Answer(data, text)


def native() -> dict[str, Any]:
    """What the C++ kernels are built with and where they are kept; the reason where they are not used."""
    if why := native_build.reason():
        return {"off": why}
    off = {"off": "FRISKET_BACKEND is library"} if Settings.read().backend == "library" else {}
    command, folder = native_build.compiler(), native_build.writable()
    assert command is not None  # else there is a reason
    wanted = native_build.directories()[0]
    kept = "kernels are kept nowhere" if folder is None else f"{folder}, {len(list(folder.glob('*.so')))} kernels"
    if folder not in (None, wanted):
        kept += f"; {wanted} cannot be written to"
    return off | {
        "compiler": f"{' '.join(command)}: {native_build.compiler_version(command)}",
        "cpu": native_cpu.best(), "cache": kept,
    }  # fmt: skip


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
