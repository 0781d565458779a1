"""`frisket doctor`: what is installed, what runs here, why the rest does not, and what to install for it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

import frisket
from frisket.grammar.memo import Info, tables
from frisket.runtime.attention import entry as _entry  # noqa: F401 (the tables of a call are listed too)
from frisket.runtime.backends.base import LIBRARY, RECORDS, offered
from frisket.runtime.backends.engines.proof import CHECKED, COSTS
from frisket.runtime.backends.registry import backends, choose, ready_text
from frisket.runtime.bench.race import cpu_name, installed
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine import cpp_cpu as native_cpu
from frisket.runtime.machine.extras import pip_install
from frisket.runtime.machine.settings import VARIABLES, Settings, cache_folder
from frisket.runtime.masks.mask import mask

from .answer import GOOD, SOME, AnswerRow, CommandResult, Piece, examples, row, table
from .show import counted, size

PACKAGES = {  # what each is for, and the extra that brings it
    "numpy": ("", ""),
    "torch": ("tensors of torch", "torch"),
    "jax": ("arrays of JAX", "jax"),
    "triton": ("kernels for GPUs", "triton"),
    "jax-triton": ("Triton kernels on arrays of JAX", "jax-gpu"),
    "matplotlib": ("frisket plot, in .png and .svg", "plot"),
    "flax": ("frisket.integrations.flax", "flax"),
    "transformers": ("frisket.integrations.transformers", "transformers"),
    "qwix": ("dot products of few bits", "quantized"),
}
NAMES = 20  # columns that they take


def add_doctor(p: argparse.ArgumentParser) -> None:
    p.add_argument("--caches", action="store_true", help="list the tables of remembered answers after one mask")
    examples(p, "frisket doctor", "frisket doctor --json", "frisket doctor --caches")


def doctor(args: argparse.Namespace, console: Console) -> CommandResult:
    """Versions, the machine, the backends, what native kernels are built with, caches, settings."""
    if args.caches:
        return remembered()
    versions = {"frisket": frisket.__version__} | {name: version(name) for name in PACKAGES}
    missing = backends()
    ready = {name: why or ready_text(name) for name, why in missing.items()}
    settings = {v.name: os.environ[v.name] for v in VARIABLES if v.name in os.environ}
    where = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", "cpus": cpus()}
    built, folders, calls = native(), caches(), usual()
    data = {
        **where, "cpu": cpu_name(), "native": built, "packages": versions, "backends": ready,
        "engines": engines(), "calls": calls, "caches": folders, "settings": settings,
    }  # fmt: skip
    files = {folder: f"{counted(usage['files'], 'file')}, {size(usage['bytes'])}" for folder, usage in folders.items()}
    text: list[Piece] = [
        row("frisket", f"{versions['frisket']}, Python {where['python']}"),
        row("machine", f"{where['system']}, {cpu_count()}, {cpu_name()}"),
        marks("packages", ((name, package(name, versions[name]), bool(versions[name])) for name in PACKAGES)),
        marks("backends", ((n, why or f"{ready[n]}: {RECORDS[n].kernels}", not why) for n, why in missing.items())),
        row("engines", "\n".join(f"{name:{NAMES}} {x}" for name, x in engines().items()), NAMES + 1),
        row("calls", "\n".join(f"on the CPU, arrays of {name} run on {backend}" for name, backend in calls.items())),
        row("native", "\n".join(f"{name:{NAMES}} {x}" for name, x in built.items()), NAMES + 1),
        row("caches", "\n".join(f"{folder}: {usage}" for folder, usage in files.items()) or "nothing is kept yet"),
        row("settings", "\n".join(f"{v.name:{NAMES}} {settings.get(v.name, 'not set')}" for v in VARIABLES), NAMES + 1),
    ]
    if not installed():
        text.append(Text(f"neither torch nor JAX is installed: {pip_install('torch')}, or with [jax]", SOME))
    return CommandResult(data, text)


def marks(name: str, entries: Iterable[tuple[str, str, bool]]) -> AnswerRow:
    """A mark, a name and what is to say of it, a line each."""
    lines = (
        Text.assemble(("✓" if good else "✗", GOOD if good else SOME), f" {one:{NAMES - 2}} {text}")
        for one, text, good in entries
    )
    return row(name, Text("\n").join(lines), NAMES + 1)


def package(name: str, release: str | None) -> str:
    what, extra = PACKAGES[name]
    if release:
        return release
    return f"not installed; for {what}: {pip_install(extra) if extra else f'pip install {name}'}"


def engines() -> dict[str, str]:
    """Whether each kernel of a vendor takes calls by itself, where it provably computes them and is faster."""
    faster = {(row.engine, row.platform) for row in COSTS}
    where = {
        b.name: [p for p in CHECKED.get(b.name, ()) if (b.name, p) in faster] for b in RECORDS.values() if b.is_engine
    }
    others = {n: f"where it is named: engines={n!r}" if n in offered() else f"backend={n!r} alone" for n in where}
    return {
        n: " ".join(["by itself on", " and ".join(map(str.upper, x)), "and"] * bool(x) + [others[n]])
        for n, x in where.items()
    }


def usual() -> dict[str, str]:
    """The backend of a call on the CPU that names none."""
    return {framework: choose(None, framework, "cpu") for framework in installed()}


def caches() -> dict[str, dict[str, int]]:
    """Folders of generated kernels, how many files and bytes they hold."""
    folders = [*sorted(cache_folder().glob("*/")), *native_build.directories()[1:]]
    contents = {str(folder): [f.stat().st_size for f in folder.rglob("*") if f.is_file()] for folder in folders}
    return {folder: {"files": len(sizes), "bytes": sum(sizes)} for folder, sizes in contents.items() if sizes}


def native() -> dict[str, Any]:
    """The compiler of the C++ kernels and the folder of their libraries; the reason where they are not used."""
    if why := native_build.reason():
        return {"off": why}
    off = {"off": f"FRISKET_BACKEND is {LIBRARY}"} if Settings.read().backend == LIBRARY else {}
    command, folder = native_build.compiler(), native_build.writable()
    assert command is not None  # else there is a reason
    preferred = native_build.directories()[0]
    cache = "kernels are kept nowhere" if folder is None else f"{folder}, {len(list(folder.glob('*.so')))} kernels"
    if folder not in (None, preferred):
        cache += f"; {preferred} cannot be written to"
    return off | {
        "compiler": f"{' '.join(command)}: {native_build.compiler_version(command)}",
        "cpu": native_cpu.best(), "cache": cache,
    }  # fmt: skip


def version(name: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_count() -> str:
    return f"{cpus()} CPU{'s' if cpus() != 1 else ''}"


EXAMPLE = "causal & window(256)"


def remembered() -> CommandResult:
    """The contents of this process's tables after a mask was laid out; tables of one name count as one."""
    _ = mask(EXAMPLE).layout(1024, 1024).facts
    totals: dict[str, Info] = {}
    for t in tables():
        first = totals.get(t.name, Info(t.name, 0, 0, 0, 0, 0))
        totals[t.name] = Info(t.name, *(a + b for a, b in zip(first[1:], t[1:], strict=True)))
    lines = [
        (t.name, f"{t.entries:,}", f"{t.bound:,}", size(t.bytes), f"{t.hits:,}", f"{t.misses:,}")
        for t in totals.values()
    ]
    header = [tuple(name if name != "bound" else "at most" for name in Info._fields)]
    data = {"after": EXAMPLE, "tables": [t._asdict() for t in totals.values()]}
    return CommandResult(data, table([*header, *lines], right=range(1, 6)))
