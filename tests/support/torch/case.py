"""One torch callable of the table: the function as people write it, and the same in the language."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Case:
    """`text` is the same mask or score mod in the language (None where only a callable is published), and `bind`
    its parameters, as numpy."""

    name: str
    fn: Any
    text: str | None = None
    bind: dict[str, Any] = field(default_factory=dict)
    q_len: int = 24
    kv_len: int = 24
    batch: int = 2
    heads: int = 4
    maps: bool = True  # torch.vmap takes it; else it is called on tensors that broadcast

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.kv_len


def bound(**tensors: Any) -> dict[str, Any]:
    """Tensors as what a text takes: numpy arrays and Python numbers."""
    arrays = {n: t.detach().numpy() if hasattr(t, "detach") else np.asarray(t) for n, t in tensors.items()}
    return {n: a.item() if a.ndim == 0 else a for n, a in arrays.items()}
