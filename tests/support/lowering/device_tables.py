"""Tensors of the host that pass for tensors of a GPU, and a guard against looking at their values."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from frisket.runtime.attention import entry
from frisket.runtime.calls import arrays as call_arrays
from frisket.runtime.plans import device as flat_plan
from frisket.runtime.plans import run as flat_triton
from frisket.runtime.torch import decode as torch_decode
from frisket.runtime.torch import op as torch_op

LOOKS = "item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__ is_nonzero equal __contains__".split()
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


def pose(patch: Any) -> None:
    """Tables given to calls and plans are planned where they are, by Triton; `patch` is pytest's monkeypatch."""
    patch.setenv("FRISKET_BACKEND", "triton")
    patch.setattr(flat_triton, "runs", lambda device: True)
    patch.setattr(flat_plan, "_stays", lambda x, *more: isinstance(x, torch.Tensor))
    patch.setattr(flat_plan, "on_host", lambda x: False)
    patch.setattr(torch_op, "_on_accelerator", lambda x, device: isinstance(x, torch.Tensor))


class NoLook(TorchFunctionMode):
    """Refuses what reads a value in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in LOOKS:
            raise AssertionError(f"{name} looks at a value of the device")
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Sees the operators of calls as they are without anybody who watches: under a mode of torch's dispatcher, a call
    of attention is one operator."""

    WATCHED = (call_arrays, entry, torch_decode)

    def __enter__(self) -> Any:
        self.kept = [(module, module.in_graph) for module in self.WATCHED]
        for module, _ in self.kept:
            module.in_graph = lambda *arrays: False
        return super().__enter__()

    def __exit__(self, *raised: Any) -> Any:
        for module, in_graph in self.kept:
            module.in_graph = in_graph
        return super().__exit__(*raised)


class NoWait(Watch):
    """Refuses operators that wait for a device or copy between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in WAITS):
            raise AssertionError(f"{name} waits for the device")
        if "_to_copy" in name and (kwargs or {}).get("device") is not None:
            raise AssertionError(f"{name} moves a tensor")
        return func(*args, **(kwargs or {}))
