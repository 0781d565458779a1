"""A CUDA graph without a GPU, for processes that interpret Triton: what runs between `record` and its end is noted by
the memory that it reads and writes, and `replay` runs it again from the contents of that memory at that time.

Kernels do not run while they are recorded, as on a GPU, and what a GPU cannot record is an error. Tensors from before
are referred to as a graph refers to them: not at all. A replay that reads one that is gone fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy as np
import torch
from support.lowering.device_tables import NoWait
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import InterpretedFunction

from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.plans import run as flat_triton
from frisket.runtime.torch import op as torch_op
from frisket.runtime.torch import ready

UPLOADING = (triton_launch, flat_triton, torch_op)


class Operators(NoWait):
    """Notes what memory operators of torch make, and, while a graph is recorded, the operators."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.graph.recording:
            results = func(*args, **(kwargs or {}))
        elif "lift_fresh" in str(func):
            raise AssertionError(f"{func} copies from the host")
        else:
            results = super().__torch_dispatch__(func, types, args, kwargs)
        read = {_storage(x) for x in _tensors((args, kwargs))}
        new = [x for x in _tensors(results) if _storage(x) not in read]
        self.graph.made += [ref(x.untyped_storage()) for x in new]
        if self.graph.recording:
            self.graph.pool |= {_storage(x): x for x in new}
            if func._schema.is_mutable or new:
                self.graph.note("operator", func, args, kwargs or {}, new)
        return results


class Graph:
    """`with graph.warm_up(): run()`, then `with graph.record(): run()`, then `graph.replay()` as often as wanted."""

    def __init__(self, patch: Any) -> None:
        self.steps: list[Any] = []
        self.pool: dict[int, torch.Tensor] = {}  # by address: memory of the graph
        self.made: list[Any] = []  # references to storages that operators made
        self.recording = False
        patch.setattr(triton_launch, "capturing", lambda device: self.recording)
        patch.setattr(ready, "capturing", lambda device: self.recording)
        for module in UPLOADING:
            patch.setattr(module, "uploaded", self.uploaded)
        run = InterpretedFunction.run

        def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
            if self.recording:
                return self.note("kernel", lambda *a, **b: run(kernel, *a, grid=grid, warmup=warmup, **b), args, more)
            return run(kernel, *args, grid=grid, warmup=warmup, **more)

        patch.setattr(InterpretedFunction, "run", launched)

    def uploaded(self, x: Any, device: Any) -> torch.Tensor:
        """A copy of the host's array, which is no memory of the graph."""
        assert not self.recording, "a captured graph cannot copy from the host"
        return torch.from_numpy(np.array(x))

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        with Operators(self), torch.no_grad():
            yield

    @contextmanager
    def record(self) -> Iterator[None]:
        self.recording = True
        try:
            with self.warm_up():
                yield
        finally:
            self.recording = False

    def note(self, kind: str, run: Any, args: Any, more: Any, new: Any = ()) -> None:
        self.steps.append((kind, run, *tree_map_only(torch.Tensor, self._place, (args, more)), new))

    def _place(self, x: torch.Tensor) -> Any:
        return x if _storage(x) in self.pool else Outside(x)

    def replay(self) -> None:
        for kind, run, args, more, new in self.steps:
            args, more = tree_map_only(Outside, Outside.tensor, (args, more))
            results = run(*args, **more)
            if kind == "operator":
                for old, x in zip(new, [y for y in _tensors(results) if not _aliases(y, args)], strict=True):
                    old.copy_(x)

    def left(self, *results: Any) -> list[Any]:
        """The memory that operators made and that is alive, besides that of results."""
        self.steps.clear()
        self.pool.clear()
        gc.collect()
        known = {_storage(x) for x in _tensors(results)}
        return [s for x in self.made if (s := x()) is not None and s.data_ptr() not in known]


class Outside:
    """A tensor that is no memory of the graph."""

    def __init__(self, x: torch.Tensor) -> None:
        self.storage, self.dtype = ref(x.untyped_storage()), x.dtype
        self.lies = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> torch.Tensor:
        storage = self.storage()
        assert storage is not None, "a replay reads memory that is free"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.lies)


def _tensors(x: Any) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, seen.append, x)
    return seen


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _aliases(x: torch.Tensor, args: Any) -> bool:
    return _storage(x) in {_storage(y) for y in _tensors(args)}
