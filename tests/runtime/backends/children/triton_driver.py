"""Triton on a machine without a GPU up to the driver: kernels are compiled for an H100, chosen, bound and launched by
Triton's own code, and the functions of the CUDA driver note what they are given. For processes that do not interpret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from frisket.runtime.backends.triton import launch as triton_launch

SHARED = 232_448  # bytes of shared memory that a block of an H100 may have
STREAM = 7
LATER = not hasattr(nvidia, "make_launcher")  # Triton 3.9 hands a launcher to the driver, 3.6 writes one in C


@dataclass(frozen=True)
class Map:
    """A tensor map as the driver is asked for it: an address, the way it lies in shared memory, and a block."""

    place: int
    swizzle: int
    bytes: int  # of an element
    type: int
    block: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: int


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel's name, its grid, the warps of a block, and what the driver is given for each parameter.
    A tensor descriptor is a map, the shape and the strides."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    warps: int
    arguments: tuple[Any, ...]

    @property
    def maps(self) -> list[Map]:
        return [x for x in self.arguments if isinstance(x, Map)]


launched: list[Launched] = []
compiled: list[str] = []  # the names of kernels, one for every compilation
_binaries: list[str] = []  # names of kernels by their handles


def _load(name: str, *_: Any) -> tuple[int, int, int, int, int]:
    """(module, function, registers, spills, threads) of a binary."""
    _binaries.append(name)
    return 1, len(_binaries) - 1, 128, 0, 1024


def _launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
    packed = rest[2] if LATER else rest[4]
    arguments = rest[-1] if LATER else rest[8:]
    launched.append(Launched(_binaries[function], (x, y, z), stream, packed[0], tuple(arguments)))


def _map(place: int, swizzle: int, size: int, type: int, block: Any, shape: Any, strides: Any, padding: int) -> Map:
    return Map(place, swizzle, size, type, tuple(block), tuple(shape), tuple(strides), padding)


def install() -> None:
    """From here on kernels are compiled and launched as on an H100, from tensors of the CPU, too."""
    utils = SimpleNamespace(
        launch=_launch, load_binary=_load, unload_module=lambda module: None, fill_tma_descriptor=_map,
        fill_tma_descriptor_tiled=_map, build_signature_metadata=lambda signature: signature,
        get_device_properties=lambda device: {"max_shared_mem": SHARED, "multiprocessor_count": 132},
    )  # fmt: skip
    if LATER:
        nvidia.PyKernelArg = SimpleNamespace
    else:
        nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=_launch)
        nvidia.library_dirs = list
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: STREAM, utils=utils,
            get_current_target=lambda: GPUTarget("cuda", 90, 32), launcher_cls=nvidia.CudaLauncher,
        )
    )  # fmt: skip
    triton.compiler.compile = _noted(triton.compiler.compile)
    triton_launch.runs_here = lambda kernel, device: None


def _noted(compile: Callable[..., Any]) -> Callable[..., Any]:
    def run(src: Any, *rest: Any, **more: Any) -> Any:
        compiled.append(src.name)
        return compile(src, *rest, **more)

    return run
