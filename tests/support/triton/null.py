"""Triton on a machine without a GPU up to the launch: arguments are bound and kernels chosen as on an H200, what is
compiled is counted, and nothing runs. For processes that do not interpret (no TRITON_INTERPRET)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from frisket.runtime.backends.triton import launch as triton_launch

compiled: list[str] = []  # the names of kernels, one for every compilation
launched: list[tuple[Any, tuple[int, ...], int, tuple[Any, ...]]] = []  # kernel, grid, stream, arguments if `watching`
stream = 0  # the current one
watching = False


class _Kernel(CompiledKernel):
    """What Triton's compiler gives, with a launcher that does nothing."""

    def __init__(self, src: Any, options: Any = None) -> None:
        self.src, self.name, self.options = src, src.name, options
        self.function, self.packed_metadata, self.module = 0, b"", None
        self._run = self._launched if watching else _nothing

    def _init_handles(self) -> None:
        pass

    def _launched(self, x: int, y: int, z: int, *rest: Any) -> None:
        launched.append((self, (x, y, z), rest[0], rest[6:]))


def _nothing(*arguments: Any) -> None:
    return None


def _compile(src: Any, target: Any = None, options: Any = None, **more: Any) -> _Kernel:
    compiled.append(src.name)
    return _Kernel(src, options)


def install(watch: bool = False) -> None:
    """From here on kernels are launched into nothing, from tensors of the CPU, too."""
    global watching
    watching = watch
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: stream,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )  # fmt: skip
    triton.compiler.compile = _compile
    triton_launch.runs_here = lambda kernel, device: None
