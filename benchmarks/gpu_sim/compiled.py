"""Kernels compiled ahead of time, with what they take of an SM, kept on disk so that nothing is compiled twice.

The key of an entry is all that the compiler reads: the kernel's text, its constants and options, the architecture, and
the version of Triton. Entries lie in `build/gpu-model`, or in the folder that FRISKET_GPU_MODEL_CACHE names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import sass

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture: registers a thread, `stack` in bytes a thread, which are spills, `shared` in
    bytes a block, `tma_bytes` of one TMA copy, the disassembler's text, or the assembly of AMD's compiler, and the
    stages of its pipeline."""

    kernel: str
    arch: str
    triton: str
    warps: int
    registers: int
    stack: int
    shared: int
    tma_bytes: float
    text: str
    stages: int = 2

    @property
    def ahead(self) -> int:
        """The repetitions of a loop between a copy by TMA and the wait for it."""
        return max(1, self.stages - 1) if self.tma_bytes else 1

    @cached_property
    def sass(self) -> sass.Sass:
        return next(x for x in sass.parse(self.text) if x.name == self.kernel)

    @property
    def digest(self) -> str:
        ahead = f" {self.ahead}" if self.ahead > 1 else ""
        return hashlib.sha256(f"{self.text} {self.tma_bytes}{ahead}".encode()).hexdigest()[:20]


def folder() -> Path:
    """Where entries are kept."""
    found = Path(os.environ.get("FRISKET_GPU_MODEL_CACHE") or ROOT / "build" / "gpu-model")
    found.mkdir(parents=True, exist_ok=True)
    return found


def remembered(key: Any, make: Callable[[], Any]) -> Any:
    """The result of `make()`, which JSON can hold: read from the disk where an entry has this key."""
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    path = folder() / name[:2] / f"{name}.json.z"
    if path.exists():
        return json.loads(zlib.decompress(path.read_bytes()))
    found = make()
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(json.dumps(found).encode(), 6))
    os.replace(file.name, path)
    return found


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def kept(kernel: str, arch: str, warps: int, key: Any, compile: Callable[[], Any]) -> Compiled:
    """The kernel that `compile()` makes, a call of `triton.compile`; `key` is all that its result depends on."""

    def make() -> dict[str, Any]:
        return asdict(_read(kernel, arch, warps, compile()))

    form = "compiled 3" if arch.startswith("gfx") else "compiled 2"  # with the assembly of AMD's compiler
    return Compiled(**remembered((form, kernel, arch, warps, triton_version(), key), make))


def _read(kernel: str, arch: str, warps: int, found: Any) -> Compiled:
    shared, version = int(found.metadata.shared), triton_version()
    warps = int(getattr(found.metadata, "num_warps", warps))
    if "cubin" not in found.asm:
        text = found.asm["amdgcn"]
        registers, stack = (int(re.findall(rf"\.{n}:\s+(\d+)", text)[0]) for n in (
            "vgpr_count", "private_segment_fixed_size"))  # fmt: skip
        return Compiled(kernel, arch, version, warps, registers, stack, shared, 0.0, text)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        registers, stack = resources(Path(file.name))
        text = disassembled(Path(file.name))
    return Compiled(kernel, arch, version, warps, registers, stack, shared, tma_bytes(found.asm.get("ptx", "")), text)


def tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def disassembled(cubin: Path) -> str:
    """What nvdisasm prints of a cubin, with encodings."""
    done = subprocess.run([tool("nvdisasm"), "-c", "-hex", str(cubin)], capture_output=True, text=True, check=True)
    return done.stdout


def resources(cubin: Path) -> tuple[int, int]:
    """(registers of a thread, bytes of stack) of a cubin's largest kernel."""
    done = subprocess.run([tool("cuobjdump"), "-res-usage", str(cubin)], capture_output=True, text=True, check=True)
    found = re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return max(int(r) for r, _ in found), max(int(s) for _, s in found)


def tma_bytes(ptx: str) -> float:
    """The bytes of a TMA load in a loop: those that the last barrier of the text expects, over the loads that bring
    them. Loads of the program's own tile, of another size, stand before the loops."""
    found = re.split(r"expect_tx\S*\s+(?:_, )?\[[^\]]+\], (\d+);", ptx)
    copies = len(re.findall(r"cp\.async\.bulk\.tensor\.\w+\.shared", found[-1]))
    return int(found[-2]) / copies if len(found) > 1 and copies else 0.0
