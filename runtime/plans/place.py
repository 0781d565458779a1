"""SpanRequest: the arguments of a planner beside its tables, and arrays on a device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.lowering.plan import Sizes
from frisket.lowering.planner.planner import ROOM, Planner
from frisket.runtime.calls.arrays import uploaded


@dataclass(frozen=True)
class SpanRequest:
    """The arguments of a planner beside the tables: lengths, tiles, and where each slice begins."""

    at: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]  # b, h, q, k of [slices] where a slice begins
    q_len: int
    kv_len: int
    block: tuple[int, int]  # tokens of a tile: queries, keys
    sizes: Sizes  # of the whole problem
    device: Any = None
    held: dict[Any, Any] = field(default_factory=dict)  # the host's arrays, copied to devices
    ranges: dict[Any, Any] = field(default_factory=dict)  # arrays that planners in Triton have made of the tables
    room: int = ROOM  # pieces of a row of tiles that are held at once
    records: int = 0  # of a row; 0: as many as the mask says, or RECORDS

    @property
    def transposed(self) -> SpanRequest:
        (b, h, q, k), (bq, bk) = self.at, self.block
        return replace(self, at=(b, h, k, q), q_len=self.kv_len, kv_len=self.q_len, block=(bk, bq))

    def most(self, plan: Planner) -> int:
        """Records of a row."""
        return self.records or plan.records(-(-self.kv_len // self.block[1]))


def on_device(framework: str, x: Any, device: Any, name: Any, copies: dict[Any, Any]) -> Any:
    """An array of the framework; the host's are copied to a GPU once, which a captured graph could not do."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    if not isinstance(x, np.ndarray):  # torch compares no unsigned numbers but bytes
        return x.long() if str(x.dtype).startswith(("torch.uint16", "torch.uint32", "torch.uint64")) else x
    if device is None or device.type == "cpu":
        return torch.from_numpy(np.array(x))
    key = name, x.dtype, device
    if key not in copies:
        copies[key] = uploaded(x, device)
    return copies[key]
